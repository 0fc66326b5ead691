"""Read adapters that are not merged into their model, so that each text can have its own adapter.

An adapter is a folder that PEFT can load, or a run with adapters. It must have been trained on the
model's weights: their digest is compared if it is recorded. The adapter's matrices are read into a
*skeleton*: a copy of the model whose own weights have no numbers. Only if the adapter trains rows of the
embedding and the head do these two have theirs.

Shape suffixes: V the vocabulary, D the model's width.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from monograph.checkpointing import Checkpoint
from monograph.decode.adapter_bank import (
    BASE,
    MERGE,
    StoredAdapter,
    require_rank,
    stored_adapter,
)
from monograph.errors import InputRefused, UsageError, Warn
from monograph.graph.lora import Lora, adapt
from monograph.model import adapter, hub
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.run import recorded_state
from monograph.run.folder import Run
from monograph.run.models import load_weights, weights_of
from monograph.run.recipe import ModelRecipe, find_run, module_digest, recorded_lora
from monograph.text.tokenizer import Tokenizer

MAX_NAME_LENGTH = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class AdapterBase:
    """A model as the base of adapters.

    Attributes:
        config: its shape.
        tokenizer: its tokenizer.
        dtype: the dtype of its weights.
        digest: a function that returns the `module_digest` of its weights.
    """

    def __init__(self, model: Llama, tokenizer: Tokenizer, digest: str | None = None) -> None:
        """Take a model without adapters.

        Args:
            model: the model; it must be on the CPU unless the digest is given.
            tokenizer: its tokenizer.
            digest: its `module_digest`, or None if it is not known yet.
        """
        self._model = model
        # Adapters are trained without a head for multi-token prediction, which a run may have.
        self.config: LlamaConfig = replace(model.config, mtp_num_hidden_layers=0)
        self.tokenizer = tokenizer
        self.dtype = model.lm_head.weight.dtype
        # The digest is computed only once it is asked for, since that reads all weights. Most folders of
        # PEFT record no digest, so that there is nothing to compare it with.
        self.digest = cache(lambda: digest or module_digest(model))

    def read(
        self, folder: str | Path, warn: Warn = lambda line: None, max_rank: int | None = None
    ) -> StoredAdapter:
        """Return the adapter in a folder or a run.

        Args:
            folder: a folder that PEFT can load, or a run with adapters, or `last`.
            warn: called with each line that the user should read.
            max_rank: the largest rank that an adapter may have; None for no limit.

        Raises:
            InputRefused: there is no adapter, or it was trained on another base, or has numbers that are not
                finite, or parts that can only be merged. The message names the folder and the key.
        """
        if adapter.is_adapter(folder):
            return self._read_peft(Path(folder), max_rank)
        run = find_run(folder)
        if run is None:
            raise InputRefused(
                f"{folder}: has no adapter: expected a folder with {adapter.CONFIG_FILE}, or a run with lora.rank"
            )
        return self._read_run(run, recorded_state.load_newest(run, warn), max_rank)

    def _read_peft(self, folder: Path, max_rank: int | None) -> StoredAdapter:
        stored = adapter.read_adapter(folder)
        stored.require_base_shape(self.config)
        if stored.weights_sha256 is not None:
            self._require_digest(
                stored.weights_sha256, folder, f"weights_sha256 of {adapter.BASE_FILE}"
            )
        file = hub.tokenizer_file(folder)
        if file and Tokenizer.from_file(file).digest != self.tokenizer.digest:
            raise InputRefused(
                f"{folder}: tokenizer.json is not that of this model: new tokens can only be merged: {MERGE}"
            )
        lora = stored.lora_on(self.config)
        _require_max_rank(lora, str(folder), max_rank)
        skeleton = self._skeleton(lora)
        adapter.install_adapters(skeleton, lora, start=stored, device=torch.device("cpu"))
        return stored_adapter(skeleton, lora, str(folder))

    def _read_run(self, run: Run, checkpoint: Checkpoint, max_rank: int | None) -> StoredAdapter:
        recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
        if recipe.lora is None:
            raise InputRefused(f"{run.folder}: has no adapter: it was trained without lora.rank")
        if checkpoint.state["model_config"] is None or recipe.code:
            raise InputRefused(f"{run.folder}: model.init: its base is a module of its own")
        if recipe.vocabulary:
            raise InputRefused(f"{run.folder}: its new tokens can only be merged: {MERGE}")
        self._require_digest(str(recipe.base_sha256), run.folder, "model.init")
        # "auto" leaves the base in the dtype of this model, even if the run trained with it in 4 or 8 bits.
        lora = recorded_lora(recipe.lora | {"base": "auto"})
        _require_max_rank(lora, str(run.folder), max_rank)
        skeleton = self._skeleton(lora)
        adapt(skeleton, lora, device=torch.device("cpu"))
        load_weights(skeleton, weights_of(checkpoint))
        for name, tensor in adapter.adapter_state(skeleton).items():
            adapter.require_finite(f"{run.folder}: {name} of its newest checkpoint", tensor)
        return stored_adapter(skeleton, lora, str(run.folder))

    def _require_digest(self, recorded: str, folder: Path, key: str) -> None:
        """Require that an adapter records the digest of this model; the message names folder and key."""
        if recorded != self.digest():
            raise InputRefused(
                f"{folder}: {key}: this adapter was trained on other weights than those of this model"
            )

    def _skeleton(self, lora: Lora) -> Llama:
        """Return a model of this shape whose weights have no numbers (on torch's meta device).

        If the adapter trains rows of tokens, the embedding and the head have the model's numbers, on the
        CPU.
        """
        with torch.device("meta"):
            skeleton = Llama(self.config).to(self.dtype)
        if lora.tokens:
            embedding_VD = self._model.model.embed_tokens.weight.detach().cpu()
            skeleton.model.embed_tokens.weight = nn.Parameter(embedding_VD)
            if not self.config.tie_word_embeddings:
                head_VD = self._model.lm_head.weight.detach().cpu()
                skeleton.lm_head.weight = nn.Parameter(head_VD)
            skeleton.tie_weights()
        return skeleton


def _require_max_rank(lora: Lora, place: str, max_rank: int | None) -> None:
    """Refuse an adapter whose rank is too large, before its numbers are read."""
    if max_rank is not None:
        require_rank(lora.rank, max_rank, place)


def named_folders(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return the folders of adapters by name, from texts NAME=FOLDER of the command line.

    Args:
        flag: the flag that the texts were given with, for messages.
        pairs: the texts.

    Raises:
        UsageError: a text has another form, or a name is unusable or given twice.
    """
    folders = dict[str, str]()
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not folder:
            raise UsageError(f"{flag} {pair}: expected NAME=FOLDER")
        require_name(flag, name)
        if name in folders:
            raise UsageError(f"{flag} {pair}: the name {name} is given twice")
        folders[name] = folder
    return folders


def require_name(origin: str, name: str) -> None:
    """Refuse an adapter's name that means the base, is too long, or has characters that would have to be
    escaped in an address such as /v1/models/NAME, in a shell or in a file's name.

    Args:
        origin: the flag or field that the name comes from, for the message.
        name: the name.

    Raises:
        UsageError: the name is unusable.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise UsageError(
            f"{origin} {name!r:.80}: expected a name such as poet-2: a letter or digit (a-z, A-Z, 0-9), then up to "
            f"{MAX_NAME_LENGTH - 1} of these and of . _ -"
        )
    if name == BASE:
        raise UsageError(f"{origin} {name}: this name means the model without an adapter")
