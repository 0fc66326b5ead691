"""The ways to learn: a file for each, and functions that find the one that a run's settings choose.

`WAYS_TO_LEARN` in `monograph.config.keys` is the table of the ways, with their keys. It is there
because the command line reads the keys without importing torch.
"""

from importlib import import_module

from monograph.config import Settings
from monograph.config.keys import WAYS_TO_LEARN, WayToLearn
from monograph.data.forms import RecordSettings
from monograph.errors import UsageError
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.objective import DecidedObjective, Objective, Task
from monograph.session.objectives.teachers import with_teachers
from monograph.session.plan import RunPlan

BY_RECORDS = "data.source"  # the origin of a key whose value was chosen by the form of the records


def _load_objective(way: WayToLearn) -> Objective:
    """Return the `OBJECTIVE` of the file in this folder that has the name of the way to learn."""
    objective: Objective = import_module(f"{__name__}.{way.name}").OBJECTIVE
    # An objective that does not set `way` inherits the row of texts.
    assert objective.way is way, f"the objective of {way.name} has another row of WAYS_TO_LEARN"
    return objective


OBJECTIVES: tuple[Objective, ...] = tuple(map(_load_objective, WAYS_TO_LEARN))


def chosen_objectives(settings: Settings) -> list[Objective]:
    """Return the objectives that the settings choose, of which the first one applies.

    The last one is always the objective for texts. If keys choose more than one of the others,
    `requirements.require_compatible` raises an error.
    """
    return [objective for objective in OBJECTIVES if objective.is_chosen(settings)]


def objective_of(settings: Settings) -> Objective:
    """Return the objective that the settings choose, without the values of its keys."""
    return chosen_objectives(settings)[0]


def with_records(settings: Settings) -> Settings:
    """Choose an objective by the form of the records, if the settings do not choose one.

    Returns:
        The settings, with the key of the chosen objective; unchanged for texts.
    """
    values = settings.values()
    # Nothing is left to choose if a key chooses an objective. data.text_key says which key of the
    # records has a text, so it chooses texts.
    if objective_of(settings).has_key or values["data.text_key"] is not None:
        return settings
    record_settings = RecordSettings.of(None, values["data.ignore_keys"])
    skip_bad = values["data.bad_records"] == "skip"
    for objective in OBJECTIVES:
        value = objective.value_for_records(values["data.source"], record_settings, skip_bad)
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
        return with_teachers(task, run, ranks)
    except BaseException:
        task.close()
        raise


def decided_objective(settings: Settings, length: int) -> DecidedObjective:
    """Return the objective that the settings choose, with the values of its keys.

    Args:
        settings: the run's settings.
        length: tokens of a row.

    Raises:
        UsageError: keys of another objective are given; or see `Objective.decide`.
    """
    chosen = objective_of(settings)
    for key in settings.given_values():
        for other in OBJECTIVES:
            if other is not chosen and other.section == key.partition(".")[0]:
                written = settings.as_written(key)
                raise UsageError(other.unused_key_error(settings.origins[key], key, written))
    return chosen.decide(settings, length)
