"""What all requests share: the model's versions, the owner's thread, its gate, and counts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from monograph.errors import MonographError, OutOfDeviceMemory
from monograph.serve.compiling import ConstraintCompiler
from monograph.serve.gate import Gate
from monograph.serve.metrics import Histogram, RequestCounts
from monograph.serve.owner import Owner, OwnerEnded
from monograph.serve.refused import Refused
from monograph.serve.versions import Source, Version

POLL_S = 2.0  # a newer version is looked for this often


class Service:
    """A model that is served, for as long as the event loop runs.

    Attributes:
        source: where the model comes from.
        owner: the thread that owns the models; it exists once the first version is loaded.
        gate: the limits on what clients may ask for; it exists once the first version can be used.
        request_counts: how many requests were answered, by status.
        first_token_s: seconds from the start of a request to its first token.
        request_s: seconds from the start of a request to its end.
        report_bug: reports an unforeseen error.
        crash_error: the error that ended the owner's thread, or None.
        crashed: is set once the owner's thread has ended by an error.
    """

    owner: Owner
    gate: Gate

    def __init__(
        self,
        source: Source,
        say: Callable[[str], None],
        report_bug: Callable[[Exception], None],
        *,
        aliases: Sequence[str] = (),
        any_name: bool = False,
    ) -> None:
        """Set up a service; `begin` loads the model.

        Args:
            source: where the model comes from.
            say: prints a line.
            report_bug: reports an unforeseen error.
            aliases: further names of the model.
            any_name: whether a request may give the model any name.
        """
        self.source = source
        self.request_counts = RequestCounts()
        self.report_bug = report_bug
        self._aliases = tuple(aliases)
        self._any_name = any_name
        self.first_token_s = Histogram()
        self.request_s = Histogram()
        self.crash_error: Exception | None = None
        self.crashed = asyncio.Event()
        self._say = say
        # Whether a newer version could not be loaded because the versions in use left too little memory.
        self._newest_did_not_fit = False
        # The version that takes new requests.
        self._newest: Version | None = None
        self._has_owner = False
        self._users: Counter[Version] = Counter()  # requests that use each version
        # Each compiler by the digest of its tokenizer and the ids that end a text.
        self._compilers: dict[tuple[str, tuple[int, ...]], ConstraintCompiler] = {}

    async def begin(self, on_crash: Callable[[], None]) -> Version:
        """Load the model and make all that a request needs.

        Args:
            on_crash: is called if an error ends the owner's thread.

        Raises:
            MonographError: the model cannot be loaded.
        """

        def record_crash(error: Exception) -> None:
            self.crash_error = error
            self.crashed.set()
            on_crash()

        version = await asyncio.to_thread(self.source.load)
        self.owner = Owner(self.source.rows, record_crash)
        self._has_owner = True
        await self.owner.add(version)
        self.gate = Gate(self.owner, version.rows, version.context)
        self._newest = version
        return version

    async def follow(self) -> None:
        """Load each newer version as soon as it appears, until an unforeseen error, which is reported.

        Requests that have begun end with the version that they began with.
        """
        # Why the newest version cannot be loaded. It is printed once, not at each attempt.
        last_fault = ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if not await asyncio.to_thread(self.source.has_newer):
                    last_fault = ""
                    continue
                version = await asyncio.to_thread(self.source.load)
                previous = self._newest
                await self.owner.add(version)
            except (MonographError, OSError) as error:
                if str(error) != last_fault:
                    self._say(f"still {self._newest.id if self._newest else ''}: {error}")
                last_fault = str(error)
                self._newest_did_not_fit = isinstance(error, OutOfDeviceMemory)
                continue
            except OwnerEnded:
                return
            except Exception as error:
                self.report_bug(error)
                return
            last_fault = ""
            self.gate.set_sizes(version.rows, version.context)
            self._newest = version
            self._say(f"now {version.id}: {version.capacity}")
            if previous is not None and not self._users[previous]:
                self._drop(previous)

    def end(self) -> None:
        """End the owner's thread and the processes that compile."""
        for compiler in self._compilers.values():
            compiler.close()
        if self._has_owner:
            self.owner.end()

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._newest is not None and self.crash_error is None

    @property
    def newest(self) -> Version:
        """The version that takes new requests.

        Raises:
            Refused: no version is loaded yet, or an error has ended the owner's thread.
        """
        if self._newest is None or self.crash_error is not None:
            message = "loading the model"
            if self.crash_error is not None:
                message = "the model's thread has ended"
            raise Refused(503, message, code="unavailable", Retry_After="2")
        return self._newest

    @property
    def rows(self) -> int:
        """The number of texts that the newest version writes at once.

        Raises:
            Refused: see `newest`.
        """
        return self.newest.rows

    @property
    def end_refusal(self) -> Refused:
        """The error that interrupted requests get when the server ends."""
        if self.crash_error is not None:
            return Refused(500, "the model's thread has ended: the server is going down")
        return Refused(503, "the server is going down", code="unavailable")

    def names_of(self, version: Version) -> list[str]:
        """Return each name of a version once, first the name of exactly its weights."""
        return list(dict.fromkeys((version.id, *version.names, *self._aliases)))

    @asynccontextmanager
    async def use_version(self, name: str) -> AsyncIterator[Version]:
        """Yield the newest version; it is not dropped before the end of the block.

        Raises:
            Refused: the version does not have this name, and not every name is allowed.
        """
        version = self.newest
        names = self.names_of(version)
        if not self._any_name and name not in names:
            known = ", ".join(names)
            hint = "other names: `monograph serve` with --served-name or --any-name"
            message = f"there is no model {name!r:.80}: expected {known} ({hint})"
            raise Refused(404, message, "model", "model_not_found")
        self._users[version] += 1
        try:
            yield version
        finally:
            self._users[version] -= 1
            if version is not self._newest and not self._users[version]:
                self._drop(version)

    def compiler_for(self, version: Version, stop_ids: Sequence[int]) -> ConstraintCompiler:
        """Return the compiler of automata for a version's tokenizer."""
        key = version.tokenizer.digest, tuple(stop_ids)
        if key not in self._compilers:
            self._compilers[key] = ConstraintCompiler(version.tokenizer.pieces, stop_ids)
        return self._compilers[key]

    def metrics_text(self) -> str:
        """Return all counts in Prometheus' text format.

        Raises:
            Refused: see `newest`.
        """
        _ = self.newest  # the property raises while the owner, whose counts follow, does not exist
        counts = self.owner.counts
        lines = ["# TYPE monograph_requests_total counter"]
        for status, number in self.request_counts.by_status.items():
            lines.append(f'monograph_requests_total{{status="{status}"}} {number}')
        values = (
            ("rows", "gauge", self.rows),
            ("rows_running", "gauge", counts.running_rows),
            ("texts_waiting", "gauge", self.gate.waiting),
            ("texts_cancelled_total", "counter", self.gate.cancelled),
            ("requests_refused_total", "counter", self.gate.refused),
            ("tokens_drawn_total", "counter", counts.sampled_tokens),
            ("blocks_total", "counter", counts.blocks),
            ("prompt_tokens_reused_total", "counter", counts.reused_tokens),
        )
        for name, kind, value in values:
            lines += [f"# TYPE monograph_{name} {kind}", f"monograph_{name} {value}"]
        lines += self.first_token_s.lines("monograph_first_token_seconds")
        lines += self.request_s.lines("monograph_request_seconds")
        return "\n".join(lines) + "\n"

    def _drop(self, version: Version) -> None:
        """Free an old version that no request uses any more, and what only it needed."""
        del self._users[version]
        self.owner.drop(version)
        if self._newest_did_not_fit:
            # Its memory is free now, so the newest version may fit.
            self._newest_did_not_fit = False
            self.source.load_again()
        newest_digest = self.newest.tokenizer.digest
        for digest, stop_ids in list(self._compilers):
            if digest != newest_digest:
                self._compilers.pop((digest, stop_ids)).close()
