"""One step of decoding: the model, the sampler and the stop rules as one graph over preallocated
tensors.

    hidden = model(token, position, cache)      logits = head(hidden)        allowed = automaton's mask
    token' = draw(chain(logits, allowed))       status' = stop rules         ring line = token' + status' * 2^24

The same function runs eagerly, compiled and replayed as a CUDA graph. The host reads nothing here.
Each step writes its results to one line of each ring of `State`. The lines of a block of steps go
to the host in one copy for each ring, and the host waits for it only when it reads them (`Outbox`).
Requests over the same rows may have several chains; `Steps` has a step for each, of which each
block of steps takes one.

Shape suffixes: B rows, V vocabulary, M stop ids, T positions of a row, R lines of a ring, N
log-probabilities, D hidden size; 1 broadcasts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monograph.decode.arena import Arena, advance, allowed, stopped
from monograph.decode.cache import KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import (
    COUNTS,
    OK,
    Drawn,
    LogProbabilities,
    Past,
    Rows,
    count_drawn,
    log_probabilities,
    sample,
)
from monograph.decode.knobs import Chain, joint
from monograph.graph.replay import WARM_UP, Recorder, Replays
from monograph.model.llama import Llama

if TYPE_CHECKING:
    from monograph.decode.fast_forward import FastForward

TOKEN_BITS = 24  # a code's lowest bits are the token, those above them the status
MAX_STOP_IDS = 16  # of one row


class Status(IntEnum):
    """The status of a row.

    Attributes:
        FREE: it has had no request yet.
        RUNNING: it draws a token at every step.
        STOP: it drew a stop id, a token that completes a stop string, or one after which only an
            end token may come.
        LENGTH: it drew as many tokens as it may.
        NOT_FINITE: its logits have a NaN or +inf.
        NOTHING_ALLOWED: no token was left to draw.
        UNDECIDED: the fast truncation could not decide which tokens may be drawn; the row waits for
            the exact one.
    """

    FREE = 0
    RUNNING = 1
    STOP = 2
    LENGTH = 3
    NOT_FINITE = 4
    NOTHING_ALLOWED = 5
    UNDECIDED = 6


HAS_TOKEN = (Status.RUNNING, Status.STOP, Status.LENGTH)


@dataclass
class State:
    """The state of all rows; int64 unless stated otherwise.

    Tensors that may be None are None if the chain does not need them.

    Attributes:
        token_B: the last token, which the next step reads.
        position_B: the last token's position.
        seed_B: the seed of the row's draws.
        generated_B: tokens drawn so far.
        limit_B: most tokens that may be drawn.
        status_B: a `Status`.
        stop_ids_BM: ids that end the row, padded with -1.
        constraint_B: the state of the automaton of allowed texts, with its counters.
        stopping_B: the state of the automaton of stop strings.
        counts_BV: int32, how often each id was drawn (`Rows`).
        prompt_BV: whether an id is in the prompt, bool, or how often, int32 (`Rows`).
        past: the ids that were written.
        mu_B: fp32, the surprise in bits that mirostat allows.
        line_1: the next line of the rings.
        ring_RB: int32, the code of each step for the host, token + status * 2^24.
        values_RBN: fp32, log-probabilities: of the drawn token, then of the likeliest; first under
            the raw logits, then under the distribution drawn from.
        ids_RBN: int32, the likeliest ids, in the same order.
    """

    token_B: Tensor
    position_B: Tensor
    seed_B: Tensor
    generated_B: Tensor
    limit_B: Tensor
    status_B: Tensor
    stop_ids_BM: Tensor
    constraint_B: Tensor
    stopping_B: Tensor
    counts_BV: Tensor | None
    prompt_BV: Tensor | None
    past: Past | None
    mu_B: Tensor
    line_1: Tensor
    ring_RB: Tensor
    values_RBN: Tensor | None
    ids_RBN: Tensor | None

    @classmethod
    def allocate(
        cls, rows: int, slots: int, vocabulary: int, lines: int, chain: Chain, device: torch.device
    ) -> State:
        """Allocate the state of rows that are all free."""
        n = chain.logprobs
        counted, counted_prompt, past = _needed(chain)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # A window of the last n tokens drops the prompt's ids one by one, so it needs their number.
        known = COUNTS if "last_n" in chain.stages else torch.bool
        of_past = (slots, torch.int32), (slots, torch.int32), (vocabulary, torch.bool)
        return cls(
            **{
                f"{name}_B": zeros(rows)
                for name in ("token", "position", "seed", "generated", "limit", "status")
            },
            stop_ids_BM=zeros(rows, MAX_STOP_IDS) - 1,
            constraint_B=zeros(rows),
            stopping_B=zeros(rows),
            counts_BV=zeros(rows, vocabulary, dtype=COUNTS) if counted else None,
            prompt_BV=zeros(rows, vocabulary, dtype=known) if counted_prompt else None,
            past=Past(*(zeros(rows, size, dtype=dtype) for size, dtype in of_past))
            if past
            else None,
            mu_B=zeros(rows, dtype=torch.float32),
            line_1=zeros(1),
            ring_RB=zeros(lines, rows, dtype=torch.int32),
            values_RBN=None if n is None else zeros(lines, rows, 2 * (1 + n), dtype=torch.float32),
            ids_RBN=None if n is None else zeros(lines, rows, 2 * n, dtype=torch.int32),
        )

    def of(self, chain: Chain) -> State:
        """Return the same tensors without those that a smaller chain does not need, and so leaves
        as they are.
        """
        counted, counted_prompt, past = _needed(chain)
        return replace(
            self,
            counts_BV=self.counts_BV if counted else None,
            prompt_BV=self.prompt_BV if counted_prompt else None,
            past=self.past if past else None,
            values_RBN=None if chain.logprobs is None else self.values_RBN,
            ids_RBN=None if chain.logprobs is None else self.ids_RBN,
        )

    def report(self, raw: LogProbabilities, drawn: LogProbabilities) -> None:
        """Write a step's log-probabilities, raw and of the distribution drawn from, to the line
        that `write` fills.
        """
        if self.values_RBN is not None and self.ids_RBN is not None:
            values_BN = torch.cat(
                [raw.chosen_B[:, None], raw.values_BN, drawn.chosen_B[:, None], drawn.values_BN], 1
            )
            ids_BN = torch.cat([raw.ids_BN, drawn.ids_BN], dim=1)
            # `line_1` is a tensor, as a replayed graph would write to the line of the capture if it
            # were a number.
            self.values_RBN.index_copy_(0, self.line_1, values_BN[None])
            self.ids_RBN.index_copy_(0, self.line_1, ids_BN[None].to(torch.int32))

    def write(self, moved_B: Tensor, status_B: Tensor) -> None:
        """Write the step's codes to the ring and take the new statuses; `moved_B` are the rows that
        drew a token.
        """
        # All is in place: a captured graph reads and writes these addresses at every replay.
        self.generated_B += moved_B
        self.position_B += moved_B
        self.status_B.copy_(status_B)
        if self.counts_BV is not None:
            count_drawn(self.counts_BV, self.token_B, moved_B)
        # This comes after the position has moved, as `past` takes the position of the new token.
        if self.past is not None:
            self.past.add(self.token_B, self.position_B, moved_B)
        # One number holds token and status, so that fewer bytes go to the host.
        codes_B = self.token_B + (status_B << TOKEN_BITS)
        self.ring_RB.index_copy_(0, self.line_1, codes_B[None].to(torch.int32))
        self.line_1 += 1

    def forget(self, moved_B: Tensor, knobs: Mapping[str, Tensor]) -> None:
        """Subtract the token that leaves the window of the last n tokens from the counts, in place.

        Args:
            moved_B: the rows that drew a token; `write` has added it.
            knobs: "penalty_last_n" n, below 0 for all tokens, and "counts_prompt", [B] each.
        """
        assert self.counts_BV is not None and self.past is not None
        n_B = knobs["penalty_last_n"]
        history_BT = self.past.history_BT
        place_B = self.position_B - n_B
        gone_B = moved_B & (n_B > 0) & (place_B >= 0)
        token_B = history_BT.gather(-1, place_B.clamp(min=0, max=history_BT.shape[1] - 1)[:, None])[
            :, 0
        ].long()
        # A token of the prompt is in the prompt's counts, and in the other counts only with
        # "counts_prompt".
        of_prompt_B = place_B <= self.position_B - self.generated_B
        counted_B = ~of_prompt_B | (knobs["counts_prompt"] > 0)
        for counts_BV, left_B in ((self.counts_BV, counted_B), (self.prompt_BV, of_prompt_B)):
            if counts_BV is not None:
                count_drawn(counts_BV, token_B, gone_B & left_B, -1)


def _needed(chain: Chain) -> tuple[bool, bool, bool]:
    """Return whether a chain needs the counts of drawn ids, those of the prompt's, and the ids that
    were written.
    """
    return chain.has("repetition", "counted"), chain.has("repetition"), chain.has("last_n", "dry")


@dataclass(eq=False, repr=False)
class DecodeStep:
    """A model with the state, the cache and the automata of its rows; a call draws one token in
    every running row.

    The parts are shared and not copied.

    Attributes:
        model: the language model, in evaluation mode.
        state: the state of the rows.
        cache: keys and values of the rows.
        chain: the sampler's stages.
        knobs: the options that the stages read, for each row (`new_knobs`).
        tables: the automata of all rows.
        vocabulary: V, the size of the tokenizer's vocabulary; a model's may be larger, by ids that
            no text has.
        fast: computes the logits in place of the model's forward pass; None: nothing does.
    """

    model: Llama
    state: State
    cache: KVCache
    chain: Chain
    knobs: dict[str, Tensor]
    tables: Arena
    vocabulary: int
    fast: FastForward | None = None

    @torch.no_grad()
    def __call__(
        self,
        blocks: int,
        truncation: Truncation,
        follows: bool = True,
        hidden_BD: Tensor | None = None,
    ) -> None:
        """Draw one token; see `sample` for `truncation`.

        Attention reads the first `blocks` blocks of the cache, which must hold the position of
        every running row. Automata are followed if `follows`; else no running row has one.
        Final hidden states of the rows' last tokens, if they are known, are not computed.
        """
        state = self.state
        logits_BV = self._logits(blocks, hidden_BD)[:, : self.vocabulary]
        rows = Rows(
            seed_B=state.seed_B,
            # The position of the token to be drawn, one after the token that is read.
            position_B=state.position_B + 1,
            generated_B=state.generated_B,
            knobs=self.knobs,
            counts_BV=state.counts_BV,
            prompt_BV=state.prompt_BV,
            past=state.past,
            mu_B=state.mu_B if "mirostat" in self.chain.stages else None,
        )
        allowed_BV = allowed(self.tables, state.constraint_B) if follows else None
        drawn = sample(logits_BV, rows, allowed_BV, self.chain, truncation)
        if self.chain.logprobs is not None:
            raw = log_probabilities(logits_BV, drawn.token_B, self.chain.logprobs)
            state.report(raw, drawn.logprobs if self.chain.processed and drawn.logprobs else raw)
        self._advance(drawn, follows)

    def _logits(self, blocks: int, hidden_BD: Tensor | None) -> Tensor:
        state = self.state
        # Autocast computes in another dtype than that of the weights, which the kernels read.
        is_cast = torch.is_autocast_enabled("cuda")
        if hidden_BD is None and self.fast is not None and not is_cast:
            return self.fast.logits(state.token_B, state.position_B, self.cache, blocks)
        if hidden_BD is None:
            tokens_B1, positions_B1 = state.token_B[:, None], state.position_B[:, None]
            hidden_BD = self.model(
                tokens_B1, positions=positions_B1, cache=self.cache.first(blocks)
            )[:, 0]
        return self.model.logits(hidden_BD)

    def _advance(self, drawn: Drawn, follows: bool) -> None:
        """Apply the stop rules after a draw; rows that are not running stay as they are."""
        state = self.state
        # Plain ints, since Dynamo does not treat an IntEnum as a number.
        running = Status.RUNNING.value
        stop = Status.STOP.value
        length = Status.LENGTH.value
        running_B = state.status_B == running
        # All rows are computed, and `where` drops the results of those that do not run: the host
        # decides nothing.
        moved_B = running_B & (drawn.status_B == OK)
        state.token_B.copy_(torch.where(moved_B, drawn.token_B, state.token_B))
        ended_B = (state.token_B[:, None] == state.stop_ids_BM).any(-1)
        if follows:
            for states_B in (state.constraint_B, state.stopping_B):
                states_B.copy_(
                    torch.where(moved_B, advance(self.tables, states_B, state.token_B), states_B)
                )
            ended_B |= stopped(self.tables, state.stopping_B) | stopped(
                self.tables, state.constraint_B
            )
        full_B = state.generated_B + 1 >= state.limit_B
        # A row that stops at the last token that it may draw has the status STOP.
        after_B = torch.where(ended_B, stop, torch.where(full_B, length, running))
        # NAN, DEAD, OVERFLOW (from 1) become NOT_FINITE, NOTHING_ALLOWED, UNDECIDED, which have the
        # same order.
        failed_B = drawn.status_B + (Status.NOT_FINITE.value - 1)
        status_B = torch.where(moved_B, after_B, torch.where(running_B, failed_B, state.status_B))
        state.write(moved_B, status_B)
        # This comes after `write`, which has counted the new token and moved the position, and so
        # the window.
        if "last_n" in self.chain.stages:
            state.forget(moved_B, self.knobs)
        if "mirostat" in self.chain.stages:
            assert drawn.logprobs is not None
            surprise_B = drawn.logprobs.chosen_B * (-1 / math.log(2))
            change_B = self.knobs["mirostat_eta"] * (surprise_B - self.knobs["mirostat_tau"])
            state.mu_B.copy_(torch.where(moved_B, state.mu_B - change_B, state.mu_B))


Step = Callable[..., None]


class Steps:
    """A step for each chain, made when it is first used, and captured if there is a recorder.

    Attributes:
        chains: the chains that are given; the last one covers every request.
        replays: the calls and captures of all steps.
        of: a function that returns the step of a chain.
        chosen: a function that returns the chain for a block of requests, given their smallest
            chains as a frozenset.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        made: Callable[[Chain], Step],
        recorder: Recorder | None,
        few: bool,
    ) -> None:
        """Take the chains.

        Args:
            chains: see the class.
            made: a function that makes the step of a chain.
            recorder: a recorder that captures steps, or None.
            few: whether to make steps for these chains alone, as each takes time; otherwise for any
                that is asked for.
        """
        self.chains = tuple(chains)
        self.replays = Replays(self._call, recorder)
        self._few = few
        self.of = functools.cache(made)
        self.chosen = functools.cache(self._chosen)

    def _chosen(self, least: frozenset[Chain]) -> Chain:
        smallest = joint(least, self.chains[-1])
        return next(c for c in self.chains if c.covers(smallest)) if self._few else smallest

    def warm_up(self, sizes: Sequence[int], begin: Callable[[], None]) -> None:
        """Capture every variant of a step that reads so many blocks; `begin` is called before each."""
        truncations: tuple[Truncation, ...] = ("window", "search")
        if self.replays.captures:
            for variant in itertools.product(self.chains, sizes, truncations, (False, True)):
                begin()
                self.replays.run(WARM_UP, *variant)

    def _call(self, chain: Chain, *variant: object) -> None:
        self.of(chain)(*variant)
