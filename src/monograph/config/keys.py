"""Define every key of the configuration: its type, its default, the values it accepts and its meaning."""

import re
import tomllib
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from monograph.data import LARGEST_SHARE
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


def _above_0(value: str) -> str:
    """Refuse `2e-4:16` and `32:sqrt` with a number that is not above 0."""
    for number in value.removesuffix(":sqrt").split(":"):
        ABOVE_0.checked(float(number))
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
Momentum = Annotated[float, AfterValidator(DECAY.checked)]
Dora = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}:dora$")]
ClipAll = Annotated[str, Field(pattern=r"^([1-9][0-9]{0,8}(\.[0-9]{1,9})?|0\.0{0,9}[1-9][0-9]{0,9}):all$")]
Rates = Annotated[str, Field(pattern=r"^[0-9.e+-]+:[0-9.]+$"), AfterValidator(_above_0)]
Stable = Annotated[str, Field(pattern=r"^[0-9.e+-]+:sqrt$"), AfterValidator(_above_0)]
Floored = Annotated[str, Field(pattern=r"^(cosine|wsd):(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$")]
_NUMBER = r"(:[0-9]{1,9}(\.[0-9]{1,9})?)"
Preference = Annotated[str, Field(pattern=rf"^((dpo|ipo|orpo){_NUMBER}?|(robust|simpo|kto){_NUMBER}{{0,2}})$")]
Penalty = Annotated[str, Field(pattern=r"^(k[123]|entropy):(0\.[0-9]{0,8}[1-9]|[1-9][0-9]{0,3}(\.[0-9]{1,9})?)$")]
AnswerLimit = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}:(mask|[0-9]{1,5}(\.[0-9]{1,9})?)$")]
AnswerForm = Annotated[Text, Field(pattern=r"^(regex|json-schema):.")]
Preset = Annotated[str, Field(pattern=rf"^(auto|(({'|'.join(FAMILIES)}):)?({'|'.join(PRESETS)}))$")]
Width = Annotated[str, Field(pattern=r"^width:[1-9][0-9]{0,8}$")]


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

    preset: Preset = _key(
        "auto", f"auto, {', '.join(PRESETS)}, or FAMILY:NAME of {', '.join(FAMILIES)}",
        "a shape by name, and its family; auto: a Llama that fits",
    )  # fmt: skip
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
        return {key: value for key, value in self if key not in ("preset", "init") and value is not None}


class DataSection(Section):
    """The text, and how it becomes rows of tokens."""

    source: Texts = _key(
        "stdlib", "a path, a glob, or a list of them", "stdlib: Python's own sources; -: stdin; PATH@2"
    )
    tokenizer: Text = _key("auto", "auto, bpe:SIZE, bytes or a tokenizer.json", "auto: bpe that fits the model")
    sequence_length: Annotated[Count, Field(le=MOST_LENGTH)] = _key(
        256, _COUNT.replace("1e15", str(MOST_LENGTH)), "tokens per row"
    )
    packing: Literal["packed", "padded"] = _key("packed", "packed or padded", "documents share a row, or one each")
    held_out: Share = _key(0.05, "a number from 0 (none) to 0.5", "share of the bytes kept for evaluation")
    text_key: Text | None = _key(None, "a name", "the key or column of a record that holds its text; default: text")
    ignore_keys: Texts | None = _key(
        None, "a name, or a list of them", "keys of records that are left out; an unknown key is refused otherwise"
    )
    bad_records: Literal["refuse", "skip"] = _key("refuse", "refuse or skip", "records without a usable text")
    answers: Literal["every", "last"] | AnswerForm = _key(
        "every",
        "every or last, or with rl.reward regex:PATTERN or json-schema:FILE",
        "of a conversation, which are trained on; with rl.reward, the form that all drawn answers have",
    )
    too_long: Literal["truncate", "refuse"] = _key(
        "truncate", "truncate or refuse", "conversations of more than a row; truncate: turns at the front are left out"
    )


class OptimSection(Section):
    """The update of the weights."""

    name: Literal[
        "auto", "adamw", "adamw:bf16", "adamw:8bit", "adamw:all-bf16", "muon", "muon:bf16", "muon:8bit", "muon:all-bf16"
    ] = _key(
        "auto",
        "auto, adamw or muon, the latter two also with :bf16, :8bit or :all-bf16 for less memory",
        "the update rule; muon for matrices of blocks; auto: muon for a new model; adamw:8bit: its state in 8 bits",
    )
    lr: Auto | PositiveFloat | Rates = _key(
        "auto",
        f"{ABOVE_0.expected}, or auto, or with adapters also with a factor, as in 2e-4:16",
        "peak learning rate; 2e-4:16: of the adapters' second matrices 16 times as much",
    )
    weight_decay: Auto | NonNegativeFloat = _key(
        "auto", f"{NOT_NEGATIVE.expected}, or auto", "decoupled decay of the matrices"
    )
    betas: Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)] = _key(
        (0.9, 0.95), "two numbers, 0 or more and below 1", "decay of the first and second moment"
    )
    eps: PositiveFloat = _key(1e-8, ABOVE_0.expected, "added to the denominator")
    grad_clip: Literal["none"] | PositiveFloat | ClipAll = _key(
        1.0,
        "a number above 0, none, or NUMBER:all",
        "largest gradient norm; updates that stand out are skipped, but for NUMBER:all and none",
    )
    schedule: Literal["cosine", "constant", "wsd"] | Floored = _key(
        "cosine",
        "cosine, wsd or constant, the first two also with a floor from 0 to 1, as in cosine:0.1",
        "rate after warm-up; wsd: constant, and a decay over the last 20 %; the floor is a share of optim.lr (0.05)",
    )
    warmup_updates: Auto | Annotated[int, Field(ge=0, le=MOST_COUNT)] = _key(
        "auto", "a whole number from 0 to 1e15, or auto", "linear warm-up"
    )
    ema: Literal["none"] | Fraction = _key(
        "none", f"{FRACTION.expected}, or none", "decay of an average of the weights: what is scored and exported"
    )
    transfer: Literal["none", "width"] | Width = _key(
        "none",
        "none, width, or width:SIZE with the hidden_size that optim.lr is for",
        "width: lr, weight_decay and eps are a narrow model's, carried to this width by a rule (docs/transfer.md)",
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
    parallel: Literal["none", "ddp", "fsdp", "fsdp:bf16", "hsdp", "hsdp:bf16"] = _key(
        "none",
        "none, ddp, fsdp or hsdp, the last two also with :bf16",
        "how several devices share the work, a process each; hsdp: fsdp within each machine; :bf16 halves the traffic "
        "of weights; see docs/distributed.md",
    )
    eval_every: Auto | Whole = _key("auto", f"{_WHOLE}, or auto", "updates between evaluations")
    save_every: Auto | Whole = _key("auto", f"{_WHOLE}, or auto", "updates between checkpoints")
    keep: Whole = _key(2, _WHOLE, "newest checkpoints that are kept; 1 leaves nothing to fall back on")


class LoraSection(Section):
    """Low-rank adapters, trained next to frozen weights that model.init names."""

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] | Dora | None = _key(
        None,
        f"a whole number above 0, at most {MOST_RANK}, also with :dora, as in 16:dora",
        "rank of the adapters; :dora: rows' lengths are trained apart from their directions; default: none are trained",
    )
    alpha: PositiveFloat | Stable | None = _key(
        None,
        f"{ABOVE_0.expected}, also with :sqrt, as in 32:sqrt",
        "the adapters' output is scaled by alpha / rank; :sqrt: by alpha / sqrt(rank); default: 32",
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
        "number, exact, regex:PATTERN, json-schema:FILE, python, teacher:MODEL or FILE.py:FUNCTION",
        "what scores an answer; default: nothing, and texts are learned",
    )
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
    kl: Literal["none"] | Penalty | None = _key(
        None,
        "none, or k1, k2, k3 or entropy with a strength, as in k2:0.05",
        "what holds the model near the weights it begins from, or, entropy, near an even choice; default: none",
    )
    max_new_tokens: Size | AnswerLimit | None = _key(
        None,
        f"{_SIZE}, also with :mask or a number, as in 256:mask or 256:0.5",
        "most tokens of an answer; longer ones are cut and then, with :mask, left out, with :0.5, worth 0.5 less; "
        "default: half of data.sequence_length",
    )
    temperature: Annotated[float, Field(gt=0, le=100)] | None = _key(
        None, "a number above 0, at most 100", "of the draws, and of the loss; default: 1"
    )


class PreferSection(Section):
    """Preferences: pairs of a chosen and a rejected answer, compared and learned from."""

    loss: Preference | None = _key(
        None,
        "dpo, robust, ipo, simpo, orpo or kto, each also with its numbers, as in dpo:0.1 or robust:0.1:0.2",
        "how answers are compared; default: dpo for records with chosen and rejected, kto for completion and label",
    )


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection, "data": DataSection, "optim": OptimSection, "train": TrainSection, "lora": LoraSection,
    "rl": RlSection, "prefer": PreferSection,
}  # fmt: skip
KEYS: tuple[str, ...] = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)
DEFAULT_MINUTES = 3.0
