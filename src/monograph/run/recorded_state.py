"""Check the state that a run's checkpoint records next to its tensors, and set random generators to
it.

The digests of a checkpoint show that its bytes are those that were written, but anybody can write
bytes and matching digests. So each reader of a run checks the types, the ranges and whether the
parts agree, before it uses any of them.
"""

import json
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from monograph import checkpointing
from monograph.checkpointing import Checkpoint, CheckpointDamaged
from monograph.errors import InputRefused, MonographError, Warn
from monograph.model import sampling_defaults
from monograph.model.config import LlamaConfig
from monograph.run.folder import TEACHERS, Run
from monograph.run.recipe import lora_of

MOST_TOKENS = 2**24  # of a tokenizer, since a row of weights is made for each
# Of updates, tokens, rows and bytes; no run has more, and a larger number would mean endless work.
MOST = 10**15
_MOST_SHOWN = 60

Natural = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern="^[a-z][a-z_]*[.][a-z]+$")]  # in the run's own folder
Pair = Annotated[list[Natural], Field(min_length=2, max_length=2)]
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True)]
# The words of NumPy's generator MT19937, and its position among them.
Words = Annotated[
    list[Annotated[Int, Field(ge=0, lt=2**32)]], Field(min_length=624, max_length=624)
]
Place = Annotated[Int, Field(ge=0, le=624)]
_FROM_LIST = Field(strict=False)  # JSON has no tuples; the items stay strict


class Strict(BaseModel):
    """The base of records from JSON files, which converts no value to another type."""

    model_config = ConfigDict(strict=True)


class _Counters(Strict):
    index: Natural
    applied: Natural
    tokens: Natural
    skipped: Natural
    loss_scale: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    good: Natural = 0
    recent: list[list[FiniteFloat]] = []


class _Position(Strict):
    seed: Seed
    rows: Natural
    skip: list[Pair] = []


class _Generators(Strict):
    python: Annotated[tuple[Int, list[Int], Float | None], _FROM_LIST]
    # Unchecked by numpy.
    numpy: Annotated[tuple[Literal["MT19937"], Words, Place, Int, Float], _FROM_LIST]
    torch: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]
    cuda: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None


class _Recipe(Strict):
    init: Text | None
    preset: Text
    sizes: dict[str, bool | Natural]
    seed: Seed
    sha256: Digest | None = None
    lora: dict[str, Any] | None = None
    adapter: Text | None = None
    base_sha256: Digest | None = None
    vocabulary: Pair | None = None
    family: Text | None = None


class _Versions(Strict):
    monograph: str
    torch: str
    python: str


class _State(Strict):
    engine: _Counters
    data: _Position
    random: _Generators
    micro_batch: Annotated[int, Field(gt=0, le=MOST)] | None
    length: Annotated[Natural, Field(ge=1)]
    cooled: Pair | None
    budget_s: Seconds | None
    elapsed_s: Seconds
    metrics_offset: Natural
    metrics_sha256: Digest | None = None
    fingerprint: str
    tokenizer: Digest
    tokenizer_files: dict[Text, Digest] | None = None
    settings: Digest
    recipe: _Recipe
    attention: str | None = None
    files: dict[FileName, Digest] = {}
    teachers: Digest | None = None  # of an earlier version: that of teachers.json
    shape: dict[str, Any] | None = Field(alias="model_config")
    sampling: dict[str, Any] | None = None
    versions: _Versions


def recorded_files(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of the files in a run's folder that it learns from, by name, as a
    checkpoint's state records them.
    """
    earlier = state.get("teachers")
    return {**({TEACHERS: earlier} if earlier else {}), **state.get("files", {})}


def newest(run: Run, warn: Warn) -> Checkpoint:
    """Load a run's newest checkpoint that passes verification, or the one of `run.at`, and check
    its state.

    Raises:
        InputRefused: the state is not one that a run records; see `require`.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    checkpoint = checkpointing.newest(run.checkpoints, warn, at=run.at)
    require(checkpoint.state, checkpoint.update, run)
    return checkpoint


def state_in(folder: Path, run: Run) -> dict[str, Any]:
    """Return the checked state in the folder of one of a run's checkpoints.

    Raises:
        CheckpointDamaged: see `checkpointing.verify`.
        InputRefused: see `require`.
    """
    update, state = checkpointing.load_state(folder)
    require(state, update, run)
    return state


def newest_state(run: Run) -> dict[str, Any]:
    """Return the state of the newest sound checkpoint; an empty mapping if there is none."""
    for _, folder in checkpointing.candidates(run.checkpoints):
        with suppress(CheckpointDamaged):
            return state_in(folder, run)
    return {}


def require_metrics(run: Run) -> None:
    """Require the metrics whose digest the newest sound checkpoint of a run records; raises
    InputRefused.
    """
    if state := newest_state(run):
        run.require_metrics(state["metrics_offset"], state.get("metrics_sha256"))


def require(state: Mapping[str, Any], update: int, run: Run) -> None:
    """Require that a checkpoint's state has the entries, types and ranges of one that a run
    records.

    Raises:
        InputRefused: an entry is wrong; the message names the file, the entry and its value, and
            what was expected.
    """
    folder = run.checkpoints / f"step-{update:08d}"
    try:
        _require(state, update, run)
    except InputRefused as error:
        way_out = f"put the file back, or move {folder.name} elsewhere, and the checkpoint before it is taken"
        raise InputRefused(f"{folder / 'state.json'}: {error}; {way_out}") from None


def _require(state: Mapping[str, Any], update: int, run: Run) -> None:
    try:
        known = _State.model_validate(state)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            raise InputRefused(f"{name} is missing") from None
        what = fault["msg"].replace("Input should", "it should")
        raise InputRefused(f"{name} = {_shown(fault['input'])}: {what}") from None
    if known.engine.index != update:
        raise InputRefused(
            f"engine.index = {known.engine.index}: expected {update}, as in MANIFEST.json"
        )
    begin, end = known.cooled or (update, known.length)
    if not begin <= end >= update:
        raise InputRefused(
            f"length = {known.length}, cooled = {known.cooled}: they end before update {update}"
        )
    if known.shape is not None:
        try:
            LlamaConfig.from_hf(known.shape)
        except InputRefused as error:
            raise InputRefused(f"model_config: {error}") from None
    sampling = known.sampling or {}
    if unknown := sorted(
        sampling.keys() - sampling_defaults.select_defaults(sampling, "sampling").keys()
    ):
        raise InputRefused(
            f"sampling.{unknown[0]} = {_shown(sampling[unknown[0]])}: no key of a number for sampling"
        )
    try:
        set_generators(state["random"], random.Random(), np.random.RandomState(), torch.Generator())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputRefused(f"random: not the state of random generators ({error})") from None
    if known.data.seed != known.recipe.seed:
        raise InputRefused(
            f"data.seed = {known.data.seed}: expected {known.recipe.seed}, as in its recipe"
        )
    _require_adapters(known.recipe)


def _require_adapters(recipe: _Recipe) -> None:
    first, tokens = recipe.vocabulary or (1, 2)
    if not 0 < first < tokens <= MOST_TOKENS:
        raise InputRefused(
            f"recipe.vocabulary = [{first}, {tokens}]: expected the first new id and how many there are"
        )
    if recipe.lora is None:
        return
    try:
        adapters = lora_of(recipe.lora)
        names = [adapters.targets] if isinstance(adapters.targets, str) else [*adapters.targets]
        good = all(isinstance(name, str) for name in [recipe.init, *names])
        good = good and all(isinstance(token, int) for token in adapters.tokens)
    except (TypeError, ValueError, KeyError, AttributeError, MonographError):
        good = False
    if not good:
        raise InputRefused(
            f"recipe.lora = {_shown(recipe.lora)}: expected adapters, and recipe.init to be their base"
        )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class PythonGenerator(Protocol):
    """The module `random`, or a generator of its own."""

    def setstate(self, state: tuple[Any, ...], /) -> None:
        """Set the state."""


class NumpyGenerator(Protocol):
    """The module `numpy.random`, or a generator of its own."""

    def set_state(self, state: tuple[str, NDArray[np.uint32], int, int, float], /) -> None:
        """Set the state."""


def set_generators(
    saved: Mapping[str, Any], python: PythonGenerator, numpy: NumpyGenerator, own: torch.Generator
) -> None:
    """Set generators of Python, NumPy and torch, global or not, to a recorded state."""
    version, words, gauss = saved["python"]
    python.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    numpy.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    own.set_state(tensor_of(saved["torch"]))


def tensor_of(text: str) -> torch.Tensor:
    """Return the bytes written as hexadecimal digits as a uint8 tensor."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
