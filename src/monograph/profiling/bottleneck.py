"""Name a run's bottleneck, and the change that is predicted to help most.

The time of an update is split into parts (`monograph.profiling.intervals`). A floor is the shortest time
that something could take. By these rules:

    floor of a kernel   max(FLOPs / the device's rate of products, bytes / its rate of copies), and
                        at most the kernel's time
    recoverable time    of a part that computes: its time - the floors of its kernels
                        of data waits, host gaps and transfers: all of their time
                        of padding: the update's time * the share of positions without a token
    gain of a change    time / (time - saved time)   (Amdahl's law)

The part with the most recoverable time is the bottleneck. `changes` estimates how much time each
change would save.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from monograph.predict.roofline import BLOCK_KERNELS, MICRO_STEP_S, UPDATE_TRAFFIC_BYTES
from monograph.profiling.intervals import PARTS, Kernel, Part, Spent

# What limits a kernel: "compute", its FLOPs; "memory", its bytes; "latency", neither of the two; or
# unknown.
Bound = Literal["compute", "memory", "latency", "unknown"]
# For each part, the seconds of its kernels, by what limits them.
Bounds = Mapping[Part, Mapping[Bound, float]]
Bottleneck = Part | Literal["padding", "nothing"]

# A kernel is bound by compute or by memory if its floor is at least this share of its time.
MIN_BOUND_SHARE = 0.15
# A change is worth making if it saves at least this share of the update.
MIN_SAVED_SHARE = 0.05
# The share of the time of eager elementwise kernels that remains when a compiler fuses them
# (docs/profile.md has the measurement).
FUSED_TIME_SHARE = 0.45
# The share of kernels that remain when the step is one graph. The same share of the host's gaps between
# kernels remains. The keys of `BLOCK_KERNELS` and `UPDATE_TRAFFIC_BYTES` say whether the step is captured.
REMAINING_KERNELS_SHARE = BLOCK_KERNELS[True] / BLOCK_KERNELS[False]
# The host's seconds for a call of a graph. An update calls one for each micro-step and one for the
# optimizer.
GRAPH_CALL_S = MICRO_STEP_S
# The share of the optimizer's bytes that remains when its operators are fused.
FUSED_UPDATE_SHARE = UPDATE_TRAFFIC_BYTES[True] / UPDATE_TRAFFIC_BYTES[False]
# The parts that compute.
COMPUTING_PARTS: tuple[Part, ...] = (
    "matmul",
    "attention",
    "loss head",
    "optimizer",
    "elementwise",
    "other",
)


class Machine(NamedTuple):
    """The device's rates.

    Attributes:
        matmul_flops: FLOP/s of matrix products in the run's dtype, measured.
        copy_bytes_per_s: bytes/s of a copy.
    """

    matmul_flops: float
    copy_bytes_per_s: float


class Situation(NamedTuple):
    """The parts of a run's setup that a change could improve.

    Attributes:
        captured: whether the step is compiled.
        can_compile: whether the step could be compiled.
        micro_steps: the number of micro-batches of an update.
        bf16: by part, the time in bf16 divided by the time in the run's dtype; empty if bf16 is not an
            option.
        used: the share of positions that hold tokens; the others are padding.
        packed: the share of positions that would hold tokens if rows were packed.
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
        what: the key of the configuration to set, or what to do, in words.
        why: the reason, in words.
        saved_s: seconds saved in an update, for the same number of tokens.
        same_training: whether the trained model stays the same, up to rounding.
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
        floors: the shortest seconds that each part could take on this device; the floor of a kernel
            with unknown work is its own time.
        bounds: the seconds of each part's kernels, by what limits them.
        recoverable: seconds that could be saved in each part, and by packing ("padding").
        bottleneck: the key of the largest entry of `recoverable`, or "nothing" if this is a small share
            of the update.
        changes: possible changes, the best first. Those that change the trained model come last.
    """

    spent: Spent
    floors: Mapping[Part, float]
    bounds: Bounds
    recoverable: Mapping[str, float]
    bottleneck: Bottleneck
    changes: Sequence[Change]

    @property
    def floor_s(self) -> float:
        """Return the shortest seconds that the update could take without any gaps."""
        return sum(self.floors.values())

    @property
    def change(self) -> Change | None:
        """Return the change to make; None if none is worth making."""
        return self.changes[0] if self.changes else None

    @property
    def unknown_s(self) -> float:
        """Return the seconds of kernels with unknown work, whose floor is their own time."""
        return sum(
            self.spent.parts[part] * _share(self.bounds, part, "unknown")
            for part in COMPUTING_PARTS
        )

    def gain(self, change: Change) -> float:
        """Return how many times as fast the run is predicted to be after a change."""
        # This is never 0, so that the gain of a change that saves all of the time is finite.
        remaining_s = max(self.spent.total_s - change.saved_s, 1e-12)
        return self.spent.total_s / remaining_s


def floor_s(kernel: Kernel, machine: Machine) -> float:
    """Return a kernel's shortest possible seconds; its own time if its work is unknown."""
    if kernel.flops is None and kernel.moved_bytes is None:
        return kernel.seconds
    return min(kernel.seconds, max(_floors_s(kernel, machine)))


def bound(kernel: Kernel, machine: Machine) -> Bound:
    """Return what limits a kernel."""
    if kernel.flops is None and kernel.moved_bytes is None:
        return "unknown"
    compute_s, memory_s = _floors_s(kernel, machine)
    if max(compute_s, memory_s) < MIN_BOUND_SHARE * kernel.seconds:
        return "latency"
    return "compute" if compute_s > memory_s else "memory"


def _floors_s(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    """Return the shortest seconds for a kernel's FLOPs, and for its bytes."""
    compute_s = (kernel.flops or 0.0) / machine.matmul_flops
    memory_s = (kernel.moved_bytes or 0.0) / machine.copy_bytes_per_s
    return compute_s, memory_s


def verdict(
    spent: Spent, kernels: Sequence[Kernel], machine: Machine, situation: Situation
) -> Verdict:
    """Find the bottleneck of an update.

    Args:
        spent: the update's seconds by part.
        kernels: the kernels of profiled updates.
        machine: the device's rates.
        situation: the run's setup.
    """
    kernel_s: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    kernel_floor_s: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    bounds: dict[Part, defaultdict[Bound, float]] = {}
    for kernel in kernels:
        kernel_s[kernel.part] += kernel.seconds
        kernel_floor_s[kernel.part] += floor_s(kernel, machine)
        bounds.setdefault(kernel.part, defaultdict(float))[bound(kernel, machine)] += kernel.seconds
    floors: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for part in COMPUTING_PARTS:
        if kernel_s[part]:
            # The floors are scaled to the part's time, because the times of its kernels add up to more:
            # kernels overlap, and the profiler slows them down.
            floors[part] = spent.parts[part] * kernel_floor_s[part] / kernel_s[part]
    if not kernel_s["other"]:
        # All of this time is gaps of unknown cause, so none of it counts as recoverable.
        floors["other"] = spent.parts["other"]
    recoverable: dict[str, float] = {part: spent.parts[part] - floors[part] for part in PARTS}
    recoverable["padding"] = (1 - situation.used) * spent.total_s
    largest = max(recoverable, key=lambda name: recoverable[name])
    bottleneck: Bottleneck = "nothing"
    if recoverable[largest] > MIN_SAVED_SHARE * spent.total_s:
        bottleneck = largest  # type: ignore[assignment]
    return Verdict(
        spent=spent,
        floors=floors,
        bounds=bounds,
        recoverable=recoverable,
        bottleneck=bottleneck,
        changes=changes(spent, floors, bounds, situation),
    )


def changes(
    spent: Spent, floors: Mapping[Part, float], bounds: Bounds, situation: Situation
) -> list[Change]:
    """Return the changes that are worth making, by `MIN_SAVED_SHARE`, the largest saving first.

    Changes that change the trained model come last.

    Args:
        spent: the update's seconds by part.
        floors: see `Verdict`.
        bounds: see `Verdict`.
        situation: the run's setup.
    """
    sync_s = spent.gaps.get("sync", 0.0)
    other_gaps_s = spent.parts["host gaps"] - sync_s
    candidates = [
        Change(
            what="a faster disk for MONOGRAPH_HOME, or cores left free for the thread that makes rows",
            why="the device waits for rows",
            saved_s=spent.parts["data wait"],
        ),
        Change(
            what="no .item(), print or comparison of a tensor in the loss",
            why="the host waits for the device",
            saved_s=sync_s,
        ),
        Change(
            what="what is copied in each step kept on the device",
            why="copies run while nothing else does",
            saved_s=spent.parts["transfers"],
        ),
        Change(
            what="data.packing=packed",
            why=f"{1 - situation.used:.0%} of the positions are empty",
            saved_s=(1 - situation.used / situation.packed) * spent.total_s,
        ),
        *_fewer_launches(spent, bounds, other_gaps_s, situation),
        *_narrower_numbers(spent, bounds, situation),
        *_less_work(spent, floors),
    ]
    worth_making = [
        change for change in candidates if change.saved_s > MIN_SAVED_SHARE * spent.total_s
    ]
    return sorted(worth_making, key=lambda change: (not change.same_training, -change.saved_s))


def _share(bounds: Bounds, part: Part, limit: Bound) -> float:
    """Return the share of a part's kernel time that is spent in kernels with this limit."""
    if part not in bounds:
        return 0.0
    return bounds[part].get(limit, 0.0) / sum(bounds[part].values())


def _fewer_launches(
    spent: Spent, bounds: Bounds, gaps_s: float, situation: Situation
) -> list[Change]:
    """Return two changes: fewer micro-batches, and one graph for all operators of a micro-batch.

    Args:
        spent: the update's seconds by part.
        bounds: see `Verdict`.
        gaps_s: seconds of the host's gaps, except waits for the device.
        situation: the run's setup.
    """
    steps = situation.micro_steps
    # The launch of the optimizer counts like that of one more micro-batch.
    launches = steps + 1
    # If micro-batches are twice as large, there are half as many.
    larger_batches = Change(
        what="a train.micro_batch twice as large",
        why=f"the host launches {steps} micro-steps an update",
        saved_s=gaps_s * (steps // 2) / launches,
    )
    if situation.captured or not situation.can_compile:
        return [larger_batches]
    saved_gaps_s = max(0.0, gaps_s * (1 - REMAINING_KERNELS_SHARE) - launches * GRAPH_CALL_S)
    saved_elementwise_s = spent.parts["elementwise"] * (1 - FUSED_TIME_SHARE)
    # In an optimizer that multiplies matrices, such as Muon, a graph fuses only the work between
    # products.
    between_products_s = spent.parts["optimizer"] * (1 - _share(bounds, "optimizer", "compute"))
    saved_optimizer_s = between_products_s * (1 - FUSED_UPDATE_SHARE)
    one_graph = Change(
        what="train.compile=whole",
        why="operators run one by one, each over its own copy",
        saved_s=saved_gaps_s + saved_elementwise_s + saved_optimizer_s,
    )
    return [larger_batches, one_graph]


def _narrower_numbers(spent: Spent, bounds: Bounds, situation: Situation) -> list[Change]:
    """Return the change to bf16.

    Compute-bound products and memory-bound elementwise kernels become faster. Latency-bound kernels
    do not.
    """
    saved_s = 0.0
    # The products of an optimizer such as Muon change as other products do.
    optimizer_products_s = _share(bounds, "optimizer", "compute") * spent.parts["optimizer"]
    for part, ratio in situation.bf16.items():
        part_s = spent.parts[part]
        if part == "optimizer":
            saved_s += optimizer_products_s * (1 - situation.bf16.get("matmul", 1.0))
            part_s -= optimizer_products_s  # the rest is elementwise
        limit: Bound = "memory" if part in ("elementwise", "optimizer") else "compute"
        # If bf16 is faster, it is so only for kernels with this limit. If it is slower, it is so for all.
        changed_share = _share(bounds, part, limit) if ratio < 1 else 1.0
        saved_s += part_s * (1 - ratio) * changed_share
    return [
        Change(
            what="train.precision=bf16",
            why="products are faster and numbers half as large",
            saved_s=saved_s,
        )
    ]


def _less_work(spent: Spent, floors: Mapping[Part, float]) -> list[Change]:
    """Return changes that halve the work of parts whose time is well above their floors.

    Such changes lead to another trained model.
    """
    # (part, what to change, why)
    candidates: list[tuple[Part, str, str]] = [
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
        Change(what=what, why=why, saved_s=spent.parts[part] / 2, same_training=False)
        for part, what, why in candidates
        if spent.parts[part] - floors[part] > MIN_SAVED_SHARE * spent.total_s
    ]
