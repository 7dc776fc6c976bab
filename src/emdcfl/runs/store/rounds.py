"""What a round commits: its state, and how much of ``metrics.jsonl`` belongs to it.

The last two states are kept, each a JSON file with a checksum, over tensors stored by content. ``metrics.jsonl`` has a row per client and
tested round, and a copy in ``state/``. A round notes how many bytes of it were there and their checksum (``mark``). On resume the file
is cut back to them; where they do not fit, the copy is taken instead.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from emdcfl.core.codec import Packed, Rules, dtype_name, from_raw, on_host, pack, raw, unpack
from emdcfl.core.errors import StoreError
from emdcfl.runs.store import files

log = logging.getLogger("emdcfl")

KEEP = 2
"""Rounds on the disk; the older one is for a damaged newest."""

INLINE = 1024
"""Tensors of at most this many bytes are written into the JSON: a file each would cost more than it holds."""

State = TypeVar("State")
Mark = Mapping[str, Any]
"""How many bytes of the metrics belong to a round, and their checksum."""

RULES = Rules(entries=1 << 28, parts=1 << 28, name=1 << 16, depth=64, tuples=True, error=StoreError)


def pack_state(state: Any, extra: Mapping[str, Any]) -> Packed:
    """Take the fields of a state, and what belongs to it, apart. Later changes of its lists and dicts do not reach the result."""
    return pack({"state": {name: getattr(state, name) for name in _fields(type(state))}, "extra": dict(extra)}, RULES)


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


class Rounds:
    """The committed rounds in a folder: ``round-<t>.json`` and ``tensors/<sha256>.safetensors``.

    A tensor that did not change has the same address and is not written again. A round's JSON is written last: its appearance commits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole: set[str] = set()  # addresses of tensors that this process wrote or verified

    def save(self, round: int, packed: Packed, mark: Mark) -> None:
        """Commit what ``pack_state`` took apart, with the mark of the metrics. The last two rounds are kept."""
        tensors = [self._put(tensor) for tensor in packed.tensors]
        files.sync_folder(self.path / "tensors")
        blobs = [base64.b64encode(blob).decode() for blob in packed.blobs]
        body = {"round": round, "metrics": dict(mark), "value": packed.skeleton, "tensors": tensors, "blobs": blobs}
        path = self._round_path(round)
        text = files.json_text(body, str(path))
        files.write_file(path, [f'{{"{files.SEAL}":"{_checksum(text)}","body":{text}}}\n'.encode()])
        self.forget_others(round)

    def _put(self, tensor: Tensor) -> str | dict[str, Any]:
        """Return a small tensor as JSON, and the address of a large one, which is then on the disk."""
        plain = on_host(tensor)
        if plain.numel() * plain.element_size() <= INLINE:
            return {"dtype": dtype_name(plain), "shape": list(plain.shape), "data": base64.b64encode(raw(plain)).decode()}
        address = files.tensor_hash(plain)
        if address not in self._whole:
            files.write_tensors(self._tensor_path(address), {"tensor": plain}, sync=False)
            self._whole.add(address)
        return address

    def forget_others(self, newest: int) -> None:
        """Delete rounds other than the last two up to the newest, then the tensors that no kept round refers to."""
        numbers = self.numbers()
        kept = [round for round in numbers if round <= newest][-KEEP:]
        for round in set(numbers) - set(kept):
            files.remove(self._round_path(round))
        used: set[str] = set()
        for round in kept:
            with contextlib.suppress(StoreError):  # damaged: nobody can use its tensors any more
                used |= {entry for entry in self._body(round)["tensors"] if isinstance(entry, str)}
        for path in (self.path / "tensors").glob("*.safetensors"):
            if path.stem not in used:
                files.remove(path)
                self._whole.discard(path.stem)

    def load(self, cls: type[State]) -> tuple[int, State, dict[str, Any]] | None:
        """Return the last committed round, its state and the extra values; ``None`` if no round was committed yet.

        If the newest round is damaged, the one before it is taken, with a warning in the log.
        """
        damage: StoreError | None = None
        for round in reversed(self.numbers()):
            try:
                packed = self._packed(round)
            except StoreError as error:
                log.warning("%s; going back to the round before", error)
                damage = damage or error
                continue
            return round, *self._made(cls, unpack(packed, RULES), self._round_path(round))
        if damage is not None:
            raise StoreError(f"{damage}; no earlier round is left to go back to: start again with another --out") from damage
        return None

    def _made(self, cls: type[State], value: Any, path: Path) -> tuple[State, dict[str, Any]]:
        match value:
            case {"state": dict() as fields, "extra": dict() as extra}:
                differing = sorted(fields.keys() ^ set(_fields(cls)))
            case _:
                raise StoreError(f"{path}: not a state that emdcfl wrote")
        if differing:
            version = "resume with the version that started the run"
            raise StoreError(f"{path}: the saved state and {cls.__name__} differ in {', '.join(differing)}; {version}")
        try:
            return cls(**fields), extra
        except Exception as error:  # whatever the class makes of values that it never had
            raise StoreError(f"{path}: not the state of a {cls.__name__} ({type(error).__name__}: {error})") from error

    def mark(self, round: int) -> Mark:
        """Return what a round says of the metrics."""
        return dict(self._body(round)["metrics"])

    def numbers(self) -> list[int]:
        """Return the committed rounds, damaged or not, in order."""
        names = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.path.glob("round-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def _body(self, round: int) -> dict[str, Any]:
        path = self._round_path(round)
        content = files.read_json(path)
        if not isinstance(content, dict) or content.get(files.SEAL) != _checksum(files.json_text(content.get("body"), str(path))):
            raise StoreError(f"{path}: truncated or damaged (its checksum does not fit)")
        match content["body"]:
            case {"round": number, "metrics": {"bytes": int(), "sha256": str()}, "value": _, "tensors": list(), "blobs": list()}:
                if number == round:
                    return dict(content["body"])
        raise StoreError(f"{path}: not round {round} as emdcfl writes it")

    def _packed(self, round: int) -> Packed:
        body = self._body(round)
        fetched: dict[str, Tensor] = {}
        tensors: list[Tensor] = []
        try:
            for entry in body["tensors"]:
                if not isinstance(entry, str):
                    tensors.append(from_raw(base64.b64decode(entry["data"]), entry["dtype"], entry["shape"], StoreError))
                elif entry in fetched:
                    tensors.append(fetched[entry].clone())  # equal tensors share a file, but must not share memory
                else:
                    fetched[entry] = self._fetch(entry)
                    tensors.append(fetched[entry])
            return Packed(body["value"], tensors, [base64.b64decode(blob) for blob in body["blobs"]])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self._round_path(round)}: not a state that emdcfl wrote ({type(error).__name__}: {error})") from error

    def _fetch(self, address: str) -> Tensor:
        if not re.fullmatch(r"[0-9a-f]{64}", address):  # it becomes part of a path
            raise StoreError(f"{self.path}: not a state that emdcfl wrote (a tensor at {address[:80]!r})")
        path = self._tensor_path(address)
        tensors, _ = files.read_tensors(path)
        if list(tensors) != ["tensor"] or files.tensor_hash(tensors["tensor"]) != address:
            raise StoreError(f"{path}: truncated or damaged (its checksum does not fit)")
        self._whole.add(address)
        return tensors["tensor"]

    def _round_path(self, round: int) -> Path:
        return self.path / f"round-{round}.json"

    def _tensor_path(self, address: str) -> Path:
        return self.path / "tensors" / f"{address}.safetensors"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


METRICS = "metrics.jsonl"
RESUME = "resume the run (--resume) to repair it"


class Metrics:
    """The metrics of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.copy = folder / "state" / METRICS

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to the copy first. Every row has a ``round``."""
        text = ""
        for row in rows:
            if not isinstance(row.get("round"), int):
                raise StoreError(f"{self.path}: every row of metrics needs an integer 'round', got {dict(row)!r}")
            text += files.json_text(dict(row), f"{self.path}: round {row['round']}") + "\n"
        for path in (self.copy, self.path):
            files.append_file(path, text.encode())

    def mark(self) -> Mark:
        """Return what a round that is committed now notes about the file."""
        return _mark(_content(self.path) or b"")

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows; a last line that a kill cut off is left out."""
        content, copy = _content(self.path), _content(self.copy)
        if content is None and copy is not None:
            log.warning("%s: missing; read from its copy", self.path)
            content = copy
        elif content is not None and copy is not None and not (content.startswith(copy) or copy.startswith(content)):
            raise StoreError(f"{self.path}: differs from its copy in {self.copy.parent.name}/, so one is damaged; {RESUME}")
        return [self._row(line, number) for number, line in enumerate((content or b"").split(b"\n")[:-1], start=1)]

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            int(row["round"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise StoreError(f"{self.path}: line {number} is damaged; {RESUME}") from error
        return row

    def trim(self, mark: Mark | None) -> None:
        """Cut the file back to what the mark of a round covers, or to nothing: later rows were never committed."""
        mark = _mark(b"") if mark is None else mark
        found = {path: _content(path) for path in (self.path, self.copy)}
        whole = [content[: mark["bytes"]] for content in found.values() if content is not None]
        kept = next((content for content in whole if _mark(content) == mark), None)
        if not whole:
            if mark["bytes"]:
                log.warning("%s: missing; the run goes on without the rows so far", self.path)
            return
        if kept is None:
            raise StoreError(
                f"{self.path}: damaged, and so is its copy in {self.copy.parent.name}/; "
                "restore one of the files, or delete both to go on without these rows"
            )
        for path, content in found.items():
            if kept and (content is None or not content.startswith(kept)):
                log.warning("%s: damaged or missing; written again from its copy", path)
            if content != kept:
                files.write_file(path, [kept])


def _mark(content: bytes) -> Mark:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
