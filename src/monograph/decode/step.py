"""One step of decoding: the model, the sampler and the stop rules as one graph over preallocated
tensors.

A step samples one token in each row that has a running request. A ring is a tensor with a line for each
step, to which the step writes its results. With x' for the next x, a step is

    hidden = model(token, position, cache)
    logits = head(hidden)
    allowed = mask of the automaton
    token' = sample(chain(logits, allowed))
    status' = stop rules
    line of the ring = token' + status' * 2^24

With a draft model, one pass of the model over K proposed tokens is followed by the sampling of K + 1
such steps (`monograph.decode.draft`).

The same function runs eagerly, compiled and replayed as a CUDA graph, and the host reads nothing
here. A block is several steps that are started together. The host copies the ring's lines of a whole
block, and waits for the copy only when it reads them (`monograph.decode.outbox.Outbox`).

A chain is the list of the sampler's stages that some requests need (`monograph.decode.knobs`). If
requests need different chains, `Steps` has a step for each chain, and all steps of a block use the
same chain.

Shape suffixes: B rows, V vocabulary, M stop ids, T positions of a row, R lines of a ring, N
log-probabilities, D hidden size; 1 an axis of length 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from monograph.decode.adapter_bank import AdapterBank, rows_with_adapters
from monograph.decode.automaton_tables import AutomatonTables, allowed_tokens, is_over, next_states
from monograph.decode.cache import KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import (
    COUNT_DTYPE,
    OK,
    LogProbabilities,
    Past,
    SampledTokens,
    SamplerRows,
    add_to_counts,
    edit_logits_or_nan,
    log_probabilities,
    sample,
)
from monograph.decode.knobs import Chain, join_chains
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.llama import Llama

if TYPE_CHECKING:
    from monograph.decode.fast_forward import FastForward
    from monograph.decode.fast_sampler import FastSampler

# The result of a step in a row is one number, its code: the token is in its lowest bits, and the status
# is above them.
TOKEN_BITS = 24
# The maximum number of stop ids of a row.
MAX_STOP_IDS = 16


class Status(IntEnum):
    """The status of a row.

    Attributes:
        FREE: the row has no request.
        RUNNING: the row samples a token at every step.
        STOP: the row sampled a stop id, a token that completes a stop string, or a token after which
            only an end token may come.
        LENGTH: the row sampled the maximum number of tokens.
        NOT_FINITE: the row's logits have a NaN or +inf.
        NOTHING_ALLOWED: all tokens are forbidden.
        UNDECIDED: the truncation "window" could not decide which tokens a filter keeps. The row
            samples nothing until the host sets it to RUNNING, for steps with the exact truncation
            "search".
        WAITING: the row has sampled another token than was proposed (`monograph.decode.draft`), and
            samples nothing until the pass has ended. Then it runs again.
    """

    FREE = 0
    RUNNING = 1
    STOP = 2
    LENGTH = 3
    NOT_FINITE = 4
    NOTHING_ALLOWED = 5
    UNDECIDED = 6
    WAITING = 7


# A step in which a row gets one of these statuses sampled a token.
HAS_TOKEN = (Status.RUNNING, Status.STOP, Status.LENGTH)


@dataclass
class State:
    """The state of all rows; int64 unless stated otherwise.

    A tensor is None if the chain does not need it.

    Attributes:
        token_B: the last token, which the next step reads.
        position_B: the position of the last token.
        seed_B: the seed of the row's random numbers.
        generated_B: the number of sampled tokens.
        limit_B: the maximum number of sampled tokens.
        adapter_B: the slot of the row's adapter (`monograph.decode.adapter_bank`).
        status_B: a `Status`.
        stop_ids_BM: the ids that end the text, padded with -1.
        constraint_state_B: the state of the automaton of allowed texts, with its counters.
        stop_state_B: the state of the automaton of stop strings.
        counts_BV: int32, see `SamplerRows`.
        prompt_BV: bool or int32, see `SamplerRows`.
        past: the ids of prompt and output, and their repetitions.
        mu_B: fp32, the surprise in bits that mirostat allows.
        line_1: the line of the rings that the next step writes, [1].
        codes_RB: int32, a ring: the code of each step and row, token + status * 2^24.
        values_RBN: fp32, a ring: the log-probability of the sampled token and then of the likeliest
            tokens, under the raw logits; then the same under the distribution that is sampled from.
        ids_RBN: int32, a ring: the ids of these likeliest tokens, in the same order.
    """

    token_B: Tensor
    position_B: Tensor
    seed_B: Tensor
    generated_B: Tensor
    limit_B: Tensor
    adapter_B: Tensor
    status_B: Tensor
    stop_ids_BM: Tensor
    constraint_state_B: Tensor
    stop_state_B: Tensor
    counts_BV: Tensor | None
    prompt_BV: Tensor | None
    past: Past | None
    mu_B: Tensor
    line_1: Tensor
    codes_RB: Tensor
    values_RBN: Tensor | None
    ids_RBN: Tensor | None

    @classmethod
    def allocate(
        cls, rows: int, slots: int, vocabulary: int, lines: int, chain: Chain, device: torch.device
    ) -> State:
        """Allocate the state of rows that are all free.

        Args:
            rows: B.
            slots: T, the number of positions of a row.
            vocabulary: V.
            lines: R, the number of lines of a ring.
            chain: the state has all tensors that this chain needs.
            device: where the tensors are.
        """
        logprobs = chain.logprobs
        needed = _NeededState.of(chain)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # If penalties see only the last n tokens, the tokens of the prompt leave this window one by one.
        # So it must be known how often each of them is in the window, and not only whether it is.
        prompt_dtype = COUNT_DTYPE if "last_n" in chain.stages else torch.bool
        past = None
        if needed.past:
            past = Past(
                history_BT=zeros(rows, slots, dtype=torch.int32),
                repeats_BT=zeros(rows, slots, dtype=torch.int32),
                breaker_BV=zeros(rows, vocabulary, dtype=torch.bool),
            )
        values = None
        ids = None
        if logprobs is not None:
            values = zeros(lines, rows, 2 * (1 + logprobs), dtype=torch.float32)
            ids = zeros(lines, rows, 2 * logprobs, dtype=torch.int32)
        return cls(
            token_B=zeros(rows),
            position_B=zeros(rows),
            seed_B=zeros(rows),
            generated_B=zeros(rows),
            limit_B=zeros(rows),
            adapter_B=zeros(rows),
            status_B=zeros(rows),
            stop_ids_BM=zeros(rows, MAX_STOP_IDS) - 1,
            constraint_state_B=zeros(rows),
            stop_state_B=zeros(rows),
            counts_BV=zeros(rows, vocabulary, dtype=COUNT_DTYPE) if needed.counts else None,
            prompt_BV=zeros(rows, vocabulary, dtype=prompt_dtype) if needed.prompt else None,
            past=past,
            mu_B=zeros(rows, dtype=torch.float32),
            line_1=zeros(1),
            codes_RB=zeros(lines, rows, dtype=torch.int32),
            values_RBN=values,
            ids_RBN=ids,
        )

    def for_chain(self, chain: Chain) -> State:
        """Return a state of the same tensors, without the tensors that a smaller chain does not need.

        A step of the smaller chain leaves these tensors unchanged.
        """
        needed = _NeededState.of(chain)
        return replace(
            self,
            counts_BV=self.counts_BV if needed.counts else None,
            prompt_BV=self.prompt_BV if needed.prompt else None,
            past=self.past if needed.past else None,
            values_RBN=None if chain.logprobs is None else self.values_RBN,
            ids_RBN=None if chain.logprobs is None else self.ids_RBN,
        )

    def write_log_probabilities(self, raw: LogProbabilities, processed: LogProbabilities) -> None:
        """Write a step's log-probabilities to the present line of the rings.

        Args:
            raw: under the raw logits.
            processed: under the distribution that is sampled from.
        """
        if self.values_RBN is not None and self.ids_RBN is not None:
            values_BN = torch.cat(
                [
                    raw.chosen_B[:, None],
                    raw.values_BN,
                    processed.chosen_B[:, None],
                    processed.values_BN,
                ],
                dim=1,
            )
            ids_BN = torch.cat([raw.ids_BN, processed.ids_BN], dim=1)
            # If `line_1` were a number and not a tensor, a captured graph would write to the same line at
            # every replay.
            self.values_RBN.index_copy_(0, self.line_1, values_BN[None])
            self.ids_RBN.index_copy_(0, self.line_1, ids_BN[None].to(torch.int32))

    def end_step(self, sampled_B: Tensor, status_B: Tensor) -> None:
        """Update the state after a token was written to `token_B`, and write the step's codes.

        Args:
            sampled_B: bool, the rows that sampled a token.
            status_B: the new statuses.
        """
        # All writes are in place: a captured graph uses the same addresses at every replay.
        self.generated_B += sampled_B
        self.position_B += sampled_B
        self.status_B.copy_(status_B)
        if self.counts_BV is not None:
            add_to_counts(self.counts_BV, self.token_B, sampled_B)
        # `past` needs the position of the new token, so this comes after the change of the position.
        if self.past is not None:
            self.past.add(self.token_B, self.position_B, sampled_B)
        # A code is one number for token and status, so that fewer bytes are copied to the host.
        codes_B = self.token_B + (status_B << TOKEN_BITS)
        self.codes_RB.index_copy_(0, self.line_1, codes_B[None].to(torch.int32))
        self.line_1 += 1

    def uncount_leaving_token(self, sampled_B: Tensor, knobs: Mapping[str, Tensor]) -> None:
        """Subtract the token that leaves the window of the last n tokens from the counts, in place.

        Args:
            sampled_B: bool, the rows that sampled a token, which `end_step` has counted.
            knobs: "penalty_last_n" n, below 0 for all tokens, and "counts_prompt", [B] each.
        """
        assert self.counts_BV is not None and self.past is not None
        n_B = knobs["penalty_last_n"]
        history_BT = self.past.history_BT
        leaving_position_B = self.position_B - n_B
        leaves_B = sampled_B & (n_B > 0) & (leaving_position_B >= 0)
        index_B1 = leaving_position_B.clamp(min=0, max=history_BT.shape[1] - 1)[:, None]
        token_B = history_BT.gather(-1, index_B1)[:, 0].long()
        # `prompt_BV` counts the tokens of the prompt. `counts_BV` counts the output, and the prompt
        # only with "counts_prompt". The prompt ends `generated_B` positions before the last token.
        is_of_prompt_B = leaving_position_B <= self.position_B - self.generated_B
        is_in_counts_B = ~is_of_prompt_B | (knobs["counts_prompt"] > 0)
        add_to_counts(self.counts_BV, token_B, leaves_B & is_in_counts_B, -1)
        if self.prompt_BV is not None:
            add_to_counts(self.prompt_BV, token_B, leaves_B & is_of_prompt_B, -1)


class _NeededState(NamedTuple):
    """Whether a chain needs each optional tensor of `State`.

    Attributes:
        counts: the counts of sampled ids.
        prompt: the ids of the prompt.
        past: the ids at all positions, and their repetitions.
    """

    counts: bool
    prompt: bool
    past: bool

    @classmethod
    def of(cls, chain: Chain) -> _NeededState:
        return cls(
            counts=chain.has("repetition", "frequency_presence"),
            prompt=chain.has("repetition"),
            past=chain.has("last_n", "dry"),
        )


@dataclass(eq=False, repr=False)
class DecodeStep:
    """A model with the state, the cache and the automata of its rows.

    A call samples one token in every running row. All attributes are shared with the steps of other
    chains, and not copied.

    Attributes:
        model: the language model, in evaluation mode.
        state: the state of the rows.
        cache: keys and values of the rows.
        chain: the sampler's stages.
        knobs: the numbers that the stages read, for each row (`new_knobs`).
        tables: the automata of all rows.
        vocabulary: V, the size of the tokenizer's vocabulary. The model's may be larger; the
            additional ids are never sampled.
        forward_kernels: computes the logits by kernels; None: the model's forward pass does.
        fast_sampler: samples by a kernel, with the same bits as `sample`; None: `sample` does.
        bank: the model's adapters, of which each row has one; None: the model has no bank.
    """

    model: Llama
    state: State
    cache: KVCache
    chain: Chain
    knobs: dict[str, Tensor]
    tables: AutomatonTables
    vocabulary: int
    forward_kernels: FastForward | None = None
    fast_sampler: FastSampler | None = None
    bank: AdapterBank | None = None

    @torch.no_grad()
    def __call__(
        self,
        blocks: int,
        truncation: Truncation,
        follow_automata: bool = True,
        hidden_BD: Tensor | None = None,
    ) -> None:
        """Sample one token in every running row.

        Args:
            blocks: how many blocks of the cache attention reads, from the first on. They must include
                the position of every running row.
            truncation: see `sample`.
            follow_automata: see `sample_after`.
            hidden_BD: the final hidden states of the rows' last tokens; None: the model computes
                them.
        """
        self.sample_after(self.logits_of_step(blocks, hidden_BD), truncation, follow_automata)

    def sample_after(
        self, logits_BV: Tensor, truncation: Truncation, follow_automata: bool
    ) -> None:
        """Sample one token in every running row, given the logits after the rows' last tokens.

        Args:
            logits_BV: the logits, [B, V] or with more ids than the tokenizer has.
            truncation: see `sample`.
            follow_automata: whether the automata of the rows are used. It may be False only if they
                cannot change this token: if no running row has one, or if each allows every token and
                the host writes its next state itself.
        """
        state = self.state
        logits_BV = logits_BV[:, : self.vocabulary]
        rows = SamplerRows(
            seed_B=state.seed_B,
            # The position of the token to be sampled, which follows the token that is read.
            position_B=state.position_B + 1,
            generated_B=state.generated_B,
            knobs=self.knobs,
            counts_BV=state.counts_BV,
            prompt_BV=state.prompt_BV,
            past=state.past,
            mu_B=state.mu_B if "mirostat" in self.chain.stages else None,
        )
        allowed_BV = None
        if follow_automata:
            running_B = state.status_B == Status.RUNNING.value
            allowed_BV = allowed_tokens(self.tables, state.constraint_state_B, running_B)
        sampled = self._sample(logits_BV, rows, allowed_BV, truncation)
        if self.chain.logprobs is not None:
            raw = log_probabilities(logits_BV, sampled.token_B, self.chain.logprobs)
            processed = raw
            if self.chain.reports_processed and sampled.logprobs:
                processed = sampled.logprobs
            state.write_log_probabilities(raw, processed)
        self._update_state(sampled, follow_automata)

    def _sample(
        self,
        logits_BV: Tensor,
        rows: SamplerRows,
        allowed_BV: Tensor | None,
        truncation: Truncation,
    ) -> SampledTokens:
        sampler = self.fast_sampler
        if sampler is None or not sampler.supports(self.chain, truncation, self.vocabulary):
            return sample(logits_BV, rows, allowed_BV, self.chain, truncation)
        edited_BV = edit_logits_or_nan(logits_BV, rows, allowed_BV, self.chain)
        return sampler.sample(edited_BV.contiguous(), rows, self.state.position_B, self.chain)

    def logits_of_proposed(self, proposed_BK: Tensor, cache: KVCache) -> Tensor:
        """Return the logits after each row's last token and after each proposed one, [B, K + 1, V].

        Args:
            proposed_BK: the ids that are proposed to follow the last token.
            cache: the step's cache, with the blocks that attention reads (`KVCache.with_first_blocks`). If the
                model has recurrences, it is the cache of a trial (`KVCache.trial`).
        """
        state = self.state
        kernels = self.forward_kernels
        has_attention_alone = not self.cache.recurrences
        if kernels is not None and has_attention_alone and kernels.follows_autocast("cuda"):
            assert cache.seen_blocks is not None
            tokens_BS, positions_BS = self._proposed(proposed_BK)
            adapter_R = state.adapter_B.repeat(tokens_BS.shape[1])
            with rows_with_adapters(self.bank, adapter_R):
                by_kernels_BSV = kernels.logits_of_columns(
                    tokens_BS, positions_BS, cache, cache.seen_blocks
                )
            if by_kernels_BSV is not None:
                return by_kernels_BSV
        return self.logits_of(self.hidden_of_proposed(proposed_BK, cache))

    def hidden_of_proposed(self, proposed_BK: Tensor, cache: KVCache) -> Tensor:
        """Return the final hidden states of each row's last token and of each proposed one, [B, K + 1, D].

        Arguments are those of `logits_of_proposed`.
        """
        tokens_BS, positions_BS = self._proposed(proposed_BK)
        with rows_with_adapters(self.bank, self.state.adapter_B):
            hidden_BSD: Tensor = self.model(tokens_BS, positions=positions_BS, cache=cache)
        return hidden_BSD

    def _proposed(self, proposed_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's last token with the proposed ones, [B, K + 1], and their positions."""
        state = self.state
        tokens_BS = torch.cat([state.token_B[:, None], proposed_BK], dim=1)
        columns_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        # What is proposed after a row's last position is written to the last slot, which no query reads.
        positions_BS = (state.position_B[:, None] + columns_S).clamp(max=self.cache.slots - 1)
        return tokens_BS, positions_BS

    def logits_of(self, hidden_BSD: Tensor) -> Tensor:
        """Return the logits of hidden states of several positions of each row, [B, S, V]."""
        with rows_with_adapters(self.bank, self.state.adapter_B):
            return self.model.logits(hidden_BSD)

    def logits_of_step(self, blocks: int, hidden_BD: Tensor | None = None) -> Tensor:
        """Return the logits after each row's last token, [B, V]; see `__call__`."""
        state = self.state
        kernels = self.forward_kernels
        with rows_with_adapters(self.bank, state.adapter_B):
            if hidden_BD is None and kernels is not None and kernels.follows_autocast("cuda"):
                return kernels.logits(state.token_B, state.position_B, self.cache, blocks)
            if hidden_BD is None:
                tokens_B1 = state.token_B[:, None]
                positions_B1 = state.position_B[:, None]
                hidden_BD = self.model(
                    tokens_B1, positions=positions_B1, cache=self.cache.with_first_blocks(blocks)
                )[:, 0]
            return self.model.logits(hidden_BD)

    def _update_state(self, sampled: SampledTokens, follow_automata: bool) -> None:
        """Write the sampled tokens to the state, and apply the stop rules.

        Rows that are not running do not change.
        """
        state = self.state
        # Plain ints, since Dynamo does not treat an IntEnum as a number.
        running = Status.RUNNING.value
        stop = Status.STOP.value
        length = Status.LENGTH.value
        running_B = state.status_B == running
        # Every row is computed, and `where` drops the results of those that are not running. So a graph
        # serves any set of running rows.
        sampled_B = running_B & (sampled.status_B == OK)
        state.token_B.copy_(torch.where(sampled_B, sampled.token_B, state.token_B))
        ended_B = (state.token_B[:, None] == state.stop_ids_BM).any(-1)
        if follow_automata:
            # Both automata of a row advance together, with half as many operations as one after the other.
            states_2B = torch.stack([state.constraint_state_B, state.stop_state_B])
            tokens_2B = state.token_B.expand_as(states_2B)
            advanced_2B = next_states(self.tables, states_2B.flatten(), tokens_2B.flatten())
            states_2B = torch.where(sampled_B, advanced_2B.view_as(states_2B), states_2B)
            state.constraint_state_B.copy_(states_2B[0])
            state.stop_state_B.copy_(states_2B[1])
            ended_B |= is_over(self.tables, states_2B).any(0)
        at_limit_B = state.generated_B + 1 >= state.limit_B
        # A row that stops with the last token of its limit has the status STOP.
        sampled_status_B = torch.where(ended_B, stop, torch.where(at_limit_B, length, running))
        # The sampler's NOT_FINITE, NOTHING_ALLOWED and UNDECIDED are 1 to 3. In `Status` they have the
        # same order, but other numbers.
        failed_status_B = sampled.status_B + (Status.NOT_FINITE.value - 1)
        unsampled_status_B = torch.where(running_B, failed_status_B, state.status_B)
        status_B = torch.where(sampled_B, sampled_status_B, unsampled_status_B)
        state.end_step(sampled_B, status_B)
        # This comes after `end_step`, which counts the new token and moves the window's end.
        if "last_n" in self.chain.stages:
            state.uncount_leaving_token(sampled_B, self.knobs)
        if "mirostat" in self.chain.stages:
            assert sampled.logprobs is not None
            # The surprise is -log2 p, in bits.
            surprise_B = sampled.logprobs.chosen_B * (-1 / math.log(2))
            change_B = self.knobs["mirostat_eta"] * (surprise_B - self.knobs["mirostat_tau"])
            state.mu_B.copy_(torch.where(sampled_B, state.mu_B - change_B, state.mu_B))


# `DecodeStep.__call__`, or the compiled form of it.
StepFunction = Callable[..., None]


class Steps:
    """A step for each chain. A step is made at its first use, and captured if there is a recorder.

    Attributes:
        chains: the given chains, in the order in which they are tried; the last one covers every
            request.
        replays: runs steps, and captures them if there is a recorder.
        step_for: returns the step of a chain.
        choose_chain: returns the chain for a block of steps, given the frozenset of the smallest
            chains of its requests.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        make_step: Callable[[Chain], StepFunction],
        recorder: Recorder | None,
        only_given_chains: bool,
    ) -> None:
        """Take the chains.

        Args:
            chains: see the class.
            make_step: makes the step of a chain.
            recorder: captures steps; None: steps are not captured.
            only_given_chains: whether steps are made only for these chains, since a step takes long
                to make; otherwise a step may also be made for any smaller chain.
        """
        self.chains = tuple(chains)
        self.replays = Replays(self._call, recorder)
        self._only_given_chains = only_given_chains
        self.step_for = functools.cache(make_step)
        self.choose_chain = functools.cache(self._choose_chain)

    def _choose_chain(self, smallest_chains: frozenset[Chain]) -> Chain:
        """Return what the attribute `choose_chain` says."""
        smallest = join_chains(smallest_chains, self.chains[-1])
        if not self._only_given_chains:
            return smallest
        # The last chain covers every request, so one is found.
        return next(chain for chain in self.chains if chain.covers(smallest))

    def warm_up(self, block_counts: Sequence[int], begin: Callable[[], None]) -> None:
        """Capture every variant of a step.

        Args:
            block_counts: all numbers of blocks of the cache that a step may read
                (`KVCache.block_counts`).
            begin: called before each variant.
        """
        truncations: tuple[Truncation, ...] = ("window", "search")
        follow_automata = (False, True)
        if self.replays.is_capturing:
            for variant in itertools.product(
                self.chains, block_counts, truncations, follow_automata
            ):
                begin()
                self.replays.run(WARM_UP, *variant)

    def _call(self, chain: Chain, *arguments: object) -> None:
        self.step_for(chain)(*arguments)
