"""Learn from rewards: the model in training samples answers to prompts, a reward scores them, and a
policy gradient makes answers with a high reward more likely.

A *draw* is one sampling of answers for an update.
"""

import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph.config import Settings
from monograph.config.keys import REWARDS_WAY, RlSection
from monograph.decode.cache import KVCache
from monograph.device import Device, default_device, describe
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import InputRefused, UsageError
from monograph.evaluation import Evaluation
from monograph.graph.trial import Trial
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import block_of
from monograph.planner import defaults
from monograph.predict.estimate import copied_bytes, trained_numbers
from monograph.predict.footprint import AnswerScoring
from monograph.predict.roofline import AnswersToSample, Calibration, peak_flops, sampling_s
from monograph.report.quantities import counted
from monograph.rl.advantages import ratio_of
from monograph.rl.arrange import RolloutOptions
from monograph.rl.form import AnswerForm
from monograph.rl.loss import Kl, PolicyLoss, kl_term
from monograph.rl.prompts import Prompts, read_prompts
from monograph.rl.rewards import REWARDS, Reward, form_named, parameters_of, reward_of
from monograph.rl.rollouts import (
    MAX_DECODED_ROWS,
    MAX_PREFILL_PROMPTS,
    Drawer,
    Rollouts,
    Sharing,
    decoded_rows,
    slots_per_row,
)
from monograph.run.folder import Run
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.recipe import module_digest
from monograph.run.source import ModelSource
from monograph.run.trust import is_all_trusted
from monograph.session.choices import FP8, MODEL_FROM_CODE, STREAMED, Condition
from monograph.session.objective import (
    DecidedObjective,
    HeldOutScore,
    Objective,
    RunWindows,
    Task,
    held_out_text,
)
from monograph.session.plan import FP32_BYTES, RunPlan, is_sharded, ranks_that_share
from monograph.session.reference import read_reference, write_reference
from monograph.session.sample_prompt import SamplePrompt, sample_prompt_from_ids
from monograph.storage.cache_dir import calibration_file
from monograph.storage.reading import without_links

# A reward that scores each token needs no advantage. Its loss has the ratios of this advantage, and
# the same denominator, the number of tokens of all answers.
ADVANTAGE_WITH_TOKEN_REWARDS = "dapo"
# By key; rl.max_new_tokens also has a default, which depends on the length of a row.
DEFAULTS: dict[str, Any] = {
    "rl.advantage": "dr_grpo",
    "rl.prompts": 16,
    "rl.group": 8,
    "rl.draws": 1,
    "rl.updates": 1,
    "rl.kl": "none",
    "rl.temperature": 1.0,
}
# The keys that have no meaning with a reward that scores each token.
_KEYS_OF_WHOLE_ANSWERS = (
    "rl.advantage",
    "rl.kl",
    "rl.kl_coef",
    "rl.entropy_coef",
    "rl.truncated",
    "rl.truncation_penalty",
)
# The predicted time of sampling is compared with the measured one over so many last updates.
CALIBRATION_UPDATES = 20


@dataclass(frozen=True)
class Rewards(Objective):
    """Learn from rewards.

    The fields have no meaning until `decide` returns an objective with the values of the settings.

    Attributes:
        reward: the name of the reward.
        parameters: the values of the reward's own parameters, by their names.
        teacher: the model that one of the reward's parameters names; None if none does.
        vouched: the digest of each Python file that may run, by the value that names it.
        answer_regex: the regular expression that all answers match; None without one.
        answer_schema: the file with the JSON schema that all answers follow; None without one. At
            most one of regex and schema is given.
        prompts: number of prompts of an update.
        group: number of answers to each prompt.
        draws: maximum number of draws for an update.
        updates: number of updates that are made from the answers of one draw.
        max_new_tokens: maximum number of tokens of an answer.
        temperature: the temperature of sampling.
        advantage: the name of the advantage; None if the reward scores each token.
        kl: the KL term; None without one.
        masks_truncated: whether answers that were cut at `max_new_tokens` are left out of the loss.
        truncation_penalty: is subtracted from the reward of an answer that was cut.
    """

    way = REWARDS_WAY
    needs_model = True
    is_of_texts = False
    lr_share = defaults.JUDGED_SHARE
    excluded = (
        (MODEL_FROM_CODE, "a program says no tokenizer: name a run or a folder"),
        (STREAMED, "answers are drawn on the device: leave it out"),
        (FP8, "answers are not drawn in fp8: take bf16"),
        (
            Condition(
                "train.tokens = {tokens}", lambda choices: choices.tokens is not None, "a number"
            ),
            "answers have any length: give updates or minutes",
        ),
        (
            Condition("optim.ema = {ema}", lambda choices: choices.ema != "none", "a number"),
            "answers are the weights' own: leave it out",
        ),
    )
    has_own_update_size = True
    samples_answers = True
    # The gradient is 0 as long as all answers to a prompt have the same reward. The first gradient
    # that is not 0 would look like a spike.
    skips_spikes = False

    reward: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    teacher: ModelSource | None = None
    vouched: Mapping[str, str] = field(default_factory=dict)
    answer_regex: str | None = None
    answer_schema: str | None = None
    prompts: int = 0
    group: int = 0
    draws: int = 0
    updates: int = 0
    max_new_tokens: int = 0
    temperature: float = 1.0
    advantage: str | None = None
    kl: Kl | None = None
    masks_truncated: bool = False
    truncation_penalty: float = 0.0

    def records_noun(self, settings: Settings) -> str:
        """Return what messages call the records."""
        return "prompts"

    def unused_key_error(self, origin: str, key: str, written: str) -> str:
        """Return the error message for a key of [rl] without rl.reward."""
        return (
            f"{origin}: {key} is of answers that are rewarded: give rl.reward, too, such as exact"
        )

    def require_keys(self, settings: Settings) -> None:
        """Refuse values of [rl] that do not go together; see `Objective.require_keys`."""
        _require_parameters(settings)
        rl = settings.section(RlSection)
        if rl.truncated == "mask" and rl.truncation_penalty:
            raise UsageError(
                "rl.truncation_penalty lowers the reward of answers that rl.truncated = mask leaves out"
            )
        # The term itself is made in `decide`. Making it here refuses values that do not fit.
        kl_term(rl.kl, rl.kl_coef, rl.entropy_coef, rl.advantage or DEFAULTS["rl.advantage"], "rl.")

    def decide(self, settings: Settings, length: int) -> DecidedObjective:
        """Return this way to learn with the values of all its keys, and of the tokens of an update.

        Raises:
            UsageError: keys are given that have no meaning with a reward that scores each token, or
                an answer has no room in a row.
        """
        rl = settings.section(RlSection)
        given = rl.model_dump()
        reward = str(rl.reward)
        values: dict[str, Any] = {}
        for key, default in {**DEFAULTS, "rl.max_new_tokens": max(1, length // 2)}.items():
            value = given[key.removeprefix("rl.")]
            values[key] = default if value is None else value
        if reward in REWARDS and REWARDS[reward].judges_tokens:
            _refuse_keys_of_whole_answers(settings, reward)
            del values["rl.advantage"]
        # Each parameter of the reward is a plain value or the name of a model.
        parameters: dict[str, object] = {}
        teacher: ModelSource | None = None
        for parameter in parameters_of(reward):
            value = given[parameter.field]
            if value is None:
                value = values[parameter.key] = parameter.default
            if parameter.is_model:
                teacher = _model_named(value)
                values[parameter.key] = teacher.name
            else:
                parameters[parameter.name] = value
        if values["rl.max_new_tokens"] >= length:
            raise UsageError(
                f"rl.max_new_tokens = {values['rl.max_new_tokens']} leaves no room for a prompt in a row of "
                f"data.sequence_length = {length}: lower one or raise the other"
            )
        size_key = "train.tokens_per_update"
        tokens_per_update = values["rl.prompts"] * values["rl.group"] * length
        if settings.pinned().get(size_key, "auto") not in ("auto", tokens_per_update):
            reason = "with rl.reward an update has rl.prompts x rl.group answers"
            raise UsageError(f"{settings.said(size_key)}: {reason}: leave it out")
        decided = Rewards(
            reward=reward,
            parameters=parameters,
            teacher=teacher,
            vouched=settings.vouched,
            answer_regex=rl.answer_regex,
            answer_schema=rl.answer_schema,
            prompts=values["rl.prompts"],
            group=values["rl.group"],
            draws=values["rl.draws"],
            updates=values["rl.updates"],
            max_new_tokens=values["rl.max_new_tokens"],
            temperature=values["rl.temperature"],
            advantage=values.get("rl.advantage"),
            kl=kl_term(
                values["rl.kl"], rl.kl_coef, rl.entropy_coef, values.get("rl.advantage"), "rl."
            ),
            masks_truncated=rl.truncated == "mask",
            truncation_penalty=rl.truncation_penalty or 0.0,
        )
        values["rl.reward"] = rl.reward
        values[size_key] = tokens_per_update
        return DecidedObjective(decided, values)

    def answer_scoring(self, plan: RunPlan) -> AnswerScoring:
        """Return whether the loss computes with the arithmetic of sampling ("exact") or not."""
        return "exact" if options_for(plan).exact else "rows"

    def extra_bytes(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, slots: int = 0, ranks: int = 1
    ) -> dict[str, int]:
        """Return the bytes of sampling, of the reference and of the teacher; see
        `Objective.extra_bytes`.

        Without `slots`, a prompt and its answer are assumed to fill a row.
        """
        options = options_for(plan)
        training = plan.training
        lora = training.lora
        samples_in_bf16 = training.precision != "fp32" and (
            lora or not training.optim.master_weights
        )
        dtype = torch.bfloat16 if samples_in_bf16 else torch.float32
        slots = slots_per_row(options, config, slots or options.length + 1)
        answers_of_rank = math.ceil(options.prompts * options.group / ranks)
        rows = decoded_rows(answers_of_rank) + min(options.prompts, MAX_PREFILL_PROMPTS)
        cache_bytes = rows * KVCache.bytes_per_row(config, slots, dtype, block_of(slots))
        # `Drawer` samples fewer rows at once if they would take more than half of the free memory.
        by_origin = {"answers": min(cache_bytes, machine.free_memory_bytes // 2)}
        if is_sharded(plan.job.parallel):
            # A rank that trains some rows of each weight samples from a gathered copy.
            by_origin["whole weights"] = copied_bytes(
                config, lora, training.precision, plan.job.gather_dtype == "bf16"
            )
        if options.kl and options.kl.needs_reference:
            number_bytes = FP32_BYTES if training.optim.master_weights else 2
            numbers = trained_numbers(config, lora, training.precision)
            numbers //= ranks_that_share(plan.job.parallel, ranks)
            # Two copies: the reference, and the trained weights while the reference takes their
            # place in the model to score answers.
            by_origin["reference"] = 2 * number_bytes * numbers
        teacher = rewards_of(plan).teacher
        teacher_shape = teacher.shape if teacher else None
        if teacher_shape:
            by_origin["teacher"] = teacher_shape.parameter_count() * FP32_BYTES
        return by_origin

    def largest_window(self, plan: RunPlan, config: LlamaConfig, slots: int) -> tuple[int, int]:
        """Return the rows, and tokens of a row, if all answers have the maximum length; see
        `Objective.largest_window`.
        """
        options = options_for(plan)
        answers = options.prompts * options.group
        if options.exact:
            return answers, slots_per_row(options, config, slots)
        if not options.packed:
            return answers, options.length
        # The last token of an answer is only a target, so it takes no position.
        answers_per_row = max(1, options.length // (slots - 1))
        return math.ceil(answers / answers_per_row), options.length

    def extra_seconds(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, calibration: Calibration
    ) -> tuple[float, bool]:
        """Return the seconds of sampling the answers of an update; see `Objective.extra_seconds`."""
        measured_ratio = calibration.slowness(machine, calibration_key(plan))
        seconds = (measured_ratio or 1.0) * predicted_sampling_s(plan, config, machine)
        return seconds, measured_ratio is not None

    def open(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts, print how many there are, and open the reward, which the task
        closes.
        """
        reward = reward_of(self.reward, self.vouched, **self.parameters)
        reward.unconfined = is_all_trusted()
        try:
            return RewardTask(_read_prompts(plan, reward, self.teacher, progress), reward)
        except BaseException:
            reward.close()
            raise

    def open_without_judging(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts only; see `Objective.open_without_judging`."""
        return RewardTask(_read_prompts(plan, Reward(), None, progress), Reward())


def _read_prompts(
    plan: RunPlan, reward: Reward, teacher: ModelSource | None, progress: Progress
) -> Prompts:
    """Read the run's prompts, print how many there are, and load the reward's teacher.

    Args:
        plan: the run's plan.
        reward: scores the answers. It says which keys of the records it needs, and gets the loaded
            teacher.
        teacher: the reward's teacher; None without one.
        progress: the display.

    Returns:
        The prompts, with a fingerprint that also depends on everything else that decides the
        rewards.
    """
    objective = rewards_of(plan)
    reading = plan.job.reading
    options = options_for(plan)
    with progress.stage("prompts", str(reading.source)) as stage:
        room = options.length - options.max_new_tokens
        prompts = read_prompts(reading, room=room, reward=reward, progress=stage.report)
        number = counted(len(prompts.train), "chat" if prompts.has_chats else "prompt")
        held_out = held_out_text(len(prompts.held_out), reading.held_out)
        skipped = ""
        if prompts.skipped:
            skipped = f", {counted(sum(prompts.skipped.values()), 'bad record')} skipped"
        stage.result = f"{number} of up to {counted(prompts.longest, 'token')}, {held_out}{skipped}"
    for line in prompts.notes:
        progress.line("note", line)
    if teacher is not None:
        with progress.stage("teacher", teacher.name):
            reward.teacher = _load_teacher(teacher.name, prompts, options)
    # Another program, schema or teacher would give other rewards to the same answers. So they are
    # part of the fingerprint, which must be the same when the run is resumed.
    digests = [prompts.fingerprint, reward.digest]
    if reward.teacher:
        digests.append(module_digest(reward.teacher))
    form = form_named(objective.answer_regex, objective.answer_schema)
    if form:
        digests.append(form.digest)
    return replace(prompts, fingerprint=hashlib.sha256("".join(digests).encode()).hexdigest())


def _require_parameters(settings: Settings) -> None:
    """Require the parameters that the reward needs, and refuse those of other rewards.

    Raises:
        UsageError: a key is missing, or belongs to another reward.
    """
    values = settings.values()
    chosen = settings.section(RlSection).reward
    keys_of_chosen = [parameter.key for parameter in parameters_of(chosen)]
    for parameter in parameters_of(chosen):
        if parameter.default is None and values[parameter.key] is None:
            raise UsageError(f"{settings.said('rl.reward')} needs {parameter.key}: give it, too")
    for name, reward in REWARDS.items():
        for parameter in reward.parameters:
            key = parameter.key
            if key not in keys_of_chosen and values[key] is not None:
                raise UsageError(
                    f"{settings.said(key)} is of rl.reward = {name}, not {chosen}: leave it out"
                )


def _refuse_keys_of_whole_answers(settings: Settings, reward: str) -> None:
    """Refuse keys that have no meaning with this reward, because it scores each token.

    Raises:
        UsageError: such a key is given.
    """
    given = settings.pinned()
    useless = [key for key in _KEYS_OF_WHOLE_ANSWERS if given.get(key, "none") != "none"]
    if useless:
        reason = f"a {reward} says what each token is worth"
        raise UsageError(f"{settings.origins[useless[0]]}: {useless[0]}: {reason}: leave it out")


def _model_named(name: str) -> ModelSource:
    """Return the model that a parameter of a reward names, with a name that stays valid."""
    model = ModelSource.open(name)
    # `last` would name the new run once that has begun, so the run's path is recorded.
    path = model.run.named_path if model.run else without_links(name)
    return model.renamed(str(path))


def _load_teacher(name: str, prompts: Prompts, options: RolloutOptions) -> Llama:
    """Load the teacher, ready to score answers.

    Raises:
        InputRefused: it has another tokenizer or too few positions, or cannot be loaded.
    """
    model, tokenizer = load_with_tokenizer(name)
    if tokenizer.hash != prompts.tokenizer.hash:
        raise InputRefused(
            f"rl.teacher = {name}: its tokenizer is not the model's: answers have other tokens"
        )
    if model.config.max_position_embeddings < options.length:
        raise InputRefused(
            f"rl.teacher = {name}: it has {model.config.max_position_embeddings} positions, fewer than "
            f"data.sequence_length = {options.length}"
        )
    return model.to(default_device()).requires_grad_(False).train(False)


def rewards_of(plan: RunPlan) -> Rewards:
    """Return the objective of a plan, which must be learning from rewards."""
    objective = plan.job.objective
    assert isinstance(objective, Rewards)
    return objective


def options_for(plan: RunPlan) -> RolloutOptions:
    """Return how a run's answers are sampled and weighed."""
    rewards = rewards_of(plan)
    return RolloutOptions(
        prompts=rewards.prompts,
        group=rewards.group,
        max_new_tokens=rewards.max_new_tokens,
        temperature=rewards.temperature,
        advantage=rewards.advantage or ADVANTAGE_WITH_TOKEN_REWARDS,
        draws=rewards.draws,
        length=plan.training.length,
        packed=plan.job.reading.is_packed,
        exact=plan.training.compile == "none" and default_device().type == "cpu",
        seed=plan.job.seed,
        epochs=plan.job.span.epochs,
        updates=rewards.updates,
        kl=rewards.kl,
        masks_truncated=rewards.masks_truncated,
        truncation_penalty=rewards.truncation_penalty,
    )


def _use_arithmetic_of_decoding(options: RolloutOptions, model: Llama) -> None:
    """Let the model score answers with the arithmetic of decoding if that gives the same bits."""
    if options.exact:
        model.use_attention("cached")


def predicted_sampling_s(
    plan: RunPlan, config: LlamaConfig, machine: Device, prompt: int = 0, tokens: int = 0
) -> float:
    """Predict the seconds of one draw of an update's answers, without any measurement.

    Args:
        plan: the run's plan.
        config: the model's shape.
        machine: the device.
        prompt: tokens of a prompt; 0 means the maximum.
        tokens: tokens of the longest answer; 0 means the maximum.
    """
    options = options_for(plan)
    training = plan.training
    sampled = AnswersToSample(
        answers=options.prompts * options.group,
        max_rows=MAX_DECODED_ROWS,
        prompt_tokens=prompt or options.length - options.max_new_tokens,
        answer_tokens=tokens or options.max_new_tokens,
        number_bytes=2 if training.precision != "fp32" and training.lora else FP32_BYTES,
        captured=training.compile != "none",
    )
    flops_per_s = peak_flops(machine, (training.precision,))[training.precision]
    return sampling_s(config, sampled, machine, flops_per_s)


def calibration_key(plan: RunPlan) -> str:
    """Return the key of `Calibration` under which the measured time of sampling is stored.

    Adapters, and the bits of their base, make each step of decoding slower.
    """
    lora = plan.training.lora
    model = f"adapters on {lora.base}" if lora else "whole"
    return f"drawing, {plan.training.precision}, {model}"


class RewardTask(Task):
    """The task of `Rewards`."""

    data: Prompts
    depends_on = "prompts, tokenizer or a file that a key of [rl] names"
    score = "reward", "eval_reward"
    has_steady_updates = False  # the time of sampling depends on the lengths of the answers
    prepares_windows = False
    saves_if_window_fails = True
    # If all answers to a prompt have the same reward, as they may at first, there is no gradient.
    reaches_all_parameters = False

    def __init__(self, data: Prompts, reward: Reward):
        """Take the prompts, and the reward that scores their answers."""
        self.data = data
        self.reward = reward

    def close(self) -> None:
        """Close the reward, which ends its programs."""
        self.reward.close()

    def loss(self, plan: RunPlan, model: nn.Module) -> PolicyLoss:
        """Return the loss, and set the model's attention to the kernel that the loss needs.

        Raises:
            InputRefused: the module is not a language model, or no answer can have the form that
                the settings describe.
        """
        if not isinstance(model, Llama):
            name = type(model).__name__
            raise InputRefused(
                f"model.init = {plan.job.recipe.init}: rl.reward needs a language model, not a {name}"
            )
        options = options_for(plan)
        _use_arithmetic_of_decoding(options, model)
        ratio = ratio_of(options.advantage, options.updates)
        form = None
        rewards = rewards_of(plan)
        form_name = form_named(rewards.answer_regex, rewards.answer_schema)
        if form_name:
            form = AnswerForm(
                form_name, self.data, self.data.end_ids(model.config), default_device()
            )
        return PolicyLoss(
            options.temperature, ratio, options.kl, options.advantage, options.updates, form
        )

    def slots(self, plan: RunPlan) -> int:
        """Return the maximum number of tokens of a prompt and its answer."""
        return self.data.longest + options_for(plan).max_new_tokens

    @property
    def records_per_epoch(self) -> int:
        """Return the number of prompts."""
        return len(self.data.train)

    @property
    def epochs_repeat(self) -> bool:
        """Return False: the answers to a prompt are new each time."""
        return False

    def begin(
        self, run: Run, engine: Engine, world: World, current_plan: Callable[[], RunPlan]
    ) -> None:
        """Store the parts of the session, and make what samples answers from its weights."""
        super().begin(run, engine, world, current_plan)
        self.drawer = Drawer(
            engine,
            self.data,
            self.reward,
            options_for(current_plan()),
            lambda: current_plan().updates,
            Sharing(world.size, world.split_over_ranks, world.on_rank_0),
        )

    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Rollouts:
        """Return the windows of answers to the prompts from a position on."""
        return Rollouts(self.drawer, position, skip)

    @property
    def updates_per_window(self) -> int:
        """Return the number of updates that are made from one draw."""
        return self.drawer.options.updates

    def can_save(self, windows: RunWindows) -> bool:
        """Return whether all updates of a draw are done, since checkpoints do not have its answers."""
        assert isinstance(windows, Rollouts)
        return windows.is_between_draws

    @property
    def _needs_reference(self) -> bool:
        kl = self.drawer.options.kl
        return kl is not None and kl.needs_reference

    def stop_compiling(self) -> None:
        """Sample and score answers without a compiler; see `Task.stop_compiling`."""
        self.drawer.set_options(options_for(self.current_plan()))
        _use_arithmetic_of_decoding(self.drawer.options, self.drawer.model)

    def prepare_reference_weights(self, resumed: bool) -> None:
        """Copy the initial weights for the KL term; see `Task.prepare_reference_weights`."""
        if not self._needs_reference:
            return
        planes = self.engine.step.planes
        self.drawer.reference = [plane.param.clone() for plane in planes]
        # The file has parameters by name, since planes depend on the number of ranks.
        views = (plane.views(own) for plane, own in zip(planes, self.drawer.reference, strict=True))
        tensors = dict(itertools.chain.from_iterable(views))
        if resumed:
            read_reference(self.run, self.data.fingerprint, tensors)
        else:
            write_reference(self.run, self.data.fingerprint, tensors, self.world)

    @property
    def extra_tensors(self) -> list[Tensor]:
        """Return the tensors of the cache, the reference and the teacher."""
        return self.drawer.extra_tensors

    def store_measurements(self) -> None:
        """Store the measured time of sampling, divided by the predicted time.

        Nothing is stored if an update may sample several times, or if ranks shared the work: the
        prediction is for one draw by one process.
        """
        if self.drawer.options.draws > 1 or not self.world.alone:
            return
        plan = self.current_plan()
        machine = describe()
        config = self.drawer.model.config
        longest_prompt = self.data.longest
        rows = [row for row in self.run.rows() if "longest" in row][-CALIBRATION_UPDATES:]
        ratios = [
            row["drawn_s"]
            / predicted_sampling_s(plan, config, machine, longest_prompt, row["longest"])
            for row in rows
        ]
        if ratios:
            Calibration(calibration_file()).note_ratio(
                machine, calibration_key(plan), statistics.median(ratios)
            )

    @property
    def description(self) -> str:
        """Return the source of the prompts, and their number."""
        data = self.data
        return f"{data.name}: {counted(len(data.train), 'prompt')}, {len(data.held_out):,} held out"

    def describe_trial(self, trial: Trial) -> str:
        """Return a text without the loss, which is about 0 for any answers and so says nothing."""
        return "answers sampled and scored, gradients finite"

    def describe_amount(self, rows_per_window: int, updates: int) -> str:
        """Return a text on the prompts and answers of an update."""
        options = self.drawer.options
        prompts = counted(rows_per_window, "prompt")
        return f"{prompts}, {options.group} answers each of up to {options.max_new_tokens} tokens"

    def max_tokens(self, updates: int) -> int:
        """Return the number of tokens of all answers if each has the maximum length."""
        options = self.drawer.options
        return updates * options.prompts * options.group * options.max_new_tokens

    def tokens_of_last_update(self, windows: RunWindows) -> float:
        """Return the number of tokens of the answers that were sampled last."""
        assert isinstance(windows, Rollouts)
        return windows.numbers["drawn_tokens"]

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return rewards, lengths and more on the answers of the last update."""
        loss = self.engine.step.loss
        assert isinstance(windows, Rollouts) and isinstance(loss, PolicyLoss)
        figures = loss.take_figures(self.world.all_gather)
        if not self._needs_reference:
            del figures["kl"]
        if not windows.is_fresh:
            # An earlier update has logged these answers; only the ratios are new.
            return {
                "ratio": figures["ratio"],
                "clipped": figures["clipped"],
                "tokens": self.answer_tokens,
            }
        self.answer_tokens += int(windows.numbers["drawn_tokens"])
        return {**windows.numbers, "tokens": self.answer_tokens, **figures}

    @property
    def scores_initial_weights(self) -> bool:
        """Return True: the model was trained before, so its first score says something."""
        return True

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Sample answers to held-out prompts, and return their rewards."""
        if not self.data.held_out:
            return None
        numbers = self.drawer.evaluate()
        return HeldOutScore(self.answer_tokens, numbers, numbers["eval_reward"])

    def sample_prompt(self, config: LlamaConfig | None) -> SamplePrompt:
        """Return the first prompt of the training records."""
        first = self.data.train[0]
        rewards = rewards_of(self.current_plan())
        form_arguments: tuple[str, ...] = ()
        if rewards.answer_regex is not None:
            form_arguments = ("--regex", rewards.answer_regex)
        elif rewards.answer_schema is not None:
            form_arguments = ("--json-schema", rewards.answer_schema)
        return sample_prompt_from_ids(first.text, first.ids, self.data.has_chats, form_arguments)

    def sample(self, prompt: SamplePrompt, write: Callable[[], str | None]) -> str | None:
        """Return an answer to the first prompt, with its reward."""
        text, answer, reward = self.drawer.sample()
        return f"{text}{answer} (reward {reward:g})"

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return means over the first and over the last tenth of the updates that sampled."""
        sampled = [row for row in rows if "reward" in row]
        if not sampled:
            return {}
        tenth = max(1, len(sampled) // 10)
        first, last = sampled[:tenth], sampled[-tenth:]
        # A reward of several parts logs each part as "reward.PART".
        averaged = ["reward"]
        averaged += [
            name for name in sampled[-1] if name == "pass_at_1" or name.startswith("reward.")
        ]
        evaluated: Mapping[str, Any] = next(
            (row for row in reversed(rows) if "eval_reward" in row), {}
        )
        return {
            "tokens": sampled[-1]["tokens"],
            "reward_first": statistics.fmean(row["reward"] for row in first),
            "pass_at_1": None,
            **{
                name: statistics.fmean(row[name] for row in last if name in row)
                for name in averaged
            },
            "eval_reward": evaluated.get("eval_reward"),
            "eval_pass_at_1": evaluated.get("eval_pass_at_1"),
            "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in sampled),
        }

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return a warning if all answers to a prompt had the same reward, for every prompt."""
        dead_shares = [row["dead"] for row in rows if "dead" in row]
        if not dead_shares or min(dead_shares) < 1:
            return ""
        return (
            "the answers to a prompt all had the same reward, so nothing was learned from them: take prompts that the "
            "model gets right now and then, a larger rl.group, or a reward that gives part of the points"
        )

    def describe_result(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return the rewards at the end and at the start, and the largest difference of the
        log-probabilities in sampling and in training.
        """
        summary = self.summary(rows)
        text = f"   reward {summary['reward']:.3f} ({summary['reward_first']:.3f} at the start)"
        if summary["eval_reward"] is not None:
            text += f", held-out {summary['eval_reward']:.3f}"
        difference = summary["drawn_minus_scored_max"]
        if difference:
            text += f"; log-probabilities drawn and scored differ by up to {difference:.1g} nats"
        return text


OBJECTIVE = Rewards()
