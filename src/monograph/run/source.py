"""Open the model that a run starts from: what its name stands for is found out once, and then
known.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from monograph.model import hub
from monograph.model.adapter import Adapter, is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.run import recorded_state
from monograph.run.folder import Run
from monograph.run.recipe import is_weight_file, own_file, run_named, tokenizer_of
from monograph.storage.code import Code, code_named, folder_named
from monograph.storage.reading import is_folder


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
        same = type(self)(name, adapter)
        facts = ("run", "is_weight_file", "shape", "positions", *(("base",) if adapter else ()))
        vars(same).update((fact, value) for fact, value in vars(self).items() if fact in facts)
        return same

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
        other = self.base.endswith(".py") or self.code or self.is_weight_file or self.run
        return hub.read_config(self.base) if not other and is_folder(self.base) else None

    @cached_property
    def positions(self) -> int | None:
        """Return how many positions the model has; None if only loading tells."""
        if self.run is None:
            return self.shape.max_position_embeddings if self.shape else None
        recorded = recorded_state.newest_state(self.run).get("model_config")
        return LlamaConfig.from_hf(recorded).max_position_embeddings if recorded else None

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
