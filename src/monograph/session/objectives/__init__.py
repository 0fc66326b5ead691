"""Holds the ways to learn, a file for each: texts, preferences, rewards, and teachers, which add to texts."""

from typing import Any

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.objective import Objective, Task
from monograph.session.objectives.preferences import Preferences
from monograph.session.objectives.rewards import Rewards
from monograph.session.objectives.teachers import taught
from monograph.session.objectives.texts import Texts
from monograph.session.plan import Plan

# The last is what a run learns from if no key chooses another.
OBJECTIVES: tuple[Objective, ...] = (Rewards(), Preferences(), Texts())


def objective_of(settings: Settings) -> Objective:
    """Return the objective that the settings choose."""
    return next(objective for objective in OBJECTIVES if objective.is_chosen(settings))


def open_task(run: Run, plan: Plan, progress: Progress, ranks: int = 1) -> Task:
    """Read the records of a run, and print how many there are; the caller closes the task.

    Args:
        run: the run's folder.
        plan: the run's plan.
        progress: the display.
        ranks: number of processes that train the model together.

    Raises:
        InputRefused: the records cannot be used.
        UsageError: the run has teachers, and learns from other records than texts.
    """
    task = objective_of(plan.settings).open(plan, progress)
    try:
        return taught(task, run, ranks)
    except BaseException:
        task.close()
        raise


def require_one(settings: Settings) -> None:
    """Refuse settings that choose two objectives, or choices that do not go with the chosen one.

    Raises:
        UsageError: two choices exclude one another; the message names both.
    """
    keys = [objective.key for objective in OBJECTIVES if objective.key and objective.is_chosen(settings)]
    if len(keys) > 1:
        raise UsageError(f"{keys[1]} does not go with {keys[0]}: a run learns from one of both: leave one out")
    objective_of(settings).require(settings)


def objective_values(settings: Settings, length: int) -> dict[str, Any]:
    """Return values for the keys that the objective decides; see `Objective.values`.

    Raises:
        UsageError: keys of another objective are given.
    """
    chosen = objective_of(settings)
    for objective in OBJECTIVES:
        if objective is not chosen:
            objective.require_unused(settings)
    return chosen.values(settings, length)
