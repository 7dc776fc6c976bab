"""The states a run can go back to: the last two rounds, each a JSON file with a checksum, over tensors stored by content.

Imports errors, files and tree.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from emdcfl.core.errors import StoreError
from emdcfl.runs.store import codec, files

logger = logging.getLogger(__name__)

FORMAT = 1
KEEP = 2  # rounds; the older one is for a damaged newest

State = TypeVar("State")

UNFIT = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration, OverflowError)
"""What decoding raises for JSON that is whole but was not written by ``save`` (``RecursionError`` is a ``RuntimeError``)."""


class Rounds:
    """The committed rounds in a folder: ``round-<t>.json`` and ``tensors/<sha256>.safetensors``.

    A tensor that did not change has the same address and is not written again. A round's JSON is written last: its appearance commits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = path / "tensors"
        self._good: set[str] = set()  # addresses of tensor files known to be whole
        self._references: dict[int, set[str]] = {}
        self.marks: dict[int, dict[str, Any]] = {}
        """What the rounds that were loaded say of the metrics."""

    def save(self, round: int, state: Any, extra: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Commit the state after a round, with anything else (``extra``) that resuming needs. The last two rounds are kept.

        ``metrics`` says how much of the metrics belongs to the rounds so far, and its checksum.
        """
        target = self._round_path(round)
        references: set[str] = set()

        def keep(tensor: Tensor) -> str:
            address = files.tensor_hash(tensor)
            references.add(address)
            if not self._is_whole(address):
                files.write_tensors(self._tensor_path(address), {"tensor": tensor}, sync_folder=False)
                self._good.add(address)
            return address

        classes = codec.dataclasses_of(type(state))
        body = {
            "format": FORMAT,
            "round": round,
            "state": codec.encode(state, classes, keep, type(state).__name__),
            "extra": codec.encode(dict(extra), {}, keep, "extra"),
        }
        if metrics is not None:
            body["metrics"] = dict(metrics)
        files.fsync_folder(self._tensors)
        text = files.json_text(body, str(target))
        files.write_file(target, [f'{{"sha256":"{_checksum(text)}","body":{text}}}\n'.encode()])
        self._references[round] = references
        self.forget_others(round)

    def _is_whole(self, address: str) -> bool:
        if not self._tensor_path(address).exists():
            return False
        if address not in self._good:  # left by a round that was never committed, or by an earlier process: trust it only after a look
            try:
                self._fetch(address)
            except StoreError:
                return False
        return True

    def forget_others(self, newest: int) -> None:
        """Delete rounds other than the last two up to the newest, then the tensors that no kept round refers to."""
        kept = sorted(round for round in self.numbers() if round <= newest)[-KEEP:]
        for round in self.numbers():
            if round not in kept:
                files.remove(self._round_path(round))
                self._references.pop(round, None)
        for round in kept:
            if round not in self._references:
                try:
                    body = self._body(round)
                    self._references[round] = _addresses(body)
                except StoreError:
                    self._references[round] = set()  # damaged: nobody can use its tensors any more
        alive = set().union(*(self._references[round] for round in kept))
        for path in self._tensors.glob("*.safetensors"):
            if path.stem not in alive:
                files.remove(path)
                self._good.discard(path.stem)

    def load(self, cls: type[State], *, fallback: bool = True) -> tuple[int, State, dict[str, Any]] | None:
        """The last committed round, its state and the extra values; ``None`` if no round was committed yet.

        If the newest round is damaged and ``fallback`` holds, the one before it is taken, with a warning in the log.
        """
        classes = codec.dataclasses_of(cls)
        damage: StoreError | None = None
        for round in sorted(self.numbers(), reverse=True):
            try:
                body = self._body(round)
                fetched = {address: self._fetch(address) for address in _addresses(body)}
            except StoreError as error:
                damage = damage or error
                if not fallback:
                    break
                logger.warning("%s; going back to the round before", error)
                continue
            take = _Once(fetched)
            try:
                state, extra = codec.decode(body["state"], classes, take), codec.decode(body["extra"], {}, take)
            except UNFIT as error:
                raise StoreError(f"{self._round_path(round)}: not a state that emdcfl wrote ({type(error).__name__}: {error})") from error
            if not isinstance(state, cls) or not isinstance(extra, dict):
                raise StoreError(f"{self._round_path(round)}: expected the state of a {cls.__name__}, got {type(state).__name__}")
            mark = body.get("metrics")
            if isinstance(mark, dict) and isinstance(mark.get("bytes"), int) and isinstance(mark.get("sha256"), str):
                self.marks[round] = mark
            return round, state, extra
        if damage is not None:
            raise StoreError(
                f"{damage}; no earlier round is left to go back to: start again with another --out" if fallback else str(damage)
            )
        return None

    def numbers(self) -> list[int]:
        """The committed rounds, damaged or not, in order."""
        names = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.path.glob("round-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def _body(self, round: int) -> dict[str, Any]:
        path = self._round_path(round)
        content = files.read_json(path)
        if not isinstance(content, dict) or content.get("sha256") != _checksum(files.json_text(content.get("body"), str(path))):
            raise StoreError(f"{path}: truncated or damaged (its checksum does not fit)")
        body = content["body"]
        if not isinstance(body, dict) or not {"format", "round", "state", "extra"} <= body.keys():
            raise StoreError(f"{path}: not a round that emdcfl wrote")
        if body["format"] != FORMAT or body["round"] != round:
            raise StoreError(f"{path}: expected round {round} in format {FORMAT}, got round {body['round']} in format {body['format']}")
        return body

    def _fetch(self, address: str) -> Tensor:
        path = self._tensor_path(address)
        tensors, _ = files.read_tensors(path)
        if list(tensors) != ["tensor"] or files.tensor_hash(tensors["tensor"]) != address:
            raise StoreError(f"{path}: truncated or damaged (its checksum does not fit)")
        self._good.add(address)
        return tensors["tensor"]

    def _round_path(self, round: int) -> Path:
        return self.path / f"round-{round}.json"

    def _tensor_path(self, address: str) -> Path:
        return self._tensors / f"{address}.safetensors"


def _addresses(body: Mapping[str, Any]) -> set[str]:
    try:
        found = codec.addresses(body["state"]) | codec.addresses(body["extra"])
    except UNFIT as error:
        raise StoreError(f"round {body['round']}: not a state that emdcfl wrote ({type(error).__name__}: {error})") from error
    strange = sorted(address for address in found if not re.fullmatch(r"[0-9a-f]{64}", address))
    if strange:  # an address is part of a path
        raise StoreError(f"round {body['round']}: not a state that emdcfl wrote (a tensor at {strange[0][:80]!r})")
    return found


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Once:
    """Hand out each tensor once, then copies: equal tensors share a file, but must not share memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def __call__(self, address: str) -> Tensor:
        if address in self._taken:
            return self._tensors[address].clone()
        self._taken.add(address)
        return self._tensors[address]
