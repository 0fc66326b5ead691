"""CUDA's mathematical functions, by torch's on a CPU: computed in double precision and rounded
once.

Bessel's functions are the C library's, as torch's have seven digits even in double precision.

A name is that of a function in Triton's `libdevice` or, for functions of the language itself, the
builder's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from pretended_gpu.narrow import Array, rounded

# Halves the 53 digits of a double (Veltkamp; Dekker 1971, "A floating-point technique", p. 234).
SPLIT = 2.0**27 + 1


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a b + c, where the product's error and the sum's are added at the end (Dekker 1971;
    Knuth's two-sum).
    """
    product = a * b
    total = product + c
    high_a, high_b = (SPLIT * x - (SPLIT * x - x) for x in (a, b))
    low_a, low_b = a - high_a, b - high_b
    error = low_a * low_b - (((product - high_a * high_b) - low_a * high_b) - high_a * low_b)
    part = total - product
    error = error + ((product - (total - part)) + (c - part))
    return torch.where(error.isfinite(), total + error, total)


def _ilogb(x: Tensor) -> Tensor:
    return torch.where(x == 0, -(2.0**31), torch.frexp(x).exponent.double() - 1).where(
        x.isfinite(), 2.0**31 - 1
    )


def _of_the_c_library(name: str) -> Callable[[Tensor], Tensor]:
    function = getattr(ctypes.CDLL("libm.so.6"), name)
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    return lambda x: torch.tensor(
        list(map(function, x.flatten().tolist())), dtype=torch.float64
    ).view(x.shape)


SAME_NAME = """
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot
    isinf isnan lgamma log log10 log1p log2 pow reciprocal rsqrt signbit sin sinh sqrt tan tanh trunc
""".split()
DOUBLE: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in SAME_NAME} | {
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "j0": _of_the_c_library("j0"),
    "j1": _of_the_c_library("j1"),
    "y0": _of_the_c_library("y0"),
    "y1": _of_the_c_library("y1"),
    "fma": _fma,
    "fmul_rn": torch.mul,
    "dmul_rn": torch.mul,
    "powi": torch.pow,
    "ilogb": _ilogb,
    "ldexp": lambda x, n: torch.from_numpy(np.ldexp(x.numpy(), n.numpy().astype(np.int32))),
    "llrint": torch.round,
    "nearbyint": torch.round,
}
# All that Inductor writes.
ASSEMBLY = {"fma.rn.f32 $0, $1, $2, $3;": "fma", "rcp.approx.ftz.f32 $0, $1;": "reciprocal"}


def compute(name: str, arguments: list[Array], dtype: tl.dtype) -> Array:
    """Return a function's values as numbers of a type."""
    if name == "nextafter":  # the only one that depends on the type of its arguments
        return torch.nextafter(*(torch.from_numpy(np.array(x)) for x in arguments)).numpy()
    doubles = torch.broadcast_tensors(*(torch.from_numpy(x.astype(np.float64)) for x in arguments))
    return rounded(DOUBLE[name](*doubles).numpy(), dtype)


def name_of(symbol: str) -> str:
    """Return the name for a symbol of libdevice: that of `__nv_erff` is `erf`, that of
    `__nv_isinfd` is `isinf`.
    """
    full = symbol.removeprefix("__nv_")
    for name in (full, full[:-1]):
        if name in DOUBLE or name == "nextafter":
            return name
    raise NotImplementedError(f"{symbol} has no numbers on the pretended card")
