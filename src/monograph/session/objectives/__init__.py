"""Holds the ways to learn, a file for each: texts, preferences, rewards, and teachers, which add to
texts.

The table of them is `WAYS_TO_LEARN`, in `monograph.config.keys`, where the command line and the
configuration read their keys without torch.
"""

from importlib import import_module

from monograph.config import Settings
from monograph.config.keys import WAYS_TO_LEARN, WayToLearn
from monograph.data.forms import RecordSettings
from monograph.errors import UsageError
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.objective import Objective, Opened, Task
from monograph.session.objectives.teachers import taught
from monograph.session.plan import RunPlan

BY_RECORDS = "data.source"  # the origin of a key that the records ask for


def _load_objective(way: WayToLearn) -> Objective:
    """Return the objective of a way to learn, from the file here that has its name."""
    objective: Objective = import_module(f"{__name__}.{way.name}").OBJECTIVE
    # Without its own row an objective would have the keys of texts.
    assert objective.way is way, f"the objective of {way.name} has another row of WAYS_TO_LEARN"
    return objective


OBJECTIVES: tuple[Objective, ...] = tuple(map(_load_objective, WAYS_TO_LEARN))


def chosen_in(settings: Settings) -> list[Objective]:
    """Return the objectives that the settings choose; the first counts, and more than one key is an
    error.
    """
    return [objective for objective in OBJECTIVES if objective.is_chosen(settings)]


def objective_of(settings: Settings) -> Objective:
    """Return the objective that the settings choose, its own keys unread."""
    return chosen_in(settings)[0]


def with_records(settings: Settings) -> Settings:
    """Return the settings with the key of the objective that the records ask for, where none is
    given.
    """
    given = settings.values()
    if given["data.text_key"] is not None or objective_of(settings).is_named:  # they ask for a kind
        return settings
    asked = RecordSettings.of(None, given["data.ignore_keys"])
    for objective in OBJECTIVES:
        value = objective.of_records(
            given["data.source"], asked, given["data.bad_records"] == "skip"
        )
        if value is not None:
            return settings.resolve({objective.key: value}, BY_RECORDS)
    return settings


def open_task(run: Run, plan: RunPlan, progress: Progress, ranks: int = 1) -> Task:
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
    task = plan.job.objective.open(plan, progress)
    try:
        return taught(task, run, ranks)
    except BaseException:
        task.close()
        raise


def opened(settings: Settings, length: int) -> Opened:
    """Return the objective that the settings choose, with its own keys decided; see
    `Objective.opened`.

    Raises:
        UsageError: keys of another objective are given.
    """
    chosen = objective_of(settings)
    for key in settings.pinned():
        others = (
            other
            for other in OBJECTIVES
            if other is not chosen and other.section == key.partition(".")[0]
        )
        for objective in others:
            raise UsageError(objective.unused(settings.origins[key], key, settings.as_written(key)))
    return chosen.opened(settings, length)
