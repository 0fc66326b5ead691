"""Caches of keys and values, and the reader that fills them with prompts.

Slot s of a row holds the key and the value of position s. A block is some slots that follow each
other. A layer without attention has a recurrence instead, whose size does not depend on the number
of positions.

A reader reads prompts into its own cache, from which rows copy their keys and values. It reads
chunks of a fixed size at fixed positions, by passes of a fixed number of rows (one by default). So
the keys and values of a prompt do not depend on other prompts.

If two prompts begin with the same whole chunks, these chunks do not have to be read again. For
layers without attention, the recurrence after these chunks must be known, too. The first decode step
reads a prompt's last token, unless the reader has read it (`CacheSizes.is_filled`).

Shapes: N blocks, B rows, R rows of the reader's cache, K key-value heads, H query heads, C slots of
a block, E head dimension, T positions of a chunk, D hidden size, 1 broadcasts.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from monograph.device import sent
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.config import LlamaConfig
from monograph.model.layers import Recurrence
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK, Heads, cached_attention

if TYPE_CHECKING:
    from monograph.decode.fast_attention import FastAttention


class KVCache:
    """Keys and values of several rows, two tensors for each layer, and recurrences.

    Slots that have not been written are zero. The attributes are the arguments of the constructor.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        recurrences: Mapping[int, Recurrence],
        seen_blocks: int | None = None,
        is_filled: bool = False,
        kernels: "FastAttention | None" = None,
    ) -> None:
        """Take the tensors.

        Args:
            keys: [N, B, K, C, E] for each layer; K is 0 for a layer without attention.
            values: the same for values.
            recurrences: the recurrence of each layer without attention, by the layer's index.
            seen_blocks: attention reads this number of first blocks; None: all blocks.
            is_filled: see `cached_attention`.
            kernels: compute attention instead of `cached_attention` where they can; None: always
                `cached_attention`.
        """
        self.keys = keys
        self.values = values
        self.recurrences = recurrences
        self.seen_blocks = seen_blocks
        self.is_filled = is_filled
        self.kernels = kernels

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
        keys = list[Tensor]()
        values = list[Tensor]()
        recurrences = dict[int, Recurrence]()
        for layer in range(config.num_hidden_layers):
            is_linear = config.is_delta_net(layer)
            heads = 0 if is_linear else config.num_key_value_heads
            # Blocks are the outer axis, so that the first blocks, which are all that short texts
            # need, are contiguous. Each layer has its own tensor, since a captured graph that writes
            # to a part of a tensor copies all of it (dev/log.md).
            shape = (math.ceil(slots / block), rows, heads, block, config.head_dim)
            keys.append(torch.zeros(shape, dtype=dtype, device=device))
            values.append(torch.zeros(shape, dtype=dtype, device=device))
            if is_linear:
                recurrences[layer] = _empty_recurrence(config, rows, dtype, device)
        return cls(keys, values, recurrences)

    @classmethod
    def bytes_per_row(
        cls, config: LlamaConfig, slots: int, dtype: torch.dtype, block: int = BLOCK
    ) -> int:
        """Return the number of bytes that `allocate` takes for one row."""
        cache = cls.allocate(config, 1, slots, dtype, torch.device("meta"), block)
        return sum(
            tensor.nbytes for tensor in (*cache.keys, *cache.values, *cache.recurrence_tensors())
        )

    @property
    def block(self) -> int:
        """The slots of a block, C."""
        return self.keys[0].shape[3]

    def visible(self, slots: int) -> int:
        """Return how many blocks attention reads for this number of slots.

        It is a power of two, or all blocks, since each number needs a graph.
        """
        needed_blocks = math.ceil(slots / self.block)
        return min(self.keys[0].shape[0], 1 << (needed_blocks - 1).bit_length())

    @property
    def sizes(self) -> list[int]:
        """All numbers that `visible` can return."""
        blocks = self.keys[0].shape[0]
        return sorted({min(blocks, 1 << power) for power in range(blocks.bit_length() + 1)})

    def first(self, blocks: int) -> Self:
        """Return a cache of the same tensors, in which attention reads only the first blocks."""
        return type(self)(
            self.keys, self.values, self.recurrences, blocks, self.is_filled, self.kernels
        )

    def attend(
        self,
        layer_index: int,
        heads: Heads,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values at their positions, and return the attention of the queries.

        Args:
            layer_index: the layer.
            heads: the new queries, keys and values.
            positions_BT: their positions.
            window: see `cached_attention`.
            sink_H: see `cached_attention`.
        """
        query_BHTE, key_BKTE, value_BKTE = heads
        keys_NBKCE = self.keys[layer_index]
        values_NBKCE = self.values[layer_index]
        # Texts that are scored exactly must have the bits of `cached_attention`.
        kernels = None if self.is_filled else self.kernels
        if kernels is not None and positions_BT.shape[1] == 1:
            mixed_BHTE = kernels.step(
                heads,
                keys_NBKCE,
                values_NBKCE,
                positions_BT[:, 0],
                self.seen_blocks or len(keys_NBKCE),
                window,
                sink_H,
            )
            if mixed_BHTE is not None:
                return mixed_BHTE
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        where = (positions_BT // self.block, rows_B1, slice(None), positions_BT % self.block)
        # The write is to the whole tensor and not to a slice, since a captured write to a slice copies
        # the cache (dev/log.md).
        keys_NBKCE[where] = key_BKTE.transpose(1, 2).to(keys_NBKCE.dtype)
        values_NBKCE[where] = value_BKTE.transpose(1, 2).to(values_NBKCE.dtype)
        seen_keys_NBKCE = keys_NBKCE[: self.seen_blocks]
        seen_values_NBKCE = values_NBKCE[: self.seen_blocks]
        if kernels is not None and positions_BT.shape[1] > 1:
            mixed_BHTE = kernels.chunk(
                query_BHTE, seen_keys_NBKCE, seen_values_NBKCE, positions_BT, window, sink_H
            )
            if mixed_BHTE is not None:
                return mixed_BHTE
        return cached_attention(
            query_BHTE,
            seen_keys_NBKCE,
            seen_values_NBKCE,
            positions_BT,
            window,
            self.is_filled,
            sink_H,
        )

    def recurrence(self, layer_index: int) -> Recurrence:
        """Return the recurrence of a layer without attention."""
        return self.recurrences[layer_index]

    def begin(self, limits: Sequence[int]) -> None:
        """Reset all recurrences; those of row i will take at most limits[i] tokens."""
        for tensor in self.recurrence_tensors():
            tensor.zero_()
        for recurrence in self.recurrences.values():
            recurrence.limit_B[: len(limits)] = sent(limits, recurrence.limit_B.device)

    def recurrence_tensors(self) -> list[Tensor]:
        """Return the tensors of all recurrences, with a row for each row of the cache."""
        return [tensor for recurrence in self.recurrences.values() for tensor in recurrence[:3]]

    def copy_rows(
        self, rows: Sequence[int], source: Self, source_rows: Sequence[int], slots: int
    ) -> None:
        """Copy rows of another cache: keys and values of the first slots, and recurrences.

        Args:
            rows: the rows to write to.
            source: the other cache, whose blocks have the same length.
            source_rows: the rows to read.
            slots: how many slots are copied, rounded up to whole blocks.
        """
        self.copy_keys(rows, source, source_rows, slots)
        to_rows = sent(rows, self.keys[0].device)
        from_rows = sent(source_rows, self.keys[0].device)
        for target, origin in zip(
            self.recurrence_tensors(), source.recurrence_tensors(), strict=True
        ):
            target.index_copy_(0, to_rows, origin.index_select(0, from_rows))

    def copy_keys(
        self, rows: Sequence[int], source: Self, source_rows: Sequence[int], slots: int
    ) -> None:
        """Copy keys and values as `copy_rows` does, without recurrences."""
        blocks = math.ceil(slots / self.block)
        device = self.keys[0].device
        to_rows = sent(rows, device)
        from_rows = sent(source_rows, device)
        targets = (*self.keys, *self.values)
        origins = (*source.keys, *source.values)
        for target, origin in zip(targets, origins, strict=True):
            target[:blocks].index_copy_(1, to_rows, origin[:blocks].index_select(1, from_rows))

    def clear(self, row: int | slice) -> None:
        """Set one or several rows to zero. This is needed after numbers that are not finite."""
        # Attention multiplies the values of hidden slots by 0, and 0 times NaN is NaN.
        for tensor in (*self.keys, *self.values):
            tensor[:, row] = 0
        for tensor in self.recurrence_tensors():
            tensor[row] = 0


def _empty_recurrence(
    config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
) -> Recurrence:
    """Return a recurrence that has taken no token, without a limit."""
    key_size = config.linear_key_head_dim
    value_size = config.linear_value_head_dim
    heads = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * key_size + heads * value_size
    inputs_shape = (rows, config.linear_conv_kernel_dim, channels)
    # The state has at least fp32.
    state_dtype = torch.promote_types(dtype, torch.float32)
    return Recurrence(
        torch.zeros(inputs_shape, dtype=dtype, device=device),
        torch.zeros(rows, heads, key_size, value_size, dtype=state_dtype, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows,), torch.iinfo(torch.int64).max, device=device),
    )


class CacheSizes(NamedTuple):
    """The sizes of a cache, on which the bits of what is read from it may depend.

    Attributes:
        most: positions of each row.
        block: slots of a block; short texts take less time with short blocks.
        prompts: number of prompts that are read at the same time.
        is_filled: whether a text gets the bits of one pass over the whole text; see
            `cached_attention`. The reader then reads a whole prompt, once for all rows that continue
            it. The first step would compute the same bits for the last token.
        longest: the maximum number of tokens of a prompt; a smaller one takes less time.
    """

    most: int
    block: int = BLOCK
    prompts: int = 1
    is_filled: bool = False
    longest: int = BLOCK


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Ids = tuple[int, ...]
# How many recurrences the reader keeps, each from the end of a chunk of a prompt.
MAX_KNOWN_RECURRENCES = 8


class Reader:
    """Reads prompts into a cache, which holds the keys and values of the prompts that were read last.

    Attributes:
        chunk: the number of tokens of a pass.
        rows: the number of prompts that are read at the same time.
        cache: keys and values of the prompts.
        reads_last_token: whether the last token of a prompt is read, too.
        last_RD: if `reads_last_token`, the final hidden state of the last token of each row's prompt.
    """

    def __init__(
        self,
        model: Llama,
        slots: CacheSizes,
        chunk: int,
        wrap: Wrap,
        recorder: Recorder | None = None,
    ) -> None:
        """Allocate a cache with a row for each prompt that is read at the same time.

        Args:
            model: the language model, in evaluation mode.
            slots: the sizes of the cache; a prompt is not longer than a row.
            chunk: the number of tokens of a pass, a power of two up to the cache's block.
            wrap: compiles a function, or returns it unchanged.
            recorder: captures the pass over a chunk; None: it is not captured.
        """
        weight = model.lm_head.weight
        self.model = model
        self.chunk = chunk
        self.rows = slots.prompts
        self.device = weight.device
        self.cache = KVCache.allocate(
            model.config, self.rows, slots.most, weight.dtype, weight.device, slots.block
        )
        self.cache.is_filled = slots.is_filled
        self.reads_last_token = slots.is_filled
        self.last_RD = weight.new_zeros(self.rows, model.config.hidden_size)
        # The tensors that a pass reads and writes; a captured pass needs fixed addresses.
        self._tokens_RT = torch.zeros(self.rows, chunk, dtype=torch.int64, device=weight.device)
        self._positions_RT = torch.arange(chunk, device=weight.device).repeat(self.rows, 1)
        # The position of the first column of both.
        self._first_position = 0
        self._hidden_RTD = weight.new_zeros(
            self.rows, chunk if self.reads_last_token else 0, model.config.hidden_size
        )
        self._passes = Replays(wrap(self._run_pass), recorder)
        # The recurrences after whole chunks of prompts, by owner and tokens; the least recently used
        # ones come first.
        self._known_recurrences: OrderedDict[tuple[str, Ids], list[Tensor]] = OrderedDict()
        # The prompts of the rows, and their owner.
        self._prompts: list[Ids] = []
        self._owner = ""
        # Whether a pass was begun and not finished.
        self._interrupted = False
        # The first positions of the chunks that are not read yet.
        self._unread_chunks: list[int] = []

    def begin(self, prompts: Iterable[Ids], further: Iterable[Ids] = (), owner: str = "") -> bool:
        """Take prompts to read, unless the cache has the first one; return whether they were taken.

        Args:
            prompts: prompts of one owner, at least one. The first one is needed, and others are
                read with it if there are rows for them.
            further: prompts that get the rows that are left.
            owner: the owner.
        """
        wanted = [self.tokens_to_read(prompt) for prompt in prompts]
        if wanted[0] in self._prompts and owner == self._owner:
            return False
        self._owner = owner
        chosen = dict.fromkeys(wanted)
        for prompt in further:
            # The loop stops early, because there may be thousands of further prompts.
            if len(chosen) >= self.rows:
                break
            chosen[self.tokens_to_read(prompt)] = None
        self._prompts = list(chosen)[: self.rows]
        self._begin_reading()
        return True

    def _begin_reading(self) -> None:
        self._unread_chunks = list(range(0, max(map(len, self._prompts)), self.chunk))
        self.cache.begin([len(tokens) for tokens in self._prompts])

    def skip(self, source: KVCache, row: int, tokens: int) -> int:
        """Copy the first whole chunks of the prompt from a row that has them.

        Args:
            source: the cache of the row.
            row: the row.
            tokens: how many first tokens of the prompt the row has.

        Returns:
            the number of tokens that need not be read.
        """
        known = self._restore_recurrences(tokens // self.chunk * self.chunk)
        if known > 0:
            self.cache.copy_keys([0], source, [row], known)
            self._unread_chunks = [begin for begin in self._unread_chunks if begin >= known]
        return known

    def _restore_recurrences(self, tokens: int) -> int:
        """Restore the known recurrences after the most tokens of the prompt, at most `tokens`.

        Returns:
            the number of tokens after which they were restored; `tokens` if the model has no
            recurrences.
        """
        if not self.cache.recurrences:
            return tokens
        for known in range(tokens, 0, -self.chunk):
            key = (self._owner, self._prompts[0][:known])
            recurrences = self._known_recurrences.get(key)
            if recurrences:
                self._known_recurrences.move_to_end(key)
                for target, origin in zip(
                    self.cache.recurrence_tensors(), recurrences, strict=True
                ):
                    target.copy_(origin)
                return known
        return 0

    def read_chunks(self, chunks: int | None = None) -> int:
        """Read at most this number of chunks, and return how many were read; None: all chunks."""
        # After a pass that an exception interrupted, the recurrences of some layers are a chunk ahead
        # of the others. So the prompts are read from the beginning.
        if self._interrupted:
            self._begin_reading()
        begins = self._unread_chunks[:chunks]
        for begin in begins:
            self._interrupted = bool(self.cache.recurrences)
            self._read_one_chunk(begin)
            self._interrupted = False
            # Chunks are removed one by one, because an exception may come before the last one is read.
            self._unread_chunks.remove(begin)
            self._keep_recurrences(begin + self.chunk)
        return len(begins)

    def _keep_recurrences(self, read: int) -> None:
        """Keep the recurrences after the first `read` tokens of a prompt that is read alone."""
        if not self.cache.recurrences or self.rows > 1 or read > len(self._prompts[0]):
            return
        key = (self._owner, self._prompts[0][:read])
        self._known_recurrences[key] = [
            tensor.clone() for tensor in self.cache.recurrence_tensors()
        ]
        if len(self._known_recurrences) > MAX_KNOWN_RECURRENCES:
            self._known_recurrences.popitem(last=False)

    @property
    def ready(self) -> bool:
        """Whether all chunks are read."""
        return not self._unread_chunks

    def rows_of(self, prompts: Iterable[Ids]) -> list[int]:
        """Return the cache's rows of these prompts, up to the first prompt that it does not have."""
        row_of = {tokens: row for row, tokens in enumerate(self._prompts)}
        held = itertools.takewhile(row_of.__contains__, map(self.tokens_to_read, prompts))
        return [row_of[tokens] for tokens in held]

    def tokens_to_read(self, prompt: Ids) -> Ids:
        """Return the tokens of a prompt that are read: all if `reads_last_token`, else all but the last one."""
        return prompt if self.reads_last_token else prompt[:-1]

    def forget(self) -> None:
        """Clear the cache, which may hold numbers that are not finite."""
        self.cache.clear(slice(None))
        self._known_recurrences.clear()
        self._prompts = []
        self._unread_chunks = []
        self._interrupted = False

    def warm_up(self) -> None:
        """Capture every variant of a pass. The cache has no prompt afterwards."""
        if self._passes.captures:
            for blocks in self.cache.sizes:
                self._passes.run(WARM_UP, blocks)
            self.forget()

    def _read_one_chunk(self, begin: int) -> None:
        """Read the chunk that begins at this position, of all prompts."""
        end = begin + self.chunk
        parts = [tokens[begin:end] for tokens in self._prompts]
        parts += [()] * (self.rows - len(self._prompts))
        padded = [part + (0,) * (self.chunk - len(part)) for part in parts]
        self._tokens_RT.copy_(sent(padded, self.device))
        self._positions_RT += begin - self._first_position
        self._first_position = begin
        self._passes.run(1, self.cache.visible(end))
        if self.reads_last_token:
            # The rows whose prompts end in this chunk, and the place of their last tokens in it.
            rows = list[int]()
            places = list[int]()
            for row, tokens in enumerate(self._prompts):
                place = len(tokens) - 1 - begin
                if 0 <= place < self.chunk:
                    rows.append(row)
                    places.append(place)
            self.last_RD[rows] = self._hidden_RTD[rows, places]

    @torch.no_grad()
    def _run_pass(self, blocks: int) -> None:
        hidden_RTD = self.model(
            self._tokens_RT, positions=self._positions_RT, cache=self.cache.first(blocks)
        )
        # Otherwise the hidden states are unused, and a compiled pass computes nothing after the last
        # layer's keys and values.
        if self.reads_last_token:
            self._hidden_RTD.copy_(hidden_RTD)
