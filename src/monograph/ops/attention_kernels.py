"""Which of torch's kernels computes causal attention fastest on a GPU: those that can, timed on a run's own shapes.

Shape suffixes: B batch, H query heads, K key-value heads, T queries and keys, D head dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch

from monograph.device import clock, synchronize
from monograph.ops.attention import Kernel, attention

# The unfused path is none: it keeps the scores of all pairs, which no plan of the memory expects.
KERNELS: tuple[Kernel, ...] = ("torch", "cudnn", "flash", "efficient")
ROUNDS, CALLS = 5, 4
MARGIN = 1.05  # how much faster than torch's own choice a kernel has to be, or the clock's noise would choose


def timed(
    attempt: Callable[[Kernel], object], finish: Callable[[], object], now: Callable[[], float] = clock
) -> dict[Kernel, float]:
    """Seconds of a call of `attempt`, the least of a few, by the kernels that it does not fail with.

    Args:
        attempt: runs one kernel; a RuntimeError says that it cannot, out of memory being one.
        finish: waits until what `attempt` began is done.
        now: the clock.
    """
    able: list[Kernel] = []
    for kernel in KERNELS:
        try:
            attempt(kernel)
            finish()
        except RuntimeError:
            continue
        able.append(kernel)
    times = dict.fromkeys(able, float("inf"))
    for _ in range(ROUNDS):  # in turn: what disturbs the machine for a while disturbs all alike
        for kernel in able:
            began = now()
            for _ in range(CALLS):
                attempt(kernel)
            finish()
            times[kernel] = min(times[kernel], (now() - began) / CALLS)
    return times


def fastest(times: Mapping[Kernel, float]) -> Kernel:
    """The kernel that takes the least time, "torch" if none is faster than that by the margin."""
    if not times:
        return "torch"
    best = min(times, key=times.__getitem__)
    return best if MARGIN * times[best] <= times.get("torch", float("inf")) else "torch"


def compared(times: Mapping[Kernel, float], kernel: Kernel) -> str:
    """In words: the kernel that is used, and how many times as fast as torch's choice each of them is."""
    if "torch" not in times:
        return f"{kernel}, as torch's choice cannot run here"
    speeds = {name: times["torch"] / seconds for name, seconds in times.items() if name != "torch"}
    each = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    used = "torch's choice" if kernel == "torch" else kernel
    return f"{used}; times as fast as torch's choice: {each or 'no other can run here'}"


def time_kernels(
    batch: int, heads: tuple[int, int], length: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[Kernel, float]:
    """Seconds of causal attention forward and backward, by kernel; none where there is no memory for its inputs.

    Args:
        batch: rows, B.
        heads: H and K.
        length: T.
        size: D.
        dtype: of queries, keys and values.
        device: where.
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay where they are

    def drawn(heads: int) -> torch.Tensor:
        made = torch.randn(batch, length, heads, size, device=device, dtype=dtype, generator=generator)
        return made.transpose(1, 2)

    try:
        query_BHTD, key_BKTD, value_BKTD = (drawn(each).requires_grad_() for each in (heads[0], heads[1], heads[1]))
        cotangent_BHTD = drawn(heads[0])
    except torch.OutOfMemoryError:
        return {}

    def attempt(kernel: Kernel) -> None:
        out_BHTD = attention(query_BHTD, key_BKTD, value_BKTD, None, "sdpa", kernel)
        torch.autograd.grad(out_BHTD, (query_BHTD, key_BKTD, value_BKTD), cotangent_BHTD)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that cannot, and why
        return timed(attempt, lambda: synchronize(device))
