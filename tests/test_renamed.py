"""Run: pytest tests/test_renamed.py

A value is one thing: no key's value has parts; spellings of earlier versions are answered with
today's; and names of other programs lead to the keys.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from monograph.cli.typed import app
from monograph.config import KEYS, load
from monograph.config.axes import AXIS_KEYS, axes_of, require_single_values
from monograph.config.elsewhere import ELSEWHERE
from monograph.config.keys import SECTIONS
from monograph.config.renamed import OLD_SPELLINGS
from monograph.config.settings import checked_value, translated_values
from monograph.config.sources import classify, written_fingerprint
from monograph.config.unknown import key_advice
from monograph.errors import UsageError
from monograph.serve.document import document

SPELLINGS = [(old.key, example) for old in OLD_SPELLINGS for example in old.examples]
IDS = [f"{key}={example}" for key, example in SPELLINGS]


def refusal(*arguments: str) -> str:
    """What `monograph train` says about arguments."""
    toml, overrides, faults = classify(arguments)
    with pytest.raises(UsageError) as caught:
        load(toml, overrides, {}, faults=faults)
    return str(caught.value)


def typed(advice: str) -> dict[str, str]:
    """The keys and values that an answer says, as a shell reads them."""
    return dict(word.split("=", 1) for word in shlex.split(advice))


@pytest.mark.parametrize(("key", "old"), SPELLINGS, ids=IDS)
def test_an_old_spelling_is_answered_with_the_new_keys_wherever_it_is_written(
    key: str, old: str, tmp_path: Path
) -> None:
    now = translated_values(key, old)
    assert now
    line = f"{key} = {old}: say "
    said = refusal(f"{key}={old}")
    assert said.startswith(f"command line: {line}")
    # Typed as it stands, the answer says the same.
    assert {
        new: load(None, typed(said.partition(": say ")[2]), {}).values()[new] for new in now
    } == now
    section, _, name = key.partition(".")
    toml = tmp_path / "run.toml"
    toml.write_text(f'[{section}]\n{name} = "{old}"\n')
    with pytest.raises(UsageError, match="run.toml:2: ") as caught:
        load(toml, {}, {})
    assert f': {key} = "{old}": say ' in str(caught.value)
    # The answer is lines of a file: pasted under their sections, they load.
    answer = str(caught.value).partition(": say ")[2]
    by_section = re.findall(r"(.+?) under \[(\w+)\](?: and |$)", answer)
    toml.write_text(
        "".join(f"[{name}]\n" + lines.replace(" and ", "\n") + "\n" for lines, name in by_section)
    )
    assert {key: load(toml, {}, {}).values()[key] for key in now} == now
    with pytest.raises(UsageError, match=f"MONOGRAPH_.*: {re.escape(line)}"):
        load(None, {}, {f"MONOGRAPH_{section.upper()}_{name.upper()}": old})


@pytest.mark.parametrize(("key", "old"), SPELLINGS, ids=IDS)
def test_values_in_an_old_spelling_are_answered_with_the_new_keys_as_an_axis_of_a_sweep(
    key: str, old: str, tmp_path: Path
) -> None:
    """On the command line and in a file, as a list and as a text; one value alone is a value of
    every member.
    """
    now = translated_values(key, old)
    assert now
    assert axes_of({key: old}) == ({key: old}, [])
    if any(new.endswith(("regex", "schema", "teacher")) for new in now):
        return  # a text in which commas may be is one value
    other = next(
        value for value in ("none", "auto", "dpo", "cosine", "16", "nano") if is_value(key, value)
    )
    if other not in now.values():
        axis = f"{old},{other}"
        with pytest.raises(UsageError) as caught:
            axes_of({key: axis})
        said = str(caught.value)
        assert said.startswith(f"{key}={axis}: ") and all(f"{new}=" in said for new in now)
        if key in AXIS_KEYS and "start a run for each" not in said:
            fixed, axes = axes_of(typed(said.partition(": say ")[2].partition(";")[0]))
            assert {*fixed, *(axis.key for axis in axes)} == {*now}
        section, _, name = key.partition(".")
        for value in (f'"{axis}"', f'["{old}", "{other}"]'):
            (tmp_path / "run.toml").write_text(f"[{section}]\n{name} = {value}\n")
            with pytest.raises(UsageError, match="run.toml:2: ") as caught:
                require_single_values(tmp_path / "run.toml")
                load(tmp_path / "run.toml", {}, {})
            assert all(f"{new}=" in str(caught.value) for new in now)


def is_value(key: str, text: str) -> bool:
    try:
        checked_value(key, text, "here", from_text=True)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize(
    ("axis", "advice"),
    [
        (
            "optim.name=muon:8bit,adamw:bf16",
            "say optim.name=muon,adamw optim.state=8bit,bf16; a sweep trains all combinations",
        ),
        ("optim.lr=1e-3:16,2e-3:16", "say optim.lr=1e-3,2e-3 lora.lr_ratio=16"),
        (
            "rl.kl=entropy:0.01,none",
            "start a run for each: rl.entropy_coef=0.01, and rl.kl=none",
        ),
        (
            "prefer.loss=dpo:0.1,ipo:0.2",
            "start a run for each: prefer.loss=dpo prefer.beta=0.1, and prefer.loss=ipo prefer.beta=0.2; "
            "prefer.loss cannot be an axis: ",
        ),
    ],
)  # fmt: skip
def test_several_values_in_old_spellings_are_said_as_they_were_typed(
    axis: str, advice: str
) -> None:
    key, _, text = axis.partition("=")
    with pytest.raises(UsageError) as caught:
        axes_of({key: text})
    assert str(caught.value).startswith(f"{axis}: {advice}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("optim.lr=2e-4:16", "optim.lr=2e-4 lora.lr_ratio=16"),
        ("prefer.loss=simpo:2:1", "prefer.loss=simpo prefer.beta=2 prefer.gamma=1"),
        ("optim.name=MUON:8BIT", "optim.name=muon optim.state=8bit"),
        ("lora.rank=16:dora:rslora", "lora.rank=16 lora.dora=true lora.rslora=true"),
        ("rl.reward=regex:[0-9]+", "rl.reward=regex 'rl.reward_regex=[0-9]+'"),
        ("data.source=books/@2", "data.source=books/ data.weights=2"),
    ],
)
def test_values_come_back_as_they_were_typed(given: str, said: str) -> None:
    key, _, value = given.partition("=")
    assert refusal(given) == f"command line: {key} = {value}: say {said}"


@pytest.mark.parametrize(("key", "old"), SPELLINGS, ids=IDS)
def test_what_a_run_recorded_in_an_old_spelling_is_read_as_the_new_keys(
    key: str, old: str, tmp_path: Path
) -> None:
    section, _, name = key.partition(".")
    toml = tmp_path / "config.toml"
    toml.write_text(f'[{section}]\n{name} = "{old}"\n')
    settings = load(toml, {}, {}, recorded=True)
    now = translated_values(key, old)
    assert now and {key: settings.values()[key] for key in now} == now
    assert re.fullmatch("[0-9a-f]{64}", written_fingerprint(toml))


def test_sources_with_weights_are_read_as_sources_and_weights(tmp_path: Path) -> None:
    toml = tmp_path / "config.toml"
    toml.write_text('[data]\nsource = ["books/@2", "stdlib"]\n')
    data = load(toml, {}, {}, recorded=True).data
    assert data.source == ["books/", "stdlib"] and data.weights == [2.0, 1.0]
    with pytest.raises(
        UsageError, match=r'say source = ."books/", "stdlib". and weights = .2, 1. under .data.$'
    ):
        load(toml, {}, {})


# Texts and paths are whatever a person writes; FILE.py:FUNCTION is Python's own way to name an
# object.
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
    "rl.environment",
    "rl.answer_regex",
    "rl.answer_schema",
}
WORDS = (
    "adamw",
    "muon",
    "cosine",
    "width",
    "fsdp",
    "16",
    "1e-3",
    "k2",
    "dpo",
    "every",
    "nano",
    "none",
    "fp32",
    "true",
)


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
                checked_value(key, f"{one}:{other}", "command line", from_text=True)


# A sweep's axis has its own notation, and a key of the answer's table of tokens is no value that
# anybody gives.
KNOWN = r"hf://\S+|FILE\.py:FUNCTION|(?:log|lin):\S+|token_id:17"


def test_no_option_of_a_command_has_a_value_with_parts() -> None:
    said = [
        f"{option.metavar} {getattr(option, 'help', '')}" for option in options(get_command(app))
    ]
    assert len(said) >= 60
    assert not [text for text in said if re.search(r"\w:\w", re.sub(KNOWN, "", text))]


def options(command: Any) -> Iterator[Any]:
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)
    yield from command.params


def test_no_field_of_the_endpoint_has_a_value_with_parts() -> None:
    schemas = document()["components"]["schemas"]
    assert len(schemas) >= 30
    for name, schema in schemas.items():
        assert not re.search(r"\w:\w", re.sub(KNOWN, "", json.dumps(schema))), name


def test_names_of_other_programs_lead_to_keys_that_are_there() -> None:
    assert len(ELSEWHERE) >= 60 and not {*ELSEWHERE} & {*KEYS}
    for name, said in ELSEWHERE.items():
        named = re.findall(r"\b(?:model|data|optim|train|lora|rl|prefer)\.[a-z_]+", said)
        assert set(named) <= set(KEYS), name
        for spelling in (name, f"train.{name}"):
            if spelling not in KEYS:
                assert said in refusal(f"{spelling}=1")


def test_an_advice_for_a_file_keeps_a_command_as_it_is() -> None:
    command = "torchrun --standalone --nproc-per-node N -m monograph train train.parallel=ddp"
    assert key_advice("train.gpus") == f"; say {command}"
    for name, said in ELSEWHERE.items():
        if "=" in said and f"train.{name}" not in KEYS:
            assert key_advice(f"train.{name}").startswith("; "), name
