"""Decide and open what a run with rewards has in place of text: prompts, the answers that are drawn, their rewards."""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from monograph.config import Settings
from monograph.data.forms import Asked
from monograph.decode.cache import KVCache
from monograph.device import Device, default_device
from monograph.errors import InputRefused, UsageError
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import block_of
from monograph.predict.estimate import copied_bytes, trained_numbers
from monograph.predict.footprint import Judged
from monograph.predict.roofline import Drawing, drawing_s, peak_flops
from monograph.report.quantities import counted
from monograph.rl.arrange import Options
from monograph.rl.loss import Form, Objective, PolicyLoss, penalty, ratio_of
from monograph.rl.pairs import loss_for
from monograph.rl.preferences import Preference, preference
from monograph.rl.prompts import Prompts, read_prompts
from monograph.rl.rewards import Reward, Taught, form_named, reward_of
from monograph.rl.rollouts import MOST_PROMPTS, MOST_ROWS, decoded_rows, slots_of
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.recipe import digest, run_named, shape_in
from monograph.run.trust import is_all_trusted
from monograph.session.adapting import lora_of
from monograph.session.plan import FP32_BYTES, Plan, is_sharded, sharing
from monograph.storage.reading import without_links

TEACHER = "teacher"
TAUGHT_AS: Objective = "dapo"  # whose ratios a teacher's scores get, and whose denominator, the tokens of all answers
USUAL: dict[str, Any] = {
    "rl.advantage": "dr_grpo",
    "rl.prompts": 16,
    "rl.group": 8,
    "rl.draws": 1,
    "rl.updates": 1,
    "rl.kl": "none",
    "rl.temperature": 1.0,
}
# What a teacher, who says what each token is worth, leaves without a meaning.
_NOT_OF_TEACHERS = (
    "rl.advantage",
    "rl.kl",
    "rl.kl_coef",
    "rl.entropy_coef",
    "rl.truncated",
    "rl.truncation_penalty",
)


def with_records(settings: Settings) -> Settings:
    """Return the settings with prefer.loss decided: as given, or the usual loss if the records are judged answers."""
    given = settings.values()
    if any(given[key] is not None for key in ("data.text_key", "prefer.loss", "rl.reward")):  # they ask for a kind
        return settings
    asked = Asked.of(None, given["data.ignore_keys"])
    usual = loss_for(given["data.source"], asked, given["data.bad_records"] == "skip")
    return settings.resolve({"prefer.loss": usual}, "data.source") if usual else settings


def fixed_rl(settings: Settings, length: int) -> dict[str, Any]:
    """Return values for all [rl] keys, and the tokens of an update; an empty mapping for a run on text.

    Args:
        settings: the run's settings.
        length: positions of a row.

    Raises:
        UsageError: other [rl] keys are given without a reward, or an answer has no room in a row.
    """
    given = settings.pinned()
    if (reward := settings.rl.reward) is None:
        if lonely := [key for key in given if key.startswith("rl.")]:
            key, origin = lonely[0], settings.origins[lonely[0]]
            raise UsageError(f"{origin}: {key} is of answers that are rewarded: give rl.reward, too, such as exact")
        return {}
    usual = USUAL
    if reward == TEACHER:
        worth = "a teacher says what each token is worth"
        useless = [key for key in _NOT_OF_TEACHERS if given.get(key, "none") != "none"]
        if useless:
            raise UsageError(f"{settings.origins[useless[0]]}: {useless[0]}: {worth}: leave it out")
        usual = {key: value for key, value in USUAL.items() if key != "rl.advantage"}
    values: dict[str, Any] = {"rl.max_new_tokens": max(1, length // 2)} | usual
    values |= {key: value for key, value in given.items() if key in values}
    values["rl.reward"] = reward
    if settings.rl.teacher is not None:
        run = run_named(settings.rl.teacher)  # record its path: `last` will soon name the new run
        values["rl.teacher"] = str(run.named if run else without_links(settings.rl.teacher))
    if values["rl.max_new_tokens"] >= length:
        raise UsageError(
            f"rl.max_new_tokens = {values['rl.max_new_tokens']} leaves no room for a prompt in a row of "
            f"data.sequence_length = {length}: lower one or raise the other"
        )
    key, tokens = "train.tokens_per_update", values["rl.prompts"] * values["rl.group"] * length
    if given.get(key, "auto") not in ("auto", tokens):
        count = "with rl.reward an update has rl.prompts x rl.group answers"
        raise UsageError(f"{settings.said(key)}: {count}: leave it out")
    return values | {key: tokens}


def preference_of(settings: Settings) -> Preference | None:
    """Return the loss of a run on preferences; None for other runs.

    Raises:
        UsageError: a parameter is out of range, or of another loss.
    """
    given = settings.prefer.model_dump()
    loss = given.pop("loss")
    if loss is not None:
        return preference(loss, **given)
    for key in given:
        if given[key] is not None:
            raise UsageError(f"{settings.said(f'prefer.{key}')} is of preferences: give prefer.loss, too, such as dpo")
    return None


def fixed_preference(settings: Settings) -> dict[str, Any]:
    """Return values for the keys of [prefer] that the run's loss has; an empty mapping for other runs."""
    chosen = preference_of(settings)
    return {f"prefer.{name}": value for name, value in chosen.parameters.items()} if chosen else {}


def reward_in(settings: Settings) -> AbstractContextManager[Reward | None]:
    """Return what scores a run's answers, to be closed after the run; None for a run without rewards."""
    rl = settings.rl
    if rl.reward is None:
        return nullcontext()
    return closing(reward_of(rl.reward, settings.vouched, regex=rl.reward_regex, schema=rl.reward_schema))


def open_prompts(plan: Plan, reward: Reward, progress: Progress) -> Prompts:
    """Read the run's prompts, and print how many there are."""
    reading, options = plan.reading, options_of(plan)
    reward.unconfined = is_all_trusted()
    with progress.stage("prompts", str(reading["source"])) as stage:
        room = options.length - options.max_new_tokens
        prompts = read_prompts(reading, room=room, reward=reward, progress=stage.report)
        asked = counted(len(prompts.train), "chat" if prompts.chats else "prompt")
        held = f"{len(prompts.held_out)} held out" if prompts.held_out else "none held out"
        skipped = f", {counted(sum(prompts.skipped.values()), 'bad record')} skipped" if prompts.skipped else ""
        stage.result = f"{asked} of up to {counted(prompts.longest, 'token')}, {held}{skipped}"
    for line in prompts.notes:
        progress.line("note", line)
    if isinstance(reward, Taught) and plan.teacher is not None:
        with progress.stage("teacher", plan.teacher):
            reward.teacher = _teacher(plan.teacher, prompts, options)
    # Another program, schema or teacher would give other rewards to the same answers, so a run belongs to this one.
    decisive = prompts.fingerprint + reward.digest
    decisive += digest(reward.teacher) if reward.teacher else ""
    form = form_named(plan.answer_regex, plan.answer_schema)
    decisive += form.digest if form else ""
    return replace(prompts, fingerprint=hashlib.sha256(decisive.encode()).hexdigest())


def _teacher(name: str, prompts: Prompts, options: Options) -> Llama:
    """Return the model, ready to score answers.

    Raises:
        InputRefused: it has another tokenizer or too few positions, or cannot be loaded.
    """
    model, tokenizer = load_with_tokenizer(name)
    if tokenizer.hash != prompts.tokenizer.hash:
        raise InputRefused(f"rl.teacher = {name}: its tokenizer is not the model's: answers have other tokens")
    if model.config.max_position_embeddings < options.length:
        few = f"it has {model.config.max_position_embeddings} positions, fewer than data.sequence_length"
        raise InputRefused(f"rl.teacher = {name}: {few} = {options.length}")
    return model.to(default_device()).requires_grad_(False).train(False)


def options_of(plan: Plan) -> Options:
    """Return how a run's answers are drawn and weighed."""
    rl = plan.settings.rl
    assert rl.prompts and rl.group and rl.draws and rl.max_new_tokens and rl.temperature and rl.updates
    objective = rl.advantage or TAUGHT_AS
    return Options(
        prompts=rl.prompts,
        group=rl.group,
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        objective=objective,
        draws=rl.draws,
        length=plan.sequence_length,
        packed=plan.reading["packing"] == "packed",
        exact=plan.compile == "none" and default_device().type == "cpu",
        seed=plan.seed,
        epochs=plan.epochs,
        updates=rl.updates,
        kl=penalty(rl.kl, rl.kl_coef, rl.entropy_coef, rl.advantage, "rl."),
        masks_truncated=rl.truncated == "mask",
        truncation_penalty=rl.truncation_penalty or 0.0,
    )


def judging(plan: Plan) -> Judged:
    """Return how a run's answers are judged, as the planner takes it; "" for a run on text."""
    if plan.reward is None:
        return "rows" if plan.preference else ""
    return "exact" if options_of(plan).exact else "rows"


def bytes_beside(plan: Plan, config: LlamaConfig, machine: Device, slots: int = 0, ranks: int = 1) -> dict[str, int]:
    """Return the bytes that a run with rewards holds beside its step, by origin; empty for other runs.

    Args:
        plan: the run's plan so far.
        config: the model's shape.
        machine: the device; keys and values take no more than half of its free memory (`Drawer`).
        slots: the most tokens of a prompt and its answer; 0: a whole row, as long as the prompts are unknown.
        ranks: the number of those that draw, of which this is one.
    """
    if plan.reward is None:
        return {}
    options, lora = options_of(plan), lora_of(plan.settings)
    narrow = plan.precision != "fp32" and (lora or not plan.update_rule.master_weights)
    dtype = torch.bfloat16 if narrow else torch.float32
    slots = slots_of(options, config, slots or options.length + 1)
    own = -(-options.prompts * options.group // ranks)
    rows = decoded_rows(own) + min(options.prompts, MOST_PROMPTS)
    answers = rows * KVCache.bytes_per_row(config, slots, dtype, block_of(slots))
    beside = {"answers": min(answers, machine.free_memory_bytes // 2)}
    if is_sharded(plan.parallel):
        beside["whole weights"] = copied_bytes(config, lora, plan.precision, plan.gather_dtype == "bf16")
    if options.kl and options.kl.needs_reference:
        width = FP32_BYTES if plan.update_rule.master_weights else 2
        # The weights that are trained wait in a second copy while the reference scores.
        numbers = trained_numbers(config, lora, plan.precision) // sharing(plan.parallel, ranks)
        beside["reference"] = 2 * width * numbers
    shape = shape_in(plan.teacher) if plan.teacher else None
    if shape:
        beside["teacher"] = shape.parameter_count() * FP32_BYTES
    return beside


def drawing_time(plan: Plan, config: LlamaConfig, machine: Device, prompt: int = 0, tokens: int = 0) -> float:
    """Return the seconds of drawing an update's answers once, by a closed form alone.

    Args:
        plan: the run's plan.
        config: the model's shape.
        machine: the device.
        prompt: tokens of a prompt; 0: the most.
        tokens: tokens of the longest answer; 0: the most.
    """
    options = options_of(plan)
    number_bytes = 2 if plan.precision != "fp32" and lora_of(plan.settings) else FP32_BYTES
    drawing = Drawing(
        options.prompts * options.group, MOST_ROWS, prompt or options.length - options.max_new_tokens,
        tokens or options.max_new_tokens, number_bytes, plan.compile != "none",
    )  # fmt: skip
    return drawing_s(config, drawing, machine, peak_flops(machine, (plan.precision,))[plan.precision])


def drawing_kind(plan: Plan) -> str:
    """Return the key of `Calibration` for how long drawing takes: adapters, and their base's bits, cost each step."""
    lora = lora_of(plan.settings)
    return f"drawing, {plan.precision}, {f'adapters on {lora.base}' if lora else 'whole'}"


def rewards_in(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run with rewards adds to its summary: means over the first and last tenth of its updates.

    It is empty for a run on text.
    """
    drawn = [row for row in rows if "reward" in row]
    if not drawn:
        return {}
    tenth = max(1, len(drawn) // 10)
    last, parts = drawn[-tenth:], [name for name in drawn[-1] if name == "pass_at_1" or name.startswith("reward.")]
    held: Mapping[str, Any] = next((row for row in reversed(rows) if "eval_reward" in row), {})
    return {
        "tokens": drawn[-1]["tokens"],
        "reward_first": statistics.fmean(row["reward"] for row in drawn[:tenth]),
        "pass_at_1": None,
        **{name: statistics.fmean(row[name] for row in last if name in row) for name in ("reward", *parts)},
        "eval_reward": held.get("eval_reward"),
        "eval_pass_at_1": held.get("eval_pass_at_1"),
        "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in drawn),
    }


def policy_loss(plan: Plan, prompts: Prompts, model: nn.Module) -> PolicyLoss:
    """Return the loss of a run with rewards, and let the model compute as decoding does where that gives its bits.

    Raises:
        InputRefused: the module cannot continue a text, or answers cannot have the form that the settings describe.
    """
    if not isinstance(model, Llama):
        name = type(model).__name__
        raise InputRefused(f"model.init = {plan.recipe.init}: rl.reward needs a language model, not a {name}")
    options = options_of(plan)
    if options.exact:
        model.use_attention("cached")
    ratio = ratio_of(options.objective, options.updates)
    described = form_named(plan.answer_regex, plan.answer_schema)
    form = Form(described, prompts, prompts.ends(model.config), default_device()) if described else None
    return PolicyLoss(options.temperature, ratio, options.kl, options.objective, options.updates, form)
