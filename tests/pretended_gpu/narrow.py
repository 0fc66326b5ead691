"""Numbers of Triton's types as numpy arrays: floats that numpy lacks are float32 arrays of values
that the type has.

So float16, bfloat16 and the two fp8 types are computed in float32 and rounded after each operation,
as a card does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl

Array = np.ndarray[Any, Any]

# By name, as types are made anew all the time.
NARROW = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_NUMPY = {"int1": np.dtype(bool), "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)} | {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_BITS = {1: torch.uint8, 2: torch.int16}


def array_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the dtype of the arrays that have a Triton type's numbers; addresses are int64."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.int64)
    return np.dtype(np.float32) if scalar.name in NARROW else _NUMPY[scalar.name]


def memory_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the dtype in which memory has them."""
    narrow = NARROW.get(dtype.scalar.name)
    return (
        array_dtype(dtype)
        if narrow is None
        else np.dtype(np.uint8 if narrow.itemsize == 1 else np.int16)
    )


def to_memory(data: Array, dtype: tl.dtype) -> Array:
    """Return the bits, as memory has them, of numbers that the type has."""
    narrow = NARROW.get(dtype.scalar.name)
    if narrow is None:
        return data
    return _tensor(data).to(narrow).view(_BITS[narrow.itemsize]).numpy()


def from_memory(bits: Array, dtype: tl.dtype) -> Array:
    """Return the numbers of what memory has."""
    narrow = NARROW.get(dtype.scalar.name)
    return bits if narrow is None else _tensor(bits).view(narrow).float().numpy()


def rounded(data: Array, dtype: tl.dtype) -> Array:
    """Return any numbers as numbers of the type, rounded to the nearest, ties to even.

    Those too large for fp8 become its largest, as in PTX (`cvt.rn.satfinite`, the only conversion
    to fp8 that it has).
    """
    narrow = NARROW.get(dtype.scalar.name)
    if narrow is None:
        return data.astype(array_dtype(dtype), copy=False)
    values = _tensor(data)
    if narrow.itemsize == 1:
        largest = torch.finfo(narrow).max
        values = values.clamp(-largest, largest)
    return values.to(narrow).float().numpy()


def _tensor(data: Array) -> torch.Tensor:
    # torch takes no array that is broadcast, and none that is turned round.
    if not data.flags.writeable or min(data.strides, default=0) < 0:
        data = np.array(data)
    return torch.from_numpy(data)
