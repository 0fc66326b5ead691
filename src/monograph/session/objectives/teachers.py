"""Learn from texts and from the members of a sweep: record these teachers, and open them again for
the loss.

No key chooses them: a run whose folder has teachers.json has teachers, whatever its settings are.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, FiniteFloat
from torch import nn

from monograph.data.corpus import Corpus
from monograph.device import default_device
from monograph.errors import InputRefused, NoValidCheckpoint, UsageError
from monograph.loss import MixtureLoss
from monograph.model.llama import Llama
from monograph.run.folder import TEACHERS, Run
from monograph.run.models import load_run
from monograph.run.recipe import digest
from monograph.run.recorded_state import Digest, Natural, Strict
from monograph.run.writing import write_whole
from monograph.session.objective import Task
from monograph.session.objectives.texts import TextTask
from monograph.session.plan import RunPlan
from monograph.storage.reading import contents, parse_json
from monograph.terminal import shell_words

SHARE = 0.5  # of the targets in the loss, Kim et al. 2025, arXiv 2509.14786
_WITHOUT = "or go on without teachers in a new run, with --from {}"


class _Teacher(Strict):
    member: Annotated[str, Field(pattern="^members/[0-9]{3,9}$")]
    update: Natural
    sha256: Digest


class TeacherRecord(Strict):
    """The entries of teachers.json: the targets' share, and each teacher's folder, from the
    sweep's, and weights.
    """

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


def taught(task: Task, run: Run, ranks: int) -> Task:
    """Return the task of a run that has teachers, with these; the task as it is for any other run.

    Args:
        task: what the run learns from.
        run: the run's folder.
        ranks: number of processes that train the model together.

    Raises:
        UsageError: the run learns from other records than texts.
    """
    content = contents(run.folder / TEACHERS)
    if content is None:
        return task
    # A subclass has a loss of its own, which that of the teachers would replace.
    if type(task) is not TextTask:
        without = _WITHOUT[3:].format(shell_words(run.folder))
        raise UsageError(
            f"{run.folder} has a sweep's members as teachers, and they teach texts alone: {without}"
        )
    return TaughtTask(task.data, run, content, ranks)


class TaughtTask(TextTask):
    """The task of a run whose targets are texts and the mean of its teachers' probabilities."""

    is_foreseen = False

    def __init__(self, data: Corpus, run: Run, content: bytes, ranks: int):
        """Take the text, the run's folder, the content of its teachers.json, and the number of
        processes.
        """
        super().__init__(data)
        self.folder = run
        self.content = content
        self.ranks = ranks

    @property
    def digests(self) -> dict[str, str]:
        """Return the digest of teachers.json, which has the teachers' own."""
        return {TEACHERS: hashlib.sha256(self.content).hexdigest()}

    def loss(self, plan: RunPlan, model: nn.Module) -> MixtureLoss:
        """Return the loss with the teachers, which are loaded onto the device.

        Raises:
            InputRefused: teachers.json is damaged, or a teacher is missing, changed or does not fit
                the model.
            UsageError: the run is streamed, has adapters or is trained by several processes.
        """
        run = self.folder
        if (
            plan.memory == "stream"
            or plan.training.lora
            or self.ranks > 1
            or plan.job.parallel != "none"
        ):
            without = "train.memory = stream, train.parallel and lora.rank"
            raise UsageError(
                f"{run.folder} learns from a sweep's members, on one device: leave out {without}"
            )
        record = recorded_teachers(run, self.content)
        return MixtureLoss(
            [self._loaded(each, model).to(default_device()) for each in record.teachers],
            record.share,
        )

    def _loaded(self, recorded: _Teacher, model: nn.Module) -> Llama:
        run = self.folder
        without = _WITHOUT.format(shell_words(run.folder))
        teacher = Run(run.folder.parent / recorded.member, recorded.update)
        try:
            loaded, tokenizer, _ = load_run(teacher)
        except (InputRefused, NoValidCheckpoint) as error:
            raise InputRefused(
                f"{teacher.named}, a teacher of {run.folder}: {error}; put it back, {without}"
            ) from None
        if digest(loaded) != recorded.sha256:
            raise InputRefused(
                f"{teacher.named}, a teacher of {run.folder}, has changed: put it back, {without}"
            )
        sizes = {both.config.vocab_size for both in (loaded, model) if isinstance(both, Llama)}
        if (
            tokenizer.hash != self.data.tokenizer.hash
            or not isinstance(model, Llama)
            or len(sizes) > 1
        ):
            raise InputRefused(
                f"{teacher.named}: a teacher of other tokens than {run.folder} has: {without[3:]}"
            )
        return loaded


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
