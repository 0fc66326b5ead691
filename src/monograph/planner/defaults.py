"""Decide what the settings leave open.

The functions up to `tuned_fields` decide a run's length, intervals, learning rate and optimizer.

`plan` decides how the run is trained: its micro-batch, recomputation, compile scope and precision,
with the reason why each other combination was not chosen. The search estimates memory in closed form
(`planner.candidates`). Then it traces the best candidate: the step runs on tensors without data, whose
bytes are counted (`predict.footprint`). If it does not fit, the next candidate is traced. If nothing
fits, the plan shows the candidate that needs least memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from monograph.device import Device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.model.families import DEFAULT_FAMILY
from monograph.optim import OPTIMIZERS
from monograph.planner.candidates import (
    ByPrecision,
    Candidate,
    PlanRequest,
    Way,
    describe_work,
    resident_ways,
    slower_text,
    way_candidates,
)
from monograph.planner.streaming import Limits, can_stream, stream_candidates
from monograph.planner.traces import traced_bytes
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Compile, Work
from monograph.predict.roofline import Calibration
from monograph.report.quantities import gibibytes


class Default(NamedTuple):
    """The model that is trained if the settings name none, with measured figures
    (benchmarks/first_run.py).

    Attributes:
        preset: the preset's name.
        vocabulary: entries of its tokenizer.
        tokens_per_update: tokens of an update. A model of this size learns most per token from
            small updates.
        tokens_to_beat_gzip: training tokens of Python's standard library after which held-out bits
            per byte are below those of gzip.
        tokens: minimum of training tokens of a default run. After them held-out bits per byte are
            0.1 below those of an order-6 byte model.
    """

    preset: str
    vocabulary: int
    tokens_per_update: int
    tokens_to_beat_gzip: int
    tokens: int


DEFAULT = Default(
    preset="micro",
    vocabulary=4096,
    tokens_per_update=2048,
    tokens_to_beat_gzip=600_000,
    tokens=1_300_000,
)
# AdamW's peak learning rate by preset. The rate of micro was measured (dev/log.md) and is also used
# for nano. The others are those of the GPT-3 models of the nearest size (Brown et al. 2020, arXiv
# 2005.14165, table 2.1).
LEARNING_RATES = {
    "nano": 2e-3,
    "micro": 2e-3,
    "124m": 6e-4,
    "llama-179m": 6e-4,
    "1b": 2e-4,
    "8b": 1.2e-4,
}
# For presets for which the optimizer has `tuned` fields, the weight decay is DECAY_PER_EPOCH times the
# number of epochs, but at most MAX_DECAY. With less decay, a text that is read several times would be
# learned by heart (docs/training.md).
DECAY_PER_EPOCH = 0.3
MAX_DECAY = 1.0
# Rates for existing weights. Adapters need ten times the rate of all weights (Schulman et al. 2025,
# "LoRA Without Regret").
FINETUNING_RATES = {"all": 2e-5, "adapters": 2e-4}
# Rewards and preferences take this share of FINETUNING_RATES: a careful choice, because judgements of
# answers say less than texts.
JUDGED_SHARE = 0.1
UNKNOWN_RATE = 1e-3  # for a shape without a name
# The maximum of epochs of a run that is limited by time (docs/training.md), for a weight decay below
# MAX_DECAY.
MAX_EPOCHS = 8
MAX_DECAYED_EPOCHS = 16  # the same for a weight decay of MAX_DECAY
# From this many layers on, one graph for all of them takes minutes to compile
# (benchmarks/scopes.py).
DEEP_LAYERS = 16
# The share of a run's time that evaluations, samples and checkpoints leave for updates.
UPDATES_SHARE = 0.95
# If the time of a whole run is limited, some seconds are reserved for its end: for saving, and for the
# report. They are END_STARTS times the time that the program took to start, which tells how busy the
# machine is. If that time is not known, they are END_S. They are at most MAX_END_SHARE of the limit.
END_S = 10.0
END_STARTS = 1.5
MAX_END_SHARE = 0.25
# Held-out rows that are scored for a point of the loss curve; the last point uses all.
CURVE_ROWS = 64
# The numbers of evaluations and of checkpoints of a run, if the settings leave them open.
EVALUATIONS = 12
CHECKPOINTS = 6


def default_seconds(minutes: float, seconds_per_update: float) -> float:
    """Return the seconds of the default run: `minutes`, or the time that DEFAULT.tokens take, if a
    slow machine needs more.
    """
    updates = DEFAULT.tokens / DEFAULT.tokens_per_update
    needed_s = updates * seconds_per_update / UPDATES_SHARE
    return max(60 * minutes, needed_s)


def updates_in_time(seconds: float, seconds_per_update: float, max_updates: int) -> int:
    """Return the number of updates that fit the time, at least 1 and at most `max_updates`."""
    return max(1, min(max_updates, int(seconds / seconds_per_update)))


def seconds_for_end(start_s: float, limit_s: float) -> float:
    """Return the seconds to reserve for the end of a run, after its last update.

    Args:
        start_s: seconds that the program took to start; 0 if they are not known.
        limit_s: seconds that the whole run may take.
    """
    end_s = END_STARTS * start_s if start_s else END_S
    return min(end_s, MAX_END_SHARE * limit_s)


def in_whole_rows(tokens: int, length: int) -> int:
    """Return `tokens` rounded down to whole rows of `length`."""
    return tokens // length * length


def updates_for_tokens(tokens: int, tokens_per_update: int) -> int:
    """Return the number of updates that have about `tokens` tokens in all, at least 1."""
    return max(1, round(tokens / tokens_per_update))


def most_epochs(weight_decay: float) -> int:
    """Return the maximum number of epochs of a run that is limited by time."""
    return MAX_DECAYED_EPOCHS if weight_decay >= MAX_DECAY else MAX_EPOCHS


def most_updates(rows_per_epoch: int, rows_per_update: int, weight_decay: float) -> int:
    """Return the maximum number of updates of a run that is limited by time."""
    updates_per_epoch = math.ceil(rows_per_epoch / rows_per_update)
    return most_epochs(weight_decay) * updates_per_epoch


def likely_updates(
    minutes: float, seconds_per_update: float, rows_per_epoch: int, rows_per_update: int
) -> int:
    """Return how many updates a run that is limited by time is expected to make.

    Args:
        minutes: the limit.
        seconds_per_update: predicted seconds of an update.
        rows_per_epoch: rows of the text.
        rows_per_update: rows of an update.
    """
    max_updates = most_updates(rows_per_epoch, rows_per_update, MAX_DECAY)
    return updates_in_time(UPDATES_SHARE * 60 * minutes, seconds_per_update, max_updates)


# The default tokens of a row. For a new model, which is small, they are enough for most texts; for an
# existing model, for most conversations.
NEW_LENGTH = 256
EXISTING_LENGTH = 1024


def sequence_length(fresh: bool, positions: int | None, tokens_per_update: int | None) -> int:
    """Return the default number of tokens of a row.

    Args:
        fresh: whether the model's weights are new.
        positions: positions that the model has; None if their number is unknown.
        tokens_per_update: tokens of an update; None if they are not given.
    """
    default = NEW_LENGTH if fresh or positions is None else EXISTING_LENGTH
    limits = [default, positions, tokens_per_update]
    return min(limit for limit in limits if limit is not None)


class UsualSizes(NamedTuple):
    """How models of a size are usually trained.

    Attributes:
        parameters: the model's parameters.
        length: tokens of a row.
        tokens_per_update: tokens of an update.
    """

    parameters: int
    length: int
    tokens_per_update: int


# The sizes of rows and updates in a plan for a card that the user names. The first entry is the default
# model. The tokens of an update, and rows of 2,048 tokens, are those of GPT-3's models (Brown et al. 2020,
# arXiv 2005.14165, table 2.1). Rows of 4,096 tokens are those of Llama 2, and of Llama 3 at first (arXiv
# 2307.09288, 2407.21783).
USUAL_SIZES = (
    UsualSizes(
        parameters=2_361_024, length=NEW_LENGTH, tokens_per_update=DEFAULT.tokens_per_update
    ),
    UsualSizes(parameters=125_000_000, length=2048, tokens_per_update=2**19),
    UsualSizes(parameters=1_300_000_000, length=4096, tokens_per_update=2**20),
    UsualSizes(parameters=6_700_000_000, length=4096, tokens_per_update=2**21),
)
# Rows of an update of existing weights: for adapters the 16 of QLoRA (Dettmers et al. 2023, arXiv
# 2305.14314, table 9), and for all weights the 128 of Stanford Alpaca (Taori et al. 2023).
ADAPTED_ROWS = 16
FINETUNED_ROWS = 128
# Training tokens per parameter of a new model. With this ratio a given number of FLOPs gives the lowest
# loss (Hoffmann et al. 2022, arXiv 2203.15556).
TOKENS_PER_PARAMETER = 20


def usual_sizes(parameters: int) -> tuple[int, int]:
    """Return the tokens of a row and of an update with which new models of about this size are
    trained.
    """
    nearest = min(USUAL_SIZES, key=lambda usual: abs(math.log(usual.parameters / parameters)))
    return nearest.length, nearest.tokens_per_update


def warmup(updates: int) -> int:
    """Return the updates of the warm-up: 5 % of the run, at least 10 (or half of a shorter run), at
    most 2,000.
    """
    return min(2000, max(min(10, updates // 2), updates // 20))


def interval(updates: int, times: int) -> int:
    """Return the number of updates between events that happen about `times` times in a run."""
    return max(1, math.ceil(updates / times))


def optimizer(fresh: bool) -> str:
    """Return the name of the default optimizer: "muon" for new weights, with which the default run
    gains 0.07 bits per byte (dev/log.md), else "adamw".
    """
    return "muon" if fresh else "adamw"


def scopes(layers: int) -> tuple[Compile, ...]:
    """Return the compile scopes, best first. For a deep model the first one is "blocks", a graph
    that all blocks share.
    """
    if layers >= DEEP_LAYERS:
        return "blocks", "whole", "none"
    return "whole", "blocks", "none"


def precision(device: Device) -> str:
    """Return "bf16" if the device computes it in hardware, else "fp32"."""
    return "bf16" if device.has_bf16 else "fp32"


def known_learning_rate(preset: str, optimizer: str) -> float:
    """Return the peak learning rate of a preset for an optimizer.

    It was found with models of the Llama family, and is used for all families.
    """
    optimizer_class = OPTIMIZERS[optimizer]
    usual_rate = LEARNING_RATES[preset] * optimizer_class.rate_factor
    rate: float = optimizer_class.tuned.get(preset, {}).get("lr", usual_rate)
    return rate


def tuned_fields(preset: str, family: str, optimizer: str, epochs: int = 1) -> dict[str, Any]:
    """Return the fields, without the rate, in which a new model's optimizer differs from its
    class's defaults.

    Only models of the Llama family have such fields. Other families may need other values: Gemma,
    for example, scales the output of the embedding.

    Args:
        preset: the model's preset.
        family: the model's family.
        optimizer: the optimizer's name.
        epochs: how many times the text is read.
    """
    tuned = OPTIMIZERS[optimizer].tuned.get(preset)
    if tuned is None or family != DEFAULT_FAMILY:
        return {}
    fields = {name: value for name, value in tuned.items() if name != "lr"}
    weight_decay = min(MAX_DECAY, round(DECAY_PER_EPOCH * max(1, epochs), 6))
    return {**fields, "weight_decay": weight_decay}


# The share of a card's memory that tensors may take. Gaps between tensors take the rest.
CARD_SHARE = 0.97
CONTEXT_BYTES = 600 * 2**20  # of the CUDA context
# The share of a host's free memory that tensors may take: the process also holds libraries and
# text, and other programs run.
HOST_SHARE_OF_FREE = 0.5
# The closed form has been wrong by up to this factor. So a candidate is traced, unless it fits even
# if it needs this many times the bytes of the closed form.
MAX_ESTIMATE_ERROR = 2.0
MAX_TRACES = 4  # of a plan
# If nothing fits, a traced candidate is shown even if an untraced one needs less memory, as long as it
# needs at most this many times as much.
NEARLY_EQUAL = 1.01


@dataclass(frozen=True)
class Plan:
    """A choice among the candidates, which are ways to train.

    Attributes:
        device: the device to train on.
        budget_bytes: bytes that tensors may take on the device.
        chosen: the choice; None if nothing fits.
        candidates: all candidates. The first is the chosen one, or if nothing fits, the one that
            needs least memory.
        calibrated: whether times are corrected by the times of earlier runs on the device.
        not_streamed: why streaming does not fit either; "" if it was not tried.
    """

    device: Device
    budget_bytes: int
    chosen: Candidate | None
    candidates: list[Candidate]
    calibrated: bool = False
    not_streamed: str = ""

    @property
    def nearest(self) -> Candidate:
        """Return the chosen candidate, or if nothing fits, the one that needs least memory."""
        return self.candidates[0]

    @property
    def refusal(self) -> str:
        """Return one line that says which way comes nearest, and how much more memory it needs."""
        if not self.candidates:
            return self.not_streamed
        nearest = self.nearest
        missing_bytes = nearest.peak_memory_bytes - self.budget_bytes
        streaming = f"; train.memory = stream: {self.not_streamed}" if self.not_streamed else ""
        return (
            f"nothing fits {gibibytes(self.budget_bytes)} of {self.device.name}: the nearest, "
            f"{describe_work(nearest.work)}, needs {gibibytes(nearest.peak_memory_bytes)}, "
            f"{gibibytes(missing_bytes)} more; use a smaller model or sequence_length, or a device with more memory"
            f"{streaming}"
        )


def budget(device: Device) -> int:
    """Return the bytes that tensors may take on a device.

    Raises:
        UsageError: the device has no memory left.
    """
    free = device.free_memory_bytes
    if device.type == "cuda":
        usable = int(CARD_SHARE * (free - CONTEXT_BYTES))
    else:
        usable = int(HOST_SHARE_OF_FREE * free)
    if usable <= 0:
        raise UsageError(
            f"{gibibytes(free)} of memory leaves nothing for tensors: give more, such as 24GiB"
        )
    return usable


def plan(
    request: PlanRequest,
    device: Device,
    peak_flops: ByPrecision,
    calibration: Calibration | None = None,
) -> Plan:
    """Return a plan with the fastest combination that fits and has the requested numerics.

    The candidates are estimated in closed form. If the best one is near the limit, it is traced. The
    trace also corrects the estimates of all other candidates of its way, so the search starts again,
    until the best candidate is a traced one or is far below the limit.

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        peak_flops: FLOP/s by precision, from the datasheet, or measured for a CPU.
        calibration: time and memory of earlier runs on the device.

    Raises:
        UsageError: the device has no memory left.
    """
    limit = budget(device)
    slowness: dict[str, float] = {}  # measured time / predicted time, by precision
    if calibration:
        for name in request.precisions:
            ratio = calibration.slowness(device, name)
            if ratio:
                slowness[name] = ratio
    corrections: dict[Way, float] = {}  # traced bytes / bytes by the closed form
    traced: dict[Work, Candidate] = {}

    def list_candidates(limit: int) -> list[Candidate]:
        """Return the candidates of all ways under a limit; those that were traced have their traced memory."""
        candidates = []
        for way in resident_ways(request):
            candidates += way_candidates(
                request,
                way,
                device,
                limit,
                correction=corrections.get(way, 1.0),
                peak_flops=peak_flops,
                slowness=slowness,
            )
        return [traced.get(candidate.work, candidate) for candidate in candidates]

    while True:
        candidates = list_candidates(limit)
        if len(traced) == MAX_TRACES:
            # No further trace is allowed, so only a traced candidate can be chosen.
            best = _best([*traced.values()], traced, limit)
            break
        best = _best(candidates, traced, limit)
        if best.work in traced or best.peak_memory_bytes * MAX_ESTIMATE_ERROR <= limit:
            break
        # The last trace is for the candidate that is most likely to fit: the one with the smallest
        # micro-batch that needs least by the closed form.
        if len(traced) == MAX_TRACES - 1:
            # With a limit of 0 nothing fits, so each way is listed with its smallest micro-batch.
            smallest = sorted(
                list_candidates(0), key=lambda candidate: estimate_bytes(candidate.work)
            )
            untraced = [candidate for candidate in smallest if candidate.work not in traced]
            if untraced:
                best = untraced[0]
        by_origin = traced_bytes(best.work)
        residual_bytes = 0  # by how much similar steps of earlier runs exceeded their traces
        if calibration:
            residual_bytes = calibration.residual(device, best.work, by_origin)
        traced[best.work] = best.with_trace(by_origin, residual_bytes)
        way = Way(best.work.precision, best.work.compile, best.work.remat)
        traced_peak = traced[best.work].peak_memory_bytes
        corrections[way] = traced_peak / estimate_bytes(best.work)
    fits = best.peak_memory_bytes <= limit
    shown_best = replace(best, why="" if fits else _too_large(best, limit))
    others = [candidate for candidate in candidates if candidate.work != best.work]
    others.sort(key=attrgetter("update_s"))
    return Plan(
        device,
        budget_bytes=limit,
        chosen=shown_best if fits else None,
        candidates=[
            shown_best,
            *(replace(candidate, why=_why(candidate, best, limit)) for candidate in others),
        ],
        calibrated=best.work.precision in slowness,
    )


def _best(candidates: list[Candidate], traced: Mapping[Work, Candidate], limit: int) -> Candidate:
    """Return the fastest candidate that fits.

    If none fits, return the one that needs least memory, or a traced one that needs hardly more.

    Args:
        candidates: the candidates.
        traced: those that were traced.
        limit: bytes that tensors may take.
    """
    fitting = [candidate for candidate in candidates if candidate.peak_memory_bytes <= limit]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.update_s)
    memory = attrgetter("peak_memory_bytes")
    smallest = min(candidates, key=memory)
    nearly_equal_bytes = NEARLY_EQUAL * smallest.peak_memory_bytes
    traced_and_nearly_equal = [
        candidate
        for candidate in traced.values()
        if candidate.peak_memory_bytes <= nearly_equal_bytes
    ]
    return min(traced_and_nearly_equal, key=memory, default=smallest)


def _why(candidate: Candidate, best: Candidate, limit: int) -> str:
    """Return why a candidate was not chosen."""
    if candidate.peak_memory_bytes > limit:
        return _too_large(candidate, limit)
    # The candidate fits by the closed form, and is faster than the best by more than 0.5 %, which is not
    # rounding. But no trace has shown that it fits.
    if candidate.update_s < 0.995 * best.update_s:
        return "not certain to fit"
    return slower_text(candidate.update_s / best.update_s)


def _too_large(candidate: Candidate, limit: int) -> str:
    return f"{gibibytes(candidate.peak_memory_bytes - limit)} too large"


def streamed_or_resident(
    request: PlanRequest,
    device: Device,
    peak_flops: ByPrecision,
    calibration: Calibration | None = None,
    memory: Literal["auto", "device", "stream"] = "auto",
    limits: Limits | None = None,
) -> Plan:
    """Return the fastest way that fits, with the weights on the device or streamed to it.

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        peak_flops: FLOP/s by precision.
        calibration: time and memory of earlier runs on the device; it does not cover streamed runs.
        memory: where weights may live: on the "device", or they are streamed ("stream"). With
            "auto" they are streamed only if nothing else fits.
        limits: memory, disk and link for streaming; None: those of this machine.

    Raises:
        UsageError: the device has no memory left.
    """
    if memory == "stream":
        resident = Plan(device, budget(device), chosen=None, candidates=[])
    else:
        resident = plan(request, device, peak_flops, calibration)
    # Streaming needs a graph for each block, and offloads inputs itself.
    cannot_stream = (
        request.scopes == ("whole",)
        or request.remats == ("offload",)
        or not can_stream(request.training)
    )
    if memory == "device" or resident.chosen or cannot_stream:
        return resident
    try:
        if limits is None:
            limits = Limits.here(device, resident.budget_bytes)
        streamed = stream_candidates(request, device, limits, peak_flops)
    except OutOfDeviceMemory as refused:
        return replace(resident, not_streamed=str(refused))
    return replace(
        resident,
        chosen=streamed[0],
        candidates=[*streamed, *resident.candidates],
        calibrated=False,
    )
