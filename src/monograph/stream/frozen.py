"""Hold the tensors of a stage that no update changes: frozen weights, and buffers of modules.

A stage is some consecutive blocks of the model, or the parts before or after them
(`monograph.stream.store`). Its frozen tensors are packed into one piece of memory, in the form in which
they are stored: weights of 4 or 8 bits stay codes and scales. So one copy brings all of them to the
device, and nothing of them ever comes back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.graph.mmap_weights import kept_dtype, replace_data
from monograph.stream.lanes import Space
from monograph.stream.placement import Placement, allocate

FROZEN = "frozen"  # the name of this memory in a `Placement`
# Tensors begin at multiples of this many bytes. torch's allocators align memory at least to 64 bytes, and
# some kernels choose their code, and so the order of their sums, by the alignment of what they read.
ALIGNMENT = 256


class PackedTensor(NamedTuple):
    """A frozen tensor with its place in a stage's memory.

    Attributes:
        tensor: the parameter or buffer of the model.
        shape: its shape.
        dtype: its dtype.
        offset: the byte at which it begins.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """Return the byte after its last one."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor's part of some memory [bytes]."""
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(eq=False)
class FrozenTensors:
    """The frozen tensors of one stage.

    Attributes:
        packed: the tensors.
        memory: their memory at home, [bytes] uint8. Outside of passes the model's tensors are views
            of it.
        space: the same memory, as a unit that work on the lanes reads or writes.
        version: how many times a caller may have changed the tensors at home. A copy in a slot
            (device memory for one stage) is outdated if its version differs.
    """

    packed: list[PackedTensor]
    memory: Tensor
    space: Space
    version: int = 0

    def bind(self, memory: Tensor) -> None:
        """Make the model's tensors views of some memory [bytes], which holds their numbers."""
        for packed in self.packed:
            packed.tensor.data = packed.view(memory)


@torch.no_grad()
def pack(
    tensors: Sequence[Tensor], stage_index: int, stage_name: str, placement: Placement
) -> FrozenTensors:
    """Move tensors to a stage's memory at home; afterwards they are views of it.

    Each tensor's old memory is freed before the next one is moved.

    Args:
        tensors: parameters and buffers, on the host or still in their files.
        stage_index: the index of the stage.
        stage_name: its name, for messages.
        placement: where buffers live.

    Raises:
        DiskFull, InputRefused: see `monograph.stream.placement.allocate`.
    """
    packed: list[PackedTensor] = []
    size = 0
    for tensor in tensors:
        offset = math.ceil(size / ALIGNMENT) * ALIGNMENT
        packed.append(PackedTensor(tensor, tuple(tensor.shape), kept_dtype(tensor), offset))
        size = packed[-1].end
    home = placement.home(stage_index, FROZEN)
    label = f"{stage_name}, {FROZEN}"
    like = torch.empty(size, dtype=torch.uint8, device="meta")
    if not tensors:
        # Neither a file nor locked pages can be empty.
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    elif any(tensor.is_meta for tensor in tensors):
        memory = like
    else:
        memory = allocate(like, home, label, placement)
    for entry in packed:
        view = entry.view(memory)
        # A weight that is still in its file has another dtype there, and `copy_` converts it.
        view.copy_(entry.tensor.data)
        replace_data(entry.tensor, view)
    return FrozenTensors(packed, memory, Space(label, home))
