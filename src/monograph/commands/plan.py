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
from monograph.planner.defaults import LEARNING_RATES, TOKENS_PER_PARAMETER, updates_of
from monograph.planner.remedies import Choices, remedies_worth_showing
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
_SMALLEST, _LARGEST = 2**26, 2**42


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
    """
    settings = with_records(settings)
    require_one_device(settings, "plan")
    memory_bytes = None if device_memory is None else memory_size("--device-memory", device_memory)
    target = describe() if device is None else card_device(device)
    if memory_bytes is not None:
        if memory_bytes > target.memory_bytes:
            raise UsageError(
                f"--device-memory {device_memory}: {target.name} has {gibibytes(target.memory_bytes)} in all"
            )
        target = replace(target, memory_bytes=memory_bytes, free_memory_bytes=memory_bytes)
    require_possible(settings, target)
    limits = Limits.here(target, budget(target), cache_root()[0])
    if host_memory is not None:
        limits = replace(
            limits, host_bytes=int(HOST_SHARE * memory_size("--host-memory", host_memory))
        )
    asked = settings
    shape = given_shape(settings)
    with with_shape_folder(settings) as standing:
        settings = with_usual_sizes(standing) if device else standing
        _plan(
            RunToPlan(settings, model_text(asked), shape, device is not None), target, limits, json
        )


class RunToPlan(NamedTuple):
    """What is planned.

    Attributes:
        settings: the run's settings, with what is supposed.
        model: what the model is called.
        shape: the shape that a preset or sizes give; None for a model that exists.
        elsewhere: whether the card is not this machine's.
    """

    settings: Settings
    model: str
    shape: LlamaConfig | None
    elsewhere: bool


def _plan(asked: RunToPlan, target: Device, limits: Limits, json: bool) -> None:
    plan = resolve(asked.settings, target, will_build=False)
    job = plan.job
    new = job.tokens.compare_if_readable()
    rows = shape_of(plan).vocab_size
    config = shape_of(plan, new)
    require_room_for_weights(job, config, target, limits)
    objective = job.objective
    beside = objective.extra_bytes(plan, config, target)
    target = with_less_memory(target, sum(beside.values()))
    request = request_of(plan, config, target, new.trained_ids(rows) if new else ())
    known = Calibration(calibration_file())
    peaks = peak_flops(target, request.precisions)
    memory = "device" if objective.samples_answers else plan.requested_memory
    answer = streamed_or_resident(request, target, peaks, known, memory, limits)
    for line in (*notes_on(plan, target), *token_notes(new, rows)):
        print(f"note     {line}")
    seconds = objective.extra_seconds(plan, config, target, known)
    drawing = None if seconds is None else AnswerSampling(*seconds, beside)
    fresh = job.recipe.init is None
    length = _length(plan, answer, config, open_end=asked.elsewhere and fresh)
    choices = _choices(asked, job, target)
    changes = []
    if target.type == "cuda":
        changes = remedies_worth_showing(answer, request, peaks, choices, limits)
    for line in screen(
        answer, asked.model, request, length, drawing, changes, assumed_sizes(asked.settings)
    ):
        print(line)
    if json:
        print(jsonlib.dumps(as_object(answer, length, drawing, changes)))


def _length(plan: RunPlan, answer: Plan, config: LlamaConfig, open_end: bool) -> ShownLength:
    """Return how long the run is: as given, or for a new model on another machine as many tokens as
    such ones get.
    """
    per_update = plan.training.tokens_per_update
    if plan.updates:
        return ShownLength(plan.updates, plan.updates * per_update)
    is_timed = plan.job.span.is_timed
    if open_end and not plan.job.span.epochs and not is_timed:
        parameters = config.parameter_count()
        updates = updates_of(TOKENS_PER_PARAMETER * parameters, per_update)
        return ShownLength(
            updates, updates * per_update, f"{TOKENS_PER_PARAMETER} a parameter; or train.tokens=N"
        )
    if answer.candidates and is_timed:
        updates = max(1, int(60 * plan.job.span.minutes / answer.nearest.update_s))
        return ShownLength(updates, updates * per_update, "what the time allows")
    return ShownLength()


def _choices(asked: RunToPlan, job: Job, target: Device) -> Choices:
    """Return what may be changed in what is planned."""
    smaller: tuple[tuple[str, LlamaConfig], ...] = ()
    if asked.shape is not None:
        numbers = asked.shape.parameter_count()
        presets = [
            (f"model.preset={name}", LlamaConfig.preset(name)) for name in reversed(LEARNING_RATES)
        ]
        smaller = tuple(
            (change, shape) for change, shape in presets if shape.parameter_count() < numbers
        )
    existing = job.recipe.init is not None
    streams = job.objective.can_stream and job.training.lora is None
    halves = next((name for name in ("bf16", "fp16") if name in target.peak_flops), "")
    return Choices(existing, smaller, asked.elsewhere, streams, halves)


def memory_size(flag: str, text: str) -> int:
    """Return the number of bytes that a text such as "24GiB" or "80 GB" means.

    Raises:
        UsageError: the text is not a number with a unit, or the size is not from 64 MiB to 4 TiB.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([mgt]i?b)", text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} {text}: expected a number with its unit, such as 24GiB or 80GB")
    size_bytes = float(match[1]) * _UNITS[match[2]]
    if not _SMALLEST <= size_bytes <= _LARGEST:
        raise UsageError(f"{flag} {text}: expected from 64MiB to 4TiB")
    return int(size_bytes)
