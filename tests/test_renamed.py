"""Run: pytest tests/test_renamed.py

A value is one thing: no key's value has parts; spellings of earlier versions are answered with today's; and names of
other programs lead to the keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from monograph import serve
from monograph.cli.typed import app
from monograph.config import KEYS, load
from monograph.config.axes import AXES, axes_of
from monograph.config.elsewhere import ELSEWHERE
from monograph.config.keys import SECTIONS
from monograph.config.renamed import OLD_SPELLINGS, OldSpelling, spelled, translated
from monograph.config.settings import check
from monograph.config.sources import classify, written_fingerprint
from monograph.errors import UsageError

IDS = [f"{old.key}={old.example}" for old in OLD_SPELLINGS]


@pytest.mark.parametrize("old", OLD_SPELLINGS, ids=IDS)
def test_an_old_spelling_is_answered_with_the_new_keys_wherever_it_is_written(old: OldSpelling, tmp_path: Path) -> None:
    now = translated(old.key, old.example)
    assert now is not None
    line = f"{old.key} = {old.example}: say {spelled(now)}"
    with pytest.raises(UsageError, match=f"^command line: {re.escape(line)}$"):
        load(*classify([f"{old.key}={old.example}"]))
    section, _, name = old.key.partition(".")
    toml = tmp_path / "run.toml"
    toml.write_text(f'[{section}]\n{name} = "{old.example}"\n')
    with pytest.raises(UsageError, match=f"run.toml:2: {re.escape(f'{old.key} = {old.example}: say ')}") as caught:
        load(toml, {}, {})
    # The answer is lines of a file: pasted under their sections, they load.
    answer = str(caught.value).partition(": say ")[2]
    by_section = re.findall(r"(.+?) under \[(\w+)\](?: and |$)", answer)
    toml.write_text("".join(f"[{name}]\n" + lines.replace(" and ", "\n") + "\n" for lines, name in by_section))
    assert {key: load(toml, {}, {}).values()[key] for key in now} == now
    with pytest.raises(UsageError, match=f"MONOGRAPH_.*: {re.escape(line)}$"):
        load(None, {}, {f"MONOGRAPH_{section.upper()}_{name.upper()}": old.example})
    if old.key in AXES:
        with pytest.raises(UsageError, match=re.escape(line)):
            axes_of({old.key: f"{old.example},{old.example}"})


@pytest.mark.parametrize("old", OLD_SPELLINGS, ids=IDS)
def test_what_a_run_recorded_in_an_old_spelling_is_read_as_the_new_keys(old: OldSpelling, tmp_path: Path) -> None:
    section, _, name = old.key.partition(".")
    toml = tmp_path / "config.toml"
    toml.write_text(f'[{section}]\n{name} = "{old.example}"\n')
    settings = load(toml, {}, {}, recorded=True)
    now = translated(old.key, old.example)
    assert now and {key: settings.values()[key] for key in now} == now
    assert re.fullmatch("[0-9a-f]{64}", written_fingerprint(toml))


def test_sources_with_weights_are_read_as_sources_and_weights(tmp_path: Path) -> None:
    toml = tmp_path / "config.toml"
    toml.write_text('[data]\nsource = ["books/@2", "stdlib"]\n')
    data = load(toml, {}, {}, recorded=True).data
    assert data.source == ["books/", "stdlib"] and data.weights == [2.0, 1.0]
    with pytest.raises(UsageError, match=r'say source = ."books/", "stdlib". and weights = .2.0, 1.0. under .data.$'):
        load(toml, {}, {})


# Texts and paths are whatever a person writes; FILE.py:FUNCTION is Python's own way to name an object.
FREE = {
    "model.init",
    "data.source",
    "data.tokenizer",
    "data.text_key",
    "data.ignore_keys",
    "lora.targets",
    "lora.tokens",
    "rl.reward",
    "rl.reward_regex",
    "rl.reward_schema",
    "rl.teacher",
    "rl.answer_regex",
    "rl.answer_schema",
}
WORDS = ("adamw", "muon", "cosine", "width", "fsdp", "16", "1e-3", "k2", "dpo", "every", "nano", "none", "fp32", "true")


@pytest.mark.parametrize("key", sorted(set(KEYS) - FREE))
def test_no_value_of_a_key_has_parts(key: str) -> None:
    """Neither its type nor what it says of itself knows a colon."""
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    said = f"{field.json_schema_extra['expected']} {field.description}"  # type: ignore[index, call-overload]
    assert not re.search(r"\w:\w", said)
    for one in WORDS:
        for other in WORDS:
            with pytest.raises(UsageError):
                check(key, f"{one}:{other}", "command line", from_text=True)


# A sweep's axis has its own notation, and a key of the answer's table of tokens is no value that anybody gives.
KNOWN = r"hf://\S+|FILE\.py:FUNCTION|(?:log|lin):\S+|token_id:17"


def test_no_option_of_a_command_has_a_value_with_parts() -> None:
    said = [f"{option.metavar} {getattr(option, 'help', '')}" for option in options(get_command(app))]
    assert len(said) >= 60
    assert not [text for text in said if re.search(r"\w:\w", re.sub(KNOWN, "", text))]


def options(command: Any) -> Iterator[Any]:
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)
    yield from command.params


def test_no_field_of_the_endpoint_has_a_value_with_parts() -> None:
    schemas = json.loads((Path(serve.__file__).parent / "openapi.json").read_text())["components"]["schemas"]
    assert len(schemas) >= 60
    for name, schema in schemas.items():
        assert not re.search(r"\w:\w", re.sub(KNOWN, "", json.dumps(schema))), name


def test_names_of_other_programs_lead_to_keys_that_are_there() -> None:
    assert len(ELSEWHERE) >= 60 and not {*ELSEWHERE} & {*KEYS}
    for name, said in ELSEWHERE.items():
        named = re.findall(r"\b(?:model|data|optim|train|lora|rl|prefer)\.[a-z_]+", said)
        assert set(named) <= set(KEYS), name
        for spelling in (name, f"train.{name}"):
            if spelling not in KEYS:
                with pytest.raises(UsageError, match=re.escape(said)):
                    load(*classify([f"{spelling}=1"]))
