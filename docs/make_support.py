"""Write the tables of docs/support.md: for every combination of choices the law that tests it, or
the error.

Usage: python docs/make_support.py (rewrites docs/support.md between the markers;
tests/test_support.py compares)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from made_parts import with_made_parts

from monograph.config import load
from monograph.device import Device, card_device
from monograph.errors import UsageError
from monograph.graph.capture import obstacle_to_replay
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import OPTIMIZERS, AdamW
from monograph.optim.formats import FORMATS
from monograph.session.adapting import adapter_values
from monograph.session.requirements import exclusions, require_possible
from monograph.step import Step

PAGE = Path(__file__).resolve().parent / "support.md"
BEGIN = "<!-- made by docs/make_support.py -->"
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp8_head")
REMATS = ("none", "pointwise", "0.3", "full", "offload")
SCOPES: tuple[Literal["none", "whole", "blocks"], ...] = ("none", "whole", "blocks")
# What the optimizer keeps, by the keys that say so.
STATES: dict[str, dict[str, Any]] = {
    **{f"optim.state={state}": {"state": state} for state in FORMATS},
    "optim.state=bf16 optim.master_weights=false": {"state": "bf16", "master_weights": False},
}
NARROW_STATES = tuple(state for state, form in FORMATS.items() if not form.exact)
# Other keys that a value needs beside it.
NEEDED = {"optim.master_weights": {"optim.state": "bf16"}}
HELD = "[laws 1, 2, 3, 9, 10](../tests/laws/test_cross.py)"
REPLAYED = "[law 1](../tests/laws/test_replayed_is_called.py)"
ADAPTED = "[law](../tests/laws/test_lora.py)"
STREAMED_BASE = "[law 4](../tests/laws/test_streamed_adapters.py)"
BASES = ("auto", "int8", "nf4")
WITH_ADAPTERS = {
    "train.precision": PRECISIONS,
    "train.remat": REMATS,
    "train.compile": SCOPES,
    "train.memory": ("device", "stream"),
    "data.packing": ("packed", "padded"),
    "optim.name": tuple(OPTIMIZERS),
    "optim.state": NARROW_STATES,
    "optim.master_weights": ("false",),
    "optim.ema": ("none", "0.9"),
    "lora.dora": ("true",),
    "lora.rslora": ("true",),
    "lora.lr_ratio": ("16",),
}
WITH_RANKS = {
    "train.precision": PRECISIONS,
    "train.remat": REMATS,
    "train.compile": SCOPES,
    "train.memory": ("device", "stream"),
    "data.packing": ("packed", "padded"),
    "optim.name": tuple(OPTIMIZERS),
    "optim.state": NARROW_STATES,
    "optim.master_weights": ("false",),
    "optim.ema": ("none", "0.9"),
    "lora.rank": ("16",),
    "rl.reward": ("exact",),
    "prefer.loss": ("dpo",),
}
OF_ANSWERS = "[law 13](../tests/distributed/test_kinds_of_runs.py)"
SHARDED = "[law 13](../tests/laws/test_sharded_is_single.py)"
NARROW = "[test_narrow](../tests/test_narrow.py)"
DEVICES = {
    "a CPU": Device("a CPU", "cpu", 0, 0, 1, has_bf16=True),
    "an A100": card_device("A100-80"),
    "an H100": card_device("H100"),
}


def refusal(**keys: str) -> str | None:
    """Return the error for these keys together (of [train] if no section is named); None if they
    are accepted.
    """
    try:
        asked = {key if "." in key else f"train.{key}": value for key, value in keys.items()}
        settings = load(None, asked, {})
        require_possible(settings, card_device("H100"))
        if settings.model.init is None:
            adapter_values(settings, None)
    except UsageError as error:
        return str(error)
    return None


def excluded() -> str:
    """Return all pairs of choices that exclude one another, each with the line of its refusal."""
    lines = ["| choice | does not go with | what Monograph says |", "|---|---|---|"]
    for rule in exclusions():
        one, other = rule.one.text_in_docs, rule.other.text_in_docs
        lines.append(f"| `{one}` | `{other}` | {rule.refusal_in_docs} |")
    return "\n".join(lines)


def combinations() -> str:
    """Return recomputation by compile scope; fails if the cells depend on the precision."""
    lines = [
        "| `train.remat` | `compile=none` | `compile=whole` | `compile=blocks` |",
        "|---|---|---|---|",
    ]
    for remat in REMATS:
        cells = []
        for scope in SCOPES:
            found = {refusal(precision=p, remat=remat, compile=scope) for p in PRECISIONS}
            if len(found) > 1:
                raise SystemExit(f"support.md needs a column more: {remat}, {scope}: {found}")
            cells.append(found.pop() or HELD)
        lines.append(f"| `{remat}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def replays() -> str:
    """Return, by recomputation and compile scope, whether micro-steps can be replayed as CUDA
    graphs on a GPU.
    """
    lines = [
        "| `train.remat` | `compile=none` | `compile=whole` | `compile=blocks` |",
        "|---|---|---|---|",
    ]
    for remat in REMATS:
        policy = policy_named(float(remat) if remat == "0.3" else remat)
        found = [
            refusal(remat=remat, compile=scope) or obstacle_to_replay(policy, scope)
            for scope in SCOPES
        ]
        lines.append(f"| `{remat}` | {' | '.join(each or REPLAYED for each in found)} |")
    return "\n".join(lines)


def precisions() -> str:
    """Return precision by device."""
    lines = [f"| `train.precision` | {' | '.join(DEVICES)} |", "|---|" + "---|" * len(DEVICES)]
    for name in PRECISIONS:
        cells = [Precision(name).obstacle(device) or "works" for device in DEVICES.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def states() -> str:
    """Return optimizer state by precision, for AdamW and Muon alike."""
    names = " | ".join(f"`{name}`" for name in PRECISIONS)
    lines = [f"| the optimizer's state | {names} |", "|---|" + "---|" * len(PRECISIONS)]
    for keys, fields in STATES.items():
        cells = []
        for name in PRECISIONS:
            try:
                model = Llama(LlamaConfig.preset("nano"))
                Step(model, optim=AdamW(**fields), precision=Precision(name))  # type: ignore[arg-type]
                cells.append(NARROW)
            except UsageError as error:
                cells.append(str(error))
        lines.append(f"| `{keys}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def adapters() -> str:
    """Return the choices that can be combined with adapters, by the format of the frozen weights."""
    lines = [
        f"| with `lora.base=...` | {' | '.join(f'`{base}`' for base in BASES)} |",
        "|---|" + "---|" * len(BASES),
    ]
    for key, values in WITH_ADAPTERS.items():
        for value in values:
            more = NEEDED.get(key, {}) | {"model.init": "FOLDER", "lora.rank": "16", key: value}
            found = [refusal(**more, **{"lora.base": base}) for base in BASES]
            tested = STREAMED_BASE if value == "stream" else ADAPTED
            lines.append(f"| `{key}={value}` | {' | '.join(each or tested for each in found)} |")
    nothing = (
        refusal(**{"lora.rank": "16"})
        or "a model with random weights that are never trained, which is a fault"
    )
    lines.append(f"| no `model.init` | {' | '.join([nothing] * len(BASES))} |")
    return "\n".join(lines)


def ranks() -> str:
    """Return the choices that can be combined with several devices."""
    kinds = ("ddp", "fsdp")
    lines = [
        f"| with `train.parallel=...` | {' | '.join(f'`{kind}`' for kind in kinds)} |",
        "|---|---|---|",
    ]
    for key, values in WITH_RANKS.items():
        for value in values:
            base = (
                {"model.init": "FOLDER"} if key in ("lora.rank", "rl.reward", "prefer.loss") else {}
            )
            more = NEEDED.get(key, {}) | base | {key: value}
            found = [refusal(**more, **{"train.parallel": kind}) for kind in kinds]
            law = OF_ANSWERS if key in ("rl.reward", "prefer.loss") else SHARDED
            lines.append(f"| `{key}={value}` | {' | '.join(each or law for each in found)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with new tables, in the order of its markers."""
    tables = (excluded(), combinations(), replays(), precisions(), states(), adapters(), ranks())
    return with_made_parts(text, BEGIN, tables)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
