"""Put before everything else on one node's path by the fault suite: the node then answers ``train`` with what LIE names."""

import os

LIE = os.environ.get("LIE")

if LIE:
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
        return said

    serve.perform = perform
