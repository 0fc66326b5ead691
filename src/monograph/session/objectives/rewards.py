"""Learn from rewards: the model in training samples answers to prompts, a reward scores them, and a
policy gradient makes answers with a high reward more likely.

A *draw* samples a group of answers to each of a few prompts. An update may need several draws, until
enough groups have different rewards (`rl.draws`). Several updates may be made from the same answers
(`rl.updates`). The *reference* is the weights that the run begins from; a KL term keeps the trained
weights close to them. A *teacher* is another model, whose log-probabilities are the reward. *Slots*
are the entries of the cache of keys and values, one for each token of a prompt and its answer.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from monograph.config import Settings
from monograph.config.keys import REWARDS_WAY, RlSection
from monograph.decode.cache import KVCache
from monograph.device import Device, default_device, describe
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import Diverged, InputRefused, UsageError
from monograph.evaluation import Evaluation
from monograph.graph.trial import Trial
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import slots_per_block
from monograph.planner import defaults
from monograph.predict.estimate import FROZEN_BYTES, gathered_copy_bytes, trained_numbers
from monograph.predict.footprint import AnswerScoring, Training
from monograph.predict.roofline import AnswersToSample, Calibration, peak_flops, sampling_s
from monograph.report.quantities import counted
from monograph.rl.advantages import ratio_of
from monograph.rl.arrange import RolloutOptions
from monograph.rl.episodes import EpisodeDrawer
from monograph.rl.form import AnswerForm
from monograph.rl.loss import Kl, PolicyLoss, kl_term
from monograph.rl.members import EPISODES, WITHOUT_ADAPTERS, MembersDrawer, MembersRollouts
from monograph.rl.prompts import Prompts, read_prompts
from monograph.rl.rewards import ENVIRONMENT, REWARDS, Reward, form_named, parameters_of, reward_of
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
from monograph.run.listing import Measure
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.recipe import module_digest
from monograph.run.source import ModelSource
from monograph.run.trust import is_all_trusted
from monograph.session.choices import FP8, MODEL_FROM_CODE, MTP, QUANTIZED, STREAMED, Condition
from monograph.session.objective import (
    CurveOfScores,
    DecidedObjective,
    ExtraTime,
    HeldOutScore,
    Objective,
    RunWindows,
    SweptTask,
    WindowSize,
    held_out_text,
)
from monograph.session.plan import FP32_BYTES, RunPlan, is_sharded, ranks_that_share
from monograph.session.reference import read_reference, write_reference
from monograph.session.sample_prompt import SamplePrompt, sample_prompt_from_ids
from monograph.storage.cache_dir import calibration_file
from monograph.storage.reading import without_links
from monograph.terminal import warn

# A reward that scores each token needs no advantage, as it says what each token is worth. As with
# this advantage, its loss clips the probability ratios, and is divided by the number of tokens of
# all answers.
ADVANTAGE_WITH_TOKEN_REWARDS = "dapo"
# The default values by key. That of rl.max_new_tokens depends on the length of a row (`decide`).
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
# At the end of a run, the predicted time of sampling is compared with the time that was measured in
# its last updates, at most this many.
CALIBRATION_UPDATES = 20


@dataclass(frozen=True)
class Rewards(Objective):
    """Learn from rewards.

    The object `OBJECTIVE`, by which this way to learn is found, has no meaningful values in its
    fields. `decide` returns another object, with the values of a run's settings.

    Attributes:
        reward: the name of the reward, or FILE.py:FUNCTION.
        parameters: the values of the reward's own parameters, by their names.
        teacher: the model that one of the reward's parameters names; None if none does.
        vouched: the Python files that the user allows to run (`Settings.vouched`): the digest of
            each file, by the value that names it, such as "FILE.py:FUNCTION".
        answer_regex: the regular expression that all answers match; None without one.
        answer_schema: the file with the JSON schema that all answers follow; None without one. At
            most one of regex and schema is given.
        prompts: number of prompts of an update.
        group: number of answers to each prompt.
        draws: maximum number of draws for an update.
        updates: number of updates that are made from the same answers.
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
        (MODEL_FROM_CODE, "such a model has no tokenizer: name a run or a folder"),
        (STREAMED, "answers are drawn on the device: leave it out"),
        (FP8, "answers are not drawn in fp8: take bf16"),
        (QUANTIZED, "it was not tried: leave it out"),
        (MTP, "only texts train the head: leave it out"),
        (
            Condition(
                "train.tokens = {tokens}", lambda choices: choices.tokens is not None, "a number"
            ),
            "answers have any length: give updates or minutes",
        ),
        (
            Condition("optim.ema = {ema}", lambda choices: choices.ema != "none", "a number"),
            "answers are sampled from the weights themselves, not from their average: leave it out",
        ),
    )
    has_own_update_size = True
    samples_answers = True
    # The gradient is 0 as long as all answers to a prompt have the same reward. The first gradient
    # that is not 0 would look like a spike.
    skips_spikes = False
    sweeps = True
    members_have_own_rows = True  # each samples answers of its own
    compared_by = (Measure("eval_reward", "reward", higher_is_better=True),)
    not_prunable = (
        "it stops members by what their scores will be if they go on as they did, and a reward may be flat for long "
        "before it rises: leave it out"
    )

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

    @property
    def turns(self) -> int:
        """Return the maximum number of answers of an episode; 1 without an environment."""
        turns = self.parameters.get("turns", 1)
        assert isinstance(turns, int)
        return turns

    @property
    def discount(self) -> float:
        """Return the discount of an episode's rewards by turn; 1 without an environment."""
        discount = self.parameters.get("discount", 1.0)
        assert isinstance(discount, int | float)
        return float(discount)

    def records_noun(self, settings: Settings) -> str:
        """Return what messages call the records."""
        return "prompts"

    def unused_key_error(self, origin: str, key: str, written: str) -> str:
        """Return the error message for a key of [rl] without rl.reward."""
        # A parameter belongs to the rewards that have it.
        rewards = []
        for name, reward in REWARDS.items():
            if key in [parameter.key for parameter in reward.parameters]:
                rewards.append(name)
        given = f"rl.reward={rewards[0]}, too" if rewards else "rl.reward, too, such as exact"
        return f"{origin}: {key} is of answers that are rewarded: give {given}"

    def require_keys(self, settings: Settings) -> None:
        """Refuse values of [rl] that do not go together; see `Objective.require_keys`."""
        _require_parameters(settings)
        rl = settings.section(RlSection)
        if rl.truncated == "mask" and rl.truncation_penalty:
            raise UsageError(
                "rl.truncation_penalty lowers the reward of answers that rl.truncated = mask leaves out"
            )
        # The result is not needed here: the call refuses values that do not fit.
        advantage = rl.advantage or DEFAULTS["rl.advantage"]
        kl_term(rl.kl, rl.kl_coef, rl.entropy_coef, advantage, section="rl.")

    def decide(self, settings: Settings, length: int) -> DecidedObjective:
        """Return this way to learn with the values of all its keys, and of the tokens of an update.

        Raises:
            UsageError: keys are given that have no meaning with a reward that scores each token, or
                an answer has no room in a row.
        """
        rl = settings.section(RlSection)
        reward = str(rl.reward)
        given = {f"rl.{name}": value for name, value in rl.model_dump().items()}
        decided_values: dict[str, Any] = {"rl.reward": rl.reward}
        defaults_by_key = {**DEFAULTS, "rl.max_new_tokens": max(1, length // 2)}
        for key, default in defaults_by_key.items():
            decided_values[key] = default if given[key] is None else given[key]
        if reward in REWARDS and REWARDS[reward].judges_tokens:
            _refuse_keys_of_whole_answers(settings, reward)
            # The run has no advantage, so config.toml gets none.
            del decided_values["rl.advantage"]
        advantage: str | None = decided_values.get("rl.advantage")
        # Each parameter of the reward is a plain value or the name of a model.
        parameters: dict[str, object] = {}
        teacher: ModelSource | None = None
        for parameter in parameters_of(reward):
            value = given[parameter.key]
            if value is None:
                value = parameter.default
                decided_values[parameter.key] = value
            if parameter.is_model:
                teacher = _model_named(value)
                decided_values[parameter.key] = teacher.name
            else:
                parameters[parameter.name] = value
        if reward == ENVIRONMENT:
            _refuse_forms(settings)
        max_new_tokens = decided_values["rl.max_new_tokens"]
        if max_new_tokens >= length:
            raise UsageError(
                f"rl.max_new_tokens = {max_new_tokens} leaves no room for a prompt in a row of "
                f"data.sequence_length = {length}: lower one or raise the other"
            )
        # The keys of [rl] decide how large an update is. A user may also give the size, but only
        # the one that follows from these keys, as the config.toml of an earlier run does.
        size_key = "train.tokens_per_update"
        tokens_per_update = decided_values["rl.prompts"] * decided_values["rl.group"] * length
        if settings.given_values().get(size_key, "auto") not in ("auto", tokens_per_update):
            reason = "with rl.reward an update has rl.prompts x rl.group answers"
            raise UsageError(f"{settings.quoted(size_key)}: {reason}: leave it out")
        decided_values[size_key] = tokens_per_update
        decided = Rewards(
            reward=reward,
            parameters=parameters,
            teacher=teacher,
            vouched=settings.vouched,
            answer_regex=rl.answer_regex,
            answer_schema=rl.answer_schema,
            prompts=decided_values["rl.prompts"],
            group=decided_values["rl.group"],
            draws=decided_values["rl.draws"],
            updates=decided_values["rl.updates"],
            max_new_tokens=max_new_tokens,
            temperature=decided_values["rl.temperature"],
            advantage=advantage,
            kl=kl_term(
                decided_values["rl.kl"], rl.kl_coef, rl.entropy_coef, advantage, section="rl."
            ),
            masks_truncated=rl.truncated == "mask",
            truncation_penalty=rl.truncation_penalty or 0.0,
        )
        return DecidedObjective(decided, decided_values)

    def answer_scoring(self, plan: RunPlan) -> AnswerScoring:
        """Return "exact" if the loss scores answers with the arithmetic of sampling, else "rows";
        see `Objective.answer_scoring`.
        """
        # Only eager code on a CPU can give the same bits in decoding and in the loss.
        is_eager = plan.training.compile == "none" and default_device().type == "cpu"
        return "exact" if is_eager else "rows"

    def plan_of_member(self, plan: RunPlan) -> RunPlan:
        """Return the plan with "rows" as the scoring of answers, as members that train at once score
        them; see `Objective.plan_of_member`.
        """
        training = replace(plan.training, answer_scoring="rows", packed=plan.job.reading.is_packed)
        return plan.with_training(training)

    def require_at_once(self, plan: RunPlan) -> None:
        """Refuse members without adapters, and episodes; see `Objective.require_at_once`."""
        if self.reward == ENVIRONMENT:
            raise UsageError(EPISODES)
        if plan.job.adapters() is None:
            raise UsageError(WITHOUT_ADAPTERS)

    def extra_bytes(
        self,
        plan: RunPlan,
        config: LlamaConfig,
        machine: Device,
        slots: int = 0,
        ranks: int = 1,
        members: int = 1,
    ) -> dict[str, int]:
        """Return the bytes of sampling, of the reference and of the teacher; see
        `Objective.extra_bytes`.

        Without `slots`, a prompt and its answer are assumed to fill a row.
        """
        options = rollout_options(plan)
        training = plan.training
        lora = training.lora
        # Cached keys and values have the dtype of the stored weights.
        cache_dtype = _stored_dtype(training)
        # The last token of an answer is only a target, so `length + 1` tokens fill a row.
        slots = slots_per_row(options, config, slots or options.length + 1)
        prompts = options.prompts * members
        answers_of_rank = math.ceil(prompts * options.group / ranks)
        # The generator has two caches: one for the answers, one for the prompts that it is reading.
        prefilled_rows = min(prompts, MAX_PREFILL_PROMPTS)
        rows = decoded_rows(answers_of_rank) + prefilled_rows
        cache_bytes = rows * KVCache.bytes_per_row(
            config, slots, cache_dtype, slots_per_block(slots)
        )
        # `Drawer` samples fewer rows at once if they would take more than half of the free memory.
        by_origin = {"answers": min(cache_bytes, machine.free_memory_bytes // 2)}
        if members > 1:
            # The decoder reads copies of the adapters, next to each other and with one for the base.
            numbers = trained_numbers(config, lora, training.precision)
            by_origin["adapters of sampling"] = (members + 1) * FP32_BYTES * numbers
        if is_sharded(plan.job.parallel):
            # A rank that trains some rows of each weight samples from a gathered copy.
            by_origin["whole weights"] = gathered_copy_bytes(
                config,
                lora,
                training.precision,
                gathers_bf16=plan.job.gather_dtype == "bf16",
            )
        if options.kl and options.kl.needs_reference:
            bytes_per_weight = FP32_BYTES if training.optim.master_weights else 2
            trained_weights = members * trained_numbers(config, lora, training.precision)
            trained_weights //= ranks_that_share(plan.job.parallel, ranks)
            # Two copies: the reference, and the trained weights while the reference takes their
            # place in the model to score answers.
            by_origin["reference"] = 2 * bytes_per_weight * trained_weights
        teacher = rewards_objective(plan).teacher
        teacher_shape = teacher.shape if teacher else None
        if teacher_shape:
            by_origin["teacher"] = teacher_shape.parameter_count() * FP32_BYTES
        return by_origin

    def largest_window(self, plan: RunPlan, config: LlamaConfig, slots: int) -> WindowSize:
        """Return the size of a window if all answers have the maximum length; see
        `Objective.largest_window`.
        """
        options = rollout_options(plan)
        answers = options.prompts * options.group
        if options.exact:
            # Each answer has its own row, which is as long as a row of decoding.
            return WindowSize(answers, slots_per_row(options, config, slots))
        if not options.packed:
            return WindowSize(answers, options.length)
        # The last token of an answer is only a target, so it takes no position of a row.
        answers_per_row = max(1, options.length // (slots - 1))
        return WindowSize(math.ceil(answers / answers_per_row), options.length)

    def extra_time(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, calibration: Calibration
    ) -> ExtraTime:
        """Return the time of sampling the answers of an update; see `Objective.extra_time`."""
        # How many times as long as predicted sampling took in earlier runs; None before the first.
        slowness = calibration.slowness(machine, calibration_key(plan))
        seconds = (slowness or 1.0) * predicted_sampling_s(plan, config, machine)
        return ExtraTime(seconds, is_calibrated=slowness is not None)

    def open(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts, print how many there are, and open the reward, which the task
        closes.
        """
        reward = reward_of(self.reward, self.vouched, **self.parameters)
        # With --trust-code, programs in the answers run even if this system cannot confine them.
        reward.unconfined = is_all_trusted()
        try:
            return RewardTask(_read_prompts(plan, reward, self.teacher, progress), reward)
        except BaseException:
            # Without a task, the reward's processes must end here, even after Ctrl-C.
            reward.close()
            raise

    def open_without_judging(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts only; see `Objective.open_without_judging`."""
        unused_reward = Reward()  # needs no key of the records, and is never asked for a score
        prompts = _read_prompts(plan, unused_reward, None, progress)
        return RewardTask(prompts, unused_reward)


def _read_prompts(
    plan: RunPlan, reward: Reward, teacher: ModelSource | None, progress: Progress
) -> Prompts:
    """Read the run's prompts, print how many there are, and load the reward's teacher.

    Args:
        plan: the run's plan.
        reward: scores the answers. It says which keys of the records it needs. Its attribute
            `teacher` is set to the loaded teacher.
        teacher: where the teacher is loaded from; None without one.
        progress: the display.

    Returns:
        The prompts, with a fingerprint that also depends on everything else that decides the
        rewards.
    """
    objective = rewards_objective(plan)
    reading = plan.job.reading
    options = rollout_options(plan)
    with progress.stage("prompts", str(reading.source)) as stage:
        max_prompt_tokens = options.length - options.max_new_tokens
        prompts = read_prompts(
            reading, room=max_prompt_tokens, reward=reward, progress=stage.report
        )
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
    parameters = parameters_of(chosen)
    for parameter in parameters:
        if parameter.default is None and values[parameter.key] is None:
            raise UsageError(f"{settings.quoted('rl.reward')} needs {parameter.key}: give it, too")
    # Another reward may have the same key as the chosen one.
    keys_of_chosen = [parameter.key for parameter in parameters]
    for name, reward in REWARDS.items():
        for parameter in reward.parameters:
            key = parameter.key
            if key not in keys_of_chosen and values[key] is not None:
                raise UsageError(
                    f"{settings.quoted(key)} is of rl.reward = {name}, not {chosen}: leave it out"
                )


def _refuse_keys_of_whole_answers(settings: Settings, reward: str) -> None:
    """Refuse keys that have no meaning with this reward, because it scores each token.

    Raises:
        UsageError: such a key is given.
    """
    set_values = settings.given_values()
    for key in _KEYS_OF_WHOLE_ANSWERS:
        # "none", such as rl.kl = none, asks for nothing.
        if set_values.get(key, "none") != "none":
            reason = f"a {reward} says what each token is worth"
            raise UsageError(f"{settings.origins[key]}: {key}: {reason}: leave it out")


def _refuse_forms(settings: Settings) -> None:
    """Refuse forms of answers, which episodes do not have yet.

    Raises:
        UsageError: a form is given.
    """
    for key in ("rl.answer_regex", "rl.answer_schema"):
        if key in settings.given_values():
            raise UsageError(
                f"{settings.origins[key]}: {key}: answers to an environment can have no form: leave it out"
            )


def _model_named(name: str) -> ModelSource:
    """Return the model that a parameter of a reward names, with its path as its name.

    The path is recorded in config.toml, where the name `last` would mean the new run itself.
    """
    model = ModelSource.open(name)
    path = model.run.named_path if model.run else without_links(name)
    return model.renamed(str(path))


def _load_teacher(name: str, prompts: Prompts, options: RolloutOptions) -> Llama:
    """Load the teacher, ready to score answers.

    Raises:
        InputRefused: it has another tokenizer or too few positions, or cannot be loaded.
    """
    model, tokenizer = load_with_tokenizer(name, warn)
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


def rewards_objective(plan: RunPlan) -> Rewards:
    """Return the objective of a plan, which must be learning from rewards."""
    objective = plan.job.objective
    assert isinstance(objective, Rewards)
    return objective


def rollout_options(plan: RunPlan) -> RolloutOptions:
    """Return how a run's answers are sampled and weighed."""
    objective = rewards_objective(plan)
    return RolloutOptions(
        prompts=objective.prompts,
        group=objective.group,
        max_new_tokens=objective.max_new_tokens,
        temperature=objective.temperature,
        advantage=objective.advantage or ADVANTAGE_WITH_TOKEN_REWARDS,
        draws=objective.draws,
        length=plan.training.length,
        packed=plan.job.reading.is_packed,
        exact=plan.training.answer_scoring == "exact",
        seed=plan.job.seed,
        epochs=plan.job.span.epochs,
        updates=objective.updates,
        kl=objective.kl,
        masks_truncated=objective.masks_truncated,
        truncation_penalty=objective.truncation_penalty,
        turns=objective.turns,
        discount=objective.discount,
    )


def _use_arithmetic_of_decoding(options: RolloutOptions, model: Llama) -> None:
    """Let the model score answers with the arithmetic of decoding if the options ask for it."""
    if options.exact:
        model.use_attention("cached")


def _stored_dtype(training: Training) -> torch.dtype:
    """Return the dtype of the weights from which answers are sampled, apart from weights in few
    bits.

    It is bf16 if the weights are the frozen base of adapters, or have no master copy in fp32; in
    the precision fp32 it is always fp32.
    """
    is_narrow = training.lora is not None or not training.optim.master_weights
    if training.precision != "fp32" and is_narrow:
        return torch.bfloat16
    return torch.float32


def _block_weight_bytes(training: Training, device_type: str) -> float:
    """Return how many bytes a matrix product in decoding moves for each weight of a block.

    A GPU's kernels read a base in few bits as it is stored. On a CPU each product first makes a
    dense copy of the weights, which is written and read.
    """
    number_bytes = _stored_dtype(training).itemsize
    base = training.lora.base if training.lora else "auto"
    if base not in FROZEN_BYTES:
        return number_bytes
    dense_bytes = 0 if device_type == "cuda" else 2 * number_bytes
    return FROZEN_BYTES[base] + dense_bytes


def predicted_sampling_s(
    plan: RunPlan,
    config: LlamaConfig,
    machine: Device,
    prompt_tokens: int = 0,
    answer_tokens: int = 0,
) -> float:
    """Predict the seconds of one draw of an update's answers from the machine's speeds alone,
    without what earlier runs measured.

    Args:
        plan: the run's plan.
        config: the model's shape.
        machine: the device.
        prompt_tokens: tokens of a prompt; 0 means the maximum.
        answer_tokens: tokens of the longest answer; 0 means the maximum.
    """
    options = rollout_options(plan)
    training = plan.training
    sampled = AnswersToSample(
        answers=options.prompts * options.group,
        max_rows=MAX_DECODED_ROWS,
        prompt_tokens=prompt_tokens or max(1, options.length - options.max_answer_tokens),
        answer_tokens=answer_tokens or options.max_answer_tokens,
        number_bytes=_stored_dtype(training).itemsize,
        block_weight_bytes=_block_weight_bytes(training, machine.type),
        captured=training.compile != "none",
    )
    flops_per_s = peak_flops(machine, (training.precision,))[training.precision]
    return sampling_s(config, sampled, machine, flops_per_s)


def calibration_key(plan: RunPlan) -> str:
    """Return the key of `Calibration` under which the measured time of sampling is stored.

    The key names the adapters and the format of their base, since both make each step of decoding
    slower.
    """
    lora = plan.training.lora
    trained_part = f"adapters on {lora.base}" if lora else "whole"
    return f"drawing, {plan.training.precision}, {trained_part}"


class RewardTask(SweptTask):
    """The task of `Rewards`."""

    data: Prompts
    depends_on = "prompts, tokenizer or a file that a key of [rl] names"
    score = CurveOfScores("reward", "eval_reward")
    has_steady_updates = False  # the time of sampling depends on the lengths of the answers
    prepares_windows = False
    saves_if_window_fails = True
    # If all answers to a prompt have the same reward, as they may at first, there is no gradient.
    reaches_all_parameters = False

    def __init__(self, data: Prompts, reward: Reward):
        """Take the prompts, and the reward that scores their answers."""
        self.data = data
        self.reward = reward
        # The form of the answers by its name. The tasks of a sweep's members are copies of one
        # task, so they share this dict, and so each form.
        self._forms: dict[str, AnswerForm] = {}
        # What samples the answers of all members that train at once; None in a run alone.
        self._members_drawer: MembersDrawer | None = None

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
        options = rollout_options(plan)
        _use_arithmetic_of_decoding(options, model)
        ratio = ratio_of(options.advantage, options.updates)
        form = self._form(rewards_objective(plan), model.config)
        return PolicyLoss(
            options.temperature, ratio, options.kl, options.advantage, options.updates, form
        )

    def _form(self, objective: Rewards, config: LlamaConfig) -> AnswerForm | None:
        """Return the form that all answers have; None: they may have any form.

        Raises:
            InputRefused: no answer can have the form that the settings describe.
        """
        name = form_named(objective.answer_regex, objective.answer_schema)
        if name is None:
            return None
        key = repr(name)
        if key not in self._forms:
            end_ids = self.data.end_ids(config)
            self._forms[key] = AnswerForm(name, self.data, end_ids, default_device())
        return self._forms[key]

    def slots(self, plan: RunPlan) -> int:
        """Return the maximum number of tokens of a prompt and its answer."""
        options = rollout_options(plan)
        if self.reward.environments is not None:
            # The last token of an episode is only a target.
            return options.length + 1
        return self.data.longest + options.max_new_tokens

    @property
    def records_per_epoch(self) -> int:
        """Return the number of prompts."""
        return len(self.data.train)

    @property
    def epochs_repeat(self) -> bool:
        """Return False: an epoch has the same prompts, but new answers."""
        return False

    def begin(
        self, run: Run, engine: Engine, world: World, current_plan: Callable[[], RunPlan]
    ) -> None:
        """Store the parts of the session, and make the `Drawer`, which samples answers from the
        engine's weights.
        """
        super().begin(run, engine, world, current_plan)
        drawer_class = Drawer if self.reward.environments is None else EpisodeDrawer
        self.drawer = drawer_class(
            engine,
            self.data,
            self.reward,
            rollout_options(current_plan()),
            # The number of updates may be decided only later.
            updates=lambda: current_plan().updates,
            sharing=Sharing(world.size, world.split_over_ranks, world.on_rank_0),
        )

    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Rollouts:
        """Return the windows of answers to the prompts from a position on; see `Task.windows`.

        The seed is not used: prompts always have the order of the run's seed.
        """
        return Rollouts(self.drawer, position, skip)

    @property
    def updates_per_window(self) -> int:
        """Return the number of updates that are made from the same answers."""
        return self.drawer.options.updates

    def can_save(self, windows: RunWindows) -> bool:
        """Return whether all updates from the present answers are done.

        A checkpoint does not have the answers, so a resumed run could not make further updates from
        them.
        """
        assert isinstance(windows, Rollouts)
        return windows.is_between_draws

    @property
    def _needs_reference(self) -> bool:
        kl = self.drawer.options.kl
        return kl is not None and kl.needs_reference

    def stop_compiling(self) -> None:
        """Sample and score answers without a compiler; see `Task.stop_compiling`."""
        plan = self.current_plan()
        is_exact = rewards_objective(plan).answer_scoring(plan) == "exact"
        self.drawer.set_options(replace(rollout_options(plan), exact=is_exact))
        _use_arithmetic_of_decoding(self.drawer.options, self.drawer.model)

    def prepare_reference_weights(self, resumed: bool) -> None:
        """Copy the initial weights for the KL term; see `Task.prepare_reference_weights`."""
        if not self._needs_reference:
            return
        planes = self.engine.step.planes
        self.drawer.reference = [plane.param.clone() for plane in planes]
        # The file has the parameters by their names. The planes would not do: their sizes depend
        # on the number of ranks, which may differ when the run is resumed.
        tensors: dict[str, Tensor] = {}
        for plane, copy in zip(planes, self.drawer.reference, strict=True):
            tensors.update(plane.views(copy))
        self._keep_reference(tensors, resumed)

    def copy_reference_weights(self, members: Sequence[Self], engine: Engine) -> None:
        """Copy the present weights for the KL term; see `SweptTask.copy_reference_weights`."""
        if not members[0]._needs_reference:
            return
        # The planes have the weights of all members, so one copy of them is the reference of each.
        copies = [plane.param.clone() for plane in engine.step.planes]
        for member in members:
            member.drawer.reference = copies

    def prepare_references(
        self,
        members: Sequence[Self],
        engine: Engine,
        resumed: bool,
        rows_per_window: int,
        progress: Progress,
    ) -> None:
        """Copy the initial weights of all members for the KL term; see
        `SweptTask.prepare_references`.
        """
        if not isinstance(engine, Ensemble):
            [member] = members
            member.prepare_reference_weights(resumed)
            return
        self.copy_reference_weights(members, engine)
        for number, member in enumerate(members):
            if member.drawer.reference is not None:
                tensors = engine.member_views(number, member.drawer.reference)
                member._keep_reference(tensors, resumed)

    def _keep_reference(self, tensors: Mapping[str, Tensor], resumed: bool) -> None:
        """Write the reference to its file in the run's folder; in a resumed run, read it from there.

        Args:
            tensors: the reference, by the names of parameters.
            resumed: whether the run is resumed.
        """
        if resumed:
            read_reference(self.run, self.data.fingerprint, tensors)
        else:
            write_reference(self.run, self.data.fingerprint, tensors, self.world)

    @property
    def extra_tensors(self) -> list[Tensor]:
        """Return the tensors of the cache, the reference, the teacher and a gathered copy of the
        weights.
        """
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
        # Only rows of updates that sampled have "longest", the tokens of the longest answer.
        sampled = [row for row in self.run.rows() if "longest" in row]
        ratios: list[float] = []
        for row in sampled[-CALIBRATION_UPDATES:]:
            predicted_s = predicted_sampling_s(
                plan, config, machine, self.data.longest, row["longest"]
            )
            ratios.append(row["drawn_s"] / predicted_s)
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
        """Return a text on the result of a trial step.

        It does not have the loss, which is about 0 for any answers and so says nothing.
        """
        return "answers sampled and scored, gradients finite"

    def describe_amount(self, rows_per_window: int, updates: int) -> str:
        """Return a text on the prompts and answers of an update."""
        return self.describe_updates(self.current_plan(), updates)

    def max_tokens(self, updates: int) -> int:
        """Return the number of tokens of all answers if each has the maximum length."""
        options = self.drawer.options
        return updates * options.prompts * options.group * options.max_answer_tokens

    def tokens_of_last_update(self, windows: RunWindows) -> float:
        """Return the number of tokens of the answers that were sampled last."""
        assert isinstance(windows, Rollouts)
        # A member of a sweep that is left out from the first window on has sampled none.
        return windows.numbers.get("drawn_tokens", 0.0)

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return rewards, lengths and more on the answers of the last update; see `Task.figures`."""
        loss = self.engine.loss
        assert isinstance(windows, Rollouts) and isinstance(loss, PolicyLoss)
        figures = loss.take_figures(self.world.all_gather)
        if not self._needs_reference:
            # Without a reference this is 0, and no KL divergence.
            del figures["kl"]
        if not windows.is_fresh:
            # An earlier update was made from the same answers, and its row has their figures. Only
            # the probability ratios are new.
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
        return self._held_out_score(self.drawer.evaluate()) if self.has_held_out else None

    def _held_out_score(self, figures: Mapping[str, float]) -> HeldOutScore:
        """Return the score with the figures of `Drawer.evaluate`."""
        return HeldOutScore(self.answer_tokens, figures, figures["eval_reward"])

    @property
    def has_held_out(self) -> bool:
        """Return whether there are held-out prompts."""
        return len(self.data.held_out) > 0

    def describe_updates(self, plan: RunPlan, updates: int) -> str:
        """Return a text on the prompts and answers of an update; `updates` is not used."""
        options = rollout_options(plan)
        answers = f"{options.group} answers each of up to {options.max_new_tokens} tokens"
        if self.reward.environments is not None:
            answers = f"{options.group} episodes each of up to {counted(options.turns, 'answer')}"
        return f"{counted(options.prompts, 'prompt')}, {answers}"

    def updates_in_epochs(self, plan: RunPlan, epochs: int) -> int:
        """Return the number of updates in which a run answers each prompt `epochs` times.

        Raises:
            UsageError: an update may need several draws, whose number is unknown.
        """
        options = rollout_options(plan)
        if options.draws > 1:
            raise UsageError(
                f"train.epochs = {epochs}: with rl.draws = {options.draws} the members of a sweep would not make "
                "equally many updates of it: give train.updates"
            )
        return math.ceil(epochs * self.records_per_epoch / options.prompts) * options.updates

    def joint_windows(
        self, members: Sequence[Self], readers: Sequence[RunWindows], engine: Engine
    ) -> MembersRollouts | None:
        """Return the windows of members whose answers one decoder samples; see
        `SweptTask.joint_windows`.

        Raises:
            UsageError: the members have adapters of a kind that one decoder cannot have.
        """
        if not isinstance(engine, Ensemble):
            return None
        drawer = MembersDrawer(engine, [member.drawer for member in members])
        for member in members:
            member._members_drawer = drawer
        return MembersRollouts(drawer, [_rollouts(reader) for reader in readers])

    def evaluate_members(
        self, members: Sequence[Self], engine: Engine, batch_rows: int, limit: int | None
    ) -> list[HeldOutScore | None]:
        """Sample answers of each member to held-out prompts, and return their rewards; see
        `SweptTask.evaluate_members`.
        """
        drawer = members[0]._members_drawer
        # A member that trains alone has no joint drawer.
        if drawer is None:
            [member] = members
            try:
                return [member.evaluate(batch_rows, limit)]
            except Diverged:
                return [None]
        figures_by_member = drawer.evaluate()
        scores: list[HeldOutScore | None] = []
        for number, member in enumerate(members):
            figures = figures_by_member.get(number)
            scores.append(None if figures is None else member._held_out_score(figures))
        return scores

    def sample_prompt(self, config: LlamaConfig | None) -> SamplePrompt:
        """Return the first prompt of the training records."""
        first = self.data.train[0]
        objective = rewards_objective(self.current_plan())
        form_arguments: tuple[str, ...] = ()
        if objective.answer_regex is not None:
            form_arguments = ("--regex", objective.answer_regex)
        elif objective.answer_schema is not None:
            form_arguments = ("--json-schema", objective.answer_schema)
        return sample_prompt_from_ids(first.text, first.ids, self.data.has_chats, form_arguments)

    def sample(self, prompt: SamplePrompt, write: Callable[[], str | None]) -> str | None:
        """Return the first prompt, an answer to it and the answer's reward.

        The arguments are not used, as the drawer samples as it does in training.
        """
        prompt_text, answer, reward = self.drawer.sample()
        return f"{prompt_text}{answer} (reward {reward:g})"

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return means over the first and over the last tenth of the updates that sampled, and the
        scores of the last evaluation.
        """
        sampled = [row for row in rows if "reward" in row]
        if not sampled:
            return {}
        tenth = max(1, len(sampled) // 10)
        first_rows = sampled[:tenth]
        last_rows = sampled[-tenth:]
        # Not all rewards have "pass_at_1". A reward of several parts logs each as "reward.PART".
        means: dict[str, float | None] = {"pass_at_1": None}
        for name in sampled[-1]:
            if name in ("reward", "pass_at_1") or name.startswith("reward."):
                means[name] = statistics.fmean(row[name] for row in last_rows if name in row)
        evaluations = [row for row in rows if "eval_reward" in row]
        last_evaluation = evaluations[-1] if evaluations else {}
        return {
            "tokens": sampled[-1]["tokens"],
            "reward_first": statistics.fmean(row["reward"] for row in first_rows),
            **means,
            "eval_reward": last_evaluation.get("eval_reward"),
            "eval_pass_at_1": last_evaluation.get("eval_pass_at_1"),
            "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in sampled),
        }

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return a warning if nothing was learned, because all answers to each prompt had the same reward
        or were left out.
        """
        # "dead" is the share of prompts whose answers had equal rewards, which give no gradient.
        dead_shares = [row["dead"] for row in rows if "dead" in row]
        if not dead_shares or min(dead_shares) < 1:
            return ""
        options = self.drawer.options
        if options.masks_truncated and all(row["cut"] == 1 for row in rows if "cut" in row):
            longer = "rl.max_new_tokens" if options.turns == 1 else "rl.max_new_tokens or rl.turns"
            return (
                "all answers were cut, and rl.truncated = mask leaves these out, so nothing was learned from them: "
                f"raise {longer}, or leave rl.truncated out"
            )
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


def _rollouts(windows: RunWindows) -> Rollouts:
    assert isinstance(windows, Rollouts)
    return windows


OBJECTIVE = Rewards()
