"""When a sweep looks at its members to stop some of them early (`monograph.sweeps.pruning`)."""

from collections.abc import Sequence
from typing import NamedTuple

# The members are looked at after their number of updates divided by each of these numbers. The
# first look decides nothing, since a decision needs two looks.
_LOOK_DIVISORS = (8, 4, 2)
DECISIONS = len(_LOOK_DIVISORS) - 1


class Looks(NamedTuple):
    """After how many updates the members of a round are looked at.

    Attributes:
        scored: the looks: all held-out rows are scored, and checkpoints are written.
        deciding: those after which members may be stopped.
    """

    scored: tuple[int, ...] = ()
    deciding: tuple[int, ...] = ()


def looks_of(updates: int, worth_it: Sequence[int] | None = None) -> Looks:
    """Return the looks at members with this number of updates.

    Args:
        updates: the number of updates. If it is smaller than 8, there is no look.
        worth_it: the deciding looks after which stopping pays; None: all.
    """
    # The updates of the first look. Those of the other looks are exact multiples of it.
    unit = updates // _LOOK_DIVISORS[0]
    if unit == 0:
        return Looks()
    scored = [unit * (_LOOK_DIVISORS[0] // divisor) for divisor in _LOOK_DIVISORS]
    deciding = [look for look in scored[1:] if worth_it is None or look in worth_it]
    # A decision compares the scores at a look with those at half of its updates, which is a look,
    # too.
    needed = {*deciding, *(look // 2 for look in deciding)}
    return Looks(tuple(sorted(needed)), tuple(deciding))
