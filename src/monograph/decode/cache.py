"""The cache of a fixed size: slot s of a row holds keys and values of position s; rows advance
independently.

A layer without attention has a recurrence instead, of one size for any number of positions.

A reader reads prompts into a cache of its own, from which rows copy their keys and values. Prompts
are read in chunks of a fixed size at fixed positions, by passes of a fixed number of rows (one,
unless a caller wants more), so that a prompt's keys and values depend on the prompt alone. So whole
chunks that another prompt has in common with it need not be read again, if the recurrences of
layers without attention are known there. The first decode step reads a prompt's last token, unless
the reader does (`Slots.is_filled`).

Shapes: N blocks, B rows, R rows of the reader's cache, K key-value heads, H query heads, C slots of
a block, E head dimension, T positions of a chunk, D hidden size, 1 broadcasts.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from monograph.device import sent
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.config import LlamaConfig
from monograph.model.layers import Recurrence
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK, Heads, cached_attention


class KVCache:
    """Keys and values of several rows, two tensors for each layer, zero where nothing was written;
    and recurrences.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        recurrences: Mapping[int, Recurrence],
        seen_blocks: int | None = None,
        is_filled: bool = False,
    ) -> None:
        """Take the memory.

        Args:
            keys: [N, B, K, C, E] for each layer; a layer without attention has no heads.
            values: the same for values.
            recurrences: those of the layers without attention.
            seen_blocks: how many blocks attention reads, the first ones; None: all.
            is_filled: see `cached_attention`.
        """
        self.keys = keys
        self.values = values
        self.recurrences = recurrences
        self.seen_blocks, self.is_filled = seen_blocks, is_filled

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        rows: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        block: int = BLOCK,
    ) -> Self:
        """Allocate memory for at least `slots` positions of each row, in blocks of `block` slots."""
        # Blocks are the outer axis, so that the first blocks, all that short texts need, lie in one
        # piece of memory.
        linear = [config.is_linear(layer) for layer in range(config.num_hidden_layers)]
        heads = [0 if is_linear else config.num_key_value_heads for is_linear in linear]
        shapes = [(-(-slots // block), rows, each, block, config.head_dim) for each in heads]
        # A tensor for each layer: a captured graph that writes into a part of a tensor copies all
        # of it (dev/log.md).
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)
        )
        size = config.linear_key_head_dim
        wide_size = config.linear_value_head_dim
        count = config.linear_num_value_heads
        inputs = (
            config.linear_conv_kernel_dim,
            2 * config.linear_num_key_heads * size + count * wide_size,
        )
        state = count, size, wide_size
        wide = torch.promote_types(dtype, torch.float32)
        recurrences = {
            layer: Recurrence(
                torch.zeros(rows, *inputs, dtype=dtype, device=device),
                torch.zeros(rows, *state, dtype=wide, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
                torch.full((rows,), torch.iinfo(torch.int64).max, device=device),
            )
            for layer in range(len(linear))
            if linear[layer]
        }
        return cls(keys, values, recurrences)

    @classmethod
    def bytes_per_row(
        cls, config: LlamaConfig, slots: int, dtype: torch.dtype, block: int = BLOCK
    ) -> int:
        """Return how many bytes `allocate` takes for one row."""
        cache = cls.allocate(config, 1, slots, dtype, torch.device("meta"), block)
        return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values, *cache.carried()))

    @property
    def block(self) -> int:
        """The slots of a block, C."""
        return self.keys[0].shape[3]

    def visible(self, slots: int) -> int:
        """Return how many blocks to read for that many slots: a power of two, since each number has
        a graph.
        """
        return min(self.keys[0].shape[0], 1 << (-(-slots // self.block) - 1).bit_length())

    @property
    def sizes(self) -> list[int]:
        """All that `visible` returns."""
        blocks = self.keys[0].shape[0]
        return sorted({min(blocks, 1 << power) for power in range(blocks.bit_length() + 1)})

    def first(self, blocks: int) -> Self:
        """Return a cache in the same memory, in which attention reads the first `blocks` blocks
        only.
        """
        return type(self)(self.keys, self.values, self.recurrences, blocks, self.is_filled)

    def attend(
        self,
        layer_index: int,
        heads: Heads,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values at their positions; return the attention of the queries
        (`cached_attention`).
        """
        query_BHTE, key_BKTE, value_BKTE = heads
        keys_NBKCE, values_NBKCE = self.keys[layer_index], self.values[layer_index]
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // self.block, rows_B1, slice(None), positions_BT % self.block)
        # Write to the whole tensor and read a slice of it: a captured write to a slice copies the
        # cache (dev/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen = slice(self.seen_blocks)
        keys_NBKCE, values_NBKCE = keys_NBKCE[seen], values_NBKCE[seen]
        return cached_attention(
            query_BHTE, keys_NBKCE, values_NBKCE, positions_BT, window, self.is_filled, sink_H
        )

    def recurrence(self, layer_index: int) -> Recurrence:
        """Return what a layer without attention has taken of each row."""
        return self.recurrences[layer_index]

    def begin(self, limits: Sequence[int]) -> None:
        """Begin the recurrences of the first rows again, of which so many tokens each may be taken."""
        for tensor in self.carried():
            tensor.zero_()
        for recurrence in self.recurrences.values():
            recurrence.limit_B[: len(limits)] = sent(limits, recurrence.limit_B.device)

    def carried(self) -> list[Tensor]:
        """Return what recurrences have taken, tensors with a row for each of the cache's."""
        return [tensor for recurrence in self.recurrences.values() for tensor in recurrence[:3]]

    def copy_rows(
        self, rows: Sequence[int], source: Self, its_rows: Sequence[int], slots: int
    ) -> None:
        """Copy rows of `source`, whose blocks are as long, to rows of this cache: the first slots,
        and recurrences.
        """
        self.copy_keys(rows, source, its_rows, slots)
        into = sent(rows, self.keys[0].device)
        out_of = sent(its_rows, self.keys[0].device)
        for to, of in zip(self.carried(), source.carried(), strict=True):
            to.index_copy_(0, into, of.index_select(0, out_of))

    def copy_keys(
        self, rows: Sequence[int], source: Self, its_rows: Sequence[int], slots: int
    ) -> None:
        """Do the same without recurrences."""
        blocks = -(-slots // self.block)
        device = self.keys[0].device
        into = sent(rows, device)
        out_of = sent(its_rows, device)
        for to, of in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            to[:blocks].index_copy_(1, into, of[:blocks].index_select(1, out_of))

    def clear(self, row: int | slice) -> None:
        """Set a row, or several, to zero, as is needed after numbers that are not finite."""
        # Attention weighs hidden slots with 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0
        for tensor in self.carried():
            tensor[row] = 0


class Slots(NamedTuple):
    """The form of a cache, on which the bits of what is read from it may depend.

    Attributes:
        most: positions of each row.
        block: slots of a block; fewer cost less for short texts.
        prompts: prompts that are read at once.
        is_filled: whether a text's numbers have the bits of a pass over all of it; see
            `cached_attention`. Then all of a prompt is read before its first step, once for all
            rows that continue it, as the step would compute the same bits for its last token.
        longest: most tokens of a prompt; fewer cost less.
    """

    most: int
    block: int = BLOCK
    prompts: int = 1
    is_filled: bool = False
    longest: int = BLOCK


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

    def __init__(
        self, model: Llama, slots: Slots, chunk: int, wrap: Wrap, recorder: Recorder | None = None
    ) -> None:
        """Allocate a cache with a row for each of the prompts that are read at once.

        Args:
            model: the language model, in evaluation mode.
            slots: its form; no prompt is longer than its positions.
            chunk: tokens read at once, a power of two up to the cache's block.
            wrap: a function that compiles another, or returns it unchanged.
            recorder: captures the pass over a chunk, or None.
        """
        weight = model.lm_head.weight
        self.model = model
        self.chunk = chunk
        self.rows = slots.prompts
        self.device = weight.device
        self.cache = KVCache.allocate(
            model.config, self.rows, slots.most, weight.dtype, weight.device, slots.block
        )
        self.cache.is_filled = self.whole = slots.is_filled
        self.last_RD = weight.new_zeros(self.rows, model.config.hidden_size)
        # What a pass reads and writes, at addresses that a captured one keeps.
        self._tokens_RT = torch.zeros(self.rows, chunk, dtype=torch.int64, device=weight.device)
        self._start_11 = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        self._hidden_RTD = weight.new_zeros(
            self.rows, chunk if self.whole else 0, model.config.hidden_size
        )
        self._passes = Replays(wrap(self._read_chunk), recorder)
        # Recurrences after whole chunks of prompts, by owner and tokens; those that were used last
        # come last.
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
        held = dict.fromkeys(wanted)
        for prompt in further:
            if len(held) >= self.rows:
                break  # thousands may wait
            held[self.part(prompt)] = None
        self._held = list(held)[: self.rows]
        self._begin()
        return True

    def _begin(self) -> None:
        self._left = list(range(0, max(map(len, self._held)), self.chunk))
        self.cache.begin([len(tokens) for tokens in self._held])

    def skip(self, source: KVCache, row: int, tokens: int) -> int:
        """Copy the first whole chunks of so many tokens from a row that has them; return how many
        tokens these are.
        """
        if (known := self._known(tokens // self.chunk * self.chunk)) > 0:
            self.cache.copy_keys([0], source, [row], known)
            self._left = [begin for begin in self._left if begin >= known]
        return known

    def _known(self, tokens: int) -> int:
        """Return how many of the first tokens the recurrences are known after, and give them to the
        cache.
        """
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
            self._borders[self._owner, self._held[0][:read]] = [
                tensor.clone() for tensor in self.cache.carried()
            ]
            if len(self._borders) > BORDERS:
                self._borders.popitem(last=False)

    @property
    def ready(self) -> bool:
        """Whether all that was begun is read."""
        return not self._left

    def rows_of(self, prompts: Iterable[Ids]) -> list[int]:
        """Return the rows of the cache with these prompts; the list ends before the first that is
        not held.
        """
        row = {tokens: row for row, tokens in enumerate(self._held)}
        return [
            row[tokens] for tokens in itertools.takewhile(row.__contains__, map(self.part, prompts))
        ]

    def part(self, prompt: Ids) -> Ids:
        """Return the tokens of a prompt that are read: all but the last one, unless `whole`."""
        return prompt if self.whole else prompt[:-1]

    def forget(self) -> None:
        """Clear the cache: it may hold numbers that are not finite."""
        self.cache.clear(slice(None))
        self._borders.clear()
        self._held = []
        self._left = []
        self._interrupted = False

    def warm_up(self) -> None:
        """Capture every variant of a pass; nothing is held afterwards."""
        if self._passes.captures:
            for blocks in self.cache.sizes:
                self._passes.run(WARM_UP, blocks)
            self.forget()

    def _read(self, begin: int) -> None:
        # With fixed chunks at fixed positions a prompt's numbers depend on it alone, and few graphs
        # are captured.
        end = begin + self.chunk
        parts = [tokens[begin:end] for tokens in self._held] + [()] * (self.rows - len(self._held))
        self._tokens_RT.copy_(
            sent([part + (0,) * (self.chunk - len(part)) for part in parts], self.device)
        )
        self._start_11.fill_(begin)
        self._passes.run(1, self.cache.visible(end))
        if self.whole:
            ends = {row: len(tokens) - 1 - begin for row, tokens in enumerate(self._held)}
            ends = {row: at for row, at in ends.items() if 0 <= at < self.chunk}
            self.last_RD[list(ends)] = self._hidden_RTD[list(ends), list(ends.values())]

    @torch.no_grad()
    def _read_chunk(self, blocks: int) -> None:
        positions_RT = (self._start_11 + torch.arange(self.chunk, device=self.device)).expand_as(
            self._tokens_RT
        )
        hidden_RTD = self.model(
            self._tokens_RT, positions=positions_RT, cache=self.cache.first(blocks)
        )
        # A compiled pass that keeps nothing leaves out what follows the last keys and values.
        if self.whole:
            self._hidden_RTD.copy_(hidden_RTD)
