"""What binds a run, and the one change that is predicted to help most: rules over where its time went.

    floor of a kernel = max(operations / measured matmul rate, bytes / measured copy bandwidth), at most its time
    recoverable       = time - floor of what is computed; all of data waits, host gaps and transfers;
                        of empty positions their share of it all, as an update has so many tokens fewer
    gain of a change  = time / (time - what it saves)                                      (Amdahl)

The verdict is the largest recoverable share. What a change saves is said beside each (`changes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from monograph.predict.roofline import KERNELS, MICRO_STEP_S, UPDATE_BYTES
from monograph.profiling.intervals import PARTS, Kernel, Part, Spent

Bound = Literal["compute", "memory", "latency", "unknown"]
Binds = Part | Literal["padding", "nothing"]

LATENCY = 0.15  # a kernel whose floor is a smaller share of its time is bound by neither compute nor memory
NOTHING = 0.05  # a smaller share of the step is not worth a change
# Of eager elementwise time what is left when a compiler fuses it (docs/profile.md has the measurement).
FUSED = 0.45
# Of the host's time between kernels what is left when the step is one graph: as many as kernels are, and so long for
# each graph that is called, of a micro-step or of the update.
LAUNCHED, CALLED_S = KERNELS[True] / KERNELS[False], MICRO_STEP_S
UPDATED = UPDATE_BYTES[True] / UPDATE_BYTES[False]  # of the optimizer's bytes, in one pass
COMPUTED: tuple[Part, ...] = ("matmul", "attention", "loss head", "optimizer", "elementwise", "other")


@dataclass(frozen=True)
class Machine:
    """What the device reaches: measured FLOP/s of matrix products in the run's dtype, and bytes/s of a copy."""

    matmul_flops: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class Situation:
    """How the run is set up, as far as a change could mend it.

    Attributes:
        captured: whether the step is compiled.
        can_compile: whether it could be.
        micro_steps: of an update.
        bf16: what takes how many times as long in bf16 as in the run's dtype; nothing where bf16 is no choice.
        used: share of the positions that hold tokens; packed: what it would be with rows packed.
    """

    captured: bool = True
    can_compile: bool = True
    micro_steps: int = 1
    bf16: Mapping[Part, float] = field(default_factory=dict)
    used: float = 1.0
    packed: float = 1.0


@dataclass(frozen=True)
class Change:
    """One thing to do: a key of the configuration or an action, what it saves of the time for as many tokens, and why.

    Attributes:
        same_training: whether the model that comes out is the same, up to rounding.
    """

    what: str
    why: str
    saved_s: float
    same_training: bool = True


@dataclass(frozen=True)
class Verdict:
    """What binds a run.

    Attributes:
        spent: the update's seconds by part.
        floors: the least each part could take on this device, in seconds; unknown operations keep their time.
        bounds: seconds of the kernels of each part that are compute-, memory- or latency-bound.
        recoverable: seconds by what could be gained, "padding" among them.
        binds: the largest of these, "nothing" if it is a small share.
        changes: what may be done, the best first; those that change the training come last.
    """

    spent: Spent
    floors: Mapping[Part, float]
    bounds: Mapping[Part, Mapping[Bound, float]]
    recoverable: Mapping[str, float]
    binds: Binds
    changes: Sequence[Change]

    @property
    def floor_s(self) -> float:
        """The least that the update could take with all gaps closed."""
        return sum(self.floors.values())

    @property
    def change(self) -> Change | None:
        """The one to make; None if nothing is worth it."""
        return self.changes[0] if self.changes else None

    @property
    def unknown_s(self) -> float:
        """Of what is computed the seconds that have no floor but themselves, as nobody can count the work."""
        return sum(self.spent.parts[part] * _share(self.bounds, part, "unknown") for part in COMPUTED)

    def gain(self, change: Change) -> float:
        """Return how many times as fast the run is predicted to be after a change."""
        return self.spent.total_s / max(self.spent.total_s - change.saved_s, 1e-12)


def floor_s(kernel: Kernel, machine: Machine) -> float:
    """Return the least a kernel could take; its own time where neither operations nor bytes are known."""
    if kernel.flops is None and kernel.moved_bytes is None:
        return kernel.seconds
    return min(kernel.seconds, max(_least(kernel, machine)))


def bound(kernel: Kernel, machine: Machine) -> Bound:
    """Return which of its two floors is the higher, unless both are far below its time."""
    if kernel.flops is None and kernel.moved_bytes is None:
        return "unknown"
    compute, memory = _least(kernel, machine)
    if max(compute, memory) < LATENCY * kernel.seconds:
        return "latency"
    return "compute" if compute > memory else "memory"


def _least(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    compute = (kernel.flops or 0.0) / machine.matmul_flops
    return compute, (kernel.moved_bytes or 0.0) / machine.copy_bytes_per_s


def verdict(found: Spent, kernels: Sequence[Kernel], machine: Machine, situation: Situation) -> Verdict:
    """Return what binds a stretch of work whose seconds are `found`, made of `kernels`.

    Kernels that ran beside one another, or watched by a profiler, took longer than the parts: floors are scaled alike.
    """
    busy: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    least: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    bounds: dict[Part, defaultdict[Bound, float]] = {}
    for kernel in kernels:
        busy[kernel.part] += kernel.seconds
        least[kernel.part] += floor_s(kernel, machine)
        bounds.setdefault(kernel.part, defaultdict(float))[bound(kernel, machine)] += kernel.seconds
    floors: dict[Part, float] = {
        part: found.parts[part] * least[part] / busy[part] if part in COMPUTED and busy[part] else 0.0 for part in PARTS
    }
    if not busy["other"]:
        floors["other"] = found.parts["other"]  # nobody knows what it is, so nobody knows how to win it back
    recoverable: dict[str, float] = {part: found.parts[part] - floors[part] for part in PARTS}
    recoverable["padding"] = (1 - situation.used) * found.total_s
    most = max(recoverable, key=lambda name: recoverable[name])
    binds: Binds = most if recoverable[most] > NOTHING * found.total_s else "nothing"  # type: ignore[assignment]
    return Verdict(found, floors, bounds, recoverable, binds, changes(found, floors, bounds, situation))


def changes(
    found: Spent, floors: Mapping[Part, float], bounds: Mapping[Part, Mapping[Bound, float]], situation: Situation
) -> list[Change]:
    """What may be done, each worth its share, by what it saves; what changes the training is after all others."""
    sync = found.gaps.get("sync", 0.0)
    gaps = found.parts["host gaps"] - sync
    offered = [
        Change(
            "a faster disk for MONOGRAPH_HOME, or cores left free for the thread that makes rows",
            "the device waits for rows", found.parts["data wait"],
        ),
        Change("no .item(), print or comparison of a tensor in the loss", "the host waits for the device", sync),
        Change("what is copied in each step kept on the device", "copies run while nothing else does",
               found.parts["transfers"]),
        Change("data.packing=packed", f"{1 - situation.used:.0%} of the positions are empty",
               (1 - situation.used / situation.packed) * found.total_s),
        *_of_graphs(found, bounds, gaps, situation),
        *_of_numbers(found, bounds, situation),
        *_of_another_training(found, floors),
    ]  # fmt: skip
    worth = [each for each in offered if each.saved_s > NOTHING * found.total_s]
    return sorted(worth, key=lambda each: (not each.same_training, -each.saved_s))


def _share(bounds: Mapping[Part, Mapping[Bound, float]], part: Part, kind: Bound) -> float:
    return bounds[part].get(kind, 0.0) / sum(bounds[part].values()) if part in bounds else 0.0


def _of_graphs(
    found: Spent, bounds: Mapping[Part, Mapping[Bound, float]], gaps: float, situation: Situation
) -> list[Change]:
    """Fewer micro-steps, of which the update counts as one more; and one graph for all operators of each.

    Of an optimizer that multiplies matrices, as Muon does, a graph makes one pass of what lies between the products.
    """
    steps = situation.micro_steps
    larger = Change(
        "a train.micro_batch twice as large", f"the host launches {steps} micro-steps an update",
        gaps * (steps // 2) / (steps + 1),
    )  # fmt: skip
    if situation.captured or not situation.can_compile:
        return [larger]
    launched = max(0.0, gaps * (1 - LAUNCHED) - (steps + 1) * CALLED_S)
    between = found.parts["optimizer"] * (1 - _share(bounds, "optimizer", "compute"))
    saved = launched + found.parts["elementwise"] * (1 - FUSED) + between * (1 - UPDATED)
    return [larger, Change("train.compile=whole", "operators run one by one, each over its own copy", saved)]


def _of_numbers(found: Spent, bounds: Mapping[Part, Mapping[Bound, float]], situation: Situation) -> list[Change]:
    """Half as many bits: faster are products that compute binds, and of the rest what memory binds.

    A kernel that is too small for either floor gains nothing. What is slower is so in all of a part, but for the
    products of an optimizer, as Muon's.
    """
    saved, products = 0.0, _share(bounds, "optimizer", "compute") * found.parts["optimizer"]
    for part, times in situation.bf16.items():
        spent = found.parts[part]
        if part == "optimizer":
            saved += products * (1 - situation.bf16.get("matmul", 1.0))
            spent -= products
        kind: Bound = "memory" if part in ("elementwise", "optimizer") else "compute"
        saved += spent * (1 - times) * (_share(bounds, part, kind) if times < 1 else 1.0)
    return [Change("train.precision=bf16", "products are faster and numbers half as large", saved)]


def _of_another_training(found: Spent, floors: Mapping[Part, float]) -> list[Change]:
    """Return what costs less of a part by doing less of it; worth saying where that part is above its floor."""

    def over(part: Part) -> bool:
        return found.parts[part] - floors[part] > NOTHING * found.total_s

    offered: list[tuple[Part, str, str]] = [
        ("optimizer", "a train.tokens_per_update twice as large", "the optimizer's pass is paid for once an update"),
        ("attention", "a data.sequence_length half as long", "attention's cost grows with the square of a row"),
        ("loss head", "a data.tokenizer with half the vocabulary", "the head is multiplied with every token"),
    ]
    return [Change(what, why, found.parts[part] / 2, same_training=False) for part, what, why in offered if over(part)]
