"""What all requests share: the versions of the model, the thread that owns them, bounds on what waits, and counts."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from monograph.device import clock
from monograph.errors import MonographError, OutOfDeviceMemory
from monograph.serve.compiling import Compiler
from monograph.serve.metrics import Counted, Histogram
from monograph.serve.owner import Generation, Gone, Owner
from monograph.serve.refused import Refused
from monograph.serve.versions import Source, Version

WAITING = 4  # texts that wait for each row
WAITING_PROMPTS = 4  # whole contexts of prompts that wait for each row
MOST_NUMBERS = 1 << 21  # log-probabilities of a request, each of which takes about 200 bytes until it is sent
MOST_SCORES = 4 * MOST_NUMBERS  # of all requests that have prompts scored and nothing written


class Gate:
    """Counts the texts that clients wait for, and refuses what would be too many.

    It holds none: the decoder's queue is the only one, and has each client's in turn.

    Attributes:
        most: texts that may wait.
        refused: requests that were turned away.
        cancelled: texts that nobody waited for any more.
    """

    def __init__(self, owner: Owner, rows: int, context: int) -> None:
        """Count for a decoder of `rows` rows, each with a context of `context` tokens."""
        self._owner = owner
        self.fit(rows, context)
        self._entered: dict[Generation, tuple[float, float]] = {}  # when, and how many for each row there were then
        self._tokens = 0  # of their prompts
        self._text_s = 1.0  # about how long a text takes
        self.refused = 0
        self.cancelled = 0
        self._scores = 0

    def fit(self, rows: int, context: int) -> None:
        """Take the sizes of the decoder that writes new texts."""
        self._rows = rows
        self.most = WAITING * rows
        self._most_tokens = (1 + WAITING_PROMPTS) * rows * context

    @property
    def waiting(self) -> int:
        """Return how many texts wait for a row."""
        return max(0, len(self._entered) - self._rows)

    @property
    def most_at_once(self) -> int:
        """Return how many texts may be written and wait together, so that no request may ever have more."""
        return self._rows + self.most

    def enter(self, texts: Sequence[Generation]) -> None:
        """Have a client's texts written.

        Raises:
            Refused: too many wait.
        """
        tokens = self._tokens + sum(len(text.request.prompt_ids) for text in texts)
        count = len(self._entered) + len(texts)
        if count > self.most_at_once or (self.waiting and tokens > self._most_tokens):
            self.refused += 1
            raise Refused(
                429,
                f"{self.waiting} texts wait already: try again later",
                code="rate_limit_exceeded",
                Retry_After=str(min(60, max(1, math.ceil(self._text_s * count / self._rows)))),
            )
        self._tokens = tokens
        for text in texts:
            self._entered[text] = clock(), max(1.0, len(self._entered) / self._rows)
            self._owner.write(text)

    @contextmanager
    def scoring(self, numbers: int) -> Iterator[None]:
        """Let so many log-probabilities of prompts take memory until the end of the block.

        Raises:
            Refused: those of others take most of it.
        """
        if self._scores + numbers > MOST_SCORES:
            self.refused += 1
            message = "others have prompts scored: try again later"
            raise Refused(429, message, code="rate_limit_exceeded", Retry_After="10")
        self._scores += numbers
        try:
            yield
        finally:
            self._scores -= numbers

    def leave(self, text: Generation, *, cancelled: bool = False) -> None:
        """Release a finished or cancelled text; it may be cancelled after its end."""
        if text not in self._entered:
            return
        began, turns = self._entered.pop(text)
        self._tokens -= len(text.request.prompt_ids)
        if cancelled:
            self.cancelled += 1
            self._owner.cancel(text)
        else:
            self._text_s += 0.1 * ((clock() - began) / turns - self._text_s)


LOOK_S = 2.0  # between two looks for a newer version


class Service:
    """A model that is served, for as long as the event loop runs.

    Attributes:
        owner: the thread that owns the models.
        gate: the bounds on what it is asked.
        counted: requests by status.
        first_token: how long requests took to their first token.
        whole: how long they took in all.
        crashed: the error that ended the owner, or None.
        ended: is set once it has ended by an error.
    """

    owner: Owner
    gate: Gate

    def __init__(
        self,
        source: Source,
        say: Callable[[str], None],
        bug: Callable[[Exception], None],
        *,
        aliases: Sequence[str] = (),
        any_name: bool = False,
    ) -> None:
        """Take what is served.

        Args:
            source: the model.
            say: prints a line.
            bug: reports an error that nobody foresaw.
            aliases: further names of the model.
            any_name: whether a request may name the model as it likes.
        """
        self.source = source
        self.counted = Counted()
        self.bug = bug
        self._aliases = tuple(aliases)
        self._any_name = any_name
        self.first_token = Histogram()
        self.whole = Histogram()
        self.crashed: Exception | None = None
        self.ended = asyncio.Event()
        self._say = say
        self._unfit = False  # whether the newest version did not fit beside those that are used
        self._newest: Version | None = None
        self._has_owner = False  # which is before its first version can be used
        self._users: Counter[Version] = Counter()
        self._compilers: dict[tuple[str, tuple[int, ...]], Compiler] = {}

    async def begin(self, ended: Callable[[], None]) -> Version:
        """Load the model and make all that a request needs; `ended` is called if its thread ends by an error.

        Raises:
            MonographError: it cannot be loaded.
        """

        def crashed(error: Exception) -> None:
            self.crashed = error
            self.ended.set()
            ended()

        version = await asyncio.to_thread(self.source.load)
        self.owner = Owner(self.source.rows, crashed)
        self._has_owner = True
        await self.owner.add(version)
        self.gate = Gate(self.owner, version.rows, version.context)
        self._newest = version
        return version

    async def follow(self) -> None:
        """Load each newer version, until an error that nobody foresaw; requests that have begun end with theirs."""
        why = ""  # the newest version cannot be loaded, as it was said
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if not await asyncio.to_thread(self.source.moved):
                    why = ""
                    continue
                version, before = await asyncio.to_thread(self.source.load), self._newest
                await self.owner.add(version)
            except (MonographError, OSError) as error:
                if str(error) != why:
                    self._say(f"still {self._newest.id if self._newest else ''}: {error}")
                why = str(error)
                self._unfit = isinstance(error, OutOfDeviceMemory)
                continue
            except Gone:
                return
            except Exception as error:
                self.bug(error)
                return
            why = ""
            self.gate.fit(version.rows, version.context)
            self._newest = version
            self._say(f"now {version.id}: {version.size}")
            if before is not None and not self._users[before]:
                self._drop(before)

    def end(self) -> None:
        """End the thread and the processes."""
        for compiler in self._compilers.values():
            compiler.close()
        if self._has_owner:
            self.owner.end()

    @property
    def ready(self) -> bool:
        """Return whether requests are answered."""
        return self._newest is not None and self.crashed is None

    @property
    def newest(self) -> Version:
        """Return the version that takes new requests.

        Raises:
            Refused: there is none yet, or none any more.
        """
        if self._newest is None or self.crashed is not None:
            what = "loading the model" if self.crashed is None else "the model's thread has ended"
            raise Refused(503, what, code="unavailable", Retry_After="2")
        return self._newest

    @property
    def rows(self) -> int:
        """Return how many texts are written at once.

        Raises:
            Refused: see `newest`.
        """
        return self.newest.rows

    @property
    def ending(self) -> Refused:
        """Return the shutdown error, or the crash that ended the owner."""
        if self.crashed is not None:
            return Refused(500, "the model's thread has ended: the server is going down")
        return Refused(503, "the server is going down", code="unavailable")

    def names(self, version: Version) -> list[str]:
        """Return each name of a version once, the one of exactly its weights first."""
        return list(dict.fromkeys((version.id, *version.names, *self._aliases)))

    @asynccontextmanager
    async def version(self, name: str) -> AsyncIterator[Version]:
        """Yield the newest version, which stays until the end of the block, if it has this name or any name will do.

        Raises:
            Refused: it has another.
        """
        version = self.newest
        if not self._any_name and name not in (names := self.names(version)):
            known = ", ".join(names)
            hint = "other names: `monograph serve` with --served-name or --any-name"
            raise Refused(404, f"there is no model {name!r:.80}: expected {known} ({hint})", "model", "model_not_found")
        self._users[version] += 1
        try:
            yield version
        finally:
            self._users[version] -= 1
            if version is not self._newest and not self._users[version]:
                self._drop(version)

    def compiler(self, version: Version, ends: Sequence[int]) -> Compiler:
        """Return the compiler of automata for a version's tokenizer."""
        key = version.tokenizer.digest, tuple(ends)
        if key not in self._compilers:
            self._compilers[key] = Compiler(version.tokenizer.pieces, ends)
        return self._compilers[key]

    def metrics(self) -> str:
        """Return all counts as Prometheus' text."""
        _ = self.newest  # or there is nothing to count yet
        stock = self.owner.stock
        lines = ["# TYPE monograph_requests_total counter"]
        lines += [f'monograph_requests_total{{status="{key}"}} {n}' for key, n in self.counted.by_status.items()]
        numbers = {
            "rows gauge": self.rows,
            "rows_running gauge": stock.running,
            "texts_waiting gauge": self.gate.waiting,
            "texts_cancelled_total counter": self.gate.cancelled,
            "requests_refused_total counter": self.gate.refused,
            "tokens_drawn_total counter": stock.drawn,
            "blocks_total counter": stock.blocks,
            "prompt_tokens_reused_total counter": stock.reused,
        }
        for name, number in numbers.items():
            lines += [f"# TYPE monograph_{name}", f"monograph_{name.split()[0]} {number}"]
        lines += self.first_token.lines("monograph_first_token_seconds")
        return "\n".join([*lines, *self.whole.lines("monograph_request_seconds")]) + "\n"

    def _drop(self, version: Version) -> None:
        del self._users[version]
        self.owner.drop(version)
        if self._unfit:
            self._unfit = False
            self.source.again()
        for key in [key for key in self._compilers if key[0] != self.newest.tokenizer.digest]:
            self._compilers.pop(key).close()
