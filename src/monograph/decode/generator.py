"""The host's side of decoding: it puts requests into free rows, runs blocks of steps, and reads the
sampled ids.

A step samples one token in every row (`monograph.decode.step`), or with a draft model several
(`monograph.decode.draft`). A step leaves its results in the lines of a ring, a tensor on the device:
one line for each token that it may sample in a row. A block is several steps that are started
together, without a wait for the device. A chunk is a part of a prompt that is read in one pass
(`monograph.decode.prompt_reader.PromptReader`).

A row gets its next request as soon as the host has read that the previous one ended. A request's
tokens do not depend on its row, the other rows, the time at which the request came or the number of
steps of a block.

A request may keep its row after its end, so that a later request can continue in it, like the next
turn of a conversation. The model then reads only the new tokens of the later request's prompt, and so does a
draft model. A step may round differently from a pass over a prompt, unless
`CacheSizes.pads_products` is set. Then the log-probabilities of the continuation differ by rounding from
those after the same prompt in a fresh row.

The word block has two meanings: the blocks of steps of this file, and the blocks of slots that a cache
consists of (`monograph.decode.cache`).
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from monograph import compat
from monograph.automata import Automaton
from monograph.automata.dfa import STATE_MASK
from monograph.automata.on_host import HostText
from monograph.decode.adapter_bank import BASE_SLOT, bank_of
from monograph.decode.automaton_tables import AutomatonTables
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.candidates import Truncation
from monograph.decode.chain import first_counts
from monograph.decode.draft import DRAFT_TOKENS, DraftedStep, Drafter, Proposer, rounds_as_steps
from monograph.decode.draft_budget import MAX_LOST_STEPS, DraftBudget
from monograph.decode.draft_head import HEAD_DRAFT_TOKENS, HeadDrafter
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.outbox import Outbox, read_codes, read_log_probabilities
from monograph.decode.prompt_reader import (
    Continuation,
    PromptReader,
    PromptToRead,
    ReuseKey,
    Wrap,
)
from monograph.decode.request import (
    FINISHES,
    Event,
    LogProbability,
    Pace,
    Request,
    RowRecord,
    StepBlock,
)
from monograph.decode.request_queue import RequestQueue, WaitingRequest
from monograph.decode.sampling import Sampling
from monograph.decode.step import MAX_STOP_IDS, DecodeStep, State, Status, Steps
from monograph.device import clock, tensor_on
from monograph.errors import InputRefused, UsageError
from monograph.graph.capture import compiled as compile_function
from monograph.graph.replay import CudaGraphs, Replays
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK
from monograph.ops.padded_rows import padded_count

# The maximum number of tokens of a prompt in one pass, by type of device.
CHUNKS = {"cuda": BLOCK, "cpu": BLOCK // 2}
Mode = Literal["eager", "captured", "compiled"]
# What proposes tokens: a draft model, or the model's own head for multi-token prediction.
OWN_HEAD: Literal["mtp"] = "mtp"
Draft = Llama | Literal["mtp"]
# When tokens are proposed; see `Generator.drafts`.
DraftUse = Literal["while they pay", "always", "never"]
# The prompt of a row that has no prompt's keys and values.
_NO_PROMPT = PromptToRead(())


class KeptRow(NamedTuple):
    """A row whose request has ended, which waits for the request that continues it.

    Attributes:
        row: the row. It stands at the last token that was sampled, which every step reads again.
        known: the number of tokens before that one.
        adapter: the slot of its adapter.
    """

    row: int
    known: int
    adapter: int


class Generator:
    """Decodes many requests, which run in the rows of one cache. A step is one graph for all rows.

    Attributes:
        rows: the maximum number of requests that run at the same time.
        slots: the number of positions of a row.
        compiled: whether the step is compiled.
        pace: the lengths of blocks, and how many chunks of prompts are read between them.
        chain: the chain of the sampler's stages that covers every request.
        reader: reads prompts.
        cache: keys and values of the rows.
        state: the state of the rows.
        bank: the adapters of the model, or None if it has none.
        knobs: the numbers that the stages read, for each row.
        tables: the automata of the requests, on the device.
        vocabulary: V.
        steps: the steps, one for each chain.
        drafter: the draft model, which proposes tokens; None: there is none.
        outbox: copies the rings of the state to the host.
        reads_behind: whether the host reads a block while the next one runs. It is false on a CPU,
            where nothing would run in parallel. The steps that the next block spends on requests that
            had already ended would be wasted there.
        prefill_s: seconds that the host spent on reading prompts.
        blocks_read: how many blocks the host has read. It waits for the device only to read a block.
        masks: how many masks the host has computed, for texts that it follows
            (`monograph.automata.on_host`).
        masks_s: the seconds that they took.
        reused: the number of tokens of prompts that were not read again, because a row already had
            their keys and values.
        drafted_passes: the number of passes over proposed tokens, summed over the rows.
        drafted_tokens: how many tokens these passes gave.
        drafts: when tokens are proposed. "while they pay": steps go on without drafts where these cost more
            than they save, by count (`monograph.decode.draft_budget`). With a single row, each text has
            a budget of its own. Several rows share one, so that a pass must give them the bits of steps
            (`rounds_as_steps`): else a text would depend on the others. "always": with several rows, a pass
            rounds otherwise. "never": there is no draft model, or `rehearse_drafts` has found that it does
            not pay.
    """

    def __init__(
        self,
        model: Llama,
        chain: Chain | Sequence[Chain],
        *,
        rows: int,
        slots: int | CacheSizes,
        vocabulary: int,
        automata: Collection[Automaton] | AutomatonTables = (),
        pace: int | Pace | None = None,
        mode: Mode = "eager",
        impl: Literal["auto", "reference"] = "auto",
        draft: Draft | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        """Allocate the cache, the state and the tables of all rows.

        Args:
            model: the language model; it is put into evaluation mode.
            chain: a chain of the sampler's stages that covers every request; or several chains, the
                last of which covers every request. A block then runs a chain that covers its
                requests (`Steps`). The tokens have the same bits with any chain.
            rows: the maximum number of requests that run at the same time.
            slots: the number of positions of each row, at most the model's context; or a `CacheSizes`.
            vocabulary: V, the size of the tokenizer's vocabulary.
            automata: all constraints and stop strings of future requests, or empty tables with room
                for them.
            pace: the number of steps between two reads of the host, or a `Pace`; None: 16 on a GPU
                and 1 on a CPU.
            mode: "compiled": the step is compiled, and on a GPU replayed as a CUDA graph;
                "captured": it is only replayed; "eager": neither.
            impl: "reference": a step is the model's own forward pass; "auto": on a GPU, special
                kernels compute it where they can (`monograph.decode.fast_forward.obstacle`).
            draft: a small model with the same vocabulary, which proposes tokens
                (`monograph.decode.draft`); "mtp": the model's own head for multi-token prediction
                does (`monograph.decode.draft_head`); None: each step samples one token.
            draft_tokens: the number of tokens that it proposes at a time; None: 4, or 1 of the model's
                own head.

        Raises:
            UsageError: the draft model cannot be used, or the model cannot check proposals.
        """
        weight = model.eval().lm_head.weight
        sizes = slots if isinstance(slots, CacheSizes) else CacheSizes(slots)
        self.rows = rows
        self.slots = sizes.per_row
        self.bank = bank_of(model)
        self.compiled = mode == "compiled"
        if isinstance(pace, Pace):
            self.pace = pace
        else:
            steps = pace
            if not steps:
                steps = 16 if weight.is_cuda else 1
            self.pace = Pace(steps, steps_while_waiting=steps, max_chunks=None)
        chains = (chain,) if isinstance(chain, Chain) else tuple(chain)
        self.chain = chains[-1]
        # A step has a graph for each number of blocks that attention reads, and for each truncation.
        # Torch allows only eight graphs of a function by default.
        if self.compiled:
            compat.allow_variants()
        wrap: Wrap = compile_function if self.compiled else lambda function: function
        chunk = _chunk_length(model, sizes)
        recorder = CudaGraphs(weight.device) if mode != "eager" and weight.is_cuda else None
        self.reader = PromptReader(model, sizes, chunk, wrap, recorder)
        self.cache = KVCache.allocate(
            model.config, rows, sizes.per_row, weight.dtype, weight.device, sizes.block
        )
        self.cache.pads_products = sizes.pads_products
        # The final hidden state of the last token of each row's prompt, copied from `PromptReader.last_RD`.
        self._last_BD = weight.new_zeros(rows, model.config.hidden_size)
        # The lines of a block. The rings have twice as many, so that the host can read one block while
        # the next one is written (`Outbox`).
        lines = self.pace.steps
        self.drafter: Proposer | None = None
        self.drafts: DraftUse = "never"
        if draft is not None:
            # Only the rollouts of training pad matrix products (`CacheSizes`), and they use no drafts.
            assert not sizes.pads_products
            given = rows, sizes, vocabulary, chunk, wrap, recorder
            if draft_tokens is None:
                draft_tokens = HEAD_DRAFT_TOKENS if draft == OWN_HEAD else DRAFT_TOKENS
            if draft == OWN_HEAD:
                self.drafter = HeadDrafter(model, draft_tokens, *given)
            else:
                self.drafter = Drafter(draft.eval(), model, draft_tokens, *given)
            lines = max(lines, self._passes_of_block(lines) * (1 + draft_tokens))
            self.drafts = "while they pay"
        self.state = State.allocate(
            rows, self.slots, vocabulary, 2 * lines, self.chain, weight.device
        )
        self.knobs = new_knobs(self.chain, rows, weight.device)
        if isinstance(automata, AutomatonTables):
            self.tables = automata
        else:
            self.tables = AutomatonTables.with_room_for(automata, vocabulary, weight.device)
        self.vocabulary = vocabulary

        forward_kernels = None
        fast_sampler = None
        if weight.is_cuda and impl == "auto":
            # These import Triton, which is only where torch computes on a GPU.
            from monograph.decode.fast_attention import FastAttention
            from monograph.decode.fast_forward import fast_forward
            from monograph.decode.fast_sampler import FastSampler

            fast_sampler = FastSampler(rows, weight.device)
            caches = [
                (model.config, self.cache, rows),
                (model.config, self.reader.cache, self.reader.rows),
            ]
            if self.drafter is not None:
                caches += self.drafter.caches()
            for config, cache, cache_rows in caches:
                key_heads = config.num_key_value_heads
                cache.kernels = FastAttention(cache_rows, key_heads, weight.device)
            # With `pads_products`, texts must have the bits of the model's own forward pass, which
            # kernels do not give.
            if not sizes.pads_products:
                forward_kernels = fast_forward(model, rows)
                if isinstance(self.drafter, Drafter):
                    self.drafter.forward_kernels = fast_forward(self.drafter.model, rows)

        def new_step(chain: Chain) -> DecodeStep:
            return DecodeStep(
                model=model,
                state=self.state.for_chain(chain),
                cache=self.cache,
                chain=chain,
                knobs=self.knobs,
                tables=self.tables,
                vocabulary=vocabulary,
                forward_kernels=forward_kernels,
                fast_sampler=fast_sampler,
                bank=self.bank,
            )

        # Steps are made only for the given chains if a step takes long to make, which it does if it is
        # compiled or captured, and if there is a single chain, which is then meant for all requests.
        only_given_chains = self.compiled or recorder is not None or len(chains) == 1
        self._new_step = new_step
        self.steps = Steps(
            chains, lambda chain: wrap(new_step(chain).__call__), recorder, only_given_chains
        )
        # The steps with drafts.
        self.drafted_steps: Steps | None = None
        drafter = self.drafter
        if drafter is not None:
            self.drafted_steps = Steps(
                chains,
                lambda chain: wrap(DraftedStep(new_step(chain), drafter).__call__),
                recorder,
                only_given_chains,
            )
        rings = (self.state.codes_RB, self.state.values_RBN, self.state.ids_RBN)
        self.outbox = Outbox([ring for ring in rings if ring is not None])
        self.reads_behind = weight.is_cuda
        self.prefill_s = 0.0
        self.blocks_read = 0
        self.masks = 0
        self.masks_s = 0.0
        self.reused = 0
        self.drafted_passes = 0
        self.drafted_tokens = 0
        # The budget that several rows share.
        self._draft_budget = DraftBudget()
        # Whether it is known that a pass over proposed tokens rounds as steps do.
        self._knows_rounding = rows == 1
        # The rows of which the draft model has not read all tokens, since steps ran without it: how many first
        # tokens of the row's text it has read at least.
        self._unread_by_draft: dict[int, int] = {}
        # Whether the next block waits until the host has read the one before, because the draft model must
        # read what that one has written.
        self._must_read = False
        # Whether a free row keeps the keys and values of its last prompt. A free row takes part in every
        # step: it writes a key and a value at its position, and attends to the positions up to there. So
        # `_free` moves it to the last position, which no prompt reaches. With a sliding window that is
        # not possible: the last position would see only positions near it, and if these are not in the
        # blocks that are read, the attention to no position at all gives NaN. The row is then moved to
        # position 0, where it overwrites the beginning of its last prompt.
        configs = [model.config]
        if self.drafter is not None:
            configs += [config for config, _, _ in self.drafter.caches()]
        self._keeps_prompts = not any(
            config.window(layer) for config in configs for layer in range(config.num_hidden_layers)
        )
        self._queue = RequestQueue()
        # The rows that are kept, by the numbers of their requests, and the requests that wait to continue
        # such a row, each with the row.
        self._kept: dict[int, KeptRow] = {}
        self._continuing: list[tuple[KeptRow, WaitingRequest]] = []
        self._records: list[RowRecord | None] = [None] * rows
        # The prompt whose keys and values each row has.
        self._prompts = [_NO_PROMPT] * rows
        # The rows without a request; the row that has been free longest comes first.
        self._free_rows: list[int] = list(range(rows))
        # A block that was launched and has not been read yet.
        self._unread: StepBlock | None = None
        # The number of requests so far, which is also the number of the next request.
        self._submitted = 0
        # The options and stop ids of the last request, and what `_chain_and_knobs` returned for them.
        self._last_options: tuple[Sampling, tuple[int, ...]] | None = None
        self._last_chain_and_knobs: tuple[Chain, dict[str, Any]] = self.chain, {}

    @property
    def variant_count(self) -> int:
        """Return how many variants of steps have run."""
        kinds = [self.steps, self.drafted_steps]
        return sum(steps.replays.variant_count for steps in kinds if steps is not None)

    @property
    def replays(self) -> Replays:
        """Return the calls and captures of steps."""
        return self.steps.replays

    def submit(self, request: Request) -> int:
        """Put a request in the queue; return its number, by which its events name it.

        Raises:
            InputRefused: the prompt fills a row, or an automaton is too large for the tables.
            UsageError: the request needs a stage that the generator lacks, has too many stop ids, or
                has an adapter that the model lacks; or it continues a request whose row is not kept.
        """
        if len(request.prompt_ids) >= self.slots:
            raise InputRefused(
                f"the prompt has {len(request.prompt_ids)} tokens, but a row has {self.slots} positions: "
                f"shorten it to below {self.slots}"
            )
        smallest_chain, knobs = self._chain_and_knobs(request)
        if request.host_constraint is not None:
            request = request._replace(constraint=request.host_constraint.begin())
        self.tables.require(request.constraint, request.stop_automaton)
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UsageError(
                f"{len(request.stop_ids)} stop ids: at most {MAX_STOP_IDS} are looked for"
            )
        last_slot = self.bank.capacity if self.bank else BASE_SLOT
        if not 0 <= request.adapter <= last_slot:
            raise UsageError(f"the model has no slot {request.adapter} for an adapter")
        if request.continues is not None:
            self._require_kept(request.continues, request)
        number = self._submitted
        self._submitted += 1
        entry = WaitingRequest(number, request, smallest_chain, knobs)
        if request.continues is None:
            self._queue.add(entry)
        else:
            self._continuing.append((self._kept.pop(request.continues), entry))
        return number

    def _require_kept(self, number: int, request: Request) -> None:
        """Require that `request` can continue the ended request with this number.

        Raises:
            UsageError: the ended request's row is not kept, or `request` adds no token to it or has
                another adapter.
        """
        kept = self._kept.get(number)
        if kept is None:
            raise UsageError(f"request {number} has no row that is kept")
        if len(request.prompt_ids) <= kept.known or request.adapter != kept.adapter:
            raise UsageError(
                f"the prompt or the adapter is not that of request {number}, continued"
            )

    def cancel(self, number: int) -> None:
        """Remove a request, whether it waits, runs or keeps its row. It has no further events."""
        self._queue.remove(number)
        if number in self._kept:
            self._free([self._kept.pop(number).row])
        for kept, entry in self._continuing:
            if entry.number == number:
                self._continuing.remove((kept, entry))
                self._free([kept.row])
                break
        rows = [
            row
            for row, record in enumerate(self._records)
            if record is not None and record.number == number
        ]
        if rows:
            self.state.status_B[rows] = Status.FREE
            self._end_requests(rows)
            self._free(rows)

    def forget(self) -> None:
        """Forget the keys and values of all prompts, which are invalid after a change of weights.

        Rows that are kept become free.
        """
        self.reader.forget()
        if self.drafter is not None:
            self.drafter.reader.forget()  # the model's own head has the same weights
        for number in list(self._kept):
            self.cancel(number)
        self._prompts = [_NO_PROMPT] * self.rows

    def uses_adapter(self, slot: int) -> bool:
        """Return whether a request that waits, runs or keeps its row has the adapter in this slot."""
        adapters = {record.request.adapter for record in self._records if record is not None}
        adapters |= {entry.request.adapter for entry in self._queue}
        adapters |= {kept.adapter for kept in self._kept.values()}
        adapters |= {kept.adapter for kept, _ in self._continuing}
        return slot in adapters

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        is_waiting = bool(self._queue or self._continuing)
        return self._unread is not None or is_waiting or any(self._records)

    @property
    def can_advance(self) -> bool:
        """Whether a request runs or can begin; all others wait for rows that are kept."""
        can_begin = bool(self._continuing or (self._queue and self._free_rows))
        return self._unread is not None or can_begin or any(self._records)

    @property
    def running(self) -> int:
        """Return the number of rows with a request that runs."""
        return sum(record is not None for record in self._records)

    def warm_up(self, go_on: Callable[[], None] = lambda: None) -> None:
        """Capture every variant of a pass and a step now, so that no request waits for a capture.

        No request may run.

        Args:
            go_on: called before each variant of a step, of which there are many; an exception from
                it ends the warm-up.
        """

        def begin() -> None:
            go_on()
            self.outbox.begin_block(self.state.line_1)

        self.reader.warm_up()
        self.steps.warm_up(self.cache.block_counts, begin)
        if self.drafter is not None and self.drafted_steps is not None:
            self.drafter.reader.warm_up()
            self.drafted_steps.warm_up(self.cache.block_counts, begin)

    def run(self) -> Iterator[Event]:
        """Decode until every request has ended; yield the events, in order for each request."""
        while self.busy:
            yield from self.advance()

    def advance(self) -> list[Event]:
        """Put waiting requests into free rows, launch a block of steps, and read a block.

        With `reads_behind`, the previous block is read while the new one runs. Otherwise the new block
        itself is read. It is also read if the host follows a constraint token by token, since the next
        step then needs the mask after the new token.

        Returns:
            the events of the blocks that were read.
        """
        self._fill_rows()
        mask_count = self._write_masks()
        launched = self._launch_block(limit=1 if mask_count else None)
        blocks_to_read = [self._unread]
        if self.reads_behind and not mask_count and not self._must_read:
            self._unread = launched
        else:
            self._unread = None
            blocks_to_read.append(launched)
        events: list[Event] = []
        for block in blocks_to_read:
            if block is not None:
                events += self._read_block(block)
        return events

    # ── a request's way through a row ─────────────────────────────────────────────────────────

    def _chain_and_knobs(self, request: Request) -> tuple[Chain, dict[str, Any]]:
        """Return the smallest chain that serves a request, and the values of the knobs."""
        options = request.sampling, request.stop_ids
        # Most requests have the same options as the one before.
        if options != self._last_options:
            # Stop ids are a part of a chain only if it has the stage min_tokens, which forbids them at first.
            stop_id_count = len(request.stop_ids) if self.chain.stop_length else 0
            smallest_chain = chain_of([request.sampling], stop_id_count)
            if not self.chain.covers(smallest_chain):
                raise UsageError(
                    f"the generator's chain {self.chain.stages} does not serve {request.sampling}"
                )
            knobs = knobs_of(
                request.sampling, self.chain, request.stop_ids[: self.chain.stop_length]
            )
            self._last_options = options
            self._last_chain_and_knobs = (smallest_chain, knobs)
        return self._last_chain_and_knobs

    def _fill_rows(self) -> None:
        """Put waiting requests into rows, after their prompts have been read.

        The pace limits the number of chunks that are read for free rows.
        """
        began = clock()
        self._continue_rows()
        chunks_left = self.pace.max_chunks
        if chunks_left is not None:
            startable = min(len(self._free_rows), len(self._queue))
            # Running requests pause while prompts are read. If more requests can start than are running,
            # the limit is raised: the few that run pause longer, so that the many can start sooner.
            chunks_left *= max(1, math.ceil(startable / max(1, self.running)))
        while self._free_rows and self._queue and self._move_startable_to_front():
            self._choose_prompts()
            is_finished = True
            for reader in self._readers():
                chunks_read = reader.read_chunks(chunks_left)
                if chunks_left is not None:
                    chunks_left -= chunks_read
                is_finished &= reader.is_finished
            if not is_finished:
                break
            self._place_requests()
        self.prefill_s += clock() - began

    def _readers(self) -> list[PromptReader]:
        """Return what reads prompts: the model's reader, and that of the draft model while it is used."""
        readers = [self.reader]
        if self.drafter is not None and not self._drafts_pause():
            readers.append(self.drafter.reader)
        return readers

    def _move_startable_to_front(self) -> bool:
        """Move a request that can start now to the front of the queue; return whether there is one.

        This is the first request, if the tables have room for its automata, and otherwise the next
        request without automata. Another request with automata must not overtake the first one, since
        such requests could take the room in the tables again and again.
        """
        request = self._queue.first.request
        if self._acquire_automata(request) is not None:
            self._release_automata(request)
            return True
        for entry in self._queue:
            if not (entry.request.constraint or entry.request.stop_automaton):
                self._queue.move_to_front(entry)
                return True
        return False

    def _choose_prompts(self) -> None:
        """Let the reader choose prompts of waiting requests, the first of which is needed now."""
        is_new = self.reader.choose_prompts(self._prompt_of(entry.request) for entry in self._queue)
        is_new_to_draft = False
        if self.drafter is not None and not self._drafts_pause():
            is_new_to_draft = self.drafter.choose_prompts(
                self._prompt_of(entry.request) for entry in self._queue
            )
        # If the reader reads one prompt at a time, it can skip tokens that a row already has.
        if (is_new or is_new_to_draft) and self.reader.rows == 1:
            prompt = self._prompt_of(self._queue.first.request)
            # The row that shares the most tokens with the prompt.
            common_tokens, row = max(
                (self._count_common_tokens(row, prompt), row) for row in range(self.rows)
            )
            if is_new:
                self.reused += self.reader.copy_first_chunks(self.cache, row, common_tokens)
            if self.drafter is not None and is_new_to_draft:
                read_tokens = self._unread_by_draft.get(row, common_tokens)
                self.drafter.copy_first_chunks(row, min(common_tokens, read_tokens))

    def _startable_requests(self) -> Iterator[Request]:
        """Yield the first waiting requests, at most as many as there are free rows."""
        entries = itertools.islice(self._queue, len(self._free_rows))
        return (entry.request for entry in entries)

    def _prompt_of(self, request: Request) -> PromptToRead:
        """Return a request's prompt, with what decides who may share its keys and values."""
        slot_write = self.bank.last_writes[request.adapter] if self.bank else 0
        reuse_key = ReuseKey(request.owner, request.adapter, slot_write)
        return PromptToRead(request.prompt_ids, reuse_key)

    def _count_common_tokens(self, row: int, prompt: PromptToRead) -> int:
        """Return how many first tokens of a prompt are also the first of a row's prompt.

        It is 0 if the row's prompt has another owner or another adapter.
        """
        row_prompt = self._prompts[row]
        if row_prompt.reuse_key != prompt.reuse_key:
            return 0
        count = 0
        for row_id, new_id in zip(
            row_prompt.ids, self.reader.part_to_read(prompt).ids, strict=False
        ):
            if row_id != new_id:
                break
            count += 1
        return count

    def _place_requests(self) -> None:
        """Put requests whose prompts have been read into free rows.

        It stops at the first request whose automata have no room.
        """
        # The requests whose prompts the reader has are the first `len(reader_rows)` of the queue.
        reader_rows = self.reader.rows_of(map(self._prompt_of, self._startable_requests()))
        draft_rows: list[int] | None = None
        if self.drafter is not None and not self._drafts_pause():
            draft_rows = self.drafter.rows_of(map(self._prompt_of, self._startable_requests()))
            # After an error in between, the two readers may have chosen different prompts.
            del reader_rows[len(draft_rows) :]
        automaton_states: list[tuple[int, int]] = []
        for request in itertools.islice(self._startable_requests(), len(reader_rows)):
            states = self._acquire_automata(request)
            if states is None:
                break
            automaton_states.append(states)
        count = len(automaton_states)
        rows = self._free_rows[:count]
        if self.drafter is not None and draft_rows:
            requests = [*itertools.islice(self._startable_requests(), count)]
            try:
                self.drafter.begin(rows, draft_rows[:count], list(map(self._prompt_of, requests)))
            except BaseException:
                # The requests stay where they wait, without their automata.
                for request in requests:
                    self._release_automata(request)
                raise
        for row in rows:
            if draft_rows is not None:
                self._unread_by_draft.pop(row, None)
            else:
                self._unread_by_draft[row] = 0
        del self._free_rows[:count]
        entries = [self._queue.take() for _ in rows]
        self._begin_requests(rows, reader_rows[:count], entries, automaton_states)

    def _continue_rows(self) -> None:
        """Begin the requests that continue rows, as far as the tables have room for their automata."""
        while self._continuing:
            automaton_states: list[tuple[int, int]] = []
            for _, entry in self._continuing[: self.reader.rows]:
                states = self._acquire_automata(entry.request)
                if states is None:
                    break
                automaton_states.append(states)
            count = len(automaton_states)
            if not count:
                break
            rows = [kept.row for kept, _ in self._continuing[:count]]
            entries = [entry for _, entry in self._continuing[:count]]
            continuations = [
                Continuation(kept.row, kept.known, self._prompt_of(entry.request))
                for kept, entry in self._continuing[:count]
            ]
            try:
                self.reader.continue_rows(self.cache, continuations)
                if self.drafter is not None and not self._drafts_pause():
                    # A row's last token but one may not have been read by the draft model (`previous_B`).
                    self.drafter.continue_rows(
                        [
                            each._replace(
                                known=self._unread_by_draft.get(each.row, max(0, each.known - 1))
                            )
                            for each in continuations
                        ]
                    )
            except BaseException:
                for entry in entries:
                    self._release_automata(entry.request)
                raise
            for each in continuations:
                if self._drafts_pause():
                    self._unread_by_draft.setdefault(each.row, max(0, each.known - 1))
                else:
                    self._unread_by_draft.pop(each.row, None)
            del self._continuing[:count]
            self._begin_requests(rows, range(count), entries, automaton_states)

    def _begin_requests(
        self,
        rows: Sequence[int],
        reader_rows: Sequence[int],
        entries: Sequence[WaitingRequest],
        automaton_states: Sequence[tuple[int, int]],
    ) -> None:
        """Begin requests in rows, with what the reader has read of their prompts.

        Args:
            rows: the rows.
            reader_rows: the row of the reader's cache that each request's prompt is in.
            entries: the requests, which were taken from where they waited.
            automaton_states: see `_begin_request`, for each request.
        """
        longest = max(len(entry.request.prompt_ids) for entry in entries)
        tokens_read = longest if self.reader.reads_last_token else longest - 1
        self.cache.copy_rows(rows, self.reader.cache, reader_rows, tokens_read)
        if self.reader.reads_last_token:
            self._last_BD[rows] = self.reader.last_RD[reader_rows]
        values = [
            self._begin_request(row, entry, states)
            for row, entry, states in zip(rows, entries, automaton_states, strict=True)
        ]
        # The values of all requests are written together, so that there is one copy for each tensor.
        write_rows(vars(self.state) | self.knobs, rows, values)
        if self.drafter is not None:
            follows = [isinstance(entry.request.constraint, HostText) for entry in entries]
            self.drafter.write_one_token(rows, follows)

    def _begin_request(
        self, row: int, entry: WaitingRequest, automaton_states: tuple[int, int]
    ) -> dict[str, Any]:
        """Begin a request in a row.

        Args:
            row: the row.
            entry: the request, which has waited.
            automaton_states: the first states of its constraint and of its stop strings.

        Returns:
            The row's first values of the state and the knobs, by name. The caller writes them.
        """
        number, request, smallest_chain, knobs = entry
        prompt = request.prompt_ids
        sampling = request.sampling
        stop_ids = request.stop_ids
        limit = min(request.max_tokens, self.slots - len(prompt))
        self._records[row] = RowRecord(number, request, limit, smallest_chain)
        # If the request continues a row, decode steps have read a part of its prompt. They may round
        # differently from the reader, so no other request may reuse these keys and values.
        if request.continues is None:
            self._prompts[row] = self.reader.part_to_read(self._prompt_of(request))
        state = self.state
        if state.counts_BV is not None:
            counts_V, prompt_V = first_counts(sampling, prompt, self.vocabulary)
            state.counts_BV[row].copy_(counts_V)
            if state.prompt_BV is not None:
                state.prompt_BV[row].copy_(prompt_V)
        if state.past is not None:
            state.past.write_prompt(row, prompt, request.breaker_V)
        constraint_state, stop_state = automaton_states
        state_values = {
            "token_B": prompt[-1],
            "position_B": len(prompt) - 1,
            "generated_B": 0,
            "limit_B": limit,
            "adapter_B": request.adapter,
            "seed_B": sampling.seed if request.seed is None else request.seed,
            "status_B": Status.RUNNING,
            # No token has the id -1.
            "stop_ids_BM": stop_ids + (-1,) * (MAX_STOP_IDS - len(stop_ids)),
            "constraint_state_B": constraint_state,
            "stop_state_B": stop_state,
            # mirostat begins at twice its target, as in llama.cpp.
            "mu_B": 2 * sampling.mirostat_tau,
        }
        return state_values | knobs

    def _acquire_automata(self, request: Request) -> tuple[int, int] | None:
        """Give the automata of a request places in the tables.

        Returns:
            the first states of its constraint and of its stop strings; None: the tables lack the room
            for one of the two now, and so neither has been acquired.
        """
        constraint_state = self.tables.acquire(request.constraint)
        if constraint_state is None:
            return None
        stop_state = self.tables.acquire(request.stop_automaton)
        if stop_state is None:
            self.tables.release(request.constraint)
            # The place that the constraint had may split the free room into two parts that are too small.
            self.tables.remove_unused()
            return None
        return constraint_state, stop_state

    def _release_automata(self, request: Request) -> None:
        self.tables.release(request.constraint)
        self.tables.release(request.stop_automaton)

    def _end_requests(self, rows: Sequence[int]) -> None:
        """Remove the requests of rows, which have ended or been cancelled."""
        for row in rows:
            record = self._records[row]
            self._records[row] = None
            assert record is not None
            self._release_automata(record.request)

    def _free(self, rows: Sequence[int]) -> None:
        """Free rows without a request."""
        if not self._keeps_prompts:
            for row in rows:
                self._prompts[row] = _NO_PROMPT
        self._free_rows += rows
        # See `_keeps_prompts`.
        position = self.slots - 1 if self._keeps_prompts else 0
        self.state.position_B.index_fill_(
            0, tensor_on(rows, self.state.position_B.device), position
        )

    # ── blocks of steps ───────────────────────────────────────────────────────────────────────

    def _write_masks(self) -> int:
        """Write the masks of the constraints that the host follows; return how many there are."""
        constraints = [record.request.constraint for record in self._records if record is not None]
        followed = [each for each in constraints if isinstance(each, HostText)]
        if followed:
            began = clock()
            for constraint in followed:
                self.tables.write_classes(constraint, constraint.write_classes())
            self.masks += len(followed)
            self.masks_s += clock() - began
        return len(followed)

    def _launch_block(self, limit: int | None = None) -> StepBlock | None:
        """Start a block of steps and return it; None if no row needs a step.

        Args:
            limit: the maximum number of steps; None: that of the pace.
        """
        running = [record for record in self._records if record is not None]
        # Whether a request waits for a row, or for its first token.
        is_awaited = self._queue or not all(record.launched for record in running)
        max_steps = self.pace.steps_while_waiting if is_awaited else self.pace.steps
        if limit is not None:
            max_steps = min(max_steps, limit)
        needed_lines = max((record.limit - record.launched for record in running), default=0)
        if needed_lines <= 0:
            return None
        steps = self.steps
        lines_of_step = 1
        count = min(max_steps, needed_lines)
        uses_drafts = self._prepare_drafts()
        if uses_drafts:
            assert self.drafter is not None and self.drafted_steps is not None
            steps = self.drafted_steps
            lines_of_step = 1 + self.drafter.tokens
            # A text needs at least this many passes.
            needed_passes = math.ceil(needed_lines / lines_of_step)
            passes_of_ring = self.outbox.half_lines // lines_of_step
            count = min(self._passes_of_block(max_steps), needed_passes, passes_of_ring)
        elif self.drafter is not None:
            self._leave_drafts_behind()
            if self.rows > 1:
                self._draft_budget.count_steps(count)
        lines = count * lines_of_step
        # In every row, attention reads as many blocks of the cache as the longest row needs. The
        # additional blocks do not change a bit of the shorter rows.
        longest = max(
            len(record.request.prompt_ids) + min(record.launched + lines, record.limit)
            for record in running
        )
        # A pass over proposed tokens may run past the end of a text.
        longest += lines_of_step - 1
        # Rows that are kept take part in the steps as well: each reads its last token again, at the
        # position `known`. (A recurrence may take it in now, which `PromptReader.continue_rows` expects.)
        waiting_rows = [*self._kept.values(), *(kept for kept, _ in self._continuing)]
        longest = max([longest, *(kept.known + lines_of_step for kept in waiting_rows)])
        # If one row needs the exact search, all rows use it, since it gives the same bits.
        truncation: Truncation = (
            "search" if any(record.needs_search for record in running) else "window"
        )
        chain = steps.choose_chain(frozenset(record.smallest_chain for record in running))
        follow_automata = any(self._needs_automata(record, lines) for record in running)
        if follow_automata:
            self._write_automaton_states()
        else:
            for record in running:
                record.is_ahead = record.request.constraint is not None
        self.outbox.begin_block(self.state.line_1)
        # If the reader has read the prompts' last tokens, and no row has sampled a token yet, the first
        # step needs no pass of the model, and so no blocks of the cache. It is not captured.
        has_hidden = self.reader.reads_last_token and not any(record.launched for record in running)
        model_steps = count
        if has_hidden:
            model_steps -= 1
            step = steps.step_for(chain)
            step(0, truncation, follow_automata, self._last_BD)
        steps.replays.run(
            model_steps, chain, self.cache.block_count_for(longest), truncation, follow_automata
        )
        for record in running:
            record.launched += lines
        # The list of records is copied, since the rows may have other requests by the time the block is
        # read.
        return StepBlock(lines, lines_of_step, self.outbox.send(lines), list(self._records))

    def _needs_automata(self, record: RowRecord, lines: int) -> bool:
        """Return whether the automata of a request can change the tokens of the next lines."""
        constraint = record.request.constraint
        if record.request.stop_automaton is not None:
            return True
        if constraint is None:
            return False
        # While the constraint allows every token, a single step can do without it, since the host follows
        # the state afterwards. (With tools, every token is allowed until a call begins.) A compiled step
        # always follows it, since it would otherwise be compiled twice.
        if lines > 1 or self.compiled or not self._tracks_automata:
            return True
        return not constraint.allows_all_S[record.automaton_state & STATE_MASK]

    def _write_automaton_states(self) -> None:
        """Write the states that only the host has followed (`RowRecord.is_ahead`) to the device."""
        for row, record in enumerate(self._records):
            if record is not None and record.is_ahead:
                constraint = record.request.constraint
                assert constraint is not None
                state = self.tables.state_of(constraint, record.automaton_state)
                self.state.constraint_state_B[row] = state
                record.is_ahead = False

    def _follow(self, record: RowRecord, tokens: Sequence[int]) -> bool:
        """Follow the constraint of a request through new tokens; return whether the text is now over.

        It is over if only a token that ends the text may come next.
        """
        constraint = record.request.constraint
        if constraint is None or not tokens:
            return False
        if isinstance(constraint, HostText):
            # `take` takes one token, and returns whether the text is over.
            return any(map(constraint.take, tokens))
        if not self._tracks_automata:
            return False
        for token in tokens:
            record.automaton_state = constraint.after(record.automaton_state, token)
        return bool(constraint.stops_S[record.automaton_state & STATE_MASK])

    @property
    def _tracks_automata(self) -> bool:
        """Whether the host knows all tokens of a row when it starts the next step."""
        return not self.reads_behind

    def _read_block(self, block: StepBlock) -> list[Event]:
        """Read a block and return its events.

        The codes of a row after the end of its request are skipped.
        """
        codes_BR, *report_rings = (
            ring.transpose(0, 1) for ring in self.outbox.read(block.half, block.lines)
        )
        codes_of_rows = codes_BR.tolist()
        # All rows are converted at once, since a call for each row takes longer than its numbers.
        reports_of_rows: list[list[list[Any]]] = []
        if any(record and record.request.sampling.logprobs is not None for record in block.records):
            reports_of_rows = [ring.tolist() for ring in report_rings]
        self.blocks_read += 1
        events: list[Event] = []
        ended: list[int] = []
        freed: list[int] = []
        # What drafts have cost more than saved in this block, for each row, in steps.
        draft_losses: list[float] = []
        for row, record in enumerate(block.records):
            # If the row has another record now, the block was launched before the host had read how the
            # request of this record ended, or that it needs "search".
            if record is None or self._records[row] is not record:
                continue
            tokens, token_lines, status = read_codes(codes_of_rows[row])
            record.received += len(tokens)
            if self.drafter is not None:
                record.token_ids += tokens
            # The lines of the block in which the row has no token.
            record.launched -= block.lines - len(tokens)
            if block.lines_of_step > 1:
                # A row that has ended takes no part in the block's last passes.
                used_lines = token_lines[-1] + 1 if token_lines else 1
                passes = block.lines // block.lines_of_step
                if status != Status.RUNNING:
                    passes = math.ceil(used_lines / block.lines_of_step)
                draft_losses.append(self._count_drafts(record, passes, len(tokens)))
            finish = FINISHES.get(status)
            if self._follow(record, tokens):
                # If the step did without the automaton, the device does not know that the text is over.
                finish = "stop"
                self.state.status_B[row] = Status.FREE
            # An UNDECIDED row samples nothing, so it continues at the same position.
            if status == Status.UNDECIDED:
                self._records[row] = replace(record, launched=record.received, needs_search=True)
                self.state.status_B[row] = Status.RUNNING
            elif finish is not None:
                ended.append(row)
                if record.request.keeps_row and finish in ("stop", "length"):
                    known = len(record.request.prompt_ids) + record.received - 1
                    self._kept[record.number] = KeptRow(row, known, record.request.adapter)
                else:
                    freed.append(row)
            if finish == "not_finite":
                # A NaN in the cache would reach later requests of this row, because attention multiplies
                # masked values by 0, and 0 times NaN is NaN. The NaN may come from the prompt, so the
                # reader's cache may have it, too.
                self.cache.clear(row)
                self.reader.forget()
                if self.drafter is not None:
                    self.drafter.clear(row)
                self._prompts[row] = _NO_PROMPT
            if tokens or finish is not None:
                likeliest_count = record.request.sampling.logprobs
                logprobs: list[LogProbability] = []
                if likeliest_count is not None:
                    # The entries of the two rings are indexed as [row][line].
                    values_of_rows, ids_of_rows = reports_of_rows
                    values = [values_of_rows[row][line] for line in token_lines]
                    ids = [ids_of_rows[row][line] for line in token_lines]
                    logprobs = read_log_probabilities(values, ids, likeliest_count)
                events.append(Event(record.number, tokens, finish, logprobs))
        if draft_losses and self.rows > 1:
            self._draft_budget.count_passes(sum(draft_losses) / len(draft_losses), 0)
        if ended:
            self._end_requests(ended)
        if freed:
            self._free(freed)
        return events

    # ── drafts ────────────────────────────────────────────────────────────────────────────────

    def settle_drafts(self) -> None:
        """Find out, before the first request, how drafts can be switched off where they do not pay.

        If a pass rounds as steps do once its queries are computed one after another, they are.
        """
        if self.rows == 1 or self.drafts != "while they pay":
            return
        for one_at_a_time in (False, True):
            self.cache.one_query_at_a_time = one_at_a_time
            if self._pass_rounds_as_steps():
                break
        else:
            self.cache.one_query_at_a_time = False
            self.drafts = "always"
        self._knows_rounding = True

    def rehearse_drafts(
        self, requests: Sequence[Request], go_on: Callable[[], None] = lambda: None
    ) -> None:
        """Write texts before the first request, and propose no tokens afterwards if that did not pay.

        With `drafts` "always", drafts cannot be switched off between texts, but before all of them.

        Args:
            requests: the texts, as many as there are rows.
            go_on: called after each event; an exception from it ends the rehearsal.
        """
        for request in requests:
            self.submit(request)
        for _ in self.run():
            go_on()
        assert self.drafter is not None
        if self.drafted_tokens < self.drafted_passes * self.drafter.cost:
            self.drafts = "never"
        self._draft_budget = DraftBudget()
        self.drafted_passes = 0
        self.drafted_tokens = 0

    def _pass_rounds_as_steps(self) -> bool:
        """Return whether a pass over proposed tokens gives every row the bits of steps."""
        assert self.drafter is not None
        # The trial would have to be compiled, too.
        if self.compiled:
            return False
        step = self._new_step(self.chain)
        return rounds_as_steps(step, self.drafter.tokens, self.drafter.reads_hidden)

    def _drafts_pause(self) -> bool:
        """Return whether steps go on without drafts."""
        if self.drafts == "never":
            return True
        if self.rows == 1:
            # For a text alone, drafts end for good.
            record = self._records[0]
            return record is not None and record.draft_budget.lost_steps > MAX_LOST_STEPS
        budget = self._draft_budget
        if budget.lost_steps > MAX_LOST_STEPS and not self._knows_rounding:
            self._knows_rounding = True
            if not self._pass_rounds_as_steps():
                self.drafts = "always"
        if self.drafts == "always":
            return False
        if budget.lost_steps > MAX_LOST_STEPS:
            budget.is_spent = True
        return budget.is_spent

    def _prepare_drafts(self) -> bool:
        """Return whether the next block uses drafts, after the draft model has read what it lacks.

        It reads as many chunks as the pace allows, and at least one in each row, which is more than a block
        of steps adds. Until it has read everything, steps go on without it.
        """
        self._must_read = False
        if self.drafter is None or self._drafts_pause():
            return False
        behind = {
            row: self._unread_by_draft[row]
            for row, record in enumerate(self._records)
            if record is not None and row in self._unread_by_draft
        }
        if behind and self._unread is not None:
            self._must_read = True
            return False
        is_ready = True
        for row, known in behind.items():
            record = self._records[row]
            assert record is not None
            text = record.request.prompt_ids + tuple(record.token_ids)
            end = len(text)
            if self.pace.max_chunks is not None:
                chunks = max(1, self.pace.max_chunks // len(behind))
                # The reader does not read a prompt's last token.
                end = min(end, known + chunks * self.drafter.reader.chunk + 1)
            self.drafter.continue_rows([Continuation(row, known, PromptToRead(text[:end]))])
            if end < len(text):
                self._unread_by_draft[row] = end - 1
                is_ready = False
            else:
                del self._unread_by_draft[row]
        return is_ready

    def _leave_drafts_behind(self) -> None:
        """Note which tokens the draft model has read, before a block of steps without it."""
        for row, record in enumerate(self._records):
            if record is not None:
                # It has read all tokens before the last one, except that before the last one itself
                # (`Drafter.previous_B`).
                known = len(record.request.prompt_ids) + record.received - 2
                self._unread_by_draft.setdefault(row, max(0, known))

    def _passes_of_block(self, max_steps: int) -> int:
        """Return how many passes over proposed tokens take the time of this many steps; at least 1."""
        assert self.drafter is not None
        return max(1, int(max_steps / self.drafter.cost))

    def _count_drafts(self, record: RowRecord, passes: int, tokens: int) -> float:
        """Count what passes over proposed tokens gave a row; return what they lost, in steps."""
        self.drafted_passes += passes
        self.drafted_tokens += tokens
        assert self.drafter is not None
        cost = passes * self.drafter.cost
        record.draft_budget.count_passes(cost, tokens)
        return cost - tokens


def _chunk_length(model: Llama, sizes: CacheSizes) -> int:
    """Return the number of tokens of a chunk, a power of two.

    A pass takes the time of a whole chunk, however few of its tokens are used. So a chunk is not longer
    than the longest prompt needs.
    """
    device = model.lm_head.weight.device.type
    max_chunk = min(sizes.per_row, CHUNKS[device], model.config.max_position_embeddings)
    needed = sizes.longest_prompt
    if sizes.pads_products:
        needed = padded_count(needed)
    max_chunk_rounded_down = 1 << (max_chunk.bit_length() - 1)
    needed_rounded_up = 1 << (needed - 1).bit_length()
    return min(max_chunk_rounded_down, needed_rounded_up)
