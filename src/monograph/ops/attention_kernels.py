"""Find torch's fastest kernel for causal attention on a GPU, by timing a run's own shapes.

Shapes: B rows, T positions, H query heads, K key-value heads, D head dimension.
"""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from monograph.device import clock, synchronize
from monograph.ops.attention import AttentionKernel, attention

# torch's unfused kernel is not among them. It keeps the scores of all pairs of a query and a key, and no memory
# plan has room for these.
KERNELS: tuple[AttentionKernel, ...] = ("torch", "cudnn", "flash", "efficient")
# Each kernel is timed ROUNDS times, over CALLS calls.
ROUNDS = 5
CALLS = 4
# A kernel is chosen only if it is this many times as fast as torch's own choice. A smaller difference
# may be noise.
MARGIN = 1.05


def time_each(
    attempt: Callable[[AttentionKernel], object],
    finish: Callable[[], object],
    now: Callable[[], float] = clock,
) -> dict[AttentionKernel, float]:
    """Return the shortest time of a call of each kernel in seconds, without kernels that fail.

    Args:
        attempt: runs a kernel; raises RuntimeError if it cannot, including a lack of memory.
        finish: waits until the work that `attempt` launched is done.
        now: the clock.
    """
    working: list[AttentionKernel] = []
    for kernel in KERNELS:
        try:
            attempt(kernel)
            finish()
        except RuntimeError:
            continue
        working.append(kernel)
    shortest_s = dict.fromkeys(working, float("inf"))
    # Kernels take turns, so that other load on the machine affects all of them.
    for _ in range(ROUNDS):
        for kernel in working:
            start_s = now()
            for _ in range(CALLS):
                attempt(kernel)
            finish()
            call_s = (now() - start_s) / CALLS
            shortest_s[kernel] = min(shortest_s[kernel], call_s)
    return shortest_s


def fastest(times: Mapping[AttentionKernel, float]) -> AttentionKernel:
    """Return the fastest kernel; "torch" unless another one is faster by MARGIN."""
    if not times:
        return "torch"
    best = min(times, key=times.__getitem__)
    torch_time = times.get("torch", float("inf"))
    return best if MARGIN * times[best] <= torch_time else "torch"


def describe_speeds(times: Mapping[AttentionKernel, float], kernel: AttentionKernel) -> str:
    """Return a text with the chosen kernel, and each kernel's speed relative to torch's choice."""
    if "torch" not in times:
        return f"{kernel}, as torch's choice cannot run here"
    speeds = {name: times["torch"] / seconds for name, seconds in times.items() if name != "torch"}
    listed = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    used = "torch's choice" if kernel == "torch" else kernel
    return f"{used}; times as fast as torch's choice: {listed or 'no other can run here'}"


def time_kernels(
    batch: int,
    heads: tuple[int, int],
    length: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[AttentionKernel, float]:
    """Return the seconds of causal attention, forward and backward, by kernel.

    The dict is empty if there is no memory for the inputs.

    Args:
        batch: the number of rows, B.
        heads: the numbers of query heads and of key-value heads, (H, K).
        length: the number of positions, T.
        size: the head dimension, D.
        dtype: dtype of queries, keys and values.
        device: the device to time on.
    """
    # A separate generator, so that the run's random state does not change.
    generator = torch.Generator(device).manual_seed(0)

    def sample(heads: int) -> Tensor:
        return torch.randn(
            batch, length, heads, size, device=device, dtype=dtype, generator=generator
        ).transpose(1, 2)

    try:
        query_BHTD, key_BKTD, value_BKTD = (
            sample(count).requires_grad_() for count in (heads[0], heads[1], heads[1])
        )
        cotangent_BHTD = sample(heads[0])
    except torch.OutOfMemoryError:
        return {}

    def attempt(kernel: AttentionKernel) -> None:
        out_BHTD = attention(query_BHTD, key_BKTD, value_BKTD, None, "sdpa", kernel)
        torch.autograd.grad(out_BHTD, (query_BHTD, key_BKTD, value_BKTD), cotangent_BHTD)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about every kernel that cannot run
        return time_each(attempt, lambda: synchronize(device))
