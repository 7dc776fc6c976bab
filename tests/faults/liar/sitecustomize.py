"""Put before everything else on one node's path by the fault suite: the node is then another than it should be.

LIE lists what it answers to ``train``, by commas: the first lie in round 1, the second in round 2, then the truth. ``late`` tells the truth
too late, in round 2. SKEW is the seconds by which its clock is ahead, VERSION the version of emdcfl that it has. CUT is the number of the
answer of which the first part alone reaches the SuperLink.
Nothing is imported before the node's own program does: Flower gives a process 30 seconds to report.
"""

import importlib.util
import os
import sys
import time

LIES = os.environ.get("LIE", "").split(",")
SKEW = float(os.environ.get("SKEW", "0"))


def corrupt(serve):  # type: ignore[no-untyped-def]
    """Have the module that answers requests lie."""
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


def skew(date):  # type: ignore[no-untyped-def]
    """Have Flower's clock, with which a node signs its requests, be wrong."""
    from datetime import timedelta

    right = date.now
    date.now = lambda: right() + timedelta(seconds=SKEW)


def cut(node):  # type: ignore[no-untyped-def]
    """Have the module that sends answers lose the rest of one."""
    honest, sent = node.push_object_contents_from_iterable, []

    def push(parts, push_object_fn):  # type: ignore[no-untyped-def]
        sent.append(1)
        if len(sent) == int(os.environ["CUT"]):
            push_object_fn(*next(iter(parts)))
            raise ConnectionError("cut off")
        honest(parts, push_object_fn=push_object_fn)

    node.push_object_contents_from_iterable = push


def rename(emdcfl):  # type: ignore[no-untyped-def]
    """Have another version of emdcfl."""
    emdcfl.__version__ = os.environ["VERSION"]


class Finder:
    """Finds a module as Python would, and changes it once it is loaded."""

    def __init__(self, target, change):  # type: ignore[no-untyped-def]
        self.target, self.change = target, change

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # python -m asks for the package before it imports it
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


if LIES != [""]:
    sys.meta_path.insert(0, Finder("emdcfl.engines.flower.node.serve", corrupt))
if "CUT" in os.environ:
    sys.meta_path.insert(0, Finder("flwr.supernode.start_client_internal", cut))
if "VERSION" in os.environ:
    sys.meta_path.insert(0, Finder("emdcfl", rename))
if SKEW:
    sys.meta_path.insert(0, Finder("flwr.supercore.date", skew))
    clock = time.time
    time.time = lambda: clock() + SKEW
