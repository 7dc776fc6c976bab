"""What can be tested of the CUDA engine's steps without a GPU: one compilation serves all streams, and later runs find it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from emdcfl.data.types import Preprocess
from emdcfl.engines.cuda.compiling import batch, keep_kernels, objective
from emdcfl.engines.cuda.layers import multiply_narrow
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.cuda.streams import laid_as
from emdcfl.models.recipe import ModelRecipe


def samples(seed: int) -> Samples:
    x = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    shape = (1, -1, 1, 1)
    mean, std = torch.tensor([0.5]).view(shape), torch.tensor([0.25]).view(shape)
    return Samples(x, torch.arange(40) % 10, {"a": seed}, Preprocess((0.5,), (0.25,), 1 / 255), mean, std)


@pytest.mark.slow
def test_one_compilation_serves_all_streams_and_the_next_run_in_the_process() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(objective, dynamic=False, fullgraph=True, backend=counter)
    recipe = ModelRecipe("small_cnn", {"channels": 1, "classes": 10, "size": 8})
    for run in range(2):
        data = samples(run)
        for stream in range(3):
            torch.manual_seed(stream)
            module = recipe()
            assert multiply_narrow(module) == 1
            module.to(memory_format=torch.channels_last).train(True)
            index, scale, last = torch.arange(16) + stream, torch.full((16,), 1 / 16), torch.ones(16)
            x, y = batch(data, index, False)
            found = compiled(module, x, y, scale, last)
            torch.testing.assert_close(found, objective(module, x, y, scale, last))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_gradient_is_copied_only_where_its_numbers_lie_in_another_order() -> None:
    weight, last = torch.empty(4, 1, 3, 3).as_strided((4, 1, 3, 3), (9, 1, 3, 1)), torch.channels_last
    for shape, copied in ((weight, False), (torch.empty(4, 2, 3, 3).to(memory_format=last), True)):
        gradient = torch.randn(shape.shape)
        found = laid_as(shape, gradient)
        assert torch.equal(found, gradient) and found.stride() == shape.stride()
        assert (found.data_ptr() != gradient.data_ptr()) == copied


def test_kernels_are_kept_in_a_folder_that_only_the_user_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # noted, so that what is set here ends with the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_kernels()
    folder = tmp_path / "kernels"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder) and folder.stat().st_mode & 0o777 == 0o700

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o770)  # others could put code there
    keep_kernels()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

    folder.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    keep_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"
