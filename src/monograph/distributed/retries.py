"""Let several ranks go on, or begin again, together when one of them runs out of memory."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from monograph.distributed.replicated import Replicas
from monograph.distributed.world import World
from monograph.errors import InputRefused, OutOfDeviceMemory
from monograph.step import Step
from monograph.step.retries import Retries, Share, empty_cache, out_of_memory

T = TypeVar("T")


class BeginAgain(Retries):
    """The retries of ranks that wait for each other in the middle of a pass: all of them have to be
    restarted.
    """

    def __init__(self, micro_batch: int | None, world: World):
        """Take the rows of a micro-batch and the ranks."""
        super().__init__(micro_batch, share=Share(world.size, world.rank))
        self.world = world

    def fitting(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`.

        Raises:
            OutOfDeviceMemory: memory ran out; `retry_rows` says with how many rows a restart would
                fit.
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


class Together(Retries):
    """The retries of ranks that each hold the whole module: all of them step down when one has to."""

    def __init__(self, micro_batch: int | None, replicas: Replicas):
        """Take the rows of a micro-batch and the parameters."""
        super().__init__(micro_batch, share=Share(replicas.world.size, replicas.world.rank))
        self.replicas = replicas

    def fitting(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()` of every rank; see `Retries.fitting`."""
        world = self.replicas.world
        if any(isinstance(module, nn.SyncBatchNorm) for module in step.model.modules()):
            # The others wait for this rank's rows in the middle of a pass.
            alone = BeginAgain(self.micro_batch, world)
            return alone.fitting(step, rows, work)

        # A rank that fails first takes part in the sums of gradients that the others wait for.
        def together() -> T:
            try:
                done = work()
                message = ""
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            if message:
                empty_cache(step.device)
                for bucket in self.replicas.buckets[len(self.replicas.summed) :]:
                    world.sum(torch.zeros_like(bucket, device=step.device))
            if world.any(bool(message))[0]:
                raise torch.OutOfMemoryError(message or "on another rank")
            return done

        return super().fitting(step, rows, together)
