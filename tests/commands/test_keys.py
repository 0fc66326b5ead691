"""Run: pytest tests/commands/test_keys.py (what a person may ask about the keys of a
configuration).
"""

from __future__ import annotations

import json

import pytest

from monograph.commands.keys import run as command
from monograph.config.elsewhere import ELSEWHERE
from monograph.config.keys import KEYS, SECTIONS, key_declaration
from monograph.config.lookup import example_of, keys_in, keys_named
from monograph.config.settings import checked_value
from monograph.errors import UsageError
from monograph.planner.defaults import FINETUNING_RATES, known_learning_rate


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("optim.lr", ["optim.lr"]),
        ("learning_rate", ["optim.lr"]),
        ("--learning-rate", ["optim.lr"]),
        ("lr", ["optim.lr", "optim.min_lr_ratio", "lora.lr_ratio"]),
        ("beta", ["optim.betas", "rl.kl", "rl.kl_coef", "prefer.beta"]),
        ("steps", ["train.updates"]),
        ("prefer", [key for key in KEYS if key.startswith("prefer.")]),
        ("[lora]", [key for key in KEYS if key.startswith("lora.")]),
        ("output_dir", []),
    ],
)
def test_a_word_finds_keys(word: str, keys: list[str]) -> None:
    assert list(keys_named(word).keys) == keys


def test_every_name_of_another_program_finds_something() -> None:
    for name, said in ELSEWHERE.items():
        found = keys_named(name)
        assert found.keys or found.advice, name
        assert name in SECTIONS or set(keys_in(said)) <= set(found.keys), name


def test_a_word_that_is_none_is_answered_by_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"no key is called warmp_updates; did you mean optim\.warmup_updates\?"
    ):
        keys_named("warmp_updates")
    with pytest.raises(UsageError, match="no key is called xyzzy; the sections are model, data"):
        keys_named("xyzzy")
    with pytest.raises(UsageError):
        keys_named("")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_an_example_and_says_what_auto_stands_for(key: str) -> None:
    said, example = key_declaration(key), example_of(key)
    assert example is not None and example != "auto"
    checked_value(
        key, list(example) if isinstance(example, tuple) else example, "test", from_text=False
    )
    assert ("auto" in said.expected.replace(",", "").split()) == bool(said.auto)
    assert not said.auto or said.meaning.endswith(f" auto: {said.auto}.")


def test_the_rates_that_auto_stands_for_are_the_planners() -> None:
    rates = [
        FINETUNING_RATES["adapters"],
        FINETUNING_RATES["all"],
        known_learning_rate("nano", "muon"),
    ]
    assert [
        float(word) for word in key_declaration("optim.lr").auto.split() if word[0].isdecimal()
    ] == rates


def test_one_key_is_explained_and_a_section_listed(capsys: pytest.CaptureFixture[str]) -> None:
    command("max_grad_norm", json=False)
    out = capsys.readouterr().out
    assert (
        out.startswith("optim.grad_clip\n")
        and "  default    1.0\n" in out
        and "max_grad_norm" in out
    )
    assert "optim.grad_clip=1.0\n" in out and "[optim]\n" in out
    command(None, json=False)
    out = capsys.readouterr().out
    assert (
        all(f"\n  {key}   (default: " in out for key in KEYS)
        and max(map(len, out.splitlines())) <= 100
    )
    command("output_dir", json=False)
    assert capsys.readouterr().out == "output_dir: say --out FOLDER\n"


@pytest.mark.parametrize("key", [key for key in KEYS if key_declaration(key).choices])
def test_each_word_that_a_key_takes_is_explained(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command(key, json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert all(
        f" {word} {meaning} " in out for word, meaning in key_declaration(key).choices.items()
    )
    command(key, json=True)
    assert json.loads(capsys.readouterr().out)["keys"][0]["choices"] == key_declaration(key).choices


def test_a_program_gets_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command(None, json=True)
    entries = json.loads(capsys.readouterr().out)["keys"]
    assert [entry["key"] for entry in entries] == list(KEYS)
    [rate] = [entry for entry in entries if entry["key"] == "optim.lr"]
    assert (
        {"learning_rate", "lr"} <= {*rate["elsewhere"]}
        and rate["default"] == "auto"
        and rate["example"] == 3e-4
    )
