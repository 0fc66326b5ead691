"""`monograph plan`: predict which ways to train fit a device, how fast they are and why, without
that device.
"""

import json as jsonlib
import re
from dataclasses import replace
from typing import NamedTuple

from monograph.commands.plan_screen import AnswerSampling, ShownLength, as_object, screen
from monograph.config import Settings
from monograph.device import Device, card_device, describe
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.planner import Limits, Plan, budget, streamed_or_resident
from monograph.planner.defaults import LEARNING_RATES, TOKENS_PER_PARAMETER, updates_for_tokens
from monograph.planner.remedies import RemedyChoices, remedies_worth_showing
from monograph.planner.streaming import HOST_SHARE
from monograph.predict.roofline import Calibration, peak_flops
from monograph.report.quantities import gibibytes
from monograph.session.job import Job
from monograph.session.new_tokens import token_notes
from monograph.session.objectives import with_records
from monograph.session.plan import RunPlan
from monograph.session.requirements import (
    notes_on,
    require_one_device,
    require_possible,
    require_room_for_weights,
)
from monograph.session.resolve import request_of, resolve, shape_of, with_less_memory
from monograph.session.supposed import (
    assumed_sizes,
    given_shape,
    model_text,
    with_shape_folder,
    with_usual_sizes,
)
from monograph.storage.cache_dir import cache_root, calibration_file

_UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SMALLEST_BYTES = 2**26
_LARGEST_BYTES = 2**42


def run(
    settings: Settings,
    *,
    device: str | None,
    device_memory: str | None,
    host_memory: str | None,
    json: bool,
) -> None:
    """Print the chosen way, its memory by origin and the alternatives; with `json`, print them as
    one object too.

    Args:
        settings: the settings of the run.
        device: the card's name; None: this machine's device.
        device_memory: how much of its memory may be used, such as 24GiB; None: all.
        host_memory: the memory of the host that may be used; None: this machine's.
        json: whether to print JSON.
    """
    settings = with_records(settings)
    require_one_device(settings, "plan")
    target = _target(device, device_memory)
    require_possible(settings, target)
    limits = Limits.here(target, budget(target), cache_root()[0])
    if host_memory is not None:
        host_bytes = int(HOST_SHARE * memory_size("--host-memory", host_memory))
        limits = replace(limits, host_bytes=host_bytes)
    model = model_text(settings)
    shape = given_shape(settings)
    is_elsewhere = device is not None
    with with_shape_folder(settings) as complete_settings:
        # On this machine, sizes that are left open follow from the text and the time.
        if is_elsewhere:
            complete_settings = with_usual_sizes(complete_settings)
        asked = RunToPlan(complete_settings, model, shape, is_elsewhere)
        _plan(asked, target, limits, json)


def _target(device: str | None, device_memory: str | None) -> Device:
    """Return the device to plan for, with the memory that may be used; see `run`."""
    memory_bytes = None
    if device_memory is not None:
        memory_bytes = memory_size("--device-memory", device_memory)
    target = describe() if device is None else card_device(device)
    if memory_bytes is None:
        return target
    if memory_bytes > target.memory_bytes:
        raise UsageError(
            f"--device-memory {device_memory}: {target.name} has {gibibytes(target.memory_bytes)} in all"
        )
    return replace(target, memory_bytes=memory_bytes, free_memory_bytes=memory_bytes)


class RunToPlan(NamedTuple):
    """What is planned.

    Attributes:
        settings: the run's settings, in which open sizes may have been filled in.
        model: the model's name.
        shape: the shape that a preset or sizes give; None for a model that exists.
        elsewhere: whether the card is not this machine's.
    """

    settings: Settings
    model: str
    shape: LlamaConfig | None
    elsewhere: bool


def _plan(asked: RunToPlan, target: Device, limits: Limits, json: bool) -> None:
    """Plan the run, and print the plan."""
    plan = resolve(asked.settings, target, will_build=False)
    job = plan.job
    objective = job.objective
    vocabulary_rows = shape_of(plan).vocab_size
    new_tokens = job.tokens.compare_if_readable()
    config = shape_of(plan, new_tokens)
    require_room_for_weights(job, config, target, limits)
    # What a run with rewards holds and does to sample answers, in addition to its training step.
    sampling_bytes = objective.extra_bytes(plan, config, target)
    step_device = with_less_memory(target, sum(sampling_bytes.values()))
    trained_tokens = new_tokens.trained_ids(vocabulary_rows) if new_tokens else ()
    request = request_of(plan, config, step_device, trained_tokens)
    calibration = Calibration(calibration_file())
    peaks = peak_flops(step_device, request.precisions)
    memory = "device" if objective.samples_answers else plan.requested_memory
    answer = streamed_or_resident(request, step_device, peaks, calibration, memory, limits)
    for line in (*notes_on(plan, step_device), *token_notes(new_tokens, vocabulary_rows)):
        print(f"note     {line}")
    sampling_time = objective.extra_seconds(plan, config, step_device, calibration)
    sampling = None
    if sampling_time is not None:
        sampling = AnswerSampling(*sampling_time, sampling_bytes)
    length = _length(asked, plan, answer, config)
    remedies = []
    if step_device.type == "cuda":
        choices = _choices(asked, job, step_device)
        remedies = remedies_worth_showing(answer, request, peaks, choices, limits)
    supposed = assumed_sizes(asked.settings)
    for line in screen(answer, asked.model, request, length, sampling, remedies, supposed):
        print(line)
    if json:
        print(jsonlib.dumps(as_object(answer, length, sampling, remedies)))


def _length(asked: RunToPlan, plan: RunPlan, answer: Plan, config: LlamaConfig) -> ShownLength:
    """Return the length of the run: as given, or as the given time allows, or for a new model on
    another machine the usual number of tokens for its size.
    """
    per_update = plan.training.tokens_per_update
    span = plan.job.span
    if plan.updates:
        return ShownLength(plan.updates, plan.updates * per_update)
    is_new = plan.job.recipe.init is None
    if asked.elsewhere and is_new and not span.epochs and not span.is_timed:
        updates = updates_for_tokens(TOKENS_PER_PARAMETER * config.parameter_count(), per_update)
        why = f"{TOKENS_PER_PARAMETER} a parameter; or train.tokens=N"
        return ShownLength(updates, updates * per_update, why)
    if answer.candidates and span.is_timed:
        updates = max(1, int(60 * span.minutes / answer.nearest.update_s))
        return ShownLength(updates, updates * per_update, "what the time allows")
    return ShownLength()


def _choices(asked: RunToPlan, job: Job, target: Device) -> RemedyChoices:
    """Return what may be changed so that the run fits or is faster."""
    smaller_shapes: list[tuple[str, LlamaConfig]] = []
    if asked.shape is not None:
        for name in reversed(LEARNING_RATES):  # which has every preset, from small to large
            preset = LlamaConfig.preset(name)
            if preset.parameter_count() < asked.shape.parameter_count():
                smaller_shapes.append((f"model.preset={name}", preset))
    half_precisions = [name for name in ("bf16", "fp16") if name in target.peak_flops]
    return RemedyChoices(
        may_add_adapters=job.recipe.init is not None,
        smaller_shapes=tuple(smaller_shapes),
        may_change_card=asked.elsewhere,
        may_stream=job.objective.can_stream and job.training.lora is None,
        half_precision=half_precisions[0] if half_precisions else "",
    )


def memory_size(flag: str, text: str) -> int:
    """Return the number of bytes that a text such as "24GiB" or "80 GB" means.

    Raises:
        UsageError: the text is not a number with a unit, or the size is not from 64 MiB to 4 TiB.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([mgt]i?b)", text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} {text}: expected a number with its unit, such as 24GiB or 80GB")
    size_bytes = float(match[1]) * _UNITS[match[2]]
    if not _SMALLEST_BYTES <= size_bytes <= _LARGEST_BYTES:
        raise UsageError(f"{flag} {text}: expected from 64MiB to 4TiB")
    return int(size_bytes)
