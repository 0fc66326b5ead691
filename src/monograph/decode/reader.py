"""Reads prompts into a cache of its own, from which rows copy their keys and values.

Prompts are read in chunks of a fixed size at fixed positions, by passes of a fixed number of rows (one, unless a caller
wants more), so that a prompt's keys and values depend on the prompt alone. So whole chunks that another prompt has in
common with it need not be read again, if the recurrences of layers without attention are known there. The first decode
step reads a prompt's last token, unless the reader does (`Slots.least`).

Shapes: R rows of the reader's cache, T positions of a chunk, D hidden size, 1 broadcasts.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from monograph.decode.cache import KVCache, Slots
from monograph.device import sent
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.llama import Llama
from monograph.ops.attention import SAME_ROWS

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Ids = tuple[int, ...]
BORDERS = 8  # most recurrences that are kept


class Reader:
    """Reads prompts, one or several at once, into a cache that holds those that were read last.

    Attributes:
        chunk: tokens read at once.
        whole: whether the last token is read, too.
        last_RD: then its final hidden state in each row; R are the rows of the reader's cache.
    """

    def __init__(self, model: Llama, slots: Slots, chunk: int, wrap: Wrap, recorder: Recorder | None = None) -> None:
        """Allocate a cache with a row for each of the prompts that are read at once.

        Args:
            model: the language model, in evaluation mode.
            slots: its form; no prompt is longer than its positions.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: a function that compiles another, or returns it unchanged.
            recorder: captures the pass over a chunk, or None.
        """
        weight = model.lm_head.weight
        self.model, self.chunk, self.rows, self.device = model, chunk, slots.prompts, weight.device
        self.cache = KVCache.allocate(model.config, self.rows, slots.most, weight.dtype, weight.device, slots.block)
        self.cache.least, self.whole = slots.least, slots.least >= SAME_ROWS
        self.last_RD = weight.new_zeros(self.rows, model.config.hidden_size)
        # What a pass reads and writes, at addresses that a captured one keeps.
        self._tokens_RT = torch.zeros(self.rows, chunk, dtype=torch.int64, device=weight.device)
        self._start_11 = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        self._hidden_RTD = weight.new_zeros(self.rows, chunk if self.whole else 0, model.config.hidden_size)
        self._passes = Replays(wrap(self._read_chunk), recorder)
        # Recurrences after whole chunks of prompts, by owner and tokens; those that were used last come last.
        self._borders: OrderedDict[tuple[str, Ids], list[Tensor]] = OrderedDict()
        self._held: list[Ids] = []  # the prompts in its rows, and
        self._owner = ""  # whose they are
        self._interrupted = False  # whether a pass was begun and not ended
        self._left: list[int] = []  # where the chunks begin that are still to be read

    def begin(self, prompts: Iterable[Ids], further: Iterable[Ids] = (), owner: str = "") -> bool:
        """Take the first of these prompts of one owner; return whether it was not held before.

        If it has to be read, so are as many of the others, and then of the further ones, as fit.
        """
        wanted = [self.part(prompt) for prompt in prompts]
        if wanted[0] in self._held and owner == self._owner:
            return False
        self._owner = owner
        self._held = list(itertools.islice(dict.fromkeys((*wanted, *map(self.part, further))), self.rows))
        self._begin()
        return True

    def _begin(self) -> None:
        self._left = list(range(0, max(map(len, self._held)), self.chunk))
        self.cache.begin([len(tokens) for tokens in self._held])

    def skip(self, source: KVCache, row: int, tokens: int) -> int:
        """Copy the first whole chunks of so many tokens from a row that has them; return how many tokens these are."""
        if (known := self._known(tokens // self.chunk * self.chunk)) > 0:
            self.cache.copy_keys([0], source, [row], known)
            self._left = [begin for begin in self._left if begin >= known]
        return known

    def _known(self, tokens: int) -> int:
        """Return how many of the first tokens the recurrences are known after, and give them to the cache."""
        if not self.cache.recurrences:
            return tokens
        for known in range(tokens, 0, -self.chunk):
            if border := self._borders.get(key := (self._owner, self._held[0][:known])):
                self._borders.move_to_end(key)
                for to, of in zip(self.cache.carried(), border, strict=True):
                    to.copy_(of)
                return known
        return 0

    def go_on(self, chunks: int | None = None) -> int:
        """Read at most so many chunks (None: all that are left); return how many were read."""
        if self._interrupted:  # some recurrences have taken a chunk that others have not
            self._begin()
        some = self._left[:chunks]
        for begin in some:
            self._interrupted = bool(self.cache.recurrences)
            self._read(begin)
            self._interrupted = False
            self._left.remove(begin)  # one by one, as an interrupt may come before all is read
            self._remember(begin + self.chunk)
        return len(some)

    def _remember(self, read: int) -> None:
        """Keep the recurrences after the first so many tokens of a prompt that is read alone."""
        if self.cache.recurrences and self.rows == 1 and read <= len(self._held[0]):
            self._borders[self._owner, self._held[0][:read]] = [tensor.clone() for tensor in self.cache.carried()]
            if len(self._borders) > BORDERS:
                self._borders.popitem(last=False)

    @property
    def ready(self) -> bool:
        """Whether all that was begun is read."""
        return not self._left

    def rows_of(self, prompts: Iterable[Ids]) -> list[int]:
        """Return the rows of the cache with these prompts; the list ends before the first that is not held."""
        row = {tokens: row for row, tokens in enumerate(self._held)}
        return [row[tokens] for tokens in itertools.takewhile(row.__contains__, map(self.part, prompts))]

    def part(self, prompt: Ids) -> Ids:
        """Return the tokens of a prompt that are read: all but the last one, unless `whole`."""
        return prompt if self.whole else prompt[:-1]

    def forget(self) -> None:
        """Clear the cache: it may hold numbers that are not finite."""
        self.cache.clear(slice(None))
        self._borders.clear()
        self._held, self._left, self._interrupted = [], [], False

    def warm_up(self) -> None:
        """Capture every variant of a pass; nothing is held afterwards."""
        if self._passes.captures:
            for blocks in self.cache.sizes:
                self._passes.run(WARM_UP, blocks)
            self.forget()

    def _read(self, begin: int) -> None:
        # With fixed chunks at fixed positions a prompt's numbers depend on it alone, and few graphs are captured.
        end = begin + self.chunk
        parts = [tokens[begin:end] for tokens in self._held] + [()] * (self.rows - len(self._held))
        self._tokens_RT.copy_(sent([part + (0,) * (self.chunk - len(part)) for part in parts], self.device))
        self._start_11.fill_(begin)
        self._passes.run(1, self.cache.visible(end))
        if self.whole:
            ends = {row: len(tokens) - 1 - begin for row, tokens in enumerate(self._held)}
            ends = {row: at for row, at in ends.items() if 0 <= at < self.chunk}
            self.last_RD[list(ends)] = self._hidden_RTD[list(ends), list(ends.values())]

    @torch.no_grad()
    def _read_chunk(self, blocks: int) -> None:
        positions_RT = (self._start_11 + torch.arange(self.chunk, device=self.device)).expand_as(self._tokens_RT)
        hidden_RTD = self.model(self._tokens_RT, positions=positions_RT, cache=self.cache.first(blocks))
        # A compiled pass that keeps nothing leaves out what follows the last keys and values.
        if self.whole:
            self._hidden_RTD.copy_(hidden_RTD)
