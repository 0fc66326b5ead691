"""Open the model that a run starts from: what its name stands for is found out once, and then
known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from monograph.errors import InputRefused
from monograph.model import hub, torch_file
from monograph.model.adapter import Adapter, is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.model.files import has_weights
from monograph.run import recorded_state
from monograph.run.folder import Run, no_folder
from monograph.run.recipe import Recipe, is_weight_file, own_file, run_named, tokenizer_of
from monograph.storage.code import Code, code_named, folder_named
from monograph.storage.reading import exists, is_folder


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: a run, a Hugging Face folder, a file of torch.save, a Python function,
    or an adapter on one.

    Attributes:
        name: what `model.init` says.
        adapter: the stored adapter that it names; None if it names a whole model.
    """

    name: str
    adapter: Adapter | None

    @classmethod
    def open(cls, name: str) -> Self:
        """Find out whether the name is an adapter's, and read its configuration.

        Raises:
            InputRefused: it is one, and cannot be used.
        """
        return cls(name, read_adapter(name) if is_adapter(name) else None)

    def under(self, name: str) -> Self:
        """Return the same model under another name, such as its full path; what is known of it
        stays known.
        """
        adapter = self.adapter._replace(folder=Path(name)) if self.adapter else None
        return self._known_for(type(self)(name, adapter), *(("base",) if adapter else ()))

    def _known_for(self, other: Self, *more: str) -> Self:
        """Return another source that has the same weights, of which all is known that is known of
        these.
        """
        facts = {"run", "is_weight_file", "shape", "positions", *more}
        vars(other).update((fact, value) for fact, value in vars(self).items() if fact in facts)
        return other

    @cached_property
    def base(self) -> str:
        """Return what has the weights, which is an adapter's base or the name itself.

        Raises:
            InputRefused: an adapter's base is no folder here.
        """
        return resolved_base(self.adapter) if self.adapter else self.name

    @property
    def code(self) -> Code | None:
        """Return the Python function that builds the model, if one does."""
        return code_named(self.base)

    @cached_property
    def run(self) -> Run | None:
        """Return the run that has the weights, if one has."""
        return run_named(self.base)

    @cached_property
    def is_weight_file(self) -> bool:
        """Return whether a file of torch.save has the weights."""
        return is_weight_file(self.base)

    @cached_property
    def shape(self) -> LlamaConfig | None:
        """Return the shape in a Hugging Face folder's config.json; None for a model whose shape
        only loading tells.
        """
        return hub.read_config(self.base) if self._is_folder else None

    @property
    def _is_folder(self) -> bool:
        """Return whether a Hugging Face folder has the weights."""
        other = self.base.endswith(".py") or self.code or self.is_weight_file or self.run
        return not other and is_folder(self.base)

    @cached_property
    def positions(self) -> int | None:
        """Return how many positions the model has; None if only loading tells."""
        if self.run is None:
            return self.shape.max_position_embeddings if self.shape else None
        recorded = recorded_state.newest_state(self.run).get("model_config")
        return LlamaConfig.from_hf(recorded).max_position_embeddings if recorded else None

    @property
    def left_out(self) -> str:
        """Return which tensors of a Hugging Face folder are left out, as no text model has them,
        such as "a.*, b.*".
        """
        held = self._is_folder and has_weights(Path(self.base))
        return ", ".join(f"{name}*" for name in hub.left_out(self.base)) if held else ""

    def require_headers(self, sizes: Mapping[str, Any]) -> None:
        """Refuse weights that cannot be used, as far as the headers of their files show.

        Args:
            sizes: the sizes that the user gave, which complete a file of torch.save.

        Raises:
            InputRefused: they cannot be used, or are not those that the adapter was trained on.
        """
        if self.adapter:
            base = self.open(self.base)
            base = base if base.adapter else self._known_for(base)
            base.require_headers(sizes)
            self.adapter.require(base.shape)
        elif self.is_weight_file:
            torch_file.read(Path(self.name), sizes)
        elif self.run is None:
            if not exists(self.name):
                raise InputRefused(no_folder(self.name))
            hub.read_headers_of(self.name, self.shape)

    @property
    def kept(self) -> str:
        """Return the name under which a run records it: a run's folder, since `last` will soon name
        the new run.
        """
        return folder_named(self.run.named) if self.run and not self.adapter else self.name

    @cached_property
    def tokenizer(self) -> str:
        """Return its tokenizer.json: an adapter's own, which may have more tokens than its base and
        a chat template.

        Raises:
            InputRefused: there is none.
        """
        return str(tokenizer_of(self.name))

    @cached_property
    def own_tokenizer(self) -> str:
        """Return the path of the tokenizer.json that belongs to what the name says, existing or
        not.
        """
        return str(own_file(self.name))


def checked(recipe: Recipe, source: ModelSource | None) -> Recipe:
    """Return a recipe that can be followed, as far as headers show; of a function it has the digest
    of the file.

    Args:
        recipe: the recipe.
        source: the model that it starts from, opened; None for a new one.

    Raises:
        InputRefused: sizes do not fit together, or a folder or file cannot be used.
    """
    if source is None:
        recipe.shape(vocab_size=1)
    elif source.code:
        return recipe._replace(sha256=recipe.vouched.get(source.code.value) or source.code.digest())
    else:
        source.require_headers(recipe.sizes)
    return recipe
