"""Check the state of a run's checkpoint, and set random generators to a recorded state.

The state is the JSON object that a checkpoint stores next to its tensors. A checkpoint's digests
only show that its bytes are unchanged: an attacker who changes entries can write matching digests, too.
So all code that reads a run's state checks here the types and ranges of its entries, and that they agree.
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
from monograph.run.recipe import recorded_lora

# The largest size of a tokenizer. A false size must not exhaust the memory, since the model gets a
# row for each token.
MAX_TOKENIZER_SIZE = 2**24
# The largest number of updates, tokens, rows or bytes. No run has more, and a false number must not
# mean endless work.
MAX_COUNT = 10**15
_MAX_SHOWN_CHARACTERS = 60  # of a value in a message

Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]
RecordedSeed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]
RecordedText = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern="^[a-z][a-z_]*[.][a-z]+$")]  # in the run's own folder
NaturalPair = Annotated[list[Natural], Field(min_length=2, max_length=2)]
# Makes a field that is a tuple take a list, since JSON has no tuples. It also turns strictness off for the
# numbers in the tuple, so these are of the types `Int` and `Float`, which turn it on again.
_FROM_LIST = Field(strict=False)
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True)]
# NumPy's generator MT19937 has a state of 624 words of 32 bits, and the position of the next word.
GeneratorWords = Annotated[
    list[Annotated[Int, Field(ge=0, lt=2**32)]], Field(min_length=624, max_length=624)
]
GeneratorPosition = Annotated[Int, Field(ge=0, le=624)]


class Strict(BaseModel):
    """A base class for records from JSON files that does not convert values to other types."""

    model_config = ConfigDict(strict=True)


class _Counters(Strict):
    """The counters of the training step, which `monograph.step.step` describes."""

    index: Natural
    applied: Natural
    tokens: Natural
    skipped: Natural
    loss_scale: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    good: Natural = 0  # updates since the loss scale last changed
    recent: list[list[FiniteFloat]] = []  # norms and losses, by which spikes are recognised


class _Position(Strict):
    """The position in the data, which `monograph.data.batches` describes."""

    seed: RecordedSeed
    rows: Natural  # the position after the last row that was read
    skip: list[NaturalPair] = []  # ranges of positions that are left out


class _Generators(Strict):
    """The states of the random generators of Python, NumPy, and torch on the CPU and on the GPU."""

    python: Annotated[tuple[Int, list[Int], Float | None], _FROM_LIST]
    # NumPy's set_state does not check the position, so `GeneratorPosition` does.
    numpy: Annotated[
        tuple[Literal["MT19937"], GeneratorWords, GeneratorPosition, Int, Float], _FROM_LIST
    ]
    torch: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]
    cuda: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None


class _Recipe(Strict):
    """A `monograph.run.recipe.ModelRecipe`."""

    init: RecordedText | None
    preset: RecordedText
    sizes: dict[str, bool | Natural]
    seed: RecordedSeed
    sha256: Digest | None = None
    lora: dict[str, Any] | None = None
    adapter: RecordedText | None = None
    base_sha256: Digest | None = None
    vocabulary: NaturalPair | None = None
    family: RecordedText | None = None


class _Versions(Strict):
    monograph: str
    torch: str
    python: str


class _State(Strict):
    """The state of a checkpoint, which `monograph.session.session` makes."""

    engine: _Counters
    data: _Position
    random: _Generators
    micro_batch: Annotated[int, Field(gt=0, le=MAX_COUNT)] | None  # rows
    length: Annotated[Natural, Field(ge=1)]  # the run's number of updates
    cooled: NaturalPair | None  # first and last update of an early cool-down
    budget_s: Seconds | None  # of training; None if the length is given in updates
    elapsed_s: Seconds
    metrics_offset: Natural  # length of metrics.jsonl in bytes
    metrics_sha256: Digest | None = None
    fingerprint: str  # of the records that the run learns from
    tokenizer: Digest
    tokenizer_files: dict[RecordedText, Digest] | None = None  # of the files next to tokenizer.json
    settings: Digest  # the fingerprint of the settings
    recipe: _Recipe
    attention: str | None = None  # the kernel that was chosen
    quantize: Literal["int4", "int8"] | None = None  # train.quantize
    files: dict[FileName, Digest] = {}  # see `recorded_file_digests`
    teachers: Digest | None = None  # that of teachers.json, as an earlier version recorded it
    # The entry is called model_config, a name that pydantic keeps for itself.
    shape: dict[str, Any] | None = Field(alias="model_config")
    sampling: dict[str, Any] | None = None
    versions: _Versions


def recorded_file_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return {file name: SHA-256} of the files in a run's folder that the run learns from, such as
    teachers.json, as a checkpoint's state records them.
    """
    digests: dict[str, str] = {}
    if state.get("teachers"):  # an earlier version recorded this file in an entry of its own
        digests[TEACHERS] = state["teachers"]
    digests.update(state.get("files", {}))
    return digests


def load_newest(run: Run, warn: Warn) -> Checkpoint:
    """Load a run's newest valid checkpoint, or that of update `run.at_update`, and check its state.

    Args:
        run: the run.
        warn: called with a line for each newer checkpoint that is damaged.

    Raises:
        InputRefused: the state is invalid; see `require_valid`.
        NoValidCheckpoint: the run has no valid checkpoint.
    """
    checkpoint = checkpointing.load_newest(run.checkpoints, warn, at=run.at_update)
    require_valid(checkpoint.state, checkpoint.update, run)
    return checkpoint


def state_in(folder: Path, run: Run) -> dict[str, Any]:
    """Return the state in the folder of one of a run's checkpoints, after checking it.

    Raises:
        CheckpointDamaged: the folder fails verification; see `checkpointing.verify`.
        InputRefused: the state is invalid; see `require_valid`.
    """
    update, state = checkpointing.load_state(folder)
    require_valid(state, update, run)
    return state


def newest_state(run: Run) -> dict[str, Any]:
    """Return the state of a run's newest valid checkpoint; an empty dict if there is none.

    Raises:
        InputRefused: the state is invalid; see `require_valid`.
    """
    for _, folder in checkpointing.list_checkpoints(run.checkpoints):
        with suppress(CheckpointDamaged):
            return state_in(folder, run)
    return {}


def require_metrics(run: Run) -> None:
    """Require that a run has the metrics that its newest valid checkpoint records.

    Raises:
        InputRefused: rows are missing or damaged; see `Run.require_metrics`.
    """
    state = newest_state(run)
    if state:
        run.require_metrics(state["metrics_offset"], state.get("metrics_sha256"))


def require_valid(state: Mapping[str, Any], update: int, run: Run) -> None:
    """Require that all entries of a checkpoint's state are valid and agree with each other.

    Args:
        state: the state.
        update: the update after which the checkpoint was saved.
        run: the run, whose folder the message names.

    Raises:
        InputRefused: an entry is wrong. The message names the file, the entry, its value and what
            was expected.
    """
    folder = run.checkpoints / f"step-{update:08d}"
    try:
        _check_entries(state, update)
    except InputRefused as error:
        remedy = f"put the file back, or move {folder.name} elsewhere, and the checkpoint before it is taken"
        raise InputRefused(f"{folder / 'state.json'}: {error}; {remedy}") from None


def _check_entries(state: Mapping[str, Any], update: int) -> None:
    """Do the work of `require_valid`, which adds the file to this function's messages."""
    try:
        checked = _State.model_validate(state)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            raise InputRefused(f"{name} is missing") from None
        reason = fault["msg"].replace("Input should", "it should")
        raise InputRefused(f"{name} = {_quoted(fault['input'])}: {reason}") from None
    if checked.engine.index != update:
        raise InputRefused(
            f"engine.index = {checked.engine.index}: expected {update}, as in MANIFEST.json"
        )
    if checked.cooled:
        begin, end = checked.cooled  # an early cool-down ends the run before its length
    else:
        begin, end = update, checked.length
    if end < begin or end < update:
        raise InputRefused(
            f"length = {checked.length}, cooled = {checked.cooled}: they end before update {update}"
        )
    if checked.shape is not None:
        try:
            LlamaConfig.from_hf(checked.shape)
        except InputRefused as error:
            raise InputRefused(f"model_config: {error}") from None
    sampling = checked.sampling or {}
    # `select_defaults` returns the known keys that have a value.
    known_keys = sampling_defaults.select_defaults(sampling, "sampling").keys()
    unknown = sorted(sampling.keys() - known_keys)
    if unknown:
        raise InputRefused(
            f"sampling.{unknown[0]} = {_quoted(sampling[unknown[0]])}: not a known key of sampling with a number"
        )
    try:
        # Tried on new generators, since only a generator can tell whether a state is valid.
        set_generators(state["random"], random.Random(), np.random.RandomState(), torch.Generator())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputRefused(f"random: not the state of random generators ({error})") from None
    if checked.data.seed != checked.recipe.seed:
        raise InputRefused(
            f"data.seed = {checked.data.seed}: expected {checked.recipe.seed}, as in its recipe"
        )
    _require_adapters(checked.recipe)


def _require_adapters(recipe: _Recipe) -> None:
    """Require valid ids of new tokens and valid options of adapters; raises InputRefused."""
    if recipe.vocabulary is not None:
        first_new_id, token_count = recipe.vocabulary
        if not 0 < first_new_id < token_count <= MAX_TOKENIZER_SIZE:
            raise InputRefused(
                f"recipe.vocabulary = [{first_new_id}, {token_count}]: expected the first new id and the "
                "number of all tokens"
            )
    if recipe.lora is None:
        return
    try:
        adapters = recorded_lora(recipe.lora)
        targets = [adapters.targets] if isinstance(adapters.targets, str) else [*adapters.targets]
        # `init` names the base of the adapters, so it must not be None.
        are_texts = all(isinstance(name, str) for name in [recipe.init, *targets])
        are_ids = all(isinstance(token, int) for token in adapters.tokens)
        is_valid = are_texts and are_ids
    except (TypeError, ValueError, KeyError, AttributeError, MonographError):
        is_valid = False
    if not is_valid:
        raise InputRefused(
            f"recipe.lora = {_quoted(recipe.lora)}: expected adapters, and recipe.init to be their base"
        )


def _quoted(value: object) -> str:
    """Return a value as JSON, cut after `_MAX_SHOWN_CHARACTERS`."""
    text = json.dumps(value)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:_MAX_SHOWN_CHARACTERS]}..."


class PythonGenerator(Protocol):
    """Python's global generator, the module `random`, or a `random.Random`."""

    def setstate(self, state: tuple[Any, ...], /) -> None:
        """Set the state."""


class NumpyGenerator(Protocol):
    """NumPy's global generator, the module `numpy.random`, or a `numpy.random.RandomState`."""

    def set_state(self, state: tuple[str, NDArray[np.uint32], int, int, float], /) -> None:
        """Set the state."""


def set_generators(
    saved: Mapping[str, Any],
    python: PythonGenerator,
    numpy: NumpyGenerator,
    torch_cpu: torch.Generator,
) -> None:
    """Set three random generators to a recorded state.

    Args:
        saved: the entry `random` of a checkpoint's state, see `_Generators`.
        python: the generator of Python to set.
        numpy: the generator of NumPy to set.
        torch_cpu: the generator of torch to set, on the CPU.
    """
    version, python_words, python_gauss = saved["python"]
    python.setstate((version, tuple(python_words), python_gauss))
    algorithm, keys, position, has_gauss, cached_gauss = saved["numpy"]
    words = np.array(keys, dtype=np.uint32)
    numpy.set_state((algorithm, words, position, has_gauss, cached_gauss))
    torch_cpu.set_state(tensor_from_hex(saved["torch"]))


def tensor_from_hex(text: str) -> torch.Tensor:
    """Return the bytes that a text of hexadecimal digits stands for, as a uint8 tensor."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
