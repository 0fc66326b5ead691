"""Decide what the settings leave open: length, intervals, learning rate and optimizer of a run, and
how it is trained.

How: its micro-batch, recomputation, compile scope and precision, with the reason why each other
combination lost. The search uses a closed form (`planner.candidates`). Then the winner's memory is
traced (`predict.footprint`), and if it does not fit, that of the next candidate. If nothing fits,
the plan shows the candidate that needs least.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from monograph.device import Device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.model.families import FIRST_FAMILY
from monograph.optim import OPTIMIZERS
from monograph.planner.candidates import (
    ByDtype,
    Candidate,
    Request,
    Ways,
    described,
    of_way,
    slower,
    ways,
)
from monograph.planner.streaming import Limits, streamed
from monograph.planner.traces import traced_bytes
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Compile, Work
from monograph.predict.roofline import Calibration
from monograph.report.quantities import gibibytes


class Default(NamedTuple):
    """The model that is trained where the settings name none, with measured figures
    (benchmarks/first_run.py).

    Attributes:
        preset: the preset's name.
        vocabulary: entries of its tokenizer.
        tokens_per_update: tokens of an update; a model of this size learns most per token from
            small updates.
        tokens_to_beat_gzip: training tokens of Python's standard library after which held-out bits
            per byte are below gzip's.
        tokens: fewest training tokens of a default run; after them held-out bits per byte are 0.1
            below those of an order-6 byte model.
    """

    preset: str
    vocabulary: int
    tokens_per_update: int
    tokens_to_beat_gzip: int
    tokens: int


DEFAULT = Default("micro", 4096, 2048, 600_000, 1_300_000)
# The rate of micro was measured (dev/log.md) and is used for nano too; the others are those of the
# GPT-3 models of the nearest size (Brown et al. 2020, arXiv 2005.14165, table 2.1).
LEARNING_RATES = {
    "nano": 2e-3,
    "micro": 2e-3,
    "124m": 6e-4,
    "llama-179m": 6e-4,
    "1b": 2e-4,
    "8b": 1.2e-4,
}
# The decay of a preset for which the optimizer has `tuned` fields is DECAY for each epoch, as a text
# that is read again is learned by heart, and at most MOST_DECAY (docs/training.md).
DECAY, MOST_DECAY = 0.3, 1.0
# Rates for existing weights. Adapters need ten times the rate of all weights (Schulman et al. 2025,
# "LoRA Without Regret").
FINETUNING_RATES = {"all": 2e-5, "adapters": 2e-4}
# Of these rates, for rewards and preferences: a careful choice, as answers say less than texts.
JUDGED_SHARE = 0.1
UNKNOWN_RATE = 1e-3  # for a shape without a name
# Epochs after which a run by the clock ends, and those where the decay is MOST_DECAY
# (docs/training.md).
MOST_EPOCHS, MOST_DECAYED_EPOCHS = 8, 16
# From this many layers on, one graph for all of them takes minutes to compile
# (benchmarks/scopes.py).
DEEP = 16
# The share of a run's time that evaluations, samples and checkpoints leave for updates.
UPDATES_SHARE = 0.95
# The seconds that are kept for what follows the training of a run whose whole time is limited:
# saving, the report. They are computed and loaded like the program's start, which tells how busy
# the machine is; at most a share of the time.
END_S = 10.0
END_STARTS = 1.5
MOST_END = 0.25
CURVE_ROWS = 64  # held-out rows scored for a point of the curve; the last point uses all
EVALUATIONS, CHECKPOINTS = 12, 6  # per run, where the settings leave it open


def default_seconds(minutes: float, seconds_per_update: float) -> float:
    """Return the seconds of the default run: `minutes`, or as many as DEFAULT.tokens take on a slow
    machine.
    """
    needed = DEFAULT.tokens / DEFAULT.tokens_per_update * seconds_per_update / UPDATES_SHARE
    return max(60 * minutes, needed)


def updates_for(seconds: float, seconds_per_update: float, most: int) -> int:
    """Return the number of updates that fit the time, at least 1 and at most `most`."""
    return max(1, min(most, int(seconds / seconds_per_update)))


def end_s(start_s: float, limit_s: float) -> float:
    """Return the seconds to keep for what follows the training of a run that may take `limit_s` in
    all.

    Args:
        start_s: seconds that the program took to start; 0 if that is not known.
        limit_s: the limit.
    """
    return min(END_STARTS * start_s or END_S, MOST_END * limit_s)


def in_whole_rows(tokens: int, length: int) -> int:
    """Return the tokens of the whole rows that so many tokens fill."""
    return tokens // length * length


def updates_of(tokens: int, tokens_per_update: int) -> int:
    """Return the number of updates that have about `tokens` tokens in all, at least 1."""
    return max(1, round(tokens / tokens_per_update))


def most_epochs(weight_decay: float) -> int:
    """Return how often a run that is limited by time reads its text at most."""
    return MOST_DECAYED_EPOCHS if weight_decay >= MOST_DECAY else MOST_EPOCHS


def most_updates(rows_per_epoch: int, rows_per_update: int, weight_decay: float) -> int:
    """Return the most updates of a run that is limited by time."""
    return most_epochs(weight_decay) * -(-rows_per_epoch // rows_per_update)


def likely_updates(
    minutes: float, seconds_per_update: float, rows_per_epoch: int, rows_per_update: int
) -> int:
    """Return the number of updates of a run by the clock, from a prediction of their seconds."""
    most = most_updates(rows_per_epoch, rows_per_update, MOST_DECAY)
    return updates_for(UPDATES_SHARE * 60 * minutes, seconds_per_update, most)


# Tokens of a row: enough for the texts of a small new model, and of most conversations for one that
# exists.
NEW_LENGTH, EXISTING_LENGTH = 256, 1024


def sequence_length(fresh: bool, positions: int | None, tokens_per_update: int | None) -> int:
    """Return the tokens of a row.

    Args:
        fresh: whether the model's weights are new.
        positions: positions that the model has; None if that is unknown.
        tokens_per_update: tokens of an update; None if they are not given.
    """
    longest = NEW_LENGTH if fresh or positions is None else EXISTING_LENGTH
    limits = [longest, positions, tokens_per_update]
    return min(limit for limit in limits if limit is not None)


# What models of a size are trained with, for a plan of a card that is named: (parameters, tokens of
# a row, tokens of an update). The first is the default model. Updates are those of GPT-3's models
# (Brown et al. 2020, arXiv 2005.14165, table 2.1), as are rows of 2,048 tokens; 4,096 are Llama
# 2's, and Llama 3's at first (arXiv 2307.09288, 2407.21783).
USUAL_SIZES = (
    (2_361_024, NEW_LENGTH, DEFAULT.tokens_per_update),
    (125_000_000, 2048, 2**19),
    (1_300_000_000, 4096, 2**20),
    (6_700_000_000, 4096, 2**21),
)
# Rows of an update of existing weights: QLoRA's 16 (Dettmers et al. 2023, arXiv 2305.14314, table
# 9) for adapters, and for all weights the 128 of Stanford Alpaca (Taori et al. 2023).
ADAPTED_ROWS, FINETUNED_ROWS = 16, 128
# Training tokens per parameter of a new model, with which a given number of FLOPs gives the lowest
# loss (Hoffmann et al. 2022, arXiv 2203.15556).
TOKENS_PER_PARAMETER = 20


def usual_sizes(parameters: int) -> tuple[int, int]:
    """Return the tokens of a row and of an update with which new models of about this size are
    trained.
    """
    _, length, tokens = min(USUAL_SIZES, key=lambda usual: abs(math.log(usual[0] / parameters)))
    return length, tokens


def warmup(updates: int) -> int:
    """Return the updates of the warm-up: 5 % of the run, at least 10 (or half of a shorter run), at
    most 2,000.
    """
    return min(2000, max(min(10, updates // 2), updates // 20))


def interval(updates: int, times: int) -> int:
    """Return the number of updates between events that happen about `times` times in a run."""
    return max(1, -(-updates // times))


def optimizer(fresh: bool) -> str:
    """Return "muon" for fresh weights, as the default run gains 0.07 bits per byte (dev/log.md),
    else "adamw".
    """
    return "muon" if fresh else "adamw"


def scopes(layers: int) -> tuple[Compile, ...]:
    """Return the compile scopes, best first: for a deep model "blocks", a graph that all blocks
    share.
    """
    return ("blocks", "whole", "none") if layers >= DEEP else ("whole", "blocks", "none")


def precision(device: Device) -> str:
    """Return "bf16" if the device computes it in hardware, else "fp32"."""
    return "bf16" if device.has_bf16 else "fp32"


def known_learning_rate(preset: str, optimizer: str) -> float:
    """Return the peak learning rate of a preset for an optimizer, which was searched for as a Llama
    alone.
    """
    kind = OPTIMIZERS[optimizer]
    usual = LEARNING_RATES[preset] * kind.rate_factor
    rate: float = kind.tuned.get(preset, {}).get("lr", usual)
    return rate


def tuned_fields(preset: str, family: str, optimizer: str, epochs: int = 1) -> dict[str, Any]:
    """Return the fields, without the rate, in which a new model's optimizer differs from its class's
    defaults.

    They are for a Llama alone: some other families, such as Gemma, scale what the embedding gives.
    """
    tuned = OPTIMIZERS[optimizer].tuned.get(preset)
    if tuned is None or family != FIRST_FAMILY:
        return {}
    fields = {name: value for name, value in tuned.items() if name != "lr"}
    return {**fields, "weight_decay": min(MOST_DECAY, round(DECAY * max(1, epochs), 6))}


# The share of a card's memory that tensors may take, as gaps between them take some; and the bytes
# of the CUDA context.
FILLED = 0.97
CONTEXT_BYTES = 600 * 2**20
# The share of a host's free memory that tensors may take: the process also holds libraries and
# text, and other programs run.
FILLED_HOST = 0.5
# The closed form has been wrong by this factor, so a candidate closer to the limit is traced.
DOUBT = 2.0
MOST_TRACES = 4
# An untraced candidate that may need less than the best traced one, but by less than this factor,
# is not traced.
NEAR = 1.01


@dataclass(frozen=True)
class Plan:
    """A choice among the candidates.

    Attributes:
        device: the device that it is for.
        budget_bytes: bytes that tensors may take there.
        chosen: the choice; None if nothing fits.
        candidates: all candidates; the first is the chosen one, or else the one that comes nearest.
        calibrated: whether times are corrected by those of earlier runs on the device.
        not_streamed: why streaming does not fit either; empty where it was not tried.
    """

    device: Device
    budget_bytes: int
    chosen: Candidate | None
    candidates: list[Candidate]
    calibrated: bool = False
    not_streamed: str = ""

    @property
    def nearest(self) -> Candidate:
        """Return the chosen candidate, or the one that exceeds the memory by least."""
        return self.candidates[0]

    @property
    def refusal(self) -> str:
        """Return one line that says which way comes nearest, and how much more memory it needs."""
        if not self.candidates:
            return self.not_streamed
        best = self.nearest
        short = self.nearest.peak_memory_bytes - self.budget_bytes
        return (
            f"nothing fits {gibibytes(self.budget_bytes)} of {self.device.name}: the nearest, {described(best.work)}, "
            f"needs {gibibytes(best.peak_memory_bytes)}, {gibibytes(short)} more; use a smaller model or "
            "sequence_length, or a device with more memory"
            f"{'; train.memory = stream: ' if self.not_streamed else ''}{self.not_streamed}"
        )


def budget(device: Device) -> int:
    """Return the bytes that tensors may take on a device.

    Raises:
        UsageError: the device has no memory left.
    """
    free = device.free_memory_bytes
    usable = int(FILLED * (free - CONTEXT_BYTES) if device.type == "cuda" else FILLED_HOST * free)
    if usable <= 0:
        raise UsageError(
            f"{gibibytes(free)} of memory leaves nothing for tensors: give more, such as 24GiB"
        )
    return usable


def plan(
    request: Request, device: Device, peak_flops: ByDtype, calibration: Calibration | None = None
) -> Plan:
    """Return the fastest combination that fits and has the numerics asked for.

    Args:
        request: the training, and the choices that are open.
        device: the device to train on.
        peak_flops: FLOP/s by precision, from the datasheet, or measured for a CPU.
        calibration: time and memory of earlier runs on the device.

    Raises:
        UsageError: the device has no memory left.
    """
    limit = budget(device)
    known = (
        {name: calibration.slowness(device, name) for name in request.precisions}
        if calibration
        else {}
    )
    slowness = {precision: ratio for precision, ratio in known.items() if ratio}
    corrections: dict[Ways, float] = {}
    traced: dict[Work, Candidate] = {}

    def candidates(limit: int) -> list[Candidate]:
        each_way = (
            of_way(request, way, device, limit, corrections.get(way, 1.0), peak_flops, slowness)
            for way in ways(request)
        )
        return [
            traced.get(candidate.work, candidate) for of_one in each_way for candidate in of_one
        ]

    while True:
        tried = candidates(limit)
        if len(traced) == MOST_TRACES:
            best = _wanted([*traced.values()], traced, limit)
            break
        best = _wanted(tried, traced, limit)
        if best.work in traced or best.peak_memory_bytes * DOUBT <= limit:
            break
        # The last trace is for the smallest micro-batch that needs least.
        if len(traced) == MOST_TRACES - 1:
            smallest = sorted(candidates(0), key=lambda candidate: estimate_bytes(candidate.work))
            best = next((candidate for candidate in smallest if candidate.work not in traced), best)
        by_origin = traced_bytes(best.work)
        residual = calibration.residual(device, best.work, by_origin) if calibration else 0
        truth = traced[best.work] = best.of_trace(by_origin, residual)
        way = best.work.precision, best.work.compile, best.work.remat
        corrections[way] = truth.peak_memory_bytes / estimate_bytes(best.work)
    fits = best.peak_memory_bytes <= limit
    rest = sorted((one for one in tried if one.work != best.work), key=attrgetter("update_s"))
    first = replace(best, why="" if fits else _too_large(best, limit))
    others = [replace(candidate, why=_why(candidate, best, limit)) for candidate in rest]
    return Plan(
        device, limit, first if fits else None, [first, *others], best.work.precision in slowness
    )


def _wanted(tried: list[Candidate], traced: Mapping[Work, Candidate], limit: int) -> Candidate:
    """Return the fastest candidate that fits.

    If none fits, return the one that needs least, or the best traced one if that needs hardly more.
    """
    if fitting := [candidate for candidate in tried if candidate.peak_memory_bytes <= limit]:
        return min(fitting, key=lambda candidate: candidate.update_s)
    memory = attrgetter("peak_memory_bytes")
    least = min(tried, key=memory)
    near_bytes = NEAR * least.peak_memory_bytes
    near = [candidate for candidate in traced.values() if candidate.peak_memory_bytes <= near_bytes]
    return min(near, key=memory, default=least)


def _why(candidate: Candidate, best: Candidate, limit: int) -> str:
    if candidate.peak_memory_bytes > limit:
        return _too_large(candidate, limit)
    if candidate.update_s < 0.995 * best.update_s:
        return "not certain to fit"
    return slower(candidate.update_s / best.update_s)


def _too_large(candidate: Candidate, limit: int) -> str:
    return f"{gibibytes(candidate.peak_memory_bytes - limit)} too large"


def streamed_or_resident(
    request: Request,
    device: Device,
    peak_flops: ByDtype,
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
        memory: where weights may live; with "auto" they are streamed only if nothing else fits.
        limits: memory, disk and link for streaming; by default this machine's.

    Raises:
        UsageError: the device has no memory left.
    """
    streams = memory == "stream"
    resident = (
        Plan(device, budget(device), None, [])
        if streams
        else plan(request, device, peak_flops, calibration)
    )
    resident_only = (
        request.scopes == ("whole",)
        or request.remats == ("offload",)
        or request.training.lora is not None
    )
    if memory == "device" or resident.chosen or resident_only:
        return resident
    try:
        ways = streamed(
            request, device, limits or Limits.here(device, resident.budget_bytes), peak_flops
        )
    except OutOfDeviceMemory as refused:
        return replace(resident, not_streamed=str(refused))
    return replace(
        resident, chosen=ways[0], candidates=[*ways, *resident.candidates], calibrated=False
    )
