"""Decide and open what a run with rewards has in place of text: prompts, the answers that are drawn, their rewards."""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from monograph.config import Settings
from monograph.data.forms import Asked
from monograph.decode.cache import KVCache
from monograph.device import Device, default_device
from monograph.errors import InputRefused, UsageError
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import SAME_ROWS, block_of
from monograph.predict.estimate import copied_bytes, trained_numbers
from monograph.predict.footprint import Judged
from monograph.predict.roofline import Drawing, drawing_s, peak_flops
from monograph.report.quantities import counted
from monograph.rl.arrange import Options
from monograph.rl.loss import UNSCALED, Estimator, Form, Kl, Objective, PolicyLoss, ratio_of
from monograph.rl.pairs import loss_for
from monograph.rl.prompts import Prompts, read_prompts
from monograph.rl.rewards import Reward, Taught, form_named
from monograph.rl.rollouts import MOST_PROMPTS, MOST_ROWS
from monograph.run.models import load
from monograph.run.progress import Progress
from monograph.run.recipe import digest, run_named, shape_in
from monograph.run.trust import is_all_trusted
from monograph.session.adapting import lora_of
from monograph.session.plan import FP32_BYTES, Plan, is_sharded, sharing
from monograph.storage.reading import without_links

TEACHER = "teacher:"
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
    if reward.startswith(TEACHER):
        worth = "a teacher says what each token is worth"
        if ":" in str(given.get("rl.max_new_tokens", "")):
            raise UsageError(f"{settings.said('rl.max_new_tokens')}: {worth}: give the number alone")
        if useless := [key for key in ("rl.advantage", "rl.kl") if given.get(key, "none") != "none"]:
            raise UsageError(f"{settings.origins[useless[0]]}: {useless[0]}: {worth}: leave it out")
        name = reward.removeprefix(TEACHER)
        run = run_named(name)  # record its path: `last` will soon name the new run
        usual = {key: value for key, value in USUAL.items() if key != "rl.advantage"}
        given["rl.reward"] = f"{TEACHER}{run.named if run else without_links(name)}"
    values: dict[str, Any] = {"rl.max_new_tokens": max(1, length // 2), "rl.reward": reward} | usual
    values |= {key: value for key, value in given.items() if key in values}
    if values["rl.kl"].startswith("k1") and values.get("rl.advantage") not in UNSCALED:
        scaled = f"rl.advantage = {values['rl.advantage']} divides by its deviation"
        instead = f"take {', '.join(UNSCALED)}, or k2 or k3"
        raise UsageError(f"rl.kl = {values['rl.kl']} is a part of the reward, which {scaled}: {instead}")
    if answer_limit(values["rl.max_new_tokens"])[0] >= length:
        raise UsageError(
            f"rl.max_new_tokens = {values['rl.max_new_tokens']} leaves no room for a prompt in a row of "
            f"data.sequence_length = {length}: lower one or raise the other"
        )
    key, tokens = "train.tokens_per_update", values["rl.prompts"] * values["rl.group"] * length
    if given.get(key, "auto") not in ("auto", tokens):
        count = "with rl.reward an update has rl.prompts x rl.group answers"
        raise UsageError(f"{settings.said(key)}: {count}: leave it out")
    return values | {key: tokens}


def answer_limit(value: int | str) -> tuple[int, float | None]:
    """Return the most tokens of an answer, and `Options.cut_costs`, as the key rl.max_new_tokens says them."""
    most, _, costs = str(value).partition(":")
    return int(most), None if costs == "mask" else float(costs or 0)


def open_prompts(plan: Plan, reward: Reward, progress: Progress) -> Prompts:
    """Read the run's prompts, and print how many there are."""
    reading, options, name = plan.reading, options_of(plan), str(plan.settings.rl.reward)
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
    if isinstance(reward, Taught):
        with progress.stage("teacher", named := name.removeprefix(TEACHER)):
            reward.teacher = _teacher(named, prompts, options)
    # Another program, schema or teacher would give other rewards to the same answers, so a run belongs to this one.
    decisive = prompts.fingerprint + reward.digest
    decisive += digest(reward.teacher) if reward.teacher else ""
    decisive += form_named(str(reading["answers"])).digest if ":" in reading["answers"] else ""
    return replace(prompts, fingerprint=hashlib.sha256(decisive.encode()).hexdigest())


def _teacher(name: str, prompts: Prompts, options: Options) -> Llama:
    """Return the model, ready to score answers.

    Raises:
        InputRefused: it has another tokenizer or too few positions, or cannot be loaded.
    """
    model, tokenizer = load(name)
    if tokenizer.hash != prompts.tokenizer.hash:
        raise InputRefused(f"rl.reward = {TEACHER}{name}: its tokenizer is not the model's: answers have other tokens")
    if model.config.max_position_embeddings < options.length:
        few = f"it has {model.config.max_position_embeddings} positions, fewer than data.sequence_length"
        raise InputRefused(f"rl.reward = {TEACHER}{name}: {few} = {options.length}")
    return model.to(default_device()).requires_grad_(False).train(False)


def options_of(plan: Plan) -> Options:
    """Return how a run's answers are drawn and weighed."""
    rl = plan.settings.rl
    assert rl.prompts and rl.group and rl.draws and rl.max_new_tokens and rl.temperature and rl.updates
    objective = rl.advantage or TAUGHT_AS
    most, cut_costs = answer_limit(rl.max_new_tokens)
    return Options(
        rl.prompts, rl.group, most, rl.temperature, objective, rl.draws, plan.sequence_length,
        plan.reading["packing"] == "packed", plan.compile == "none" and default_device().type == "cpu", plan.seed,
        plan.epochs, rl.updates, _kl(plan), cut_costs,
    )  # fmt: skip


def judging(plan: Plan) -> Judged:
    """Return how a run's answers are judged, as the planner takes it; "" for a run on text."""
    if plan.reward is None:
        return "rows" if plan.preference else ""
    return "exact" if options_of(plan).exact else "rows"


def _kl(plan: Plan) -> Kl | None:
    estimator, _, strength = str(plan.settings.rl.kl).partition(":")
    return Kl(cast(Estimator, estimator), float(strength)) if strength else None


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
    narrow = plan.precision != "fp32" and (lora or plan.optimizer.endswith(":all-bf16"))
    dtype, slots = torch.bfloat16 if narrow else torch.float32, slots or options.length + 1
    own = -(-options.prompts * options.group // ranks)
    rows = min(max(own, SAME_ROWS), MOST_ROWS) + min(options.prompts, MOST_PROMPTS)
    answers = rows * KVCache.bytes_per_row(config, slots, dtype, block_of(slots))
    beside = {"answers": min(answers, machine.free_memory_bytes // 2)}
    if is_sharded(plan.parallel):
        beside["whole weights"] = copied_bytes(config, lora, plan.precision, plan.parallel.endswith(":bf16"))
    if options.kl and options.kl.needs_reference:
        width = 2 if plan.optimizer.endswith(":all-bf16") else FP32_BYTES
        # The weights that are trained wait in a second copy while the reference scores.
        numbers = trained_numbers(config, lora, plan.precision) // sharing(plan.parallel, ranks)
        beside["reference"] = 2 * width * numbers
    if plan.reward.startswith(TEACHER) and (shape := shape_in(plan.reward.removeprefix(TEACHER))):
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
        InputRefused: the module cannot continue a text, or answers cannot have the form that data.answers names.
    """
    if not isinstance(model, Llama):
        name = type(model).__name__
        raise InputRefused(f"model.init = {plan.recipe.init}: rl.reward needs a language model, not a {name}")
    options = options_of(plan)
    if options.exact:
        model.use_attention("cached")
    ratio = ratio_of(options.objective, options.updates)
    answers, ends = str(plan.reading["answers"]), prompts.ends(model.config)
    form = Form(form_named(answers), prompts, ends, default_device()) if ":" in answers else None
    return PolicyLoss(options.temperature, ratio, options.kl, options.objective, options.updates, form)
