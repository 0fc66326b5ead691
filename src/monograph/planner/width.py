"""How many members train at once, from times that were measured: one member's, and those of a few fused widths.

    T(K) = seconds of one update of K members in one graph; between measured widths a straight line, a + b·K
    total(K) = updates · sum over rounds of T(members of the round), and the compiling that is still to do

No width is good by itself: where one member fills the device, T(K) is K · T(1) or worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Nothing is known of a wider graph before it is compiled: one is tried where it could save twice what that costs, so
# that a disappointment takes no more than half as long again as one after another.
WORTH = 2.0


class Timed(NamedTuple):
    """What a width took; width 1 is the ordinary engine.

    Attributes:
        update_s: seconds of an update of all its members.
        compile_s: seconds of tracing and compiling it.
    """

    update_s: float
    compile_s: float


class Width(NamedTuple):
    """A choice.

    Attributes:
        members: at once; 1: one after another.
        total_s: seconds that the whole takes, compiling that is still to do included.
        gain: how many times faster than one after another the best fused width is, compiling left out.
        why: in one line.
    """

    members: int
    total_s: float
    gain: float
    why: str


def rounds(members: int, width: int) -> list[int]:
    """How many members each round has: as few rounds as possible, as equal as possible, the larger first."""
    count = -(-members // width)
    return [members // count + (index < members % count) for index in range(count)]


def update_s(timed: Mapping[int, Timed], width: int) -> float:
    """T(width): measured, or on the straight line through the nearest measured widths, never less than below it."""
    if width in timed:
        return timed[width].update_s
    below = max((each for each in timed if each < width), default=1)
    above = min((each for each in timed if each > width), default=None)
    if above is None:  # beyond what was measured a member costs what it did on average
        return timed[below].update_s * width / below
    share = (width - below) / (above - below)
    line = timed[below].update_s + share * (timed[above].update_s - timed[below].update_s)
    return max(line, timed[below].update_s)


def total_s(timed: Mapping[int, Timed], members: int, width: int, updates: int) -> float:
    """Seconds until all members are trained; widths that were not compiled yet take as long as the nearest one."""
    sizes = rounds(members, width)
    new = {size for size in sizes if size not in timed}
    compile_s = sum(timed[min(timed, key=lambda known: abs(known - size))].compile_s for size in new)
    return updates * sum(update_s(timed, size) for size in sizes) + compile_s


def next_width(timed: Mapping[int, Timed], members: int, most: int, updates: int, dearer: float = 1.0) -> int | None:
    """The width that is worth measuring next; None if none is.

    First one member; then as many as fit, where they could save WORTH times what compiling them costs: K members take
    at least as long as one. From then on what the straight line promises to be faster than anything that was measured.

    Args:
        timed: what was measured so far.
        members: of the group.
        most: members that fit the memory at once.
        updates: of each member.
        dearer: how many times as long as a member's graphs one of several takes to compile, as far as is known before.
    """
    if 1 not in timed:
        return 1
    widths = {rounds(members, width)[0] for width in range(1, min(most, members) + 1)} - timed.keys()
    if not widths:
        return None
    if len(timed) == 1:
        widest = max(widths)
        saved = updates * (members - len(rounds(members, widest))) * timed[1].update_s
        return widest if saved > WORTH * dearer * timed[1].compile_s else None
    promised = min(widths, key=lambda width: total_s(timed, members, width, updates))
    known = min(total_s(timed, members, width, updates) for width in timed)
    return promised if total_s(timed, members, promised, updates) < known else None


def choose(timed: Mapping[int, Timed], members: int, updates: int) -> Width:
    """The measured width with the shortest total; of equals the smaller."""
    best = min(sorted(timed), key=lambda width: total_s(timed, members, width, updates))
    alone = members * timed[1].update_s
    fused = [width for width in timed if width > 1]
    shown = best if best > 1 or not fused else min(fused, key=lambda width: _together(timed, members, width))
    gain = alone / _together(timed, members, shown)
    return Width(best, total_s(timed, members, best, updates), gain, _why(timed, members, best, shown, gain))


def _together(timed: Mapping[int, Timed], members: int, width: int) -> float:
    """Seconds of one update of all members."""
    return sum(update_s(timed, size) for size in rounds(members, width))


def _why(timed: Mapping[int, Timed], members: int, best: int, shown: int, gain: float) -> str:
    if members == 1:
        return "one member"
    if shown == 1:
        return f"{members} members one after another: compiling a wider graph takes too much of what it could save"
    measured = f"measured at {', '.join(map(str, sorted(timed)))}"
    several = f"{shown} at once" if shown < members else "all at once"
    if best == 1:
        return f"{members} members, {several}: {gain:.2f}x over one after another, so one after another ({measured})"
    return f"{members} members, {several}: {gain:.2f}x over one after another ({measured})"
