"""The model that is served: a folder's, or that of a run's newest checkpoint.

When a newer checkpoint appears, it is loaded as a new version.
"""

import hashlib
import json
import time
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from monograph import __version__
from monograph.checkpointing import candidates
from monograph.decode.chain import breakers
from monograph.device import default_device
from monograph.errors import Warn
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.models import load_run, load_with_tokenizer
from monograph.run.recipe import find_run, module_digest
from monograph.serve import shapes
from monograph.session.recorded import run_settings
from monograph.storage.reading import without_links
from monograph.text.chat import stop_ids
from monograph.text.tokenizer import Tokenizer

LAST = "last"


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
        self.model = model.to(default_device()).eval().requires_grad_(False)
        self.rows = 0
        self.context = model.config.max_position_embeddings
        self.created = int(time.time())
        self.breakers = lru_cache(64)(lambda texts: breakers(texts, tokenizer.pieces))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that decides which text a request gets, apart from the request."""
        causes = [self._digest, self.rows, torch.__version__, __version__, str(default_device())]
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
    def longest_token_bytes(self) -> int:
        """The number of bytes of the longest token."""
        return max(map(len, self.tokenizer.pieces))

    def model_entry(self, name: str) -> shapes.Model:
        """Return the entry of /v1/models for one of the version's names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "monograph",
            "max_model_len": self.context,
            "root": self.id,
            "chat": self.has_template,
        }


class Source:
    """A run or folder whose versions are served. It remembers which versions were loaded.

    Attributes:
        name: the name of the run or folder on the command line.
        rows: the maximum number of rows in which texts are written.
        warn: prints a warning.
    """

    def __init__(self, name: str, rows: int, warn: Warn) -> None:
        """Take the name of a run, `last` or a folder; see the attributes."""
        self.name = name
        self.rows = rows
        self.warn = warn
        # The run and its checkpoints when a version was last loaded.
        self._seen = _NO_VERSIONS

    def has_newer(self) -> bool:
        """Return whether there may be a newer version than the one that was loaded last.

        There may be one if a checkpoint's name is new, or if `last` stands for another run now.
        """
        now = self._versions()
        return now.run != self._seen.run or not now.checkpoints <= self._seen.checkpoints

    def load(self) -> Version:
        """Load the newest version that is not damaged; see `monograph.run.models.load` for its errors."""
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

    def _versions(self) -> "_Versions":
        run = find_run(self.name)
        if run is None or run.at_update is not None:
            return _Versions(self.name, frozenset())
        # The newest checkpoint's name alone would not tell whether there is something to load: it may be
        # damaged, and an older one may appear after it.
        names = frozenset(folder.name for _, folder in candidates(run.checkpoints))
        return _Versions(str(without_links(run.folder)), names)


class _Versions(NamedTuple):
    """The run or folder that a source's name stands for, and the names of its checkpoints."""

    run: str
    checkpoints: frozenset[str]


_NO_VERSIONS = _Versions("", frozenset())
