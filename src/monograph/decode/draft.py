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

Shapes: B rows, K proposed tokens, S = K + 1 positions of a pass, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import SamplerRows, sample
from monograph.decode.knobs import Chain
from monograph.decode.prompt_reader import PromptReader, PromptToRead, Wrap
from monograph.decode.step import DecodeStep, State, Status
from monograph.device import tensor_on
from monograph.errors import UsageError
from monograph.graph.replay import Recorder
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

# K, the number of tokens that are proposed at a time: its default, and its maximum.
DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = 16
# In units of one ordinary step, a pass over proposed tokens takes 1 + PASS_COST, and each proposal takes
# TOKEN_COST plus the size of the draft model relative to the model's. Measured on a CPU with one row
# (dev/log.md).
PASS_COST = 0.25
TOKEN_COST = 0.1
# In a generator with a single row, a text goes on without drafts once they have cost the time of this
# many steps more than they saved.
MAX_LOST_STEPS = 4.0
# The stages of the model's chain that the draft model samples with, too.
_TEMPERATURES = ("temperature", "dynamic_temperature")


class Drafter:
    """The draft model with the keys and values of all rows.

    Attributes:
        model: the draft model, in evaluation mode.
        tokens: K.
        cost: the estimated time of a pass with drafts, in ordinary steps.
        reader: reads prompts.
        cache: keys and values of the rows.
        previous_B: the token before the row's last one. If every proposal was accepted, the draft model
            has written this token, but not read it yet.
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
        require_draft_tokens(tokens)
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
        self.model = model
        self.tokens = tokens
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
        self.previous_B = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self._vocabulary = vocabulary
        self.cost = draft_cost(_weights_read(model), target, tokens)

    def begin(self, rows: Sequence[int], prompts: Sequence[PromptToRead]) -> None:
        """Read the prompts of texts that are about to begin in rows.

        A prompt that continues a row is read as a whole, too.
        """
        device = self.previous_B.device
        # The token before each prompt's last one; for a prompt of one token, that token.
        before_last = [prompt.ids[-2:][0] for prompt in prompts]
        self.previous_B.index_copy_(0, tensor_on(rows, device), tensor_on(before_last, device))
        to_read = list(zip(rows, prompts, strict=True))
        # The reader takes as many prompts at a time as its cache has rows.
        while to_read:
            self.reader.choose_prompts(prompt for _, prompt in to_read)
            self.reader.read_chunks()
            reader_rows = self.reader.rows_of(prompt for _, prompt in to_read)
            read = to_read[: len(reader_rows)]
            del to_read[: len(reader_rows)]
            longest = max(len(prompt.ids) for _, prompt in read)
            self.cache.copy_rows([row for row, _ in read], self.reader.cache, reader_rows, longest)

    def propose(
        self, state: State, knobs: Mapping[str, Tensor], chain: Chain, blocks: int
    ) -> Tensor:
        """Return the tokens that the draft model writes after each row's last token, int64 [B, K].

        Args:
            state: the state of the rows.
            knobs: the numbers that the chain's stages read.
            chain: the chain of the model's step.
            blocks: how many blocks of the cache attention reads.
        """
        cache = self.cache.with_first_blocks(blocks)
        last_slot = self.cache.slots - 1
        proposed: list[Tensor] = []
        # The first pass also reads the token before the last one, which may not have been read yet
        # (`previous_B`). If it has, the same key and value are written again. In a text of one token,
        # `begin` has set it to that token, which is then read twice at position 0.
        tokens_BT = torch.stack([self.previous_B, state.token_B], dim=1)
        positions_BT = torch.stack([state.position_B - 1, state.position_B], dim=1).clamp(min=0)
        for index in range(self.tokens):
            hidden_BTD = self.model(tokens_BT, positions=positions_BT, cache=cache)
            logits_BV = self.model.logits(hidden_BTD[:, -1])[:, : self._vocabulary]
            token_B = sample_proposal(logits_BV, state, index, knobs, chain)
            proposed.append(token_B)
            tokens_BT = token_B[:, None]
            positions_BT = (state.position_B + 1 + index).clamp(max=last_slot)[:, None]
        return torch.stack(proposed, dim=1)

    def after_pass(
        self, position_B: Tensor, state: State, next_BS: Tensor, hidden_BSD: Tensor
    ) -> None:
        """Take what the model has computed in a pass, which a draft model does not read."""

    def caches(self) -> list[tuple[LlamaConfig, KVCache, int]]:
        """Return all caches, each with its model's configuration and its number of rows."""
        config = self.model.config
        rows = self.previous_B.shape[0]
        return [(config, self.cache, rows), (config, self.reader.cache, self.reader.rows)]


class ProposingDrafter(Protocol):
    """What `DraftedStep` needs: a `Drafter`, or a `HeadDrafter` (`monograph.decode.draft_head`)."""

    tokens: int
    previous_B: Tensor

    def propose(
        self, state: State, knobs: Mapping[str, Tensor], chain: Chain, blocks: int
    ) -> Tensor:
        """See `Drafter.propose`."""

    def after_pass(
        self, position_B: Tensor, state: State, next_BS: Tensor, hidden_BSD: Tensor
    ) -> None:
        """See `HeadDrafter.after_pass`."""


def require_draft_tokens(tokens: int) -> None:
    """Refuse a number of proposed tokens that is not possible.

    Raises:
        UsageError: it is not from 1 to MAX_DRAFT_TOKENS.
    """
    if not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise UsageError(f"draft_tokens = {tokens}: expected 1 to {MAX_DRAFT_TOKENS}")


def draft_cost(weights_read: int, target: Llama, tokens: int) -> float:
    """Return the estimated time of a pass with drafts, in ordinary steps.

    Args:
        weights_read: how many weights are read to propose a token.
        target: the model whose texts are written.
        tokens: K.
    """
    share = weights_read / _weights_read(target)
    return 1 + PASS_COST + tokens * (share + TOKEN_COST)


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

    def __init__(self, step: DecodeStep, drafter: ProposingDrafter) -> None:
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
        hidden_BSD = step.hidden_of_proposed(proposed_BK, blocks)
        logits_BSV = step.logits_of(hidden_BSD)
        position_before_B = state.position_B.clone()
        sampled_tokens = list[Tensor]()
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
                waits_B = is_other_B & (status_B == running)
                status_B.copy_(torch.where(waits_B, waiting, status_B))
        status_B.copy_(torch.where(status_B == waiting, running, status_B))
        next_BS = torch.stack(sampled_tokens, dim=1)
        self.drafter.after_pass(position_before_B, state, next_BS, hidden_BSD)


def _weights_read(model: Llama) -> int:
    """Return how many weights a step reads.

    These are all but the embedding, of which it reads a few rows, unless the head shares its weights.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if model.config.tie_word_embeddings:
        return count
    return count - model.model.embed_tokens.weight.numel()
