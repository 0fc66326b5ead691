"""Record the teachers of a run that learns from a sweep's members, and open them again for its loss."""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat

from monograph.errors import InputRefused, NoValidCheckpoint, UsageError
from monograph.loss import MixtureLoss
from monograph.model.llama import Llama
from monograph.run.folder import TEACHERS, Run
from monograph.run.models import load_run
from monograph.run.recipe import digest
from monograph.run.recorded_state import Digest, Natural, Strict
from monograph.run.writing import write_whole
from monograph.session.objective import Records
from monograph.session.plan import Plan
from monograph.storage.reading import contents, parse_json
from monograph.terminal import shell_words

SHARE = 0.5  # of the targets in the loss, Kim et al. 2025, arXiv 2509.14786
_WITHOUT = "or go on without teachers in a new run, with --from {}"


class _Teacher(Strict):
    member: Annotated[str, Field(pattern="^members/[0-9]{3,9}$")]
    update: Natural
    sha256: Digest


class TeacherRecord(Strict):
    """The entries of teachers.json: the targets' share, and each teacher's folder, from the sweep's, and weights."""

    share: Annotated[FiniteFloat, Field(ge=0, le=1)]
    teachers: Annotated[list[_Teacher], Field(min_length=1)]


def write_teachers(run: Run, members: Sequence[Run]) -> None:
    """Write teachers.json into the folder of a new run, SWEEP/distilled, whole or not at all.

    Raises:
        InputRefused: a member is no language model of this package.
        NoValidCheckpoint: a member has no valid checkpoint.
        DiskFull: there is no space left.
    """
    teachers = []
    for member in members:
        model, _, update = load_run(member)
        place = member.folder.relative_to(run.folder.parent)
        teachers.append({"member": str(place), "update": update, "sha256": digest(model)})
    record = {"schema": "monograph.teachers/1", "share": SHARE, "teachers": teachers}
    write_whole(run.folder / TEACHERS, json.dumps(record, indent=1) + "\n")


def mixture_loss(
    run: Run, plan: Plan, data: Records, model: object, device: torch.device, ranks: int
) -> MixtureLoss | None:
    """Return the loss of a run that has teachers, with these on the device; None for any other run.

    Raises:
        InputRefused: teachers.json is damaged, or a teacher is missing, changed or does not fit the model.
        UsageError: the run is streamed, has adapters or is trained by several processes.
    """
    content = contents(run.folder / TEACHERS)
    if content is None:
        return None
    if plan.memory == "stream" or plan.recipe.lora or ranks > 1 or plan.parallel != "none":
        without = "train.memory = stream, train.parallel and lora.rank"
        raise UsageError(f"{run.folder} learns from a sweep's members, on one device: leave out {without}")
    record = recorded_teachers(run, content)
    without = _WITHOUT.format(shell_words(run.folder))
    teachers = []
    for each in record.teachers:
        teacher = Run(run.folder.parent / each.member, each.update)
        try:
            loaded, tokenizer, _ = load_run(teacher)
        except (InputRefused, NoValidCheckpoint) as error:
            raise InputRefused(f"{teacher.named}, a teacher of {run.folder}: {error}; put it back, {without}") from None
        if digest(loaded) != each.sha256:
            raise InputRefused(f"{teacher.named}, a teacher of {run.folder}, has changed: put it back, {without}")
        sizes = {both.config.vocab_size for both in (loaded, model) if isinstance(both, Llama)}
        if tokenizer.hash != data.tokenizer.hash or not isinstance(model, Llama) or len(sizes) > 1:
            raise InputRefused(f"{teacher.named}: a teacher of other tokens than {run.folder} has: {without[3:]}")
        teachers.append(loaded.to(device))
    return MixtureLoss(teachers, record.share, hashlib.sha256(content).hexdigest())


def recorded_teachers(run: Run, content: bytes) -> TeacherRecord:
    """Return what a run's teachers.json says.

    Raises:
        InputRefused: it is damaged.
    """
    try:
        return TeacherRecord.model_validate(parse_json(content))
    except (ValueError, RecursionError):
        without = _WITHOUT.format(shell_words(run.folder))
        raise InputRefused(f"{run.folder / TEACHERS}: damaged; put it back, {without}") from None
