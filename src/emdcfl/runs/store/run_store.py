"""The run directory: the config it belongs to, what a run writes, and the state to resume from.

::

    config.toml                        complete, can be run as it is
    metrics.jsonl  summary.json  …     what the runner writes
    state/run.json                     the config the run began with
    state/data.json                    where own files are, and a fingerprint of every site
    state/baselines.json               what is trained beside a run on own data
    state/metrics.jsonl                a copy of the metrics
    state/round-<t>.json               the state after round t, with a checksum; its appearance commits the round
    state/tensors/<sha256>.safetensors its tensors, by content: one that did not change is not written again

Every file is replaced in one step, a round's tensors before its JSON, so a kill at any moment leaves the previous round or the new one. The
order of a round is: ``append_metrics``, ``save_state``, other files; on resume, ``load_state`` and then ``trim_metrics`` undo what a kill
left unfinished. A large state may be written while the next round trains (``background=True``); a kill then costs that round too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from emdcfl.core.errors import ConfigError, StoreError
from emdcfl.models.recipe import refuse_code
from emdcfl.runs import signals
from emdcfl.runs.config import Config, dump, loads
from emdcfl.runs.store import files, identity
from emdcfl.runs.store.files import Lock
from emdcfl.runs.store.identity import CONFIG, RUN, is_run
from emdcfl.runs.store.rounds import METRICS, Metrics, Rounds, pack_state

LOCK = ".lock"

LARGE = 1 << 26
"""Bytes of a state from which it may be written in the background: less is written before a thread would be worth it."""

State = TypeVar("State")


class RunStore:
    """A run directory. Make one with ``open`` (a run, locked), or ``read`` (for reading only).

    Use it as a context manager, or call ``close``, to give the lock back.
    """

    def __init__(self, path: str | Path, lock: Lock | None = None) -> None:
        self.path = Path(path)
        self._lock = lock
        self._rounds = Rounds(self.path / "state")
        self._metrics = Metrics(self.path)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="emdcfl-state")
        self._writing: Future[None] | None = None

    @classmethod
    def open(cls, path: str | Path, config: Config, *, resume: bool = False) -> Self:
        """Lock the directory for a run of this config.

        Without ``resume`` the directory must be new or empty; with it, it may also hold a run of the same config, which then goes on,
        with any number of workers.
        """
        folder, text = Path(path), dump(config)
        _refuse_foreign(folder)
        files.refuse_links(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder / LOCK)
        except OSError as error:
            raise StoreError(f"{folder}: cannot make the run directory: {error.strerror}; choose another --out") from error
        try:
            if is_run(folder):
                text = identity.check_same(folder, text)
                if not resume:
                    raise StoreError(
                        f"{folder}: already holds this run; add --resume (in Python resume=True) to continue it, or choose another --out"
                    )
            for leftover in folder.rglob(f"{files.TEMPORARY}*"):
                files.remove(leftover)
            files.make_folder(folder / "state" / "tensors")
            identity.write_config(folder, text)
        except BaseException:
            lock.release()
            raise
        return cls(folder, lock)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open a run directory for reading: no lock, and nothing can be written."""
        if not is_run(Path(path)):
            raise StoreError(f"{path}: not a run directory (no {RUN}); give the folder that 'emdcfl run --out' wrote")
        files.refuse_links(Path(path))
        return cls(path)

    def close(self) -> None:
        """Finish what is being written and give the lock back."""
        try:
            self._wait()
        finally:
            self._writer.shutdown()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def config(self) -> Config:
        """Return the config of the run, as it began."""
        try:
            return loads(identity.read_config(self.path), str(self.path / CONFIG))
        except ConfigError as error:
            raise StoreError(f"{error}; the run was made by another version of emdcfl") from error

    def foreign_config(self) -> Config:
        """Return the config of a run from elsewhere; one that names code of its own is refused."""
        config = self.config()
        chosen = [] if config.model is None else [config.model.name]
        for name in [*chosen, *([config.scenario.options["model"]] if "model" in config.scenario.options else [])]:
            refuse_code(name, self.path / CONFIG)
        return config

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._check_writable(METRICS)
        self._metrics.append(rows)

    def read_metrics(self) -> list[dict[str, Any]]:
        return self._metrics.rows()

    def trim_metrics(self, round: int) -> None:
        """Forget rows written after ``round`` was committed: their round never was. 0 forgets all rows."""
        self._check_writable(METRICS)
        self._metrics.trim(self._rounds.mark(round) if round else None)

    def save_state(self, round: int, state: Any, extra: Mapping[str, Any] | None = None, *, background: bool = False) -> None:
        """Commit the state after a round, with anything else (``extra``) that resuming needs. The last two rounds are kept.

        With ``background``, a large state in the host's memory is written while the caller goes on, who must leave its tensors as they are;
        what goes wrong then is raised by the next ``save_state``, or by ``close``.
        """
        self._check_writable("state")
        self._wait()
        packed = pack_state(state, extra or {})
        save = partial(self._rounds.save, round, packed, self._metrics.mark())
        large = sum(t.numel() * t.element_size() for t in packed.tensors) >= LARGE
        if background and large and all(t.device.type == "cpu" for t in packed.tensors):  # a copy from a GPU would delay its work
            self._writing = self._writer.submit(save)
        else:
            with signals.defer_signals():
                save()

    def load_state(self, cls: type[State]) -> tuple[int, State, dict[str, Any]] | None:
        """Return the last committed round that is whole, its state and the extra values; see ``Rounds.load``."""
        self._wait()
        loaded = self._rounds.load(cls)
        if loaded is not None and self._lock is not None:
            self._rounds.forget_others(loaded[0])  # a kill right after a commit leaves an older round
        return loaded

    def _check_writable(self, name: str) -> None:
        if self._lock is None:
            raise StoreError(f"{self.path}: opened for reading only, cannot write {name}")

    def _wait(self) -> None:
        """Return when no state is being written any more; SIGTERM and Ctrl-C wait for that too."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with signals.defer_signals():
                writing.result()


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds something else. One where a run was killed while it began (it had made its lock) is not foreign."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder}: is a file, expected a folder for the run; choose another --out")
    if not folder.is_dir() or is_run(folder):
        return
    names = {path.name for path in folder.iterdir()}
    ours = LOCK in names and all(name in (LOCK, CONFIG, "state") or name.startswith(files.TEMPORARY) for name in names)
    if names and not ours:
        raise StoreError(f"{folder}: not empty and not a run directory (it holds {min(names)!r}); choose another --out")
