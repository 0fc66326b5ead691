# Run: pytest tests/model/test_masks.py
"""Masks: the one rule, in each of its forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from batches import tiny_llama
from monograph import compat
from monograph.model import llama
from monograph.model.llama import BLOCK, attention_mask, block_mask, dense_mask

WINDOWS = (
    st.none()
    | st.sampled_from([1, 2, 127, 128, 129, 130, 255, 256, 257, 384])
    | st.integers(1, 900)
)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=6)


def _segments(lengths, padding):
    numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return torch.tensor([numbers + [0] * padding, [0] * (len(numbers) + padding)])


@pytest.mark.parametrize("window", [None, 1, 2, 6, 7])
def test_dense_is_the_rule(window):
    segments = torch.tensor([[1, 1, 2, 2, 2, 0, 0], [0] * 7])
    mask = dense_mask(segments, window)
    assert mask.shape == (2, 1, 7, 7)
    for row in range(2):
        for t in range(7):
            for s in range(7):
                near = t - s < (window or 7)
                assert mask[row, 0, t, s] == (
                    s <= t and segments[row, s] == segments[row, t] and near
                )


def test_no_query_is_left_without_a_key():
    for window in (None, 1):
        assert dense_mask(torch.zeros(1, 5, dtype=torch.int64), window).any(dim=-1).all()


@settings(max_examples=60)
@given(lengths=LENGTHS, padding=st.integers(0, 150), window=WINDOWS)
def test_blocks_say_what_dense_says(lengths, padding, window):
    segments = _segments(lengths, padding)
    dense, length = dense_mask(segments, window), segments.shape[1]
    mask = block_mask(segments, window)
    cells = torch.arange(length)
    rule = mask.mask_mod(torch.arange(2)[:, None, None], 0, cells[:, None], cells[None, :])
    assert torch.equal(rule, dense[:, 0])
    # Positions beyond the row's end, in its last block, are padding to the block and nothing to the
    # kernel.
    needed, full = (_cells(count, index, length) for count, index in _parts(mask))
    assert not (dense & ~(needed | full)).any()
    assert not (full & ~dense).any()
    assert not (full & needed).any()


@given(lengths=LENGTHS)
@settings(max_examples=20)
def test_no_block_is_computed_in_vain(lengths):
    segments = _segments(lengths, (-sum(lengths)) % BLOCK)
    _assert_blocks_are_those_of_flex(segments, None)


@given(blocks=st.integers(1, 6), window=WINDOWS)
@settings(max_examples=30)
def test_no_block_is_computed_in_vain_within_a_window(blocks, window):
    _assert_blocks_are_those_of_flex(torch.ones(2, blocks * BLOCK, dtype=torch.int64), window)


@given(lengths=LENGTHS, padding=st.integers(0, 150), window=WINDOWS)
@settings(max_examples=20)
def test_the_blocks_of_queries_are_those_that_torch_derives_from_the_blocks_of_keys(
    lengths, padding, window
):
    ours = block_mask(_segments(lengths, padding), window)
    derived = BlockMask.from_kv_blocks(
        ours.kv_num_blocks, ours.kv_indices, ours.full_kv_num_blocks, ours.full_kv_indices
    )
    pairs = [
        (ours.q_num_blocks, ours.q_indices, derived.q_num_blocks, derived.q_indices),
        (
            ours.full_q_num_blocks,
            ours.full_q_indices,
            derived.full_q_num_blocks,
            derived.full_q_indices,
        ),
    ]
    for count, index, derived_count, derived_index in pairs:
        assert torch.equal(count, derived_count)
        listed = torch.arange(index.shape[-1]) < count[..., None]
        assert torch.equal(index[listed], derived_index[listed]), "in the same order"


def test_what_lies_beyond_a_row_needs_no_block():
    mask = block_mask(torch.tensor([[1] * BLOCK + [2] * 60]))
    assert mask.kv_num_blocks.tolist() == [[[1, 1]]] and mask.full_kv_num_blocks.tolist() == [
        [[0, 0]]
    ]


def _assert_blocks_are_those_of_flex(segments, window):
    length = segments.shape[1]

    def rule(b, h, q, k):
        return (q >= k) & (segments[b, q] == segments[b, k]) & (q - k < (window or length))

    ours, theirs = (
        block_mask(segments, window),
        create_block_mask(rule, 2, None, length, length, device="cpu"),
    )
    for (count, index), (their_count, their_index) in zip(
        _parts(ours), _parts(theirs), strict=True
    ):
        assert torch.equal(_cells(count, index, length), _cells(their_count, their_index, length))


def _parts(mask):
    return (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)


def _cells(count, index, length):
    """Blocks in flex attention's sparse form as a boolean [B, 1, T, T]."""
    listed = torch.arange(index.shape[-1]) < count[..., None]
    blocks = torch.stack(
        [(listed & (index == block)).any(-1) for block in range(index.shape[-1])], -1
    )
    return blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :length, :length]


def test_without_segments_there_is_no_mask():
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    for impl in ("auto", "sdpa", "reference"):
        for window in (None, 9, 10):  # a window that no row outgrows is causality, too
            assert attention_mask(None, tokens, impl, window) is None
        assert attention_mask(None, tokens, impl, 8).shape == (1, 1, 9, 9)
    assert attention_mask(None, tokens, "flex").shape == (2, 1, 9, 9)


@pytest.mark.parametrize(("width", "form"), [(32, "dense"), (64, "blocks")])
def test_a_gpu_has_flex_attention_for_heads_of_16_and_more(width, form, monkeypatch):
    """A step whose heads are smaller would stay eager, as torch refuses to compile flex attention
    for them.
    """
    monkeypatch.setattr(llama, "dense_mask", lambda *_: "dense")
    monkeypatch.setattr(llama, "block_mask", lambda *_: "blocks")
    model = tiny_llama(hidden_size=width)
    with FakeTensorMode(), compat.as_if_compiling():
        segments = torch.empty(2, 9, dtype=torch.int64, device="cuda")
        inputs = model.attention_inputs(segments, segments, torch.empty(2, 9, dtype=torch.int64))
    assert [mask for _, mask in inputs] == [form, form]
