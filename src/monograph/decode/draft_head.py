"""Drafts by the model's own head for multi-token prediction (`monograph.model.mtp`).

The head proposes the next K tokens of each row, and the model checks them, as it checks those of a draft
model (`monograph.decode.draft`). With x_n a row's last token, which the model has not read yet, and h_t the
model's final hidden states,

    g_n-1 = head(h_n-1, x_n)                            proposes x_n+1
    g_n+k-1 = head(g_n+k-2, proposed x_n+k)             proposes x_n+k+1

Attention of the head's block reads keys and values of the positions before. Those of positions up to n - 1
are made from the model's own hidden states: after each pass over proposed tokens, the head reads the
positions of the pass again, with the tokens that were sampled after them. Those of the positions of rejected
proposals are written, too, and overwritten before they are read.

A prompt is read by the whole model a second time, since the model's own reader does not keep its hidden
states.

By default the head proposes one token, the one that it was trained for (dev/log.md).

Shapes: B rows, K proposed tokens, S = K + 1 positions of a pass, R rows of the reader, T positions of a
chunk, D hidden size, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.draft import Proposer, recurrent_share, sample_proposal, weights_read
from monograph.decode.draft_budget import cost_of_pass
from monograph.decode.knobs import Chain
from monograph.decode.prompt_reader import Continuation, PromptReader, PromptToRead, Wrap
from monograph.decode.step import State
from monograph.device import tensor_on
from monograph.errors import UsageError
from monograph.graph.replay import Recorder
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

# K by default.
HEAD_DRAFT_TOKENS = 1


class _ReadingHead(nn.Module):
    """A model for `PromptReader` that also reads prompts with the head.

    Attributes:
        model: the model.
        config: its configuration.
        cache: keys and values of the head's block, for each row of the reader.
        previous_RD: the final hidden state before each row's chunk.
    """

    def __init__(self, model: Llama, sizes: CacheSizes) -> None:
        """Allocate the cache."""
        super().__init__()
        assert model.mtp is not None
        weight = model.lm_head.weight
        self.model = model
        self.config: LlamaConfig = model.config
        self.cache = KVCache.allocate(
            model.mtp.config,
            sizes.prompts_at_once,
            sizes.per_row,
            weight.dtype,
            weight.device,
            sizes.block,
        )
        self.previous_RD = weight.new_zeros(sizes.prompts_at_once, model.config.hidden_size)

    @property
    def lm_head(self) -> nn.Module:
        """Return the model's head for the next token."""
        return self.model.lm_head

    def forward(self, tokens_RT: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Return the final hidden states of a chunk, and let the head read it."""
        hidden_RTD: Tensor = self.model(tokens_RT, positions=positions, cache=cache)
        # A token of the chunk is the next one of the position before it.
        before_RTD = torch.cat([self.previous_RD[:, None], hidden_RTD[:, :-1]], dim=1)
        own_cache = self.cache.with_first_blocks(cache.seen_blocks or self.cache.keys[0].shape[0])
        self.model.predict_ahead(
            before_RTD,
            tokens_RT,
            positions=_positions_in(own_cache, positions - 1),
            cache=own_cache,
        )
        self.previous_RD.copy_(hidden_RTD[:, -1])
        return hidden_RTD


class HeadDrafter(Proposer):
    """The head for multi-token prediction with the keys and values of all rows.

    `model` is the model itself, and `cache` has the keys and values of the head's block. The head does not
    need `previous_B`.

    Attributes:
        first_B: the position of the first hidden state of `hidden_BSD`; -1 if there is none.
        count_B: the number of these hidden states that are of the text.
        hidden_BSD: the final hidden states of the row's last pass.
        next_BS: the token after each of them.
    """

    reads_hidden: ClassVar[bool] = True

    def __init__(
        self,
        model: Llama,
        tokens: int,
        rows: int,
        sizes: CacheSizes,
        vocabulary: int,
        chunk: int,
        wrap: Wrap,
        recorder: Recorder | None,
    ) -> None:
        """Allocate the caches; the arguments are those of `Drafter`.

        Raises:
            UsageError: the model has no such head.
        """
        if model.mtp is None:
            raise UsageError(
                "draft = mtp: the model has no head for multi-token prediction: name a small model"
            )
        super().__init__(model, tokens, rows, vocabulary)
        weight = model.lm_head.weight
        own_sizes = sizes._replace(pads_products=False)
        self._reading = _ReadingHead(model, own_sizes)
        # The reader calls it like a model, and finds the model's adapters in it.
        reading = cast(Llama, self._reading)
        self.reader = PromptReader(reading, own_sizes, chunk, wrap, recorder, keeps_last=True)
        self.cache = KVCache.allocate(
            model.mtp.config, rows, sizes.per_row, weight.dtype, weight.device, sizes.block
        )

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=weight.device)

        self.first_B = zeros(rows)
        self.count_B = zeros(rows) + 1
        self.next_BS = zeros(rows, tokens + 1)
        self.hidden_BSD = weight.new_zeros(rows, tokens + 1, model.config.hidden_size)
        of_head = sum(parameter.numel() for parameter in model.mtp.parameters())
        of_layers = 1 / model.config.num_hidden_layers
        share = max((of_head + weight.numel()) / weights_read(model), of_layers)
        recurrent = recurrent_share(model.config)
        self.cost = cost_of_pass(rows, tokens, share, weight.device.type, recurrent)

    def choose_prompts(self, prompts: Iterable[PromptToRead]) -> bool:
        """See `Proposer.choose_prompts`."""
        return self.reader.choose_prompts(prompts)

    def rows_of(self, prompts: Iterable[PromptToRead]) -> list[int]:
        """See `Proposer.rows_of`."""
        return self.reader.rows_of(prompts)

    def copy_first_chunks(self, row: int, tokens: int) -> None:
        """Copy nothing: the reader needs the keys and values of the whole model, which `cache` has not."""

    def continue_rows(self, continuations: Sequence[Continuation]) -> None:
        """Read whole texts again, since what the reader has read of them before is not kept."""
        to_read = [(each.row, each.prompt) for each in continuations]
        while to_read:
            self.reader.choose_prompts(prompt for _, prompt in to_read)
            self.reader.read_chunks()
            reader_rows = self.reader.rows_of(prompt for _, prompt in to_read)
            read = to_read[: len(reader_rows)]
            del to_read[: len(reader_rows)]
            self.begin([row for row, _ in read], reader_rows, [prompt for _, prompt in read])

    def begin(
        self, rows: Sequence[int], reader_rows: Sequence[int], prompts: Sequence[PromptToRead]
    ) -> None:
        """See `Proposer.begin`."""
        device = self.first_B.device
        lengths = [len(prompt.ids) for prompt in prompts]
        self.cache.copy_rows(rows, self._reading.cache, reader_rows, max(lengths))
        to_rows = tensor_on(rows, device)
        last_RD = self.reader.last_RD.index_select(0, tensor_on(reader_rows, device))
        # The hidden state is that of the token before the prompt's last one. A prompt of one token has none, but
        # the reader's row may have one of an earlier prompt. The head then reads zeros, at position 0, where
        # it sees nothing of earlier texts.
        has_one_R = tensor_on(lengths, device) > 1
        self.hidden_BSD[:, 0].index_copy_(0, to_rows, last_RD.where(has_one_R[:, None], 0))
        before_last = tensor_on([max(0, length - 2) for length in lengths], device)
        self.first_B.index_copy_(0, to_rows, before_last)
        self.count_B.index_copy_(0, to_rows, torch.ones_like(to_rows))
        last_tokens = tensor_on([prompt.ids[-1] for prompt in prompts], device)
        self.next_BS[:, 0].index_copy_(0, to_rows, last_tokens)

    def propose(
        self, state: State, knobs: Mapping[str, Tensor], chain: Chain, blocks: int
    ) -> Tensor:
        """Return the tokens that the head proposes after each row's last token; see `Proposer.propose`."""
        cache = self.cache.with_first_blocks(blocks)
        columns_S = torch.arange(self.tokens + 1, device=self.first_B.device)
        ahead_BSD = self.model.predict_ahead(
            self.hidden_BSD,
            self.next_BS,
            positions=_positions_in(cache, self.first_B[:, None] + columns_S),
            cache=cache,
        )
        last_B11 = (self.count_B - 1)[:, None, None]
        hidden_B1D = ahead_BSD.gather(1, last_B11.expand(-1, -1, ahead_BSD.shape[-1]))
        proposed: list[Tensor] = []
        for index in range(self.tokens):
            logits_BV = self.model.logits(hidden_B1D[:, 0])[:, : self._vocabulary]
            token_B = sample_proposal(logits_BV, state, index, knobs, chain)
            proposed.append(token_B)
            if index + 1 < self.tokens:
                hidden_B1D = self.model.predict_ahead(
                    hidden_B1D,
                    token_B[:, None],
                    positions=_positions_in(cache, (state.position_B + index)[:, None]),
                    cache=cache,
                )
        return torch.stack(proposed, dim=1)

    def after_pass(
        self, position_B: Tensor, state: State, next_BS: Tensor, hidden_BSD: Tensor
    ) -> None:
        """See `Proposer.after_pass`."""
        count_B = state.position_B - position_B
        # A row without a new token keeps what it has.
        moved_B = count_B > 0
        self.first_B.copy_(torch.where(moved_B, position_B, self.first_B))
        self.count_B.copy_(torch.where(moved_B, count_B, self.count_B))
        self.next_BS.copy_(torch.where(moved_B[:, None], next_BS, self.next_BS))
        self.hidden_BSD.copy_(torch.where(moved_B[:, None, None], hidden_BSD, self.hidden_BSD))

    def clear(self, row: int) -> None:
        """See `Proposer.clear`."""
        super().clear(row)
        self._reading.cache.clear(slice(None))
        self._reading.previous_RD.zero_()
        self.hidden_BSD[row] = 0

    def caches(self) -> list[tuple[LlamaConfig, KVCache, int]]:
        """See `Proposer.caches`."""
        assert self.model.mtp is not None
        of_head = self.model.mtp.config
        return [
            (of_head, self.cache, self.first_B.shape[0]),
            (of_head, self._reading.cache, self.reader.rows),
            (self.model.config, self.reader.cache, self.reader.rows),
        ]


def _positions_in(cache: KVCache, positions_BT: Tensor) -> Tensor:
    """Return positions, with the cache's last slot, which no query of a text reads, in place of those
    outside of the cache.
    """
    last_slot = cache.slots - 1
    is_inside_BT = (positions_BT >= 0) & (positions_BT < last_slot)
    return torch.where(is_inside_BT, positions_BT, last_slot)
