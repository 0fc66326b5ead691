"""What all requests share: the model's versions, the owner's thread, its gate, and counts.

The *owner* is the thread in which the model runs. A *version* is the model with its weights at one time.
When a run has a newer checkpoint, the checkpoint is loaded as a new version, and the old version is dropped
as soon as no request uses it. An adapter has a numbered *slot* in the version's bank of adapters.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from monograph.errors import MonographError, OutOfDeviceMemory, UsageError
from monograph.run.adapters import require_name
from monograph.serve.compiling import ConstraintCompiler
from monograph.serve.gate import Gate
from monograph.serve.host_constraints import HostConstraints
from monograph.serve.metrics import Histogram, RequestCounts
from monograph.serve.owner import Owner, OwnerEnded
from monograph.serve.refused import Refused
from monograph.serve.versions import ServedModel, Source, Version

POLL_S = 2.0  # a newer version is looked for this often
_AdapterKey = tuple[Version, int]  # a version, and the slot of one of its adapters


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
        # Is locked while a version is loaded, or an adapter is added or removed.
        self._change_lock = asyncio.Lock()
        # The number of requests that use each adapter.
        self._adapter_users: Counter[_AdapterKey] = Counter()
        # The adapters that were removed. Their slots are freed when no request uses them any more.
        self._retired = set[_AdapterKey]()
        # The names of the last adapters that were removed, for the message to requests that still use one.
        self._removed_names = deque[str](maxlen=100)
        # The version that takes new requests.
        self._newest: Version | None = None
        self._has_owner = False
        # The number of requests that use each version.
        self._version_users: Counter[Version] = Counter()
        # The compilers of constraints, each by the digest of its tokenizer and the ids that end a text.
        self._compilers: dict[tuple[str, tuple[int, ...]], ConstraintCompiler] = {}
        # The constraints that the host follows instead of an automaton, by the same keys.
        self._host_constraints: dict[tuple[str, tuple[int, ...]], HostConstraints] = {}

    async def begin(self, on_crash: Callable[[], None]) -> Version:
        """Load the first version, and start the owner's thread and the gate.

        Args:
            on_crash: is called if an error ends the owner's thread.

        Raises:
            MonographError: the model cannot be loaded, or an adapter has one of its names.
        """

        def record_crash(error: Exception) -> None:
            self.crash_error = error
            self.crashed.set()
            on_crash()

        version = await asyncio.to_thread(self.source.load)
        names = self.names_of(version)
        for name in self.source.adapters.folders:
            if name in names:
                raise UsageError(f"--adapter {name}: the model has this name: choose another one")
        self.owner = Owner(self.source.rows, record_crash)
        self._has_owner = True
        await self.owner.add(version)
        self.gate = Gate(self.owner, version.rows)
        self._newest = version
        return version

    async def follow(self) -> None:
        """Load each newer version as soon as it appears.

        Requests that have begun end with the version that they began with. An unforeseen error is reported,
        and no further version is loaded after it.
        """
        # Why the last attempt to load a version failed. The same reason is not printed twice.
        last_fault = ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if not await asyncio.to_thread(self.source.has_newer):
                    last_fault = ""
                    continue
                # A request to add or remove an adapter waits until this is done, so that it changes the new
                # version.
                async with self._change_lock:
                    version = await asyncio.to_thread(self.source.load)
                    previous = self._newest
                    await self.owner.add(version)
                    self.gate.set_rows(version.rows)
                    self._newest = version
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
            self._say(f"now {version.id}: {version.capacity}")
            if previous is not None and not self._version_users[previous]:
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
        """The number of texts that the newest version writes at the same time.

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

    def served_models(self) -> dict[str, ServedModel]:
        """Return the models by name: first the names of the newest version, then those of its adapters.

        Raises:
            Refused: see `newest`.
        """
        version = self.newest
        models = {name: ServedModel(version) for name in self.names_of(version)}
        slots = version.bank.slots if version.bank else {}
        for name, slot in slots.items():
            models.setdefault(name, ServedModel(version, name, slot))
        return models

    @asynccontextmanager
    async def use_model(self, name: str) -> AsyncIterator[ServedModel]:
        """Yield the model with this name, which is not dropped before the end of the block.

        With `any_name`, an unknown name stands for the newest version.

        Raises:
            Refused: there is no model with this name. Even with `any_name`, the name of an adapter that
                was removed is refused.
        """
        models = self.served_models()
        was_removed = name in self._removed_names
        if name not in models and (was_removed or not self._any_name):
            known = ", ".join(models)
            if was_removed:
                message = f"the adapter {name!r:.80} was removed: expected {known}"
            else:
                hint = "other names: `monograph serve` with --served-name or --any-name"
                message = f"there is no model {name!r:.80}: expected {known} ({hint})"
            raise Refused(404, message, "model", "model_not_found")
        model = models.get(name, ServedModel(self.newest))
        version = model.version
        # A model without an adapter is counted, too, under the slot of the base model. It is never retired.
        adapter = version, model.slot
        self._version_users[version] += 1
        self._adapter_users[adapter] += 1
        try:
            yield model
        finally:
            self._adapter_users[adapter] -= 1
            self._free_if_unused(adapter)
            self._version_users[version] -= 1
            if version is not self._newest and not self._version_users[version]:
                self._drop(version)

    async def add_adapter(self, name: str, folder: str) -> ServedModel:
        """Read an adapter from a folder of the directory, and let requests use it by its name.

        Raises:
            Refused: the name is taken or unusable, there is no such folder, the adapter does not fit the
                model, or there is no room for it.
        """
        directory = self.source.adapters.directory
        if directory is None or self.newest.bank is None:
            raise Refused(403, "no adapters may be added: start the server with --adapter-dir")
        # A client can name only a folder that is directly in the directory, and no other place of this machine.
        if folder in ("", ".", "..") or not folder.isprintable() or Path(folder).name != folder:
            message = f"lora_path = {folder!r:.80}: expected the name of a folder in --adapter-dir"
            raise Refused(400, message, "lora_path")
        place = directory / folder
        async with self._change_lock:
            version = self.newest
            bank = version.bank
            assert bank is not None  # if one version has a bank, all have one
            if name in self.served_models():
                message = f"lora_name: there is a model {name!r:.80} already"
                raise Refused(400, message, "lora_name")
            try:
                require_name("lora_name", name)
            except MonographError as error:
                raise Refused(400, str(error), "lora_name") from None
            try:
                bank.require_free_slot()
            except MonographError as error:
                # No field of the request is wrong.
                raise Refused(400, str(error)) from None
            try:
                stored = await asyncio.to_thread(
                    version.base.read, place, self.source.warn, bank.rank
                )
                slot = await self.owner.call(lambda: bank.add(name, stored))
            except MonographError as error:
                # A client need not know where the directory is.
                message = str(error).replace(f"{directory}/", "")
                raise Refused(400, message, "lora_path") from None
            self.source.adapters.folders[name] = str(place)
        self._say(f"adapter {name} added: {folder}")
        return ServedModel(version, name, slot)

    async def remove_adapter(self, name: str) -> None:
        """Let no new request use an adapter.

        Its slot becomes free when the requests that have begun with it have ended.

        Raises:
            Refused: there is no adapter with this name.
        """
        async with self._change_lock:
            version = self.newest
            bank = version.bank
            if bank is None or name not in bank.slots:
                names = list(bank.slots) if bank is not None else []
                known = ", ".join(names) or "none"
                message = f"there is no adapter {name!r:.80}: expected {known}"
                raise Refused(404, message, "lora_name", "model_not_found")
            adapter = version, bank.retire(name)
            self._retired.add(adapter)
            self._free_if_unused(adapter)
            self.source.adapters.folders.pop(name, None)
            self._removed_names.append(name)
        self._say(f"adapter {name} removed")

    def _free_if_unused(self, adapter: _AdapterKey) -> None:
        """Free the slot of an adapter if it was removed and no request uses it any more."""
        if self._adapter_users[adapter]:
            return
        del self._adapter_users[
            adapter
        ]  # otherwise a Counter would keep the key, with a count of 0
        if adapter in self._retired:
            self._retired.remove(adapter)
            version, slot = adapter
            assert version.bank is not None
            version.bank.free(slot)

    def compiler_for(self, version: Version, stop_ids: Sequence[int]) -> ConstraintCompiler:
        """Return the compiler of automata for a version's tokenizer."""
        key = version.tokenizer.digest, tuple(stop_ids)
        if key not in self._compilers:
            self._compilers[key] = ConstraintCompiler(version.tokenizer.pieces, stop_ids)
        return self._compilers[key]

    def host_constraints_for(self, version: Version, stop_ids: Sequence[int]) -> HostConstraints:
        """Return the constraints that the host follows, for a version's tokenizer."""
        key = version.tokenizer.digest, tuple(stop_ids)
        if key not in self._host_constraints:
            pieces = version.tokenizer.pieces
            compiler = self.compiler_for(version, stop_ids)
            self._host_constraints[key] = HostConstraints(compiler, pieces, stop_ids, self._say)
        return self._host_constraints[key]

    def metrics_text(self) -> str:
        """Return all counts in Prometheus' text format.

        Raises:
            Refused: see `newest`.
        """
        _ = self.newest  # the property raises `Refused` as long as there is no `owner`
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
            ("drafted_passes_total", "counter", counts.drafted_passes),
            ("drafted_tokens_total", "counter", counts.drafted_tokens),
        )
        for name, kind, value in values:
            lines += [f"# TYPE monograph_{name} {kind}", f"monograph_{name} {value}"]
        lines += self.first_token_s.lines("monograph_first_token_seconds")
        lines += self.request_s.lines("monograph_request_seconds")
        return "\n".join(lines) + "\n"

    def _drop(self, version: Version) -> None:
        """Free an old version that no request uses any more, and the compilers that only it needed."""
        del self._version_users[version]
        self.owner.drop(version)
        if self._newest_did_not_fit:
            # Its memory is free now, so the newest version may fit.
            self._newest_did_not_fit = False
            self.source.load_again()
        newest_digest = self.newest.tokenizer.digest
        for digest, stop_ids in list(self._compilers):
            if digest != newest_digest:
                self._compilers.pop((digest, stop_ids)).close()
