"""Triton's interpreter with one more axis: many programs of a grid are computed at once.

The interpreter runs a kernel in Python once for each program, on numpy arrays of its blocks. Here
an array is [programs, *block], and a scalar [programs]; where all programs have the same numbers,
the first axis has length 1. So a kernel runs once for many programs, as long as they go the same
way. Where they do not (a branch on the program's number, a loop whose length was loaded), `Apart`
says which may go on together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions

from pretended_gpu import card, libdevice
from pretended_gpu.narrow import (
    NARROW,
    Array,
    array_dtype,
    from_memory,
    memory_dtype,
    rounded,
    to_memory,
)

ELEMENTS = 1 << 18  # of one array: more leave the cache, fewer are a longer Python loop

_ATOMIC: dict[Any, Callable[[Array, Array], Array]] = {
    ir.ATOMIC_OP.ADD: np.add,
    ir.ATOMIC_OP.FADD: np.add,
    ir.ATOMIC_OP.MIN: np.minimum,
    ir.ATOMIC_OP.UMIN: np.minimum,
    ir.ATOMIC_OP.MAX: np.maximum,
    ir.ATOMIC_OP.UMAX: np.maximum,
    ir.ATOMIC_OP.AND: np.bitwise_and,
    ir.ATOMIC_OP.OR: np.bitwise_or,
    ir.ATOMIC_OP.XOR: np.bitwise_xor,
    ir.ATOMIC_OP.XCHG: lambda old, new: new,
}


class Apart(Exception):  # noqa: N818 - no error
    """Programs cannot go on together; those with the same key can. If they are too many, it says
    how many are not.
    """

    def __init__(self, keys: Array, most: int | None = None) -> None:
        super().__init__()
        self.keys, self.most = keys, most


class Numbers:
    """The numbers of a Triton value, [programs or 1, *block], with the type of one of them."""

    __slots__ = "data", "dtype"

    def __init__(self, data: Array, dtype: tl.dtype) -> None:
        self.data, self.dtype = data, dtype.scalar

    def get_element_ty(self) -> tl.dtype:
        """Return the type at an address."""
        return self.dtype.element_ty

    def set_attr(self, key: str, value: object) -> None:
        """Ignore what a compiler could use."""

    def one(self) -> Any:
        """Return the number that all programs have in common."""
        first = self.data.flat[0]
        if self.data.size > 1 and not (self.data == first).all():
            raise Apart(self.data.reshape(len(self.data)))
        return first


class Memory:
    """Numbers at addresses, as indices of one array that is the memory from the first address to
    the last.
    """

    def __init__(self, addresses: Array, dtype: tl.dtype) -> None:
        self.dtype, kept = dtype, memory_dtype(dtype)
        if not addresses.size:
            self.array, self.at = np.empty(0, kept), addresses
            return
        first, last = int(addresses.min()), int(addresses.max())
        self.at = (addresses - first) // kept.itemsize
        if card.PRELOADED and not card.holds(first, last + kept.itemsize):
            # A card stops here if these pages are nobody's, and else computes with what is not the
            # kernel's.
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        shape = ((last - first) // kept.itemsize + 1,)
        memory = {"data": (first, False), "shape": shape, "typestr": kept.str, "version": 3}
        self.array = np.asarray(SimpleNamespace(__array_interface__=memory))

    def read(self, at: Array) -> Array:
        """Return the numbers at indices of the array."""
        return from_memory(self.array.take(at), self.dtype)

    def write(self, at: Array, numbers: Array) -> None:
        """Write numbers; where an index comes twice, the later one stays."""
        self.array[at] = to_memory(numbers, self.dtype)


class Programs(InterpreterBuilder):  # type: ignore[misc]
    """What Triton's language calls to compute, for the programs that go the same way at present."""

    def __init__(self) -> None:
        super().__init__()
        self.options = dataclasses.replace(
            InterpreterOptions(), sanitize_overflow=False, debug=True
        )
        self.count = 1
        self._written: list[tuple[Array, Array, Array]] = []

    def begin(self, programs: Array, grid: tuple[int, ...]) -> None:
        """Begin with the programs of these numbers."""
        self.count, self._grid, self._written = len(programs), grid, []
        self._at = [axis.astype(np.int32) for axis in np.unravel_index(programs, grid)]

    def undo(self) -> None:
        """Put back what was written since they began."""
        for array, at, before in reversed(self._written):
            array[at] = before

    # ── which program ───────────────────────────────────────────────────────────────────────────

    def create_get_program_id(self, axis: int) -> Numbers:
        at = self._at[axis]
        return Numbers(at[:1] if (at == at[0]).all() else at, tl.int32)

    def create_get_num_programs(self, axis: int) -> Numbers:
        return Numbers(np.array([self._grid[axis]], np.int32), tl.int32)

    # ── memory ──────────────────────────────────────────────────────────────────────────────────

    def create_addptr(self, pointer: Numbers, offset: Numbers) -> Numbers:
        bytes_each = memory_dtype(pointer.get_element_ty()).itemsize
        return Numbers(pointer.data + offset.data.astype(np.int64) * bytes_each, pointer.dtype)

    def create_load(self, pointer: Numbers, *hints: object) -> Numbers:
        memory = Memory(pointer.data, pointer.get_element_ty())
        return Numbers(memory.read(memory.at), memory.dtype)

    def create_masked_load(
        self, pointer: Numbers, mask: Numbers, other: Numbers | None, *hints: object
    ) -> Numbers:
        if mask.data.all():
            return self.create_load(pointer)
        dtype = pointer.get_element_ty()
        elsewhere = np.zeros(1, array_dtype(dtype)) if other is None else other.data
        addresses, selected, result = np.broadcast_arrays(pointer.data, mask.data, elsewhere)
        memory, result = Memory(addresses[selected], dtype), np.array(result)
        result[selected] = memory.read(memory.at)
        return Numbers(result, dtype)

    def create_store(self, pointer: Numbers, value: Numbers, *hints: object) -> None:
        self._store(*np.broadcast_arrays(pointer.data, value.data), pointer.get_element_ty())

    def create_masked_store(
        self, pointer: Numbers, value: Numbers, mask: Numbers, *hints: object
    ) -> None:
        addresses, numbers, selected = np.broadcast_arrays(pointer.data, value.data, mask.data)
        self._store(addresses[selected], numbers[selected], pointer.get_element_ty())

    def _store(self, addresses: Array, numbers: Array, dtype: tl.dtype) -> None:
        memory = Memory(addresses, dtype)
        self._note(memory)
        memory.write(memory.at, numbers)

    def _note(self, memory: Memory) -> None:
        self._written.append((memory.array, memory.at, memory.array.take(memory.at)))

    def create_atomic_rmw(
        self, op: Any, pointer: Numbers, value: Numbers, mask: Numbers, sem: object, scope: object
    ) -> Numbers:
        return self._atomic(pointer, mask.data, _ATOMIC[op], value)

    def create_atomic_cas(
        self, pointer: Numbers, expected: Numbers, value: Numbers, sem: object, scope: object
    ) -> Numbers:
        def new(old: Array, value: Array, expected: Array) -> Array:
            return np.where(old == expected, value, old)

        return self._atomic(pointer, np.ones(1, bool), new, value, expected)

    def _atomic(
        self, pointer: Numbers, mask: Array, new: Callable[..., Array], *values: Numbers
    ) -> Numbers:
        """Replace numbers one program after the other; return what each found."""
        shape = (self.count, *pointer.data.shape[1:])
        addresses, selected, *arrays = (
            np.broadcast_to(x, shape) for x in (pointer.data, mask, *(v.data for v in values))
        )
        dtype = pointer.get_element_ty()
        memory, operands = Memory(addresses[selected], dtype), [array[selected] for array in arrays]
        self._note(memory)
        found = np.zeros(len(memory.at), array_dtype(dtype))
        # In one turn come all whose address had its earlier ones.
        order = np.argsort(memory.at, kind="stable")
        at = memory.at[order]
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        turn = np.arange(len(at)) - np.repeat(starts, np.diff(starts, append=len(at)))
        by_turn = np.argsort(turn, kind="stable")
        for these in np.split(order[by_turn], np.flatnonzero(np.diff(turn[by_turn])) + 1):
            found[these] = memory.read(memory.at[these])
            memory.write(
                memory.at[these], new(found[these], *(operand[these] for operand in operands))
            )
        result = np.zeros(shape, found.dtype)
        result[selected] = found
        return Numbers(result, dtype)

    # ── arithmetic ──────────────────────────────────────────────────────────────────────────────

    def binary_op(
        self, left: Numbers, right: Numbers, op: Callable[[Array, Array], Array]
    ) -> Numbers:
        return _typed(op(left.data, right.data), left.dtype)

    def unary_op(self, value: Numbers, op: Callable[[Array], Array]) -> Numbers:
        return _typed(op(value.data), value.dtype)

    def ternary_op(
        self, a: Numbers, b: Numbers, c: Numbers, op: Callable[[Array, Array, Array], Array]
    ) -> Numbers:
        return _typed(op(a.data, b.data, c.data), c.dtype)

    def create_select(self, condition: Numbers, left: Numbers, right: Numbers) -> Numbers:
        # `Memory` is one piece, so programs that choose different tensors go on apart.
        if left.dtype.is_ptr() and condition.data.size == len(condition.data):
            condition.one()
        return super().create_select(condition, left, right)

    def create_idiv(self, left: Numbers, right: Numbers) -> Numbers:
        # The quotient is rounded towards 0. numpy's is rounded down, and fast for a constant
        # divisor.
        a, b = left.data, right.data
        if a.dtype.kind == "i" and (a.min() < 0 or b.min() < 0):
            a = a - np.fmod(a, b)
        return Numbers(a // b, left.dtype)

    def create_srem(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(left.data - self.create_idiv(left, right).data * right.data, left.dtype)

    create_urem = create_srem

    def create_ashr(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(left.data >> right.data, left.dtype)

    def create_fabs(self, value: Numbers) -> Numbers:
        return Numbers(np.abs(value.data), value.dtype)

    def create_clampf(
        self, value: Numbers, low: Numbers, high: Numbers, propagate_nan: Any
    ) -> Numbers:
        if propagate_nan == tl.PropagateNan.ALL:
            return Numbers(np.minimum(np.maximum(value.data, low.data), high.data), value.dtype)
        return Numbers(np.fmin(np.fmax(value.data, low.data), high.data), value.dtype)

    def create_minnumf(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(np.fmin(left.data, right.data), left.dtype)

    def create_maxnumf(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(np.fmax(left.data, right.data), left.dtype)

    def create_dot(
        self, a: Numbers, b: Numbers, added: Numbers, precision: object, imprecise: object
    ) -> Numbers:
        # In fp32, BLAS may sum a row in another order at another place of the tile, which a card does not.
        # In float64 the order is lost in rounding.
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(added.data.dtype)
        return _typed(product + added.data, added.dtype)

    # ── mathematical functions ──────────────────────────────────────────────────────────────────

    def create_extern_elementwise(
        self,
        library: str,
        path: str,
        symbol: str,
        arguments: list[Numbers],
        result: tl.dtype,
        pure: bool,
    ) -> Numbers:
        dtype = result.scalar
        name = libdevice.name_of(symbol)
        return Numbers(
            libdevice.compute(name, [argument.data for argument in arguments], dtype), dtype
        )

    def create_inline_asm(
        self,
        assembly: str,
        constraints: str,
        values: list[Numbers],
        types: list[tl.dtype],
        pure: bool,
        pack: int,
    ) -> Any:
        if assembly not in libdevice.ASSEMBLY:
            raise NotImplementedError(
                f"the assembly {assembly!r} has no numbers on the pretended card"
            )
        name = libdevice.ASSEMBLY[assembly]
        return _Results(
            [Numbers(libdevice.compute(name, [value.data for value in values], types[0]), types[0])]
        )

    # ── casts ───────────────────────────────────────────────────────────────────────────────────

    def cast_impl(self, value: Numbers, to: tl.dtype) -> Numbers:
        return Numbers(rounded(value.data, to), to)

    def create_fp_to_fp(self, value: Numbers, to: tl.dtype, rounding: Any) -> Numbers:
        if rounding == ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("rounding towards 0 has no numbers on the pretended card")
        return self.cast_impl(value, to)

    def create_bitcast(self, value: Numbers, to: tl.dtype) -> Numbers:
        return Numbers(
            from_memory(to_memory(value.data, value.dtype).view(memory_dtype(to)), to), to
        )

    def get_bf16(self, value: float) -> Numbers:
        """Return a constant; Triton's interpreter has all but this."""
        return Numbers(rounded(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def get_all_ones_value(self, dtype: tl.dtype) -> Numbers:
        return Numbers(np.full(1, dtype.scalar == tl.int1 or -1).astype(array_dtype(dtype)), dtype)

    # ── shapes ──────────────────────────────────────────────────────────────────────────────────

    def create_make_range(self, type_: object, start: int, stop: int) -> Numbers:
        return Numbers(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, type_: tl.block_type, value: Numbers) -> Numbers:
        return self.create_broadcast(
            self.create_reshape(value, (1,) * len(type_.shape), False), type_.shape
        )

    def create_unsplat(self, value: Numbers) -> Numbers:
        return self.create_reshape(value, (), False)

    def create_broadcast(self, value: Numbers, shape: tuple[int, ...]) -> Numbers:
        together = max(1, ELEMENTS // math.prod(shape))
        if self.count > together:
            raise Apart(np.arange(self.count) // together, together)
        return Numbers(np.broadcast_to(value.data, (len(value.data), *shape)), value.dtype)

    def create_reshape(
        self, value: Numbers, shape: tuple[int, ...], allow_reorder: bool
    ) -> Numbers:
        return Numbers(value.data.reshape(len(value.data), *shape), value.dtype)

    def create_expand_dims(self, value: Numbers, axis: int) -> Numbers:
        return Numbers(np.expand_dims(value.data, axis + 1), value.dtype)

    def create_trans(self, value: Numbers, order: list[int]) -> Numbers:
        return Numbers(value.data.transpose(0, *(axis + 1 for axis in order)), value.dtype)

    def create_cat(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(np.concatenate(self._same_programs(left, right), 1), left.dtype)

    def create_join(self, left: Numbers, right: Numbers) -> Numbers:
        return Numbers(np.stack(np.broadcast_arrays(left.data, right.data), -1), left.dtype)

    def create_gather(self, source: Numbers, indices: Numbers, axis: int) -> Numbers:
        return Numbers(
            np.take_along_axis(*self._same_programs(source, indices), axis + 1), source.dtype
        )

    def create_histogram(self, value: Numbers, bins: int, mask: Numbers | None) -> Numbers:
        hits = value.data[..., None] == np.arange(bins)
        return Numbers(
            (hits if mask is None else hits & mask.data[..., None]).sum(1, dtype=np.int32), tl.int32
        )

    def _same_programs(self, *values: Numbers) -> list[Array]:
        programs = max(len(value.data) for value in values)
        return [np.broadcast_to(value.data, (programs, *value.data.shape[1:])) for value in values]

    # ── checks ──────────────────────────────────────────────────────────────────────────────────

    def create_assert(self, condition: Numbers, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message)

    def create_assume(self, condition: Numbers) -> None:
        self.create_assert(condition, "what the kernel assumes is not so")

    # ── what has no numbers ─────────────────────────────────────────────────────────────────────

    def create_make_block_ptr(self, *args: object) -> Any:
        raise NotImplementedError("block pointers have no numbers on the pretended card")

    def create_make_tensor_descriptor(self, *args: object) -> Any:
        raise NotImplementedError("tensor descriptors have no numbers on the pretended card")


class _Results:
    def __init__(self, results: list[Numbers]) -> None:
        self.get_result = results.__getitem__


def _typed(data: Array, dtype: tl.dtype) -> Numbers:
    """Return numbers of a type, computed in one as wide or wider; truths are truths."""
    if data.dtype == bool:
        return Numbers(data, tl.int1)
    return Numbers(
        rounded(data, dtype)
        if dtype.name in NARROW
        else data.astype(array_dtype(dtype), copy=False),
        dtype,
    )


def _function(name: str) -> Callable[[Programs, Numbers], Numbers]:
    return lambda self, *values: Numbers(
        libdevice.compute(name, [value.data for value in values], values[0].dtype), values[0].dtype
    )


for _name in ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt", "fma"):
    setattr(Programs, f"create_{_name}", _function(_name))
