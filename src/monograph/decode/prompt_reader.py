"""Reads prompts (prefill) into a cache, from which the decoder's rows copy their keys and values.

A reader reads chunks of a fixed size at fixed positions, in passes over a fixed number of rows (one by
default). So the keys and values of a prompt do not depend on other prompts.

If two prompts begin with the same whole chunks, these chunks are read only once. A layer without
attention has a recurrence instead of keys and values, so the reader keeps the recurrences after the first
chunks of some prompts for this. A prompt's last token is read by the first decode step, or by the reader
if `CacheSizes.pads_products` is set.

A prompt can also continue a decoder's row, as the next turn of a conversation does. The row is then
copied to the reader's cache, and the reader reads only the new tokens.

Shapes: R rows of the reader's cache, T positions of a chunk, D hidden size.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.decode.adapter_bank import BASE_SLOT, bank_of, rows_with_adapters
from monograph.decode.cache import CacheSizes, KVCache
from monograph.device import tensor_on
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.llama import Llama

# Returns a function compiled, or unchanged.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
# The ids of a text's tokens.
Ids = tuple[int, ...]


class ReuseKey(NamedTuple):
    """What two prompts must have in common, in addition to tokens, to share keys and values.

    Attributes:
        owner: the owner of the prompt's request.
        adapter: the slot of its adapter in the model's bank; 0: none.
        slot_write: the number of the write that filled this slot (`AdapterBank.last_writes`).
    """

    owner: str = ""
    adapter: int = 0
    slot_write: int = 0


class PromptToRead(NamedTuple):
    """A prompt. Two prompts whose attributes are equal share keys and values.

    Attributes:
        ids: its tokens.
        reuse_key: what the two must have in common besides the tokens. The default is that of a request
            without an owner and without an adapter.
    """

    ids: Ids
    reuse_key: ReuseKey = ReuseKey()


class Continuation(NamedTuple):
    """A prompt whose beginning has been read by a row of a decoder.

    Attributes:
        row: the row.
        known: how many first tokens of the prompt the row has read. The recurrences of layers without
            attention may have taken in the next token as well, if a step read it after the row's request
            had ended.
        prompt: the whole prompt, which has more tokens than `known`.
    """

    row: int
    known: int
    prompt: PromptToRead


# A reader keeps the recurrences after the first chunks of prompts for at most this number of beginnings.
MAX_KNOWN_RECURRENCES = 8


class PromptReader:
    """Reads prompts into a cache, which has the keys and values of the prompts that were read last.

    Attributes:
        chunk: the number of tokens of a pass.
        rows: the number of prompts that are read at the same time.
        cache: keys and values of the prompts.
        reads_last_token: whether the last token of a prompt is read, too.
        keeps_last: whether `last_RD` is written.
        last_RD: the final hidden state of the last token that was read of each row's prompt.
    """

    def __init__(
        self,
        model: Llama,
        sizes: CacheSizes,
        chunk: int,
        wrap: Wrap,
        recorder: Recorder | None = None,
        keeps_last: bool = False,
    ) -> None:
        """Allocate a cache with a row for each prompt that is read at the same time.

        Args:
            model: the language model, in evaluation mode, or what is called like it.
            sizes: the sizes of the cache; a prompt is not longer than a row.
            chunk: the number of tokens of a pass, a power of two that is at most the cache's block.
            wrap: returns a function compiled, or unchanged.
            recorder: captures the pass over a chunk; None: it is not captured.
            keeps_last: see the class. Hidden states are also kept if the last token is read.
        """
        weight = model.lm_head.weight
        self.model = model
        self.bank = bank_of(model)
        self.chunk = chunk
        self.rows = sizes.prompts_at_once
        self.device = weight.device
        self.cache = KVCache.allocate(
            model.config, self.rows, sizes.per_row, weight.dtype, weight.device, sizes.block
        )
        self.cache.pads_products = sizes.pads_products
        self.reads_last_token = sizes.pads_products
        self.keeps_last = keeps_last or self.reads_last_token
        self.last_RD = weight.new_zeros(self.rows, model.config.hidden_size)
        # The tensors that a pass reads and writes; a captured pass needs fixed addresses.
        self._tokens_RT = torch.zeros(self.rows, chunk, dtype=torch.int64, device=weight.device)
        self._positions_RT = torch.zeros(self.rows, chunk, dtype=torch.int64, device=weight.device)
        self._adapter_R = torch.zeros(self.rows, dtype=torch.int64, device=weight.device)
        self._columns_T = torch.arange(chunk, device=weight.device)
        self._hidden_RTD = weight.new_zeros(
            self.rows, chunk if self.keeps_last else 0, model.config.hidden_size
        )
        self._passes = Replays(wrap(self._run_pass), recorder)
        # The recurrences after whole chunks of prompts; the least recently used ones come first.
        self._known_recurrences: OrderedDict[PromptToRead, list[Tensor]] = OrderedDict()
        # Of each row's prompt, the part to read (`part_to_read`).
        self._prompts: list[PromptToRead] = []
        # Whether an exception has interrupted a pass.
        self._interrupted = False
        # The first positions of the chunks that are not read yet.
        self._unread_chunks: list[int] = []

    def choose_prompts(self, prompts: Iterable[PromptToRead]) -> bool:
        """Choose the prompts that are read next, unless the cache has the first one already.

        Args:
            prompts: at least one. The first one is needed now, and as many others are read with it as
                the cache has rows for. They may have different adapters.

        Returns:
            whether prompts were chosen.
        """
        # A dict, since equal prompts share a row.
        chosen: dict[PromptToRead, None] = {}
        for prompt in map(self.part_to_read, prompts):
            if not chosen and prompt in self._prompts:
                return False
            chosen[prompt] = None
            # The loop stops early, because there may be thousands of prompts.
            if len(chosen) >= self.rows:
                break
        self._prompts = list(chosen)
        self._write_adapters(self._prompts)
        self._begin_reading()
        return True

    def _write_adapters(self, prompts: Sequence[PromptToRead]) -> None:
        """Give the first rows of the following passes the adapters of these prompts."""
        slots = [prompt.reuse_key.adapter for prompt in prompts]
        unused = self.rows - len(slots)
        self._adapter_R.copy_(tensor_on(slots + [BASE_SLOT] * unused, self.device))

    def _begin_reading(self) -> None:
        """Make all chunks of the chosen prompts unread."""
        lengths = [len(prompt.ids) for prompt in self._prompts]
        self._unread_chunks = list(range(0, max(lengths), self.chunk))
        self.cache.reset_recurrences(lengths)

    def copy_first_chunks(self, source: KVCache, row: int, tokens: int) -> int:
        """Copy the first whole chunks of the one chosen prompt from a row of another cache.

        Args:
            source: the other cache.
            row: its row.
            tokens: how many first tokens of the prompt the row has.

        Returns:
            the number of tokens that need not be read any more.
        """
        known = self._restore_recurrences(tokens // self.chunk * self.chunk)
        if known > 0:
            self.cache.copy_keys([0], source, [row], known)
            self._unread_chunks = [begin for begin in self._unread_chunks if begin >= known]
        return known

    def _restore_recurrences(self, tokens: int) -> int:
        """Restore the kept recurrences after as many first chunks of the prompt as possible.

        Args:
            tokens: the maximum number of tokens of these chunks, a multiple of the chunk.

        Returns:
            the number of tokens after which the recurrences are; `tokens` if the model has no
            recurrences.
        """
        if not self.cache.recurrences:
            return tokens
        for known in range(tokens, 0, -self.chunk):
            key = _beginning(self._prompts[0], known)
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
        """Read at most this number of chunks (None: all chunks), and return how many were read."""
        # After a pass that an exception interrupted, the recurrences of some layers are a chunk ahead
        # of the others. So the prompts are read from the beginning.
        if self._interrupted:
            self._begin_reading()
        begins = self._unread_chunks[:chunks]
        for begin in begins:
            # If the pass raises an exception, this stays true.
            self._interrupted = bool(self.cache.recurrences)
            self._read_pass(self._prompts, [begin] * len(self._prompts), self.chunk)
            self._interrupted = False
            # Chunks are removed one by one, because an exception may come before the last one is read.
            self._unread_chunks.remove(begin)
            self._keep_recurrences(begin + self.chunk)
        return len(begins)

    def _keep_recurrences(self, tokens: int) -> None:
        """Keep the recurrences after the first tokens of a prompt, if prompts are read one by one."""
        if not self.cache.recurrences or self.rows > 1 or tokens > len(self._prompts[0].ids):
            return
        key = _beginning(self._prompts[0], tokens)
        self._known_recurrences[key] = [
            tensor.clone() for tensor in self.cache.recurrence_tensors()
        ]
        if len(self._known_recurrences) > MAX_KNOWN_RECURRENCES:
            self._known_recurrences.popitem(last=False)

    def continue_rows(self, source: KVCache, continuations: Sequence[Continuation]) -> None:
        """Read the new tokens of prompts that continue rows of another cache.

        Row i of this cache then has prompt i. With `reads_last_token`, row i of `last_RD` belongs to its
        last token.

        Args:
            source: the other cache.
            continuations: at most as many as this cache has rows.
        """
        self._prompts = []
        self._unread_chunks = []
        prompts = [self.part_to_read(each.prompt) for each in continuations]
        begins = [each.known for each in continuations]
        sources = [each.row for each in continuations]
        lengths = [len(prompt.ids) for prompt in prompts]
        self.cache.copy_rows(range(len(prompts)), source, sources, max(begins))
        self.cache.limit_recurrences(lengths)
        self._write_adapters(prompts)
        if self.cache.recurrences:
            # The recurrences may have taken in the first new token already (`Continuation.known`). A pass
            # of this token alone notices that and does not take it in again, which a longer pass would do.
            self._read_pass(prompts, begins, 1)
            begins = [begin + 1 for begin in begins]
        while any(begin < length for length, begin in zip(lengths, begins, strict=True)):
            self._read_pass(prompts, begins, self.chunk)
            begins = [begin + self.chunk for begin in begins]

    @property
    def is_finished(self) -> bool:
        """Whether all chunks of the chosen prompts are read."""
        return not self._unread_chunks

    def rows_of(self, prompts: Iterable[PromptToRead]) -> list[int]:
        """Return the cache's rows of these prompts, up to the first prompt that it does not have."""
        row_of = {prompt: row for row, prompt in enumerate(self._prompts)}
        rows: list[int] = []
        for prompt in prompts:
            row = row_of.get(self.part_to_read(prompt))
            if row is None:
                break
            rows.append(row)
        return rows

    def part_to_read(self, prompt: PromptToRead) -> PromptToRead:
        """Return a prompt without its last token, unless `reads_last_token`."""
        return prompt if self.reads_last_token else _beginning(prompt, len(prompt.ids) - 1)

    def forget(self) -> None:
        """Clear the cache: its numbers are of earlier weights, or some are not finite."""
        self.cache.clear(slice(None))
        self._known_recurrences.clear()
        self._prompts = []
        self._unread_chunks = []
        self._interrupted = False

    def warm_up(self) -> None:
        """Capture every variant of a pass. The cache has no prompt afterwards."""
        if self._passes.is_capturing:
            for blocks in self.cache.block_counts:
                self._passes.run(WARM_UP, blocks, self.chunk)
            self.forget()

    def _read_pass(
        self, prompts: Sequence[PromptToRead], begins: Sequence[int], count: int
    ) -> None:
        """Read some tokens of each prompt.

        Args:
            prompts: the parts to read of the prompts of the first rows.
            begins: the position of the first token that is read now, for each prompt.
            count: the number of tokens, a chunk or 1.
        """
        parts = [
            prompt.ids[begin : begin + count] for prompt, begin in zip(prompts, begins, strict=True)
        ]
        parts += [()] * (self.rows - len(prompts))
        padded = [part + (0,) * (self.chunk - len(part)) for part in parts]
        self._tokens_RT.copy_(tensor_on(padded, self.device))
        first_R = tensor_on([*begins, *[0] * (self.rows - len(prompts))], self.device)
        # The padding of a short part is written after it, or to the last slot, which no prompt reaches.
        positions_RT = first_R[:, None] + self._columns_T
        self._positions_RT.copy_(positions_RT.clamp(max=self.cache.slots - 1))
        self._passes.run(1, self.cache.block_count_for(max(begins) + count), count)
        if self.keeps_last:
            # The rows whose prompts end in this pass, and the columns of their last tokens.
            rows: list[int] = []
            columns: list[int] = []
            for row, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
                column = len(prompt.ids) - 1 - begin
                if 0 <= column < count:
                    rows.append(row)
                    columns.append(column)
            self.last_RD[rows] = self._hidden_RTD[rows, columns]

    @torch.no_grad()
    def _run_pass(self, blocks: int, count: int) -> None:
        """Run the model over the first `count` columns of the tokens, with this number of blocks."""
        with rows_with_adapters(self.bank, self._adapter_R):
            hidden_RTD = self.model(
                self._tokens_RT[:, :count],
                positions=self._positions_RT[:, :count],
                cache=self.cache.with_first_blocks(blocks),
            )
        # If the hidden states are not used, a compiled pass computes nothing after the last layer's keys
        # and values.
        if self.keeps_last:
            self._hidden_RTD[:, :count].copy_(hidden_RTD)


def _beginning(prompt: PromptToRead, tokens: int) -> PromptToRead:
    """Return the first tokens of a prompt."""
    return prompt._replace(ids=prompt.ids[:tokens])
