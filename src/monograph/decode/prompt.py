"""Reading prompts: one at a time, in chunks of a fixed size at fixed positions, into a cache with one row.

A prompt's keys and values thus depend on the prompt alone. Its last token is left to the first decode step.

Shape suffixes: T positions of a chunk; 1 is the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monograph.decode.cache import KVCache, visible_blocks
from monograph.model.llama import Llama


class Reader:
    """A cache that holds the prompt read last."""

    def __init__(self, model: Llama, slots: int, chunk: int, wrap: Callable[[Callable], Callable]) -> None:  # type: ignore[type-arg]
        """Prepare.

        Args:
            model: in evaluation mode.
            slots: the longest prompt.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: compiles a function, or returns it as it is.
        """
        weight = model.lm_head.weight
        self.model, self.chunk, self.device = model, chunk, weight.device
        self.cache = KVCache.allocate(model.config, 1, slots, weight.dtype, weight.device)
        self._pass = wrap(self._read_chunk)
        self._held: tuple[int, ...] = ()

    def read(self, prompt: Sequence[int]) -> KVCache:
        """The cache with the keys and values of all tokens but the last; nothing is computed twice in a row."""
        tokens = tuple(prompt[:-1])
        if tokens != self._held:
            self._held = ()
            padded = torch.zeros(-(-len(tokens) // self.chunk) * self.chunk, dtype=torch.int64)
            padded[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            for begin in range(0, len(tokens), self.chunk):
                chunk_1T = padded[None, begin : begin + self.chunk].to(self.device)
                start = torch.full((1, 1), begin, device=self.device)
                self._pass(chunk_1T, start, visible_blocks(begin + self.chunk, self.cache.blocks))
            self._held = tokens
        return self.cache

    def forget(self) -> None:
        """Clear the cache: it may hold numbers that are not finite."""
        self.cache.clear(0)
        self._held = ()

    @torch.no_grad()
    def _read_chunk(self, tokens_1T: Tensor, start_11: Tensor, blocks: int) -> None:
        positions_1T = start_11 + torch.arange(tokens_1T.shape[1], device=self.device)
        self.model(tokens_1T, positions=positions_1T, cache=self.cache.first(blocks))
