"""Bad inputs: config files, tables, images, folders, run directories and flags, each given to the command in a fork of this process.

A row for each says what it was, the exit code, and whether it was a crash: anything but success or an error in one line (in JSON, where
that was asked for).
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from faults.forked import Forked

LIMIT = 120.0
CHEAP = [
    "--set", "scenario.groups=2", "--set", "scenario.clients_per_group=1", "--set", "run.rounds=1", "--set", "training.local_epochs=1",
    "--set", "engine.device=cpu",
]  # fmt: skip
WORDS = [
    *("", "-1", "0", "1e400", "nan", "inf", "1e-400", "99999999999999999999", "none", "null", "true", "[]", "{}", "é", "\udcff"),
    "a" * 5000,
    *("/dev/null", "/proc/self/mem", "cuda:99", "--", "=", "a=b", "0-99999999", "a,b,,c", "1,2,x", "[[[[", "'", '"', "\t", "\n", "emdclf"),
    *("rotated-mnist", ".", "smoke"),
]
KEYS = [
    *("run.rounds", "run.seed", "run.participants", "method.tolerance", "method.name", "method.x", "training.lr", "training.batch_size"),
    *("engine.name", "engine.workers", "scenario.groups", "scenario.path", "model.name", "model.hidden", "engine.quorum"),
    "engine.precision",
    *("x.y", "run", ""),
]
FLAGS = {
    "run": [
        *("--method", "--rounds", "--local-epochs", "--batch-size", "--lr", "--seed", "--participants", "--scale", "--device", "--workers"),
        *("--engine", "--data", "--label", "--client", "--scenario", "--resume", "--federation"),
    ],
    "compare": ["--methods", "--seeds", "--scenario", "--merge", "--time-limit", "--jobs", "--scale"],
    "sweep": ["--ratios", "--epsilons", "--costs", "--solvers", "--reg", "--samples", "--seed"],
    "reproduce": ["--scale", "--seeds", "--jobs", "--device"],
    "report": ["--out", "--theory"],
    "predict": ["--client", "--json"],
    "place": ["--name", "--label", "--json"],
    "data": ["--label", "--client", "--json", "--scale", "--set"],
    "methods": ["--json"],
    "federation": ["--json", "--nodes"],
}

Case = tuple[str, list[str]]


def changed(content: bytes, rng: random.Random) -> bytes:
    """Return the content damaged in one of many ways."""
    how = rng.randrange(6)
    if how == 0:
        return content[: rng.randrange(len(content) + 1)]
    if how == 1:
        return rng.randbytes(rng.randrange(200))
    made = bytearray(content)
    for _ in range(1 + rng.randrange(6)):
        at = rng.randrange(len(made) + 1)
        piece = rng.randbytes(1 + rng.randrange(4)) if how < 4 else rng.choice(WORDS).encode(errors="surrogateescape")[:40]
        made[at : at + (len(piece) if how % 2 else 0)] = piece
    return bytes(made)


def config_file(rng: random.Random, place: Path) -> Case:
    from emdcfl.runs.config import Config, dump, template

    path = place / "config.toml"
    path.write_bytes(changed(rng.choice([template(), dump(Config())]).encode(), rng))
    return "config files", ["run", str(path), *CHEAP, "--out", str(place / "out"), "--quiet"]


def _table(rng: random.Random) -> str:
    rows = "".join(f"{i % 7},{i * 0.5},{'ab'[i % 2]},{'xyz'[i % 3]}\n" for i in range(rng.choice([0, 3, 40])))
    return f"a,b,word,label\n{rows}"


def table(rng: random.Random, place: Path) -> Case:
    folder = place / "tables"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.csv").write_text(_table(random.Random(1)), encoding="utf-8")
    suffix = rng.choice([".csv", ".tsv", ".parquet"])
    (folder / f"three{suffix}").write_bytes(changed(_table(rng).encode(), rng))
    flags = rng.choice([[], ["--label", "label"], ["--label", rng.choice(WORDS)]])
    return "tables", ["data", "check", str(folder), *flags]


def image(rng: random.Random, place: Path) -> Case:
    import numpy as np
    from PIL import Image

    for client in ("one", "two"):
        for name in ("cat", "dog"):
            folder = place / "pictures" / client / name
            folder.mkdir(parents=True)
            for i in range(6):
                Image.fromarray(np.full((8, 8), 40 * i, np.uint8)).save(folder / f"{i}.png")
    buffer = io.BytesIO()
    kind = rng.choice(["png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"])
    Image.fromarray(np.arange(300, dtype=np.uint16).astype(np.uint8).reshape(10, 10, 3)).save(buffer, kind)
    (place / "pictures" / "two" / "dog" / f"bad.{kind}").write_bytes(changed(buffer.getvalue(), rng))
    return "images", ["data", "check", str(place / "pictures")]


def folder(rng: random.Random, place: Path) -> Case:
    root = place / "folder"
    root.mkdir()
    for _ in range(rng.randrange(8)):
        names = rng.choices(["train", "val", "a", "b", "é", ".hidden", "x.csv", "y.png", "label", " "], k=1 + rng.randrange(4))
        path = root.joinpath(*names)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if rng.random() < 0.2:
                path.symlink_to(rng.choice(["nowhere", ".", str(place)]))
            elif rng.random() < 0.7:
                path.write_bytes(changed(_table(rng).encode(), rng))
        except OSError:
            continue
    given = root if rng.random() < 0.9 else root / rng.choice(["missing", "a", "x.csv"])
    arguments = ["data", "check", str(given)]
    if rng.random() < 0.3:
        arguments = ["run", "--data", str(given), "--rounds", "1", "--out", str(place / "o"), "--quiet"]
    return "folders", [*arguments, *rng.choice([[], ["--label", "label"], ["--client", "word"]])]


def run_directory(rng: random.Random, place: Path) -> Case:
    out = place / "run"
    for _ in range(rng.choice([1, 1, 1, 3])):
        victim = rng.choice(sorted(p for p in out.rglob("*") if p.is_file()))
        if rng.random() < 0.1:
            victim.unlink()
        else:
            victim.write_bytes(changed(victim.read_bytes(), rng))
    sample = place / "x.png"
    sample.write_bytes(b"")
    choices = [
        ["report", str(out)], ["run", "--resume", "--out", str(out), "-q"], ["predict", str(out), str(sample), "--client", "rot0-1"],
        ["compare", "--merge", str(out), "--out", str(place / "c")], ["place", str(out), str(place)],
    ]  # fmt: skip
    return "run directories", rng.choice(choices)


def flags(rng: random.Random, place: Path) -> Case:
    name = rng.choice(sorted(FLAGS))
    arguments = [name] + ([rng.choice(["check", "show", "list", "x"])] if name == "data" else [])
    arguments += ["status", "nowhere"] if name == "federation" else []
    for _ in range(rng.randrange(4)):
        flag = rng.choice(FLAGS[name])
        arguments += [flag] if flag in ("--resume", "--json", "--theory") else [flag, rng.choice(WORDS)]
    if name == "run":
        arguments += [*CHEAP, "--set", f"{rng.choice(KEYS)}={rng.choice(WORDS)}", "--out", str(place / "out"), "--quiet"]
    elif name in ("compare", "sweep", "reproduce"):
        arguments += ["--out", str(place / "out"), *(["--set", f"{rng.choice(KEYS)}={rng.choice(WORDS)}"] if name != "reproduce" else [])]
        arguments += {"compare": ["--time-limit", "0"], "sweep": ["--scenario", "nothing"], "reproduce": ["nothing"]}[name]
    elif name in ("report", "predict", "place"):
        arguments += [rng.choice(["nowhere", str(place), "/dev/null"])] + [rng.choice(WORDS)] * (name != "report")
    elif name == "data":
        arguments += [rng.choice(["nowhere", str(place), *WORDS[:12]])]
    return "flags", arguments


KINDS: list[Callable[[random.Random, Path], Case]] = [config_file, table, image, folder, run_directory, flags]


def attempt(index: int, seed: int, run: Path) -> dict[str, object]:
    """Try one input, where need be a damaged copy of a finished run, and say what came of it."""
    rng, make = random.Random(f"{seed} {index}"), KINDS[index % len(KINDS)]
    place = Path(tempfile.mkdtemp(prefix="bad-"))
    try:
        if make is run_directory:
            shutil.copytree(run, place / "run")
        what, arguments = make(rng, place)
        arguments = [argument.replace("\0", "") for argument in arguments]
        code, said = forked(arguments, place)
        crash = code not in (0, 2, -1) or "Traceback" in said or (code == 2 and not explained(said) and bool(arguments[1:]))
        row: dict[str, object] = {"what": what, "index": index, "code": code, "crash": crash, "slow": code == -1}
        return row | ({"arguments": arguments, "said": said[-600:]} if crash or code == -1 else {})
    finally:
        shutil.rmtree(place, ignore_errors=True)


def explained(said: str) -> bool:
    """Whether the command said what is wrong in one line, or, asked for JSON, in JSON."""
    if sum(line.startswith("error: ") for line in said.splitlines()) == 1:
        return True
    try:
        told = json.loads(said)
    except ValueError:
        return False
    return isinstance(told, dict) and bool(told.get("errors"))


def forked(arguments: list[str], place: Path) -> tuple[int, str]:
    """Run the command in a fork; -1 if it did not end in time (some bad inputs are merely large)."""
    log = place / ".said"
    command = Forked(arguments, log, place=place)
    try:
        code = command.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
        return -1, "not ended in time"
    return code, log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
