"""Run: pytest tests/sweeps/test_members.py"""

from __future__ import annotations

import pytest

from monograph.config import load
from monograph.config.axes import AXIS_KEYS
from monograph.errors import UsageError
from monograph.report.knobs import short_key, value_text
from monograph.sweeps.spec import describe_knobs, groups_of, members_of

SETTINGS = load(None, {"train.updates": 5}, {})


def test_a_member_has_its_own_values_over_those_of_all() -> None:
    members = members_of(
        SETTINGS, [{"optim.lr": 1e-3, "train.seed": 1}, {"optim.lr": 1e-2, "train.seed": 1}]
    )
    assert [m.settings.optim.lr for m in members] == [1e-3, 1e-2] and [
        m.index for m in members
    ] == [0, 1]
    assert all(m.settings.train.updates == 5 and m.settings.train.seed == 1 for m in members)


def test_members_that_are_equal_are_refused() -> None:
    with pytest.raises(UsageError, match="members 0 and 2 are equal: lr=0.001"):
        members_of(SETTINGS, [{"optim.lr": 1e-3}, {"optim.lr": 2e-3}, {"optim.lr": 1e-3}])


def test_what_no_graph_can_hold_together_makes_groups() -> None:
    points = [
        {"optim.lr": lr, "model.preset": preset, "train.seed": seed}
        for lr in (1e-3, 1e-2) for preset in ("nano", "micro") for seed in (0, 1)
    ]  # fmt: skip
    groups = groups_of(members_of(SETTINGS, points))
    assert [group.name for group in groups] == ["preset=nano", "preset=micro"]
    assert [[m.index for m in group.members] for group in groups] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    groups[0].round_sizes = [3, 1]
    assert [[m.index for m in each] for each in groups[0].rounds()] == [[0, 1, 4], [5]]


def test_a_keys_short_name_is_its_own() -> None:
    assert len({short_key(key) for key in AXIS_KEYS}) == len(AXIS_KEYS)


def test_values_as_people_read_them() -> None:
    assert describe_knobs(
        {"optim.lr": 0.00123456, "optim.betas": (0.9, 0.95), "model.tie_word_embeddings": True}
    ) == ("lr=0.001235 betas=0.9,0.95 tie_word_embeddings=true")
    assert describe_knobs({}) == "nothing varied" and value_text("wsd") == "wsd"
