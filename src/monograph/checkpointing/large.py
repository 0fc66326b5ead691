"""Tensors of a file too large to have in memory beside what they are copied into: each is read when it is asked for."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from monograph.storage import blocks, tensor_layout

KEPT_BLOCKS = 4  # that were read last: a tensor may begin in the block in which the one before it ended


class LargeFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, in the file's order, read block by block and verified as they are read.

    The file is the one that was opened, whatever becomes of its name.
    """

    def __init__(
        self, descriptor: int, entries: list[tensor_layout.Entry], start: int, read: Callable[[int, int], bytes]
    ):
        """Keep the file open for as long as this lives.

        Args:
            descriptor: of the open file; a duplicate is kept.
            entries: its tensors.
            start: of the tensors' bytes in the file.
            read: the block of an index from a descriptor; raises unless it has the digest that it should have.
        """
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file)
        self._entries, self._start, self._read = {entry.name: entry for entry in entries}, start, read
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        target, at = tensor_layout.bytes_of(tensor), self._start + entry.begin
        done = 0
        while done < len(target):
            index, offset = divmod(at + done, blocks.BLOCK_BYTES)
            part = self._block(index)[offset : offset + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
        return tensor

    def _block(self, index: int) -> bytes:
        found = self._blocks.pop(index, None)
        if found is None:
            found = self._read(self._file, index)
        self._blocks[index] = found
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return found
