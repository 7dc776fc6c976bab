"""Put before everything else on one node's path by the fault suite: the node then answers ``train`` with what LIE names.

LIE lists lies by commas: the first in round 1, the second in round 2, then the truth. ``late`` tells the truth too late, in round 2.
Nothing is imported before the node's own program does: Flower gives a process 30 seconds to report.
"""

import importlib.util
import os
import sys

LIES = os.environ.get("LIE", "").split(",")
TARGET = "emdcfl.engines.flower.node.serve"


def corrupt(serve):  # type: ignore[no-untyped-def]
    """Have the module that answers requests lie."""
    import time

    import torch

    honest, encode = serve.perform, serve.codec.encode

    def enlarged(content):  # type: ignore[no-untyped-def]
        record = encode({**content, "reply": {}})
        record["meta"]["skeleton"] = '{"m":{"client":"x","reply":{"l":[' + ",".join(["0"] * 3_000_000) + "]}}}"
        return record

    def perform(node, request):  # type: ignore[no-untyped-def]
        said = honest(node, request)
        if request["task"] != "train" or "reply" not in said:
            return said
        if LIES == ["late"]:
            if request["round"] == 2:
                time.sleep(float(os.environ["LATE"]))
            return said
        lie = dict(enumerate(LIES, start=1)).get(request["round"])
        theta = said["reply"]["theta"]
        if lie == "nan":
            said["reply"]["theta"] = torch.full_like(theta, torch.nan)
        elif lie == "shape":
            said["reply"]["theta"] = theta[:-1].clone()
        elif lie == "junk":
            said["reply"]["theta"] = torch.randint(0, 255, (100 << 20,), dtype=torch.uint8)
        elif lie == "name":
            said["client"] = "rot0-1"
        elif lie == "many":
            serve.codec.encode = enlarged
        return said

    serve.perform = perform


class Finder:
    """Finds the module as Python would, and corrupts it once it is loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            corrupt(module)

        spec.loader.exec_module = exec_module
        return spec


if LIES != [""]:
    sys.meta_path.insert(0, Finder())
