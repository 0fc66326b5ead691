"""Spellings of earlier versions: values that held several things, and the keys that say the same
things now.

A person who writes an old spelling is told the new ones, with the values as they were written. A
run that was begun with it is read as if it had been begun with the new ones.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from monograph.storage.reading import exists

# What a person would write for each key; a list for a key that takes one.
Texts = dict[str, str | list[str]]


class OldSpelling(NamedTuple):
    """A form that a key's value had in earlier versions, also with parts that were never combined.

    Attributes:
        key: the key.
        pattern: a regular expression that matches the whole value, with a named group for each of
            its parts.
        examples: values of this form, for tests and docs.
        now: returns what to write for each key that says the same, from the pattern's groups; None:
            not that key.
    """

    key: str
    pattern: str
    examples: tuple[str, ...]
    now: Callable[..., Mapping[str, str | None]]


# Keys that take whatever a person writes; all others take numbers, or words in small letters.
_FREE = {"rl.answer_regex", "rl.answer_schema", "rl.reward_regex", "rl.reward_schema", "rl.teacher"}
_SECOND = {"robust": "label_smoothing", "simpo": "gamma", "kto": "undesirable_weight"}


def _state(name: str, state: str) -> dict[str, str | None]:
    if state.lower() == "all-bf16":
        return {"optim.name": name, "optim.state": "bf16", "optim.master_weights": "false"}
    return {"optim.name": name, "optim.state": state}


def _answer(which: str | None, key: str, value: str) -> dict[str, str | None]:
    return {"data.answers": which or "every", key: value}


def _true(part: str | None) -> str | None:
    return part and "true"


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
        _state,
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
    OldSpelling(
        "lora.rank",
        r"(?P<rank>[0-9]+)(?::(?:(?P<dora>dora)|(?P<rslora>rslora)))+",
        ("16:dora", "16:rslora", "16:dora:rslora", "16:rslora:DoRA"),
        lambda rank, dora, rslora: {
            "lora.rank": rank,
            "lora.dora": _true(dora),
            "lora.rslora": _true(rslora),
        },
    ),
    OldSpelling(
        "lora.alpha",
        rf"(?P<alpha>{NUMBER})(?::(?:(?P<dora>dora)|(?P<rslora>sqrt|rslora)))+",
        ("32:sqrt", "32:sqrt:dora"),
        lambda alpha, dora, rslora: {
            "lora.alpha": alpha,
            "lora.rslora": _true(rslora),
            "lora.dora": _true(dora),
        },
    ),
    OldSpelling(
        "data.answers",
        r"(?:(?P<which>every|last):)?regex:(?P<pattern>.+)",
        ("regex:[0-9]+", "last:Regex:[A-Z]+"),
        lambda which, pattern: _answer(which, "rl.answer_regex", pattern),
    ),
    OldSpelling(
        "data.answers",
        r"(?:(?P<which>every|last):)?json-schema:(?P<file>.+)",
        ("json-schema:FILE", "last:json-schema:FILE"),
        lambda which, file: _answer(which, "rl.answer_schema", file),
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
            f"prefer.{_SECOND[loss.lower()]}": second,
        },
    ),
)


def _weighted(sources: object) -> Texts | None:
    """Return sources and weights if some of the sources end with a weight, as in "books/@2"."""
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        return None
    # A file may be called so, and is then meant.
    parts = [
        None if exists(source) else re.fullmatch(rf"(.+)@({NUMBER})", source) for source in sources
    ]
    if not any(parts):
        return None
    places = [part[1] if part else source for part, source in zip(parts, sources, strict=True)]
    return {"data.source": places, "data.weights": [part[2] if part else "1" for part in parts]}


def translated(key: str, value: object) -> Texts | None:
    """Return the keys that say what an old spelling of a key's value said, and what to write; None
    if it is none.
    """
    if key == "data.source":
        return _weighted([value] if isinstance(value, str) else value)
    if not isinstance(value, str):
        return None
    for old in OLD_SPELLINGS:
        match = (
            re.fullmatch(old.pattern, value, re.DOTALL | re.IGNORECASE) if old.key == key else None
        )
        if match:
            now = old.now(**match.groupdict())
            return {new: _as_today(new, said) for new, said in now.items() if said is not None}
    return None


def _as_today(key: str, said: str) -> str:
    as_written = key in _FREE or re.fullmatch(NUMBER, said, re.IGNORECASE)
    return said if as_written else said.lower()


def translated_each(key: str, value: object) -> list[Texts]:
    """Return the same of each of several values, as an axis or a list has them; [] if none of them
    is an old spelling.

    A value that is none stays as it is.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if key == "data.source" or not isinstance(parts, list) or len(parts) < 2:
        return []
    if not all(isinstance(part, str) for part in parts):
        return []
    found = [translated(key, part.strip()) for part in parts]
    if not any(found):
        return []
    return [now or {key: part.strip()} for now, part in zip(found, parts, strict=True)]


def joined(each: Sequence[Texts]) -> dict[str, list[str]]:
    """Return the values of each key, every one once, in their order."""
    values: dict[str, list[str]] = {}
    for now in each:
        for key, said in now.items():
            several = values.setdefault(key, [])
            several += [text for text in [said] if isinstance(text, str) and text not in several]
    return values
