"""Spellings of earlier versions: values that held several things, and the keys that say the same things now.

A person who writes an old spelling is told the new ones. A run that was begun with it is read as if it had been begun
with the new ones.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from monograph.storage.reading import exists

Values = dict[str, Any]


class OldSpelling(NamedTuple):
    """A form that a key's value had in earlier versions.

    Attributes:
        key: the key.
        pattern: a regular expression that matches the whole value, with a group for each of its parts.
        example: a value of this form, for tests and docs.
        now: returns the keys and values that say the same, from the pattern's groups.
    """

    key: str
    pattern: str
    example: str
    now: Callable[..., Values]


def _state(name: str, state: str) -> Values:
    if state == "all-bf16":
        return {"optim.name": name, "optim.state": "bf16", "optim.master_weights": False}
    return {"optim.name": name, "optim.state": state}


def _kl(term: str, strength: str) -> Values:
    if term == "entropy":
        return {"rl.entropy_coef": float(strength)}
    return {"rl.kl": term, "rl.kl_coef": float(strength)}


def _limit(tokens: str, cut: str) -> Values:
    if cut == "mask":
        return {"rl.max_new_tokens": int(tokens), "rl.truncated": "mask"}
    return {"rl.max_new_tokens": int(tokens), "rl.truncation_penalty": float(cut)}


_SECOND = {"robust": "label_smoothing", "simpo": "gamma", "kto": "undesirable_weight"}


def _two_numbers(loss: str, beta: str, second: str) -> Values:
    return {"prefer.loss": loss, "prefer.beta": float(beta), f"prefer.{_SECOND[loss]}": float(second)}


NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
OLD_SPELLINGS = (
    OldSpelling(
        "model.preset",
        r"([\w-]+):([\w-]+)",
        "qwen3:micro",
        lambda family, preset: {"model.family": family, "model.preset": preset},
    ),
    OldSpelling(
        "data.tokenizer",
        r"bpe:([0-9]+)",
        "bpe:4096",
        lambda size: {"data.tokenizer": "bpe", "data.vocab_size": int(size)},
    ),
    OldSpelling("optim.name", r"(adamw|muon):(bf16|8bit|all-bf16)", "muon:8bit", _state),
    OldSpelling(
        "optim.lr",
        rf"({NUMBER}):({NUMBER})",
        "2e-4:16",
        lambda rate, ratio: {"optim.lr": float(rate), "lora.lr_ratio": float(ratio)},
    ),
    OldSpelling(
        "optim.grad_clip",
        rf"({NUMBER}):all",
        "1.0:all",
        lambda norm: {"optim.grad_clip": float(norm), "optim.skip_spikes": False},
    ),
    OldSpelling(
        "optim.schedule",
        rf"(cosine|wsd):({NUMBER})",
        "cosine:0.1",
        lambda schedule, floor: {"optim.schedule": schedule, "optim.min_lr_ratio": float(floor)},
    ),
    OldSpelling(
        "optim.transfer",
        r"width:([0-9]+)",
        "width:64",
        lambda base: {"optim.transfer": "width", "optim.transfer_base": int(base)},
    ),
    OldSpelling(
        "train.parallel",
        r"(fsdp|hsdp):bf16",
        "fsdp:bf16",
        lambda parallel: {"train.parallel": parallel, "train.gather_dtype": "bf16"},
    ),
    OldSpelling("lora.rank", r"([0-9]+):dora", "16:dora", lambda rank: {"lora.rank": int(rank), "lora.dora": True}),
    OldSpelling(
        "lora.alpha",
        rf"({NUMBER}):sqrt",
        "32:sqrt",
        lambda alpha: {"lora.alpha": float(alpha), "lora.rslora": True},
    ),
    OldSpelling(
        "data.answers",
        r"regex:(.+)",
        "regex:[0-9]+",
        lambda pattern: {"data.answers": "every", "rl.answer_regex": pattern},
    ),
    OldSpelling(
        "data.answers",
        r"json-schema:(.+)",
        "json-schema:FILE",
        lambda file: {"data.answers": "every", "rl.answer_schema": file},
    ),
    OldSpelling(
        "rl.reward",
        r"regex:(.+)",
        "regex:[0-9]+",
        lambda pattern: {"rl.reward": "regex", "rl.reward_regex": pattern},
    ),
    OldSpelling(
        "rl.reward",
        r"json-schema:(.+)",
        "json-schema:FILE",
        lambda file: {"rl.reward": "json-schema", "rl.reward_schema": file},
    ),
    OldSpelling(
        "rl.reward",
        r"teacher:(.+)",
        "teacher:RUN",
        lambda model: {"rl.reward": "teacher", "rl.teacher": model},
    ),
    OldSpelling("rl.kl", rf"(k[123]|entropy):({NUMBER})", "k2:0.05", _kl),
    OldSpelling("rl.max_new_tokens", rf"([0-9]+):(mask|{NUMBER})", "256:mask", _limit),
    OldSpelling(
        "prefer.loss",
        rf"(dpo|ipo|orpo|robust|simpo|kto):({NUMBER})",
        "dpo:0.1",
        lambda loss, beta: {"prefer.loss": loss, "prefer.beta": float(beta)},
    ),
    OldSpelling("prefer.loss", rf"(robust|simpo|kto):({NUMBER}):({NUMBER})", "robust:0.1:0.2", _two_numbers),
)


def _weighted(sources: Any) -> Values | None:
    """Return sources and weights if some of the sources end with a weight, as in "books/@2"."""
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        return None
    # A file may be called so, and is then meant.
    parts = [None if exists(source) else re.fullmatch(rf"(.+)@({NUMBER})", source) for source in sources]
    if not any(parts):
        return None
    places = [part[1] if part else source for part, source in zip(parts, sources, strict=True)]
    return {"data.source": places, "data.weights": [float(part[2]) if part else 1.0 for part in parts]}


def translated(key: str, value: Any) -> Values | None:
    """Return the keys and values that say what an old spelling of a key's value said; None if it is none."""
    if key == "data.source":
        return _weighted([value] if isinstance(value, str) else value)
    if not isinstance(value, str):
        return None
    for old in OLD_SPELLINGS:
        match = re.fullmatch(old.pattern, value, re.DOTALL) if old.key == key else None
        if match:
            return old.now(*match.groups())
    return None


def spelled(values: Mapping[str, Any]) -> str:
    """Return keys and values as a sentence has them: `optim.name = muon and optim.state = 8bit`."""
    parts = [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    return " and ".join(parts)
