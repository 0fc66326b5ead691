"""Learn from texts and from teachers, which are the members of a sweep.

The loss is a weighted sum of the usual loss on texts and of the KL divergence from the mean of the
teachers' probabilities (`MixtureLoss`). No key chooses teachers: a run has them if its folder has
teachers.json, which records them. Teachers that are adapters use the base of the run's own adapters,
which is in memory once.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, FiniteFloat
from torch import nn

from monograph.checkpointing import Checkpoint
from monograph.data.corpus import Corpus
from monograph.device import default_device
from monograph.ensemble.one_base import OneBase, have_one_base
from monograph.errors import InputRefused, NoValidCheckpoint, UsageError
from monograph.graph.lora import adapted_layers
from monograph.graph.mmap_weights import materialize_
from monograph.graph.shared_base import copy_with_shared_base
from monograph.loss import MixtureLoss
from monograph.model.llama import Llama
from monograph.run import recorded_state
from monograph.run.folder import TEACHERS, Run
from monograph.run.models import load_run, load_tokenizer, load_weights, weights_of
from monograph.run.recipe import ModelRecipe, module_digest, recorded_lora, tensors_digest
from monograph.run.recorded_state import Digest, Natural, Strict
from monograph.run.writing import write_atomically
from monograph.session.objective import Task
from monograph.session.objectives.texts import TextTask
from monograph.session.plan import RunPlan
from monograph.storage.reading import contents, parse_json
from monograph.terminal import shell_words

SHARE = 0.5  # the weight of the usual loss in the sum; Kim et al. 2025, arXiv 2509.14786
_REMEDY = "go on without teachers in a new run, with --from {}"  # the run's folder


class _Teacher(Strict):
    """A teacher, as teachers.json records it.

    Attributes:
        member: its folder, relative to the sweep's.
        update: the update after which its checkpoint was saved.
        sha256: the digest of its weights. A teacher that is adapters has one digest for its own
            weights and those of its base.
    """

    member: Annotated[str, Field(pattern="^members/[0-9]{3,9}$")]
    update: Natural
    sha256: Digest


class TeacherRecord(Strict):
    """The entries of teachers.json.

    Attributes:
        share: the weight of the usual loss in the sum; the other loss has the weight 1 - share.
        teachers: the teachers.
    """

    share: Annotated[FiniteFloat, Field(ge=0, le=1)]
    teachers: Annotated[list[_Teacher], Field(min_length=1)]


def write_teachers(run: Run, members: Sequence[Run]) -> None:
    """Write teachers.json into the folder of a new run, SWEEP/distilled.

    Args:
        run: the new run.
        members: the teachers, which are members of the same sweep.

    Raises:
        InputRefused: a member is not a language model of this package.
        NoValidCheckpoint: a member has no valid checkpoint.
        DiskFull: there is no space left.
    """
    teachers = []
    for member in members:
        checkpoint = recorded_state.load_newest(member, lambda line: None)
        if ModelRecipe.recorded(checkpoint.state["recipe"]).lora:
            digest = _adapters_digest(checkpoint)
        else:
            model, _, _ = load_run(member)
            digest = module_digest(model)
        path_in_sweep = member.folder.relative_to(run.folder.parent)
        teachers.append(
            {"member": str(path_in_sweep), "update": checkpoint.update, "sha256": digest}
        )
    record = {"schema": "monograph.teachers/1", "share": SHARE, "teachers": teachers}
    write_atomically(run.folder / TEACHERS, json.dumps(record, indent=1) + "\n")


def _adapters_digest(checkpoint: Checkpoint) -> str:
    """Return one digest of the weights in a checkpoint of adapters and of their base's weights."""
    recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
    text = f"{recipe.base_sha256} {tensors_digest(weights_of(checkpoint))}"
    return hashlib.sha256(text.encode()).hexdigest()


def with_teachers(task: Task, run: Run, ranks: int) -> Task:
    """Return the task with the run's teachers added; the same task if the run has none.

    Args:
        task: what the run learns from.
        run: the run.
        ranks: number of processes that train the model together.

    Raises:
        UsageError: the run has teachers, and learns from other records than texts.
    """
    content = contents(run.folder / TEACHERS)
    if content is None:
        return task
    # A subclass of `TextTask` may have its own loss, which the loss of the teachers would replace.
    if type(task) is not TextTask:
        remedy = _REMEDY.format(shell_words(run.folder))
        raise UsageError(
            f"{run.folder} has a sweep's members as teachers, and they teach texts alone: {remedy}"
        )
    return TaughtTask(task.data, run, content, ranks)


class TaughtTask(TextTask):
    """The task of a run with teachers.

    Attributes:
        student_run: the run.
        content: the content of its teachers.json.
        ranks: number of processes that train the model together.
    """

    is_fully_planned = False  # the planner does not count the memory and the time of the teachers

    def __init__(self, data: Corpus, student_run: Run, content: bytes, ranks: int):
        """Take the text, and the attributes with the names of the other arguments."""
        super().__init__(data)
        self.student_run = student_run
        self.content = content
        self.ranks = ranks

    @property
    def file_digests(self) -> dict[str, str]:
        """Return the digest of teachers.json, which itself has the digest of each teacher."""
        return {TEACHERS: hashlib.sha256(self.content).hexdigest()}

    def loss(self, plan: RunPlan, model: nn.Module) -> MixtureLoss:
        """Load the teachers onto the device, and return the loss with them.

        Raises:
            InputRefused: teachers.json is damaged, or a teacher is missing, changed or does not fit
                the model.
            UsageError: the run is streamed or is trained by several processes, or its model has a head
                for multi-token prediction.
        """
        run = self.student_run
        if isinstance(model, Llama) and model.mtp is not None:
            raise UsageError(
                f"{run.folder} learns from a sweep's members, which do not train a head for multi-token "
                "prediction: leave out model.mtp_num_hidden_layers"
            )
        is_parallel = self.ranks > 1 or plan.job.parallel != "none"
        if plan.memory == "stream" or is_parallel:
            raise UsageError(
                f"{run.folder} learns from a sweep's members, on one device: leave out "
                "train.memory = stream and train.parallel"
            )
        record = recorded_teachers(run, self.content)
        teachers = [self._load(each, model).to(default_device()) for each in record.teachers]
        # Teachers that are adapters on one base can run together, which reads the base only once
        # for all of them. If the whole step is one graph, the teachers are part of it, and they run
        # one after another.
        hidden_of_teachers = None
        if plan.training.compile != "whole" and have_one_base(teachers):
            hidden_of_teachers = OneBase(teachers).hidden
        return MixtureLoss(teachers, record.share, hidden_of_teachers)

    def _load(self, recorded: _Teacher, student: nn.Module) -> Llama:
        """Load a teacher, after checking that it is unchanged and fits the model that it teaches.

        Raises:
            InputRefused: the teacher is missing, has changed, or has other tokens or another base.
        """
        run = self.student_run
        remedy = _REMEDY.format(shell_words(run.folder))
        teacher_run = Run(run.folder.parent / recorded.member, recorded.update)
        try:
            checkpoint = recorded_state.load_newest(teacher_run, lambda line: None)
            recipe = ModelRecipe.recorded(checkpoint.state["recipe"])
            tokenizer = load_tokenizer(teacher_run, checkpoint.state)
            if recipe.lora:
                digest = _adapters_digest(checkpoint)
                teacher = _on_base_of(student, recipe, checkpoint)
            else:
                teacher, _, _ = load_run(teacher_run)
                digest = module_digest(teacher)
        except (InputRefused, NoValidCheckpoint) as error:
            raise InputRefused(
                f"{teacher_run.named_path}, a teacher of {run.folder}: {error}; put it back, or {remedy}"
            ) from None
        if digest != recorded.sha256:
            raise InputRefused(
                f"{teacher_run.named_path}, a teacher of {run.folder}, has changed: put it back, or {remedy}"
            )
        has_same_tokens = (
            tokenizer.hash == self.data.tokenizer.hash
            and isinstance(student, Llama)
            and teacher.config.vocab_size == student.config.vocab_size
        )
        if not has_same_tokens:
            raise InputRefused(
                f"{teacher_run.named_path}: a teacher of other tokens than {run.folder} has: {remedy}"
            )
        return teacher


def _on_base_of(student: nn.Module, recipe: ModelRecipe, checkpoint: Checkpoint) -> Llama:
    """Return a teacher that is adapters: a model with these adapters that shares the base of the
    student.

    Args:
        student: the model that is taught. It has adapters of its own.
        recipe: the teacher's recipe.
        checkpoint: the teacher's checkpoint.

    Raises:
        InputRefused: the student has no adapters, or has them on other layers than the teacher.
    """
    if not isinstance(student, Llama) or not adapted_layers(student) or recipe.lora is None:
        raise InputRefused("it has adapters, and the model that it teaches has none")
    # The seed does not matter, as the checkpoint's adapters replace the new ones.
    teacher = copy_with_shared_base(student, recorded_lora(recipe.lora), seed=0)
    assert isinstance(teacher, Llama)
    load_weights(teacher, weights_of(checkpoint))
    return materialize_(teacher, default_device())


def recorded_teachers(run: Run, content: bytes) -> TeacherRecord:
    """Return the entries of a run's teachers.json.

    Args:
        run: the run, whose folder the error names.
        content: the content of the file.

    Raises:
        InputRefused: the file is damaged.
    """
    try:
        return TeacherRecord.model_validate(parse_json(content))
    except (ValueError, RecursionError):
        remedy = _REMEDY.format(shell_words(run.folder))
        raise InputRefused(f"{run.folder / TEACHERS}: damaged; put it back, or {remedy}") from None
