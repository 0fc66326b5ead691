"""The host's side of decoding: it puts requests into free rows, runs blocks of steps, and reads the drawn ids.

A row gets the next request as soon as the host has read that the last one ended. A request's tokens do not depend on
its row, on the other rows, on when the request came or on how many steps a block has.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from monograph import compat
from monograph.decode.automata import FREE, Automaton, Tables
from monograph.decode.cache import KVCache, Reader, Slots, Wrap
from monograph.decode.candidates import Truncation
from monograph.decode.knobs import Chain, knobs_of, new_knobs, write_rows
from monograph.decode.penalties import first_counts
from monograph.decode.sampling import Sampling
from monograph.decode.step import HAS_TOKEN, MAX_STOP_IDS, TOKEN_BITS, DecodeStep, Outbox, State, Status
from monograph.device import clock, sent
from monograph.errors import InputRefused, UsageError
from monograph.graph.capture import compiled as compile_function
from monograph.graph.replay import CudaGraphs, Replays
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK

Finish = Literal["stop", "length", "not_finite", "nothing_allowed"]


@dataclass(frozen=True)
class Request:
    """A prompt and the options of one text to write after it.

    Attributes:
        prompt_ids: at least one id.
        sampling: how tokens are chosen; its seed decides the draws.
        max_tokens: most tokens to write, at least 1; fewer are written where the row's positions end before.
        stop_ids: ids that end the text.
        constraint: the automaton of the allowed texts; None: any text.
        stop: the automaton of the stop strings; None: there are none.
        breaker_V: bool, the ids that no repetition goes across (`penalties.breakers`); None: there are none.
        seed: the seed of the draws in place of the sampling's, so that many requests can have one; None: that one.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    constraint: Automaton | None = None
    stop: Automaton | None = None
    breaker_V: Tensor | None = None
    seed: int | None = None


class LogProbability(NamedTuple):
    """Natural logarithms of the probabilities of a drawn token and of the likeliest tokens at its place.

    Attributes:
        drawn: of the drawn token under the model's raw logits, before any stage.
        likeliest: (id, value) of the likeliest tokens under the raw logits.
        processed_drawn: of the drawn token under the distribution drawn from, after all stages; 0 at temperature 0.
        processed_likeliest: (id, value) of the likeliest tokens under that; fewer where fewer tokens were left.
    """

    drawn: float
    likeliest: list[tuple[int, float]]
    processed_drawn: float
    processed_likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """Progress of a request.

    Attributes:
        number: the request's number, from `Generator.submit`.
        token_ids: the ids drawn since its last event.
        finish: how the request ended; None while it runs.
        logprobs: one for each id if the request asks for them, else none.
    """

    number: int
    token_ids: list[int]
    finish: Finish | None
    logprobs: list[LogProbability]


CHUNKS = {"cuda": BLOCK, "cpu": BLOCK // 2}  # most tokens of a prompt that are read at once, by type of device
FINISHES: dict[Status, Finish] = {
    Status.STOP: "stop",
    Status.LENGTH: "length",
    Status.NOT_FINITE: "not_finite",
    Status.NOTHING_ALLOWED: "nothing_allowed",
}


@dataclass
class _Record:
    """The host's record of a request in a row.

    Attributes:
        number: the request's number.
        request: the request.
        limit: most tokens that it may draw.
        launched: steps that were started for it, and so the most tokens that it can have drawn.
        received: tokens that the host has read.
        exact: whether the fast truncation once could not decide a draw. From then on the request runs with the exact
            one, with a new record, so that the host skips the codes of the steps in which the row waited.
    """

    number: int
    request: Request
    limit: int
    launched: int = 0
    received: int = 0
    exact: bool = False


class _Block(NamedTuple):
    """Steps that were started together: how many, the half of the outbox with their codes, and each row's record."""

    steps: int
    half: int
    records: list[_Record | None]


class Generator:
    """A decoder of many requests, which run in the rows of one cache, one graph for a step of all rows.

    Attributes:
        rows: most requests that run at once.
        compiled: whether the step is compiled.
        ahead: whether the host reads a block while the next one runs. On a CPU nothing runs meanwhile, and the steps
            after a request's end would be wasted.
        prefill_s: seconds that the host spent on reading prompts.
        blocks_read: how many blocks the host has read; it waits for the device at no other time.
    """

    def __init__(
        self,
        model: Llama,
        chain: Chain,
        *,
        rows: int,
        slots: int | Slots,
        vocabulary: int,
        automata: Collection[Automaton] = (),
        block: int | None = None,
        compiled: bool = False,
    ) -> None:
        """Allocate the cache, the state and the tables of all rows.

        Args:
            model: the language model; it is put into evaluation mode.
            chain: the sampler's stages, all that any request will need.
            rows: most requests that run at once.
            slots: positions of each row, at most the model's context; with their form, if it is not the usual one.
            vocabulary: V, the size of the tokenizer's vocabulary.
            automata: all constraints and stop strings that requests will have.
            block: steps between two reads of the host; None: 16 on a GPU, 1 elsewhere, where reading hides nothing.
            compiled: whether to compile the step, and on a GPU replay it as a CUDA graph.
        """
        weight = model.eval().lm_head.weight
        form = slots if isinstance(slots, Slots) else Slots(slots)
        self.rows, self.slots, self.compiled = rows, form.most, compiled
        self.block = block or (16 if weight.is_cuda else 1)
        # Each number of visible blocks and each truncation is a graph of its own, and torch by itself allows eight.
        if compiled:
            compat.allow_variants()
        wrap: Wrap = compile_function if compiled else lambda function: function
        longest = min(form.most, CHUNKS[weight.device.type], model.config.max_position_embeddings)
        chunk = min(1 << longest.bit_length() - 1, 1 << (form.longest - 1).bit_length())
        self.reader = Reader(model, form, chunk, wrap)
        self.cache = KVCache.allocate(model.config, rows, form.most, weight.dtype, weight.device, form.block)
        self.cache.least = form.least
        self._last_BD = weight.new_zeros(rows, model.config.hidden_size)  # of each row's prompt; see `Reader.last_RD`
        # Two halves of lines: the host reads one while the device writes the other.
        self.state = State.allocate(rows, self.slots, vocabulary, 2 * self.block, chain, weight.device)
        self.knobs = new_knobs(chain, rows, weight.device)
        self.tables = Tables(automata, vocabulary, weight.device) if automata else None
        self.chain, self.vocabulary = chain, vocabulary
        self.step = DecodeStep(model, self.state, self.cache, chain, self.knobs, self.tables, vocabulary)
        recorder = CudaGraphs(weight.device) if compiled and weight.is_cuda else None
        self.replays = Replays(wrap(self.step.__call__), recorder)
        rings = (self.state.ring_RB, self.state.values_RBN, self.state.ids_RBN)
        self.outbox = Outbox([ring for ring in rings if ring is not None])
        self.ahead, self.prefill_s, self.blocks_read = weight.is_cuda, 0.0, 0
        self._waiting: deque[tuple[int, Request, dict[str, Any]]] = deque()  # with the values of knobs
        self._records: list[_Record | None] = [None] * rows
        self._submitted = 0
        self._served: tuple[Sampling, tuple[int, ...]] | None = None  # what the chain was asked last, and
        self._values: dict[str, Any] = {}  # the values of its knobs

    def submit(self, request: Request) -> int:
        """Put a request in the queue; return the number that its events carry.

        Raises:
            InputRefused: the prompt leaves no room in a row.
            UsageError: the request needs a stage, an automaton or more stop ids than the generator was made for.
        """
        if len(request.prompt_ids) >= self.slots:
            raise InputRefused(
                f"the prompt has {len(request.prompt_ids)} tokens, but a row has {self.slots} positions: "
                f"shorten it to below {self.slots}"
            )
        if (request.sampling, request.stop_ids) != self._served:  # most requests share their options
            if not self.chain.serves(request.sampling, len(request.stop_ids) if self.chain.stop_ids else 0):
                raise UsageError(f"the generator's chain {self.chain.stages} does not serve {request.sampling}")
            self._served = request.sampling, request.stop_ids
            self._values = knobs_of(request.sampling, self.chain, request.stop_ids[: self.chain.stop_ids])
        for automaton in (request.constraint, request.stop):
            self._start(automaton)  # refuses an unknown automaton now and not in the middle of a run
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UsageError(f"{len(request.stop_ids)} stop ids: at most {MAX_STOP_IDS} are looked for")
        self._waiting.append((self._submitted, request, self._values))
        self._submitted += 1
        return self._submitted - 1

    def forget(self) -> None:
        """Forget the last prompt's keys and values, which are stale once the weights have changed."""
        self.reader.forget()

    def run(self) -> Iterator[Event]:
        """Decode until every request has ended; yield its events, in order for each request."""
        under_way: _Block | None = None
        while under_way is not None or self._waiting or any(self._records):
            while self._waiting and (free := [row for row, record in enumerate(self._records) if record is None]):
                self._place(free)
            launched = self._launch()
            # On a GPU read the previous block while this one runs, on a CPU read this one now.
            for block in (under_way, None if self.ahead else launched):
                if block is not None:
                    yield from self._collect(block)
            under_way = launched if self.ahead else None

    # ── a request's way through a row ─────────────────────────────────────────────────────────

    def _place(self, free: Sequence[int]) -> None:
        """Put waiting requests into free rows, as many as have their prompts read at once."""
        began = clock()
        prompts = [request.prompt_ids for _, request, _ in itertools.islice(self._waiting, len(free))]
        further = (request.prompt_ids for _, request, _ in itertools.islice(self._waiting, len(free), None))
        its_rows = self.reader.read(prompts, further)
        rows, longest = free[: len(its_rows)], max(map(len, prompts[: len(its_rows)]))
        self.cache.copy_rows(rows, self.reader.cache, its_rows, longest - (not self.reader.whole))
        if self.reader.whole:
            self._last_BD[rows] = self.reader.last_RD[its_rows]
        self.prefill_s += clock() - began
        state, values = self.state, []
        for row in rows:
            number, request, knobs = self._waiting.popleft()
            prompt, sampling, stop_ids = request.prompt_ids, request.sampling, request.stop_ids
            limit = min(request.max_tokens, self.slots - len(prompt))
            self._records[row] = _Record(number, request, limit)
            first = {
                "token_B": prompt[-1], "position_B": len(prompt) - 1, "generated_B": 0, "limit_B": limit,
                "seed_B": sampling.seed if request.seed is None else request.seed, "status_B": Status.RUNNING,
                # -1 is no token's id, so unused places match nothing.
                "stop_ids_BM": stop_ids + (-1,) * (MAX_STOP_IDS - len(stop_ids)),
                "constraint_B": self._start(request.constraint), "stopping_B": self._start(request.stop),
                # mirostat begins at twice its target, as in llama.cpp.
                "mu_B": 2 * sampling.mirostat_tau,
            }  # fmt: skip
            values.append(first | knobs)
            if state.counts_BV is not None:
                counts_V, prompt_V = first_counts(sampling, prompt, self.vocabulary)
                state.counts_BV[row].copy_(counts_V)
                if state.prompt_BV is not None:
                    state.prompt_BV[row].copy_(prompt_V)
            if state.past is not None:
                state.past.begin(row, prompt, request.breaker_V)
        write_rows(vars(state) | self.knobs, rows, values)

    def _start(self, automaton: Automaton | None) -> int:
        if automaton is None:
            return FREE
        start = None if self.tables is None else self.tables.start(automaton)
        if start is None:
            raise UsageError(f"{automaton.where}: the generator was made without it; give it as one of `automata`")
        return start

    # ── blocks of steps ───────────────────────────────────────────────────────────────────────

    def _launch(self) -> _Block | None:
        """Start a block of steps, fewer than `block` if no row needs that many; return None if no row needs any."""
        running = [record for record in self._records if record is not None]
        steps = min(self.block, max((record.limit - record.launched for record in running), default=0))
        if steps <= 0:
            return None
        # All rows read as many blocks of the cache as the longest one needs; reading more changes no bit.
        longest = max(len(record.request.prompt_ids) + min(record.launched + steps, record.limit) for record in running)
        # If one row needs the exact search, all rows use it: it gives the same bits.
        truncation: Truncation = "search" if any(record.exact for record in running) else "window"
        self.outbox.begin(self.state.line_1)
        # Where the reader has read all of a prompt, its first draw needs no pass.
        if first := self.reader.whole and not any(record.launched for record in running):
            self.step(0, truncation, self._last_BD)
        self.replays.run(steps - first, self.cache.visible(longest), truncation)
        for record in running:
            record.launched = min(record.launched + steps, record.limit)
        # Copy the list of records: rows may have other requests by the time the block is read.
        return _Block(steps, self.outbox.send(steps), list(self._records))

    def _collect(self, block: _Block) -> list[Event]:
        """Read a block's codes and return the events; codes of a row after the end of its request are skipped."""
        lines, *rings = (ring.transpose(0, 1).tolist() for ring in self.outbox.read(block.half, block.steps))
        self.blocks_read += 1
        events, ended = list[Event](), list[int]()
        for row, record in enumerate(block.records):
            # The block was launched before the host had read that the request ended.
            if record is None or self._records[row] is not record:
                continue
            tokens, status = _drawn(lines[row])
            record.received += len(tokens)
            finish = FINISHES.get(status)
            # The row has drawn nothing since, so the exact search decides the draw at the same position.
            if status == Status.UNDECIDED:
                self._records[row] = replace(record, launched=record.received, exact=True)
                self.state.status_B[row] = Status.RUNNING
            elif finish is not None:
                self._records[row] = None
                ended.append(row)
            if finish == "not_finite":
                # NaN in the cache would reach later requests of this row: 0 * NaN is NaN under any mask.
                self.cache.clear(row)
                self.reader.forget()  # the prompt's keys and values may be what is not finite
            if tokens or finish is not None:
                wanted = record.request.sampling.logprobs
                of_row = [] if wanted is None else _reported([ring[row] for ring in rings], len(tokens), wanted)
                events.append(Event(record.number, tokens, finish, of_row))
        if ended:
            # A free row still reads and writes at its position, which must lie in the blocks that other rows need.
            self.state.position_B.index_fill_(0, sent(ended, self.state.position_B.device), 0)
        return events


def _drawn(codes: Sequence[int]) -> tuple[list[int], Status]:
    """Return the tokens that a row drew in a block, and the status with which it stopped, or RUNNING."""
    tokens, status = [], Status.RUNNING.value
    for code in codes:
        status = code >> TOKEN_BITS
        if status in HAS_TOKEN:
            tokens.append(code & ((1 << TOKEN_BITS) - 1))
        if status != Status.RUNNING:
            break
    return tokens, Status(status)


def _reported(rings: Sequence[Sequence[list[Any]]], count: int, wanted: int) -> list[LogProbability]:
    """Return a row's log-probabilities in a block; a token that could not be drawn (-inf) is left out."""
    reported = []
    for values, ids in zip(*(lines[:count] for lines in rings), strict=True):
        most = len(ids) // 2  # of the likeliest that are reported, under each of the two distributions
        likeliest, possible = (
            [pair for pair in zip(ids[at : at + wanted], values[at + past :], strict=False) if pair[1] > -math.inf]
            for at, past in ((0, 1), (most, 2))
        )
        reported.append(LogProbability(values[0], likeliest, values[most + 1], possible))
    return reported
