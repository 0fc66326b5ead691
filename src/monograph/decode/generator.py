"""The host's side of decoding: it puts requests into free rows, runs blocks of steps, and reads the
drawn ids.

A row gets the next request as soon as the host has read that the last one ended. A request's tokens
do not depend on its row, on the other rows, on when the request came or on how many steps a block
has.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from monograph import compat
from monograph.automata import Automaton
from monograph.decode.arena import Arena
from monograph.decode.cache import KVCache, Reader, Slots, Wrap
from monograph.decode.candidates import Truncation
from monograph.decode.chain import first_counts
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.request import (
    FINISHES,
    Block,
    Event,
    Outbox,
    Pace,
    Record,
    Request,
    drawn,
    reported,
)
from monograph.decode.sampling import Sampling
from monograph.decode.step import MAX_STOP_IDS, DecodeStep, State, Status, Step, Steps
from monograph.decode.waiting import Entry, Waiting
from monograph.device import clock, sent
from monograph.errors import InputRefused, UsageError
from monograph.graph.capture import compiled as compile_function
from monograph.graph.replay import CudaGraphs, Replays
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK
from monograph.ops.filled import padded_count

# Most tokens of a prompt that are read at once, by type of device.
CHUNKS = {"cuda": BLOCK, "cpu": BLOCK // 2}
Mode = Literal["eager", "captured", "compiled"]
_NOTHING: tuple[str, tuple[int, ...]] = "", ()


class Generator:
    """A decoder of many requests, which run in the rows of one cache, one graph for a step of all
    rows.

    Attributes:
        rows: most requests that run at once.
        compiled: whether the step is compiled.
        ahead: whether the host reads a block while the next one runs. On a CPU nothing runs
            meanwhile, and the steps after a request's end would be wasted.
        prefill_s: seconds that the host spent on reading prompts.
        blocks_read: how many blocks the host has read; it waits for the device at no other time.
        reused: tokens of prompts that were not read again, as another prompt began with them.
    """

    def __init__(
        self,
        model: Llama,
        chain: Chain | Sequence[Chain],
        *,
        rows: int,
        slots: int | Slots,
        vocabulary: int,
        automata: Collection[Automaton] | Arena = (),
        block: int | Pace | None = None,
        mode: Mode = "eager",
    ) -> None:
        """Allocate the cache, the state and the tables of all rows.

        Args:
            model: the language model; it is put into evaluation mode.
            chain: the sampler's stages, all that any request will need; or several chains, the last
                of which has all (`Steps`): which one a block takes changes no bit.
            rows: most requests that run at once.
            slots: positions of each row, at most the model's context; with their form, if it is not
                the usual one.
            vocabulary: V, the size of the tokenizer's vocabulary.
            automata: all constraints and stop strings that requests will have, or tables to put
                them into.
            block: steps between two reads of the host, or a pace; None: 16 on a GPU, 1 where
                reading hides nothing.
            mode: "compiled": the step is compiled, and on a GPU replayed as a CUDA graph;
                "captured": only replayed.
        """
        weight = model.eval().lm_head.weight
        form = slots if isinstance(slots, Slots) else Slots(slots)
        self.rows = rows
        self.slots = form.most
        self.compiled = mode == "compiled"
        steps = block or (16 if weight.is_cuda else 1)
        self.pace = steps if isinstance(steps, Pace) else Pace(steps, steps, None)
        chains = (chain,) if isinstance(chain, Chain) else tuple(chain)
        self.chain = chains[-1]
        # Each number of visible blocks and each truncation is a graph of its own, and torch by
        # itself allows eight.
        if self.compiled:
            compat.allow_variants()
        wrap: Wrap = compile_function if self.compiled else lambda function: function
        longest = min(form.most, CHUNKS[weight.device.type], model.config.max_position_embeddings)
        # A pass over a chunk has as many rows as the chunk has tokens, times the prompts that are
        # read at once.
        wanted = padded_count(form.longest) if form.is_filled else form.longest
        chunk = min(1 << longest.bit_length() - 1, 1 << (wanted - 1).bit_length())
        recorder = CudaGraphs(weight.device) if mode != "eager" and weight.is_cuda else None
        self.reader = Reader(model, form, chunk, wrap, recorder)
        self.cache = KVCache.allocate(
            model.config, rows, form.most, weight.dtype, weight.device, form.block
        )
        self.cache.is_filled = form.is_filled
        # Of each row's prompt; see `Reader.last_RD`.
        self._last_BD = weight.new_zeros(rows, model.config.hidden_size)
        # Two halves of lines: the host reads one while the device writes the other.
        self.state = State.allocate(
            rows, self.slots, vocabulary, 2 * self.pace.steps, self.chain, weight.device
        )
        self.knobs = new_knobs(self.chain, rows, weight.device)
        self.tables = (
            automata
            if isinstance(automata, Arena)
            else Arena.holding(automata, vocabulary, weight.device)
        )
        self.vocabulary = vocabulary

        def step(chain: Chain) -> Step:
            state = self.state.of(chain)
            return wrap(
                DecodeStep(
                    model, state, self.cache, chain, self.knobs, self.tables, vocabulary
                ).__call__
            )

        self.steps = Steps(
            chains, step, recorder, few=self.compiled or recorder is not None or len(chains) == 1
        )
        rings = (self.state.ring_RB, self.state.values_RBN, self.state.ids_RBN)
        self.outbox = Outbox([ring for ring in rings if ring is not None])
        self.ahead = weight.is_cuda
        self.prefill_s = 0.0
        self.blocks_read = 0
        self.reused = 0
        # Where a layer sees a window, a free row must stand in what other rows read, or it would
        # see nothing: a NaN.
        self._keeps = not any(
            model.config.window(layer) for layer in range(model.config.num_hidden_layers)
        )
        self._empty(rows)

    def _empty(self, rows: int) -> None:
        """Begin without requests."""
        self._waiting = Waiting()
        self._records: list[Record | None] = [None] * rows
        self._prompts = [_NOTHING] * rows  # the owner and read part of each row's
        self._free: list[int] = list(range(rows))  # rows without a request, the longest free first
        self._under_way: Block | None = None
        self._submitted = 0
        self._asked: tuple[Sampling, tuple[int, ...]] | None = None  # what was asked last, and
        # Its smallest chain and the values of knobs.
        self._served: tuple[Chain, dict[str, Any]] = self.chain, {}

    @property
    def replays(self) -> Replays:
        """Return the calls and captures of steps."""
        return self.steps.replays

    def submit(self, request: Request) -> int:
        """Put a request in the queue; return the number that its events carry.

        Raises:
            InputRefused: the prompt leaves no room in a row, or an automaton has none in the arena.
            UsageError: the request needs a stage, an automaton or more stop ids than the generator
                was made for.
        """
        if len(request.prompt_ids) >= self.slots:
            raise InputRefused(
                f"the prompt has {len(request.prompt_ids)} tokens, but a row has {self.slots} positions: "
                f"shorten it to below {self.slots}"
            )
        served = self._serving(request)
        self.tables.require(request.constraint, request.stop)
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UsageError(
                f"{len(request.stop_ids)} stop ids: at most {MAX_STOP_IDS} are looked for"
            )
        self._waiting.add(Entry(self._submitted, request, *served))
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, number: int) -> None:
        """Forget a request; its row is free at once, and no event of it comes any more."""
        self._waiting.remove(number)
        rows = [
            row
            for row, record in enumerate(self._records)
            if record is not None and record.number == number
        ]
        if rows:
            self.state.status_B[rows] = Status.FREE
            self._end(rows)

    def forget(self) -> None:
        """Forget all prompts' keys and values, which are stale once the weights have changed."""
        self.reader.forget()
        self._prompts = [_NOTHING] * self.rows

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._under_way is not None or bool(self._waiting) or any(self._records)

    @property
    def running(self) -> int:
        """Return how many rows have a request."""
        return self.rows - len(self._free)

    def warm_up(self, go_on: Callable[[], None] = lambda: None) -> None:
        """Capture every variant of a pass and a step now, while no request runs, not within the
        first that need it.

        `go_on` is called before each variant of a step, of which there are many; what it raises
        ends the warm-up.
        """

        def begin() -> None:
            go_on()
            self.outbox.begin(self.state.line_1)

        self.reader.warm_up()
        self.steps.warm_up(self.cache.sizes, begin)

    def run(self) -> Iterator[Event]:
        """Decode until every request has ended; yield its events, in order for each request."""
        while self.busy:
            yield from self.advance()

    def advance(self) -> list[Event]:
        """Put waiting requests into free rows, run a block of steps, and return the events of one
        that was read.
        """
        self._fill()
        launched = self._launch()
        # On a GPU read the previous block while this one runs, on a CPU read this one now.
        blocks = (self._under_way, None if self.ahead else launched)
        self._under_way = launched if self.ahead else None
        return [event for block in blocks if block is not None for event in self._collect(block)]

    # ── a request's way through a row ─────────────────────────────────────────────────────────

    def _serving(self, request: Request) -> tuple[Chain, dict[str, Any]]:
        """Return the smallest chain that serves a request, and the values of the knobs."""
        asked = request.sampling, request.stop_ids
        if asked != self._asked:  # most requests share their options
            least = chain_of(
                [request.sampling], len(request.stop_ids) if self.chain.stop_ids else 0
            )
            if not self.chain.covers(least):
                raise UsageError(
                    f"the generator's chain {self.chain.stages} does not serve {request.sampling}"
                )
            knobs = knobs_of(request.sampling, self.chain, request.stop_ids[: self.chain.stop_ids])
            self._asked = asked
            self._served = (least, knobs)
        return self._served

    def _fill(self) -> None:
        """Put waiting requests into free rows, as far as patience lasts."""
        began = clock()
        left = self.pace.chunks
        if left is not None:
            left *= max(1, -(-min(len(self._free), len(self._waiting)) // max(1, self.running)))
        while self._free and self._waiting and self._has_room():
            self._begin_reading()
            read = self.reader.go_on(left)
            left = None if left is None else left - read
            if not self.reader.ready:
                break
            self._place()
        self.prefill_s += clock() - began

    def _has_room(self) -> bool:
        """Return whether the first request's automata have room now; if not, one without any goes
        before it.

        No other one does, as those that came after it could keep the room from it for ever.
        """
        request = self._waiting.first.request
        if self._start(request) is not None:
            self._give_back(request)
            return True
        plain = (
            each for each in self._waiting if not (each.request.constraint or each.request.stop)
        )
        passing = next(plain, None)
        if passing is not None:
            self._waiting.prefer(passing)
        return passing is not None

    def _begin_reading(self) -> None:
        request = self._waiting.first.request
        prompts = (request.prompt_ids for request in self._next())
        further = (
            entry.request.prompt_ids
            for entry in itertools.islice(self._waiting, len(self._free), None)
        )
        if self.reader.begin(prompts, further, request.owner) and self.reader.rows == 1:
            tokens, row = max((self._common(row, request), row) for row in range(self.rows))
            self.reused += self.reader.skip(self.cache, row, tokens)

    def _next(self) -> Iterator[Request]:
        """Yield the requests that wait first, of one owner and as many as there are free rows."""
        owner = self._waiting.first.request.owner
        requests = (entry.request for entry in itertools.islice(self._waiting, len(self._free)))
        return itertools.takewhile(lambda request: request.owner == owner, requests)

    def _common(self, row: int, request: Request) -> int:
        """Return how many tokens of a prompt a row has read before, of a prompt of the same owner."""
        owner, known = self._prompts[row]
        if owner != request.owner:
            return 0
        pairs = zip(known, self.reader.part(request.prompt_ids), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _place(self) -> None:
        """Put requests whose prompts are read into free rows, up to the first whose automata have
        no room.
        """
        its_rows = self.reader.rows_of(request.prompt_ids for request in self._next())
        starts = list[tuple[int, int]]()
        longest = 0
        for request in itertools.islice(self._next(), len(its_rows)):
            if (start := self._start(request)) is None:
                break
            starts.append(start)
            longest = max(longest, len(request.prompt_ids))
        rows = self._free[: len(starts)]
        its_rows = its_rows[: len(starts)]
        state = self.state
        values = []
        del self._free[: len(starts)]
        self.cache.copy_rows(rows, self.reader.cache, its_rows, longest - (not self.reader.whole))
        if self.reader.whole:
            self._last_BD[rows] = self.reader.last_RD[its_rows]
        for row, (constraint, stopping) in zip(rows, starts, strict=True):
            number, request, least, knobs = self._waiting.take()
            prompt = request.prompt_ids
            sampling = request.sampling
            stop_ids = request.stop_ids
            limit = min(request.max_tokens, self.slots - len(prompt))
            self._records[row] = Record(number, request, limit, least)
            self._prompts[row] = request.owner, self.reader.part(prompt)
            first = {
                "token_B": prompt[-1],
                "position_B": len(prompt) - 1,
                "generated_B": 0,
                "limit_B": limit,
                "seed_B": sampling.seed if request.seed is None else request.seed,
                "status_B": Status.RUNNING,
                # -1 is no token's id, so unused places match nothing.
                "stop_ids_BM": stop_ids + (-1,) * (MAX_STOP_IDS - len(stop_ids)),
                "constraint_B": constraint,
                "stopping_B": stopping,
                # mirostat begins at twice its target, as in llama.cpp.
                "mu_B": 2 * sampling.mirostat_tau,
            }
            values.append(first | knobs)
            if state.counts_BV is not None:
                counts_V, prompt_V = first_counts(sampling, prompt, self.vocabulary)
                state.counts_BV[row].copy_(counts_V)
                if state.prompt_BV is not None:
                    state.prompt_BV[row].copy_(prompt_V)
            if state.past is not None:
                state.past.begin(row, prompt, request.breaker_V)
        write_rows(vars(state) | self.knobs, rows, values)

    def _start(self, request: Request) -> tuple[int, int] | None:
        """Return the first states of a request's automata; None if there is no room for one of them
        now.
        """
        if (constraint := self.tables.take(request.constraint)) is None:
            return None
        if (stopping := self.tables.take(request.stop)) is None:
            self.tables.give_back(request.constraint)
            # Or the constraint might lie for ever where it leaves too little room on both sides.
            self.tables.clear()
            return None
        return constraint, stopping

    def _give_back(self, request: Request) -> None:
        self.tables.give_back(request.constraint)
        self.tables.give_back(request.stop)

    def _end(self, rows: Sequence[int]) -> None:
        """Free rows, whose prompts' keys and values stay."""
        for row in rows:
            record = self._records[row]
            self._records[row] = None
            assert record is not None
            self._give_back(record.request)
            if not self._keeps:
                self._prompts[row] = _NOTHING
        self._free += rows
        # A free row still reads and writes at its position, which no prompt reaches.
        position = self.slots - 1 if self._keeps else 0
        self.state.position_B.index_fill_(0, sent(rows, self.state.position_B.device), position)

    # ── blocks of steps ───────────────────────────────────────────────────────────────────────

    def _launch(self) -> Block | None:
        """Start a block of steps, as many as the pace has or a row needs; return None if no row
        needs any.
        """
        running = [record for record in self._records if record is not None]
        hurried = self._waiting or not all(record.launched for record in running)
        most = self.pace.hurried if hurried else self.pace.steps
        steps = min(most, max((record.limit - record.launched for record in running), default=0))
        if steps <= 0:
            return None
        # All rows read as many blocks of the cache as the longest one needs; reading more changes
        # no bit.
        longest = max(
            len(record.request.prompt_ids) + min(record.launched + steps, record.limit)
            for record in running
        )
        # If one row needs the exact search, all rows use it: it gives the same bits.
        truncation: Truncation = "search" if any(record.exact for record in running) else "window"
        chain = self.steps.chosen(frozenset(record.least for record in running))
        follows = any(record.request.constraint or record.request.stop for record in running)
        self.outbox.begin(self.state.line_1)
        # Where the reader has read all of a prompt, its first draw needs no pass.
        if first := self.reader.whole and not any(record.launched for record in running):
            self.steps.of(chain)(0, truncation, follows, self._last_BD)
        self.replays.run(steps - first, chain, self.cache.visible(longest), truncation, follows)
        for record in running:
            record.launched = min(record.launched + steps, record.limit)
        # Copy the list of records: rows may have other requests by the time the block is read.
        return Block(steps, self.outbox.send(steps), list(self._records))

    def _collect(self, block: Block) -> list[Event]:
        """Read a block's codes and return the events; codes of a row after the end of its request
        are skipped.
        """
        ring, *rings = (ring.transpose(0, 1) for ring in self.outbox.read(block.half, block.steps))
        lines = ring.tolist()
        self.blocks_read += 1
        events = list[Event]()
        ended = list[int]()
        for row, record in enumerate(block.records):
            # The block was launched before the host had read that the request ended.
            if record is None or self._records[row] is not record:
                continue
            tokens, status = drawn(lines[row])
            record.received += len(tokens)
            finish = FINISHES.get(status)
            # The row has drawn nothing since, so the exact search decides the draw at the same
            # position.
            if status == Status.UNDECIDED:
                self._records[row] = replace(record, launched=record.received, exact=True)
                self.state.status_B[row] = Status.RUNNING
            elif finish is not None:
                ended.append(row)
            if finish == "not_finite":
                # NaN in the cache would reach later requests of this row: 0 * NaN is NaN under any
                # mask.
                self.cache.clear(row)
                self.reader.forget()  # the prompt's keys and values may be what is not finite
                self._prompts[row] = _NOTHING
            if tokens or finish is not None:
                wanted = record.request.sampling.logprobs
                of_row = (
                    []
                    if wanted is None
                    else reported([ring[row] for ring in rings], len(tokens), wanted)
                )
                events.append(Event(record.number, tokens, finish, of_row))
        if ended:
            self._end(ended)
        return events
