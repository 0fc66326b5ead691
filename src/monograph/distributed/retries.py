"""Let ranks continue with smaller micro-batches, or restart, when one of them runs out of memory."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from monograph.distributed.replicated import Replicas
from monograph.distributed.world import World
from monograph.errors import InputRefused, OutOfDeviceMemory
from monograph.step import Step
from monograph.step.retries import RankShare, Retries, empty_cache, out_of_memory

T = TypeVar("T")


class RestartAll(Retries):
    """The retries of ranks that wait for each other in the middle of a pass.

    If one rank fails in a pass, the others wait for it, so all ranks must be restarted.
    """

    def __init__(self, micro_batch: int | None, world: World):
        """Store the rows of a micro-batch and the ranks."""
        super().__init__(micro_batch, share=RankShare(world.size, world.rank))
        self.world = world

    def fitting(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`; see `Retries.fitting`.

        Raises:
            OutOfDeviceMemory: memory ran out; its `retry_rows` are the rows of a micro-batch to
                restart with, or 0 if micro-batches cannot be smaller.
        """
        try:
            return work()
        except (RuntimeError, InputRefused) as error:
            if not out_of_memory(error):
                raise
            size = self.size(rows())
            remedy = "let torchrun restart it (--max-restarts 3), or " if size > 1 else ""
            failed = OutOfDeviceMemory(
                f"rank {self.world.rank}: out of memory at micro_batch = {size}: {str(error).splitlines()[0]}; "
                f"{remedy}use a smaller train.micro_batch, model or sequence_length"
            )
            failed.retry_rows = (size + 1) // 2 if size > 1 else 0
            raise failed from error


class RetryTogether(Retries):
    """The retries of ranks that each have the whole module.

    If memory runs out on one rank, all ranks repeat the work with smaller micro-batches.
    """

    def __init__(self, micro_batch: int | None, replicas: Replicas):
        """Store the rows of a micro-batch and the parameters."""
        super().__init__(micro_batch, share=RankShare(replicas.world.size, replicas.world.rank))
        self.replicas = replicas

    def fitting(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`, after all ranks have done it; see `Retries.fitting`."""
        world = self.replicas.world
        if any(isinstance(module, nn.SyncBatchNorm) for module in step.model.modules()):
            # With such a module, ranks wait for each other in the middle of a pass.
            restarts = RestartAll(self.micro_batch, world)
            return restarts.fitting(step, rows, work)

        def work_together() -> T:
            try:
                result = work()
                message = ""
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            if message:
                empty_cache(step.device)
                # The other ranks wait for the sums of this rank's remaining gradients.
                for bucket in self.replicas.buckets[len(self.replicas.summed) :]:
                    world.sum(torch.zeros_like(bucket, device=step.device))
            if world.any(bool(message))[0]:
                raise torch.OutOfMemoryError(message or "on another rank")
            return result

        return super().fitting(step, rows, work_together)
