"""Define every key of the configuration: its type, its default, the values it accepts and its meaning."""

import re
import tomllib
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from monograph.data import HEAVIEST, LARGEST_SHARE, LIGHTEST
from monograph.model.families import FAMILIES, PRESETS
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE

Auto = Literal["auto"]

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _count(value: Any) -> Any:
    """Read `"512k"` → 512000, `"64Ki"` → 65536, `1e6` → 1000000; the key's type refuses any other text."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgbt]|[kmg]i)", value.lower())):
        value = float(Decimal(match[1]) * _MULTIPLES[match[2]])
    elif isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?e[0-9]+", value.lower()):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pair(value: Any) -> Any:
    """Read `[0.9, 0.95]`, `"0.9,0.95"` or `"[0.9, 0.95]"` → `(0.9, 0.95)`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.strip("[]()").split(","))
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    """Read `"2,1"` or `"[2, 1]"` → `["2", "1"]`, and a single number as a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]").split(",")]
    return [value] if isinstance(value, int | float) else value


def _strings(value: Any) -> Any:
    """Read `'["a", "b"]'`, as a shell gives a list, → `["a", "b"]`; other text, such as `[ab]*.txt`, stays as it is."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return tomllib.loads(f"list = {value}")["list"]
        except tomllib.TOMLDecodeError:
            if re.match(r"\[\s*[\"']", value):  # it is an unfinished list, as no file's name begins like this
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
# No model needs more than these. Building or counting a model of such sizes would take hours before it could be
# refused; whether this machine's memory suffices is checked later.
MOST_LAYERS, MOST_SIZE, MOST_LENGTH, MOST_RANK = 2**12, 2**24, 2**22, 2**16
MOST_PER_UPDATE, MOST_COUNT = 2**32, 10**15
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


def _key(default: Any, expected: str, meaning: str) -> Any:
    """Define a configuration key; `expected` completes the sentence "expected ..." of the error for a wrong value."""
    return Field(default, description=meaning, json_schema_extra={"expected": expected})


class Section(BaseModel):
    """A table of the TOML file; a key that is not given is None if it has no default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_SIZE, _WHOLE = f"a whole number above 0, at most {MOST_SIZE}", "a whole number above 0, at most 1e15"
_COUNT = f'{_WHOLE} ("512k" is 512000, "512Ki" is 524288)'


class ModelSection(Section):
    """The model: a preset (sizes override it), or one that exists (`init`), or sizes by their Hugging Face names."""

    preset: Literal["auto", *PRESETS] = _key(  # type: ignore[valid-type]
        "auto", f"auto, {', '.join(PRESETS)}", "a shape by name; auto: one that fits"
    )
    family: Literal[tuple(FAMILIES)] | None = _key(  # type: ignore[valid-type]
        None, ", ".join(FAMILIES), "the family of a new model; default: llama"
    )
    init: Text | None = _key(
        None, 'a folder, a .pth file or "file.py:function"', "weights to start from, or the function that builds it"
    )
    vocab_size: Size | None = _key(None, _SIZE, "entries of the embedding; default: the tokenizer's")
    hidden_size: Size | None = _key(None, _SIZE, "width of the residual stream")
    intermediate_size: Size | None = _key(None, _SIZE, "width of the feed-forward layer")
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = _key(
        None, f"a whole number above 0, at most {MOST_LAYERS}", "blocks"
    )
    num_attention_heads: Size | None = _key(None, _SIZE, "query heads")
    num_key_value_heads: Size | None = _key(None, _SIZE, "key and value heads; divides num_attention_heads")
    max_position_embeddings: Size | None = _key(None, _SIZE, "longest sequence, in tokens")
    tie_word_embeddings: bool | None = _key(None, "true or false", "whether the head is the embedding's transpose")

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that were given, by their Hugging Face names."""
        no_sizes = ("preset", "family", "init")
        return {key: value for key, value in self if key not in no_sizes and value is not None}


class DataSection(Section):
    """The text, and how it becomes rows of tokens."""

    source: Texts = _key("stdlib", "a path, a glob, or a list of them", "stdlib: Python's own sources; -: stdin")
    weights: Weights | None = _key(
        None,
        f"a list of numbers from {LIGHTEST:g} to {HEAVIEST:g}, one for each source",
        "how often an epoch sees each source; default: once",
    )
    tokenizer: Text = _key(
        "auto",
        "auto, bpe, bytes or a tokenizer.json",
        "auto: the model's own, and bpe, which is trained on the text, for a new one",
    )
    vocab_size: Size | None = _key(None, _SIZE, "entries of the tokenizer that is trained; default: 4,096")
    sequence_length: Auto | Annotated[Count, Field(le=MOST_LENGTH)] = _key(
        "auto",
        _COUNT.replace("1e15", str(MOST_LENGTH)) + ", or auto",
        "tokens per row; auto: 256 for a new model, else what the model has, at most 1,024",
    )
    packing: Literal["packed", "padded"] = _key("packed", "packed or padded", "documents share a row, or one each")
    held_out: Share = _key(0.05, "a number from 0 (none) to 0.5", "share of the bytes kept for evaluation")
    text_key: Text | None = _key(None, "a name", "the key or column of a record that holds its text; default: text")
    ignore_keys: Texts | None = _key(
        None, "a name, or a list of them", "keys of records that are left out; an unknown key is refused otherwise"
    )
    bad_records: Literal["refuse", "skip"] = _key("refuse", "refuse or skip", "records without a usable text")
    answers: Literal["every", "last"] = _key("every", "every or last", "of a conversation, which are trained on")
    too_long: Literal["truncate", "refuse"] = _key(
        "truncate", "truncate or refuse", "conversations of more than a row; truncate: turns at the front are left out"
    )


class OptimSection(Section):
    """The update of the weights."""

    name: Literal["auto", "adamw", "muon"] = _key(
        "auto", "auto, adamw or muon", "the update rule; muon: for the matrices of blocks; auto: muon for a new model"
    )
    state: Literal["fp32", "bf16", "8bit"] = _key(
        "fp32", "fp32, bf16 or 8bit", "the form in which the optimizer's moments are kept: 8, 4 or 2 bytes a parameter"
    )
    master_weights: bool = _key(
        True, "true or false", "whether weights are kept in fp32; false: in bf16, stochastically rounded"
    )
    lr: Auto | PositiveFloat = _key("auto", f"{ABOVE_0.expected}, or auto", "peak learning rate")
    weight_decay: Auto | NonNegativeFloat = _key(
        "auto", f"{NOT_NEGATIVE.expected}, or auto", "decoupled decay of the matrices"
    )
    betas: Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)] = _key(
        (0.9, 0.95), "two numbers, 0 or more and below 1", "decay of the first and second moment"
    )
    eps: PositiveFloat = _key(1e-8, ABOVE_0.expected, "added to the denominator")
    grad_clip: Literal["none"] | PositiveFloat = _key(1.0, f"{ABOVE_0.expected}, or none", "largest gradient norm")
    skip_spikes: Auto | bool = _key(
        "auto",
        "true, false or auto",
        "whether an update whose loss and gradient both stand out is skipped; auto: where gradients are clipped, "
        "but not with rl.reward",
    )
    schedule: Literal["cosine", "constant", "wsd"] = _key(
        "cosine", "cosine, wsd or constant", "rate after warm-up; wsd: constant, and a decay over the last 20 %"
    )
    min_lr_ratio: Ratio | None = _key(
        None, "a number from 0 to 1", "share of optim.lr that the schedule falls to; default: 0.05"
    )
    warmup_updates: Auto | Annotated[int, Field(ge=0, le=MOST_COUNT)] = _key(
        "auto", "a whole number from 0 to 1e15, or auto", "linear warm-up"
    )
    ema: Literal["none"] | Fraction = _key(
        "none", f"{FRACTION.expected}, or none", "decay of an average of the weights: what is scored and exported"
    )
    transfer: Literal["none", "width"] = _key(
        "none",
        "none or width",
        "width: lr, weight_decay and eps are a narrow model's, carried to this width by a rule (docs/transfer.md)",
    )
    transfer_base: Size | None = _key(
        None, _SIZE, "hidden_size of the model that optim.lr is for; default: the narrowest of this shape"
    )


class TrainSection(Section):
    """The length, batch sizes and means of training. At most one of updates, tokens, epochs and minutes is given."""

    updates: Count | None = _key(None, _COUNT, "stop after so many updates")
    tokens: Count | None = _key(None, _COUNT, "stop after so many tokens")
    epochs: Whole | None = _key(None, _WHOLE, "stop after so many passes over the data")
    minutes: Minutes | None = _key(None, "a number above 0, at most 1e7", "stop after about this long; default: 3")
    tokens_per_update: Auto | Annotated[Count, Field(le=MOST_PER_UPDATE)] = _key(
        "auto", _COUNT.replace("1e15", str(MOST_PER_UPDATE)) + ", or auto", "tokens of one optimizer update"
    )
    micro_batch: Auto | Size = _key("auto", f"{_SIZE}, or auto", "rows on the device at once")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _key(0, "a whole number, 0 or more", "of weights and data order")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = _key(
        "auto", "auto, fp32, bf16, fp16 or fp8", "of the arithmetic; fp8: of the blocks' linear layers, else bf16"
    )
    compile: Literal["auto", "whole", "blocks", "none"] = _key(
        "auto", "auto, whole, blocks or none", "what one graph holds: the step, or a block that all layers share"
    )
    remat: Literal["auto", "none", "pointwise", "full", "offload"] | Fraction = _key(
        "auto",
        "auto, none, pointwise, full, offload or a number between 0 and 1",
        "what is recomputed in the backward pass; a number: the share of the activations that is kept; offload: full, "
        "and what full keeps waits in the host's memory",
    )
    memory: Literal["auto", "device", "stream"] = _key(
        "auto", "auto, device or stream", "where weights live; stream: on the host, fetched stage by stage"
    )
    parallel: Literal["none", "ddp", "fsdp", "hsdp"] = _key(
        "none",
        "none, ddp, fsdp or hsdp",
        "how several devices share the work, a process each; hsdp: fsdp within each machine; see docs/distributed.md",
    )
    gather_dtype: Literal["fp32", "bf16"] = _key(
        "fp32", "fp32 or bf16", "with fsdp and hsdp, the dtype in which weights are sent; bf16 halves their traffic"
    )
    eval_every: Auto | Whole = _key("auto", f"{_WHOLE}, or auto", "updates between evaluations")
    save_every: Auto | Whole = _key("auto", f"{_WHOLE}, or auto", "updates between checkpoints")
    keep: Whole = _key(2, _WHOLE, "newest checkpoints that are kept; 1 leaves nothing to fall back on")


class LoraSection(Section):
    """Low-rank adapters, trained next to frozen weights that model.init names."""

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] | None = _key(
        None, f"a whole number above 0, at most {MOST_RANK}", "rank of the adapters; default: none are trained"
    )
    alpha: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "the adapters' output is scaled by alpha / rank; default: 32"
    )
    rslora: bool | None = _key(
        None, "true or false", "whether the output is scaled by alpha / sqrt(rank) instead; default: false"
    )
    dora: bool | None = _key(
        None, "true or false", "whether rows' lengths are trained apart from their directions; default: false"
    )
    lr_ratio: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "rate of the adapters' second matrices as a multiple of optim.lr (LoRA+); default: 1"
    )
    targets: Texts | None = _key(
        None,
        "all-linear, a list of module names or a regular expression for whole names",
        "the linear layers that get one; default: all but the head",
    )
    dropout: Momentum | None = _key(None, DECAY.expected, "of the adapters' inputs; default: 0")
    base: Literal["auto", "int8", "nf4"] | None = _key(
        None, "auto, int8 or nf4", "what frozen weights are kept in; default: auto, 16 bits where it computes in 16"
    )
    tokens: Texts | None = _key(
        None,
        'auto or a list of tokens, ["<|im_start|>"]',
        "whose rows of embedding and head are trained, with those that are new to the base; default: auto, no others",
    )


class RlSection(Section):
    """Reinforcement learning: answers of the model itself to prompts, rewarded and learned from."""

    reward: Text | None = _key(
        None,
        "number, exact, regex, json-schema, python, teacher or FILE.py:FUNCTION",
        "what scores an answer; default: nothing, and texts are learned",
    )
    reward_regex: Text | None = _key(None, "a regular expression", "with rl.reward = regex, what an answer matches")
    reward_schema: Text | None = _key(None, "a file with a JSON schema", "with rl.reward = json-schema, the schema")
    teacher: Text | None = _key(None, "a run or a folder", "with rl.reward = teacher, the model that scores each token")
    answer_regex: Text | None = _key(None, "a regular expression", "what all answers that are drawn match")
    answer_schema: Text | None = _key(None, "a file with a JSON schema", "the schema of all answers that are drawn")
    advantage: Literal["dr_grpo", "rloo", "grpo", "dapo", "reinforce", "cispo", "gspo"] | None = _key(
        None,
        "dr_grpo, rloo, grpo, dapo, reinforce, cispo or gspo",
        "what an answer weighs, by its group; default: dr_grpo",
    )
    prompts: Size | None = _key(None, _SIZE, "prompts of an update; default: 16")
    group: Annotated[int, Field(ge=2, le=MOST_SIZE)] | None = _key(
        None, f"a whole number from 2 to {MOST_SIZE}", "answers to each prompt; default: 8"
    )
    draws: Size | None = _key(
        None, _SIZE, "most draws of an update, until rl.prompts groups have unequal rewards; default: 1"
    )
    updates: Size | None = _key(None, _SIZE, "updates that are made of each draw, with clipped ratios; default: 1")
    kl: Literal["none", "k1", "k2", "k3"] | None = _key(
        None, "none, k1, k2 or k3", "what holds the model near the weights that it begins from; default: none"
    )
    kl_coef: PositiveFloat | None = _key(None, ABOVE_0.expected, "strength of rl.kl")
    entropy_coef: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "strength of a term for even choices; default: no such term"
    )
    max_new_tokens: Size | None = _key(
        None, _SIZE, "most tokens of an answer; longer ones are cut; default: half of data.sequence_length"
    )
    truncated: Literal["keep", "mask"] | None = _key(
        None, "keep or mask", "answers that were cut; mask: they are left out of the loss; default: keep"
    )
    truncation_penalty: NonNegativeFloat | None = _key(
        None, NOT_NEGATIVE.expected, "what being cut takes from an answer's reward; default: 0"
    )
    temperature: Annotated[float, Field(gt=0, le=100)] | None = _key(
        None, "a number above 0, at most 100", "of the draws, and of the loss; default: 1"
    )


class PreferSection(Section):
    """Preferences: pairs of a chosen and a rejected answer, compared and learned from."""

    loss: Literal["dpo", "robust", "ipo", "simpo", "orpo", "kto"] | None = _key(
        None,
        "dpo, robust, ipo, simpo, orpo or kto",
        "how answers are compared; default: dpo for records with chosen and rejected, kto for completion and label",
    )
    beta: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "strength of the comparison; default: 0.1, and 2 for simpo"
    )
    gamma: NonNegativeFloat | None = _key(None, NOT_NEGATIVE.expected, "margin of simpo; default: 1")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = _key(
        None, "a number from 0 and below 0.5", "share of pairs that robust takes for swapped; default: 0.1"
    )
    desirable_weight: NonNegativeFloat | None = _key(
        None, NOT_NEGATIVE.expected, "weight of good answers for kto; default: 1"
    )
    undesirable_weight: NonNegativeFloat | None = _key(
        None, NOT_NEGATIVE.expected, "weight of bad answers for kto; default: 1"
    )


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection, "data": DataSection, "optim": OptimSection, "train": TrainSection, "lora": LoraSection,
    "rl": RlSection, "prefer": PreferSection,
}  # fmt: skip
KEYS: tuple[str, ...] = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)
DEFAULT_MINUTES = 3.0
