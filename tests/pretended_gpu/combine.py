"""Triton's reductions and scans with any function that combines two blocks, for all programs and
rows at once.

A reduction combines one half of a block with the other until one number is left, as the threads of
a card do. A scan combines each number with the one 1, 2, 4, ... before it (Hillis and Steele 1986,
"Data parallel algorithms").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from pretended_gpu.programs import Numbers

Tensors = tuple[tl.tensor, ...]


def reduce(
    input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False, **ignored: Any
) -> Any:  # noqa: A002
    """Return what `tl.reduce` returns."""
    if isinstance(input, tl.tensor):
        return reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = tl.core._unwrap_if_constexpr(axis), tl.core._unwrap_if_constexpr(keep_dims)
    values, rank = tuple(input), len(input[0].shape)
    if axis is None:
        values, along = (
            tuple(_tensor(v, v.handle.data.reshape(len(v.handle.data), -1)) for v in values),
            1,
        )
    else:
        along = axis % rank + 1
    while (size := values[0].handle.data.shape[along]) > 1:
        halves = (slice(0, size // 2), slice(size // 2, size))
        first, second = (tuple(_part(value, along, half) for value in values) for half in halves)
        values = _combined(combine_fn, first, second)
    if keep_dims:
        shape = [1] * rank if axis is None else values[0].handle.data.shape[1:]
        return tuple(_tensor(v, v.handle.data.reshape(-1, *shape)) for v in values)
    return tuple(_tensor(v, np.squeeze(v.handle.data, along)) for v in values)


def scan(
    input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False, **ignored: Any
) -> Any:  # noqa: A002
    """Return what `tl.associative_scan` returns."""
    if isinstance(input, tl.tensor):
        return scan((input,), axis, combine_fn, reverse)[0]
    along = tl.core._unwrap_if_constexpr(axis) % len(input[0].shape) + 1
    turned = (
        (lambda x: np.flip(x, along)) if tl.core._unwrap_if_constexpr(reverse) else (lambda x: x)
    )
    values = tuple(_tensor(value, turned(value.handle.data)) for value in input)
    size, distance = values[0].handle.data.shape[along], 1
    place = np.arange(size).reshape([-1] + [1] * (values[0].handle.data.ndim - along - 1))
    while distance < size:
        before = tuple(
            _tensor(value, np.roll(value.handle.data, distance, along)) for value in values
        )
        new = _combined(combine_fn, before, values)
        values = tuple(
            _tensor(value, np.where(place >= distance, more.handle.data, value.handle.data))
            for value, more in zip(values, new, strict=True)
        )
        distance *= 2
    return tuple(_tensor(value, turned(value.handle.data)) for value in values)


def _combined(combine_fn: Callable[..., Any], first: Tensors, second: Tensors) -> Tensors:
    results = combine_fn(*first, *second)
    return (results,) if isinstance(results, tl.tensor) else tuple(results)


def _part(value: tl.tensor, axis: int, part: slice) -> tl.tensor:
    return _tensor(value, value.handle.data[(slice(None),) * axis + (part,)])


def _tensor(like: tl.tensor, data: Any) -> tl.tensor:
    shape = list(data.shape[1:])
    return tl.tensor(
        Numbers(data, like.dtype), tl.block_type(like.dtype, shape) if shape else like.dtype
    )
