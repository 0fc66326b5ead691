"""Stop members of a sweep that cannot win any more (`monograph sweep --prune P`).

Members that train at once are compared after a quarter and after half of their updates, as
`monograph.evaluation.pruning` says. Each comparison is a look at the members (`sweeps.looks`). A
setting is a combination of varied values, with one member for each seed. It is stopped as a whole,
with all its seeds. What is stopped depends only on the metrics that the members have written by
then, so a sweep that is resumed stops the same members.
"""

import math
from collections import Counter
from collections.abc import Sequence

from monograph.config.axes import SEED, Point
from monograph.errors import UsageError
from monograph.evaluation.pruning import win_probabilities
from monograph.ranges import Range
from monograph.session.objective import Objective
from monograph.sweeps.looks import DECISIONS
from monograph.sweeps.results import NATS, Outcome
from monograph.sweeps.spec import Member, MemberGroup

PROBABILITY = Range("a probability, such as 0.05", 0.0, 1.0, excludes_low=True, excludes_high=True)


def require_prunable(objective: Objective, points: Sequence[Point], probability: float) -> None:
    """Refuse --prune for a sweep in which nothing can be compared.

    Args:
        objective: what the members learn from.
        points: each member's varied values.
        probability: the largest probability with which the best setting may be stopped.

    Raises:
        UsageError: `probability` is not between 0 and 1, there is only one setting or one seed, or the
            scores of such members say nothing about their later scores.
    """
    PROBABILITY.require("--prune", probability)
    if objective.not_prunable:
        raise UsageError(f"--prune does not go with {objective.key}: {objective.not_prunable}")
    settings = {_setting_text(point) for point in points}
    if len(settings) < 2:
        raise UsageError("--prune compares settings, and this sweep has one: give an axis")
    if len({point.get(SEED) for point in points}) < 2:
        raise UsageError(
            "--prune takes its error from the differences of seeds: give at least two, train.seed=0,1"
        )


def prune_plan(group: MemberGroup, looks: Sequence[int]) -> str:
    """Return what --prune will do in a group, in a few words.

    Args:
        group: the group, whose rounds are decided.
        looks: the numbers of updates after which members may be stopped.
    """
    if not any(_can_compare_settings(members) for members in group.rounds()):
        return "no member is stopped, since the seeds of no two settings train at once"
    if not looks:
        return "no member is stopped: that would save less than it takes to compile a smaller graph"
    return f"members that can hardly win are stopped after update {' or '.join(map(str, looks))}"


def stop_sentence(probability: float) -> str:
    """Return what the stop of members means for the result, in a sentence."""
    return (
        f"the best setting is among them with a probability of at most {100 * probability:g} %, if none gains faster "
        "for each doubling of the updates than it did"
    )


def _can_compare_settings(members: Sequence[Member]) -> bool:
    """Return whether settings can be compared by these members alone.

    At least two settings must have the largest number of seeds here, which must be at least 2.
    """
    members_by_setting = Counter(_setting_text(member.knobs) for member in members)
    seeds = list(members_by_setting.values())
    most = max(seeds)
    return most > 1 and seeds.count(most) > 1


def hopeless(
    outcomes: Sequence[Outcome], updates: int, look: int, probability: float
) -> dict[int, float]:
    """Return the members to stop, by their index, with the largest probability of their winning.

    Args:
        outcomes: the outcomes of all members of the round, whether they still train or not.
        updates: the number of updates of each member.
        look: the number of updates after which the decision is made, one of `Looks.deciding`.
        probability: the largest probability with which the best setting may be stopped.
    """
    # By a setting's text: its members' outcomes, and their seeds.
    settings: dict[str, list[Outcome]] = {}
    seeds: dict[str, list[str]] = {}
    for outcome in outcomes:
        knobs = outcome.member.knobs
        setting = _setting_text(knobs)
        settings.setdefault(setting, []).append(outcome)
        seeds.setdefault(setting, []).append(repr(knobs.get(SEED)))
    for seeds_of_setting in seeds.values():
        seeds_of_setting.sort()
    # A setting of which some seeds train in another round cannot be compared.
    all_seeds = max(seeds.values(), key=len)
    whole = {key: of_setting for key, of_setting in settings.items() if seeds[key] == all_seeds}
    scores = {key: _scores(of_setting, look) for key, of_setting in whole.items()}
    compared = {key: found for key, found in scores.items() if found is not None}
    probabilities = win_probabilities(
        [before for before, _ in compared.values()],
        [now for _, now in compared.values()],
        doublings=math.log2(updates / look),
        comparisons=DECISIONS * (len(whole) - 1),
    )
    bounds: dict[int, float] = {}
    for key, bound in zip(compared, probabilities, strict=True):
        if bound <= probability:
            bounds |= {outcome.member.index: bound for outcome in whole[key]}
    return bounds


def _scores(outcomes: Sequence[Outcome], look: int) -> tuple[list[float], list[float]] | None:
    """Return a setting's scores at half of the look's updates and at the look, in the order of seeds.

    It is None if a member was stopped or had diverged before, or has not both scores.
    """
    before = list[float]()
    now = list[float]()
    for outcome in sorted(outcomes, key=lambda each: repr(each.member.knobs.get(SEED))):
        if outcome.stopped is not None and outcome.stopped < look:
            return None
        rows = [row for row in outcome.rows if row.get("update", 0) <= look]
        if any("diverged" in row for row in rows):
            return None
        # If there are two scores of an update, the later one is that of all held-out rows.
        by_update = {row["update"]: row[NATS] for row in rows if NATS in row}
        for scores, update in ((before, look // 2), (now, look)):
            score = by_update.get(update)
            if score is None or not math.isfinite(score):
                return None
            scores.append(score)
    return before, now


def _setting_text(point: Point) -> str:
    """Return what members that differ only in the seed have in common, as text."""
    return repr({key: value for key, value in point.items() if key != SEED})
