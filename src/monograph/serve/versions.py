"""The model that is served: a folder's, or that of a run's newest checkpoint.

When a newer checkpoint appears, it is loaded as a new version. Adapters are small changes of the weights
(LoRA): each has a name and a slot in the version's bank, and every request chooses one or none.
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
from monograph.decode.generator import OWN_HEAD, Draft, DraftUse
from monograph.device import default_device
from monograph.errors import UsageError, Warn
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.adapters import AdapterBase
from monograph.run.drafts import naming_draft, require_same_tokens
from monograph.run.models import load_run, load_with_tokenizer
from monograph.run.recipe import find_run, module_digest
from monograph.serve import shapes
from monograph.session.recorded import run_settings
from monograph.storage.reading import without_links
from monograph.text.calls import CallFrame, find_frame, spellings
from monograph.text.chat import stop_ids
from monograph.text.thoughts import Thoughts, find_thoughts
from monograph.text.tokenizer import Tokenizer

LAST = "last"  # a name by which requests can always ask for the model
# How many adapters may be added while a server runs, unless the user says otherwise.
SPARE_SLOTS = 8


class Version:
    """The weights of one checkpoint or folder, with everything that a request needs of the model.

    Attributes:
        id: the name of exactly these weights, RUN@UPDATE, or the folder's name.
        names: other names, which newer versions get, too.
        model: the model, on the device.
        tokenizer: the model's tokenizer.
        precision: the precision in which prompts are scored: that of the run, as in
            `monograph evaluate`.
        rows: how many texts are written at the same time; 0 until the version's decoder sets it.
        context: the maximum number of tokens of a prompt and its text. At first it is what the model
            allows; the version's decoder sets it to what also fits the memory.
        created: when the version was loaded, in seconds since 1970.
        base: reads adapters, and checks that they fit this model.
        bank: the weights of the model's adapters; None: the model has no adapters, and gets none.
        draft: the model that proposes tokens (`monograph.decode.draft`); "mtp": the model's own head does;
            None: nothing does.
        drafts: when it does; see `Generator.drafts`. The version's decoder sets it.
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
        """Put the model on the device; the arguments are the attributes of the same names.

        `identity` is the attribute `id`.
        """
        self._digest = module_digest(model)  # while the model is still on the CPU
        self.id = identity
        self.names = names
        self.tokenizer = tokenizer
        self.precision = precision
        self.base = AdapterBase(model, tokenizer, self._digest)
        self.bank: AdapterBank | None = None
        self.draft: Draft | None = None
        self.drafts: DraftUse = "never"
        self.model = model.to(default_device()).eval().requires_grad_(False)
        self.rows = 0
        self.context = model.config.max_position_embeddings
        self.created = int(time.time())
        self.breakers = lru_cache(64)(lambda texts: breakers(texts, tokenizer.pieces))

    def install_adapters(self, room: AdapterRoom, warn: Warn) -> None:
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
        # The number of rows matters because matrix products of another size may be rounded differently.
        causes = [self._digest, self.rows, torch.__version__, __version__, str(default_device())]
        if self.bank is not None:
            causes.append(self.bank.digest(slot))
        if self.draft is not None and self.drafts != "never":
            # A pass over proposed tokens may be rounded differently, too.
            causes.append(OWN_HEAD if self.draft == OWN_HEAD else self._draft_digest)
        return "fp_" + hashlib.sha256(json.dumps(causes).encode()).hexdigest()[:12]

    @property
    def capacity(self) -> str:
        """How many texts the version writes at the same time, and how long they may be, in words."""
        return f"{counted(self.rows, 'row')} of {self.context:,} positions"

    def set_draft(self, draft: ServedDraft) -> None:
        """Let a draft model propose tokens.

        Raises:
            InputRefused: its tokens are not the model's.
        """
        require_same_tokens(draft.name, draft.tokenizer, self.tokenizer)
        self.draft = draft.model
        self._draft_digest = draft.digest

    def draft_by_own_head(self) -> None:
        """Let the model's own head propose tokens.

        Raises:
            UsageError: the model has none.
        """
        if self.model.mtp is None:
            raise UsageError(
                f"--draft {OWN_HEAD}: {self.id} has no head for multi-token prediction: name a small model"
            )
        self.draft = OWN_HEAD

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
            InputRefused: the template does not write calls, or writes them in a form that cannot be read
                again.
        """
        return find_frame(self.tokenizer, self.chat_stop_ids)

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """What the chat template writes around thoughts; None: no form of thoughts was recognised."""
        return find_thoughts(self.tokenizer) if self.has_template else None

    @cached_property
    def spelling_V(self) -> list[str]:
        """Each token in the form in which calls are read; see `monograph.text.calls.spellings`."""
        return spellings(self.tokenizer)

    @cached_property
    def longest_token_bytes(self) -> int:
        """The number of bytes of the longest token."""
        return max(map(len, self.tokenizer.pieces))


class ServedModel(NamedTuple):
    """What the name of a model in a request stands for: a version, with or without an adapter.

    Attributes:
        version: the version.
        adapter: the adapter's name; "" without an adapter.
        slot: the adapter's slot in the version's bank; BASE_SLOT without an adapter.
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


class ServedDraft(NamedTuple):
    """The draft model of all versions.

    Attributes:
        name: its name on the command line.
        model: the model, on the device.
        tokenizer: its tokenizer.
        digest: a digest of its weights.
    """

    name: str
    model: Llama
    tokenizer: Tokenizer
    digest: str

    @classmethod
    def load(cls, name: str, warn: Warn) -> ServedDraft:
        """Load the run or folder that --draft names.

        Raises:
            MonographError: it cannot be loaded; the message names --draft.
        """
        with naming_draft(name):
            model, tokenizer = load_with_tokenizer(name, warn)
        digest = module_digest(model)  # while the model is still on the CPU
        on_device = model.to(default_device()).eval().requires_grad_(False)
        return cls(name, on_device, tokenizer, digest)


class AdapterRoom(NamedTuple):
    """The adapters that are served, and the room for more.

    Attributes:
        folders: the folder or run of each adapter, by its name; it changes as adapters come and go.
        directory: where adapters may be added from; None: none may be added.
        slots: how many adapters there may be at the same time; None: as many as at the start, and
            SPARE_SLOTS more if there is a directory.
        rank: the largest rank that an adapter may have; None: the largest of the adapters at the start,
            but at least `adapter_bank.LEAST_RANK`.
    """

    folders: dict[str, str]
    directory: Path | None = None
    slots: int | None = None
    rank: int | None = None


class Source:
    """The run or folder whose model is served. It loads versions, and knows when there is a newer one.

    Attributes:
        name: the name of the run or folder on the command line.
        rows: the maximum number of texts that are written at the same time.
        warn: prints a warning.
        adapters: the adapters that are served.
        draft_name: the name of the draft model on the command line; "mtp": the model's own head proposes
            tokens; None: nothing does.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        warn: Warn,
        adapters: AdapterRoom | None = None,
        draft_name: str | None = None,
    ) -> None:
        """Take the name of a run, `last` or a folder; see the attributes."""
        self.name = name
        self.rows = rows
        self.warn = warn
        self.adapters = adapters or AdapterRoom({})
        self.draft_name = draft_name
        # The draft model, which is loaded once and stays the same for all versions.
        self._draft: ServedDraft | None = None
        # The run and its checkpoints at the time when a version was last loaded.
        self._seen = _NO_VERSIONS

    def has_newer(self) -> bool:
        """Return whether there may be a newer version than the one that was loaded last.

        There may be one if there is a checkpoint with a new name, or if `last` now stands for another run.
        """
        now = self._list_versions()
        return now.run != self._seen.run or not now.checkpoints <= self._seen.checkpoints

    def load(self) -> Version:
        """Load the newest version that is not damaged, with all adapters and the draft model.

        Its errors are those of `monograph.run.models.load`, of `Version.install_adapters`, of
        `Version.set_draft` and of `Version.draft_by_own_head`.
        """
        version = self._load_without_adapters()
        if self.draft_name == OWN_HEAD:
            version.draft_by_own_head()
        elif self.draft_name is not None:
            if self._draft is None:
                self._draft = ServedDraft.load(self.draft_name, self.warn)
            version.set_draft(self._draft)
        version.install_adapters(self.adapters, self.warn)
        return version

    def _load_without_adapters(self) -> Version:
        # The checkpoints are listed before one is chosen. So a checkpoint that is saved in between still
        # counts as new afterwards.
        self._seen = self._list_versions()
        run = find_run(self.name)
        if run is None:
            reads_head = self.draft_name == OWN_HEAD
            model, tokenizer = load_with_tokenizer(self.name, self.warn, mtp=reads_head)
            name = without_links(self.name).name
            return Version(name, (LAST,), model, tokenizer, Precision("fp32"))
        model, tokenizer, update = load_run(run, self.warn)
        # Without `code_keys`, none of the run's own code is run. Only one value of the settings is needed.
        precision = Precision(run_settings(run, code_keys=()).train.precision)
        name = without_links(run.folder).name
        return Version(f"{name}@{update}", (name, LAST), model, tokenizer, precision)

    def load_again(self) -> None:
        """Make `has_newer` true, as if no version had been loaded."""
        self._seen = _NO_VERSIONS

    def _list_versions(self) -> _Versions:
        run = find_run(self.name)
        # The model of a folder never changes, nor does that of RUN@UPDATE.
        if run is None or run.at_update is not None:
            return _Versions(self.name, frozenset())
        # All checkpoints are compared, not only the newest one, which may be damaged. Then an older one may
        # appear later.
        names = frozenset(folder.name for _, folder in list_checkpoints(run.checkpoints))
        return _Versions(str(without_links(run.folder)), names)


class _Versions(NamedTuple):
    """The run or folder that a source's name stands for, and the names of its checkpoints."""

    run: str
    checkpoints: frozenset[str]


_NO_VERSIONS = _Versions("", frozenset())
