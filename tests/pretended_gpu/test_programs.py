"""Run: make gpu-less ARGS=tests/pretended_gpu/test_programs.py (interpreted kernels)"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pretended_gpu import interpreted, programs

# ── which programs go on together ───────────────────────────────────────────────────────────────


@triton.jit
def counted(lengths, sums, BLOCK: tl.constexpr):
    """Adds to a number in place, then goes a way and a loop that depend on what the program finds."""
    at = tl.program_id(0)
    before = tl.load(sums + at)
    tl.store(sums + at, before - 1)
    tl.store(sums + at, before + 1)
    total = tl.zeros([BLOCK], tl.int32)
    if tl.load(lengths + at) < 0:
        total += 1000
    for i in range(at, at + tl.load(lengths + at)):
        total += i
    tl.atomic_add(sums + at, tl.max(total, 0))


def test_programs_that_part_do_nothing_twice() -> None:
    """What was written before they parted is put back, or the first addition would be made at each
    parting.
    """
    lengths = torch.tensor([3, 0, -2, 3, 1, -2, 7], dtype=torch.int32)
    sums = torch.arange(7, dtype=torch.int32).cuda()
    counted[(7,)](lengths.cuda(), sums, 4)
    wanted = [
        at + 1 + (1000 if length < 0 else 0) + sum(range(at, at + length))
        for at, length in enumerate(lengths.tolist())
    ]
    assert sums.tolist() == wanted


def test_loops_of_one_length_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each program counts from its own number on."""
    begun: list[int] = []
    begin = programs.Programs.begin
    monkeypatch.setattr(
        programs.Programs,
        "begin",
        lambda self, these, grid: (begun.append(len(these)), begin(self, these, grid)),
    )
    counted[(64,)](
        torch.full((64,), 5, dtype=torch.int32, device="cuda"),
        torch.zeros(64, dtype=torch.int32).cuda(),
        4,
    )
    assert begun == [64]


def test_a_grid_that_is_too_large_for_one_array_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ELEMENTS", 16)
    monkeypatch.setattr(interpreted, "_together", {})
    begun: list[int] = []
    begin = programs.Programs.begin
    monkeypatch.setattr(
        programs.Programs,
        "begin",
        lambda self, these, grid: (begun.append(len(these)), begin(self, these, grid)),
    )
    for _ in range(2):
        x = torch.zeros(5 * 8, device="cuda")
        increased[(5,)](x, 2.5, 8)
        assert x.tolist() == [2.5] * 40
    assert begun == [5, 2, 2, 1] + [2, 2, 1]  # the second time it is known how many are too many


@triton.jit
def increased(x, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + by)


@triton.jit
def placed(result):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(result + (x * tl.num_programs(1) + y) * tl.num_programs(2) + z, x * 100 + y * 10 + z)


def test_programs_know_their_place_in_the_grid() -> None:
    result = torch.zeros(2, 3, 4, dtype=torch.int32, device="cuda")
    placed[(2, 3, 4)](result)
    assert result.tolist() == [
        [[100 * x + 10 * y + z for z in range(4)] for y in range(3)] for x in range(2)
    ]


@triton.jit
def handed_on(sums, found):
    """Waits for what the program before it wrote, as Inductor's running sums do."""
    at = tl.program_id(0)
    total = 1
    if at > 0:
        total = tl.atomic_add(sums + at - 1, 0)
        while total == 0:
            total = tl.atomic_add(sums + at - 1, 0)
    tl.store(found + at, total)
    tl.atomic_xchg(sums + at, total * 2)


def test_a_program_that_waits_for_the_one_before_it_finds_its_number() -> None:
    sums, found = (torch.zeros(9, dtype=torch.int32).cuda() for _ in range(2))
    handed_on[(9,)](sums, found)
    assert found.tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256]


# ── atomic operations ───────────────────────────────────────────────────────────────────────────


@triton.jit
def scattered(places, values, sums, n, WHOLE: tl.constexpr, X: tl.constexpr, R: tl.constexpr):
    x = tl.program_id(0) * X + tl.arange(0, X)[:, None]
    r = tl.arange(0, R)[None, :]
    mask = x < n
    place = tl.load(places + x, mask, other=0)
    value = tl.load(values + (r + R * x), mask, other=0.0)
    if WHOLE:
        mask = mask & (r < R)
    tl.atomic_add(sums + tl.broadcast_to(r + R * place, [X, R]), value, mask, sem="relaxed")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("x", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_sums_with_a_mask_of_one_number(dtype: torch.dtype, x: int, whole: bool) -> None:
    """Triton's own interpreter adds the first column only, where a mask of [1, 1] is broadcast."""
    places = torch.tensor([5, 5, 2, 5, 0, 1])
    values = torch.randint(-9, 9, (6, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = torch.zeros(8, 4, dtype=dtype, device="cuda")
    scattered[((6 + x - 1) // x,)](places.cuda(), values.cuda(), sums, 6, whole, x, 4)
    assert sums.cpu().equal(torch.zeros(8, 4, dtype=dtype).index_add_(0, places, values))


@triton.jit
def drawn(counter, found, BLOCK: tl.constexpr, OP: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(found + at, OP(counter + at * 0, at))


@pytest.mark.parametrize(
    ("op", "start", "found", "left"),
    [
        ("atomic_add", 0, [0, 0, 1, 3, 6, 10, 15, 21], 28),
        ("atomic_max", 3, [3, 3, 3, 3, 3, 4, 5, 6], 7),
        ("atomic_min", 3, [3, 0, 0, 0, 0, 0, 0, 0], 0),
        ("atomic_xchg", 9, [9, 0, 1, 2, 3, 4, 5, 6], 7),
        ("atomic_or", 0, [0, 0, 1, 3, 3, 7, 7, 7], 7),
        ("atomic_and", 7, [7, 0, 0, 0, 0, 0, 0, 0], 0),
        ("atomic_xor", 0, [0, 0, 1, 3, 0, 4, 1, 7], 0),
    ],
)
def test_one_address_has_its_operations_in_order(
    op: str, start: int, found: list[int], left: int
) -> None:
    """Each finds what the one before it left."""
    counter, each = (
        torch.tensor([start], dtype=torch.int32).cuda(),
        torch.zeros(8, dtype=torch.int32).cuda(),
    )
    drawn[(4,)](counter, each, 2, getattr(tl, op))
    assert each.tolist() == found and counter.item() == left


@triton.jit
def swapped(counter, found, expected):
    at = tl.program_id(0)
    tl.store(found + at, tl.atomic_cas(counter, expected + at, at))


def test_a_number_is_swapped_if_it_is_the_expected_one() -> None:
    counter, found = (
        torch.tensor([5], dtype=torch.int32).cuda(),
        torch.zeros(4, dtype=torch.int32).cuda(),
    )
    swapped[(4,)](counter, found, 5)
    assert found.tolist() == [5, 0, 0, 0] and counter.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_sums_are_rounded_each_time(dtype: torch.dtype) -> None:
    """1 is too little for 2 ^ 11 in float16 and for 2 ^ 8 in bfloat16, however often it is added."""
    large = 2.0 ** (11 if dtype == torch.float16 else 8)
    sums = torch.tensor([[large, 0.0]], dtype=dtype).cuda()
    values = torch.ones(8, 2, dtype=dtype).cuda()
    scattered[(4,)](torch.zeros(8, dtype=torch.int64).cuda(), values, sums, 8, False, 2, 2)
    assert sums.tolist() == [[large, 8.0]]


# ── the language ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def truths(result, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    odd, large = tl.load(x + at) % 2 == 1, tl.load(x + at) > 3
    tl.store(result + at, odd & (not large))
    tl.store(result + BLOCK + at, odd and large)
    tl.store(result + 2 * BLOCK + at, odd or large)
    scalar = tl.load(x + 1)
    tl.store(result + 3 * BLOCK + at, (not scalar == 1) | odd)
    tl.store(result + 4 * BLOCK + at, odd if scalar == 1 and BLOCK > 2 else large)


def test_truths_of_blocks_are_those_of_their_numbers() -> None:
    """Triton's own interpreter takes a block for true."""
    result = torch.zeros(5, 8, dtype=torch.bool, device="cuda")
    truths[(1,)](result, torch.arange(8, dtype=torch.int32).cuda(), 8)
    odd, large = torch.arange(8) % 2 == 1, torch.arange(8) > 3
    assert result.cpu().equal(torch.stack([odd & ~large, odd & large, odd | large, odd, odd]))


@triton.jit
def divided(result, x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(result + at, a // b)
    tl.store(result + n + at, a % b)
    tl.store(result + 2 * n + at, a >> 1)
    tl.store(result + 3 * n + at, a * 3)


def test_whole_numbers_are_divided_as_in_c_and_wrap() -> None:
    x = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
    y = torch.tensor([2, 2, -2, -2, 7, 7, -3, 9], dtype=torch.int32)
    result = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    divided[(1,)](result, x.cuda(), y.cuda(), 8, 8)
    quotients = torch.div(x, y, rounding_mode="trunc")
    assert result.cpu().equal(torch.stack([quotients, x - quotients * y, x >> 1, x * 3]))


@triton.jit
def combined(a, b, c, d):
    """Apply first one affine function, then another: associative, but not commutative."""
    return a * c, b * c + d


@triton.jit
def composed(slopes, offsets, result, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    row = tl.arange(0, 2)[:, None] * BLOCK
    at = row + tl.arange(0, BLOCK)[None, :] + tl.program_id(0) * 2 * BLOCK
    slope, offset = tl.associative_scan(
        (tl.load(slopes + at), tl.load(offsets + at)), 1, combined, reverse=REVERSE
    )
    tl.store(result + at, offset + slope)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_keep_the_order(reverse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    slopes, offsets = (torch.randint(-2, 3, (6, 16), generator=generator) for _ in range(2))
    result = torch.zeros_like(slopes).cuda()
    composed[(3,)](slopes.cuda(), offsets.cuda(), result, 16, reverse)
    wanted = torch.zeros_like(slopes)
    slope, offset = torch.ones(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    for at in reversed(range(16)) if reverse else range(16):
        slope, offset = slope * slopes[:, at], offset * slopes[:, at] + offsets[:, at]
        wanted[:, at] = slope + offset
    assert result.cpu().equal(wanted)


@triton.jit
def reduced(x, result, AXIS: tl.constexpr, KEEP: tl.constexpr):
    block = tl.load(
        x + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :] + tl.program_id(0) * 32
    )
    sums = tl.sum(block, AXIS, keep_dims=KEEP)
    tl.static_assert(not KEEP or len(sums.shape) == 2)
    largest, where = tl.max(block, 1, return_indices=True)
    tl.store(result + tl.program_id(0) * 16 + tl.arange(0, 4), largest * 100 + where)
    tl.store(
        result + tl.program_id(0) * 16 + 4 + tl.arange(0, 4),
        tl.sum(tl.ravel(sums + tl.zeros([4, 8], tl.int32)), 0),
    )


@pytest.mark.parametrize(
    ("axis", "keep", "copies"), [(None, False, 32), (None, True, 32), (0, True, 4), (1, True, 8)]
)
def test_reductions_of_each_program(axis: int | None, keep: bool, copies: int) -> None:
    """The largest number's place is the first, as the ties say."""
    x = torch.randint(
        0, 5, (3, 4, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    result = torch.zeros(3, 16, dtype=torch.int32, device="cuda")
    reduced[(3,)](x.cuda(), result, axis, keep)
    first = x.max(2, keepdim=True).values.eq(x).int().argmax(2)
    assert result.cpu()[:, :4].equal((x.max(2).values * 100 + first).int())
    assert result.cpu()[:, 4].equal((x.sum((1, 2)) * copies).int())


@triton.jit
def arranged(x, places, result, N: tl.constexpr):
    at = tl.arange(0, N)
    mine = tl.load(x + tl.program_id(0) * N + at)
    everyones = tl.load(x + at)
    result += tl.program_id(0) * 8 * N
    pairs = tl.join(mine, everyones)
    tl.store(result + tl.arange(0, 2 * N), tl.reshape(tl.trans(pairs), [2 * N]))
    evens, odds = tl.split(tl.reshape(tl.cat(everyones, mine, can_reorder=True), [N, 2]))
    tl.store(result + 2 * N + at, evens)
    tl.store(result + 3 * N + at, odds)
    tl.store(result + 4 * N + at, tl.gather(mine, tl.load(places + at), 0))
    tl.store(result + 5 * N + at, tl.histogram(mine, N, mask=at > 0))
    tl.store(result + 6 * N + at, ~mine)
    tl.store(result + 7 * N + at, tl.sort(mine))


def test_each_program_arranges_its_own_numbers() -> None:
    """Blocks that all programs have in common are put together with their own."""
    x = torch.randint(8, (3, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    places = torch.tensor([7, 0, 0, 3, 2, 5, 6, 1], dtype=torch.int32)
    result = torch.zeros(3, 64, dtype=torch.int32, device="cuda")
    arranged[(3,)](x.cuda(), places.cuda(), result, 8)
    for row, mine in zip(result.cpu(), x, strict=True):
        both = torch.cat([x[0], mine])
        counts = torch.bincount(mine[1:], minlength=8)
        parts = [mine, x[0], both[::2], both[1::2], mine[places], counts, ~mine, mine.sort().values]
        assert row.equal(torch.cat(parts).int())


@triton.jit
def limited(x, y, result, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(result + at, tl.minimum(a, b))
    tl.store(result + N + at, tl.maximum(a, b))
    tl.store(result + 2 * N + at, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(result + 3 * N + at, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(result + 4 * N + at, tl.clamp(a, -1.0, 1.0))
    tl.store(result + 5 * N + at, tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(result + 6 * N + at, tl.load(x + at, at % 2 == 0))
    tl.store(result + 7 * N + at, tl.load(x + at, at % 2 == 0, other=b))


def test_a_comparison_takes_the_number_or_keeps_what_is_none() -> None:
    """As it is told; a masked load takes what is there otherwise."""
    nan = float("nan")
    x, y = (
        torch.tensor([1.0, nan, 5.0, nan, -7.0, 0.5, 2.0, -0.0]),
        torch.tensor([nan, 2.0, 3.0, nan, 1, 2, 3, 4]),
    )
    result = torch.zeros(8, 8, device="cuda")
    limited[(1,)](x.cuda(), y.cuda(), result, 8)
    even = torch.arange(8) % 2 == 0
    wanted = [torch.fmin(x, y), torch.fmax(x, y), torch.minimum(x, y), torch.maximum(x, y)]
    wanted += [x.nan_to_num(-1.0).clamp(-1, 1), x.clamp(-1, 1), x.where(even, 0), x.where(even, y)]
    assert torch.allclose(result.cpu(), torch.stack(wanted), rtol=0, atol=0, equal_nan=True)


@triton.jit
def philox(result, seed, c0, c1, c2, c3, BLOCK: tl.constexpr):
    zero = tl.zeros([BLOCK], tl.uint32)
    counter = (
        zero + c0.to(tl.uint32),
        zero + c1.to(tl.uint32),
        zero + c2.to(tl.uint32),
        zero + c3.to(tl.uint32),
    )
    numbers = tl.philox(seed, *counter)
    for i in tl.static_range(4):
        tl.store(result + i, tl.max(numbers[i].to(tl.int64), 0))


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_numbers_are_those_of_philox(
    counter: tuple[int, ...], key: int, wanted: tuple[int, ...]
) -> None:
    """Known answers of its authors (Salmon et al. 2011, Random123's kat_vectors)."""
    result = torch.zeros(4, dtype=torch.int64, device="cuda")
    philox[(1,)](result, key, *counter, 4)
    assert tuple(result.tolist()) == wanted


@triton.jit
def asserted(x, n):
    at = tl.program_id(0)
    tl.device_assert(tl.load(x + at) < n, "index out of range")


def test_what_a_kernel_asserts_of_each_program() -> None:
    asserted[(3,)](torch.tensor([0, 1, 2]).cuda(), 3)
    with pytest.raises(AssertionError, match="index out of range"):
        asserted[(3,)](torch.tensor([0, 3, 2]).cuda(), 3)


@triton.jit
def by_block_pointer(x, n):
    tl.load(tl.make_block_ptr(x, [n], [1], [0], [4], [0]))


def test_what_has_no_numbers_raises_by_name() -> None:
    with pytest.raises(NotImplementedError, match="block pointers have no numbers"):
        by_block_pointer[(1,)](torch.zeros(4, device="cuda"), 4)
