"""Drafts: a small model proposes tokens, and the model checks them in one pass (speculative decoding).

The small model, called the draft model, writes the next K tokens of each row, one after another. The
model then reads the row's last token and these K tokens in one pass, and samples as in K + 1 ordinary
steps: first the token after the row's last one. If the sampled token is the proposed one, the proposal is
accepted, and the next token is sampled, and so on. After the first sampled token that was not proposed,
the pass is over for this row, since the model has read the wrong text from there on. So the text is the
model's own, whatever the draft model proposes. The proposals only decide how many tokens a pass gives,
from 1 to K + 1.

    proposed_k = sample(draft(text, proposed_1 .. proposed_k-1), noise of the position)
    logits_0 .. logits_K = model(text, proposed_1 .. proposed_K)
    token_k = sample(logits_k, noise of the position), as long as token_1 .. token_k-1 were proposed

Both models sample with the same Gumbel noise, which is a function of the row's seed, the position and
the id (`monograph.decode.reproducible`). So two models with similar probabilities mostly sample the same
token, even at a temperature above 0 (Daliri, Musco and Suresh, arXiv 2408.07978). The draft model samples
with the temperature of the request, but without its penalties, filters and constraints.

The keys and values of rejected proposals stay in both caches, after the row's last token, until the next
pass overwrites them. Attention multiplies them by 0, and 0 times NaN is NaN. So a rejected proposal whose
keys or values are not finite ends the text, as a token of the text itself would.

The state of a recurrent layer has no places that could be overwritten. So a pass over proposed tokens
changes copies of the states (`KVCache.trial`), and afterwards the states themselves take in the tokens that
count. What the layers had computed from the tokens is kept for that, so that it takes no second pass.

A pass may round otherwise than the steps that it replaces (`rounds_as_steps`). Whether it does decides how
drafts can be switched off where they do not pay (`monograph.decode.draft_budget`): a text must not depend
on what other texts do to a budget that it shares with them.

Shapes: B rows, K proposed tokens, S = K + 1 positions of a pass, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from monograph.decode.adapter_bank import BASE_SLOT
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import SamplerRows, sample
from monograph.decode.draft_budget import cost_of_pass
from monograph.decode.knobs import Chain
from monograph.decode.prompt_reader import Continuation, PromptReader, PromptToRead, Wrap
from monograph.decode.step import DecodeStep, State, Status
from monograph.device import tensor_on
from monograph.errors import UsageError
from monograph.graph.replay import Recorder
from monograph.model import layer_inputs
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.model.mixer import mixer_of
from monograph.model.mixture import Experts

if TYPE_CHECKING:
    from monograph.decode.fast_forward import FastForward

# K, the number of tokens that are proposed at a time: its default, and its maximum.
DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = 16
# The stages of the model's chain that the draft model samples with, too.
_TEMPERATURES = ("temperature", "dynamic_temperature")


class Proposer(ABC):
    """What proposes tokens: a draft model (`Drafter`), or the model's own head (`draft_head.HeadDrafter`).

    Attributes:
        reads_hidden: whether it reads the final hidden states of the model's passes.
        model: what proposes tokens, in evaluation mode.
        tokens: K.
        cost: the estimated time of a pass with drafts, in ordinary steps.
        reader: reads prompts.
        cache: keys and values of the rows.
        one_token_B: bool, the rows that sample one token in a pass, whatever is proposed: the host must read
            it before it knows which tokens may come next.
        previous_B: the token before the row's last one.
    """

    reads_hidden: ClassVar[bool] = False
    cost: float
    reader: PromptReader
    cache: KVCache

    def __init__(self, model: Llama, tokens: int, rows: int, vocabulary: int) -> None:
        """Allocate what all proposers have.

        Raises:
            UsageError: K is not from 1 to MAX_DRAFT_TOKENS.
        """
        if not 1 <= tokens <= MAX_DRAFT_TOKENS:
            raise UsageError(f"draft_tokens = {tokens}: expected 1 to {MAX_DRAFT_TOKENS}")
        self.model = model
        self.tokens = tokens
        self._vocabulary = vocabulary
        device = model.lm_head.weight.device
        self.one_token_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.previous_B = torch.zeros(rows, dtype=torch.int64, device=device)

    @abstractmethod
    def choose_prompts(self, prompts: Iterable[PromptToRead]) -> bool:
        """Choose the prompts that are read next; see `PromptReader.choose_prompts`."""

    @abstractmethod
    def rows_of(self, prompts: Iterable[PromptToRead]) -> list[int]:
        """Return the reader's rows of these prompts; see `PromptReader.rows_of`."""

    @abstractmethod
    def copy_first_chunks(self, row: int, tokens: int) -> None:
        """Copy to the reader what a row has of the chosen prompt; see `PromptReader.copy_first_chunks`."""

    @abstractmethod
    def begin(
        self, rows: Sequence[int], reader_rows: Sequence[int], prompts: Sequence[PromptToRead]
    ) -> None:
        """Begin texts in rows, with what the reader has read of their prompts.

        Args:
            rows: the rows.
            reader_rows: the row of the reader's cache that each prompt is in.
            prompts: the whole prompts.
        """

    @abstractmethod
    def continue_rows(self, continuations: Sequence[Continuation]) -> None:
        """Read the tokens of rows that were not read yet.

        Args:
            continuations: at most as many as the reader has rows.
        """

    @abstractmethod
    def propose(
        self, state: State, knobs: Mapping[str, Tensor], chain: Chain, blocks: int
    ) -> Tensor:
        """Return the tokens that are proposed after each row's last token, int64 [B, K].

        Args:
            state: the state of the rows.
            knobs: the numbers that the chain's stages read.
            chain: the chain of the model's step.
            blocks: how many blocks of the cache attention reads.
        """

    def after_pass(
        self, position_B: Tensor, state: State, next_BS: Tensor, hidden_BSD: Tensor
    ) -> None:
        """Take what the model has computed in a pass. It is called only if `reads_hidden`.

        Args:
            position_B: the position of each row's last token before the pass.
            state: the state after it.
            next_BS: the tokens that were sampled.
            hidden_BSD: the final hidden states of the pass.
        """

    @abstractmethod
    def caches(self) -> list[tuple[LlamaConfig, KVCache, int]]:
        """Return all caches, each with its model's configuration and its number of rows."""

    def clear(self, row: int) -> None:
        """Set a row to zero, and forget all prompts, since some numbers are not finite; see `KVCache.clear`."""
        self.cache.clear(row)
        self.reader.forget()

    def write_one_token(self, rows: Sequence[int], values: Sequence[bool]) -> None:
        """Write `one_token_B` of rows."""
        device = self.one_token_B.device
        self.one_token_B.index_copy_(0, tensor_on(rows, device), tensor_on(values, device).bool())


class Drafter(Proposer):
    """The draft model with the keys and values of all rows.

    If every proposal was accepted, the draft model has written the token before the row's last one
    (`previous_B`), but not read it yet.

    Attributes:
        forward_kernels: computes the logits by kernels, where they can; None: the model's forward pass does.
    """

    def __init__(
        self,
        model: Llama,
        target: Llama,
        tokens: int,
        rows: int,
        sizes: CacheSizes,
        vocabulary: int,
        chunk: int,
        wrap: Wrap,
        recorder: Recorder | None,
    ) -> None:
        """Allocate the draft model's caches.

        Args:
            model: the draft model, in evaluation mode.
            target: the model whose texts are written.
            tokens: K, from 1 to MAX_DRAFT_TOKENS.
            rows: B.
            sizes: the sizes of the model's cache.
            vocabulary: V of the tokenizer, which both models have.
            chunk: see `PromptReader`.
            wrap: see `PromptReader`.
            recorder: see `PromptReader`.

        Raises:
            UsageError: the draft model has recurrent layers, whose state cannot be rolled back, or
                fewer positions than a row, or fewer tokens than the tokenizer.
        """
        super().__init__(model, tokens, rows, vocabulary)
        if model.config.vocab_size < vocabulary:
            raise UsageError(
                f"the draft model has {model.config.vocab_size} tokens, and the model's tokenizer {vocabulary}: "
                "expected a model with the same tokenizer"
            )
        if sizes.per_row > model.config.max_position_embeddings:
            raise UsageError(
                f"the draft model has {model.config.max_position_embeddings} positions, but texts may have "
                f"{sizes.per_row}: ask for fewer tokens"
            )
        weight = model.lm_head.weight
        own_sizes = sizes._replace(pads_products=False)
        self.reader = PromptReader(model, own_sizes, chunk, wrap, recorder)
        self.cache = KVCache.allocate(
            model.config, rows, sizes.per_row, weight.dtype, weight.device, sizes.block
        )
        if self.cache.recurrences:
            raise UsageError(
                "the draft model has recurrent layers, whose state cannot be rolled back: expected one with "
                "attention alone"
            )
        self.forward_kernels: FastForward | None = None
        # A step of few weights in many layers takes as long as its layers' operators.
        of_layers = model.config.num_hidden_layers / target.config.num_hidden_layers
        share = max(weights_read(model) / weights_read(target), of_layers)
        recurrent = recurrent_share(target.config)
        self.cost = cost_of_pass(rows, tokens, share, weight.device.type, recurrent)

    def choose_prompts(self, prompts: Iterable[PromptToRead]) -> bool:
        """Choose the prompts that are read next; see `PromptReader.choose_prompts`."""
        return self.reader.choose_prompts(map(_without_adapter, prompts))

    def rows_of(self, prompts: Iterable[PromptToRead]) -> list[int]:
        """Return the reader's rows of these prompts; see `PromptReader.rows_of`."""
        return self.reader.rows_of(map(_without_adapter, prompts))

    def copy_first_chunks(self, row: int, tokens: int) -> None:
        """See `Proposer.copy_first_chunks`."""
        self.reader.copy_first_chunks(self.cache, row, tokens)

    def begin(
        self, rows: Sequence[int], reader_rows: Sequence[int], prompts: Sequence[PromptToRead]
    ) -> None:
        """See `Proposer.begin`."""
        longest = max(len(prompt.ids) for prompt in prompts)
        self.cache.copy_rows(rows, self.reader.cache, reader_rows, longest)
        self._write_previous(rows, prompts)

    def continue_rows(self, continuations: Sequence[Continuation]) -> None:
        """See `Proposer.continue_rows`."""
        continuations = [
            each._replace(prompt=_without_adapter(each.prompt)) for each in continuations
        ]
        self.reader.continue_rows(self.cache, continuations)
        rows = [each.row for each in continuations]
        prompts = [each.prompt for each in continuations]
        self.begin(rows, range(len(rows)), prompts)

    def _write_previous(self, rows: Sequence[int], prompts: Sequence[PromptToRead]) -> None:
        device = self.previous_B.device
        # The token before each text's last one; for a text of one token, that token.
        before_last = [prompt.ids[-2:][0] for prompt in prompts]
        self.previous_B.index_copy_(0, tensor_on(rows, device), tensor_on(before_last, device))

    def propose(
        self, state: State, knobs: Mapping[str, Tensor], chain: Chain, blocks: int
    ) -> Tensor:
        """Return the tokens that the draft model writes after each row's last token; see
        `Proposer.propose`.
        """
        last_slot = self.cache.slots - 1
        proposed: list[Tensor] = []
        # The first pass also reads the token before the last one, which may not have been read yet
        # (`previous_B`). If it has, the same key and value are written again. In a text of one token,
        # `begin` has set it to that token, which is then read twice at position 0.
        tokens_BT = torch.stack([self.previous_B, state.token_B], dim=1)
        positions_BT = torch.stack([state.position_B - 1, state.position_B], dim=1).clamp(min=0)
        for index in range(self.tokens):
            logits_BV = self._logits(tokens_BT, positions_BT, blocks)[:, : self._vocabulary]
            token_B = sample_proposal(logits_BV, state, index, knobs, chain)
            proposed.append(token_B)
            tokens_BT = token_B[:, None]
            positions_BT = (state.position_B + 1 + index).clamp(max=last_slot)[:, None]
        return torch.stack(proposed, dim=1)

    def _logits(self, tokens_BT: Tensor, positions_BT: Tensor, blocks: int) -> Tensor:
        """Return the draft model's logits after the last of some tokens, [B, V]."""
        kernels = self.forward_kernels
        if kernels is not None and kernels.follows_autocast("cuda"):
            logits_BTV = kernels.logits_of_columns(tokens_BT, positions_BT, self.cache, blocks)
            if logits_BTV is not None:
                return logits_BTV[:, -1]
        cache = self.cache.with_first_blocks(blocks)
        hidden_BTD = self.model(tokens_BT, positions=positions_BT, cache=cache)
        logits_BV: Tensor = self.model.logits(hidden_BTD[:, -1])
        return logits_BV

    def caches(self) -> list[tuple[LlamaConfig, KVCache, int]]:
        """See `Proposer.caches`."""
        config = self.model.config
        rows = self.previous_B.shape[0]
        return [(config, self.cache, rows), (config, self.reader.cache, self.reader.rows)]


def sample_proposal(
    logits_BV: Tensor, state: State, index: int, knobs: Mapping[str, Tensor], chain: Chain
) -> Tensor:
    """Return a proposed token for each row, int64 [B].

    Args:
        logits_BV: the logits of the token.
        state: the state of the rows.
        index: the number of tokens that were proposed before, in this pass.
        knobs: the numbers that the chain's stages read.
        chain: the chain of the model's step, of which only the temperatures are used.
    """
    stages = tuple(stage for stage in chain.stages if stage in _TEMPERATURES)
    rows = SamplerRows(
        seed_B=state.seed_B,
        position_B=state.position_B + 1 + index,
        generated_B=state.generated_B,
        knobs=dict(knobs),
        counts_BV=None,
        prompt_BV=None,
        past=None,
        mu_B=None,
    )
    # Without filters, the truncation makes no difference.
    return sample(logits_BV, rows, None, Chain(stages=stages), "search").token_B


class DraftedStep:
    """A step that samples 1 to K + 1 tokens in every running row.

    It writes K + 1 lines of the rings. In the lines after a row's last token of the pass, the row has the
    status WAITING.
    """

    def __init__(self, step: DecodeStep, drafter: Proposer) -> None:
        """Take the model's step and what proposes tokens."""
        self.step = step
        self.drafter = drafter

    @torch.no_grad()
    def __call__(self, blocks: int, truncation: Truncation, follow_automata: bool = True) -> None:
        """Sample tokens; the arguments are those of `DecodeStep.__call__`."""
        step = self.step
        state = step.state
        status_B = state.status_B
        # Plain ints, since Dynamo does not treat an IntEnum as a number.
        running = Status.RUNNING.value
        waiting = Status.WAITING.value
        proposed_BK = self.drafter.propose(state, step.knobs, step.chain, blocks)
        cache = step.cache.with_first_blocks(blocks)
        if step.cache.recurrences:
            cache = cache.trial()
        logits_BSV, hidden_BSD = _read_proposed(step, proposed_BK, cache, self.drafter.reads_hidden)
        position_before_B = state.position_B.clone()
        sampled_tokens: list[Tensor] = []
        for index in range(self.drafter.tokens + 1):
            token_before_B = state.token_B.clone()
            count_before_B = state.generated_B.clone()
            step.sample_after(logits_BSV[:, index], truncation, follow_automata)
            sampled_tokens.append(state.token_B.clone())
            sampled_B = state.generated_B > count_before_B
            previous_B = self.drafter.previous_B
            previous_B.copy_(torch.where(sampled_B, token_before_B, previous_B))
            if index < self.drafter.tokens:
                is_other_B = state.token_B != proposed_BK[:, index]
                waits_B = (is_other_B | self.drafter.one_token_B) & (status_B == running)
                status_B.copy_(torch.where(waits_B, waiting, status_B))
        status_B.copy_(torch.where(status_B == waiting, running, status_B))
        if step.cache.recurrences:
            # They take in what attention would see at the row's next token: all tokens before the last one.
            step.cache.count_tokens(cache, state.position_B)
        if hidden_BSD is not None:
            next_BS = torch.stack(sampled_tokens, dim=1)
            self.drafter.after_pass(position_before_B, state, next_BS, hidden_BSD)


def _read_proposed(
    step: DecodeStep, proposed_BK: Tensor, cache: KVCache, reads_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the logits after each row's last token and each proposed one, [B, S, V], and if asked for the
    final hidden states [B, S, D], which the kernels of steps do not give.
    """
    if not reads_hidden:
        return step.logits_of_proposed(proposed_BK, cache), None
    hidden_BSD = step.hidden_of_proposed(proposed_BK, cache)
    return step.logits_of(hidden_BSD), hidden_BSD


def rounds_as_steps(step: DecodeStep, tokens: int, reads_hidden: bool) -> bool:
    """Return whether a pass over proposed tokens gives the bits of the steps that it replaces.

    Libraries choose the kernel of a product by its number of rows, and kernels round differently. So this
    is tried, with random tokens, keys and values, in a cache of its own.

    Args:
        step: the model's step.
        tokens: K.
        reads_hidden: see `Proposer.reads_hidden`.

    Returns:
        False also where one trial would not show it: which rows an expert of a mixture computes depends on
        the tokens, and what an adapter adds depends on adapters that may come later.
    """
    model = step.model
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    if has_experts or step.bank is not None or step.cache.recurrences:
        return False
    rows = len(step.state.token_B)
    weight = model.lm_head.weight
    block = step.cache.block
    cache = KVCache.allocate(model.config, rows, block, weight.dtype, weight.device, block)
    cache.kernels = step.cache.kernels
    cache.one_query_at_a_time = step.cache.one_query_at_a_time
    no_stages = Chain(stages=())
    state = State.allocate(rows, block, step.vocabulary, 2, no_stages, weight.device)
    trial = replace(step, cache=cache, state=state)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    shape = (rows, tokens + 1)
    tokens_BS = torch.randint(step.vocabulary, shape, generator=generator).to(weight.device)
    first = block - tokens - 1
    state.token_B.copy_(tokens_BS[:, 0])
    state.position_B.fill_(first)
    with torch.no_grad():
        pass_BSV, _ = _read_proposed(
            trial, tokens_BS[:, 1:], cache.with_first_blocks(1), reads_hidden
        )
        for column in range(tokens + 1):
            state.token_B.copy_(tokens_BS[:, column])
            state.position_B.fill_(first + column)
            if not torch.equal(trial.logits_of_step(1), pass_BSV[:, column]):
                return False
    return True


def _without_adapter(prompt: PromptToRead) -> PromptToRead:
    """Return a prompt without the adapter of its request, which the draft model does not have."""
    reuse_key = prompt.reuse_key._replace(adapter=BASE_SLOT, slot_write=0)
    return prompt._replace(reuse_key=reuse_key)


def recurrent_share(config: LlamaConfig) -> float:
    """Return the share of a model's layers that are recurrent."""
    layers = range(config.num_hidden_layers)
    # Layers that carry a state along the row need to know where documents begin.
    return sum(mixer_of(config, layer).reads_segments for layer in layers) / len(layers)


def weights_read(model: Llama) -> int:
    """Return how many weights a step reads.

    These are all but the tables of embeddings, of which it reads a few rows. A table that the head shares
    is read whole.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if model.config.hidden_size_per_layer_input:
        count -= layer_inputs.table_of(model.model).weight.numel()
    if model.config.tie_word_embeddings:
        return count
    return count - model.model.embed_tokens.weight.numel()
