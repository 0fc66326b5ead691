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
from monograph.model.gguf import require_blocks
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

# The bytes of each unit of memory, by its name in lower case.
_UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# The range of sizes that the command line accepts: 64 MiB to 4 TiB.
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
    """Print how the run would be trained on a device, what its memory is used for, and alternatives.

    Args:
        settings: the settings of the run.
        device: the name of a card; None: this machine's device.
        device_memory: how much of the device's memory may be used, such as 24GiB; None: all.
        host_memory: how much of the host's memory may be used; None: this machine's.
        json: whether to print the plan as a JSON object, too.
    """
    settings = with_records(settings)
    require_one_device(settings, "plan")
    target = _target_device(device, device_memory)
    require_possible(settings, target)
    cache_folder, _ = cache_root()
    limits = Limits.here(target, budget(target), cache_folder)
    if host_memory is not None:
        host_bytes = int(HOST_SHARE * memory_size("--host-memory", host_memory))
        limits = replace(limits, host_bytes=host_bytes)
    # `model` and `shape` describe what the user gave, so they are read before the settings are completed.
    model = model_text(settings)
    shape = given_shape(settings)
    is_elsewhere = device is not None
    with with_shape_folder(settings) as complete_settings:
        # For another machine, sizes that the user left open get their usual values. For this machine, they
        # are derived from the text and from the time that the run may take.
        if is_elsewhere:
            complete_settings = with_usual_sizes(complete_settings)
        run_to_plan = RunToPlan(complete_settings, model, shape, is_elsewhere)
        _plan(run_to_plan, target, limits, json)


def _target_device(device: str | None, device_memory: str | None) -> Device:
    """Return the device to plan for, with the memory that may be used. The arguments are those of `run`."""
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
    """The run that is planned.

    Attributes:
        settings: the run's settings. For another machine, sizes that the user left open have usual
            values.
        model: the model's name.
        shape: the shape of a new model, by its preset or sizes; None for a model that exists.
        is_elsewhere: whether the run is planned for a card that the user named, and not for this
            machine's device.
    """

    settings: Settings
    model: str
    shape: LlamaConfig | None
    is_elsewhere: bool


def _plan(run_to_plan: RunToPlan, target: Device, limits: Limits, json: bool) -> None:
    """Plan the run, and print the plan."""
    # `run_plan` has the run's settings with a value for each "auto". How the run is trained, such as its
    # micro-batch, is chosen by the planner, whose result is `plan` (below).
    run_plan = resolve(run_to_plan.settings, target, will_build=False)
    job = run_plan.job
    objective = job.objective
    # The embedding's number of rows, before rows for new tokens are added.
    vocabulary_rows = shape_of(run_plan).vocab_size
    new_tokens = job.tokens.compare_if_readable()  # None if the model's tokenizer cannot be read
    config = shape_of(run_plan, new_tokens)
    require_room_for_weights(job, config, target, limits)
    require_blocks(config, run_plan.training.quantize)
    # A run with rewards samples answers. The training step cannot use the memory that sampling takes, so
    # the step is planned for a device with less memory.
    sampling_bytes = objective.extra_bytes(run_plan, config, target)
    step_device = with_less_memory(target, sum(sampling_bytes.values()))
    trained_tokens = new_tokens.trained_ids(vocabulary_rows) if new_tokens else ()
    request = request_of(run_plan, config, step_device, trained_tokens)
    calibration = Calibration(calibration_file())  # the times and the memory of earlier runs
    flops_by_precision = peak_flops(step_device, request.precisions)
    memory = run_plan.requested_memory if objective.can_stream else "device"
    plan = streamed_or_resident(
        request, step_device, flops_by_precision, calibration, memory, limits
    )
    for line in (*notes_on(run_plan, step_device), *token_notes(new_tokens, vocabulary_rows)):
        print(f"note     {line}")
    sampling_time = objective.extra_time(run_plan, config, step_device, calibration)
    sampling = None
    if sampling_time is not None:
        sampling = AnswerSampling(
            sampling_time.seconds, sampling_time.is_calibrated, sampling_bytes
        )
    length = _length(run_to_plan, run_plan, plan, config)
    remedies = []
    if step_device.type == "cuda":
        choices = _remedy_choices(run_to_plan, job, step_device)
        remedies = remedies_worth_showing(plan, request, flops_by_precision, choices, limits)
    supposed = assumed_sizes(run_to_plan.settings)
    for line in screen(plan, run_to_plan.model, request, length, sampling, remedies, supposed):
        print(line)
    if json:
        print(jsonlib.dumps(as_object(plan, length, sampling, remedies)))


def _length(
    run_to_plan: RunToPlan, run_plan: RunPlan, plan: Plan, config: LlamaConfig
) -> ShownLength:
    """Return the length of the run.

    It is the given number of updates, or as many updates as the given time allows. If neither is given,
    a new model on another machine trains on the number of tokens that is usual for its size. In all
    other cases the length is unknown.
    """
    tokens_per_update = run_plan.training.tokens_per_update
    span = run_plan.job.span
    if run_plan.updates:
        return ShownLength(run_plan.updates, run_plan.updates * tokens_per_update)
    is_new_model = run_plan.job.recipe.init is None
    if run_to_plan.is_elsewhere and is_new_model and not span.epochs and not span.is_timed:
        usual_tokens = TOKENS_PER_PARAMETER * config.parameter_count()
        updates = updates_for_tokens(usual_tokens, tokens_per_update)
        why = f"{TOKENS_PER_PARAMETER} a parameter; or train.tokens=N"
        return ShownLength(updates, updates * tokens_per_update, why)
    if plan.candidates and span.is_timed:
        updates = max(1, int(60 * span.minutes / plan.nearest.update_s))
        return ShownLength(updates, updates * tokens_per_update, "what the time allows")
    return ShownLength()


def _remedy_choices(run_to_plan: RunToPlan, job: Job, target: Device) -> RemedyChoices:
    """Return which settings of the run may be changed so that it fits or is faster."""
    smaller_shapes: list[tuple[str, LlamaConfig]] = []
    if run_to_plan.shape is not None:
        # The keys of this table are all presets, from small to large.
        for name in reversed(LEARNING_RATES):
            preset = LlamaConfig.preset(name)
            if preset.parameter_count() < run_to_plan.shape.parameter_count():
                smaller_shapes.append((f"model.preset={name}", preset))
    half_precisions = [name for name in ("bf16", "fp16") if name in target.peak_flops]
    return RemedyChoices(
        may_add_adapters=job.recipe.init is not None,
        smaller_shapes=tuple(smaller_shapes),
        may_change_card=run_to_plan.is_elsewhere,
        may_stream=job.objective.can_stream,
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
