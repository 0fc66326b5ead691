"""The thread that owns the models.

Only this thread touches tensors; all other code asks it. It decodes in blocks of steps. Between two
blocks it does what others asked for, and sends the new events to the event loop. A new version of
the model takes new requests, while requests that have begun end with the old weights.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from monograph.decode.arena import Arena
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.completion import rows_that_fit
from monograph.decode.generator import Generator
from monograph.decode.knobs import STAGES, Chain, chain_of
from monograph.decode.request import Event, Pace, Request
from monograph.decode.sampling import Sampling
from monograph.decode.step import MAX_STOP_IDS
from monograph.device import describe
from monograph.errors import MonographError
from monograph.evaluation.choices import TokenScore, score_tokens
from monograph.model.llama import Llama
from monograph.serve.requests import MAX_BIASES, MAX_LOGPROBS
from monograph.serve.versions import Version

MIN_POSITIONS = 8192  # a row's positions are not halved below this
BLOCK_STEPS = {"cuda": 16, "cpu": 1}
# See `Pace`: steps of a block while a request waits; chunks of prompts between two blocks.
HURRIED_STEPS = 4
PROMPT_CHUNKS = 2
_FILTER_OPTIONS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}
# Turns on each stage of the sampler.
_ALL_OPTIONS: dict[str, Any] = {
    name: value for stage in STAGES.values() for name, value in stage.example.items()
}
_ALL_OPTIONS |= {"top_k": 0, "logit_bias": dict.fromkeys(range(MAX_BIASES), 0.0)}


def serving_chains(logprobs: int) -> list[Chain]:
    """Return the chains for which a step is captured, from the cheapest to the most expensive.

    The last chain serves every request.

    Args:
        logprobs: how many of the likeliest tokens the chains with log-probabilities report.
    """

    def make_chain(options: dict[str, Any], reported: int | None) -> Chain:
        top_ks = [0]
        if "top_p" in options:
            # A chain for a small k alone reads few tokens, so it would not serve top_k = 0.
            top_ks.append(5)
        samplings = [Sampling(**{**options, "top_k": k}, logprobs=reported) for k in top_ks]
        # The protocol reports probabilities under the raw logits only.
        return replace(chain_of(samplings, MAX_STOP_IDS), processed=False)

    return [
        make_chain({"temperature": 1.0}, None),
        make_chain({"temperature": 1.0}, logprobs),
        make_chain(_FILTER_OPTIONS, None),
        make_chain(_FILTER_OPTIONS, logprobs),
        make_chain(_ALL_OPTIONS, logprobs),
    ]


def positions_per_row(model: Llama, rows: int) -> int:
    """Return the positions of each row, so that `rows` rows fit half of the free memory.

    The model's own number of positions is halved until the rows fit, but not below MIN_POSITIONS.
    If they do not fit then, the caller takes fewer rows.
    """
    positions = model.config.max_position_embeddings
    half_bytes = describe().free_memory_bytes // 2
    dtype = model.lm_head.weight.dtype
    while positions // 2 >= MIN_POSITIONS:
        if rows * KVCache.bytes_per_row(model.config, positions, dtype) <= half_bytes:
            break
        positions //= 2
    return positions


class ServedText:
    """One text to be written for a client.

    Attributes:
        request: the request to the decoder.
        version: the model that writes the text.
        index: the text's number among the texts of the client's request.
        inbox: receives the events of all texts of the client's request.
        streams: whether the inbox gets an event after each block; otherwise it gets one at the end.
    """

    def __init__(
        self, request: Request, version: Version, index: int, inbox: "Inbox", streams: bool
    ) -> None:
        self.request = request
        self.version = version
        self.index = index
        self.inbox = inbox
        self.streams = streams
        self._held_event: Event | None = None

    def merge_event(self, event: Event) -> Event | None:
        """Add a block's event to the held one; return the event to deliver, or None to hold it."""
        held = self._held_event
        if held is not None:
            # In place, because texts are long.
            held.token_ids.extend(event.token_ids)
            held.logprobs.extend(event.logprobs)
            event = held._replace(finish=event.finish)
        if self.streams or event.finish is not None:
            self._held_event = None
            return event
        self._held_event = event
        return None


Inbox = asyncio.Queue[tuple[ServedText, Event | MonographError]]


class Gone(Exception):
    """The owner's thread has ended, and writes no more texts."""


class OwnerCounts(NamedTuple):
    """What the owner has done so far.

    Attributes:
        sampled_tokens: tokens that were sampled.
        blocks: blocks of steps that were run.
        reused_tokens: tokens of prompts whose keys and values were known from an earlier prompt.
        running_rows: rows in use at present.
    """

    sampled_tokens: int = 0
    blocks: int = 0
    reused_tokens: int = 0
    running_rows: int = 0


class _ScoreJob(NamedTuple):
    """A prompt to be scored, and the future of its scores; see `Owner.score`."""

    scores: asyncio.Future[list[TokenScore]]
    version: Version
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
        """Make a decoder of at most `rows` rows; set the version's rows and context."""
        model = version.model
        vocabulary = version.tokenizer.vocab_size
        device = model.lm_head.weight.device
        block_steps = BLOCK_STEPS[device.type]
        version.context = positions_per_row(model, rows)
        slots = CacheSizes(version.context)
        version.rows = rows_that_fit(model, slots, rows, "serve a model with fewer positions")
        self.texts = dict[int, ServedText]()
        self.sampled_tokens = 0
        self.generator = Generator(
            model,
            serving_chains(min(MAX_LOGPROBS, vocabulary)),
            rows=version.rows,
            slots=slots,
            vocabulary=vocabulary,
            automata=Arena(vocabulary, device),
            mode="captured",
            block=Pace(block_steps, min(HURRIED_STEPS, block_steps), PROMPT_CHUNKS),
        )

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
    """The owner's thread, as the event loop sees it; only the loop's thread calls the methods.

    Attributes:
        counts: what the owner had done at the end of the last block.
    """

    def __init__(self, rows: int, on_crash: Callable[[Exception], None]) -> None:
        """Start the thread.

        Args:
            rows: the maximum number of rows of each version's decoder.
            on_crash: is called in the loop with the error that ended the thread.
        """
        self.counts = OwnerCounts()
        self._rows = rows
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        # Calls for the thread; None ends it.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._score_jobs: deque[_ScoreJob] = deque()
        self._decoders: dict[Version, _Decoder] = {}
        # Counts of versions that were dropped, so that the totals never fall.
        self._dropped_sampled_tokens = 0
        self._dropped_reused_tokens = 0
        self._end_error: Exception | None = None  # set once the thread has ended
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._thread.start()

    async def add(self, version: Version) -> None:
        """Make a decoder for a version, and capture all that its first requests would capture.

        Raises:
            OutOfDeviceMemory: the decoder's keys and values do not fit.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def make_decoder() -> None:
            try:
                decoder = _Decoder(version, self._rows)
                decoder.generator.warm_up(self._require_not_ending)
            except MonographError as error:
                self._call_in_loop(_resolve, done, error)
            else:
                self._decoders[version] = decoder
                self._call_in_loop(_resolve, done, None)

        self._ask(make_decoder)
        await done

    def drop(self, version: Version) -> None:
        """Free a version; the caller knows that it writes no more texts."""

        def free_decoder() -> None:
            decoder = self._decoders.pop(version)
            self._dropped_sampled_tokens += decoder.sampled_tokens
            self._dropped_reused_tokens += decoder.generator.reused

        self._ask(free_decoder)

    def write(self, text: ServedText) -> None:
        """Start to write a text.

        Its inbox gets events until one that has a finish, or until `cancel`.
        """

        def submit_text() -> None:
            decoder = self._decoders[text.version]
            try:
                number = decoder.generator.submit(text.request)
            except MonographError as error:
                self._call_in_loop(text.inbox.put_nowait, (text, error))
            else:
                decoder.texts[number] = text

        self._ask(submit_text)

    def cancel(self, text: ServedText) -> None:
        """Forget a text; its row is free before the next block."""

        def cancel_text() -> None:
            decoder = self._decoders.get(text.version)
            if decoder is not None:
                decoder.cancel(text)

        self._ask(cancel_text)

    async def score(
        self, version: Version, ids: Sequence[int], likeliest_count: int
    ) -> list[TokenScore]:
        """Score a text's tokens; see `monograph.evaluation.choices.score_tokens`."""
        scores: asyncio.Future[list[TokenScore]] = self._loop.create_future()
        job = _ScoreJob(scores, version, ids, likeliest_count)
        self._ask(lambda: self._score_jobs.append(job))
        return await scores

    def end(self) -> None:
        """End the thread after its block, or within a warm-up, and wait for it.

        If the thread were inside a device's library when Python ends, the process would abort.
        """
        self._is_ending = True
        self._calls.put(None)
        self._thread.join()

    def _ask(self, call: Callable[[], None]) -> None:
        if self._end_error is not None:
            raise Gone from self._end_error
        self._calls.put(call)

    def _crash(self, error: Exception) -> None:
        # Both in the loop's thread: code that sees `Gone` there must find the reason.
        self._end_error = error
        self._on_crash(error)

    # ── in the owner's thread ─────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._advance():
                pass
            self._end_error = Gone()
        except Gone as gone:
            self._end_error = gone
        except Exception as error:  # any error ends the server, and the loop reports it
            self._call_in_loop(self._crash, error)

    def _require_not_ending(self) -> None:
        if self._is_ending:
            raise Gone

    def _advance(self) -> bool:
        """Do all calls, score one prompt, run one block of each busy decoder.

        Returns:
            False if the thread is to end.
        """
        is_busy = any(decoder.generator.busy for decoder in self._decoders.values())
        must_wait = not is_busy and not self._score_jobs
        while must_wait or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
            must_wait = False
        self._score_one_prompt()
        deliveries = []
        for decoder in list(self._decoders.values()):
            if decoder.generator.busy:
                deliveries += decoder.advance()
        self._update_counts(ran_block=is_busy)
        if deliveries:
            self._call_in_loop(_deliver, deliveries)
        return True

    def _score_one_prompt(self) -> None:
        # One prompt between two blocks, so that running texts do not wait for many.
        if not self._score_jobs:
            return
        job = self._score_jobs.popleft()
        if job.scores.cancelled():
            return
        version = job.version
        scores = score_tokens(version.model, job.ids, version.precision, job.likeliest_count)
        self._call_in_loop(_resolve, job.scores, scores)

    def _update_counts(self, ran_block: bool) -> None:
        decoders = self._decoders.values()
        self.counts = OwnerCounts(
            sampled_tokens=self._dropped_sampled_tokens
            + sum(decoder.sampled_tokens for decoder in decoders),
            blocks=self.counts.blocks + ran_block,
            reused_tokens=self._dropped_reused_tokens
            + sum(decoder.generator.reused for decoder in decoders),
            running_rows=sum(decoder.generator.running for decoder in decoders),
        )

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)


def _deliver(deliveries: Sequence[tuple[ServedText, Event]]) -> None:
    for text, event in deliveries:
        text.inbox.put_nowait((text, event))


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    """Give a future its value, or its error if the value is one."""
    if future.done():  # cancelled: nobody waits for it any more
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
