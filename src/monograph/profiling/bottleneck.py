"""Name a run's bottleneck and the change that is predicted to help most, by rules over where its
time went.

    floor of a kernel = max(FLOPs / measured matmul rate, bytes / measured copy bandwidth), at most
    its time
    recoverable       = time - floor for parts that compute; all of the data waits, host gaps and transfers;
                        for empty positions their share of the whole, as an update has so many
                        tokens fewer
    gain of a change  = time / (time - time saved)                                         (Amdahl)

The part with the most recoverable time is the bottleneck. `changes` says how much time each change
would save.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from monograph.predict.roofline import KERNELS, MICRO_STEP_S, UPDATE_BYTES
from monograph.profiling.intervals import PARTS, Kernel, Part, Spent

Bound = Literal["compute", "memory", "latency", "unknown"]
Bounds = Mapping[Part, Mapping[Bound, float]]  # seconds of kernels
Binds = Part | Literal["padding", "nothing"]

# A kernel whose floor is a smaller share of its time is bound by neither compute nor memory.
LATENCY = 0.15
NOTHING = 0.05  # a change that saves a smaller share of the step is not worth making
# The share of eager elementwise time that remains when a compiler fuses it (docs/profile.md has the
# measurement).
FUSED = 0.45
# The share of the host's time between kernels that remains when the step is one graph, taken from
# the numbers of kernels; and the host's seconds for each call of a graph: one for each micro-step,
# one for the update.
LAUNCHED = KERNELS[True] / KERNELS[False]
CALLED_S = MICRO_STEP_S
# The share of the optimizer's bytes that remains in one pass.
UPDATED = UPDATE_BYTES[True] / UPDATE_BYTES[False]
COMPUTED: tuple[Part, ...] = (
    "matmul",
    "attention",
    "loss head",
    "optimizer",
    "elementwise",
    "other",
)


class Machine(NamedTuple):
    """The device's rates: measured FLOP/s of matrix products in the run's dtype, and bytes/s of a
    copy.
    """

    matmul_flops: float
    copy_bytes_per_s: float


class Situation(NamedTuple):
    """The parts of a run's setup that a change could improve.

    Attributes:
        captured: whether the step is compiled.
        can_compile: whether it could be compiled.
        micro_steps: the number of micro-steps of an update.
        bf16: time in bf16 over time in the run's dtype, by part; empty where bf16 is no option.
        used: share of the positions that hold tokens.
        packed: the same share if rows were packed.
    """

    captured: bool = True
    can_compile: bool = True
    micro_steps: int = 1
    bf16: Mapping[Part, float] = {}  # noqa: RUF012 (never written to)
    used: float = 1.0
    packed: float = 1.0


@dataclass(frozen=True)
class Change:
    """A change to a run.

    Attributes:
        what: the configuration key or action.
        why: the reason.
        saved_s: seconds saved in an update, for the same number of tokens.
        same_training: whether the trained model is the same, up to rounding.
    """

    what: str
    why: str
    saved_s: float
    same_training: bool = True


@dataclass(frozen=True)
class Verdict:
    """The bottleneck of a run.

    Attributes:
        spent: the update's seconds by part.
        floors: the shortest seconds that each part could take on this device; kernels of unknown
            work keep their time.
        bounds: by part, the seconds of its kernels that are compute-, memory- or latency-bound, or
            unknown.
        recoverable: seconds that could be saved in each part, and by packing ("padding").
        binds: the largest of `recoverable`, or "nothing" if it is a small share of the update.
        changes: possible changes, the best first; those that change the training come last.
    """

    spent: Spent
    floors: Mapping[Part, float]
    bounds: Bounds
    recoverable: Mapping[str, float]
    binds: Binds
    changes: Sequence[Change]

    @property
    def floor_s(self) -> float:
        """Return the shortest seconds that the update could take with all gaps closed."""
        return sum(self.floors.values())

    @property
    def change(self) -> Change | None:
        """Return the change to make; None if none is worth making."""
        return self.changes[0] if self.changes else None

    @property
    def unknown_s(self) -> float:
        """Return the seconds of kernels whose work cannot be counted, so that their floor is their
        own time.
        """
        return sum(
            self.spent.parts[part] * _share(self.bounds, part, "unknown") for part in COMPUTED
        )

    def gain(self, change: Change) -> float:
        """Return how many times as fast the run is predicted to be after a change."""
        return self.spent.total_s / max(self.spent.total_s - change.saved_s, 1e-12)


def floor_s(kernel: Kernel, machine: Machine) -> float:
    """Return a kernel's shortest possible seconds; its own time where neither FLOPs nor bytes are
    known.
    """
    if kernel.flops is None and kernel.moved_bytes is None:
        return kernel.seconds
    return min(kernel.seconds, max(_least(kernel, machine)))


def bound(kernel: Kernel, machine: Machine) -> Bound:
    """Return which of a kernel's two floors is higher, or "latency" if both are far below its time."""
    if kernel.flops is None and kernel.moved_bytes is None:
        return "unknown"
    compute, memory = _least(kernel, machine)
    larger: Bound = "compute" if compute > memory else "memory"
    return "latency" if max(compute, memory) < LATENCY * kernel.seconds else larger


def _least(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    """Return the shortest seconds for a kernel's FLOPs, and for its bytes."""
    return (kernel.flops or 0.0) / machine.matmul_flops, (
        kernel.moved_bytes or 0.0
    ) / machine.copy_bytes_per_s


def verdict(
    spent: Spent, kernels: Sequence[Kernel], machine: Machine, situation: Situation
) -> Verdict:
    """Return the bottleneck of a stretch of work that took `spent` and consists of `kernels`.

    Kernels that overlap or are profiled take longer than `spent` says, so each part's floor is
    scaled by the ratio.
    """
    busy: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    least: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    bounds: dict[Part, defaultdict[Bound, float]] = {}
    for kernel in kernels:
        busy[kernel.part] += kernel.seconds
        least[kernel.part] += floor_s(kernel, machine)
        bounds.setdefault(kernel.part, defaultdict(float))[bound(kernel, machine)] += kernel.seconds
    floors: dict[Part, float] = {
        part: spent.parts[part] * least[part] / busy[part]
        if part in COMPUTED and busy[part]
        else 0.0
        for part in PARTS
    }
    if not busy["other"]:
        # Gaps of unknown cause: none of this time counts as recoverable.
        floors["other"] = spent.parts["other"]
    recoverable: dict[str, float] = {part: spent.parts[part] - floors[part] for part in PARTS}
    recoverable["padding"] = (1 - situation.used) * spent.total_s
    most = max(recoverable, key=lambda name: recoverable[name])
    binds: Binds = most if recoverable[most] > NOTHING * spent.total_s else "nothing"  # type: ignore[assignment]
    return Verdict(
        spent, floors, bounds, recoverable, binds, changes(spent, floors, bounds, situation)
    )


def changes(
    spent: Spent, floors: Mapping[Part, float], bounds: Bounds, situation: Situation
) -> list[Change]:
    """Return the changes worth making, by the time that they save; those that change the training
    come last.
    """
    sync = spent.gaps.get("sync", 0.0)
    gaps = spent.parts["host gaps"] - sync
    offered = [
        Change(
            "a faster disk for MONOGRAPH_HOME, or cores left free for the thread that makes rows",
            "the device waits for rows",
            spent.parts["data wait"],
        ),
        Change(
            "no .item(), print or comparison of a tensor in the loss",
            "the host waits for the device",
            sync,
        ),
        Change(
            "what is copied in each step kept on the device",
            "copies run while nothing else does",
            spent.parts["transfers"],
        ),
        Change(
            "data.packing=packed",
            f"{1 - situation.used:.0%} of the positions are empty",
            (1 - situation.used / situation.packed) * spent.total_s,
        ),
        *_of_graphs(spent, bounds, gaps, situation),
        *_of_numbers(spent, bounds, situation),
        *_of_another_training(spent, floors),
    ]
    worth = [change for change in offered if change.saved_s > NOTHING * spent.total_s]
    return sorted(worth, key=lambda change: (not change.same_training, -change.saved_s))


def _share(bounds: Bounds, part: Part, kind: Bound) -> float:
    return bounds[part].get(kind, 0.0) / sum(bounds[part].values()) if part in bounds else 0.0


def _of_graphs(spent: Spent, bounds: Bounds, gaps: float, situation: Situation) -> list[Change]:
    """Offer fewer micro-steps, and one graph for all operators of a micro-step.

    The host launches an update as if it were one micro-step more. In an optimizer that multiplies
    matrices, such as Muon, a graph fuses only the work between the products.
    """
    steps = situation.micro_steps
    larger = Change(
        "a train.micro_batch twice as large",
        f"the host launches {steps} micro-steps an update",
        gaps * (steps // 2) / (steps + 1),
    )
    if situation.captured or not situation.can_compile:
        return [larger]
    launched = max(0.0, gaps * (1 - LAUNCHED) - (steps + 1) * CALLED_S)
    between = spent.parts["optimizer"] * (1 - _share(bounds, "optimizer", "compute"))
    saved = launched + spent.parts["elementwise"] * (1 - FUSED) + between * (1 - UPDATED)
    return [
        larger,
        Change("train.compile=whole", "operators run one by one, each over its own copy", saved),
    ]


def _of_numbers(spent: Spent, bounds: Bounds, situation: Situation) -> list[Change]:
    """Offer bf16, which speeds up compute-bound products and, in elementwise code, memory-bound
    kernels.

    A latency-bound kernel gains nothing. A slowdown (`situation.bf16` above 1) applies to all of a
    part, except to the products of an optimizer such as Muon, which change as other products do.
    """
    saved = 0.0
    products = _share(bounds, "optimizer", "compute") * spent.parts["optimizer"]
    for part, times in situation.bf16.items():
        part_s = spent.parts[part]
        if part == "optimizer":
            saved += products * (1 - situation.bf16.get("matmul", 1.0))
            part_s -= products
        kind: Bound = "memory" if part in ("elementwise", "optimizer") else "compute"
        saved += part_s * (1 - times) * (_share(bounds, part, kind) if times < 1 else 1.0)
    return [Change("train.precision=bf16", "products are faster and numbers half as large", saved)]


def _of_another_training(spent: Spent, floors: Mapping[Part, float]) -> list[Change]:
    """Offer less work in a part that is above its floor; such a change changes the training."""

    def over(part: Part) -> bool:
        return spent.parts[part] - floors[part] > NOTHING * spent.total_s

    offered: list[tuple[Part, str, str]] = [
        (
            "optimizer",
            "a train.tokens_per_update twice as large",
            "the optimizer's pass is paid for once an update",
        ),
        (
            "attention",
            "a data.sequence_length half as long",
            "attention's cost grows with the square of a row",
        ),
        ("loss head", "half of data.vocab_size", "the head is multiplied with every token"),
    ]
    return [
        Change(what, why, spent.parts[part] / 2, same_training=False)
        for part, what, why in offered
        if over(part)
    ]
