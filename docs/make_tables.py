"""Write tables from the code: all keys (configuration), and the test of each value (support).

Usage: python docs/make_tables.py (rewrites support.md and configuration.md; tests/test_readme.py
compares)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from made_parts import with_made_parts

import monograph
from monograph.config.keys import KEYS, SECTIONS, Fraction, Key, key_declaration
from monograph.config.settings import toml_of
from monograph.optim import OPTIMIZERS
from monograph.optim.formats import FORMATS
from monograph.rl.advantages import ADVANTAGES
from monograph.session.by_key import keys_by_field
from monograph.session.job import Job

SUPPORT = Path(__file__).resolve().parent / "support.md"
CONFIGURATION = Path(__file__).resolve().parent / "configuration.md"
PACKAGE = Path(monograph.__file__).parent
# Files of `session` that decide no key. They refuse settings, take them over from another run, make the
# settings of other runs, or assume settings for a plan.
NOT_DECIDING = {"requirements", "recorded", "locked_run", "evaluated_model", "ladder", "supposed"}
REFUSING = ("require", "_require")  # beginnings of the names of functions that refuse settings
BEGIN = "<!-- made by docs/make_tables.py -->"
ACCUMULATED, COMPILED = (
    "tests/laws/test_accumulated_is_large_batch.py",
    "tests/laws/test_compiled_is_eager.py",
)
PACKED, RECOMPUTED = (
    "tests/laws/test_packed_is_separate.py",
    "tests/laws/test_recomputed_is_stored.py",
)
BLOCKS = "tests/laws/test_scopes.py"
STREAMED = "tests/laws/test_streamed_is_resident.py"
SHARDED = "tests/laws/test_sharded_is_single.py"
TRANSFERRED = "tests/laws/test_transferred_is_tuned.py"
LORA = "tests/laws/test_lora.py"
ROUNDED = "tests/laws/test_rounded_is_exported.py"
ESTIMATOR = "tests/laws/test_estimator_is_gradient.py"
OFF_POLICY = "tests/laws/test_off_policy_is_its_equation.py"
PREFERENCE = "tests/laws/test_preference_is_its_equation.py"
SCALED = "tests/graph/test_precision.py"
SCHEDULE = "tests/test_schedule.py"


def own_test(name: str, otherwise: str) -> str:
    """Return the path of tests/test_NAME.py if there is such a file, or else `otherwise`."""
    path = f"tests/test_{name}.py"
    return path if (SUPPORT.parents[1] / path).exists() else otherwise


# The test of a key's values, or of each value: a law, or another file.
_BEHIND: dict[str, str | dict[str, str]] = {
    "train.memory": {"device": ACCUMULATED, "stream": STREAMED},
    "train.precision": {
        "fp32": COMPILED,
        "bf16": COMPILED,
        "fp16": SCALED,
        "fp8": "tests/graph/test_fp8.py",
        "fp8_head": "tests/ops/test_fp8_head.py",
    },
    "train.quantize": {"none": ACCUMULATED, "int4": ROUNDED, "int8": ROUNDED},
    "train.remat": dict.fromkeys(
        ("none", "pointwise", "full", "a number between 0 and 1"), RECOMPUTED
    )
    | {"offload": "tests/graph/test_offload.py"},
    "train.compile": {"whole": COMPILED, "blocks": BLOCKS, "none": ACCUMULATED},
    "train.parallel": {"none": ACCUMULATED} | dict.fromkeys(("ddp", "fsdp", "hsdp"), SHARDED),
    "train.gather_dtype": SHARDED,
    "data.packing": {"packed": PACKED, "padded": ACCUMULATED},
    "data.bad_records": "tests/data/test_records.py",
    "data.answers": "tests/data/test_loss_mask.py",
    "data.too_long": "tests/data/test_loss_mask.py",
    "optim.name": {name: own_test(name, "tests/test_optim.py") for name in OPTIMIZERS},
    "optim.state": {
        name: "tests/test_optim.py" if form.exact else own_test(name, "tests/test_narrow.py")
        for name, form in FORMATS.items()
    },
    "optim.master_weights": {"true": "tests/test_optim.py", "false": "tests/test_narrow.py"},
    "optim.skip_spikes": "tests/test_clip.py",
    "optim.schedule": SCHEDULE,
    "optim.ema": "tests/test_optim.py",
    "optim.transfer": {"none": "tests/test_optim.py", "width": TRANSFERRED},
    "model.preset": "tests/model/test_config.py",
    "model.family": "tests/model/test_families.py",
    "model.tie_word_embeddings": "tests/model/test_families.py",
    "lora.base": LORA,
    "lora.rslora": LORA,
    "lora.dora": LORA,
    "rl.kl": OFF_POLICY,
    "rl.truncated": ESTIMATOR,
    "prefer.loss": PREFERENCE,
    "rl.advantage": {
        name: ESTIMATOR if advantage.ratio.kind == "clip" else OFF_POLICY
        for name, advantage in ADVANTAGES.items()
    },
}
LAW = {
    COMPILED: "law 1",
    "tests/laws/test_scopes.py": "law 1",
    ACCUMULATED: "law 2",
    RECOMPUTED: "law 3",
    PACKED: "law 9",
    STREAMED: "law 4",
    ROUNDED: "law 11",
    SHARDED: "law 13",
    TRANSFERRED: "law 14",
    ESTIMATOR: "law 17",
    OFF_POLICY: "law 17",
    PREFERENCE: "law 18",
}


def behind() -> dict[str, dict[str, str]]:
    """Return the test of each value of each key that offers a choice."""
    return {
        key: dict.fromkeys(values(key), tests) if isinstance(tests, str) else tests
        for key, tests in _BEHIND.items()
    }


def table() -> str:
    """Return one row per key that offers a choice: its values, and the test of each."""
    lines = ["| key | values, each with its test |", "|---|---|"]
    for key, tests in behind().items():
        works = ", ".join(f"`{value}` [{_name(path)}](../{path})" for value, path in grouped(tests))
        lines.append(f"| `{key}` | {works} |")
    return "\n".join(lines)


def values(key: str) -> list[str]:
    """Return the values that the key's type lists, without "auto", which is the planner's choice
    among them.
    """
    section, _, name = key.partition(".")
    annotation = SECTIONS[section].model_fields[name].annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if bool in kinds:
        return ["true", "false"]
    listed = [
        value
        for kind in kinds
        if get_origin(kind) is Literal
        for value in get_args(kind)
        if value != "auto"
    ]
    if listed and Fraction in kinds:
        return [*listed, "a number between 0 and 1"]
    return listed if len(kinds) == 1 else []


def grouped(tests: dict[str, str]) -> list[tuple[str, str]]:
    """Join values that have the same test."""
    by_path: dict[str, list[str]] = {}
    for value, path in tests.items():
        by_path.setdefault(path, []).append(value)
    return [("`, `".join(together), path) for path, together in by_path.items()]


def _name(path: str) -> str:
    return LAW.get(path, Path(path).stem)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a file."""
    return (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    )


def _sections(function: ast.FunctionDef) -> dict[str, str]:
    """Return local names of sections: {"optim": "optim"} after `optim = settings.optim`, and
    {"rl": "rl"} after `rl = settings.section(RlSection)`.
    """
    found: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            both = zip(target.elts, value.elts, strict=False) if pair else [(target, value)]
            found |= {
                t.id: section
                for t, v in both
                if isinstance(t, ast.Name) and (section := _section_name(v))
            }
    return found


def _section_name(node: ast.AST) -> str:
    """Return the name of the section that `settings.train` or `settings.section(RlSection)` is; "" if
    the node is no section.
    """
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("settings.section"):
        named = ast.unparse(node.args[0])
        return next(name for name, section in SECTIONS.items() if section.__name__ == named)
    is_one = isinstance(node, ast.Attribute) and node.attr in SECTIONS
    return node.attr if is_one and ast.unparse(node.value).endswith("settings") else ""


def keys_read(function: ast.FunctionDef, *, refusals: bool = False) -> set[str]:
    """Return the keys that a function reads from the settings; with `refusals` also those that only
    an error names.
    """
    local = _sections(function)
    errors = [node for node in ast.walk(function) if isinstance(node, ast.Raise)]
    named = set() if refusals else {id(inner) for error in errors for inner in ast.walk(error)}
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or id(node) in named:
            continue
        section = _section_name(node.value) or local.get(ast.unparse(node.value), "")
        fields = SECTIONS[section].model_fields if section else {}
        whole = {
            "model_dump": fields,
            "sizes": [key for key in fields if key not in ("preset", "family", "init")],
        }
        found |= {
            f"{section}.{key}"
            for key in whole.get(node.attr, [node.attr] if node.attr in fields else [])
        }
    return found


def _keys_written(function: ast.FunctionDef) -> set[str]:
    """Return the keys for which a function writes a value.

    It is written as in `chosen["data.tokenizer"] = ...` or
    `return settings.resolve({"data.tokenizer": ...}, origin)`.
    """
    nodes = list(ast.walk(function))
    written: list[ast.expr | None] = [
        node.slice
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    for returned in (node for node in nodes if isinstance(node, ast.Return)):
        for call in (node for node in ast.walk(returned) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith("settings.resolve") and isinstance(
                call.args[0], ast.Dict
            ):
                written += call.args[0].keys
    return {key.value for key in written if isinstance(key, ast.Constant) and key.value in KEYS}


def deciding() -> dict[str, list[str]]:
    """Return what decides each key, by key.

    These are the functions that write the key. If there are none, they are the functions that read it and
    do more than refuse it, and the field of a job that has the key's value unchanged.
    """
    reading: dict[str, list[str]] = {key: [] for key in KEYS}
    writing: dict[str, list[str]] = {key: [] for key in KEYS}
    for path in sorted((PACKAGE / "session").rglob("*.py")):
        for function in functions(path) if path.stem not in NOT_DECIDING else ():
            where = f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}.{function.name}"
            for key in keys_read(function) if not function.name.startswith(REFUSING) else ():
                reading[key].append(where)
            for key in _keys_written(function):
                writing[key].append(where)
    for field, key in keys_by_field(Job).items():
        reading[key].append(f"session.job.Job.{field}")
    return {key: writing[key] or reading[key] for key in KEYS}


def keys() -> str:
    """Return a heading and a table for each section: its keys, their meaning, the values they take
    and the default.
    """
    lines: list[str] = []
    for name, section in SECTIONS.items():
        lines += [f"### [{name}]", "", section.about(), ""]
        lines += ["| key | meaning | values | default |", "|---|---|---|---|"]
        for key in section.model_fields:
            said = key_declaration(f"{name}.{key}")
            default = (
                said.otherwise or "not set"
                if said.default is None
                else f"`{toml_of(said.default)}`"
            )
            cells = (said.meaning, _taken(said), default)
            lines.append(f"| `{name}.{key}` | {' | '.join(map(_cell, cells))} |")
        lines.append("")
    return "\n".join(lines).strip()


def _taken(said: Key) -> str:
    """Return the values that a key takes, and what each word among them stands for."""
    parts = re.split(r"(, or |, | or )", said.expected)
    return "".join(
        f"{part} ({said.choices[part]})" if part in said.choices else part for part in parts
    )


def _cell(text: str) -> str:
    """Return a text as a cell of a table has it, in which a bar would end the cell, and a bracket
    begin a tag.
    """
    return text.replace("|", "&#124;").replace("<", "&lt;")


def pages() -> dict[Path, list[str]]:
    """Return what each page has between its markers, in their order."""
    return {SUPPORT: [table()], CONFIGURATION: [keys()]}


def main() -> None:
    """Write the tables to their pages."""
    for page, made in pages().items():
        text = with_made_parts(page.read_text(encoding="utf-8"), BEGIN, made)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
