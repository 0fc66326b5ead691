"""Run: pytest tests/ops/test_cached_attention.py"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.laws.comparisons import error_within
from monograph.ops.attention import BLOCK, attention, cached_attention


def inputs(groups: int, queries: int, blocks: int, rows: int = 3) -> tuple[Tensor, ...]:
    """Query, keys, values and the positions of the queries: consecutive, each row's beginning
    elsewhere.
    """
    generator = torch.Generator().manual_seed(groups + queries + blocks)
    query = torch.randn(rows, 2 * groups, queries, 16, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(
        2, blocks, rows, 2, BLOCK, 16, generator=generator, dtype=torch.float64
    )
    starts = torch.randint(blocks * BLOCK - queries, (rows, 1), generator=generator)
    return query, keys, values, starts + torch.arange(queries)


def dense(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, impl: str
) -> Tensor:
    """The same by the plain attention and a mask over all slots."""
    distances = positions[:, None, :, None] - torch.arange(keys.shape[0] * BLOCK)
    seen = (distances >= 0) & (distances < (window or 10**9))
    flat = [tensor.permute(1, 2, 0, 3, 4).flatten(2, 3) for tensor in (keys, values)]
    return attention(query, *flat, seen, impl)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("groups", "queries", "blocks"), [(1, 1, 1), (3, 1, 4), (1, 5, 3), (2, 64, 2), (4, 1, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_attention(
    groups: int, queries: int, blocks: int, window: int | None, dtype: torch.dtype
) -> None:
    query, keys, values, positions = inputs(groups, queries, blocks)
    low = [tensor.to(dtype) for tensor in (query, keys, values)]
    ours, naive = (
        cached_attention(*low, positions, window),
        dense(*low, positions, window, "reference"),
    )
    exact = dense(query, keys, values, positions, window, "reference")
    if dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-13, atol=1e-13)
    else:
        assert error_within(ours, naive, exact)


def test_a_sink_takes_its_share_of_blocks_too() -> None:
    query, keys, values, positions = inputs(2, 5, 3)
    sink = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    distances = positions[:, None, :, None] - torch.arange(3 * BLOCK)
    flat = [tensor.permute(1, 2, 0, 3, 4).flatten(2, 3) for tensor in (keys, values)]
    exact = attention(query, *flat, distances >= 0, "reference", sink_H=sink)
    torch.testing.assert_close(cached_attention(query, keys, values, positions, sink_H=sink), exact)


@pytest.mark.gpu
def test_on_a_gpu_products_of_bf16_are_summed_in_fp32() -> None:
    query, keys, values, positions = inputs(2, 5, 3)
    low = [tensor.to(torch.bfloat16) for tensor in (query, keys, values)]
    naive, exact = (
        dense(*each, positions, None, "reference") for each in (low, (query, keys, values))
    )
    ours = cached_attention(*(tensor.cuda() for tensor in low), positions.cuda()).cpu()
    assert error_within(ours, naive, exact)


COMPILED = [
    False,
    pytest.param(True, marks=pytest.mark.slow),
]  # tests/laws/test_schedule_changes_nothing compiles by day


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("seen", [1, 3])
@pytest.mark.parametrize(("groups", "queries"), [(1, 1), (2, 1), (2, 16)])
def test_blocks_that_nobody_sees_change_no_bit(
    groups: int, queries: int, seen: int, compiled: bool
) -> None:
    query, keys, values, positions = (each.float() for each in inputs(groups, queries, 9))
    positions = positions.long() % (seen * BLOCK - queries)
    torch.compiler.reset()  # every shape is a graph, and torch allows eight
    attend = (
        torch.compile(cached_attention, fullgraph=True, dynamic=False)
        if compiled
        else cached_attention
    )
    looked_at = [n for n in ((1, 2, 4, 8) if compiled else (1, 2, 3, 5, 8, 9)) if n >= seen]
    found = [attend(query, keys[:n], values[:n], positions) for n in looked_at]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_other_rows_change_no_bit() -> None:
    query, keys, values, positions = (each.float() for each in inputs(2, 1, 4))
    before = cached_attention(query, keys, values, positions.long())
    keys[:, 1:], values[:, 1:], positions[1:] = 7.0, -3.0, 400
    assert torch.equal(cached_attention(query, keys, values, positions.long())[0], before[0])


def on_the_card(*tensors: Tensor | None, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """What the kernel computes of query, keys, values, positions and sinks."""
    from monograph.ops.cached_attention_kernel import attend_cache  # imports Triton

    query, keys, values, sink = (
        None if each is None else each.to(dtype).cuda() for each in (*tensors[:3], tensors[4])
    )
    assert query is not None and keys is not None and values is not None and tensors[3] is not None
    out = attend_cache(query, keys, values, tensors[3].cuda(), window, sink)
    return out.transpose(1, 2).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("groups", "queries", "blocks", "has_sinks"),
    [(1, 5, 3, False), (2, 64, 2, True), (3, 40, 1, False), (4, 1, 4, False)],
)
def test_the_kernel_is_as_exact_as_the_operators(
    groups: int,
    queries: int,
    blocks: int,
    has_sinks: bool,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    *exact, positions = inputs(groups, queries, blocks)
    low = [tensor.to(dtype) for tensor in exact]
    sink = torch.linspace(-1, 3, 2 * groups, dtype=torch.float64) if has_sinks else None
    low_sink = None if sink is None else sink.to(dtype)
    naive = cached_attention(*low, positions, window, sink_H=low_sink)
    wide = cached_attention(*exact, positions, window, sink_H=sink)
    ours = on_the_card(*exact, positions, sink, dtype=dtype, window=window)
    assert error_within(ours, naive, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 20])
def test_other_rows_and_blocks_change_no_bit_of_the_kernels(window: int | None) -> None:
    query, keys, values, positions = inputs(2, 40, 6)
    positions = torch.arange(70, 110).expand(3, -1)
    numbers = {"dtype": torch.float32, "window": window}
    alone = on_the_card(query[:1], keys[:1, :1], values[:1, :1], positions[:1], None, **numbers)
    keys[:, 1:], values[:, 1:] = 7.0, -3.0
    for blocks in (1, 2, 6):
        cache = keys[:blocks].contiguous(), values[:blocks].contiguous()
        among = on_the_card(query, *cache, positions, None, **numbers)
        assert torch.equal(among[0], alone[0])


@pytest.mark.gpu
def test_a_query_whose_channels_are_apart_has_the_same_bits() -> None:
    query, *rest = inputs(2, 5, 2)
    apart = query.mT.contiguous().mT
    assert apart.stride(-1) != 1
    numbers = {"dtype": torch.float32}
    expected = on_the_card(query, *rest, None, **numbers)
    assert torch.equal(on_the_card(apart, *rest, None, **numbers), expected)
