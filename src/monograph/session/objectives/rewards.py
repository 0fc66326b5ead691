"""Learn from rewards: prompts in place of text, answers that are drawn from the weights in
training, their rewards.
"""

import hashlib
import itertools
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
from monograph.predict.footprint import Judged
from monograph.predict.roofline import Calibration, Drawing, drawing_s, peak_flops
from monograph.report.quantities import counted
from monograph.rl.advantages import ratio_of
from monograph.rl.arrange import RolloutOptions
from monograph.rl.form import AnswerForm
from monograph.rl.loss import Kl, PolicyLoss, kl_term
from monograph.rl.prompts import Prompts, read_prompts
from monograph.rl.rewards import REWARDS, Reward, form_named, parameters_of, reward_of
from monograph.rl.rollouts import (
    MOST_PROMPTS,
    MOST_ROWS,
    Drawer,
    Rollouts,
    Sharing,
    decoded_rows,
    slots_of,
)
from monograph.run.folder import Run
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.recipe import digest
from monograph.run.source import ModelSource
from monograph.run.trust import is_all_trusted
from monograph.session.choices import FP8, OF_CODE, STREAMED, Condition
from monograph.session.objective import (
    HeldOutScore,
    Objective,
    Opened,
    RunWindows,
    Task,
    held_out_said,
)
from monograph.session.opening import Opening, opening_of_prompt
from monograph.session.plan import FP32_BYTES, RunPlan, is_sharded, sharing
from monograph.session.reference import read_reference, write_reference
from monograph.storage.cache_dir import calibration_file
from monograph.storage.reading import without_links

# Where a reward says what each token is worth: whose ratios the scores get, and whose denominator,
# the tokens of all answers.
JUDGED_AS = "dapo"
USUAL: dict[str, Any] = {
    "rl.advantage": "dr_grpo",
    "rl.prompts": 16,
    "rl.group": 8,
    "rl.draws": 1,
    "rl.updates": 1,
    "rl.kl": "none",
    "rl.temperature": 1.0,
}
# What a reward that says what each token is worth leaves without a meaning.
_OF_WHOLE_ANSWERS = (
    "rl.advantage",
    "rl.kl",
    "rl.kl_coef",
    "rl.entropy_coef",
    "rl.truncated",
    "rl.truncation_penalty",
)
CALIBRATING = 20  # last updates of a run, whose drawing is compared with its closed form


@dataclass(frozen=True)
class Rewards(Objective):
    """Learn from rewards.

    Attributes:
        reward: the reward's name; parameters: the values of its own parameters, by their names.
        teacher: the model that one of its parameters names; None if none does.
        vouched: the digest of each Python file that may run, by the value that names it.
        answer_form: what all answers match, a regular expression or the file of a schema; None
            each: they have any form.
        prompts: prompts of an update; group: answers to each; draws: draws of an update; updates:
            updates of a draw.
        max_new_tokens: the most tokens of an answer; temperature: at which they are drawn.
        advantage: the advantage; None if the reward says what each token is worth.
        kl: the term beside the reward; None without one.
        masks_truncated: whether answers that are cut off are left out; truncation_penalty: what
            they lose else.
    """

    way = REWARDS_WAY
    needs_model = True
    is_of_texts = False
    rate_share = defaults.JUDGED_SHARE
    excluded = (
        (OF_CODE, "a program says no tokenizer: name a run or a folder"),
        (STREAMED, "answers are drawn on the device: leave it out"),
        (FP8, "answers are not drawn in fp8: take bf16"),
        (
            Condition("train.tokens = {tokens}", lambda made: made.tokens is not None, "a number"),
            "answers have any length: give updates or minutes",
        ),
        (
            Condition("optim.ema = {ema}", lambda made: made.ema != "none", "a number"),
            "answers are the weights' own: leave it out",
        ),
    )
    is_own_length = True
    answers_on_device = True
    # Gradients are 0 until some group differs, so the first that teaches would be taken for one.
    finds_spikes = False

    reward: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    teacher: ModelSource | None = None
    vouched: Mapping[str, str] = field(default_factory=dict)
    answer_form: tuple[str | None, str | None] = (None, None)
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

    def records(self, settings: Settings) -> str:
        """Return what its records are."""
        return "prompts"

    def unused(self, origin: str, key: str, written: str) -> str:
        """Return the refusal of another key of [rl] without a reward; see `Objective.unused`."""
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
        kl_term(rl.kl, rl.kl_coef, rl.entropy_coef, rl.advantage or USUAL["rl.advantage"], "rl.")

    def opened(self, settings: Settings, length: int) -> Opened:
        """Return how answers are drawn and weighed, and values for all [rl] keys and for the tokens
        of an update.

        Raises:
            UsageError: keys are given that a teacher leaves without a meaning, or an answer has no
                room in a row.
        """
        rl = settings.section(RlSection)
        given = settings.pinned()
        usual: dict[str, Any] = {**USUAL, "rl.max_new_tokens": max(1, length // 2)}
        asked: dict[str, Any] = {
            "rl.advantage": rl.advantage,
            "rl.prompts": rl.prompts,
            "rl.group": rl.group,
            "rl.draws": rl.draws,
            "rl.updates": rl.updates,
            "rl.kl": rl.kl,
            "rl.temperature": rl.temperature,
            "rl.max_new_tokens": rl.max_new_tokens,
        }
        values = {key: usual[key] if value is None else value for key, value in asked.items()}
        reward = str(rl.reward)
        if reward in REWARDS and REWARDS[reward].judges_tokens:
            worth = f"a {reward} says what each token is worth"
            useless = [key for key in _OF_WHOLE_ANSWERS if given.get(key, "none") != "none"]
            if useless:
                raise UsageError(
                    f"{settings.origins[useless[0]]}: {useless[0]}: {worth}: leave it out"
                )
            del values["rl.advantage"]
        own = rl.model_dump()
        parameters: dict[str, object] = {}
        teacher: ModelSource | None = None
        for parameter in parameters_of(reward):
            value = own[parameter.field]
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
        key = "train.tokens_per_update"
        tokens = values["rl.prompts"] * values["rl.group"] * length
        if given.get(key, "auto") not in ("auto", tokens):
            count = "with rl.reward an update has rl.prompts x rl.group answers"
            raise UsageError(f"{settings.said(key)}: {count}: leave it out")
        decided = Rewards(
            reward=reward,
            parameters=parameters,
            teacher=teacher,
            vouched=settings.vouched,
            answer_form=(rl.answer_regex, rl.answer_schema),
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
        return Opened(decided, {**values, "rl.reward": rl.reward, key: tokens})

    def judged(self, plan: RunPlan) -> Judged:
        """Return whether answers are scored by the arithmetic that drew them."""
        return "exact" if options_of(plan).exact else "rows"

    def bytes_beside(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, slots: int = 0, ranks: int = 1
    ) -> dict[str, int]:
        """Return the bytes of answers, reference and teacher; see `Objective.bytes_beside`.

        Keys and values take no more than half of the device's free memory (`Drawer`). Without
        `slots`, a prompt and its answer may fill a row.
        """
        options = options_of(plan)
        training = plan.training
        lora = training.lora
        narrow = training.precision != "fp32" and (lora or not training.optim.master_weights)
        dtype = torch.bfloat16 if narrow else torch.float32
        slots = slots_of(options, config, slots or options.length + 1)
        own = -(-options.prompts * options.group // ranks)
        rows = decoded_rows(own) + min(options.prompts, MOST_PROMPTS)
        answers = rows * KVCache.bytes_per_row(config, slots, dtype, block_of(slots))
        beside = {"answers": min(answers, machine.free_memory_bytes // 2)}
        if is_sharded(plan.job.parallel):
            beside["whole weights"] = copied_bytes(
                config, lora, training.precision, plan.job.gather_dtype == "bf16"
            )
        if options.kl and options.kl.needs_reference:
            width = FP32_BYTES if training.optim.master_weights else 2
            # The weights that are trained wait in a second copy while the reference scores.
            numbers = trained_numbers(config, lora, training.precision) // sharing(
                plan.job.parallel, ranks
            )
            beside["reference"] = 2 * width * numbers
        teacher = asked_of(plan).teacher
        shape = teacher.shape if teacher else None
        if shape:
            beside["teacher"] = shape.parameter_count() * FP32_BYTES
        return beside

    def largest_window(self, plan: RunPlan, config: LlamaConfig, slots: int) -> tuple[int, int]:
        """Return the rows of answers that are all as long as they may be; see
        `Objective.largest_window`.
        """
        options = options_of(plan)
        answers = options.prompts * options.group
        if options.exact:
            return answers, slots_of(options, config, slots)
        if not options.packed:
            return answers, options.length
        return -(-answers // max(1, options.length // (slots - 1))), options.length

    def seconds_beside(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, known: Calibration
    ) -> tuple[float, bool]:
        """Return the seconds of drawing an update's answers; see `Objective.seconds_beside`."""
        ratio = known.slowness(machine, drawing_kind(plan))
        return (ratio or 1.0) * drawing_time(plan, config, machine), ratio is not None

    def open(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts, and print how many there are; open the reward, which the task
        closes.
        """
        reward = reward_of(self.reward, self.vouched, **self.parameters)
        reward.unconfined = is_all_trusted()
        try:
            return RewardTask(_prompts(plan, reward, self.teacher, progress), reward)
        except BaseException:
            reward.close()
            raise

    def open_unjudged(self, plan: RunPlan, progress: Progress) -> "RewardTask":
        """Read the run's prompts alone; see `Objective.open_unjudged`."""
        return RewardTask(_prompts(plan, Reward(), None, progress), Reward())


def _prompts(
    plan: RunPlan, reward: Reward, teacher: ModelSource | None, progress: Progress
) -> Prompts:
    """Read the run's prompts, load the reward's teacher, and print how many prompts there are."""
    objective = asked_of(plan)
    reading = plan.job.reading
    options = options_of(plan)
    with progress.stage("prompts", str(reading.source)) as stage:
        room = options.length - options.max_new_tokens
        prompts = read_prompts(reading, room=room, reward=reward, progress=stage.report)
        asked = counted(len(prompts.train), "chat" if prompts.chats else "prompt")
        held = held_out_said(len(prompts.held_out), reading.held_out)
        skipped = (
            f", {counted(sum(prompts.skipped.values()), 'bad record')} skipped"
            if prompts.skipped
            else ""
        )
        stage.result = f"{asked} of up to {counted(prompts.longest, 'token')}, {held}{skipped}"
    for line in prompts.notes:
        progress.line("note", line)
    if teacher is not None:
        with progress.stage("teacher", teacher.name):
            reward.teacher = _teacher(teacher.name, prompts, options)
    # Another program, schema or teacher would give other rewards to the same answers, so a run
    # belongs to this one.
    decisive = prompts.fingerprint + reward.digest
    decisive += digest(reward.teacher) if reward.teacher else ""
    form = form_named(*objective.answer_form)
    decisive += form.digest if form else ""
    return replace(prompts, fingerprint=hashlib.sha256(decisive.encode()).hexdigest())


def _require_parameters(settings: Settings) -> None:
    """Refuse a reward without a parameter that it needs, and the parameters of other rewards.

    Raises:
        UsageError: a key is missing, or is of another reward.
    """
    values = settings.values()
    chosen = settings.section(RlSection).reward
    own = [parameter.key for parameter in parameters_of(chosen)]
    for parameter in parameters_of(chosen):
        if parameter.default is None and values[parameter.key] is None:
            raise UsageError(f"{settings.said('rl.reward')} needs {parameter.key}: give it, too")
    for name, reward in REWARDS.items():
        for key in (parameter.key for parameter in reward.parameters):
            if key not in own and values[key] is not None:
                raise UsageError(
                    f"{settings.said(key)} is of rl.reward = {name}, not {chosen}: leave it out"
                )


def _model_named(name: str) -> ModelSource:
    """Return the model that a parameter of a reward names, under the path that is recorded."""
    model = ModelSource.open(name)
    # `last` will soon name the new run.
    path = model.run.named if model.run else without_links(name)
    return model.renamed(str(path))


def _teacher(name: str, prompts: Prompts, options: RolloutOptions) -> Llama:
    """Return the model, ready to score answers.

    Raises:
        InputRefused: it has another tokenizer or too few positions, or cannot be loaded.
    """
    model, tokenizer = load_with_tokenizer(name)
    if tokenizer.hash != prompts.tokenizer.hash:
        raise InputRefused(
            f"rl.teacher = {name}: its tokenizer is not the model's: answers have other tokens"
        )
    if model.config.max_position_embeddings < options.length:
        few = f"it has {model.config.max_position_embeddings} positions, fewer than data.sequence_length"
        raise InputRefused(f"rl.teacher = {name}: {few} = {options.length}")
    return model.to(default_device()).requires_grad_(False).train(False)


def asked_of(plan: RunPlan) -> Rewards:
    """Return the objective of a run that learns from rewards."""
    objective = plan.job.objective
    assert isinstance(objective, Rewards)
    return objective


def options_of(plan: RunPlan) -> RolloutOptions:
    """Return how a run's answers are drawn and weighed."""
    asked = asked_of(plan)
    return RolloutOptions(
        prompts=asked.prompts,
        group=asked.group,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        advantage=asked.advantage or JUDGED_AS,
        draws=asked.draws,
        length=plan.training.length,
        packed=plan.job.reading.is_packed,
        exact=plan.training.compile == "none" and default_device().type == "cpu",
        seed=plan.job.seed,
        epochs=plan.job.span.epochs,
        updates=asked.updates,
        kl=asked.kl,
        masks_truncated=asked.masks_truncated,
        truncation_penalty=asked.truncation_penalty,
    )


def _compute_as(options: RolloutOptions, model: Llama) -> None:
    """Let the model compute as decoding does where that gives its bits."""
    if options.exact:
        model.use_attention("cached")


def drawing_time(
    plan: RunPlan, config: LlamaConfig, machine: Device, prompt: int = 0, tokens: int = 0
) -> float:
    """Return the seconds of drawing an update's answers once, by a closed form alone.

    Args:
        plan: the run's plan.
        config: the model's shape.
        machine: the device.
        prompt: tokens of a prompt; 0: the most.
        tokens: tokens of the longest answer; 0: the most.
    """
    options = options_of(plan)
    training = plan.training
    number_bytes = 2 if training.precision != "fp32" and training.lora else FP32_BYTES
    drawing = Drawing(
        options.prompts * options.group,
        MOST_ROWS,
        prompt or options.length - options.max_new_tokens,
        tokens or options.max_new_tokens,
        number_bytes,
        training.compile != "none",
    )
    return drawing_s(
        config, drawing, machine, peak_flops(machine, (training.precision,))[training.precision]
    )


def drawing_kind(plan: RunPlan) -> str:
    """Return the key of `Calibration` for how long drawing takes: adapters, and their base's bits,
    cost each step.
    """
    lora = plan.training.lora
    return f"drawing, {plan.training.precision}, {f'adapters on {lora.base}' if lora else 'whole'}"


class RewardTask(Task):
    """The task of `Rewards`."""

    data: Prompts
    depends_on = "prompts, tokenizer or a file that a key of [rl] names"
    score = "reward", "eval_reward"
    is_steady = False  # how fast answers are drawn depends on their lengths
    is_ready = False
    saves_if_refused = True
    reaches_all = False  # answers that are all worth the same have no gradient

    def __init__(self, data: Prompts, reward: Reward):
        """Take the prompts, and the reward of their answers."""
        self.data, self.reward = data, reward

    def close(self) -> None:
        """Close the reward, whose programs end."""
        self.reward.close()

    def loss(self, plan: RunPlan, model: nn.Module) -> PolicyLoss:
        """Return the loss, and let the model compute as drawing asks of it.

        Raises:
            InputRefused: the module cannot continue a text, or answers cannot have the form that
                the settings describe.
        """
        if not isinstance(model, Llama):
            name = type(model).__name__
            raise InputRefused(
                f"model.init = {plan.job.recipe.init}: rl.reward needs a language model, not a {name}"
            )
        options = options_of(plan)
        _compute_as(options, model)
        ratio = ratio_of(options.advantage, options.updates)
        described = form_named(*asked_of(plan).answer_form)
        form = (
            AnswerForm(described, self.data, self.data.ends(model.config), default_device())
            if described
            else None
        )
        return PolicyLoss(
            options.temperature, ratio, options.kl, options.advantage, options.updates, form
        )

    def slots(self, plan: RunPlan) -> int:
        """Return the most tokens of a prompt and its answer."""
        return self.data.longest + options_of(plan).max_new_tokens

    @property
    def per_epoch(self) -> int:
        """Return the number of prompts."""
        return len(self.data.train)

    @property
    def repeats(self) -> bool:
        """Return no: answers are new each time, so prompts may come up again without end."""
        return False

    def begin(self, run: Run, engine: Engine, world: World, plan: Callable[[], RunPlan]) -> None:
        """Take the parts of the session, and draw from its weights."""
        super().begin(run, engine, world, plan)
        sharing = Sharing(world.size, world.shared, world.once)
        options = options_of(plan())
        self.drawer = Drawer(
            engine, self.data, self.reward, options, lambda: plan().updates, sharing
        )

    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Rollouts:
        """Return the windows of answers to the prompts from a position on."""
        return Rollouts(self.drawer, position, skip)

    @property
    def updates_per_window(self) -> int:
        """Return the updates that are made of one draw."""
        return self.drawer.options.updates

    def can_save(self, windows: RunWindows) -> bool:
        """Return whether the updates of a draw are over, as a draw is not stored."""
        assert isinstance(windows, Rollouts)
        return windows.is_between_draws

    @property
    def _needs_reference(self) -> bool:
        kl = self.drawer.options.kl
        return kl is not None and kl.needs_reference

    def leave_uncompiled(self) -> None:
        """Draw and score answers as where nothing is compiled; see `Task.leave_uncompiled`."""
        self.drawer.take(options_of(self.plan()))
        _compute_as(self.drawer.options, self.drawer.model)

    def keep_reference(self, resumed: bool) -> None:
        """Keep a copy of the first weights for the KL term; see `Task.keep_reference`."""
        if not self._needs_reference:
            return
        planes = self.engine.step.planes
        self.drawer.reference = [plane.param.clone() for plane in planes]
        # By name, as the planes of another number of ranks are others.
        views = (plane.views(own) for plane, own in zip(planes, self.drawer.reference, strict=True))
        tensors = dict(itertools.chain.from_iterable(views))
        if resumed:
            read_reference(self.run, self.data.fingerprint, tensors)
        else:
            write_reference(self.run, self.data.fingerprint, tensors, self.world)

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors that are held to draw, compare and judge answers."""
        return self.drawer.held

    def remember(self) -> None:
        """Store how long drawing took beside its closed form, if one process drew once for each
        update.
        """
        if self.drawer.options.draws > 1 or not self.world.alone:
            return
        plan = self.plan()
        machine = describe()
        config = self.drawer.model.config
        rows = [row for row in self.run.rows() if "longest" in row][-CALIBRATING:]
        ratios = [
            row["drawn_s"] / drawing_time(plan, config, machine, self.data.longest, row["longest"])
            for row in rows
        ]
        if ratios:
            Calibration(calibration_file()).note_ratio(
                machine, drawing_kind(plan), statistics.median(ratios)
            )

    @property
    def described(self) -> str:
        """Return the source of the prompts, and how many there are."""
        data = self.data
        return f"{data.name}: {counted(len(data.train), 'prompt')}, {len(data.held_out):,} held out"

    def trial_result(self, trial: Trial) -> str:
        """Return that there are gradients; a loss of advantages is about 0."""
        return "answers sampled and scored, gradients finite"

    def amount(self, rows_per_window: int, updates: int) -> str:
        """Return the prompts and answers of an update."""
        options = self.drawer.options
        prompts = counted(rows_per_window, "prompt")
        return f"{prompts}, {options.group} answers each of up to {options.max_new_tokens} tokens"

    def tokens_in_all(self, updates: int) -> int:
        """Return the tokens of all answers, if each were as long as it may be."""
        options = self.drawer.options
        return updates * options.prompts * options.group * options.max_new_tokens

    def tokens_of(self, windows: RunWindows) -> float:
        """Return the tokens of the answers that were drawn last."""
        assert isinstance(windows, Rollouts)
        return windows.numbers["drawn_tokens"]

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return rewards, lengths and the like of the answers of the last update."""
        loss = self.engine.step.loss
        assert isinstance(windows, Rollouts) and isinstance(loss, PolicyLoss)
        figures = loss.take_figures(self.world.gathered)
        if not self._needs_reference:
            del figures["kl"]
        if not windows.is_fresh:  # the answers are those of an update before
            return {
                "ratio": figures["ratio"],
                "clipped": figures["clipped"],
                "tokens": self.answer_tokens,
            }
        self.answer_tokens += int(windows.numbers["drawn_tokens"])
        return {**windows.numbers, "tokens": self.answer_tokens, **figures}

    @property
    def scores_untrained(self) -> bool:
        """Return yes: the model was trained before."""
        return True

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Return the rewards of answers to held-out prompts."""
        if not self.data.held_out:
            return None
        numbers = self.drawer.measure()
        return HeldOutScore(self.answer_tokens, numbers, numbers["eval_reward"])

    def opening(self, config: LlamaConfig | None) -> Opening:
        """Return the first prompt."""
        first = self.data.train[0]
        regex, schema = asked_of(self.plan()).answer_form
        form: tuple[str, ...] = ()
        if regex is not None:
            form = ("--regex", regex)
        elif schema is not None:
            form = ("--json-schema", schema)
        return opening_of_prompt(first.text, first.ids, self.data.chats, form)

    def sample(self, opening: Opening, write: Callable[[], str | None]) -> str | None:
        """Return an answer to the first prompt, with its reward."""
        prompt, answer, reward = self.drawer.sample()
        return f"{prompt}{answer} (reward {reward:g})"

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return means over the first and last tenth of the updates."""
        drawn = [row for row in rows if "reward" in row]
        if not drawn:
            return {}
        tenth = max(1, len(drawn) // 10)
        last = drawn[-tenth:]
        parts = [name for name in drawn[-1] if name == "pass_at_1" or name.startswith("reward.")]
        held: Mapping[str, Any] = next((row for row in reversed(rows) if "eval_reward" in row), {})
        return {
            "tokens": drawn[-1]["tokens"],
            "reward_first": statistics.fmean(row["reward"] for row in drawn[:tenth]),
            "pass_at_1": None,
            **{
                name: statistics.fmean(row[name] for row in last if name in row)
                for name in ("reward", *parts)
            },
            "eval_reward": held.get("eval_reward"),
            "eval_pass_at_1": held.get("eval_pass_at_1"),
            "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in drawn),
        }

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return that rewards were equal, if no group of answers had any that differ."""
        shares = [row["dead"] for row in rows if "dead" in row]
        if not shares or min(shares) < 1:
            return ""
        return (
            "the answers to a prompt all had the same reward, so nothing was learned from them: take prompts that the "
            "model gets right now and then, a larger rl.group, or a reward that gives part of the points"
        )

    def standing(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return the reward at the end and at the start, and how far log-probabilities are apart."""
        end = self.summary(rows)
        held = f", held-out {end['eval_reward']:.3f}" if end["eval_reward"] is not None else ""
        apart = end["drawn_minus_scored_max"]
        scored = (
            f"; log-probabilities drawn and scored differ by up to {apart:.1g} nats"
            if apart
            else ""
        )
        return (
            f"   reward {end['reward']:.3f} ({end['reward_first']:.3f} at the start){held}{scored}"
        )


OBJECTIVE = Rewards()
