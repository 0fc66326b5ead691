"""Run: pytest tests/sweeps/test_advice.py (what a sweep advises is true, and its commands run as
printed)
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monograph.config import load
from monograph.config.axes import axes_of
from monograph.evaluation.significance import (
    Setting,
    Table,
    pooled_settings,
    seeds_needed,
    t_quantile,
    tabulate,
)
from monograph.sweeps import advice
from monograph.sweeps.advice import Advice, advise, typed_value, values_beyond
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import SweepSpec, spec_of

SHAPE = {
    "model.hidden_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "data.source": "texts",
}
Point = dict[str, Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    yield tmp_path


def sweep_of(points: Sequence[Point], **given: Any) -> Sweep:
    number = len(list(Path().glob("s*")))
    settings = load(None, SHAPE | (given or {"train.updates": 50}), {})
    return Sweep.create(Path(f"s{number}"), settings, points, None)


def grid(axes: dict[str, Sequence[Any]], seeds: Sequence[int] = (0, 1)) -> list[Point]:
    every = {**axes, "train.seed": seeds}
    return [dict(zip(every, values, strict=True)) for values in itertools.product(*every.values())]


def table_of(points: Sequence[Point], values: Sequence[float | None]) -> Table:
    return tabulate(values, points, "train.seed")


def advised(points: Sequence[Point], values: Sequence[float | None], **given: Any) -> list[Advice]:
    return advise(sweep_of(points, **given), table_of(points, values))


def asked(found: Advice) -> SweepSpec:
    """What the printed command asks for, read as the shell and the command line read it."""
    [said] = advice.advice_json([found])
    words = shlex.split(said["command"] or "")
    assert words[:2] == ["monograph", "sweep"]
    return spec_of(words[2:], None)


def bowl(
    points: Sequence[Point], key: str, best: Any, values: Sequence[Any], step: float = 1.0
) -> list[float]:
    """Scores that are lowest at one value, with a little luck of each seed."""
    return [
        2 + step * abs(values.index(p[key]) - values.index(best)) + 1e-3 * p["train.seed"]
        for p in points
    ]


# ---- edges ---------------------------------------------------------------------------------------

AXES: dict[str, tuple[str, Sequence[Any]]] = {
    "rates": ("optim.lr", (1e-3, 2e-3, 4e-3, 8e-3)),
    "rates that are no round numbers": ("optim.lr", (0.001, 0.003107, 0.009655, 0.03)),
    "two rates": ("optim.lr", (5e-3, 1e-2)),
    "evenly spaced": ("optim.weight_decay", (0.1, 0.2, 0.3)),
    "evenly spaced from zero": ("optim.weight_decay", (0.0, 0.1, 0.2)),
    "a zero before equal ratios": ("optim.weight_decay", (0.0, 0.01, 0.1)),
    "whole numbers": ("optim.warmup_updates", (10, 20, 30)),
    "ranks": ("lora.alpha", (4, 8, 16)),
}


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("at", ["first", "inside", "last"])
def test_a_best_value_at_the_end_of_an_axis_is_said_and_the_command_goes_on_beyond(
    place: Path, name: str, at: str
) -> None:
    key, values = AXES[name]
    best = {"first": values[0], "inside": values[len(values) // 2], "last": values[-1]}[at]
    points = grid({key: values})
    found = [
        each for each in advised(points, bowl(points, key, best, values)) if "beyond" in each.text
    ]
    inside = best not in (values[0], values[-1])
    closed = best == 0  # nothing lies below
    assert bool(found) == (not inside and not closed)
    for each in found:
        tried = {point[key] for point in asked(each).points}
        assert best in tried and len(tried) == 3 and tried & set(values) == {best}
        further = sorted(tried - {best})
        assert (further[0] > best) == (best == values[-1]) and (further[1] > best) == (
            best == values[-1]
        )
        assert {point["train.seed"] for point in asked(each).points} == {0, 1}


DIVERGED: dict[str, tuple[str, list[float | None], str, set[float]]] = {
    # the rates, their scores (None: it diverged), what is said, the rates to try
    "one is left": ("1e-3,1e30", [2.0, None], "0.001 is the only lr", {1e-3, 5e-4, 2.5e-4, 1e-2}),
    "one above diverged": (
        "1e-3,1e-2,1e-1", [2.1, 2.0, None], "0.01 is the largest lr that did not diverge", {1e-2, 0.03162},
    ),
    "far apart": ("1e-3,1e30", [2.1, 2.0], "is the largest lr", {1e30, 1e31, 1e32}),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGED)
def test_no_value_is_advised_past_one_that_diverged(place: Path, name: str) -> None:
    axis, values, words, expected = DIVERGED[name]
    points = grid({"optim.lr": tuple(map(float, axis.split(",")))}, seeds=(0,))
    [found] = [each for each in advised(points, values) if words in each.text]
    assert {point["optim.lr"] for point in asked(found).points} == expected


def test_a_rate_that_diverged_says_nothing_of_ranks(place: Path) -> None:
    points = grid({"lora.rank": (2, 4), "optim.lr": (1e-3, 1e6)}, seeds=(0,))
    given = {"data.source": "texts", "model.init": "base", "lora.rank": 2, "train.updates": 50}
    sweep = Sweep.create(Path("ranks"), load(None, given, {}), points, None)
    found = advise(sweep, table_of(points, [2.0, None, 2.1, None]))
    assert not any("the only rank" in each.text for each in found)
    assert any("2 is the smallest rank that this sweep tried" in each.text for each in found)


def test_no_larger_dropout_is_advised_than_makes_sense(place: Path) -> None:
    points = grid({"lora.dropout": (0.0, 0.2)}, seeds=(0,))
    given = {"data.source": "texts", "model.init": "base", "lora.rank": 2, "train.updates": 50}
    settings = load(None, given, {})
    sweep = Sweep.create(Path("dropout"), settings, points, None)
    found = advise(sweep, table_of(points, [2.0, 1.9]))[0]
    assert {point["lora.dropout"] for point in asked(found).points} == {0.2, 0.4}


@pytest.mark.parametrize(
    ("ordered", "above", "below"),
    [
        ([1e-3, 1e-2, 1e-1], [1.0, 10.0], [1e-4, 1e-5]),
        ([0.1, 0.2, 0.3], [0.4, 0.5], [0.05, 0.025]),
        ([0.0, 0.1, 0.2], [0.3, 0.4], [-0.1, -0.2]),
        ([0.0, 0.01, 0.1], [1.0, 10.0], [-0.05, -0.1]),
        ([1, 2, 4], [8, 16], [0]),
        ([10, 20, 30], [40, 50], [5, 2]),
    ],
)
def test_an_axis_goes_on_as_it_is_spaced(
    ordered: list[float], above: list[float], below: list[float]
) -> None:
    assert values_beyond(ordered, upwards=True) == pytest.approx(above)
    assert values_beyond(ordered, upwards=False) == pytest.approx(below)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optim.name", ("adamw", "muon")),
        ("model.tie_word_embeddings", (False, True)),
        ("optim.betas", ((0.9, 0.95), (0.9, 0.99))),
        ("optim.grad_clip", ("none", 1.0)),
        ("train.updates", (20, 40, 80)),
        ("model.hidden_size", (64, 128)),
    ],
)
def test_words_have_no_end_and_of_amounts_more_is_better_anyway(
    place: Path, key: str, values: Sequence[Any]
) -> None:
    for best in values:
        points = grid({key: values})
        assert not any(
            "beyond" in each.text for each in advised(points, bowl(points, key, best, values))
        )


def test_a_diverged_neighbour_is_no_unknown_land(place: Path) -> None:
    points = grid({"optim.lr": (0.01, 0.1, 1.0)})
    found = advised(points, [2.5, 2.511, 2.2, 2.21, None, None])
    assert not any("beyond" in each.text for each in found)
    assert any("better than the others that did not diverge" in each.text for each in found)


def test_scores_of_which_a_higher_one_is_better(place: Path) -> None:
    """Rewards: the best is the highest, and a difference has its own sign."""
    points = grid({"optim.lr": (0.01, 0.1, 1.0)})
    rewards = [0.5, 0.51, 0.9, 0.92, 0.89, 0.9]
    table = tabulate(rewards, points, "train.seed", "reward", higher_is_better=True)
    assert table.best and table.best.setting.knobs == {"optim.lr": 0.1} and table.best.member == 3
    assert table.standing(table.settings[2], "") == "tied (-0.015)"
    found = advise(sweep_of(points), table)
    assert "separate lr=0.1 from lr=1 (-0.015)" in found[0].text
    without_rival = tabulate(rewards[:4], points[:4], "train.seed", "reward", higher_is_better=True)
    found = advise(sweep_of(points[:4]), without_rival)
    assert "is worse by 0.405 ± 0.064 reward (95 %)" in found[-1].text


def test_scores_that_are_too_coarse_to_tell_the_noise_separate_nothing(place: Path) -> None:
    """Shares of few answers may differ by just as much for each seed."""
    points = grid({"optim.lr": (0.01, 0.1)})
    table = tabulate([0.25, 0.5, 0.5, 0.75], points, "train.seed", "reward", higher_is_better=True)
    assert table.noise is None and table.degrees == 1
    assert "do not tell the noise" in table.how
    found = advise(sweep_of(points), table)
    assert "Run the best with 4 seeds each" in found[-1].text
    assert len(asked(found[-1]).points) == 8
    alike = tabulate([0.25, 0.5, 0.25, 0.5], points, "train.seed", "reward")
    assert alike.settings[1].tied
    [only] = advise(sweep_of(points), alike)
    assert only.text == "All settings have the same score, 0.375 reward: none is better."


def test_several_ends_are_one_command_and_other_axes_keep_their_best_value(place: Path) -> None:
    points = grid(
        {
            "optim.lr": (0.01, 0.02),
            "optim.weight_decay": (0.1, 0.2, 0.3),
            "optim.name": ("adamw", "muon"),
        }
    )
    best = {"optim.lr": 0.02, "optim.weight_decay": 0.1, "optim.name": "muon"}
    values = [2 + sum(point[key] != value for key, value in best.items()) + 1e-3 * point["train.seed"]
              for point in points]  # fmt: skip
    found = advised(points, values)[0]
    assert found.text.startswith(
        "0.02 is the largest lr and 0.1 is the smallest weight_decay that this sweep tried"
    )
    tried = asked(found)
    assert len(tried.points) == 3 * 3 * 2 and tried.settings.optim.name == "muon"


# ---- chance --------------------------------------------------------------------------------------


def draws(generator: random.Random) -> tuple[list[Point], list[float | None]]:
    """A made-up sweep of any size, whose members may diverge."""
    rates = [1e-3 * 2**i for i in range(generator.randint(2, 9))]
    points = grid({"optim.lr": rates}, range(generator.randint(1, 6)))
    spread, noise = generator.choice((0.0, 0.01, 0.3)), generator.choice((1e-4, 0.01, 0.1))
    truth = {rate: 2 + spread * generator.random() for rate in rates}
    values: list[float | None] = [
        truth[point["optim.lr"]] + generator.gauss(0, noise) for point in points
    ]
    if generator.random() < 0.3:
        values[generator.randrange(len(values))] = None
    return points, values


@pytest.mark.parametrize("tables", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_advice_is_true_of_any_table(tables: int, place: Path) -> None:
    """What cannot be told apart is never called equal, nothing is called real but what is, and
    commands ask right.
    """
    generator = random.Random(0)
    said = set[str]()
    for number in range(tables):
        points, values = draws(generator)
        table = table_of(points, values)
        found = advise(sweep_of(points), table)
        texts = " ".join(each.text for each in found)
        assert table.best
        best = table.best.setting
        rivals = [s for s in table.settings if s.difference and len(s.failed) <= len(best.failed)]
        tied = [setting for setting in rivals if setting.tied]
        assert "either is fine" not in texts and "noise" not in texts
        assert ("by more than chance" in texts) == (
            bool(rivals) and table.noise is not None and not tied
        )
        assert ("One seed cannot tell" in texts) == (bool(rivals) and table.noise is None)
        assert ("cannot separate" in texts) == bool(tied)
        for setting in tied:
            assert f"lr={setting.knobs['optim.lr']:.4g} (+" in texts, texts
        if tied and table.degrees < 3:
            assert "would hardly" not in texts, "a noise that is hardly known proves no likeness"
        if number < tables // 4:
            for each in found:
                said.add(re.sub(r"[-+\d.e=±]+", "", each.text)[:12])
                check_command(each, table, tied)
    assert len(said) >= 4, said


def check_command(found: Advice, table: Table, tied: Sequence[Setting]) -> None:
    if not found.arguments:
        return
    assert table.best
    best, points = table.best.setting, asked(found).points
    assert any(point.items() >= best.knobs.items() for point in points)
    if "Run" in found.text:
        [number] = map(int, re.findall(r"(\d+) seeds (?:of )?each", found.text))
        assert number > len(best.members) and {point["train.seed"] for point in points} == set(
            range(number)
        )
    if "cannot separate" in found.text:
        named = {setting.knobs["optim.lr"] for setting in (best, *tied)}
        assert {point["optim.lr"] for point in points} <= named
        assert number == expected_seeds(table, tied)


def expected_seeds(table: Table, tied: Sequence[Setting]) -> int:
    assert table.best and table.noise is not None
    least = max(4, len(table.best.setting.members) + 1)
    if table.degrees < 3:
        return least
    needed = (
        seeds_needed(setting.difference.value, table.noise, pooled_settings(1 + len(tied)), 16)
        for setting in tied
        if setting.difference
    )
    return max(least, *(seeds or 0 for seeds in needed), 0)


def test_of_settings_that_are_equal_hardly_any_sweep_has_a_best_that_is_real() -> None:
    """At 95 % at most one in twenty may, up to four standard errors of the count; `advise` calls no
    other one real.
    """
    generator, runs = random.Random(1), 500
    for rates, seeds in ((2, 2), (3, 2), (4, 4), (8, 2)):
        points = grid({"optim.lr": [1e-3 * 2**i for i in range(rates)]}, range(seeds))
        tables = (table_of(points, [generator.gauss(2, 0.1) for _ in points]) for _ in range(runs))
        real = sum(all(setting.tied is not True for setting in table.settings) for table in tables)
        assert real / runs <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / runs), (rates, seeds)


@pytest.mark.parametrize("settings", [1, 2, 4])
@pytest.mark.parametrize("ratio", [0.15, 0.5, 0.8, 1.5])
def test_the_seeds_that_are_asked_for_show_the_difference_four_times_in_five(
    settings: int, ratio: float
) -> None:
    """By simulation of the test that `tabulate` makes; one seed fewer shows it less often than five
    times in six.
    """
    generator, runs = random.Random(2), 1500
    needed = seeds_needed(1.0, ratio, settings, 100)
    assert needed is not None

    def power(n: int) -> float:
        degrees, shown = settings * (n - 1), 0
        threshold = t_quantile(degrees)
        for _ in range(runs):
            measured = generator.gauss(1, ratio / math.sqrt(n))
            squares = sum(generator.gauss(0, ratio) ** 2 for _ in range(degrees))
            shown += abs(measured) > threshold * math.sqrt(squares / degrees / n)
        return shown / runs

    error = 4 * math.sqrt(0.8 * 0.2 / runs)
    assert power(needed) > 0.78 - error
    assert needed == 2 or power(needed - 1) < 0.83 + error


def test_what_no_number_of_seeds_shows_has_no_number() -> None:
    assert seeds_needed(0.0, 0.1, 1, 16) is None and seeds_needed(0.01, 0.1, 1, 16) is None
    assert seeds_needed(-0.5, 0.1, 1, 16) == seeds_needed(0.5, 0.1, 1, 16), (
        "the sign says which is better"
    )


def test_two_seeds_that_cannot_separate_two_rates_ask_for_four(place: Path) -> None:
    """Three rates, two seeds: 0.057 is less than 12.7 standard errors, which is the seeds' fault,
    not the rates'.
    """
    points = grid({"optim.lr": (0.005, 0.01, 0.02)})
    edge, seeds = advised(points, [1.90, 1.92, 1.527, 1.541, 1.472, 1.4685])
    assert (
        edge.text
        == "0.02 is the largest lr that this sweep tried, so the best may lie beyond. Go on there."
    )
    assert edge.arguments == (
        "sweep",
        "s0/config.toml",
        "optim.lr=0.02,0.04,0.08",
        "train.seed=0,1",
    )
    assert (
        seeds.text == "2 seeds cannot separate lr=0.02 from lr=0.01 (+0.0637). Run 4 seeds of each."
    )
    assert seeds.arguments == ("sweep", "s0/config.toml", "optim.lr=0.01,0.02", "train.seed=0..3")


def test_a_real_difference_is_called_real(place: Path) -> None:
    points = grid({"optim.lr": (0.01, 0.02, 0.04)}, range(4))
    values = [2.50, 2.51, 2.49, 2.50, 2.40, 2.41, 2.40, 2.40, 2.60, 2.61, 2.60, 2.62]
    [real] = advised(points, values)
    assert re.fullmatch(
        r"lr=0\.02 is better than the others by more than chance: the next, lr=0\.01, is worse by 0\.0975 ± "
        r"0\.008 bits/byte \(95 %\)\.", real.text,
    ), real.text  # fmt: skip
    assert real.arguments == ()


def test_what_a_time_decided_is_fixed_so_that_new_scores_compare_with_the_old(place: Path) -> None:
    points = grid({"optim.lr": (0.01, 0.02)})
    sweep = sweep_of(points, **{"train.minutes": 2.0})
    sweep.record["groups"] = [{"rounds": [4], "updates": 321, "why": ""}]
    found = advise(sweep, table_of(points, [2.0, 2.01, 1.9, 1.91]))
    assert (
        all(each.arguments[-1] == "train.updates=321" for each in found if each.arguments) and found
    )
    assert asked(found[0]).settings.train.updates == 321


@pytest.mark.parametrize(
    "value", [1e-3, 0.003107, 1 / 3, 1e-08, 3, "muon", True, (0.9, 0.95), "auto"]
)
def test_a_value_is_typed_so_that_it_is_read_again(value: Any) -> None:
    key = {"str": "optim.name", "bool": "model.tie_word_embeddings", "tuple": "optim.betas"}.get(
        type(value).__name__
    )
    key = (
        "optim.lr"
        if value == "auto"
        else key or ("train.seed" if isinstance(value, int) else "optim.eps")
    )
    fixed, axes = axes_of({key: typed_value(value)})
    assert not axes and load(None, fixed, {}).values()[key] == value
