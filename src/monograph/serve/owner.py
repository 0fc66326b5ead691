"""The thread that owns the models: it alone touches tensors, and all others ask it.

A new version of the model takes new requests while those of the old one end on the old weights.
What is asked is done between two blocks of steps, and events go to the event loop once a block.
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
from monograph.decode.cache import KVCache, Slots
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
from monograph.serve.requests import MOST_BIASES, MOST_LOGPROBS
from monograph.serve.versions import Version

LEAST_POSITIONS = 8192
STEPS = {"cuda": 16, "cpu": 1}  # of a block
HURRIED_STEPS, CHUNKS = 4, 2  # see `Pace`
_FILTERED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}
_EVERYTHING: dict[str, Any] = {
    name: value for stage in STAGES.values() for name, value in stage.example.items()
}
_EVERYTHING |= {"top_k": 0, "logit_bias": dict.fromkeys(range(MOST_BIASES), 0.0)}


def chains(logprobs: int) -> list[Chain]:
    """Return the chains that a step is made for, the cheapest first; the last one serves every
    request.
    """

    def chain(options: dict[str, Any], reported: int | None) -> Chain:
        # Two kinds of top-k, as a chain for small k alone reads few tokens.
        both = [
            Sampling(**{**options, "top_k": k}, logprobs=reported)
            for k in ((0, 5) if "top_p" in options else (0,))
        ]
        return replace(chain_of(both, MAX_STOP_IDS), processed=False)

    kinds = (
        ({"temperature": 1.0}, None),
        ({"temperature": 1.0}, logprobs),
        (_FILTERED, None),
        (_FILTERED, logprobs),
    )
    return [*(chain(*kind) for kind in kinds), chain(_EVERYTHING, logprobs)]


def positions(model: Llama, rows: int) -> int:
    """Return how many positions each row has: the model's own, or half as often as it takes until
    so many rows fit.

    They fit half of the free memory. Fewer than LEAST_POSITIONS are not for lack of memory: then
    there are fewer rows.
    """
    slots = model.config.max_position_embeddings
    half_bytes = describe().free_memory_bytes // 2
    dtype = model.lm_head.weight.dtype
    while slots // 2 >= LEAST_POSITIONS and half_bytes < rows * KVCache.bytes_per_row(
        model.config, slots, dtype
    ):
        slots //= 2
    return slots


class Generation:
    """A text to be written for a client.

    Attributes:
        request: what the decoder gets.
        version: the model that writes it.
        index: its number among the texts of a client's request.
        inbox: where its events go, and those of the other texts of that request.
        piecewise: whether it is told block by block; otherwise once, at its end.
    """

    def __init__(
        self, request: Request, version: Version, index: int, inbox: "Inbox", piecewise: bool
    ) -> None:
        self.request = request
        self.version = version
        self.index = index
        self.inbox = inbox
        self.piecewise = piecewise
        self._event: Event | None = None

    def joined(self, event: Event) -> Event | None:
        """Return what is to be told after a further event of a block, or None if that is nothing
        yet.
        """
        if (old := self._event) is not None:
            old.token_ids.extend(event.token_ids)  # in place, as texts are long
            old.logprobs.extend(event.logprobs)
            event = old._replace(finish=event.finish)
        told = self.piecewise or event.finish is not None
        self._event = None if told else event
        return event if told else None


Inbox = asyncio.Queue[tuple[Generation, Event | MonographError]]


class Gone(Exception):
    """The owner has ended, and writes nothing any more."""


class Stock(NamedTuple):
    """What the owner has done so far: tokens drawn, blocks of steps, tokens of prompts that were
    known; rows in use.
    """

    drawn: int = 0
    blocks: int = 0
    reused: int = 0
    running: int = 0


class _Lane:
    """A version with its decoder, and the texts that it writes by the decoder's numbers."""

    def __init__(self, version: Version, rows: int) -> None:
        model, vocabulary = version.model, version.tokenizer.vocab_size
        device = model.lm_head.weight.device
        version.context = positions(model, rows)
        slots = Slots(version.context)
        version.rows = rows_that_fit(model, slots, rows, "serve a model with fewer positions")
        self.version = version
        self.texts = dict[int, Generation]()
        self.drawn = 0
        self.generator = Generator(
            model,
            chains(min(MOST_LOGPROBS, vocabulary)),
            rows=version.rows,
            slots=slots,
            vocabulary=vocabulary,
            automata=Arena(vocabulary, device),
            mode="captured",
            block=Pace(STEPS[device.type], min(HURRIED_STEPS, STEPS[device.type]), CHUNKS),
        )

    def advance(self) -> list[tuple[Generation, Event]]:
        """Run a block; return what came of it."""
        found = []
        for event in self.generator.advance():
            self.drawn += len(event.token_ids)
            text = (
                self.texts[event.number] if event.finish is None else self.texts.pop(event.number)
            )
            if (told := text.joined(event)) is not None:
                found.append((text, told))
        return found

    def cancel(self, text: Generation) -> None:
        if (
            number := next((number for number, each in self.texts.items() if each is text), None)
        ) is not None:
            del self.texts[number]
            self.generator.cancel(number)


class Owner:
    """The thread, as the event loop sees it; all its methods are for the loop's thread.

    Attributes:
        stock: what it has done, as of the last block.
    """

    def __init__(self, rows: int, crashed: Callable[[Exception], None]) -> None:
        """Start it; `crashed` is called in the loop with the error that ended it."""
        self.stock = Stock()
        self._rows = rows
        self._crashed = crashed
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._scores: deque[
            tuple[asyncio.Future[list[TokenScore]], Version, Sequence[int], int]
        ] = deque()
        self._lanes: dict[Version, _Lane] = {}
        # Tokens that versions drew, and that they did not read again, which are gone.
        self._dropped = [0, 0]
        self._ended: Exception | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._thread.start()

    async def add(self, version: Version) -> None:
        """Make a decoder for a version, and all that it would otherwise make in its first requests.

        Raises:
            OutOfDeviceMemory: its keys and values do not fit.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def make() -> None:
            try:
                lane = _Lane(version, self._rows)
                lane.generator.warm_up(self._go_on)
            except MonographError as error:
                self._tell(_answer, done, error)
            else:
                self._lanes[version] = lane
                self._tell(_answer, done, None)

        self._ask(make)
        await done

    def drop(self, version: Version) -> None:
        """Free a version, of which no text is written any more."""

        def free() -> None:
            lane = self._lanes.pop(version)
            self._dropped = [
                self._dropped[0] + lane.drawn,
                self._dropped[1] + lane.generator.reused,
            ]

        self._ask(free)

    def write(self, text: Generation) -> None:
        """Write a text; its events come until the last one, which has a finish, or until `cancel`."""

        def submit() -> None:
            lane = self._lanes[text.version]
            try:
                lane.texts[lane.generator.submit(text.request)] = text
            except MonographError as error:
                self._tell(text.inbox.put_nowait, (text, error))

        self._ask(submit)

    def cancel(self, text: Generation) -> None:
        """Forget a text; its row is free before the next block."""
        self._ask(
            lambda: self._lanes[text.version].cancel(text) if text.version in self._lanes else None
        )

    async def score(self, version: Version, ids: Sequence[int], likeliest: int) -> list[TokenScore]:
        """Score a text's tokens; see `monograph.evaluation.choices.score_tokens`."""
        done: asyncio.Future[list[TokenScore]] = self._loop.create_future()
        self._ask(lambda: self._scores.append((done, version, ids, likeliest)))
        return await done

    def end(self) -> None:
        """End the thread after its block, or within a warm-up, and wait for it.

        A thread that still calls a device's library when Python ends would abort the process.
        """
        self._ending = True
        self._asked.put(None)
        self._thread.join()

    def _ask(self, call: Callable[[], None]) -> None:
        if self._ended is not None:
            raise Gone from self._ended
        self._asked.put(call)

    def _crash(self, error: Exception) -> None:
        # Both in the loop's thread: who is told that the owner is gone finds why.
        self._ended = error
        self._crashed(error)

    # ── in the thread ─────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._advance():
                pass
            self._ended = Gone()
        except Gone as gone:
            self._ended = gone
        except Exception as error:  # it is told, and nothing goes on as if it had not happened
            self._tell(self._crash, error)

    def _go_on(self) -> None:
        if self._ending:
            raise Gone

    def _advance(self) -> bool:
        """Do what was asked, and one step of all that is under way; return whether to go on."""
        busy = [lane for lane in self._lanes.values() if lane.generator.busy]
        wait = not busy and not self._scores
        while wait or not self._asked.empty():
            if (call := self._asked.get()) is None:
                return False
            call()
            wait = False
        if self._scores:  # one between two blocks
            done, version, ids, likeliest = self._scores.popleft()
            if not done.cancelled():
                self._tell(
                    _answer, done, score_tokens(version.model, ids, version.precision, likeliest)
                )
        found = [
            pair
            for lane in list(self._lanes.values())
            if lane.generator.busy
            for pair in lane.advance()
        ]
        lanes = self._lanes.values()
        drawn = self._dropped[0] + sum(lane.drawn for lane in lanes)
        reused = self._dropped[1] + sum(lane.generator.reused for lane in lanes)
        running = sum(lane.generator.running for lane in lanes)
        self.stock = Stock(drawn, self.stock.blocks + bool(busy), reused, running)
        if found:
            self._tell(_deliver, found)
        return True

    def _tell(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)


def _deliver(found: Sequence[tuple[Generation, Event]]) -> None:
    for text, event in found:
        text.inbox.put_nowait((text, event))


def _answer(done: asyncio.Future[Any], value: object) -> None:
    if done.done():  # nobody waits any more
        return
    if isinstance(value, Exception):
        done.set_exception(value)
    else:
        done.set_result(value)
