"""Writes the README's table of what works and what holds it, from the list of keys.

Usage: python docs/make_tables.py          (rewrites README.md between the markers; tests/test_readme.py compares)
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from monograph.config.keys import SECTIONS, Floored, Fraction, Width

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- made by docs/make_tables.py -->", "<!-- end -->"
ACCUMULATED, COMPILED = "tests/laws/test_accumulated_is_large_batch.py", "tests/laws/test_compiled_is_eager.py"
PACKED, RECOMPUTED = "tests/laws/test_packed_is_separate.py", "tests/laws/test_recomputed_is_stored.py"
BLOCKS = "tests/laws/test_scopes.py"
STREAMED = "tests/laws/test_streamed_is_resident.py"
SHARDED = "tests/laws/test_sharded_is_single.py"
TRANSFERRED = "tests/laws/test_transferred_is_tuned.py"
LORA = "tests/laws/test_lora.py"
SCALED = "tests/graph/test_precision.py"
STATES = [f"{rule}:{state}" for rule in ("adamw", "muon") for state in ("bf16", "8bit", "all-bf16")]
SCHEDULE = "tests/test_schedule.py"
NARROW = dict.fromkeys(STATES, "tests/test_narrow.py")

# What stands behind a value that works: a law by its number, or the file that tests it.
BEHIND: dict[str, dict[str, str]] = {
    "train.memory": {"device": ACCUMULATED, "stream": STREAMED},
    "train.precision": {"fp32": COMPILED, "bf16": COMPILED, "fp16": SCALED, "fp8": "tests/graph/test_fp8.py"},
    "train.remat": dict.fromkeys(("none", "pointwise", "full", "a number between 0 and 1"), RECOMPUTED)
    | {"offload": "tests/graph/test_offload.py"},
    "train.compile": {"whole": COMPILED, "blocks": BLOCKS, "none": ACCUMULATED},
    "train.parallel": {"none": ACCUMULATED, "ddp": SHARDED, "fsdp": SHARDED},
    "data.packing": {"packed": PACKED, "padded": ACCUMULATED},
    "data.bad_records": dict.fromkeys(("refuse", "skip"), "tests/data/test_records.py"),
    "data.answers": dict.fromkeys(("every", "last"), "tests/data/test_answers.py"),
    "data.too_long": dict.fromkeys(("truncate", "refuse"), "tests/data/test_answers.py"),
    "optim.name": {"adamw": "tests/test_optim.py", "muon": "tests/test_muon.py"} | NARROW,
    "optim.schedule": dict.fromkeys(("cosine", "constant", "wsd", "cosine:FLOOR", "wsd:FLOOR"), SCHEDULE),
    "optim.ema": dict.fromkeys(("none", "a number between 0 and 1"), "tests/test_optim.py"),
    "optim.transfer": {"none": "tests/test_optim.py", "width": TRANSFERRED, "width:SIZE": TRANSFERRED},
    "model.preset": dict.fromkeys(("nano", "micro", "124m", "llama-179m", "1b", "8b"), "tests/model/test_config.py"),
    "lora.base": {"int8": LORA, "nf4": LORA},
}
LAW = {
    COMPILED: "law 1",
    "tests/laws/test_scopes.py": "law 1",
    ACCUMULATED: "law 2",
    RECOMPUTED: "law 3",
    PACKED: "law 9",
    STREAMED: "law 4",
    SHARDED: "law 13",
    TRANSFERRED: "law 14",
}


def table() -> str:
    """One row per key that offers a choice: its values, and what holds each."""
    lines = ["| key | values, and what holds them |", "|---|---|"]
    for key, behind in BEHIND.items():
        works = ", ".join(f"`{value}` [{_name(path)}]({path})" for value, path in grouped(behind))
        lines.append(f"| `{key}` | {works} |")
    return "\n".join(lines)


def values(key: str) -> list[str]:
    """The values that the key's type lists, without "auto", which is the planner's choice among them."""
    section, _, name = key.partition(".")
    annotation = SECTIONS[section].model_fields[name].annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    listed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind) if value != "auto"]
    if Fraction in kinds:
        return [*listed, "a number between 0 and 1"]
    if Floored in kinds:
        return [*listed, "cosine:FLOOR", "wsd:FLOOR"]
    if Width in kinds:
        return [*listed, "width:SIZE"]
    return listed if len(kinds) == 1 else []


def grouped(behind: dict[str, str]) -> list[tuple[str, str]]:
    """Neighbouring values with the same thing behind them, as one."""
    by_path: dict[str, list[str]] = {}
    for value, path in behind.items():
        by_path.setdefault(path, []).append(value)
    return [("`, `".join(together), path) for path, together in by_path.items()]


def _name(path: str) -> str:
    return LAW.get(path, Path(path).stem)


def main() -> None:
    """Puts the table in its place."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
