"""Run: pytest tests/ops/test_decode_kernels.py (needs a CUDA device)

The kernel of a decode step's attention is as exact as the operators that it replaces, and a row has the
same bits alone as among others.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.model.rope import rotate
from monograph.ops.attention import cached_attention
from monograph.ops.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPS = 1e-5


def kernels() -> Any:
    """Return the module; Triton, which it imports, is only where a card is."""
    from monograph.ops import decode_kernels

    return decode_kernels


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.cpu().double() - exact).norm() / exact.norm()).item()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Cached:
    """Rows at several positions of a cache with random keys and values."""

    positions = torch.tensor([0, 31, 32, 77, 190])
    slots, blocks = 32, 6

    def __init__(
        self,
        dtype: torch.dtype,
        heads: tuple[int, int],
        head_dim: int,
        window: int | None = None,
        sinks: bool = False,
        norms: bool = False,
        rotates: bool = True,
    ):
        self.heads, self.pairs = heads
        self.head_dim, self.window, self.dtype = head_dim, window, dtype
        rows, (query, pair) = len(self.positions), (heads[0] * head_dim, heads[1] * head_dim)
        self.qkv = normal(rows, query + 2 * pair, seed=0).to(dtype)
        shape = (self.blocks, rows, self.pairs, self.slots, head_dim)
        # Slots from the new token's on hold what an earlier text may have left there.
        self.keys = normal(*shape, seed=1).to(dtype)
        self.values = normal(*shape, seed=2).to(dtype)
        angles = self.positions[:, None] * 1e4 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
        self.turns = (angles.cos(), angles.sin()) if rotates else None
        self.sink = normal(self.heads, seed=3).float() if sinks else None
        self.gains = normal(2, head_dim, seed=4).to(dtype) if norms else None

    def new_heads(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.heads * self.head_dim, *2 * [self.pairs * self.head_dim]]
        q, k, v = (
            part.unflatten(-1, (1, -1, self.head_dim)).transpose(1, 2)
            for part in self.qkv.to(wide).split(sizes, -1)
        )
        if self.gains is not None:
            q, k = (rms_norm(x, g.to(wide), EPS) for x, g in zip((q, k), self.gains, strict=True))
        if self.turns is not None:
            narrow = torch.float64 if wide == torch.float64 else torch.float32
            cos, sin = (each[:, None, None].to(narrow) for each in self.turns)
            q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        return q, k, v

    def written(self, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        _, k, v = self.new_heads(wide)
        keys, values = self.keys.to(wide), self.values.to(wide)
        for row, position in enumerate(self.positions.tolist()):
            block, slot = divmod(position, self.slots)
            keys[block, row, :, slot] = k[row, :, 0]
            values[block, row, :, slot] = v[row, :, 0]
        return keys, values

    def attended(self, wide: torch.dtype) -> Tensor:
        q, _, _ = self.new_heads(wide)
        sink = None if self.sink is None else self.sink.to(wide)
        cache = self.written(wide)
        mixed = cached_attention(q, *cache, self.positions[:, None], self.window, False, sink)
        return mixed[:, :, 0].flatten(1)

    def by_kernel(
        self, rows: list[int] | None = None, further: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' attention and the cache, which has further blocks that nobody sees."""
        chosen = torch.tensor(list(range(len(self.positions))) if rows is None else rows)
        cache = [
            F.pad(each[:, chosen], (0,) * 8 + (0, further)).cuda()
            for each in (self.keys, self.values)
        ]
        counters = torch.zeros(len(chosen), self.pairs, dtype=torch.int32, device="cuda")
        turns = [each[chosen].float().cuda() for each in self.turns] if self.turns else [None, None]
        gains = [None, None] if self.gains is None else [gain.cuda() for gain in self.gains]
        for _ in range(2):  # the second launch finds the counters that the first one left
            out = kernels().attend(
                self.qkv[chosen].cuda(),
                *cache,
                self.positions[chosen].cuda(),
                counters,
                self.blocks + further,
                self.heads,
                self.head_dim**-0.5,
                *turns,
                *gains,
                EPS,
                False,
                None if self.sink is None else self.sink.cuda(),
                self.window,
            )
        assert not counters.any()
        keys, values = (each[: self.blocks].cpu() for each in cache)
        return out.cpu(), keys, values


CACHED = {
    "grouped": {"heads": (8, 2), "head_dim": 32},
    "window": {"heads": (4, 4), "head_dim": 32, "window": 40},
    "sinks": {"heads": (8, 1), "head_dim": 64, "sinks": True, "window": 100},
    "norms of heads": {"heads": (4, 2), "head_dim": 32, "norms": True},
    "no rotation": {"heads": (4, 2), "head_dim": 32, "rotates": False},
}


@DTYPES
@pytest.mark.parametrize("kind", CACHED)
def test_attention_is_as_exact_as_torchs_and_writes_the_new_key(
    dtype: torch.dtype, kind: str
) -> None:
    case = Cached(dtype, **CACHED[kind])
    exact, torchs = case.attended(torch.float64), case.attended(dtype)
    found, keys, values = case.by_kernel()
    assert error(found, exact) <= 2 * error(torchs, exact)
    exact_keys, _ = case.written(torch.float64)
    torchs_keys, torchs_values = case.written(dtype)
    assert error(keys, exact_keys) <= 2 * error(torchs_keys, exact_keys)
    assert torch.equal(values, torchs_values)


@DTYPES
@pytest.mark.parametrize("kind", CACHED)
def test_a_rows_attention_has_the_same_bits_alone_and_in_a_longer_cache(
    dtype: torch.dtype, kind: str
) -> None:
    case = Cached(dtype, **CACHED[kind])
    found, _, _ = case.by_kernel()
    for rows, further in product(([4], [1, 3], [4, 3, 2, 1, 0]), (0, 3)):
        assert torch.equal(case.by_kernel(rows, further)[0], found[rows])


def test_a_row_behind_the_blocks_that_are_read_leaves_its_counter_at_zero() -> None:
    """Its numbers mean nothing, but the next text in its row begins from that counter."""
    case = Cached(torch.float32, **CACHED["grouped"])
    cache = case.keys.cuda(), case.values.cuda()
    counters = torch.zeros(len(case.positions), case.pairs, dtype=torch.int32, device="cuda")
    position = case.positions.cuda()
    kernels().attend(case.qkv.cuda(), *cache, position, counters, 2, case.heads, 1.0)
    assert not counters.any()
    assert torch.equal(cache[0][2:].cpu(), case.keys[2:]), "it wrote to a block that is not read"


FORMS = {  # few_blocks, stages
    "a program per block": (0, 1),
    "a program per block, two stages": (0, 2),
    "one program": (8, 1),
    "one program, two stages": (8, 2),
    "one program, three stages": (8, 3),
    "mixed": (2, 2),
    "mixed, three stages": (4, 3),
}


@DTYPES
@pytest.mark.parametrize("kind", CACHED)
def test_every_form_of_attention_gives_the_same_bits(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Cached(dtype, **CACHED[kind])
    expected = case.by_kernel()
    for name, numbers in FORMS.items():
        form = kernels().AttendForm(*numbers)
        monkeypatch.setattr(kernels(), "attend_form", lambda *_, form=form: form)
        same = [torch.equal(a, b) for a, b in zip(case.by_kernel(), expected, strict=True)]
        assert all(same), name


def test_a_slot_that_a_row_does_not_see_may_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Cached(torch.float32, **CACHED["grouped"])
    expected, _, _ = case.by_kernel()
    for row, position in enumerate(case.positions.tolist()):
        for cache in (case.keys, case.values):
            for block in range(case.blocks):
                begin = max(0, position - block * case.slots)
                cache[block, row, :, begin:] = torch.nan
    for few_blocks in (0, case.blocks):
        form = kernels().AttendForm(few_blocks, 2)
        monkeypatch.setattr(kernels(), "attend_form", lambda *_, form=form: form)
        assert torch.equal(case.by_kernel()[0], expected)


KIB = 1024
FORMS_CHOSEN = [  # programs, blocks, KiB of a block, KiB for blocks; few_blocks, stages
    (8, 1, 32, 220, 4, 1),
    (8, 2, 32, 220, 4, 3),
    (128, 4, 64, 220, 4, 3),
    (128, 5, 64, 220, 4, 2),
    (129, 1, 32, 220, 8, 1),
    (129, 3, 32, 220, 8, 2),
    (512, 8, 64, 220, 8, 2),
    (512, 32, 64, 220, 8, 2),
    # A consumer card's 99 KiB, less what is not for blocks: heads of 64 and 128 in 16 bits.
    (8, 3, 32, 90, 4, 3),
    (8, 3, 64, 90, 4, 2),
    # Heads of 128 in fp32, on an H200 and on a card with 163 KiB.
    (8, 3, 128, 210, 4, 2),
    (8, 3, 128, 127, 4, 1),
]


@pytest.mark.parametrize("case", FORMS_CHOSEN, ids=str)
def test_the_form_of_attention_depends_on_shapes_and_fits_shared_memory(
    case: tuple[int, ...],
) -> None:
    programs, blocks, block_kib, shared_kib, *chosen = case
    form = kernels().attend_form(programs, blocks, block_kib * KIB, shared_kib * KIB, (9, 0))
    assert form == tuple(chosen)


@pytest.mark.parametrize("shared_kib", [140, 40])
def test_one_block_has_two_stages_on_ampere_and_ada_if_it_fits(shared_kib: int) -> None:
    for capability, stages in (((8, 0), 2), ((8, 9), 2), ((9, 0), 1), ((12, 0), 1)):
        form = kernels().attend_form(8, 1, 64 * KIB, shared_kib * KIB, capability)
        assert form == (4, stages if shared_kib > 64 else 1)


def test_one_block_of_wide_heads_has_two_stages_where_one_would_spill() -> None:
    for capability, block_kib, stages in (
        ((10, 0), 128, 2),
        ((10, 0), 64, 1),
        ((9, 0), 128, 1),
        ((12, 0), 128, 1),
    ):
        assert kernels().attend_form(8, 1, block_kib * KIB, 210 * KIB, capability) == (4, stages)
