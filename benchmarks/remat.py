"""Compare peak bytes and time of a step whose blocks share a budget with torch's own budget for the
whole step's graph.

Each way to train runs in its own process and is compiled at the same share of the bytes that a step
without recomputation keeps for its backward pass:

    torch   the whole step's graph is partitioned with torch._functorch.config.activation_memory_budget = share
    even    every block keeps the same share, Remat.Budget(share), whatever its input takes
    spread  a knapsack over the blocks, `spread` below; inputs are part of the share, as they are in
    torch

"whole" is one graph of the whole step, "blocks" is one graph that all blocks share. Bytes are the
largest sum of live allocations of one micro-step, forward and backward, beyond weights, gradients
and optimizer state. Products are its matrix products and attentions, in FLOPs as the profiler saw
them run. Time is CPU time over that of a step without recomputation, round by round. Goal: at every
share no more bytes than torch's budget. Shares that FILE already has are not measured again.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import torch
import torch._functorch.config as functorch
from rounds import OUR_PRODUCT, Child, interleaved
from torch._inductor.select_algorithm import extern_kernels
from torch.profiler import ProfilerActivity, profile

from monograph.device import clock, default_device
from monograph.graph.capture import capture
from monograph.graph.recompute import record_blocks
from monograph.graph.remat import Choice, Policy, Remat, cheapest_within, pareto_front
from monograph.loss import token_loss
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.step import Step, accumulate

SHARES = (0.75, 0.5, 0.25, 0.1, 0.05)  # those between everything and nothing
SIZES = {"layers": 12, "width": 256, "vocabulary": 2048, "length": 512, "rows": 4}
SMOKE = {"layers": 2, "width": 32, "vocabulary": 64, "length": 16, "rows": 2}


class Way(NamedTuple):
    """A way to train: who chooses what to keep, in which graphs, and at which share of the bytes."""

    name: str
    scope: str
    share: float

    @property
    def label(self) -> str:
        """Return its name in tables."""
        return f"{self.name}, {self.scope}"


NONE = Way("none", "whole", 1.0)


def ways(shares: Sequence[float]) -> list[list[Way]]:
    """Return the ways that take turns, in groups of one share; `NONE` is in each group."""
    least = [
        Way("torch", "whole", 0.0),
        *(Way("full", scope, 0.0) for scope in ("whole", "blocks")),
    ]
    between = [
        [
            Way("torch", "whole", share),
            Way("spread", "whole", share),
            Way("even", "blocks", share),
            Way("spread", "blocks", share),
        ]
        for share in sorted(shares)
    ]
    most = [
        Way("none", "blocks", 1.0),
        *(Way("pointwise", scope, 1.0) for scope in ("whole", "blocks")),
    ]
    return [least, *between, most]


# ── in a way's own process ────────────────────────────────────────────────────────────────────────


class Trained:
    """A step captured in one way, and a micro-batch."""

    def __init__(self, way: Way, sizes: dict[str, int]) -> None:
        shape = LlamaConfig(
            vocab_size=sizes["vocabulary"],
            hidden_size=sizes["width"],
            intermediate_size=-(-8 * sizes["width"] // 3 // 16) * 16,
            num_hidden_layers=sizes["layers"],
            num_attention_heads=4,
            max_position_embeddings=sizes["length"],
        )
        model = Llama(shape).to(default_device())
        torch.manual_seed(0)
        tokens = torch.randint(
            shape.vocab_size, (sizes["rows"], sizes["length"]), device=default_device()
        )
        self.batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
        if way.name == "torch":
            functorch.activation_memory_budget = way.share
        self.step = Step(model, remat=policy(way, model, self.batch))
        capture(self.step, scope=way.scope)  # type: ignore[arg-type]

    def __call__(self) -> None:
        """Run one micro-step."""
        accumulate(self.step, [self.batch])

    def measured(self) -> dict[str, Any]:
        """Return compile times, the gradient's norm, and bytes and FLOPs of a later micro-step."""
        compiling_cpu_s = harness.timed(self, default_device()).cpu_s
        squares = [float(plane.grad.double().square().sum()) for plane in self.step.planes]
        return {
            "compiling_cpu_s": compiling_cpu_s,
            "grad_norm": sum(squares) ** 0.5,
            "peak_bytes": harness.live_peak_bytes(self, default_device()),
            "product_flops": product_flops(self),
        }

    def timed(self, steps: int) -> dict[str, float]:
        """Return the seconds of some micro-steps."""
        wall, cpu = clock(), time.process_time()
        for _ in range(steps):
            self()
        return {"wall_s": clock() - wall, "cpu_s": time.process_time() - cpu}


def policy(way: Way, model: Llama, batch: dict[str, torch.Tensor]) -> Policy:
    """Return what the blocks of a model keep."""
    if way.name == "even":
        return Remat.Budget(way.share)
    if way.name == "spread":
        recordings = list(
            record_blocks(model, lambda twin: token_loss(twin, batch), captured=True).values()
        )
        first, inputs = recordings[0], sum(recording.input_bytes for recording in recordings)
        limit = way.share * (len(recordings) * first.stored_bytes + inputs) - inputs
        found = spread(first.choices(), first.stored_bytes, len(recordings), max(0, int(limit)))
        assert found is not None  # shares from 0 on are never refused
        return found
    return {"pointwise": Remat.Pointwise(), "full": Remat.Full()}.get(way.name, Remat.Off())


def product_flops(run: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products and attentions of one call; a multiplication and an
    addition are two.

    Attention's backward pass is left out: it is never computed twice.
    """
    found = list[int]()
    # Captured graphs call it without torch's dispatcher.
    ours = getattr(extern_kernels, OUR_PRODUCT, None)
    if ours is not None:

        @functools.wraps(ours)
        def counted(left: torch.Tensor, right: torch.Tensor, **out: Any) -> Any:
            found.append(2 * left.numel() * right.shape[1])
            return ours(left, right, **out)

        setattr(extern_kernels, OUR_PRODUCT, counted)
    try:
        with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True
        ) as watching:
            run()
    finally:
        if ours is not None:
            setattr(extern_kernels, OUR_PRODUCT, ours)
    # An operator that a dispatch mode intercepts is counted where it then runs, if it does.
    ran = [
        e
        for e in watching.events()
        if all(child.name != "PythonDispatchMode" for child in e.cpu_children)
    ]
    return sum(found) + sum(event_flops(event.name, event.input_shapes) for event in ran)


def event_flops(name: str, shapes: list[list[int]]) -> int:
    """Return the FLOPs of an operator by the shapes of its arguments; 0 if it is not a product."""
    if name in ("aten::mm", "aten::bmm"):
        rows, columns = shapes[:2]
        return 2 * torch.Size(rows).numel() * columns[-1]
    if name == "aten::addmm":
        return 2 * torch.Size(shapes[1]).numel() * shapes[2][-1]
    if name == "mkldnn::_linear_pointwise":
        return 2 * torch.Size(shapes[0]).numel() * shapes[1][0]
    if name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward"):
        return 4 * torch.Size(shapes[0]).numel() * shapes[1][-2]
    return 0


# ── in the process that compares ──────────────────────────────────────────────────────────────────


def begun(way: Way, sizes: dict[str, int]) -> tuple[Child, dict[str, Any]]:
    """Start a way's process; return it, compiled, with its measurements."""
    child = Child(
        [__file__, "--child", json.dumps([*way]), json.dumps(sizes)], torch.get_num_threads(), {}
    )
    return child, child.answer()


def measure(
    group: Sequence[Way], args: Namespace, none: tuple[Child, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return bytes, FLOPs and time of the ways of a group, relative to a step that recomputes
    nothing.
    """
    children = {NONE.label: none[0]}
    found = {}
    for way in group:
        children[way.label], found[way] = begun(way, args.sizes)
    times = interleaved(children, dict.fromkeys(children, 1), args.rounds)
    for way in group:
        children[way.label].end()
    kept = none[1]
    return [
        {
            **way._asdict(),
            "label": way.label,
            **answer,
            "peak_over_none": answer["peak_bytes"] / kept["peak_bytes"],
            "recomputed_flops": answer["product_flops"] / kept["product_flops"] - 1,
            "grad_norm_difference": abs(answer["grad_norm"] / kept["grad_norm"] - 1),
            "time_over_none": {
                kind: harness.spread(
                    [
                        a[kind] / b[kind]
                        for a, b in zip(times[way.label], times[NONE.label], strict=True)
                    ]
                )
                for kind in ("wall_s", "cpu_s")
            },
        }
        for way, answer in found.items()
    ]


def verdict(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return our ways' bytes over torch's at the same share, and torch's points that none of our
    points dominates.

    A point is dominated by one with no more bytes and no more FLOPs.
    """
    theirs = {case["share"]: case for case in cases if case["name"] == "torch"}
    ours = [case for case in cases if case["name"] != "torch"]
    same_share = [case for case in ours if case["share"] in theirs]
    over: dict[str, dict[str, float]] = {case["label"]: {} for case in same_share}
    for case in same_share:
        over[case["label"]][f"{case['share']:g}"] = (
            case["peak_bytes"] / theirs[case["share"]]["peak_bytes"]
        )
    undominated = [
        share
        for share, case in theirs.items()
        if not any(
            mine["peak_bytes"] <= case["peak_bytes"]
            and mine["product_flops"] <= case["product_flops"]
            for mine in ours
        )
    ]
    return {"bytes_over_torch": over, "undominated": undominated}


def row(case: dict[str, Any]) -> list[str]:
    """Return the table's line of one way at one share."""
    return [
        f"{case['share']:g} {case['label']}",
        f"{case['peak_bytes'] / 2**20:.1f}",
        f"{case['peak_over_none']:.3f}",
        f"{case['recomputed_flops']:.1%}",
        *(harness.shown(case["time_over_none"][kind]) for kind in ("cpu_s", "wall_s")),
        f"{case['grad_norm_difference']:.0e}",
        f"{case['compiling_cpu_s']:.0f}",
    ]


HEADERS = [
    "share, way",
    "MiB",
    "of none",
    "FLOPs again",
    "CPU time over none",
    "wall",
    "gradient",
    "compiling s",
]


def main() -> None:
    """Measure and print; see `--help`."""
    if sys.argv[1:2] == ["--child"]:
        trained = Trained(Way(*json.loads(sys.argv[2])), json.loads(sys.argv[3]))
        print(json.dumps(trained.measured()), flush=True)
        for order in sys.stdin:
            print(json.dumps(trained.timed(json.loads(order)["updates"])), flush=True)
        return
    parser = harness.arguments(__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.smoke:
        args.shares, args.rounds = [0.3], 1
    args.sizes = SMOKE if args.smoke else {name: getattr(args, name) for name in SIZES}
    found = harness.result("remat", {**args.sizes, "rounds": args.rounds, "smoke": args.smoke})
    harness.print_machine(found)
    if (
        args.out
        and args.out.exists()
        and (earlier := json.loads(args.out.read_text()))["settings"] == found["settings"]
    ):
        found = earlier
    measured = {Way(case["name"], case["scope"], case["share"]) for case in found["cases"]}
    none = begun(NONE, args.sizes)
    for group in ways(args.shares):
        if measured.issuperset(group):
            continue
        found["cases"] += measure(group, args, none)
        found["none"], found["verdict"] = none[1], verdict(found["cases"])
        harness.write(args.out, found)
        print(f"measured at {group[-1].share:g}", flush=True)
    none[0].end()
    harness.print_table(HEADERS, map(row, found["cases"]))
    for label, over in found["verdict"]["bytes_over_torch"].items():
        ratios, worst = (
            ", ".join(f"{share} {ratio:.3f}" for share, ratio in over.items()),
            max(over.values()),
        )
        print(f"{label}: bytes over torch's {ratios}; goal 1 {'met' if worst <= 1 else 'missed'}")
    print(
        f"torch's points that none of ours dominates: {found['verdict']['undominated'] or 'none'}"
    )


def spread(
    curve: Sequence[Choice], off_bytes: int, layers: int, limit_bytes: int
) -> Remat.PerLayer | None:
    """Return policies of equal blocks that keep at most `limit_bytes` together and recompute the
    fewest FLOPs.

    This is a knapsack over the blocks: each keeps everything, or one choice of the curve that all
    share. Ties in FLOPs go to the fewest bytes, except that nothing is recomputed if everything
    fits.

    Args:
        curve: the choices of one block, `monograph.graph.remat.Recording.choices`.
        off_bytes: bytes that a block keeps if nothing is recomputed.
        layers: how many blocks.
        limit_bytes: bytes that all blocks together may keep, not counting their inputs.

    Returns:
        The policies; blocks that recompute the most come first, because their backward passes are
        the last. None if even `Remat.Full` keeps too much, which means a limit below 0.
    """
    # Captured, keeping all products costs no FLOPs either and fewer bytes: the knapsack would
    # recompute needlessly.
    if layers * off_bytes <= limit_bytes:
        return Remat.PerLayer((Remat.Off(),) * layers)
    smaller = [choice for choice in curve if choice.stored_bytes < off_bytes]
    options = [
        choice._replace(selection=(Remat.Budget(choice.stored_bytes / off_bytes),))
        for choice in smaller
    ]
    options.append(Choice(off_bytes, 0, (Remat.Off(),)))
    best = cheapest_within(pareto_front([options] * layers), limit_bytes)
    if best is None:
        return None
    return Remat.PerLayer(
        tuple(sorted(best.selection, key=lambda policy: getattr(policy, "fraction", 1.0)))
    )


if __name__ == "__main__":
    main()
