"""A disk that is full, read-only or failing: one line, nothing lost, and the run goes on when the cause is gone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tests.tiny
from tests.e2e.shell import ROOT, SOURCES

from emdcfl.cli import main
from emdcfl.runs import runner
from emdcfl.runs.config import Config, dump

CONFIG = tests.tiny.config(method="fedavg", rounds=3)


def started(config: Config, tmp_path: Path) -> list[str]:
    (tmp_path / "c.toml").write_text(dump(config))
    return [sys.executable, "-m", "tests.tiny", "run", str(tmp_path / "c.toml"), "--quiet", "--out"]


def one_line(said: str, expected: str) -> None:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and expected in errors[0], said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    runner.run(CONFIG, out)
    return out


def in_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script where mounting is allowed and seen by nobody else."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode
    ):
        pytest.skip("needs unshare and the right to mount in a namespace of one's own")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env={**os.environ, **SOURCES}, capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_a_full_disk_then_a_larger_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = " ".join(started(CONFIG, tmp_path))
    done = in_namespace(
        f"mount -t tmpfs -o size=48k none {disk} && {command} {disk}/run; echo first $? >&2;"
        f" mount -o remount,size=64m {disk} && {command} {disk}/run --resume; echo second $? >&2; cp -a {disk}/run {tmp_path}/kept"
    )
    assert "first 2" in done.stderr and "second 0" in done.stderr, done.stderr
    one_line(done.stderr, "No space left on device")
    with pytest.raises(SystemExit, match="0"):
        main([*started(CONFIG, tmp_path)[3:], str(tmp_path / "run")])
    assert tests.tiny.contents(tmp_path / "kept") == tests.tiny.contents(tmp_path / "run")


def test_a_read_only_disk(tmp_path: Path, undisturbed: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = " ".join(started(CONFIG, tmp_path))
    done = in_namespace(f"mount -t tmpfs -o ro none {disk} && {command} {disk}/run; echo new $? >&2")
    assert "new 2" in done.stderr
    one_line(done.stderr, "Read-only file system")
    shutil.copytree(undisturbed, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    mounted = f"mount --bind {tmp_path}/run {disk} && mount -o remount,ro,bind {disk}"
    done = in_namespace(
        f"{mounted} && {command} {disk} --resume; echo resumed $? >&2; {sys.executable} -m emdcfl report {disk}; echo report $? >&2"
    )
    assert "resumed 2" in done.stderr and "report 2" in done.stderr
    assert "Traceback" not in done.stderr and "Read-only file system" in done.stderr


@pytest.mark.parametrize("event", [1, 5, 9, 14, 22])
@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EIO"])
def test_the_disk_fails_at_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path, error: str, event: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.faults import mortal

    arguments = started(CONFIG, tmp_path)[3:]
    with monkeypatch.context() as patch:
        for name in mortal.EVENTS:
            patch.setattr(os, name, getattr(os, name))  # so that the faults are taken away again
        mortal.install(error, event)
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(tmp_path / "run")])
    assert ended.value.code == 2
    one_line(capsys.readouterr().err, os.strerror(getattr(errno, error)))
    runner.run(CONFIG, tmp_path / "run", resume=True)
    assert tests.tiny.contents(tmp_path / "run").keys() == tests.tiny.contents(undisturbed).keys()
    assert tests.tiny.contents(tmp_path / "run") == tests.tiny.contents(undisturbed)
