"""The model that is served: a folder's, or that of a run's newest checkpoint.

When a newer checkpoint appears, it is loaded as a new version.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from monograph import __version__
from monograph.checkpointing import list_checkpoints
from monograph.decode.adapter_bank import BASE_SLOT, AdapterBank, install
from monograph.decode.chain import breakers
from monograph.device import default_device
from monograph.errors import Warn
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.adapters import AdapterBase
from monograph.run.models import load_run, load_with_tokenizer
from monograph.run.recipe import find_run, module_digest
from monograph.serve import shapes
from monograph.session.recorded import run_settings
from monograph.storage.reading import without_links
from monograph.text.calls import CallFrame, find_frame, spellings
from monograph.text.chat import stop_ids
from monograph.text.tokenizer import Tokenizer

LAST = "last"
# How many adapters may be added while a server runs, unless the user says otherwise.
SPARE_SLOTS = 8


class Version:
    """The weights of one checkpoint or folder, with everything that a request needs of the model.

    Attributes:
        id: the name of exactly these weights, RUN@UPDATE, or the folder's name.
        names: other names, which newer versions have, too.
        model: the model, on the device.
        tokenizer: the model's tokenizer.
        precision: the precision in which prompts are scored: that of the run, as in
            `monograph evaluate`.
        rows: how many texts are written at once; 0 until the version's decoder sets it.
        context: the maximum number of tokens of a prompt and its text: what the model allows, until
            the version's decoder sets what the memory holds.
        created: when the version was loaded, in seconds since 1970.
        base: the model as the base of adapters.
        bank: the model's adapters; None: it has none, and gets none.
        breakers: a cached function that takes a tuple of texts, and returns which tokens contain one
            of them; see `monograph.decode.chain.breakers`.
    """

    def __init__(
        self,
        identity: str,
        names: tuple[str, ...],
        model: Llama,
        tokenizer: Tokenizer,
        precision: Precision,
    ):
        """Put the model on the device; the arguments are the attributes of the same names."""
        self._digest = module_digest(model)
        self.id = identity
        self.names = names
        self.tokenizer = tokenizer
        self.precision = precision
        self.base = AdapterBase(model, tokenizer, self._digest)
        self.bank: AdapterBank | None = None
        self.model = model.to(default_device()).eval().requires_grad_(False)
        self.rows = 0
        self.context = model.config.max_position_embeddings
        self.created = int(time.time())
        self.breakers = lru_cache(64)(lambda texts: breakers(texts, tokenizer.pieces))

    def give_adapters(self, room: AdapterRoom, warn: Warn) -> None:
        """Read the adapters that are served, and give the model a bank of them, if it may have any.

        Raises:
            InputRefused: an adapter cannot be used with this model.
        """
        if not room.folders and room.directory is None:
            return
        stored = {
            name: self.base.read(folder, warn, room.rank) for name, folder in room.folders.items()
        }
        capacity = room.slots
        if capacity is None:
            spare = 0 if room.directory is None else SPARE_SLOTS
            capacity = len(stored) + spare
        self.bank = install(self.model, stored, capacity=capacity, rank=room.rank)

    def fingerprint(self, slot: int) -> str:
        """Return a digest of all that decides which text a request gets, apart from the request.

        Args:
            slot: the slot of the adapter that writes.
        """
        causes = [self._digest, self.rows, torch.__version__, __version__, str(default_device())]
        if self.bank is not None:
            causes.append(self.bank.digest(slot))
        return "fp_" + hashlib.sha256(json.dumps(causes).encode()).hexdigest()[:12]

    @property
    def capacity(self) -> str:
        """How many texts the version writes at once, and how long they may be, in words."""
        return f"{counted(self.rows, 'row')} of {self.context:,} positions"

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.config.template is not None

    @cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer in a chat."""
        return stop_ids(self.tokenizer, self.model.config.eos_token_ids)

    @cached_property
    def call_frame(self) -> CallFrame:
        """What the chat template writes around the calls of an answer.

        Raises:
            InputRefused: it does not write calls, or in a form that cannot be read again.
        """
        return find_frame(self.tokenizer, self.chat_stop_ids)

    @cached_property
    def spelling_V(self) -> list[str]:
        """How each token is spelled where calls are read."""
        return spellings(self.tokenizer)

    @cached_property
    def longest_token_bytes(self) -> int:
        """The number of bytes of the longest token."""
        return max(map(len, self.tokenizer.pieces))


class ServedModel(NamedTuple):
    """What a request's name of a model stands for: a version, with one of its adapters or without.

    Attributes:
        version: the version.
        adapter: the adapter's name; "" without.
        slot: the adapter's slot in the version's bank.
    """

    version: Version
    adapter: str = ""
    slot: int = BASE_SLOT

    @property
    def id(self) -> str:
        """The name of exactly these weights: RUN@UPDATE, or RUN@UPDATE+ADAPTER."""
        return f"{self.version.id}+{self.adapter}" if self.adapter else self.version.id

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides which text a request gets, apart from the request."""
        return self.version.fingerprint(self.slot)

    def entry(self, name: str) -> shapes.Model:
        """Return the entry of /v1/models for one of the model's names."""
        return {
            "id": name,
            "object": "model",
            "created": self.version.created,
            "owned_by": "monograph",
            "max_model_len": self.version.context,
            "root": self.id,
            "parent": self.version.id if self.adapter else None,
            "chat": self.version.has_template,
        }


class AdapterRoom(NamedTuple):
    """The adapters that are served, and the room for more.

    Attributes:
        folders: the folder or run of each adapter, by its name; it changes as adapters come and go.
        directory: where adapters may be added from; None: none may be added.
        slots: how many there may be at the same time; None: those of the start, and SPARE_SLOTS more
            if there is a directory.
        rank: the largest rank; None: that of the adapters at the start, but at least
            `adapter_bank.LEAST_RANK`.
    """

    folders: dict[str, str]
    directory: Path | None = None
    slots: int | None = None
    rank: int | None = None


class Source:
    """A run or folder whose versions are served. It remembers which versions were loaded.

    Attributes:
        name: the name of the run or folder on the command line.
        rows: the maximum number of rows in which texts are written.
        warn: prints a warning.
        adapters: the adapters that are served.
    """

    def __init__(
        self, name: str, rows: int, warn: Warn, adapters: AdapterRoom | None = None
    ) -> None:
        """Take the name of a run, `last` or a folder; see the attributes."""
        self.name = name
        self.rows = rows
        self.warn = warn
        self.adapters = adapters or AdapterRoom({})
        # The run and its checkpoints when a version was last loaded.
        self._seen = _NO_VERSIONS

    def has_newer(self) -> bool:
        """Return whether there may be a newer version than the one that was loaded last.

        There may be one if a checkpoint's name is new, or if `last` stands for another run now.
        """
        now = self._versions()
        return now.run != self._seen.run or not now.checkpoints <= self._seen.checkpoints

    def load(self) -> Version:
        """Load the newest version that is not damaged, with all adapters.

        Its errors are those of `monograph.run.models.load` and of `Version.give_adapters`.
        """
        version = self._load_base()
        version.give_adapters(self.adapters, self.warn)
        return version

    def _load_base(self) -> Version:
        # The checkpoints are listed before one is chosen. So one that is saved in between still counts
        # as newer afterwards.
        self._seen = self._versions()
        run = find_run(self.name)
        if run is None:
            model, tokenizer = load_with_tokenizer(self.name, self.warn)
            name = without_links(self.name).name
            return Version(name, (LAST,), model, tokenizer, Precision("fp32"))
        model, tokenizer, update = load_run(run, self.warn)
        precision = Precision(run_settings(run, code_keys=()).train.precision)
        name = without_links(run.folder).name
        return Version(f"{name}@{update}", (name, LAST), model, tokenizer, precision)

    def load_again(self) -> None:
        """Make `has_newer` true, as if no version had been loaded."""
        self._seen = _NO_VERSIONS

    def _versions(self) -> _Versions:
        run = find_run(self.name)
        if run is None or run.at_update is not None:
            return _Versions(self.name, frozenset())
        # The newest checkpoint's name alone would not tell whether there is something to load: it may be
        # damaged, and an older one may appear after it.
        names = frozenset(folder.name for _, folder in list_checkpoints(run.checkpoints))
        return _Versions(str(without_links(run.folder)), names)


class _Versions(NamedTuple):
    """The run or folder that a source's name stands for, and the names of its checkpoints."""

    run: str
    checkpoints: frozenset[str]


_NO_VERSIONS = _Versions("", frozenset())
