"""A node's program, without a SuperLink."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from emdcfl.apps import supernode
from emdcfl.apps.deployment.folder import create_operator
from emdcfl.core.errors import ConfigError


def test_a_certificate_that_is_none_is_told_before_the_node_starts(tmp_path: Path) -> None:
    for file in supernode.FILES:
        (tmp_path / file).write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca\.crt: expected the operator's certificate"):
        supernode.serve(tmp_path, name="a", superlink="fl.example.org:8000")


def test_a_full_disk_leaves_no_half_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower takes a folder that is there for a whole bundle: the node would refuse every message after its disk is free again."""
    from flwr.cli import install
    from flwr.supernode.runtime import run_clientapp

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(run_clientapp, "install_from_fab", install.install_from_fab)
    supernode.install_whole(run_clientapp)
    bundle = (create_operator(tmp_path / "fed", ["a", "b"], host="localhost").operator / "app.fab").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(install.shutil, "copy2", full)
        with pytest.raises(OSError, match="No space"):
            run_clientapp.install_from_fab(bundle, skip_prompt=True)
    assert (run_clientapp.install_from_fab(bundle, skip_prompt=True) / "pyproject.toml").stat().st_size > 0
