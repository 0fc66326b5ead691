"""Open the model that a run starts from.

`ModelSource` finds out what the model's name stands for, and remembers each answer, so that no
later question reads the disk again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from monograph.errors import InputRefused
from monograph.model import hub, torch_file
from monograph.model.adapter import Adapter, is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.model.files import has_weights
from monograph.model.mtp import MTP_PREFIX
from monograph.run import recorded_state
from monograph.run.folder import Run, no_folder
from monograph.run.recipe import (
    ModelRecipe,
    find_run,
    is_weight_file,
    require_tokenizer,
    tokenizer_path,
)
from monograph.storage.code import Code, code_named, folder_named
from monograph.storage.reading import exists, is_folder


@dataclass(frozen=True)
class ModelSource:
    """A model that a run can start from.

    The model is a run, a Hugging Face folder, a file of torch.save, a Python function, or a stored
    adapter and its base. In all cases "the base" means the part that has the weights: the adapter's base,
    or else the model itself.

    Attributes:
        name: the value of `model.init`.
        adapter: the stored adapter that `name` names; None for a whole model.
        mtp: whether the run trains the model's head for multi-token prediction. Otherwise the model is
            loaded without it.
    """

    name: str
    adapter: Adapter | None
    mtp: bool = False

    @classmethod
    def open(cls, name: str, mtp: bool = False) -> Self:
        """Return the model that a name stands for. An adapter's configuration is read now.

        Args:
            name: the name.
            mtp: see the class.

        Raises:
            InputRefused: the adapter cannot be used.
        """
        return cls(name, read_adapter(name) if is_adapter(name) else None, mtp)

    def renamed(self, name: str) -> Self:
        """Return the same model under another name, e.g. its full path, with all cached answers."""
        if self.adapter is None:
            return self._with_cached_answers(type(self)(name, None, self.mtp))
        adapter = self.adapter._replace(folder=Path(name))
        # The base of an adapter does not depend on the adapter's own name.
        return self._with_cached_answers(type(self)(name, adapter, self.mtp), "base")

    def _with_cached_answers(self, other: Self, *more: str) -> Self:
        """Copy cached answers to another source with the same base, and return that source.

        Args:
            other: the source that gets the answers.
            more: names of properties to copy, in addition to those that depend only on the base.
        """
        copied_properties = {"run", "is_weight_file", "shape", "config", "few_bits", *more}
        # `cached_property` stores its value in the instance's dict, under the property's name.
        for name, value in vars(self).items():
            if name in copied_properties:
                vars(other)[name] = value
        return other

    @cached_property
    def base(self) -> str:
        """Return the name of what has the weights: the adapter's base, or `name`.

        Raises:
            InputRefused: the adapter's base is not a folder on this machine.
        """
        return resolved_base(self.adapter) if self.adapter else self.name

    @property
    def code(self) -> Code | None:
        """Return the Python function that builds the base; None if the base is anything else."""
        return code_named(self.base)

    @cached_property
    def run(self) -> Run | None:
        """Return the run that is the base; None if the base is anything else."""
        return find_run(self.base)

    @cached_property
    def is_weight_file(self) -> bool:
        """Return whether the base is a file of torch.save."""
        return is_weight_file(self.base)

    @cached_property
    def shape(self) -> LlamaConfig | None:
        """Return the shape in the config.json of a Hugging Face folder; None for any other base."""
        return hub.read_config(self.base, self.mtp) if self._is_folder else None

    @property
    def _is_folder(self) -> bool:
        """Return whether the base is a Hugging Face folder."""
        if self.base.endswith(".py") or self.code or self.is_weight_file or self.run:
            return False
        return is_folder(self.base)

    @cached_property
    def config(self) -> LlamaConfig | None:
        """Return the base's configuration; None if only loading the base can tell."""
        if self.run is None:
            return self.shape
        recorded = recorded_state.newest_state(self.run).get("model_config")
        if not recorded:
            return None
        config = LlamaConfig.from_hf(recorded)
        return config if self.mtp else replace(config, mtp_num_hidden_layers=0)

    @property
    def positions(self) -> int | None:
        """Return the base's number of positions; None if only loading the base can tell."""
        return self.config.max_position_embeddings if self.config else None

    @property
    def left_out(self) -> str:
        """Return the tensors of a Hugging Face folder or a run that are not loaded, such as "a.*, b.*".

        They belong to parts that no text model has, or that are not trained. The result is "" if there
        are none, or if the base is anything else.
        """
        if self.run is not None:
            recorded = recorded_state.newest_state(self.run).get("model_config") or {}
            has_head = bool(recorded.get("mtp_num_hidden_layers"))
            return f"{MTP_PREFIX}*" if has_head and not self.mtp else ""
        if not self._is_folder or not has_weights(Path(self.base)):
            return ""
        return ", ".join(f"{prefix}*" for prefix in hub.prefixes_left_out(self.base, self.mtp))

    @property
    def assumption(self) -> str:
        """Return a line that says how a folder of an unknown model_type is computed; "" if there is
        nothing to say.
        """
        return hub.assumption(self.base) if self._is_folder else ""

    @cached_property
    def few_bits(self) -> hub.FewBits | None:
        """Return in which form a Hugging Face folder has weights in 4 or 8 bits; None if it has none,
        or if the base is anything else.
        """
        if not self._is_folder or not has_weights(Path(self.base)):
            return None
        return hub.read_few_bits(self.base, self.shape)

    def require_headers(self, sizes: Mapping[str, Any]) -> None:
        """Require usable weights, as far as the headers of their files show; no weights are read.

        Args:
            sizes: the user's sizes, for those that a file of torch.save does not record.

        Raises:
            InputRefused: the weights cannot be used, or the adapter was trained on another base.
        """
        if self.adapter:
            base = self.open(self.base, self.mtp)
            # The cached answers of this source are about `self.base`, so `base` can have them. But if `base` is
            # an adapter itself, its answers must be about a base of its own.
            if base.adapter is None:
                base = self._with_cached_answers(base)
            base.require_headers(sizes)
            self.adapter.require_base_shape(base.shape)
        elif self.is_weight_file:
            torch_file.read(Path(self.name), sizes)
        elif self.run is None:
            if not exists(self.name):
                raise InputRefused(no_folder(self.name))
            hub.read_checked_headers(self.name, self.shape)
        elif self.mtp and self.config is not None and not self.config.mtp_num_hidden_layers:
            raise InputRefused(
                f"{self.name} was trained without a head for multi-token prediction: leave "
                "model.mtp_num_hidden_layers out"
            )

    @property
    def recorded_name(self) -> str:
        """Return the name under which a new run records this model: a run's folder, or `name`.

        It is never "last", since that means the new run as soon as it has begun.
        """
        if self.run and not self.adapter:
            return folder_named(self.run.named_path)
        return self.name

    @cached_property
    def tokenizer(self) -> str:
        """Return the path of the model's tokenizer.json.

        It is the adapter's own if there is one, since that may have more tokens than the base's and
        a chat template.

        Raises:
            InputRefused: there is no tokenizer.json.
        """
        return str(require_tokenizer(self.name))

    @cached_property
    def own_tokenizer(self) -> str:
        """Return the path of the tokenizer.json next to `name`, which may not exist.

        The path is only compared with the one that the settings name. So if no path is known, the text
        "None" will do, which equals no path.
        """
        return str(tokenizer_path(self.name))


def checked_recipe(recipe: ModelRecipe, source: ModelSource | None) -> ModelRecipe:
    """Check a recipe as far as the headers of files show, and return it.

    If a Python function builds the module, the returned recipe has the digest of its file.

    Args:
        recipe: the recipe.
        source: the model that the recipe starts from; None for a new one.

    Raises:
        InputRefused: the sizes do not fit together, or a folder or file cannot be used.
    """
    if source is None:
        # Called to refuse sizes that do not fit together. The tokenizer, which gives the size of the
        # vocabulary, is not read yet, so any size will do.
        recipe.shape(vocab_size=1)
    elif source.code:
        return recipe._replace(sha256=recipe.vouched.get(source.code.value) or source.code.digest())
    else:
        source.require_headers(recipe.sizes)
    return recipe
