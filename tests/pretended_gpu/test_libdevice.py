"""Run: make gpu-less ARGS=tests/pretended_gpu/test_libdevice.py (CUDA's functions, interpreted)"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor import lowering, utils
from triton.language.extra import libdevice

mpmath.mp.prec = 80


class Function(NamedTuple):
    """A function's exact values, where they are asked for, and its error in fp64 in units of the
    last place.

    Few have an error of more than one unit. Then it is CUDA's own bound (CUDA C++ Programming
    Guide, "Mathematical Functions").
    """

    exact: Any
    low: float = -3.0
    high: float = 3.0
    arguments: int = 1
    units: int = 1


FUNCTIONS = {
    "acos": Function(mpmath.acos, -1, 1),
    "acosh": Function(mpmath.acosh, 1, 50),
    "asin": Function(mpmath.asin, -1, 1),
    "asinh": Function(mpmath.asinh),
    "atan": Function(mpmath.atan),
    "atan2": Function(mpmath.atan2, arguments=2),
    "atanh": Function(mpmath.atanh, -1, 1),
    "ceil": Function(mpmath.ceil),
    "copysign": Function(lambda x, y: math.copysign(x, y), arguments=2),
    "cos": Function(mpmath.cos, -100, 100),
    "cosh": Function(mpmath.cosh),
    "cyl_bessel_i0": Function(lambda x: mpmath.besseli(0, x), units=6),
    "cyl_bessel_i1": Function(lambda x: mpmath.besseli(1, x), units=6),
    "erf": Function(mpmath.erf),
    "erfc": Function(mpmath.erfc),
    "erfcx": Function(lambda x: mpmath.exp(x * x) * mpmath.erfc(x), units=4),
    "erfinv": Function(mpmath.erfinv, -0.99, 0.99),
    "exp": Function(mpmath.exp, -80, 80),
    "exp2": Function(lambda x: mpmath.mpf(2) ** x, -100, 100),
    "expm1": Function(mpmath.expm1),
    "floor": Function(mpmath.floor),
    "fma": Function(lambda x, y, z: mpmath.mpf(x) * y + z, arguments=3),
    "fmod": Function(lambda x, y: math.fmod(x, y), arguments=2),
    "hypot": Function(mpmath.hypot, arguments=2),
    "ilogb": Function(lambda x: math.frexp(x)[1] - 1),
    "isinf": Function(math.isinf),
    "isnan": Function(math.isnan),
    "j0": Function(lambda x: mpmath.besselj(0, x), units=7),
    "j1": Function(lambda x: mpmath.besselj(1, x), units=7),
    "ldexp": Function(lambda x, n: math.ldexp(x, n), arguments=2),
    "lgamma": Function(lambda x: mpmath.log(abs(mpmath.gamma(x))), 3, 30),
    "llrint": Function(round, -9, 9),
    "log": Function(mpmath.log, 0, 50),
    "log10": Function(mpmath.log10, 0, 50),
    "log1p": Function(mpmath.log1p, -1, 5),
    "log2": Function(lambda x: mpmath.log(x, 2), 0, 50),
    "mul_rn": Function(lambda x, y: mpmath.mpf(x) * y, arguments=2),
    "nearbyint": Function(round, -9, 9),
    "nextafter": Function(None, arguments=2),
    "pow": Function(lambda x, y: mpmath.mpf(x) ** y, 0.01, 5, arguments=2),
    "rsqrt": Function(lambda x: 1 / mpmath.sqrt(x), 0, 50),
    "signbit": Function(lambda x: math.copysign(1, x) < 0),
    "sin": Function(mpmath.sin, -100, 100),
    "sinh": Function(mpmath.sinh),
    "sqrt": Function(mpmath.sqrt, 0, 50),
    "tan": Function(mpmath.tan),
    "tanh": Function(mpmath.tanh),
    "trunc": Function(lambda x: int(x)),
    "y0": Function(lambda x: mpmath.bessely(0, x), 0, 8, units=7),
    "y1": Function(lambda x: mpmath.bessely(1, x), 0, 8, units=7),
}
NUMBERS = 64


@triton.jit
def applied(result, x, y, z, FUNCTION: tl.constexpr, ARGUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ARGUMENTS == 1:
        value = FUNCTION(tl.load(x + at))
    elif ARGUMENTS == 2:
        value = FUNCTION(tl.load(x + at), tl.load(y + at))
    else:
        value = FUNCTION(tl.load(x + at), tl.load(y + at), tl.load(z + at))
    tl.store(result + at, value)


def test_all_functions_that_inductor_writes_have_numbers() -> None:
    source = Path(lowering.__file__).parent
    written = {
        name
        for file in [*source.rglob("*.py"), *source.rglob("*.jinja")]
        for name in re.findall(r"libdevice\.(\w+)\(", file.read_text())
    } | (utils.op_requires_libdevice_fp64 - {"sigmoid"})  # whose exp it is
    # fast_tanhf is that of another maker's cards.
    assert written - {"fast_tanhf", "is_file"} <= set(FUNCTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_exact_to_one_unit(name: str, dtype: torch.dtype) -> None:
    """Those in fp32 are rounded once from double precision. The exact values have 80 bits."""
    function, generator = FUNCTIONS[name], torch.Generator().manual_seed(0)
    numbers = [
        (
            function.low
            + (function.high - function.low)
            * torch.rand(NUMBERS, generator=generator, dtype=torch.float64)
        )
        for _ in range(function.arguments)
    ]
    inputs = [number.to(dtype) for number in numbers]
    if name == "ldexp":
        inputs[1] = inputs[1].to(torch.int32)
    result = computed(getattr(libdevice, name), inputs, kind(name, dtype))
    if name == "nextafter":
        assert result.equal(torch.nextafter(*inputs))
        return
    exact = [
        function.exact(*numbers) for numbers in zip(*(x.tolist() for x in inputs), strict=True)
    ]
    for got, wanted in zip(result.tolist(), exact, strict=True):
        unit = 2.0 ** (math.frexp(float(wanted))[1] - 1) * torch.finfo(dtype).eps
        units = function.units if dtype == torch.float64 else 1
        assert abs(mpmath.mpf(got) - wanted) <= units * unit, (got, wanted)


def kind(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a function's values."""
    whole = {
        "llrint": torch.int64,
        "ilogb": torch.int32,
        "isinf": torch.int32,
        "isnan": torch.int32,
    }
    return (whole | {"signbit": torch.int32}).get(name, dtype)


def computed(function: Any, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    result = torch.empty(NUMBERS, dtype=dtype, device="cuda")
    arguments = [x.cuda() for x in inputs] + [None] * (3 - len(inputs))
    applied[(NUMBERS // 16,)](result, *arguments, function, len(inputs), 16)
    return result.cpu()


def test_what_is_not_finite_is_seen() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e38, -1.0, 2.0] * 8)
    assert computed(libdevice.isinf, [x], torch.int32).bool().equal(x.isinf())
    assert computed(libdevice.isnan, [x], torch.int32).bool().equal(x.isnan())
    assert computed(libdevice.signbit, [x], torch.int32).bool().equal(x.signbit())


def test_a_function_without_numbers_raises_by_name() -> None:
    with pytest.raises(NotImplementedError, match="__nv_cbrtf has no numbers"):
        computed(libdevice.cbrt, [torch.ones(NUMBERS)], torch.float32)


def test_a_type_that_cuda_has_not_raises() -> None:
    """As its compiler does: Inductor must have cast bfloat16 before."""
    with pytest.raises(KeyError, match="bfloat16"):
        computed(libdevice.exp, [torch.ones(NUMBERS, dtype=torch.bfloat16)], torch.bfloat16)
