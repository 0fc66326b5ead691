"""Run: pytest tests/graph/test_mmap_weights.py (weights that lie in a mapped file until they are
taken out of it)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from monograph.graph.mmap_weights import (
    MappedWeight,
    kept_dtype,
    mapped,
    materialize_,
    replace_data,
)
from monograph.optim import AdamW, planes, trainable


class Two(nn.Module):
    """A trained and a frozen parameter, which their file has in the other order, and one of its
    own.
    """

    def __init__(self, path: Path, becomes: torch.dtype):
        super().__init__()
        with safe_open(path, "pt") as file:
            self.b, self.a = (mapped(file.get_tensor(name), becomes) for name in ("b", "a"))
        self.a.requires_grad_(False)
        self.own = nn.Parameter(torch.ones(3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {
        name: torch.randn(5, 3, generator=torch.Generator().manual_seed(ord(name))) for name in "ab"
    }
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "x.safetensors"
    )
    return tmp_path / "x.safetensors"


def numbers(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in "ab"}


@pytest.mark.parametrize("becomes", [torch.bfloat16, torch.float32, torch.float64])
def test_settled_weights_are_the_files_in_memory_of_their_own(
    path: Path, becomes: torch.dtype
) -> None:
    module, expected = Two(path, becomes), numbers(path)
    assert all(
        type(p) is MappedWeight and p.dtype == torch.bfloat16 and kept_dtype(p) == becomes
        for p in (module.a, module.b)
    )
    assert materialize_(module) is module
    assert all(type(p) is nn.Parameter and kept_dtype(p) == p.dtype for p in module.parameters())
    assert not module.a.requires_grad and module.b.requires_grad
    path.write_bytes(b"\1" * path.stat().st_size)
    for name, tensor in expected.items():
        assert getattr(module, name).dtype == becomes and torch.equal(
            getattr(module, name), tensor.to(becomes)
        )


def test_what_is_trained_may_be_left_to_its_plane(path: Path) -> None:
    module, expected = Two(path, torch.float32), numbers(path)
    materialize_(module, trained=False)
    assert type(module.a) is nn.Parameter and type(module.b) is MappedWeight
    plane = planes(trainable(module), AdamW().kinds(module))[0]
    assert plane.param.dtype == plane.grad.dtype == torch.float32
    assert type(module.b) is nn.Parameter and module.b.data_ptr() == plane.param.data_ptr()
    assert torch.equal(module.b, expected["b"].float()) and not bool(module.b.grad.any())


@pytest.mark.parametrize(
    ("stored", "becomes", "open"),
    [
        (torch.bfloat16, torch.float32, True), (torch.float16, torch.float32, True),
        (torch.float32, torch.float32, True), (torch.float64, torch.float32, False),
        (torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.float16, False),
    ],
)  # fmt: skip
def test_only_what_no_rounding_waits_for_is_a_window(
    stored: torch.dtype, becomes: torch.dtype, open: bool
) -> None:
    tensor = torch.linspace(-3, 3, 7, dtype=torch.float64).to(stored)
    found = mapped(tensor, becomes)
    assert isinstance(found, MappedWeight) == open and kept_dtype(found) == becomes
    assert torch.equal(found.to(becomes), tensor.to(becomes))


def test_other_numbers_end_a_window(path: Path) -> None:
    module = Two(path, torch.float32)
    replace_data(module.b, torch.zeros(2))
    replace_data(module.own, torch.zeros(2))
    assert type(module.b) is nn.Parameter and module.b.shape == module.own.shape == (2,)
