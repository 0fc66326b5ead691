"""Translate the old spellings of values: forms that the values of keys had in earlier versions.

An old spelling, such as optim.name = "muon:8bit", said several things in one value. Now each of
them has a key of its own: optim.name = "muon" and optim.state = "8bit". If a person writes an old
spelling, a message says the new keys and values. If an earlier version wrote it into a run's
config.toml, the run is read as if it had the new keys.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from monograph.storage.reading import exists

# {new key: its value as a person types it}; the value is a list for a key that takes a list.
TextsByKey = dict[str, str | list[str]]


class OldSpelling(NamedTuple):
    """A form that a key's value had in earlier versions.

    The pattern also matches combinations of parts that no earlier version took.

    Attributes:
        key: the key.
        pattern: a regular expression that matches the whole value, with a named group for each
            part.
        examples: values of this form, for tests and docs.
        new_texts: returns {new key: its value} for the pattern's groups, which are given by name.
            If the value is None, the key is not set.
    """

    key: str
    pattern: str
    examples: tuple[str, ...]
    new_texts: Callable[..., Mapping[str, str | None]]


# Keys that take any text. All others take numbers or words in small letters, but old spellings may
# have capitals.
_FREE_TEXT = {
    "rl.answer_regex",
    "rl.answer_schema",
    "rl.reward_regex",
    "rl.reward_schema",
    "rl.teacher",
}
# An old prefer.loss had up to two numbers, as in "simpo:2:1". {loss: the key of [prefer] that has the
# second one now}.
_KEY_OF_SECOND_NUMBER = {"robust": "label_smoothing", "simpo": "gamma", "kto": "undesirable_weight"}


def _optimizer_texts(name: str, state: str) -> dict[str, str | None]:
    if state.lower() == "all-bf16":
        return {"optim.name": name, "optim.state": "bf16", "optim.master_weights": "false"}
    return {"optim.name": name, "optim.state": state}


def _answer_texts(which: str | None, key: str, value: str) -> dict[str, str | None]:
    """Return the texts for an old data.answers.

    Args:
        which: the answers that are learned from, "every" or "last"; None: the old text does not say it.
        key: the key that has the regular expression or the schema's file now.
        value: its value.
    """
    return {"data.answers": which or "every", key: value}


def _true_if_matched(group: str | None) -> str | None:
    """Return "true" if a pattern's group has matched, else None."""
    return None if group is None else "true"


NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
OLD_SPELLINGS = (
    OldSpelling(
        "model.preset",
        r"(?P<family>[\w-]+):(?P<preset>[\w-]+)",
        ("qwen3:micro", "Qwen3:Micro"),
        lambda family, preset: {"model.family": family, "model.preset": preset},
    ),
    OldSpelling(
        "data.tokenizer",
        r"bpe:(?P<size>[0-9]+)",
        ("bpe:4096", "BPE:4096"),
        lambda size: {"data.tokenizer": "bpe", "data.vocab_size": size},
    ),
    OldSpelling(
        "optim.name",
        r"(?P<name>auto|adamw|muon):(?P<state>fp32|bf16|8bit|all-bf16)",
        ("muon:8bit", "adamw:all-bf16", "MUON:8BIT", "auto:bf16"),
        _optimizer_texts,
    ),
    OldSpelling(
        "optim.lr",
        rf"(?P<rate>auto|{NUMBER}):(?P<ratio>{NUMBER})",
        ("2e-4:16", "auto:16", "2E-4:16"),
        lambda rate, ratio: {"optim.lr": rate, "lora.lr_ratio": ratio},
    ),
    OldSpelling(
        "optim.grad_clip",
        rf"(?P<norm>none|{NUMBER}):all",
        ("1.0:all", "none:all", "1:ALL"),
        lambda norm: {"optim.grad_clip": norm, "optim.skip_spikes": "false"},
    ),
    OldSpelling(
        "optim.schedule",
        rf"(?P<schedule>cosine|wsd):(?P<floor>{NUMBER})",
        ("cosine:0.1", "WSD:.1"),
        lambda schedule, floor: {"optim.schedule": schedule, "optim.min_lr_ratio": floor},
    ),
    OldSpelling(
        "optim.transfer",
        r"width:(?P<base>[0-9]+)",
        ("width:64",),
        lambda base: {"optim.transfer": "width", "optim.transfer_base": base},
    ),
    OldSpelling(
        "train.parallel",
        r"(?P<parallel>fsdp|hsdp):(?P<dtype>fp32|bf16)",
        ("fsdp:bf16", "FSDP:BF16"),
        lambda parallel, dtype: {"train.parallel": parallel, "train.gather_dtype": dtype},
    ),
    # The words after the number may be in any order.
    OldSpelling(
        "lora.rank",
        r"(?P<rank>[0-9]+)(?::(?:(?P<dora>dora)|(?P<rslora>rslora)))+",
        ("16:dora", "16:rslora", "16:dora:rslora", "16:rslora:DoRA"),
        lambda rank, dora, rslora: {
            "lora.rank": rank,
            "lora.dora": _true_if_matched(dora),
            "lora.rslora": _true_if_matched(rslora),
        },
    ),
    OldSpelling(
        "lora.alpha",
        rf"(?P<alpha>{NUMBER})(?::(?:(?P<dora>dora)|(?P<rslora>sqrt|rslora)))+",
        ("32:sqrt", "32:sqrt:dora"),
        lambda alpha, dora, rslora: {
            "lora.alpha": alpha,
            "lora.rslora": _true_if_matched(rslora),
            "lora.dora": _true_if_matched(dora),
        },
    ),
    OldSpelling(
        "data.answers",
        r"(?:(?P<which>every|last):)?regex:(?P<pattern>.+)",
        ("regex:[0-9]+", "last:Regex:[A-Z]+"),
        lambda which, pattern: _answer_texts(which, "rl.answer_regex", pattern),
    ),
    OldSpelling(
        "data.answers",
        r"(?:(?P<which>every|last):)?json-schema:(?P<file>.+)",
        ("json-schema:FILE", "last:json-schema:FILE"),
        lambda which, file: _answer_texts(which, "rl.answer_schema", file),
    ),
    OldSpelling(
        "rl.reward",
        r"regex:(?P<pattern>.+)",
        ("regex:[0-9]+", "regex:a:b", "REGEX:[A-Z]{1,3}"),
        lambda pattern: {"rl.reward": "regex", "rl.reward_regex": pattern},
    ),
    OldSpelling(
        "rl.reward",
        r"json-schema:(?P<file>.+)",
        ("json-schema:FILE",),
        lambda file: {"rl.reward": "json-schema", "rl.reward_schema": file},
    ),
    OldSpelling(
        "rl.reward",
        r"teacher:(?P<model>.+)",
        ("teacher:RUN",),
        lambda model: {"rl.reward": "teacher", "rl.teacher": model},
    ),
    OldSpelling(
        "rl.kl",
        rf"(?P<term>k[123]):(?P<strength>{NUMBER})(?::entropy:(?P<bonus>{NUMBER}))?",
        ("k2:0.05", "K2:5e-2", "k2:0.05:entropy:0.01"),
        lambda term, strength, bonus: {
            "rl.kl": term,
            "rl.kl_coef": strength,
            "rl.entropy_coef": bonus,
        },
    ),
    OldSpelling(
        "rl.kl",
        rf"entropy:(?P<bonus>{NUMBER})",
        ("entropy:0.01",),
        lambda bonus: {"rl.entropy_coef": bonus},
    ),
    OldSpelling(
        "rl.max_new_tokens",
        rf"(?P<tokens>[0-9]+)(?::(?:(?P<cut>keep|mask)|(?P<penalty>{NUMBER})))+",
        ("256:mask", "256:0.5", "256:mask:0.5", "256:0.5:KEEP"),
        lambda tokens, cut, penalty: {
            "rl.max_new_tokens": tokens,
            "rl.truncated": cut,
            "rl.truncation_penalty": penalty,
        },
    ),
    OldSpelling(
        "prefer.loss",
        rf"(?P<loss>dpo|ipo|orpo|robust|simpo|kto):(?P<beta>{NUMBER})",
        ("dpo:0.1", "DPO:1e-1"),
        lambda loss, beta: {"prefer.loss": loss, "prefer.beta": beta},
    ),
    OldSpelling(
        "prefer.loss",
        rf"(?P<loss>robust|simpo|kto):(?P<beta>{NUMBER}):(?P<second>{NUMBER})",
        ("robust:0.1:0.2", "simpo:2:1", "KTO:0.1:1.33"),
        lambda loss, beta, second: {
            "prefer.loss": loss,
            "prefer.beta": beta,
            f"prefer.{_KEY_OF_SECOND_NUMBER[loss.lower()]}": second,
        },
    ),
)


def _sources_and_weights(sources: object) -> TextsByKey | None:
    """Return data.source and data.weights for sources such as "books/@2"; None without a weight."""
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        return None
    paths = []
    weights = []
    has_weight = False
    for source in sources:
        match = re.fullmatch(rf"(.+)@({NUMBER})", source)
        # A file may have such a name.
        if match and not exists(source):
            has_weight = True
            paths.append(match[1])
            weights.append(match[2])
        else:
            paths.append(source)
            weights.append("1")
    return {"data.source": paths, "data.weights": weights} if has_weight else None


def new_spelling(key: str, value: object) -> TextsByKey | None:
    """Return the new keys and values that stand for an old spelling of a key's value.

    The result is None if the value is not an old spelling.
    """
    if key == "data.source":
        return _sources_and_weights([value] if isinstance(value, str) else value)
    if not isinstance(value, str):
        return None
    for old in OLD_SPELLINGS:
        if old.key != key:
            continue
        match = re.fullmatch(old.pattern, value, re.DOTALL | re.IGNORECASE)
        if match:
            new_texts = old.new_texts(**match.groupdict())
            return {
                new_key: _in_small_letters(new_key, text)
                for new_key, text in new_texts.items()
                if text is not None
            }
    return None


def _in_small_letters(key: str, text: str) -> str:
    """Return a text in small letters; free texts and numbers, such as 1E-4, stay as they are."""
    may_have_capitals = key in _FREE_TEXT or re.fullmatch(NUMBER, text, re.IGNORECASE)
    return text if may_have_capitals else text.lower()


def new_spellings(key: str, value: object) -> list[TextsByKey]:
    """Return the `new_spelling` of each of several values, such as those of a sweep's axis; [] if none of
    them is an old spelling.

    A value that is not an old spelling keeps its key. For one value alone and for data.source, whose
    values are no alternatives, the result is [], too: `new_spelling` translates these.

    Args:
        key: the key.
        value: a list of texts, or texts with commas between them.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if key == "data.source" or not isinstance(parts, list) or len(parts) < 2:
        return []
    if not all(isinstance(part, str) for part in parts):
        return []
    texts = [part.strip() for part in parts]
    translations = [new_spelling(key, text) for text in texts]
    if not any(translations):
        return []
    return [
        translation or {key: text} for translation, text in zip(translations, texts, strict=True)
    ]


def texts_by_key(texts_of_each: Sequence[TextsByKey]) -> dict[str, list[str]]:
    """Return the distinct values of each key, in their order.

    Args:
        texts_of_each: the result of `new_spellings`.
    """
    distinct_texts: dict[str, list[str]] = {}
    for texts in texts_of_each:
        for key, text in texts.items():
            texts_of_key = distinct_texts.setdefault(key, [])
            # A list would be a value of data.source or data.weights, which `new_spellings` does not return.
            if isinstance(text, str) and text not in texts_of_key:
                texts_of_key.append(text)
    return distinct_texts
