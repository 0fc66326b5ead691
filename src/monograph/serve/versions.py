"""The model that is served: a run's newest checkpoint or a folder, loaded again when the run has
moved on.
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
from monograph.run.recipe import digest, run_named
from monograph.serve import shapes
from monograph.session.recorded import run_settings
from monograph.storage.reading import without_links
from monograph.text.chat import stop_ids
from monograph.text.tokenizer import Tokenizer

LAST = "last"


class Version:
    """A model at one time, with what a request needs of it.

    Attributes:
        id: the name of exactly these weights, RUN@UPDATE, or the folder's name.
        names: other names, which later versions take over.
        model: the model.
        tokenizer: its tokenizer.
        precision: the precision in which a text is scored, that of the run, as `monograph evaluate`
            does.
        rows, context: texts written at once, and the most tokens of a prompt and its text, as the
            memory holds them.
        created: when it was loaded, in seconds since 1970.
        breakers: `monograph.decode.chain.breakers` of a tuple of texts, by its pieces; the last
            answers are kept.
    """

    def __init__(
        self,
        identity: str,
        names: tuple[str, ...],
        model: Llama,
        tokenizer: Tokenizer,
        precision: Precision,
    ):
        """Put the model on the device."""
        self._digest = digest(model)
        self.id = identity
        self.names = names
        self.tokenizer = tokenizer
        self.precision = precision
        self.model = model.to(default_device()).eval().requires_grad_(False)
        # until it has a decoder
        self.rows = 0
        self.context = model.config.max_position_embeddings
        self.created = int(time.time())
        self.breakers = lru_cache(64)(lambda texts: breakers(texts, tokenizer.pieces))

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of all that decides the bits of a text beside its request."""
        decisive = [self._digest, self.rows, torch.__version__, __version__, str(default_device())]
        return "fp_" + hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:12]

    @property
    def size(self) -> str:
        """Return how many texts of how many tokens it writes at once."""
        return f"{counted(self.rows, 'row')} of {self.context:,} positions"

    @property
    def has_template(self) -> bool:
        """Return whether messages are put together by the model's own template."""
        return self.tokenizer.config.template is not None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the ids that end an answer in a chat."""
        return stop_ids(self.tokenizer, self.model.config.ends)

    @cached_property
    def longest_piece(self) -> int:
        """Return the bytes of the longest token."""
        return max(map(len, self.tokenizer.pieces))

    def shown(self, name: str) -> shapes.Model:
        """Return the entry of /v1/models under one of its names."""
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
    """What the command line names, and which of its versions was loaded last."""

    def __init__(self, name: str, rows: int, warn: Warn) -> None:
        """Take a run, `last` or a folder, and the rows in which its texts are written."""
        self.name = name
        self.rows = rows
        self.warn = warn
        self._seen = _NOTHING

    def moved(self) -> bool:
        """Return whether there may be a version that was not loaded yet: a checkpoint's name is
        new, or the run is.
        """
        now = self._versions()
        return now.run != self._seen.run or not now.checkpoints <= self._seen.checkpoints

    def load(self) -> Version:
        """Load the newest sound version; see `monograph.run.models.load` for what it raises."""
        # Looked up first: a checkpoint that comes meanwhile is then loaded by the next call.
        self._seen, run = self._versions(), run_named(self.name)
        if run is None:
            model, tokenizer = load_with_tokenizer(self.name, self.warn)
            name = without_links(self.name).name
            return Version(name, (LAST,), model, tokenizer, Precision("fp32"))
        model, tokenizer, update = load_run(run, self.warn)
        precision = Precision(run_settings(run, runs=()).train.precision)
        name = without_links(run.folder).name
        return Version(f"{name}@{update}", (name, LAST), model, tokenizer, precision)

    def again(self) -> None:
        """Let the newest version count as one that was not loaded yet."""
        self._seen = _NOTHING

    def _versions(self) -> "_Versions":
        run = run_named(self.name)
        if run is None or run.at is not None:
            return _Versions(self.name, frozenset())
        # All names, as the newest one may be damaged for good, or no checkpoint at all.
        names = frozenset(folder.name for _, folder in candidates(run.checkpoints))
        return _Versions(str(without_links(run.folder)), names)


class _Versions(NamedTuple):
    """What a name stands for: a run, and the names of its checkpoints."""

    run: str
    checkpoints: frozenset[str]


_NOTHING = _Versions("", frozenset())
