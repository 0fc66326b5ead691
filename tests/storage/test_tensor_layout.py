"""Run: pytest tests/storage/test_tensor_layout.py (tensors to safetensors bytes and back)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from monograph.checkpointing import Checkpoint, load, save, verify
from monograph.storage import blocks, tensor_layout


def awkward_tensors() -> dict[str, Tensor]:
    flat = torch.arange(24, dtype=torch.float32)
    every_dtype = {
        f"dtype.{dtype}": torch.arange(6).remainder(2).to(dtype) for dtype in tensor_layout.NAMES
    }
    return {
        "view": flat[4:16].view(3, 4),
        "overlapping": flat[8:20],
        "transposed": flat.view(4, 6).t(),
        "strided": flat[::5],
        "expanded": flat[:1].expand(3, 2),
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(2, 0),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nan": torch.tensor([float("nan"), -0.0]),
        "naïve": torch.ones(1),
        **every_dtype,
    }


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    same_kind = (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    return same_kind and tensor_layout.bytes_of(mine) == tensor_layout.bytes_of(theirs)


@pytest.mark.parametrize("block_bytes", [7, 64, 1 << 26])
def test_tensors_come_back_to_the_bit_and_the_safetensors_library_agrees(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    tensors = awkward_tensors()
    state = {"lr": 1e-4, "best": float("inf"), "rows": [1, 2**70], "text": "é"}
    folder = save(tmp_path, Checkpoint(12, tensors, {}, state, run="r"))
    verify(folder)
    loaded = load(folder)
    by_the_library = load_file(folder / "model.safetensors")
    assert loaded.model.keys() == by_the_library.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(loaded.model[name], tensor), name
        assert same_bits(by_the_library[name], tensor), name
    assert (loaded.update, loaded.optimizer, loaded.state, loaded.run) == (12, {}, state, "r")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.gpu
def test_tensors_on_a_device_are_stored_like_those_on_the_host(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    moved = {name: tensor.detach().cuda() for name, tensor in tensors.items()}
    for name, tensor in load(save(tmp_path, Checkpoint(1, moved, {}))).model.items():
        assert same_bits(tensor, tensors[name]), name


def test_the_bytes_are_the_library_s_and_do_not_depend_on_the_order_of_insertion(
    tmp_path: Path,
) -> None:
    tensors = {
        name: tensor.detach().contiguous().clone() for name, tensor in awkward_tensors().items()
    }
    del tensors["naïve"]  # JSON spells it in two ways
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        _, pieces = tensor_layout.encode({name: tensors[name] for name in order})
        assert b"".join(pieces) == (tmp_path / "library").read_bytes()


def test_contiguous_tensors_are_written_from_where_they_are() -> None:
    flat = torch.zeros(100)
    views = {"a": flat[:40].view(4, 10), "b": flat[40:]}
    _, pieces = tensor_layout.encode(views)
    held = list(pieces)
    flat.fill_(1.0)
    assert b"".join(held[1:]) == tensor_layout.bytes_of(torch.ones(100))


HEADER = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {**HEADER, "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {**HEADER, "x": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [8, 8]}},
        {**HEADER, "x": {"dtype": "F32", "shape": [10**12], "data_offsets": [8, 4 * 10**12]}},
        {"w": None},
        {"w": {}},
        {},
        [],
        "text",
    ],
)
def test_hostile_headers_are_refused_without_allocating(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(tensor_layout.LayoutError):
        tensor_layout.allocate(len(text).to_bytes(8, "little") + text, 8 + len(text) + 8)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_bytes_for_a_header_are_refused_or_refer_to_what_is_there(
    text: bytes, length: int
) -> None:
    first = length.to_bytes(8, "little")
    try:
        prefix = (first + text)[: tensor_layout.prefix_bytes(first, 8 + len(text))]
        tensors = tensor_layout.allocate(prefix, 8 + len(text))
    except tensor_layout.LayoutError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(text)
