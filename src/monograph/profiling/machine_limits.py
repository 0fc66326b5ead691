"""Measure the rates of a profiled engine's device, and how long its products would take in bf16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from monograph.device import clock, compiler_obstacle, describe, measured_matmul_flops, mkl_is_slow, synchronize
from monograph.engine import Engine
from monograph.graph.matmul import onednn
from monograph.predict.roofline import measured_memory_bytes_per_s
from monograph.profiling.bottleneck import Machine, Situation
from monograph.profiling.intervals import Kernel, Operands, Part

COLD_BYTES = 2**26  # operands of this many bytes in all take turns, so that they are not in the caches
# Seconds in bf16 over seconds in fp32, without an optimizer's products. On a CPU, compiled code converts each number
# twice (docs/profile.md); other devices compute with 16-bit numbers as they are.
BF16_ON_CPU: Mapping[Part, float] = {"attention": 0.65, "elementwise": 1.1, "optimizer": 1.7}
BF16: Mapping[Part, float] = {"elementwise": 0.5, "optimizer": 1.0}
KINDS = 12  # this many shapes of products are timed in bf16: those that take longest
ROUNDS = 3  # rounds of timing a product; the quickest counts


def machine_of(engine: Engine) -> Machine:
    """Return the rates of the engine's device in the engine's dtype."""
    device, dtype = engine.step.device, engine.step.precision.dtype
    known = describe(device).bandwidth_bytes_per_s  # a card's from its datasheet, as only the host's is measured here
    return Machine(measured_matmul_flops(device, dtype), known or measured_memory_bytes_per_s())


def situation_of(engine: Engine, kernels: Sequence[Kernel], micro_steps: int, used: float, packed: float) -> Situation:
    """Return how the engine is set up, and the ratio of its products' time in bf16 to that in fp32."""
    step, device = engine.step, engine.step.device
    narrow: dict[Part, float] = {}
    # An eager step casts its weights in each micro-step, which costs about as much as bf16 saves.
    if step.precision.name == "fp32" and step.scope != "none" and describe(device).has_bf16:
        products = _in_bf16(device, kernels)
        narrow = {"matmul": products, "loss head": products, "attention": products}
        narrow |= BF16_ON_CPU if device.type == "cpu" else BF16
    can_compile = device.type == "cuda" or compiler_obstacle() is None
    return Situation(step.scope != "none", can_compile, micro_steps, narrow, used, packed)


def _in_bf16(device: torch.device, kernels: Sequence[Kernel]) -> float:
    """Return the seconds in bf16 over those in fp32 for the run's longest products, outside the caches."""
    taken: defaultdict[Operands, list[float]] = defaultdict(list)
    for kernel in kernels:
        if kernel.part in ("matmul", "loss head") and kernel.operands and kernel.flops:
            taken[kernel.operands].append(kernel.seconds)
    dearest = sorted(taken, key=lambda kind: -sum(taken[kind]))[:KINDS]
    wide, narrow = (
        sum(len(taken[kind]) * _product_s(device, dtype, kind) for kind in dearest)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return narrow / wide if wide else 1.0


def _product_s(device: torch.device, dtype: torch.dtype, operands: Operands) -> float:
    """Return the seconds of one product: the mean of the quickest of a few rounds over several operands."""
    sizes = [1 + sum((side - 1) * stride for side, stride in zip(*operand, strict=True)) for operand in operands]
    count = min(64, max(2, COLD_BYTES // (sum(sizes) * dtype.itemsize)))
    given = [
        [
            torch.ones(size, device=device, dtype=dtype).as_strided(*operand)
            for size, operand in zip(sizes, operands, strict=True)
        ]
        for _ in range(count)
    ]
    # Multiply as a captured step does.
    by_onednn = device.type == "cpu" and dtype == torch.float32 and len(operands[0][0]) == 2 and mkl_is_slow()
    multiply, times = onednn if by_onednn else torch.matmul, []
    for _ in range(ROUNDS):
        began = clock()
        for left, right in given:
            multiply(left, right)
        synchronize(device)
        times.append((clock() - began) / count)
    return min(times)
