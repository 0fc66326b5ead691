"""Define every key of the configuration: its type, its default, the values it accepts and its
meaning.

The pages, `--print-config` and errors have these texts from here (`described`).
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from monograph.data import HEAVIEST, LARGEST_SHARE, LIGHTEST
from monograph.errors import join_with_or
from monograph.model.families import FAMILIES, FIRST_FAMILY, PRESETS
from monograph.optim_table import FORMATS, OPTIMIZERS
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE, Range
from monograph.rl.advantages import ADVANTAGES
from monograph.rl.parameters import Parameter
from monograph.rl.preferences import LOSSES
from monograph.rl.rewards import OWN_FUNCTION, REWARDS
from monograph.run import listing
from monograph.run.listing import Kind, Measure
from monograph.schedule import SCHEDULES

Auto = Literal["auto"]

_MULTIPLES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "b": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
}


def _count(value: object) -> Any:
    """Read `"512k"` → 512000, `"64Ki"` → 65536, `1e6` → 1000000; the key's type refuses any other
    text.
    """
    if isinstance(value, str) and (
        match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgbt]|[kmg]i)", value.lower())
    ):
        value = float(Decimal(match[1]) * _MULTIPLES[match[2]])
    elif isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?e[0-9]+", value.lower()):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pair(value: object) -> Any:
    """Read `[0.9, 0.95]`, `"0.9,0.95"` or `"[0.9, 0.95]"` → `(0.9, 0.95)`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.strip("[]()").split(","))
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: object) -> Any:
    """Read `"2,1"` or `"[2, 1]"` → `["2", "1"]`, and a single number as a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]").split(",")]
    return [value] if isinstance(value, int | float) else value


def _strings(value: object) -> Any:
    """Read `'["a", "b"]'`, as a shell gives a list, → `["a", "b"]`; other text, such as
    `[ab]*.txt`, stays as it is.
    """
    if isinstance(value, str) and value.startswith("["):
        try:
            return tomllib.loads(f"list = {value}")["list"]
        except tomllib.TOMLDecodeError:
            # It is an unfinished list, as no file's name begins like this.
            if re.match(r"\[\s*[\"']", value):
                raise
        except RecursionError:
            raise ValueError("a list of texts, and this is nested too deeply") from None
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a text without a NUL character")
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Texts = Annotated[Text | Annotated[list[Text], Field(min_length=1)], BeforeValidator(_strings)]
# No model needs more than these. Building or counting a model of such sizes would take hours before
# it could be refused; whether this machine's memory suffices is checked later.
MOST_LAYERS = 2**12
MOST_SIZE = 2**24
MOST_LENGTH = 2**22
MOST_RANK = 2**16
MOST_PER_UPDATE, MOST_COUNT = 2**32, 10**15
DEFAULT_MINUTES = 3.0
Size = Annotated[int, Field(ge=1, le=MOST_SIZE)]
Whole = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Count = Annotated[Whole, BeforeValidator(_count)]
PositiveFloat = Annotated[float, AfterValidator(ABOVE_0.checked)]
NonNegativeFloat = Annotated[float, AfterValidator(NOT_NEGATIVE.checked)]
Fraction = Annotated[float, AfterValidator(FRACTION.checked)]
Minutes = Annotated[float, Field(gt=0, le=1e7)]  # 19 years
Share = Annotated[float, Field(ge=0, le=LARGEST_SHARE)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=LIGHTEST, le=HEAVIEST)]
Weights = Annotated[list[Weight], Field(min_length=1), BeforeValidator(_numbers)]
Momentum = Annotated[float, AfterValidator(DECAY.checked)]

# How the members of a sweep may differ in a key.
#   in one graph:    it is a number that an update reads, or the seed of weights and row order
#   between graphs:  it changes shapes, the graph or the length, so each value has its own graph
Varies = Literal["in one graph", "between graphs"]
# Why they cannot, where several keys have the same reason.
_SAME_TEXT = "members are compared on the same text"
_NO_EFFECT = "it does not change what a member learns"
_OF_ONE_TIME = "how much a member learns in a time is the machine's doing"
_OF_TEXTS = "members of one graph learn from texts alone: start a run for each value"


class Key(NamedTuple):
    """What a key means and takes, as the pages, `--print-config` and errors say it, and what becomes
    of it in other runs.

    Attributes:
        meaning: one sentence or two, in one line.
        expected: the values that it accepts, to complete the sentence "expected ...".
        default: the value that applies where the key is not set; None if there is none or no single
            one.
        otherwise: what applies there in words, if it is no value; "" if nothing does.
        example: a value that somebody might set; None where the default is one.
        auto: what "auto" stands for, which the meaning ends with; "" if the key does not take it.
        choices: what each word that it takes stands for, besides "auto".
        belongs_to: the key about whose value it says something, see `belonging`; "" if there is none.
        varies: how the members of a sweep may differ in it, see `Varies`; None: not at all.
        fixed: why the members of a sweep cannot differ in it; "" if they can.
        is_amount: whether more of it nearly always scores better, so that the best value at an
            axis' end says nothing.
        is_of_place: whether a resumed run may change it. Such a key says where and in which graphs
            the run trains, or which records it can read, and changes no equation.
        is_of_one_run: whether a run that begins from another one decides it anew: the length, what
            depends on the length, and the ranks.
    """

    meaning: str
    expected: str
    default: object
    otherwise: str = ""
    example: object = None
    auto: str = ""
    choices: Mapping[str, str] = MappingProxyType({})
    belongs_to: str = ""
    varies: Varies | None = None
    fixed: str = ""
    is_amount: bool = False
    is_of_place: bool = False
    is_of_one_run: bool = False


class _More(TypedDict, total=False):
    """What a declaration says of a key; see `Key`.

    `usual` is the value that applies where a key without a default is not given.
    """

    usual: object
    otherwise: str
    example: object
    auto: str
    choices: Mapping[str, str]
    belongs_to: str
    varies: Varies
    fixed: str
    is_amount: bool
    is_of_place: bool
    is_of_one_run: bool


def _key(default: Any, expected: str, meaning: str, **said: Unpack[_More]) -> Any:
    """Define a configuration key.

    Args:
        default: the value of the setting; None: "not given", for keys whose value is decided
            elsewhere.
        expected: completes the sentence "expected ..." of the error for a wrong value.
        meaning: what the key means, in one line.
        said: what else there is to say; `fixed` may be left out if its section says it.
    """
    if "auto" in said:
        meaning = f"{meaning} auto: {said['auto']}."
    extra = cast(dict[str, Any], {"expected": expected} | said)
    return Field(default, description=meaning, json_schema_extra=extra)


def _choice(
    default: Any, meaning: str, words: Mapping[str, str], *, also: str = "", **said: Unpack[_More]
) -> Any:
    """Define a key that takes one of some words, each with what it stands for, "auto", or what
    `also` says.
    """
    values = [*(["auto"] if "auto" in said else []), *words, *([also] if also else [])]
    said["choices"] = words
    return _key(default, join_with_or(values), meaning, **said)


class Section(BaseModel):
    """A table of the TOML file; a key that is not given is None if it has no default.

    Attributes:
        fixed: why a sweep cannot vary those of its keys that do not say more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    fixed: ClassVar[str] = ""

    @classmethod
    def about(cls) -> str:
        """Return what the section is about, its docstring, in one line."""
        return " ".join((cls.__doc__ or "").split())


def _with_parameters(
    section: type[Section], chosen_by: str, declared: Mapping[str, Sequence[Parameter]]
) -> Any:
    """Return a section with one more key for each parameter of a table's rows.

    Args:
        section: the section, which has the key that chooses a row.
        chosen_by: that key, such as "prefer.loss".
        declared: the parameters of each row, by the row's name. Several rows may have the same
            parameter with different defaults.
    """
    parameters: dict[str, Parameter] = {}
    rows: dict[str, dict[float | str | None, list[str]]] = {}  # by field, then by default
    for row, of_row in declared.items():
        for parameter in of_row:
            parameters.setdefault(parameter.field, parameter)
            rows.setdefault(parameter.field, {}).setdefault(parameter.default, []).append(row)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if len(rows[name]) == 1:
            usual, otherwise, example = parameter.default, "", parameter.example
        else:
            usual, otherwise, example = None, _defaults_said(rows[name]), parameter.default
        values = parameter.values
        expected = values.expected if isinstance(values, Range) else values
        field = _key(
            None,
            expected,
            parameter.meaning,
            usual=usual,
            otherwise=otherwise,
            example=example,
            belongs_to=chosen_by,
        )
        fields[name] = (_type_of(values) | None, field)
    return create_model(section.__name__, __base__=section, **fields)


def _type_of(values: Range | str) -> Any:
    """Return the type of a parameter's key."""
    if not isinstance(values, Range):
        return Text
    return Annotated[int if values.whole else float, AfterValidator(values.checked)]


def _defaults_said(rows: Mapping[float | str | None, Sequence[str]]) -> str:
    """Return the defaults of several rows in words, such as "0.1, and 2 for simpo".

    Args:
        rows: the rows that have a default, by the default.
    """
    usual = max(rows, key=lambda default: len(rows[default]))
    others = [
        f"{_said(default)} for {' and '.join(names)}"
        for default, names in rows.items()
        if default != usual
    ]
    return f"{_said(usual)}, and {', '.join(others)}"


def _said(default: float | str | None) -> str:
    return f"{default:g}" if isinstance(default, int | float) else str(default)


_SIZE = f"a whole number above 0, at most {MOST_SIZE}"
_WHOLE = "a whole number above 0, at most 1e15"
_COUNT = f'{_WHOLE} ("512k" is 512000, "512Ki" is 524288)'
_PRESETS = "the preset's"


class ModelSection(Section):
    """The model: a preset by name, weights that exist (init), or sizes by their Hugging Face names."""

    preset: Literal["auto", *PRESETS] = _choice(  # type: ignore[valid-type]
        "auto",
        "Shape of a new model.",
        {
            name: f"{layers} layers of width {width:,}"
            for name, (_, width, _, layers, _, _) in PRESETS.items()
        },
        auto="micro, unless sizes are given",
        example="124m",
        varies="between graphs",
    )
    family: Literal[tuple(FAMILIES)] | None = _choice(  # type: ignore[valid-type]
        None,
        "Architecture of a new model.",
        {name: f"that of transformers' {family.architecture}" for name, family in FAMILIES.items()},
        usual=FIRST_FAMILY,
        varies="between graphs",
    )
    init: Text | None = _key(
        None,
        "a run, a folder, hf://OWNER/NAME, a .pth file or FILE.py:FUNCTION",
        "Weights to start from, or the Python function that builds the model.",
        otherwise="a new model",
        example="FOLDER",
        varies="between graphs",
    )
    vocab_size: Size | None = _key(
        None,
        _SIZE,
        "Number of tokens that the embedding has rows for.",
        otherwise="the tokenizer's",
        example=4096,
        fixed="it is the tokenizer's",
    )
    hidden_size: Size | None = _key(
        None,
        _SIZE,
        "Width of the residual stream.",
        otherwise=_PRESETS,
        example=192,
        varies="between graphs",
        is_amount=True,
    )
    intermediate_size: Size | None = _key(
        None,
        _SIZE,
        "Width of the feed-forward layer.",
        otherwise=f"{_PRESETS}, or 8/3 of hidden_size",
        example=512,
        varies="between graphs",
        is_amount=True,
    )
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = _key(
        None,
        f"a whole number above 0, at most {MOST_LAYERS}",
        "Number of transformer blocks.",
        otherwise=_PRESETS,
        example=4,
        varies="between graphs",
        is_amount=True,
    )
    num_attention_heads: Size | None = _key(
        None,
        _SIZE,
        "Number of query heads.",
        otherwise=_PRESETS,
        example=6,
        varies="between graphs",
        is_amount=True,
    )
    num_key_value_heads: Size | None = _key(
        None,
        _SIZE,
        "Number of key and value heads. It divides num_attention_heads.",
        otherwise=f"{_PRESETS}, or num_attention_heads",
        example=2,
        varies="between graphs",
        is_amount=True,
    )
    max_position_embeddings: Size | None = _key(
        None,
        _SIZE,
        "Longest sequence in tokens.",
        otherwise="data.sequence_length",
        example=2048,
        fixed="vary data.sequence_length",
    )
    tie_word_embeddings: bool | None = _key(
        None,
        "true or false",
        "Whether the output head is the embedding's transpose.",
        otherwise=_PRESETS,
        example=True,
        varies="between graphs",
    )

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that were given, by their Hugging Face names."""
        no_sizes = ("preset", "family", "init")
        return {key: value for key, value in self if key not in no_sizes and value is not None}


class DataSection(Section):
    """The text, and how it becomes rows of tokens."""

    source: Texts = _key(
        "stdlib",
        "a path, a glob, or a list of them",
        "Text to train on. stdlib: Python's own sources. -: stdin. hf://OWNER/NAME: a dataset of the Hugging Face Hub.",
        fixed=_SAME_TEXT,
    )
    weights: Weights | None = _key(
        None,
        f"a list of numbers from {LIGHTEST:g} to {HEAVIEST:g}, one for each source",
        "How often an epoch sees each source.",
        otherwise="once each",
        example=[2.0, 1.0],
        belongs_to="data.source",
        fixed=_SAME_TEXT,
    )
    tokenizer: Text = _choice(
        "auto",
        "The tokenizer.",
        {"bpe": "pairs of bytes, trained on the text", "bytes": "each byte is a token"},
        also="a tokenizer.json",
        auto="the model's own; for a new model bpe, which is trained on the text",
        example="bytes",
        varies="between graphs",
    )
    vocab_size: Size | None = _key(
        None,
        _SIZE,
        "Number of tokens of a bpe that is trained.",
        usual=4096,
        belongs_to="data.tokenizer",
        varies="between graphs",
        is_amount=True,
    )
    sequence_length: Auto | Annotated[Count, Field(le=MOST_LENGTH)] = _key(
        "auto",
        _COUNT.replace("1e15", str(MOST_LENGTH)) + ", or auto",
        "Tokens in a row.",
        auto="256 for a new model, else what the model has, at most 1,024",
        example=1024,
        varies="between graphs",
        is_amount=True,
    )
    packing: Literal["packed", "padded"] = _choice(
        "packed",
        "How documents fill rows.",
        {"packed": "documents share a row", "padded": "each document has rows of its own"},
        varies="between graphs",
    )
    held_out: Share = _key(
        0.05,
        "a number from 0 (none) to 0.5",
        "Share of the bytes that is kept for evaluation.",
        fixed=_SAME_TEXT,
    )
    text_key: Text | None = _key(
        None,
        "a name",
        "Key or column of a record that holds its text.",
        otherwise="text, or the keys of a chat",
        example="text",
        fixed=_SAME_TEXT,
    )
    ignore_keys: Texts | None = _key(
        None,
        "a name, or a list of them",
        "Keys of records to leave out. A record with an unknown key is refused otherwise.",
        example=["my_key"],
        fixed=_SAME_TEXT,
        is_of_place=True,
    )
    bad_records: Literal["refuse", "skip"] = _choice(
        "refuse",
        "What is done with a record that has no usable text.",
        {"refuse": "the run does not start", "skip": "it is left out and counted"},
        fixed=_SAME_TEXT,
    )
    answers: Literal["every", "last"] = _choice(
        "every",
        "Which answers of a conversation are trained on.",
        {"every": "all of them", "last": "the last one alone"},
        fixed=_SAME_TEXT,
    )
    too_long: Literal["truncate", "refuse"] = _choice(
        "truncate",
        "What is done with a conversation that is longer than a row.",
        {"truncate": "turns at its front are left out", "refuse": "the run does not start"},
        fixed=_SAME_TEXT,
    )


class OptimSection(Section):
    """The update of the weights."""

    name: Literal["auto", *OPTIMIZERS] = _choice(  # type: ignore[valid-type]
        "auto",
        "The optimizer.",
        {name: row.about for name, row in OPTIMIZERS.items()},
        auto="muon for a new model, else adamw",
        example="adamw",
        varies="between graphs",
    )
    state: Literal[*FORMATS] = _choice(  # type: ignore[valid-type]
        "fp32",
        "Form of the optimizer's moments.",
        {name: row.about for name, row in FORMATS.items()},
        varies="between graphs",
    )
    master_weights: bool = _key(
        True,
        "true or false",
        "Whether weights are kept in fp32. false: in bf16, stochastically rounded.",
        varies="between graphs",
    )
    lr: Auto | PositiveFloat = _key(
        "auto",
        f"{ABOVE_0.expected}, or auto",
        "Peak learning rate.",
        auto="2e-4 for adapters, 2e-5 for all weights of a model that exists, a tenth of these for rewards and "
        "preferences; for a new model by its preset, such as 6e-3 for nano and micro",
        example=3e-4,
        varies="in one graph",
    )
    weight_decay: Auto | NonNegativeFloat = _key(
        "auto",
        f"{NOT_NEGATIVE.expected}, or auto",
        "Decoupled decay of the matrices.",
        auto="0.1; in a new nano or micro by the number of epochs",
        example=0.01,
        varies="in one graph",
    )
    betas: Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)] = _key(
        (0.9, 0.95),
        "two numbers, 0 or more and below 1",
        "Decay of the first and second moment.",
        belongs_to="optim.name",
        varies="in one graph",
    )
    eps: PositiveFloat = _key(
        1e-8,
        ABOVE_0.expected,
        "Number that is added to the denominator of the update.",
        belongs_to="optim.name",
        varies="in one graph",
    )
    grad_clip: Literal["none"] | PositiveFloat = _key(
        1.0,
        f"{ABOVE_0.expected}, or none",
        "Largest norm of the gradient; a larger one is scaled down to it.",
        choices={"none": "gradients stay as they are"},
        varies="between graphs",
    )
    skip_spikes: Auto | bool = _key(
        "auto",
        "true, false or auto",
        "Skip updates whose loss and gradient both stand out.",
        auto="if gradients are clipped, except with rl.reward",
        example=False,
        varies="between graphs",
    )
    schedule: Literal[tuple(SCHEDULES)] = _choice(  # type: ignore[valid-type]
        "cosine",
        "Learning rate after the warm-up.",
        {name: schedule.meaning for name, schedule in SCHEDULES.items()},
        varies="in one graph",
    )
    min_lr_ratio: Ratio | None = _key(
        None,
        "a number from 0 to 1",
        "Share of optim.lr that the schedule falls to.",
        usual=0.05,
        belongs_to="optim.schedule",
        varies="in one graph",
    )
    warmup_updates: Auto | Annotated[int, Field(ge=0, le=MOST_COUNT)] = _key(
        "auto",
        "a whole number from 0 to 1e15, or auto",
        "Updates of linear warm-up.",
        auto="5 % of the run, at least 10 (or half of a shorter run), at most 2,000",
        example=100,
        varies="in one graph",
        is_of_one_run=True,
    )
    ema: Literal["none"] | Fraction = _key(
        "none",
        f"{FRACTION.expected}, or none",
        "Decay of an average of the weights, which is then evaluated, sampled and exported.",
        choices={"none": "there is no average"},
        varies="between graphs",
    )
    transfer: Literal["none", "width"] = _choice(
        "none",
        "Which model lr, weight_decay and eps are for (docs/transfer.md).",
        {"none": "this one", "width": "a narrow one, and a rule carries them over"},
        varies="between graphs",
    )
    transfer_base: Size | None = _key(
        None,
        _SIZE,
        "hidden_size of the model that optim.lr is for.",
        otherwise="the narrowest of this shape from 256 on",
        example=64,
        belongs_to="optim.transfer",
        varies="between graphs",
        is_amount=True,
    )


class TrainSection(Section):
    """The length, batch sizes and means of training. At most one of updates, tokens, epochs and
    minutes is given.
    """

    updates: Count | None = _key(
        None,
        _COUNT,
        "Stop after this many updates.",
        example=1000,
        varies="between graphs",
        is_amount=True,
        is_of_one_run=True,
    )
    tokens: Count | None = _key(
        None,
        _COUNT,
        "Stop after this many tokens.",
        example=10_000_000,
        varies="between graphs",
        is_amount=True,
        is_of_one_run=True,
    )
    epochs: Whole | None = _key(
        None,
        _WHOLE,
        "Stop after this many passes over the data.",
        example=1,
        fixed="say it in train.updates or train.tokens",
        is_of_one_run=True,
    )
    minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "Train for about this many minutes.",
        usual=DEFAULT_MINUTES,
        fixed=_OF_ONE_TIME,
        is_of_one_run=True,
    )
    wall_minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "End the whole run within about this many minutes, with preparation, compiling and report, or else refuse it.",
        otherwise="no limit",
        example=10,
        fixed=_OF_ONE_TIME,
        is_of_one_run=True,
    )
    tokens_per_update: Auto | Annotated[Count, Field(le=MOST_PER_UPDATE)] = _key(
        "auto",
        _COUNT.replace("1e15", str(MOST_PER_UPDATE)) + ", or auto",
        "Tokens of an update.",
        auto="2,048, or one row if that is longer",
        example=65_536,
        varies="between graphs",
    )
    micro_batch: Auto | Size = _key(
        "auto",
        f"{_SIZE}, or auto",
        "Rows on the device at once.",
        auto="the number that the planner finds fastest",
        example=8,
        fixed=_NO_EFFECT,
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _key(
        0,
        "a whole number, 0 or more",
        "Seed of new weights and of the order of the data.",
        varies="in one graph",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = _choice(
        "auto",
        "Precision of the arithmetic.",
        {
            "fp32": "everything in fp32",
            "bf16": "products, attention and residual stream in bf16",
            "fp16": "the same in fp16; gradients are scaled",
            "fp8": "blocks' linear layers in fp8, the rest as in bf16",
        },
        auto="bf16 if the device has it, else fp32",
        example="bf16",
        varies="between graphs",
    )
    compile: Literal["auto", "whole", "blocks", "none"] = _choice(
        "auto",
        "What one compiled graph holds.",
        {
            "whole": "the step",
            "blocks": "a block, which all layers share",
            "none": "nothing is compiled",
        },
        auto="whole; blocks for a model of 16 layers or more, or a streamed one",
        example="none",
        fixed=_NO_EFFECT,
        is_of_place=True,
        is_of_one_run=True,
    )
    remat: Literal["auto", "none", "pointwise", "full", "offload"] | Fraction = _choice(
        "auto",
        "Activation checkpointing: what is computed twice. A number: the share that is kept.",
        {
            "none": "nothing",
            "pointwise": "what is between products, convolutions and attention",
            "full": "each block, of which the input is kept",
            "offload": "each block, of which the input is kept in host memory",
        },
        also=FRACTION.expected,
        auto="the fastest that fits",
        example="full",
        fixed=_NO_EFFECT,
    )
    memory: Literal["auto", "device", "stream"] = _choice(
        "auto",
        "Where weights are.",
        {"device": "on the device", "stream": "in host memory, fetched stage by stage"},
        auto="stream if nothing else fits a GPU",
        example="stream",
        fixed=_NO_EFFECT,
        is_of_place=True,
    )
    parallel: Literal["none", "ddp", "fsdp", "hsdp"] = _choice(
        "none",
        "How several devices share the work, a process each (docs/distributed.md).",
        {
            "none": "there is one device",
            "ddp": "each has all weights; gradients are summed",
            "fsdp": "each has a share of weights, gradients and moments",
            "hsdp": "fsdp within each machine, ddp between them",
        },
        fixed=_NO_EFFECT,
        is_of_place=True,
        is_of_one_run=True,
    )
    gather_dtype: Literal["fp32", "bf16"] = _choice(
        "fp32",
        "With fsdp and hsdp: the dtype in which weights are sent.",
        {"fp32": "as they are", "bf16": "rounded, with half the traffic"},
        belongs_to="train.parallel",
        fixed=_NO_EFFECT,
        is_of_place=True,
        is_of_one_run=True,
    )
    eval_every: Auto | Whole = _key(
        "auto",
        f"{_WHOLE}, or auto",
        "Updates between evaluations.",
        auto="about 12 evaluations in a run",
        example=100,
        fixed=_NO_EFFECT,
        is_of_one_run=True,
    )
    save_every: Auto | Whole = _key(
        "auto",
        f"{_WHOLE}, or auto",
        "Updates between checkpoints.",
        auto="about 6 checkpoints in a run",
        example=500,
        fixed=_NO_EFFECT,
        is_of_one_run=True,
    )
    keep: Whole = _key(
        2,
        _WHOLE,
        "How many of the newest checkpoints are kept. 1 leaves nothing to fall back on.",
        fixed=_NO_EFFECT,
    )


class LoraSection(Section):
    """Low-rank adapters, trained next to frozen weights that model.init names. To use them, set
    rank.
    """

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] | None = _key(
        None,
        f"a whole number above 0, at most {MOST_RANK}",
        "Rank of the adapters.",
        otherwise="no adapters",
        example=16,
        varies="between graphs",
    )
    alpha: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "The adapters' output is scaled by alpha / rank.",
        usual=32.0,
        varies="between graphs",
    )
    rslora: bool | None = _key(
        None,
        "true or false",
        "Scale the adapters' output by alpha / sqrt(rank) instead (rsLoRA).",
        usual=False,
        varies="between graphs",
    )
    dora: bool | None = _key(
        None,
        "true or false",
        "Train the lengths of rows apart from their directions (DoRA).",
        usual=False,
        varies="between graphs",
    )
    lr_ratio: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Learning rate of the adapters' second matrices as a multiple of optim.lr (LoRA+).",
        usual=1.0,
        varies="between graphs",
    )
    targets: Texts | None = _key(
        None,
        "all-linear, a list of module names or a regular expression for whole names",
        "Linear layers that get an adapter. all-linear: all but the head.",
        usual="all-linear",
        varies="between graphs",
    )
    dropout: Momentum | None = _key(
        None,
        DECAY.expected,
        "Dropout of the adapters' inputs.",
        usual=0.0,
        varies="between graphs",
    )
    base: Literal["auto", "int8", "nf4"] | None = _choice(
        None,
        "Form in which frozen weights are kept.",
        {"int8": "8 bits a weight", "nf4": "4 bits a weight, as in QLoRA"},
        usual="auto",
        auto="16 bits if the arithmetic is in 16 bits",
        example="nf4",
        varies="between graphs",
    )
    tokens: Texts | None = _key(
        None,
        'auto or a list of tokens, ["<|im_start|>"]',
        "Tokens whose rows of embedding and head are trained, besides those new to the base.",
        usual="auto",
        auto="no others",
        example=["<|im_start|>"],
        fixed="which tokens a base never saw is no choice",
    )


class _RewardSection(Section):
    """The key that chooses a reward, before the keys of the rewards' parameters."""

    fixed = _OF_TEXTS

    reward: Text | None = _choice(
        None,
        "What scores an answer (docs/rewards.md).",
        {name: reward.meaning for name, reward in REWARDS.items()}
        | {OWN_FUNCTION: "what your function returns"},
        otherwise="nothing: texts are learned",
        example="exact",
    )


_OfRewards: Any = _with_parameters(
    _RewardSection, "rl.reward", {name: reward.parameters for name, reward in REWARDS.items()}
)


class RlSection(_OfRewards):  # type: ignore[misc]
    """Reinforcement learning: the model's own answers to prompts are scored and learned from. To
    use it, set reward.
    """

    answer_regex: Text | None = _key(
        None, "a regular expression", "What every sampled answer matches.", example="[0-9]+"
    )
    answer_schema: Text | None = _key(
        None,
        "a file with a JSON schema",
        "Schema that every sampled answer follows.",
        example="FILE.json",
    )
    advantage: Literal[tuple(ADVANTAGES)] | None = _choice(  # type: ignore[valid-type]
        None,
        "How an answer is weighed against the others of its group.",
        {name: advantage.meaning for name, advantage in ADVANTAGES.items()},
        usual="dr_grpo",
    )
    prompts: Size | None = _key(None, _SIZE, "Prompts of an update.", usual=16)
    group: Annotated[int, Field(ge=2, le=MOST_SIZE)] | None = _key(
        None, f"a whole number from 2 to {MOST_SIZE}", "Answers to each prompt.", usual=8
    )
    draws: Size | None = _key(
        None,
        _SIZE,
        "Most times that an update samples, until rl.prompts groups have unequal rewards.",
        usual=1,
    )
    updates: Size | None = _key(
        None, _SIZE, "Updates made from the answers of one sampling.", usual=1
    )
    kl: Literal["none", "k1", "k2", "k3"] | None = _choice(
        None,
        "Penalty that holds the model near the weights that it starts from.",
        {
            "none": "no penalty",
            "k1": "KL(model, start) of whole answers, taken from the reward",
            "k2": "KL(model, start) of each token, added to the loss",
            "k3": "KL(start, model) of each token, added to the loss",
        },
        usual="none",
    )
    kl_coef: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Strength of rl.kl.",
        example=0.05,
        belongs_to="rl.kl",
    )
    entropy_coef: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Strength of an entropy bonus.",
        otherwise="no bonus",
        example=0.01,
        belongs_to="rl.kl",
    )
    max_new_tokens: Size | None = _key(
        None,
        _SIZE,
        "Most tokens of an answer. Longer ones are cut.",
        otherwise="half of data.sequence_length",
        example=128,
    )
    truncated: Literal["keep", "mask"] | None = _choice(
        None,
        "What is done with answers that were cut.",
        {"keep": "they are learned from", "mask": "they are left out of the loss"},
        usual="keep",
    )
    truncation_penalty: NonNegativeFloat | None = _key(
        None,
        NOT_NEGATIVE.expected,
        "What is taken from the reward of an answer that was cut.",
        usual=0.0,
        belongs_to="rl.truncated",
    )
    temperature: Annotated[float, Field(gt=0, le=100)] | None = _key(
        None,
        "a number above 0, at most 100",
        "Temperature at which answers are sampled and learned.",
        usual=1.0,
    )


class _PreferenceSection(Section):
    """The key that chooses a loss, before the keys of the losses' parameters."""

    fixed = _OF_TEXTS

    loss: Literal[tuple(LOSSES)] | None = _choice(  # type: ignore[valid-type]
        None,
        "How answers are compared (docs/preferences.md).",
        {name: loss.meaning for name, loss in LOSSES.items()},
        otherwise="dpo for pairs, kto for labelled answers",
        example="dpo",
    )


_OfLosses: Any = _with_parameters(
    _PreferenceSection, "prefer.loss", {name: loss.parameters for name, loss in LOSSES.items()}
)


class PreferSection(_OfLosses):  # type: ignore[misc]
    """Preferences: pairs of a chosen and a rejected answer, or labelled answers, are compared and
    learned from.
    """


class WayToLearn(NamedTuple):
    """What is known of a way to learn before torch is imported.

    What it does is the `OBJECTIVE` of `session/objectives/NAME.py`, where NAME is its name.

    Attributes:
        kind: its name, the key that chooses it, such as rl.reward, and what a list of runs shows.
        keys: the section of that key, here [rl]; None without a key.
        names_code: those of its keys whose value may name a function in a Python file.
        exclusive: sets of its keys of which one at most counts.
    """

    kind: Kind
    keys: type[Section] | None = None
    names_code: tuple[str, ...] = ()
    exclusive: tuple[tuple[str, ...], ...] = ()

    @property
    def name(self) -> str:
        """Return its name."""
        return self.kind.name

    @property
    def key(self) -> str:
        """Return the key that chooses it; "" for what is learned if no key chooses another."""
        return self.kind.key

    @property
    def section(self) -> str:
        """Return the name of its section of keys; "" without one."""
        return self.key.partition(".")[0]


REWARDS_WAY = WayToLearn(
    Kind(
        "rewards",
        (Measure("eval_reward", "reward held out", True), Measure("reward", "reward", True)),
        "rl.reward",
        alike=("rl.reward",),
    ),
    RlSection,
    names_code=("rl.reward",),
    exclusive=(("rl.answer_regex", "rl.answer_schema"),),
)
PREFERENCES_WAY = WayToLearn(
    Kind(
        "preferences",
        (
            Measure("eval_accuracy", "share right", True, is_share=True),
            Measure("eval_loss", "loss"),
        ),
        "prefer.loss",
    ),
    PreferSection,
)
TEXTS_WAY = WayToLearn(listing.TEXTS)
# The last is what a run learns from if no key chooses another.
WAYS_TO_LEARN: tuple[WayToLearn, ...] = (REWARDS_WAY, PREFERENCES_WAY, TEXTS_WAY)

SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "optim": OptimSection,
    "train": TrainSection,
    "lora": LoraSection,
    **{way.section: way.keys for way in WAYS_TO_LEARN if way.keys},
}
KEYS: tuple[str, ...] = tuple(
    f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields
)


def described(key: str) -> Key:
    """Return what a key means and takes."""
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    said = dict(cast(Mapping[str, Any], field.json_schema_extra))
    usual = said.pop("usual", None)
    default = usual if field.default is None else field.default
    if "varies" not in said:
        said.setdefault("fixed", SECTIONS[section].fixed)
    return Key(meaning=str(field.description), default=default, **said)


def belonging() -> dict[str, tuple[str, ...]]:
    """Return, by key, the keys that say something about its value: where that value gives way to
    another one, they do, too.
    """
    found: dict[str, tuple[str, ...]] = {}
    for key in KEYS:
        if owner := described(key).belongs_to:
            found[owner] = (*found.get(owner, ()), key)
    return found
