"""The thread that owns the models.

Only this thread touches tensors. It decodes in blocks, each of which is a number of steps on the
device. The event loop, which talks to the clients, gives it functions to call. The thread calls them
between two blocks, and after each block it hands the new events to the event loop.

A *version* is the model with its weights at one time. When a run has a newer checkpoint, the checkpoint
is loaded as a new version. New requests use the new version, while requests that have begun end with the
old weights. Each version has its own decoder, and a decoder writes one text in each of its *rows*.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from monograph.decode.adapter_bank import rows_with_adapters
from monograph.decode.automaton_tables import AutomatonTables
from monograph.decode.cache import CacheSizes
from monograph.decode.completion import bytes_of_row, rows_that_fit
from monograph.decode.generator import Draft, Generator
from monograph.decode.knobs import STAGES, Chain, chain_of
from monograph.decode.request import Event, Pace, Request
from monograph.decode.sampling import Sampling
from monograph.decode.step import MAX_STOP_IDS
from monograph.device import describe
from monograph.errors import InputRefused, MonographError
from monograph.evaluation.choices import TokenScore, score_tokens
from monograph.model.llama import Llama
from monograph.serve.requests import MAX_BIASES, MAX_LOGPROBS
from monograph.serve.versions import ServedModel, Version

_T = TypeVar("_T")
MIN_POSITIONS = 8192  # the positions of a row are not halved to fewer than this
# The values of each decoder's `Pace`: the steps of a block, by type of device; their maximum while a
# request waits; and the maximum number of chunks of prompts that are read between two blocks.
BLOCK_STEPS = {"cuda": 16, "cpu": 1}
STEPS_WHILE_WAITING = 4
MAX_PROMPT_CHUNKS = 2
# The tokens of each text of a rehearsal (`_rehearsal`).
REHEARSED_TOKENS = 64
# Options of the sampler with the filters that most requests use. Their values do not matter here.
_FILTER_OPTIONS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}
# Options that turn every stage of the sampler on (those of its examples), with the longest list of biases.
_ALL_OPTIONS: dict[str, Any] = {
    name: value for stage in STAGES.values() for name, value in stage.example.items()
}
_ALL_OPTIONS |= {"logit_bias": dict.fromkeys(range(MAX_BIASES), 0.0)}


def serving_chains(logprobs: int) -> list[Chain]:
    """Return the chains for which a decode step is captured, from the cheapest to the most expensive.

    A chain is the list of the sampler's stages that a step computes. A captured step is a graph that was
    recorded before the first request, and that a GPU replays. A step uses the first of these chains that
    has all stages that the running requests need. The last chain has all stages, so it serves every
    request.

    Args:
        logprobs: the number of likeliest tokens that the chains with log-probabilities report.
    """

    def chain_for(options: dict[str, Any], logprobs: int | None) -> Chain:
        top_ks = [0]  # top_k is off
        if "top_p" in options:
            # A chain that is made for requests with top_k alone reads only the few likeliest tokens. This
            # chain must also serve requests without top_k, so it is made for one request of each kind.
            top_ks.append(5)  # any small number
        samplings = [Sampling(**{**options, "top_k": k}, logprobs=logprobs) for k in top_ks]
        # The protocol reports probabilities under the raw logits only.
        return replace(chain_of(samplings, MAX_STOP_IDS), reports_processed=False)

    return [
        chain_for({"temperature": 1.0}, None),
        chain_for({"temperature": 1.0}, logprobs),
        chain_for(_FILTER_OPTIONS, None),
        chain_for(_FILTER_OPTIONS, logprobs),
        chain_for(_ALL_OPTIONS, logprobs),
    ]


def positions_per_row(model: Llama, rows: int, draft: Draft | None = None) -> int:
    """Return how many positions each row may have, so that `rows` rows take at most half of the free memory.

    This is the model's own number of positions, halved until the rows fit, but not below MIN_POSITIONS.
    If the rows do not fit even then, the caller takes fewer of them. What proposes tokens has as many rows.
    """
    positions = model.config.max_position_embeddings
    half_bytes = describe().free_memory_bytes // 2
    while positions // 2 >= MIN_POSITIONS:
        if rows * bytes_of_row(model, CacheSizes(positions), draft) <= half_bytes:
            break
        positions //= 2
    return positions


class ServedText:
    """One text to be written for a client. A client's request may have several.

    Attributes:
        request: the request to the decoder.
        version: the model that writes the text.
        index: the text's number among the texts of the client's request.
        inbox: receives the events of all texts of the client's request.
        streams: whether the inbox gets an event after each block of steps; otherwise it gets a single
            event at the end.
    """

    def __init__(
        self, request: Request, version: Version, index: int, inbox: "Inbox", streams: bool
    ) -> None:
        self.request = request
        self.version = version
        self.index = index
        self.inbox = inbox
        self.streams = streams
        # All events that were not delivered yet, merged into one.
        self._undelivered: Event | None = None

    def merge_event(self, event: Event) -> Event | None:
        """Add an event to those that were not delivered yet.

        Returns:
            The event to deliver now; None: it is delivered at the end of the text.
        """
        earlier = self._undelivered
        if earlier is not None:
            # The lists are extended in place, because texts are long.
            earlier.token_ids.extend(event.token_ids)
            earlier.logprobs.extend(event.logprobs)
            event = earlier._replace(finish=event.finish)
        if self.streams or event.finish is not None:
            self._undelivered = None
            return event
        self._undelivered = event
        return None


Inbox = asyncio.Queue[tuple[ServedText, Event | MonographError]]


class OwnerEnded(Exception):
    """The owner's thread has ended, and writes no more texts."""


class OwnerCounts(NamedTuple):
    """What the owner has done so far.

    Attributes:
        sampled_tokens: tokens that were sampled.
        blocks: the number of rounds in which each decoder that had requests ran a block.
        reused_tokens: tokens of prompts whose keys and values were known from an earlier prompt.
        drafted_passes: passes over proposed tokens, summed over the rows.
        drafted_tokens: tokens that these passes gave.
        running_rows: rows in use at present.
    """

    sampled_tokens: int = 0
    blocks: int = 0
    reused_tokens: int = 0
    drafted_passes: int = 0
    drafted_tokens: int = 0
    running_rows: int = 0


class _ScoreJob(NamedTuple):
    """A prompt to be scored, and the future that gets its scores; see `Owner.score`."""

    scores: asyncio.Future[list[TokenScore]]
    model: ServedModel
    ids: Sequence[int]
    likeliest_count: int


class _Decoder:
    """The generator of a version, and the texts that it writes.

    Attributes:
        generator: the generator.
        texts: the texts by their numbers in the generator.
        sampled_tokens: tokens that were sampled so far.
    """

    def __init__(self, version: Version, rows: int) -> None:
        """Make a decoder of at most `rows` rows.

        The version's attributes `rows` and `context` are set to what fits into the memory.

        Raises:
            InputRefused: the draft model has fewer positions than a row.
            OutOfDeviceMemory: not even one row fits.
            UsageError: one of the two models cannot be used with drafts.
        """
        model = version.model
        draft = version.draft
        vocabulary = version.tokenizer.vocab_size
        device = model.lm_head.weight.device
        block_steps = BLOCK_STEPS[device.type]
        version.context = positions_per_row(model, rows, draft)
        if isinstance(draft, Llama) and draft.config.max_position_embeddings < version.context:
            raise InputRefused(
                f"--draft: it has {draft.config.max_position_embeddings:,} positions, and a row of the model "
                f"{version.context:,}: expected a model with as many"
            )
        cache_sizes = CacheSizes(version.context)
        advice = "serve a model with fewer positions"  # for the error if not even one row fits
        version.rows = rows_that_fit(model, cache_sizes, rows, advice, draft)
        self.texts = dict[int, ServedText]()
        self.sampled_tokens = 0
        self.generator = Generator(
            model,
            serving_chains(min(MAX_LOGPROBS, vocabulary)),
            rows=version.rows,
            slots=cache_sizes,
            vocabulary=vocabulary,
            automata=AutomatonTables(vocabulary, device),
            mode="captured",
            pace=Pace(
                block_steps,
                steps_while_waiting=min(STEPS_WHILE_WAITING, block_steps),
                max_chunks=MAX_PROMPT_CHUNKS,
            ),
            draft=draft,
        )

    def warm_up(self, version: Version, go_on: Callable[[], None]) -> None:
        """Capture the generator's graphs, and decide when it uses drafts (`Version.drafts`).

        Args:
            version: the version.
            go_on: see `Generator.warm_up`.
        """
        generator = self.generator
        generator.settle_drafts()
        generator.warm_up(go_on)
        if generator.drafts == "always":
            generator.rehearse_drafts(_rehearsal(version), go_on)
        version.drafts = generator.drafts

    def advance(self) -> list[tuple[ServedText, Event]]:
        """Run a block of steps; return the events to deliver, each with its text."""
        deliveries = []
        for event in self.generator.advance():
            self.sampled_tokens += len(event.token_ids)
            text = self.texts[event.number]
            if event.finish is not None:
                del self.texts[event.number]
            merged = text.merge_event(event)
            if merged is not None:
                deliveries.append((text, merged))
        return deliveries

    def cancel(self, text: ServedText) -> None:
        """Forget a text, if it has not ended yet."""
        for number, other in self.texts.items():
            if other is text:
                del self.texts[number]
                self.generator.cancel(number)
                return


class Owner:
    """The owner's thread.

    The public methods are called in the event loop's thread, and most of them only hand a function
    over to the owner's thread.

    Attributes:
        counts: what the owner had done at the end of the last block.
    """

    def __init__(self, rows: int, on_crash: Callable[[Exception], None]) -> None:
        """Start the thread.

        Args:
            rows: the maximum number of rows of each version's decoder.
            on_crash: is called in the event loop with the error that ended the thread.
        """
        self.counts = OwnerCounts()
        self._rows = rows
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        # Calls for the thread; None ends it.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._score_jobs: deque[_ScoreJob] = deque()
        self._decoders: dict[Version, _Decoder] = {}
        # The counts of versions that were dropped. The totals include them, so that they never decrease.
        self._dropped = OwnerCounts()
        # Why the thread has ended; None while it runs.
        self._end_error: Exception | None = None
        # Whether `end` was called.
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._thread.start()

    async def add(self, version: Version) -> None:
        """Make a decoder for a version, and capture its graphs, so that no request has to wait for that.

        Raises:
            OutOfDeviceMemory: the decoder's keys and values do not fit.
        """

        def make_decoder() -> None:
            decoder = _Decoder(version, self._rows)
            decoder.warm_up(version, self._require_not_ending)
            self._decoders[version] = decoder

        await self.call(make_decoder)

    def drop(self, version: Version) -> None:
        """Free the memory of a version that no text uses any more."""

        def free_decoder() -> None:
            self._dropped = _with_decoder(self._dropped, self._decoders.pop(version))

        self._call_in_thread(free_decoder)

    def write(self, text: ServedText) -> None:
        """Start to write a text.

        Its inbox gets events up to the one that has a finish, or until `cancel` is called. If the decoder
        refuses the text, the inbox gets the error instead.
        """

        def submit_text() -> None:
            decoder = self._decoders[text.version]
            try:
                number = decoder.generator.submit(text.request)
            except MonographError as error:
                self._call_in_loop(text.inbox.put_nowait, (text, error))
            else:
                decoder.texts[number] = text

        self._call_in_thread(submit_text)

    def cancel(self, text: ServedText) -> None:
        """Forget a text; its row is free before the next block."""

        def cancel_text() -> None:
            decoder = self._decoders.get(text.version)
            if decoder is not None:
                decoder.cancel(text)

        self._call_in_thread(cancel_text)

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in the thread, between two blocks of steps, and return its result.

        Raises:
            MonographError: the function has raised it.
        """
        done: asyncio.Future[_T] = self._loop.create_future()

        def call_and_resolve() -> None:
            try:
                value = function()
            except MonographError as error:
                self._call_in_loop(_resolve, done, error)
            else:
                self._call_in_loop(_resolve, done, value)

        self._call_in_thread(call_and_resolve)
        return await done

    async def score(
        self, model: ServedModel, ids: Sequence[int], likeliest_count: int
    ) -> list[TokenScore]:
        """Return the scores of a text's tokens; see `monograph.evaluation.choices.score_tokens`.

        Args:
            model: the model that scores.
            ids: the tokens.
            likeliest_count: how many of the likeliest tokens at each position are returned with each score.
        """
        scores: asyncio.Future[list[TokenScore]] = self._loop.create_future()
        job = _ScoreJob(scores, model, ids, likeliest_count)
        self._call_in_thread(lambda: self._score_jobs.append(job))
        return await scores

    def end(self) -> None:
        """End the thread after its present block, or within a warm-up, and wait for its end.

        This must be done before Python ends: if the thread were inside a device's library then, the
        process would abort.
        """
        self._is_ending = True
        self._calls.put(None)
        self._thread.join()

    def _call_in_thread(self, call: Callable[[], None]) -> None:
        """Let the owner's thread call a function between two blocks.

        Raises:
            OwnerEnded: the thread has ended.
        """
        if self._end_error is not None:
            raise OwnerEnded from self._end_error
        self._calls.put(call)

    def _record_crash(self, error: Exception) -> None:
        # After a crash, the owner's thread does not set `_end_error` itself, but lets the event loop call
        # this method. Otherwise code in the loop could get an `OwnerEnded` before `on_crash` has recorded
        # the reason.
        self._end_error = error
        self._on_crash(error)

    # ── in the owner's thread ─────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """Work until the thread is to end, or an error ends it."""
        try:
            while self._advance():
                pass
            self._end_error = OwnerEnded()
        except OwnerEnded as ended:  # from `_require_not_ending`, within a warm-up
            self._end_error = ended
        except Exception as error:  # any other error is a bug, which ends the server
            self._call_in_loop(self._record_crash, error)

    def _require_not_ending(self) -> None:
        """Raise `OwnerEnded` if `end` was called. A warm-up, which may take long, calls this in between."""
        if self._is_ending:
            raise OwnerEnded

    def _advance(self) -> bool:
        """Do all calls, score one prompt, and run one block of each decoder that has requests.

        Returns:
            Whether the thread goes on; False: it is to end.
        """
        is_busy = any(decoder.generator.busy for decoder in self._decoders.values())
        # Without other work, the thread waits for a call, which may bring the first request.
        must_wait = not is_busy and not self._score_jobs
        while must_wait or not self._calls.empty():
            call = self._calls.get()  # waits for a call if there is none
            if call is None:
                return False
            call()
            must_wait = False
        self._score_one_prompt()
        deliveries = []
        busy_decoders = [decoder for decoder in self._decoders.values() if decoder.generator.busy]
        for decoder in busy_decoders:
            deliveries += decoder.advance()
        self._update_counts(ran_block=bool(busy_decoders))
        if deliveries:
            self._call_in_loop(_deliver, deliveries)
        return True

    def _score_one_prompt(self) -> None:
        """Score the next prompt, if there is one.

        No more than one is scored between two blocks, so that the texts do not wait long.
        """
        if not self._score_jobs:
            return
        job = self._score_jobs.popleft()
        if job.scores.cancelled():  # the client has gone
            return
        version = job.model.version
        # The adapter's slot for each row of the batch B, which is this one prompt.
        slot_B = torch.tensor([job.model.slot], device=version.model.lm_head.weight.device)
        with rows_with_adapters(version.bank, slot_B):
            scores = score_tokens(version.model, job.ids, version.precision, job.likeliest_count)
        self._call_in_loop(_resolve, job.scores, scores)

    def _update_counts(self, ran_block: bool) -> None:
        """Set `counts`, after a round in which decoders have run a block or not."""
        counts = self._dropped
        running_rows = 0
        for decoder in self._decoders.values():
            counts = _with_decoder(counts, decoder)
            running_rows += decoder.generator.running
        blocks = self.counts.blocks + (1 if ran_block else 0)
        # One assignment of a new object, because the event loop's thread may read it at any time.
        self.counts = counts._replace(blocks=blocks, running_rows=running_rows)

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """Let the event loop call a function in its thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)


def _with_decoder(counts: OwnerCounts, decoder: _Decoder) -> OwnerCounts:
    """Return counts to which those of a decoder were added."""
    generator = decoder.generator
    return counts._replace(
        sampled_tokens=counts.sampled_tokens + decoder.sampled_tokens,
        reused_tokens=counts.reused_tokens + generator.reused,
        drafted_passes=counts.drafted_passes + generator.drafted_passes,
        drafted_tokens=counts.drafted_tokens + generator.drafted_tokens,
    )


def _rehearsal(version: Version) -> list[Request]:
    """Return a text for each row, by which drafts show whether they pay.

    Each is the beginning of a document at temperature 1, with a seed of its own. They are the same at
    every start, and so is what follows from them.
    """
    prompt = (version.tokenizer.bos_id,)
    return [
        Request(prompt, Sampling(temperature=1.0, seed=row), REHEARSED_TOKENS)
        for row in range(version.rows)
    ]


def _deliver(deliveries: Sequence[tuple[ServedText, Event]]) -> None:
    for text, event in deliveries:
        text.inbox.put_nowait((text, event))


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    """Give a future its result, or its exception if the value is one."""
    if future.done():  # it was cancelled
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
