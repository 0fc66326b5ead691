"""Define every key of the configuration: its type, its default, the values it accepts and its
meaning.

The pages, `--print-config` and errors have these texts from here (`described`).
"""

import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from monograph.data import HEAVIEST, LARGEST_SHARE, LIGHTEST
from monograph.model.families import FAMILIES, FIRST_FAMILY, PRESETS
from monograph.optim_table import FORMATS, OPTIMIZERS
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE
from monograph.rl.advantages import ADVANTAGES

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


class Key(NamedTuple):
    """What a key means and takes, as the pages, `--print-config` and errors say it.

    Attributes:
        meaning: one sentence or two, in one line.
        expected: the values that it accepts, to complete the sentence "expected ...".
        default: the value that applies where the key is not set; None if there is none or no single
            one.
        otherwise: what applies there in words, if it is no value; "" if nothing does.
        example: a value that somebody might set; None where the default is one.
        auto: what "auto" stands for, which the meaning ends with; "" if the key does not take it.
        choices: what each word that it takes stands for, besides "auto".
    """

    meaning: str
    expected: str
    default: object
    otherwise: str
    example: object
    auto: str
    choices: Mapping[str, str]


class _Said(TypedDict):
    """What a field of a section says of its key; see `_key`."""

    expected: str
    usual: object
    otherwise: str
    example: object
    auto: str
    choices: Mapping[str, str]
    belongs_to: str


def _key(
    default: Any,
    expected: str,
    meaning: str,
    *,
    usual: object = None,
    otherwise: str = "",
    example: object = None,
    auto: str = "",
    choices: Mapping[str, str] = MappingProxyType({}),
    belongs_to: str = "",
) -> Any:
    """Define a configuration key.

    Args:
        default: the value of the setting; None: "not given", for keys whose value is decided
            elsewhere.
        expected: completes the sentence "expected ..." of the error for a wrong value.
        meaning: what the key means, in one line.
        usual: the value that applies where a key without a default is not given.
        otherwise: what applies there in words, if it is no single value.
        example: a value that somebody might set, of a key that has no default, or whose default is
            auto.
        auto: what "auto" stands for, of a key that takes it.
        choices: what each word that it takes stands for, besides "auto".
        belongs_to: the key about whose value it says something, see `belonging`.
    """
    said = _Said(
        expected=expected,
        usual=usual,
        otherwise=otherwise,
        example=example,
        auto=auto,
        choices=dict(choices),
        belongs_to=belongs_to,
    )
    if auto:
        meaning = f"{meaning} auto: {auto}."
    return Field(default, description=meaning, json_schema_extra=cast(dict[str, Any], said))


def _choice(
    default: Any,
    meaning: str,
    choices: Mapping[str, str],
    *,
    usual: object = None,
    otherwise: str = "",
    example: object = None,
    also: str = "",
    auto: str = "",
    belongs_to: str = "",
) -> Any:
    """Define a key that takes one of some words, each with what it stands for, "auto", or what
    `also` says.
    """
    words = [*(["auto"] if auto else []), *choices, *([also] if also else [])]
    expected = f"{', '.join(words[:-1])} or {words[-1]}"
    return _key(
        default,
        expected,
        meaning,
        usual=usual,
        otherwise=otherwise,
        example=example,
        auto=auto,
        choices=choices,
        belongs_to=belongs_to,
    )


class Section(BaseModel):
    """A table of the TOML file; a key that is not given is None if it has no default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def about(cls) -> str:
        """Return what the section is about, its docstring, in one line."""
        return " ".join((cls.__doc__ or "").split())


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
    )
    family: Literal[tuple(FAMILIES)] | None = _choice(  # type: ignore[valid-type]
        None,
        "Architecture of a new model.",
        {name: f"that of transformers' {family.architecture}" for name, family in FAMILIES.items()},
        usual=FIRST_FAMILY,
    )
    init: Text | None = _key(
        None,
        "a run, a folder, hf://OWNER/NAME, a .pth file or FILE.py:FUNCTION",
        "Weights to start from, or the Python function that builds the model.",
        otherwise="a new model",
        example="FOLDER",
    )
    vocab_size: Size | None = _key(
        None,
        _SIZE,
        "Number of tokens that the embedding has rows for.",
        otherwise="the tokenizer's",
        example=4096,
    )
    hidden_size: Size | None = _key(
        None, _SIZE, "Width of the residual stream.", otherwise=_PRESETS, example=192
    )
    intermediate_size: Size | None = _key(
        None,
        _SIZE,
        "Width of the feed-forward layer.",
        otherwise=f"{_PRESETS}, or 8/3 of hidden_size",
        example=512,
    )
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = _key(
        None,
        f"a whole number above 0, at most {MOST_LAYERS}",
        "Number of transformer blocks.",
        otherwise=_PRESETS,
        example=4,
    )
    num_attention_heads: Size | None = _key(
        None, _SIZE, "Number of query heads.", otherwise=_PRESETS, example=6
    )
    num_key_value_heads: Size | None = _key(
        None,
        _SIZE,
        "Number of key and value heads. It divides num_attention_heads.",
        otherwise=f"{_PRESETS}, or num_attention_heads",
        example=2,
    )
    max_position_embeddings: Size | None = _key(
        None, _SIZE, "Longest sequence in tokens.", otherwise="data.sequence_length", example=2048
    )
    tie_word_embeddings: bool | None = _key(
        None,
        "true or false",
        "Whether the output head is the embedding's transpose.",
        otherwise=_PRESETS,
        example=True,
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
    )
    weights: Weights | None = _key(
        None,
        f"a list of numbers from {LIGHTEST:g} to {HEAVIEST:g}, one for each source",
        "How often an epoch sees each source.",
        otherwise="once each",
        example=[2.0, 1.0],
        belongs_to="data.source",
    )
    tokenizer: Text = _choice(
        "auto",
        "The tokenizer.",
        {"bpe": "pairs of bytes, trained on the text", "bytes": "each byte is a token"},
        also="a tokenizer.json",
        auto="the model's own; for a new model bpe, which is trained on the text",
        example="bytes",
    )
    vocab_size: Size | None = _key(
        None,
        _SIZE,
        "Number of tokens of a bpe that is trained.",
        usual=4096,
        belongs_to="data.tokenizer",
    )
    sequence_length: Auto | Annotated[Count, Field(le=MOST_LENGTH)] = _key(
        "auto",
        _COUNT.replace("1e15", str(MOST_LENGTH)) + ", or auto",
        "Tokens in a row.",
        auto="256 for a new model, else what the model has, at most 1,024",
        example=1024,
    )
    packing: Literal["packed", "padded"] = _choice(
        "packed",
        "How documents fill rows.",
        {"packed": "documents share a row", "padded": "each document has rows of its own"},
    )
    held_out: Share = _key(
        0.05, "a number from 0 (none) to 0.5", "Share of the bytes that is kept for evaluation."
    )
    text_key: Text | None = _key(
        None,
        "a name",
        "Key or column of a record that holds its text.",
        otherwise="text, or the keys of a chat",
        example="text",
    )
    ignore_keys: Texts | None = _key(
        None,
        "a name, or a list of them",
        "Keys of records to leave out. A record with an unknown key is refused otherwise.",
        example=["my_key"],
    )
    bad_records: Literal["refuse", "skip"] = _choice(
        "refuse",
        "What is done with a record that has no usable text.",
        {"refuse": "the run does not start", "skip": "it is left out and counted"},
    )
    answers: Literal["every", "last"] = _choice(
        "every",
        "Which answers of a conversation are trained on.",
        {"every": "all of them", "last": "the last one alone"},
    )
    too_long: Literal["truncate", "refuse"] = _choice(
        "truncate",
        "What is done with a conversation that is longer than a row.",
        {"truncate": "turns at its front are left out", "refuse": "the run does not start"},
    )


class OptimSection(Section):
    """The update of the weights."""

    name: Literal["auto", *OPTIMIZERS] = _choice(  # type: ignore[valid-type]
        "auto",
        "The optimizer.",
        {name: row.about for name, row in OPTIMIZERS.items()},
        auto="muon for a new model, else adamw",
        example="adamw",
    )
    state: Literal[*FORMATS] = _choice(  # type: ignore[valid-type]
        "fp32",
        "Form of the optimizer's moments.",
        {name: row.about for name, row in FORMATS.items()},
    )
    master_weights: bool = _key(
        True,
        "true or false",
        "Whether weights are kept in fp32. false: in bf16, stochastically rounded.",
    )
    lr: Auto | PositiveFloat = _key(
        "auto",
        f"{ABOVE_0.expected}, or auto",
        "Peak learning rate.",
        auto="2e-4 for adapters, 2e-5 for all weights of a model that exists, a tenth of these for rewards and "
        "preferences; for a new model by its preset, such as 6e-3 for nano and micro",
        example=3e-4,
    )
    weight_decay: Auto | NonNegativeFloat = _key(
        "auto",
        f"{NOT_NEGATIVE.expected}, or auto",
        "Decoupled decay of the matrices.",
        auto="0.1; in a new nano or micro by the number of epochs",
        example=0.01,
    )
    betas: Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)] = _key(
        (0.9, 0.95), "two numbers, 0 or more and below 1", "Decay of the first and second moment."
    )
    eps: PositiveFloat = _key(
        1e-8, ABOVE_0.expected, "Number that is added to the denominator of the update."
    )
    grad_clip: Literal["none"] | PositiveFloat = _key(
        1.0,
        f"{ABOVE_0.expected}, or none",
        "Largest norm of the gradient; a larger one is scaled down to it.",
        choices={"none": "gradients stay as they are"},
    )
    skip_spikes: Auto | bool = _key(
        "auto",
        "true, false or auto",
        "Skip updates whose loss and gradient both stand out.",
        auto="if gradients are clipped, except with rl.reward",
        example=False,
    )
    schedule: Literal["cosine", "constant", "wsd"] = _choice(
        "cosine",
        "Learning rate after the warm-up.",
        {
            "cosine": "falls along half a cosine to min_lr_ratio",
            "wsd": "stays, and falls to min_lr_ratio over the last 20 %",
            "constant": "stays",
        },
    )
    min_lr_ratio: Ratio | None = _key(
        None,
        "a number from 0 to 1",
        "Share of optim.lr that the schedule falls to.",
        usual=0.05,
        belongs_to="optim.schedule",
    )
    warmup_updates: Auto | Annotated[int, Field(ge=0, le=MOST_COUNT)] = _key(
        "auto",
        "a whole number from 0 to 1e15, or auto",
        "Updates of linear warm-up.",
        auto="5 % of the run, at least 10 (or half of a shorter run), at most 2,000",
        example=100,
    )
    ema: Literal["none"] | Fraction = _key(
        "none",
        f"{FRACTION.expected}, or none",
        "Decay of an average of the weights, which is then evaluated, sampled and exported.",
        choices={"none": "there is no average"},
    )
    transfer: Literal["none", "width"] = _choice(
        "none",
        "Which model lr, weight_decay and eps are for (docs/transfer.md).",
        {"none": "this one", "width": "a narrow one, and a rule carries them over"},
    )
    transfer_base: Size | None = _key(
        None,
        _SIZE,
        "hidden_size of the model that optim.lr is for.",
        otherwise="the narrowest of this shape from 256 on",
        example=64,
        belongs_to="optim.transfer",
    )


class TrainSection(Section):
    """The length, batch sizes and means of training. At most one of updates, tokens, epochs and
    minutes is given.
    """

    updates: Count | None = _key(None, _COUNT, "Stop after this many updates.", example=1000)
    tokens: Count | None = _key(None, _COUNT, "Stop after this many tokens.", example=10_000_000)
    epochs: Whole | None = _key(
        None, _WHOLE, "Stop after this many passes over the data.", example=1
    )
    minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "Train for about this many minutes.",
        usual=DEFAULT_MINUTES,
    )
    wall_minutes: Minutes | None = _key(
        None,
        "a number above 0, at most 1e7",
        "End the whole run within about this many minutes, with preparation, compiling and report, or else refuse it.",
        otherwise="no limit",
        example=10,
    )
    tokens_per_update: Auto | Annotated[Count, Field(le=MOST_PER_UPDATE)] = _key(
        "auto",
        _COUNT.replace("1e15", str(MOST_PER_UPDATE)) + ", or auto",
        "Tokens of an update.",
        auto="2,048, or one row if that is longer",
        example=65_536,
    )
    micro_batch: Auto | Size = _key(
        "auto",
        f"{_SIZE}, or auto",
        "Rows on the device at once.",
        auto="the number that the planner finds fastest",
        example=8,
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _key(
        0, "a whole number, 0 or more", "Seed of new weights and of the order of the data."
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
    )
    memory: Literal["auto", "device", "stream"] = _choice(
        "auto",
        "Where weights are.",
        {"device": "on the device", "stream": "in host memory, fetched stage by stage"},
        auto="stream if nothing else fits a GPU",
        example="stream",
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
    )
    gather_dtype: Literal["fp32", "bf16"] = _choice(
        "fp32",
        "With fsdp and hsdp: the dtype in which weights are sent.",
        {"fp32": "as they are", "bf16": "rounded, with half the traffic"},
        belongs_to="train.parallel",
    )
    eval_every: Auto | Whole = _key(
        "auto",
        f"{_WHOLE}, or auto",
        "Updates between evaluations.",
        auto="about 12 evaluations in a run",
        example=100,
    )
    save_every: Auto | Whole = _key(
        "auto",
        f"{_WHOLE}, or auto",
        "Updates between checkpoints.",
        auto="about 6 checkpoints in a run",
        example=500,
    )
    keep: Whole = _key(
        2, _WHOLE, "How many of the newest checkpoints are kept. 1 leaves nothing to fall back on."
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
    )
    alpha: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "The adapters' output is scaled by alpha / rank.", usual=32.0
    )
    rslora: bool | None = _key(
        None,
        "true or false",
        "Scale the adapters' output by alpha / sqrt(rank) instead (rsLoRA).",
        usual=False,
    )
    dora: bool | None = _key(
        None,
        "true or false",
        "Train the lengths of rows apart from their directions (DoRA).",
        usual=False,
    )
    lr_ratio: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Learning rate of the adapters' second matrices as a multiple of optim.lr (LoRA+).",
        usual=1.0,
    )
    targets: Texts | None = _key(
        None,
        "all-linear, a list of module names or a regular expression for whole names",
        "Linear layers that get an adapter. all-linear: all but the head.",
        usual="all-linear",
    )
    dropout: Momentum | None = _key(
        None, DECAY.expected, "Dropout of the adapters' inputs.", usual=0.0
    )
    base: Literal["auto", "int8", "nf4"] | None = _choice(
        None,
        "Form in which frozen weights are kept.",
        {"int8": "8 bits a weight", "nf4": "4 bits a weight, as in QLoRA"},
        usual="auto",
        auto="16 bits if the arithmetic is in 16 bits",
        example="nf4",
    )
    tokens: Texts | None = _key(
        None,
        'auto or a list of tokens, ["<|im_start|>"]',
        "Tokens whose rows of embedding and head are trained, besides those new to the base.",
        usual="auto",
        auto="no others",
        example=["<|im_start|>"],
    )


class RlSection(Section):
    """Reinforcement learning: the model's own answers to prompts are scored and learned from. To
    use it, set reward.
    """

    reward: Text | None = _choice(
        None,
        "What scores an answer (docs/rewards.md).",
        {
            "number": "1 if its last number is the record's answer",
            "exact": "1 if it is the record's answer",
            "regex": "1 if rl.reward_regex matches it",
            "json-schema": "1 if it is JSON that rl.reward_schema allows",
            "python": "the share of the record's tests that its code passes",
            "teacher": "how much likelier rl.teacher finds its tokens than the model does",
            "FILE.py:FUNCTION": "what your function returns",
        },
        otherwise="nothing: texts are learned",
        example="exact",
    )
    reward_regex: Text | None = _key(
        None,
        "a regular expression",
        "With rl.reward = regex: what an answer matches.",
        example="[0-9]+",
        belongs_to="rl.reward",
    )
    reward_schema: Text | None = _key(
        None,
        "a file with a JSON schema",
        "With rl.reward = json-schema: the schema.",
        example="FILE.json",
        belongs_to="rl.reward",
    )
    teacher: Text | None = _key(
        None,
        "a run or a folder",
        "With rl.reward = teacher: the model that scores each token.",
        example="RUN",
        belongs_to="rl.reward",
    )
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


class PreferSection(Section):
    """Preferences: pairs of a chosen and a rejected answer, or labelled answers, are compared and
    learned from.
    """

    loss: Literal["dpo", "robust", "ipo", "simpo", "orpo", "kto"] | None = _choice(
        None,
        "How answers are compared (docs/preferences.md).",
        {
            "dpo": "by what they gain on the weights that the run begins from",
            "robust": "as dpo, where label_smoothing is the share of swapped pairs",
            "ipo": "as dpo, with a squared error around a gap of 1 / (2 beta)",
            "simpo": "by likelihood a token, with gamma as the margin; no reference",
            "orpo": "by odds, beside plain training on the chosen one; no reference",
            "kto": "one by one, each labelled good or bad",
        },
        otherwise="dpo for pairs, kto for labelled answers",
        example="dpo",
    )
    beta: PositiveFloat | None = _key(
        None,
        ABOVE_0.expected,
        "Strength of the comparison.",
        otherwise="0.1, and 2 for simpo",
        example=0.1,
        belongs_to="prefer.loss",
    )
    gamma: NonNegativeFloat | None = _key(
        None,
        NOT_NEGATIVE.expected,
        "Margin of simpo.",
        usual=1.0,
        belongs_to="prefer.loss",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = _key(
        None,
        "a number from 0 and below 0.5",
        "Share of the pairs that robust takes to be swapped.",
        usual=0.1,
        belongs_to="prefer.loss",
    )
    desirable_weight: NonNegativeFloat | None = _key(
        None,
        NOT_NEGATIVE.expected,
        "Weight of good answers for kto.",
        usual=1.0,
        belongs_to="prefer.loss",
    )
    undesirable_weight: NonNegativeFloat | None = _key(
        None,
        NOT_NEGATIVE.expected,
        "Weight of bad answers for kto.",
        usual=1.0,
        belongs_to="prefer.loss",
    )


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "optim": OptimSection,
    "train": TrainSection,
    "lora": LoraSection,
    "rl": RlSection,
    "prefer": PreferSection,
}
KEYS: tuple[str, ...] = tuple(
    f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields
)


def described(key: str) -> Key:
    """Return what a key means and takes."""
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    said = cast(_Said, field.json_schema_extra)
    default = said["usual"] if field.default is None else field.default
    return Key(
        str(field.description),
        said["expected"],
        default,
        said["otherwise"],
        said["example"],
        said["auto"],
        said["choices"],
    )


def belonging() -> dict[str, tuple[str, ...]]:
    """Return, by key, the keys that say something about its value: where that value gives way to
    another one, they do, too.
    """
    found: dict[str, tuple[str, ...]] = {}
    for key in KEYS:
        section, _, name = key.partition(".")
        said = cast(_Said, SECTIONS[section].model_fields[name].json_schema_extra)
        if owner := said["belongs_to"]:
            found[owner] = (*found.get(owner, ()), key)
    return found
