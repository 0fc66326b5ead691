"""Run: pytest tests/test_axes.py (what a sweep varies: lists, ranges, samples, and what is none)"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from monograph.config import KEYS
from monograph.config.axes import (
    _WHY_NO_AXIS,
    AXIS_KEYS,
    Axis,
    axes_of,
    points,
    require_single_values,
)
from monograph.errors import UsageError


def values(key: str, text: str) -> tuple[object, ...]:
    fixed, axes = axes_of({key: text})
    assert not fixed
    return axes[0].values


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.seed", "0,1", (0, 1)),
        ("train.seed", "0..3", (0, 1, 2, 3)),
        ("optim.lr", "1e-3,auto", (1e-3, "auto")),
        ("optim.weight_decay", "lin:0..0.2:3", (0.0, 0.1, 0.2)),
        ("optim.lr", "log:0.001..0.1:3", (0.001, 0.01, 0.1)),
        ("optim.lr", "log:1e-1..1e-3:3", (0.1, 0.01, 0.001)),
        ("optim.betas", "[0.9,0.95],[0.9,0.99]", ((0.9, 0.95), (0.9, 0.99))),
        ("optim.warmup_updates", "lin:0..20:3", (0, 10, 20)),
        ("optim.grad_clip", "none,1", ("none", 1.0)),
        ("model.preset", "nano,micro", ("nano", "micro")),
        ("model.tie_word_embeddings", "true,false", (True, False)),
        ("train.tokens_per_update", "1Ki,2Ki", (1024, 2048)),
    ],
)
def test_axes(key: str, text: str, expected: tuple[object, ...]) -> None:
    assert values(key, text) == expected


def test_the_ends_of_a_range_are_what_was_typed() -> None:
    found = values("optim.lr", "log:1.2345678e-5..9.8765432e-2:8")
    assert (found[0], found[-1], len(found)) == (1.2345678e-5, 9.8765432e-2, 8)


@pytest.mark.parametrize(
    ("key", "text"),
    [("optim.betas", "0.9,0.95"), ("data.source", "a,b.txt"), ("data.source", "../texts"), ("train.seed", "3"),
     ("optim.lr", "auto"), ("data.tokenizer", "bpe:300")],
)  # fmt: skip
def test_one_value_is_no_axis(key: str, text: str) -> None:
    assert axes_of({key: text}) == ({key: text}, [])


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("optim.lr", "log:1e-5..:8", "a range has two ends"),
        ("optim.lr", "log:..1e-2:8", "a range has two ends"),
        ("optim.lr", "log:1e-2:8", "a range has two ends"),
        ("train.seed", "0..", "a range has two ends"),
        ("train.seed", "3..1", "expected whole numbers"),
        ("optim.lr", "0.1..0.2", "expected whole numbers"),
        ("optim.lr", "log:0..1:3", "above 0"),
        ("optim.lr", "log:1e-3..1e-2:x", "whole number of values"),
        ("optim.lr", "log:1e-3..1e-2:1", "at least 2"),
        ("optim.lr", "log:1e-3..1e-3:4", "would be equal"),
        ("optim.lr", "log:a..b:4", "'a' is not a number"),
        ("optim.lr", "1e-3,,1e-2", "empty value"),
        ("optim.lr", ",", "empty value"),
        ("optim.lr", "1e-3,0.001", "there twice"),
        ("optim.lr", "1e-3,-1", "optim.lr = \"-1\": expected a number above 0"),
        ("optim.warmup_updates", "lin:0..1:3", "whole number"),
        ("train.minutes", "1,2", "train.minutes cannot be an axis: how much a member learns"),
        ("train.keep", "2,3", "axes are optim.lr"),
        ("model.vocab_size", "300,400", "the tokenizer's"),
        ("train.seed", "0-3", "a range is typed as train.seed=0..3"),
        ("train.seed", "0:3", "a range is typed as train.seed=0..3"),
        ("optim.lr", "logspace(1e-4, 1e-2, 8)", "a range is typed as optim.lr=log:1e-4..1e-2:8"),
        ("optim.lr", "uniform(0.1,0.2)", "a range is typed as optim.lr=lin:0.1..0.2"),
    ],
)  # fmt: skip
def test_what_is_no_axis_is_refused(key: str, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        axes_of({key: text})
    assert words in str(refusal.value) and key in str(refusal.value)


def test_every_key_is_an_axis_or_has_a_reason() -> None:
    assert set(AXIS_KEYS) | set(_WHY_NO_AXIS) == set(KEYS)
    assert not [key for key, reason in _WHY_NO_AXIS.items() if not reason]


def test_points_are_the_product() -> None:
    axes = [Axis("optim.lr", (1.0, 2.0)), Axis("train.seed", (0, 1))]
    assert points(axes) == [
        {"optim.lr": lr, "train.seed": seed} for lr in (1.0, 2.0) for seed in (0, 1)
    ]
    assert points([]) == [{}]


@pytest.mark.parametrize("text", ["0..100000000", "log:1..1e8:100000000"])
def test_a_range_of_too_many_values_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"train.seed=.*: 100,000,00[01] members; a sweep has 10,000 at most"
    ):
        axes_of({"train.seed": text})


def test_so_are_too_many_points_but_not_samples_of_them() -> None:
    ten = ",".join(f"{number}e-5" for number in range(1, 11))
    axes = axes_of(dict.fromkeys(("optim.lr", "optim.eps", "optim.weight_decay"), ten))[1]
    every = points(axes)
    some = points(axes, 7)
    assert (
        len(every) == 1000
        and some == [point for point in every if point in some]
        and len(some) == 7
    )
    more = [*axes, *axes_of({"train.seed": "0..9", "optim.warmup_updates": "0..9"})[1]]
    with pytest.raises(UsageError, match="100,000 members; a sweep has 10,000 at most"):
        points(more)
    assert len(points(more, 5)) == 50


def test_samples_are_the_same_each_time_and_have_every_seed() -> None:
    _, axes = axes_of(
        {"optim.lr": "log:1e-5..1e-1", "optim.weight_decay": "0,0.1", "train.seed": "0..2"}
    )
    found = points(axes, 40)
    assert found == points(axes, 40)
    assert [point["train.seed"] for point in found] == [0, 1, 2] * 40
    logs = [math.log10(point["optim.lr"]) for point in found[::3]]
    assert min(logs) >= -5 and max(logs) <= -1 and len(set(logs)) == 40
    assert sum(each < -3 for each in logs) in range(10, 31), "even in the logarithm"
    assert {point["optim.weight_decay"] for point in found} == {0.0, 0.1}


def test_samples_of_listed_values_are_different_points() -> None:
    _, axes = axes_of({"optim.lr": "log:1e-4..1e-2:4", "optim.eps": "1e-8,1e-7"})
    found = points(axes, 5)
    assert len({tuple(point.values()) for point in found}) == 5
    with pytest.raises(UsageError, match="the axes have 8 points"):
        points(axes, 9)


@pytest.mark.parametrize(
    ("axes", "samples", "words"),
    [({"optim.lr": "log:1e-4..1e-2"}, None, "say how many values"), ({"train.seed": "0,1"}, 2, "give one"),
     ({"optim.lr": "1,2"}, 0, "above 0")],
)  # fmt: skip
def test_samples_that_cannot_be_drawn(
    axes: dict[str, str], samples: int | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        points(axes_of(axes)[1], samples)


@pytest.mark.parametrize(
    ("key", "text", "right"),
    [
        ("optim.lr", "[1e-3,2e-3]", "1e-3,2e-3"),
        ("optim.lr", "[1e-3, 2e-3]", "1e-3,2e-3"),
        ("optim.lr", "(0.1,0.2)", "0.1,0.2"),
        ("optim.lr", "{0.1,0.2}", "0.1,0.2"),
        ("optim.lr", "[log:1e-4..1e-2:8]", "log:1e-4..1e-2:8"),
        ("optim.name", "['adamw', \"muon\"]", "adamw,muon"),
        ("train.seed", "[0..3]", "0..3"),
        ("train.seed", "[3]", "3"),
    ],
)
def test_brackets_are_answered_with_the_form_without_them(key: str, text: str, right: str) -> None:
    with pytest.raises(UsageError) as error:
        axes_of({key: text})
    assert str(error.value) == f"{key}={text}: values are written without brackets: {key}={right}"
    axes_of({key: right})


@pytest.mark.parametrize(
    ("section", "line", "typed"),
    [
        ("optim", "lr = [1e-3, 2e-3]  # two", "optim.lr=1e-3,2e-3"),
        ("optim", 'lr = ["1e-3", "2e-3"]', "optim.lr=1e-3,2e-3"),
        ("optim", 'lr = "1e-3,2e-3"', "optim.lr=1e-3,2e-3"),
        ("optim", 'lr = "log:1e-4..1e-2:8"', "optim.lr=log:1e-4..1e-2:8"),
        ("optim", 'name = ["adamw", "muon"]', "optim.name=adamw,muon"),
        ("optim", "betas = [[0.9, 0.95], [0.9, 0.99]]", "optim.betas=[0.9,0.95],[0.9,0.99]"),
        ("train", "seed = [0, 1]", "train.seed=0,1"),
        ("model", "tie_word_embeddings = [true, false]", "model.tie_word_embeddings=true,false"),
    ],
)
def test_an_axis_in_a_file_is_answered_with_how_it_is_typed(
    tmp_path: Path, section: str, line: str, typed: str
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(f"[{section}]\n{line}\n")
    with pytest.raises(UsageError) as error:
        require_single_values(toml)
    key, _, text = typed.partition("=")
    assert str(error.value).startswith(f"{toml}:2: {key} has several values") and str(
        error.value
    ).endswith(f" {typed}")
    assert axes_of({key: text})[1]


@pytest.mark.parametrize(
    "line", ["betas = [0.9, 0.95]", "lr = 3e-4", 'lr = "high"', "lr = []", "lr = [1]", "lr = true"]
)
def test_one_value_in_a_file_is_none_right_or_wrong(tmp_path: Path, line: str) -> None:
    """What is wrong is refused where the file is loaded, by what the key expects."""
    (tmp_path / "run.toml").write_text(f"[optim]\n{line}\n")
    require_single_values(tmp_path / "run.toml")
