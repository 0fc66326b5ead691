"""Collectives of the pretended card, in place of NCCL's: gloo exchanges the numbers, on the same
memory.

    stream of collectives      waits for the current stream, then exchanges what it was given, in the order of the calls
    `wait` of a collective     makes the current stream wait for it, and not the host

That is NCCL's way, which takes no memory from torch's allocator either. The group is torch's own
`cpu:gloo,cuda:nccl`, whose NCCL is made but never called. In `order.deferred` the host waits for
each collective: a real card goes on while its host waits for another rank, and a pretended one does
not, so that both ranks would wait for ever.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import Work
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map

from pretended_gpu import card, order
from pretended_gpu.memory import on_host

# Each writes its first argument.
NAMES = (
    "allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_",
    "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "alltoall_base_",
)  # fmt: skip
_library = torch.library.Library("c10d", "IMPL")


def install() -> None:
    """Replace the CUDA kernels of the collectives, for as long as the process lives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replaced kernel would be one
        for name in NAMES:
            _library.impl(name, functools.partial(_collective, name), "CUDA")


@functools.cache
def stream(number: int) -> torch.cuda.Stream:
    """Return the stream in which a card's collectives follow one another."""
    return torch.cuda.Stream(number)


def _collective(name: str, result: Any, *arguments: Any) -> Any:
    operator = getattr(torch.ops.c10d, name).default
    device = next(value.device for value in tree_leaves(result) if isinstance(value, torch.Tensor))
    side = stream(device.index)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        card.launch("nccl", name, side.cuda_stream)
        order.launch(
            functools.partial(_exchange, operator, tree_map(on_host, [result, *arguments]))
        )
        if order.is_deferred():
            order.wait()
        future: Future[Any] = Future(devices=[device])
        # Recorded in this stream, so that who waits for it makes his own wait.
        future.set_result(result)
    work = _create_work_from_future(future).boxed()
    return work if len(operator._schema.returns) == 1 else (result, work)


def _exchange(operator: Any, arguments: list[Any]) -> None:
    returned = operator(*arguments)
    Work.unbox(returned[-1] if isinstance(returned, tuple) else returned).wait()
