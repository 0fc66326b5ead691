"""What ranks do when one of them runs out of memory: take smaller micro-batches, or restart."""

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

    def run(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`; see `Retries.run`.

        Raises:
            OutOfDeviceMemory: memory ran out; its `retry_rows` are the rows of a micro-batch to
                restart with, or 0 if micro-batches cannot be smaller.
        """
        try:
            return work()
        except (RuntimeError, InputRefused) as error:
            if not out_of_memory(error):
                raise
            micro_batch = self.rows_per_micro_batch(rows())
            can_shrink = micro_batch > 1
            remedy = "let torchrun restart it (--max-restarts 3), or " if can_shrink else ""
            failure = OutOfDeviceMemory(
                f"rank {self.world.rank}: out of memory at micro_batch = {micro_batch}: "
                f"{str(error).splitlines()[0]}; {remedy}use a smaller train.micro_batch, model or sequence_length"
            )
            failure.retry_rows = (micro_batch + 1) // 2 if can_shrink else 0
            raise failure from error


class RetryTogether(Retries):
    """The retries of ranks that each have all parameters.

    If memory runs out on one rank, all ranks repeat the work with smaller micro-batches.
    """

    def __init__(self, micro_batch: int | None, replicas: Replicas):
        """Store the rows of a micro-batch and the parameters."""
        super().__init__(micro_batch, share=RankShare(replicas.world.size, replicas.world.rank))
        self.replicas = replicas

    def run(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`, after all ranks have done it; see `Retries.run`."""
        world = self.replicas.world
        if any(isinstance(module, nn.SyncBatchNorm) for module in step.model.modules()):
            # With such a module, ranks wait for each other in the middle of a pass.
            restarts = RestartAll(self.micro_batch, world)
            return restarts.run(step, rows, work)

        def work_together() -> T:
            """Do the work, and raise OutOfMemoryError on all ranks if memory ran out on any of them."""
            try:
                result = work()
                message = ""
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            if message:
                empty_cache(step.device)
                # The other ranks still sum the rest of DDP's buckets of gradients, and wait for this rank.
                # It takes part with zeros.
                for bucket in self.replicas.buckets[len(self.replicas.summed) :]:
                    world.sum(torch.zeros_like(bucket, device=step.device))
            [has_any_failed] = world.any(bool(message))
            if has_any_failed:
                raise torch.OutOfMemoryError(message or "on another rank")
            return result

        return super().run(step, rows, work_together)
