"""What all requests share: the versions of the model, the thread that owns them, the gate before
it, and counts.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from monograph.errors import MonographError, OutOfDeviceMemory
from monograph.serve.compiling import Compiler
from monograph.serve.gate import Gate
from monograph.serve.metrics import Counted, Histogram
from monograph.serve.owner import Gone, Owner
from monograph.serve.refused import Refused
from monograph.serve.versions import Source, Version

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
        """Load the model and make all that a request needs; `ended` is called if its thread ends by
        an error.

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
        """Load each newer version, until an error that nobody foresaw; requests that have begun end
        with theirs.
        """
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
        """Yield the newest version, which stays until the end of the block, if it has this name or
        any name will do.

        Raises:
            Refused: it has another.
        """
        version = self.newest
        if not self._any_name and name not in (names := self.names(version)):
            known = ", ".join(names)
            hint = "other names: `monograph serve` with --served-name or --any-name"
            raise Refused(
                404,
                f"there is no model {name!r:.80}: expected {known} ({hint})",
                "model",
                "model_not_found",
            )
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
        lines += [
            f'monograph_requests_total{{status="{key}"}} {n}'
            for key, n in self.counted.by_status.items()
        ]
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
