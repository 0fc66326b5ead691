"""Define every key of the configuration: its type, default, accepted values and meaning.

A section is a table of the TOML file, such as [optim], and a pydantic model here. A key is a field of
this model. Its declaration says what it means and accepts (`Key`), and pages, `--print-config` and errors
show the declaration.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from monograph.data import MAX_HELD_OUT, MAX_WEIGHT, MIN_WEIGHT
from monograph.errors import join_with_or
from monograph.model.families import DEFAULT_FAMILY, FAMILIES, PRESETS
from monograph.optim_table import FORMATS, OPTIMIZERS
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE, Range
from monograph.rl.advantages import ADVANTAGES
from monograph.rl.parameters import Parameter
from monograph.rl.preferences import LOSSES
from monograph.rl.rewards import OWN_FUNCTION, REWARDS
from monograph.run import listing
from monograph.run.listing import Measure, RunKind
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


# The functions `_parse_...` run before pydantic checks a key's type. They turn a text, as a shell gives it,
# into a value of the type. Other values are returned unchanged, and pydantic refuses them if they are wrong.


def _parse_count(value: object) -> Any:
    """Turn `"512k"` into 512000, `"64Ki"` into 65536, and `1e6` or `"1e6"` into 1000000."""
    if isinstance(value, str):
        text = value.lower()
        with_suffix = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgbt]|[kmg]i)", text)
        if with_suffix:
            # As decimals, since 8.2 * 10**6 is not a whole number in floating point.
            value = float(Decimal(with_suffix[1]) * _MULTIPLES[with_suffix[2]])
        elif re.fullmatch(r"[0-9]+(\.[0-9]+)?e[0-9]+", text):
            value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_pair(value: object) -> Any:
    """Turn `[0.9, 0.95]` or `"[0.9, 0.95]"` into a tuple; a text may be without brackets."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.strip("[]()").split(","))
    return tuple(value) if isinstance(value, list) else value


def _parse_numbers(value: object) -> Any:
    """Turn `"2,1"` or `"[2, 1]"` into `["2", "1"]`, and a single number into a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]").split(",")]
    return [value] if isinstance(value, int | float) else value


def _parse_texts(value: object) -> Any:
    """Turn `'["a", "b"]'` into `["a", "b"]`; another text, such as `[ab]*.txt`, is one text."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return tomllib.loads(f"list = {value}")["list"]
        except tomllib.TOMLDecodeError:
            # A text that begins with [" is a list with a mistake, since no pattern of files begins so. The
            # error is a ValueError, by which pydantic learns that the value is wrong.
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
TextList = Annotated[
    Text | Annotated[list[Text], Field(min_length=1)], BeforeValidator(_parse_texts)
]
# Larger numbers are refused at once. No model needs them. Building such a model, or only counting
# its parameters, would take hours, and only then could it be refused because it does not fit into
# memory.
MAX_LAYERS = 2**12
MAX_SIZE = 2**24
MAX_LENGTH = 2**22
MAX_RANK = 2**16
MAX_PER_UPDATE = 2**32
MAX_COUNT = 10**15
DEFAULT_MINUTES = 3.0
# The types of keys. A size is a number of rows, columns, heads and the like. A count may be written
# with a suffix, as in "512k", and any other whole number may not.
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Whole = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[Whole, BeforeValidator(_parse_count)]
PositiveFloat = Annotated[float, AfterValidator(ABOVE_0.checked)]
NonNegativeFloat = Annotated[float, AfterValidator(NOT_NEGATIVE.checked)]
Fraction = Annotated[float, AfterValidator(FRACTION.checked)]
Minutes = Annotated[float, Field(gt=0, le=1e7)]  # 19 years
HeldOutShare = Annotated[float, Field(ge=0, le=MAX_HELD_OUT)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
Weights = Annotated[list[Weight], Field(min_length=1), BeforeValidator(_parse_numbers)]
BelowOne = Annotated[float, AfterValidator(DECAY.checked)]  # from 0, without 1

# How the members of a sweep, the runs that it trains, may differ in a key.
#   in one graph:    members with different values train in one graph: the key is a number that an
#                    update reads, or the seed of weights and row order
#   between graphs:  members with different values train in different graphs, as the key changes
#                    shapes, the graph or the length
Varies = Literal["in one graph", "between graphs"]
# Reasons why members cannot differ in a key.
_SAME_TEXT = "members are compared on the same text"
_NO_EFFECT = "it does not change what a member learns"
_DEPENDS_ON_MACHINE = "how much a member learns in a given time depends on the machine"
_OTHER_LOSS = "losses of other kinds cannot be compared: start a run for each value"
_DECIDES_WHAT_IS_MEASURED = (
    "members are compared by rewards of answers that are sampled alike: start a run for each value"
)


class Key(NamedTuple):
    """The declaration of a key: what it means and accepts, and how other runs treat it.

    Attributes:
        meaning: one sentence or two, in one line.
        expected: the values that it accepts, which completes the sentence "expected ...".
        default: the value that applies if the key is not set; None if no single value does.
        otherwise: what applies if the key is not set, in words; "" if `default` says it.
        example: a possible value; None if the default is a good example.
        auto: what "auto" stands for; "" if the key does not take "auto". The meaning ends with it.
        choices: {word that it takes, except "auto": what the word stands for}.
        belongs_to: another key whose value this key describes further, as prefer.beta describes the loss
            that prefer.loss chooses; "" if there is none.
        varies: how the members of a sweep may differ in it; None if they cannot.
        fixed: why the members of a sweep cannot differ in it; "" if they can.
        is_amount: whether a larger value nearly always scores better, as for a width. If the best
            value of such an axis is its last one, that is no reason to extend the axis.
        is_changeable_on_resume: whether a resumed run may change it. Such a key changes no equation. It says
            on which devices or in which graphs the run trains, or which records it can read.
        is_run_specific: whether the value is this run's alone. A run that begins from this one does not
            take it over. Such keys are the length, what depends on the length, and the ranks.
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
    is_changeable_on_resume: bool = False
    is_run_specific: bool = False


class _Details(TypedDict, total=False):
    """The optional arguments of `_key`. All except `implied` are attributes of `Key`.

    Attributes:
        implied: the `Key.default` of a key whose field has the default None. With None, a key that is not
            set can be told from a key that is set to its default. For example, lora.alpha is
            refused without lora.rank, but only if it is set, not because it is 32 by default.
    """

    implied: object
    otherwise: str
    example: object
    auto: str
    choices: Mapping[str, str]
    belongs_to: str
    varies: Varies
    fixed: str
    is_amount: bool
    is_changeable_on_resume: bool
    is_run_specific: bool


def _key(default: Any, expected: str, meaning: str, **details: Unpack[_Details]) -> Any:
    """Declare a key, and return the pydantic field.

    Args:
        default: the field's value if the key is not set; None if the field is to say that it is not set
            (see `_Details.implied`) or another place decides the value.
        expected: see `Key`.
        meaning: see `Key`, without `auto`.
        details: see `Key`; `fixed` can be left out if the section has it.
    """
    if "auto" in details:
        meaning = f"{meaning} auto: {details['auto']}."
    extra = cast(dict[str, Any], {"expected": expected} | details)
    return Field(default, description=meaning, json_schema_extra=extra)


def _choice(
    default: Any,
    meaning: str,
    words: Mapping[str, str],
    *,
    also: str = "",
    **details: Unpack[_Details],
) -> Any:
    """Declare a key that takes one of some words, and return the pydantic field.

    Args:
        default: see `_key`.
        meaning: see `_key`.
        words: {word, except "auto": what it stands for}.
        also: a description of the other values that the key takes; "" for none.
        details: see `_key`. With `auto` the key also takes the word "auto".
    """
    values = ["auto"] if "auto" in details else []
    values += words
    if also:
        values.append(also)
    details["choices"] = words
    return _key(default, join_with_or(values), meaning, **details)


class Section(BaseModel):
    """A table of the TOML file. A key that is not set is None if it has no default.

    Attributes:
        fixed: `Key.fixed` of the section's keys that have neither `varies` nor `fixed`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    fixed: ClassVar[str] = ""

    @classmethod
    def about(cls) -> str:
        """Return the section's docstring in one line, which users see."""
        return " ".join((cls.__doc__ or "").split())


def _with_parameters(
    section: type[Section], chosen_by: str, declared: Mapping[str, Sequence[Parameter]]
) -> Any:
    """Return a section with more keys, which are the parameters of a key's choices.

    For example, prefer.loss chooses a loss, and losses have parameters, such as prefer.beta.

    Args:
        section: the section, which has the key that makes the choice.
        chosen_by: the key that makes the choice, such as "prefer.loss".
        declared: {choice: its parameters}. Several choices may have the same parameter with
            different defaults.
    """
    parameters: dict[str, Parameter] = {}  # by name
    # For each parameter's name: {a default: the choices that have the parameter with this default}.
    defaults: dict[str, dict[float | str | None, list[str]]] = {}
    for choice, choice_parameters in declared.items():
        for parameter in choice_parameters:
            name = parameter.field
            parameters.setdefault(name, parameter)
            choices_by_default = defaults.setdefault(name, {})
            choices_by_default.setdefault(parameter.default, []).append(choice)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if len(defaults[name]) == 1:
            details = _Details(implied=parameter.default, otherwise="", example=parameter.example)
        else:
            words = _defaults_in_words(defaults[name])
            details = _Details(implied=None, otherwise=words, example=parameter.default)
        details["belongs_to"] = chosen_by
        values = parameter.values
        expected = values.expected if isinstance(values, Range) else values
        field = _key(None, expected, parameter.meaning, **details)
        fields[name] = (_type_of(values) | None, field)
    return create_model(section.__name__, __base__=section, **fields)


def _type_of(values: Range | str) -> Any:
    """Return the type of the key of a parameter that takes these values."""
    if not isinstance(values, Range):
        return Text
    return Annotated[int if values.whole else float, AfterValidator(values.checked)]


def _defaults_in_words(choices_by_default: Mapping[float | str | None, Sequence[str]]) -> str:
    """Return several defaults in words, such as "0.1, and 2 for simpo".

    Args:
        choices_by_default: {a default: the names of the choices that have it}.
    """
    most_frequent = max(choices_by_default, key=lambda default: len(choices_by_default[default]))
    others = [
        f"{_default_text(default)} for {' and '.join(choices)}"
        for default, choices in choices_by_default.items()
        if default != most_frequent
    ]
    return f"{_default_text(most_frequent)}, and {', '.join(others)}"


def _default_text(default: float | str | None) -> str:
    return f"{default:g}" if isinstance(default, int | float) else str(default)


# `Key.expected` of the types `Size`, `Whole` and `Count`.
_EXPECTS_SIZE = f"a whole number above 0, at most {MAX_SIZE}"
_EXPECTS_WHOLE = "a whole number above 0, at most 1e15"
_EXPECTS_COUNT = f'{_EXPECTS_WHOLE} ("512k" is 512000, "512Ki" is 524288)'
_PRESET_VALUE = "the preset's"  # `Key.otherwise` of the sizes of a model


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
        implied=DEFAULT_FAMILY,
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
        _EXPECTS_SIZE,
        "Number of tokens that the embedding has rows for.",
        otherwise="the tokenizer's",
        example=4096,
        fixed="it is the tokenizer's",
    )
    hidden_size: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Width of the residual stream.",
        otherwise=_PRESET_VALUE,
        example=192,
        varies="between graphs",
        is_amount=True,
    )
    intermediate_size: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Width of the feed-forward layer.",
        otherwise=f"{_PRESET_VALUE}, or 8/3 of hidden_size",
        example=512,
        varies="between graphs",
        is_amount=True,
    )
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = _key(
        None,
        f"a whole number above 0, at most {MAX_LAYERS}",
        "Number of transformer blocks.",
        otherwise=_PRESET_VALUE,
        example=4,
        varies="between graphs",
        is_amount=True,
    )
    num_attention_heads: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Number of query heads.",
        otherwise=_PRESET_VALUE,
        example=6,
        varies="between graphs",
        is_amount=True,
    )
    num_key_value_heads: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Number of key and value heads. It divides num_attention_heads.",
        otherwise=f"{_PRESET_VALUE}, or num_attention_heads",
        example=2,
        varies="between graphs",
        is_amount=True,
    )
    max_position_embeddings: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Longest sequence in tokens.",
        otherwise="data.sequence_length",
        example=2048,
        fixed="vary data.sequence_length",
    )
    tie_word_embeddings: bool | None = _key(
        None,
        "true or false",
        "Whether the output head is the embedding's transpose.",
        otherwise=_PRESET_VALUE,
        example=True,
        varies="between graphs",
    )
    mtp_num_hidden_layers: Annotated[int, Field(ge=0, le=1)] | None = _key(
        None,
        "0 or 1",
        "Layers of a head that predicts the token after the next one, which is then trained, too.",
        implied=0,
        varies="between graphs",
    )

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that were given, by their Hugging Face names."""
        other_keys = ("preset", "family", "init")
        return {key: value for key, value in self if key not in other_keys and value is not None}


class DataSection(Section):
    """The text, and how it becomes rows of tokens."""

    source: TextList = _key(
        "stdlib",
        "a path, a glob, or a list of them",
        "Text to train on. stdlib: Python's own sources. -: stdin. hf://OWNER/NAME: a dataset of the Hugging Face Hub.",
        fixed=_SAME_TEXT,
    )
    weights: Weights | None = _key(
        None,
        f"a list of numbers from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, one for each source",
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
        _EXPECTS_SIZE,
        "Number of tokens of a bpe that is trained.",
        implied=4096,
        belongs_to="data.tokenizer",
        varies="between graphs",
        is_amount=True,
    )
    sequence_length: Auto | Annotated[Count, Field(le=MAX_LENGTH)] = _key(
        "auto",
        _EXPECTS_COUNT.replace("1e15", str(MAX_LENGTH)) + ", or auto",
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
    held_out: HeldOutShare = _key(
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
    ignore_keys: TextList | None = _key(
        None,
        "a name, or a list of them",
        "Keys of records to leave out. A record with an unknown key is refused otherwise.",
        example=["my_key"],
        fixed=_SAME_TEXT,
        is_changeable_on_resume=True,
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
    betas: Annotated[tuple[BelowOne, BelowOne], BeforeValidator(_parse_pair)] = _key(
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
        implied=0.05,
        belongs_to="optim.schedule",
        varies="in one graph",
    )
    warmup_updates: Auto | Annotated[int, Field(ge=0, le=MAX_COUNT)] = _key(
        "auto",
        "a whole number from 0 to 1e15, or auto",
        "Updates of linear warm-up.",
        auto="5 % of the run, at least 10 (or half of a shorter run), at most 2,000",
        example=100,
        varies="in one graph",
        is_run_specific=True,
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
        _EXPECTS_SIZE,
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
        _EXPECTS_COUNT,
        "Stop after this many updates.",
        example=1000,
        varies="between graphs",
        is_amount=True,
        is_run_specific=True,
    )
    tokens: Count | None = _key(
        None,
        _EXPECTS_COUNT,
        "Stop after this many tokens.",
        example=10_000_000,
        varies="between graphs",
        is_amount=True,
        is_run_specific=True,
    )
    epochs: Whole | None = _key(
        None,
        _EXPECTS_WHOLE,
        "Stop after this many passes over the data.",
        example=1,
        fixed="say it in train.updates or train.tokens",
        is_run_specific=True,
    )
    minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "Train for about this many minutes.",
        implied=DEFAULT_MINUTES,
        fixed=_DEPENDS_ON_MACHINE,
        is_run_specific=True,
    )
    wall_minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "End the whole run within about this many minutes, with preparation, compiling and report, or else refuse it.",
        otherwise="no limit",
        example=10,
        fixed=_DEPENDS_ON_MACHINE,
        is_run_specific=True,
    )
    tokens_per_update: Auto | Annotated[Count, Field(le=MAX_PER_UPDATE)] = _key(
        "auto",
        _EXPECTS_COUNT.replace("1e15", str(MAX_PER_UPDATE)) + ", or auto",
        "Tokens of an update.",
        auto="2,048, or one row if that is longer",
        example=65_536,
        varies="between graphs",
    )
    micro_batch: Auto | Size = _key(
        "auto",
        f"{_EXPECTS_SIZE}, or auto",
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
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_head"] = _choice(
        "auto",
        "Precision of the arithmetic.",
        {
            "fp32": "everything in fp32",
            "bf16": "products, attention and residual stream in bf16",
            "fp16": "the same in fp16; gradients are scaled",
            "fp8": "blocks' linear layers in fp8, the rest as in bf16",
            "fp8_head": "two of the head's three products in fp8, the rest as in bf16",
        },
        auto="bf16 if the device has it, else fp32",
        example="bf16",
        varies="between graphs",
    )
    quantize: Literal["none", "int4", "int8"] = _choice(
        "none",
        "To which integers weights are rounded in training, as a GGUF file will have them.",
        {
            "none": "weights are not rounded",
            "int4": "4 bits, of which `export --format gguf` makes a q4_0 file",
            "int8": "8 bits, of which it makes a q8_0 file",
        },
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
        is_changeable_on_resume=True,
        is_run_specific=True,
    )
    remat: Literal["auto", "none", "pointwise", "full", "offload"] | Fraction = _choice(
        "auto",
        "Activation checkpointing: what is computed twice. A number: the share that is kept.",
        {
            "none": "nothing",
            "pointwise": "what is between products, convolutions and attention",
            "full": "each block; its input is kept",
            "offload": "each block; its input is kept in host memory",
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
        is_changeable_on_resume=True,
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
        is_changeable_on_resume=True,
        is_run_specific=True,
    )
    gather_dtype: Literal["fp32", "bf16"] = _choice(
        "fp32",
        "With fsdp and hsdp: the dtype in which weights are sent.",
        {"fp32": "as they are", "bf16": "rounded, with half the traffic"},
        belongs_to="train.parallel",
        fixed=_NO_EFFECT,
        is_changeable_on_resume=True,
        is_run_specific=True,
    )
    eval_every: Auto | Whole = _key(
        "auto",
        f"{_EXPECTS_WHOLE}, or auto",
        "Updates between evaluations.",
        auto="about 12 evaluations in a run",
        example=100,
        fixed=_NO_EFFECT,
        is_run_specific=True,
    )
    save_every: Auto | Whole = _key(
        "auto",
        f"{_EXPECTS_WHOLE}, or auto",
        "Updates between checkpoints.",
        auto="about 6 checkpoints in a run",
        example=500,
        fixed=_NO_EFFECT,
        is_run_specific=True,
    )
    keep: Whole = _key(
        2,
        _EXPECTS_WHOLE,
        "How many of the newest checkpoints are kept. 1 leaves nothing to fall back on.",
        fixed=_NO_EFFECT,
    )
    mtp_weight: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Factor of the loss of the head that model.mtp_num_hidden_layers adds.",
        implied=0.3,
        belongs_to="model.mtp_num_hidden_layers",
        varies="between graphs",
    )


class LoraSection(Section):
    """Low-rank adapters, trained next to frozen weights that model.init names. To use them, set
    rank.
    """

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = _key(
        None,
        f"a whole number above 0, at most {MAX_RANK}",
        "Rank of the adapters.",
        otherwise="no adapters",
        example=16,
        varies="in one graph",
    )
    alpha: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "The adapters' output is scaled by alpha / rank.",
        implied=32.0,
        varies="in one graph",
    )
    rslora: bool | None = _key(
        None,
        "true or false",
        "Scale the adapters' output by alpha / sqrt(rank) instead (rsLoRA).",
        implied=False,
        varies="in one graph",
    )
    dora: bool | None = _key(
        None,
        "true or false",
        "Train the lengths of rows apart from their directions (DoRA).",
        implied=False,
        varies="between graphs",
    )
    lr_ratio: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Learning rate of the adapters' second matrices as a multiple of optim.lr (LoRA+).",
        implied=1.0,
        varies="in one graph",
    )
    targets: TextList | None = _key(
        None,
        "all-linear, a list of module names or a regular expression for whole names",
        "Linear layers that get an adapter. all-linear: all but the head.",
        implied="all-linear",
        varies="between graphs",
    )
    dropout: BelowOne | None = _key(
        None,
        DECAY.expected,
        "Dropout of the adapters' inputs.",
        implied=0.0,
        varies="in one graph",
    )
    base: Literal["auto", "int8", "nf4"] | None = _choice(
        None,
        "Form in which frozen weights are kept.",
        {"int8": "8 bits a weight", "nf4": "4 bits a weight, as in QLoRA"},
        implied="auto",
        auto="16 bits if the arithmetic is in 16 bits",
        example="nf4",
        varies="between graphs",
    )
    tokens: TextList | None = _key(
        None,
        'auto or a list of tokens, ["<|im_start|>"]',
        "Tokens whose rows of embedding and head are trained, besides those new to the base.",
        implied="auto",
        auto="no others",
        example=["<|im_start|>"],
        fixed="which tokens are new to a base is a fact, not a choice",
    )


class _RewardSection(Section):
    """The key that chooses a reward, before the keys of the rewards' parameters."""

    fixed = _DECIDES_WHAT_IS_MEASURED

    reward: Text | None = _choice(
        None,
        "What scores an answer (docs/rewards.md).",
        {name: reward.meaning for name, reward in REWARDS.items()}
        | {OWN_FUNCTION: "what your function returns"},
        otherwise="nothing: texts are learned",
        example="exact",
    )


_RewardSectionWithParameters: Any = _with_parameters(
    _RewardSection, "rl.reward", {name: reward.parameters for name, reward in REWARDS.items()}
)


class RlSection(_RewardSectionWithParameters):  # type: ignore[misc]
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
        implied="dr_grpo",
        varies="between graphs",
    )
    prompts: Size | None = _key(None, _EXPECTS_SIZE, "Prompts of an update.", implied=16)
    group: Annotated[int, Field(ge=2, le=MAX_SIZE)] | None = _key(
        None, f"a whole number from 2 to {MAX_SIZE}", "Answers to each prompt.", implied=8
    )
    draws: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Maximum number of samplings in an update, which end when rl.prompts groups have unequal rewards.",
        implied=1,
        varies="between graphs",
    )
    updates: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Updates made from the answers of one sampling.",
        implied=1,
        fixed="in the same number of updates, members would sample different numbers of answers",
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
        implied="none",
        varies="between graphs",
    )
    kl_coef: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Strength of rl.kl.",
        example=0.05,
        belongs_to="rl.kl",
        varies="between graphs",
    )
    entropy_coef: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Strength of an entropy bonus.",
        otherwise="no bonus",
        example=0.01,
        belongs_to="rl.kl",
        varies="between graphs",
    )
    max_new_tokens: Size | None = _key(
        None,
        _EXPECTS_SIZE,
        "Maximum tokens of an answer. Longer answers are cut.",
        otherwise="half of data.sequence_length",
        example=128,
    )
    truncated: Literal["keep", "mask"] | None = _choice(
        None,
        "What is done with answers that were cut.",
        {"keep": "they are learned from", "mask": "they are left out of the loss"},
        implied="keep",
        varies="between graphs",
    )
    truncation_penalty: NonNegativeFloat | None = _key(
        None,
        NOT_NEGATIVE.expected,
        "What is taken from the reward of an answer that was cut.",
        implied=0.0,
        belongs_to="rl.truncated",
        varies="between graphs",
    )
    temperature: Annotated[float, Field(gt=0, le=100)] | None = _key(
        None,
        "a number above 0, at most 100",
        "Temperature at which answers are sampled and learned.",
        implied=1.0,
    )


class _PreferenceSection(Section):
    """The key that chooses a loss, before the keys of the losses' parameters."""

    fixed = _OTHER_LOSS

    loss: Literal[tuple(LOSSES)] | None = _choice(  # type: ignore[valid-type]
        None,
        "How answers are compared (docs/preferences.md).",
        {name: loss.meaning for name, loss in LOSSES.items()},
        otherwise="dpo for pairs, kto for labelled answers",
        example="dpo",
    )


_PreferenceSectionWithParameters: Any = _with_parameters(
    _PreferenceSection, "prefer.loss", {name: loss.parameters for name, loss in LOSSES.items()}
)


class PreferSection(_PreferenceSectionWithParameters):  # type: ignore[misc]
    """Preferences: pairs of a chosen and a rejected answer, or labelled answers, are compared and
    learned from.
    """


class WayToLearn(NamedTuple):
    """A way to learn (texts, preferences or rewards), as far as it is known without torch.

    The rest is the `OBJECTIVE` of `session/objectives/NAME.py`, where NAME is the way's name. That
    file imports torch, which takes seconds.

    Attributes:
        kind: its name, the key that chooses it, such as rl.reward, and what a list of runs shows.
        keys: the section of its keys, such as [rl]; None if it has no keys.
        names_code: the keys whose value may name a function in a Python file.
        exclusive: groups of keys; at most one key of each group counts.
        implied_choices: {key: (another key, its value)}. If the key is given and the other key is not,
            the other key has this value.
    """

    kind: RunKind
    keys: type[Section] | None = None
    names_code: tuple[str, ...] = ()
    exclusive: tuple[tuple[str, ...], ...] = ()
    implied_choices: Mapping[str, tuple[str, Any]] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Return its name."""
        return self.kind.name

    @property
    def key(self) -> str:
        """Return the key that chooses it; "" for the way that applies if no key chooses one."""
        return self.kind.key

    @property
    def section(self) -> str:
        """Return the name of its section of keys; "" without one."""
        return self.key.partition(".")[0]


REWARDS_WAY = WayToLearn(
    RunKind(
        "rewards",
        (
            Measure("eval_reward", "reward held out", higher_is_better=True),
            Measure("reward", "reward", higher_is_better=True),
        ),
        "rl.reward",
        result_keys=("rl.reward",),
    ),
    RlSection,
    names_code=("rl.reward", "rl.environment"),
    exclusive=(("rl.answer_regex", "rl.answer_schema"),),
    implied_choices={"rl.environment": ("rl.reward", "environment")},
)
PREFERENCES_WAY = WayToLearn(
    RunKind(
        "preferences",
        (
            Measure("eval_accuracy", "share right", higher_is_better=True, is_share=True),
            Measure("eval_loss", "loss"),
        ),
        "prefer.loss",
    ),
    PreferSection,
)
TEXTS_WAY = WayToLearn(listing.TEXTS)
# The last way applies if no key chooses one.
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


def key_declaration(key: str) -> Key:
    """Return the declaration of a key."""
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    details = dict(cast(Mapping[str, Any], field.json_schema_extra))
    implied = details.pop("implied", None)
    default = implied if field.default is None else field.default
    if "varies" not in details:
        details.setdefault("fixed", SECTIONS[section].fixed)
    return Key(meaning=str(field.description), default=default, **details)


def dependent_keys() -> dict[str, tuple[str, ...]]:
    """Return {key: the keys that say something about its value} (`Key.belongs_to`).

    They no longer apply if the key's value is overridden by another one.
    """
    dependents: dict[str, tuple[str, ...]] = {}
    for key in KEYS:
        owner = key_declaration(key).belongs_to
        if owner:
            dependents[owner] = (*dependents.get(owner, ()), key)
    return dependents
