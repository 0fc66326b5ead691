"""The members of a sweep: a run's settings with some keys varied, grouped by what one graph can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from monograph.config import Settings
from monograph.config.axes import IN_ONE_GRAPH, Point
from monograph.errors import UsageError

ORIGIN = "sweep"
TEXT = ("data.tokenizer", "data.sequence_length", "data.packing")  # keys that decide what the rows hold


@dataclass
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, from 0.
        knobs: what was varied, by dotted key.
        settings: of its run; what is "auto" is chosen when its group is opened.
    """

    index: int
    knobs: Point
    settings: Settings


@dataclass
class Group:
    """Members of one graph: they have the same shapes and length.

    Attributes:
        members: one or more.
        shared: the varied keys that they have in common, because no graph could hold more than one of their values.
        rounds: how many members train at once, round by round; empty until it was decided.
        why: in one line.
        update_s: seconds of an update of all members; compile_s: of what is still to be compiled; held_out_s: of their
            evaluations.
    """

    members: list[Member]
    shared: Point
    rounds: list[int] = field(default_factory=list)
    why: str = ""
    update_s: float = 0.0
    compile_s: float = 0.0
    held_out_s: float = 0.0

    @property
    def settings(self) -> Settings:
        """The first member's."""
        return self.members[0].settings

    @property
    def name(self) -> str:
        """What sets it apart from other groups; empty for the only one."""
        return " ".join(f"{short(key)}={shown(value)}" for key, value in self.shared.items())

    def crews(self) -> list[list[Member]]:
        """The members, round by round."""
        ends = [sum(self.rounds[: index + 1]) for index in range(len(self.rounds))]
        return [self.members[end - size : end] for size, end in zip(self.rounds, ends, strict=True)]


def members_of(settings: Settings, points: Sequence[Point]) -> list[Member]:
    """One member for each point, in order.

    Raises:
        UsageError: a point that makes no settings, or two that make the same.
    """
    found = [Member(index, point, settings.resolve(point, ORIGIN)) for index, point in enumerate(points)]
    seen: dict[str, int] = {}
    for member in found:
        other = seen.setdefault(member.settings.fingerprint, member.index)
        if other != member.index:
            raise UsageError(f"members {other} and {member.index} are equal: {described(member.knobs)}")
    return found


def groups_of(members: Sequence[Member]) -> list[Group]:
    """Members by what cannot vary inside a graph, in the order in which they come."""
    groups: dict[str, Group] = {}
    for member in members:
        shared = {key: value for key, value in member.knobs.items() if key not in IN_ONE_GRAPH}
        groups.setdefault(repr(shared), Group([], shared)).members.append(member)
    return list(groups.values())


def spread(groups: Sequence[Group], ranks: int) -> None:
    """Cut rounds in two, the largest first, until every rank has one, as far as there are members."""
    while sum(len(group.rounds) for group in groups) < ranks:
        group = max(groups, key=lambda each: max(each.rounds))
        largest = max(group.rounds)
        if largest == 1:
            return
        at = group.rounds.index(largest)
        group.rounds[at : at + 1] = [largest - largest // 2, largest // 2]


def described(knobs: Point) -> str:
    """`lr=0.001 seed=0`."""
    return " ".join(f"{short(key)}={shown(value)}" for key, value in knobs.items()) or "nothing varied"


def short(key: str) -> str:
    """A key without its section, as people say it."""
    return key.rpartition(".")[2]


def shown(value: object) -> str:
    """A value in a table, at most four digits of a number."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
