"""Put before everything else on one node's path by the fault suite: the node then answers ``train`` with what LIE names."""

import os

LIE = os.environ.get("LIE")

if LIE:
    import time

    import torch

    from emdcfl.engines.flower import serve

    honest = serve.perform

    def perform(node, request):  # type: ignore[no-untyped-def]
        said = honest(node, request)
        if request["task"] != "train" or "reply" not in said:
            return said
        theta = said["reply"]["theta"]
        if LIE == "nan":
            said["reply"]["theta"] = torch.full_like(theta, torch.nan)
        elif LIE == "shape":
            said["reply"]["theta"] = theta[:-1].clone()
        elif LIE == "junk":
            said["reply"]["theta"] = torch.randint(0, 255, (100 << 20,), dtype=torch.uint8)
        elif LIE == "name":
            said["client"] = "rot0-1"
        elif LIE == "late" and request["round"] == 2:
            time.sleep(float(os.environ["LATE"]))
        elif LIE == "many":
            encode = serve.codec.encode

            def enlarged(content):  # type: ignore[no-untyped-def]
                record = encode({**content, "reply": {}})
                record["meta"]["skeleton"] = '{"m":{"client":"x","reply":{"l":[' + ",".join(["0"] * 3_000_000) + "]}}}"
                return record

            serve.codec.encode = enlarged
        return said

    serve.perform = perform
