"""Compare the planned way to train with the fastest measured one: micro-batch, recomputation,
compile scope.

For every configuration the planner's candidates that fit its memory, and the planned one in smaller
micro-batches, are built and take turns at updates of the same tokens; the planner does not know the
measurements. An artificial limit on memory makes sure that there is a choice. Goal: the planned way
reaches 95 % of the fastest one's speed.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any, NamedTuple

import harness
import torch
from systems import sizes

from monograph import planner
from monograph.device import default_device, describe, measured_matmul_flops
from monograph.graph.precision import DTYPES, Precision
from monograph.graph.remat import named
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.planner import Plan, PlanRequest
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Work
from monograph.predict.roofline import update_time
from monograph.resident import Resident

GOAL = 0.95
REMATS = ("none", "pointwise", 0.5, 0.25, "full")


class Case(NamedTuple):
    """A shape, its update, and the available memory as a share of what everything at once would
    take.
    """

    name: str
    config: LlamaConfig
    length: int
    rows: int
    share: float
    precision: str = "bf16"


CASES = (
    Case("small, roomy", sizes(2, 64, 512, 64), 64, 16, 2.0),
    Case("the default model, roomy", sizes(4, 192, 4096, 256), 256, 8, 2.0),
    Case("the default model, tight", sizes(4, 192, 4096, 256), 256, 8, 0.6),
    Case("long rows, tight", sizes(4, 128, 1024, 1024), 1024, 4, 0.5),
    Case("fp32, half of the memory", sizes(6, 128, 1024, 128), 128, 16, 0.5, "fp32"),
)


def request_of(case: Case) -> PlanRequest:
    """Return the question for the planner."""
    training = Work(
        case.config,
        rows=case.rows,
        length=case.length,
        optim=AdamW(),
        window_rows=case.rows,
        packed=False,
    )
    return PlanRequest(
        training, precisions=(case.precision,), scopes=("whole", "blocks"), remats=REMATS
    )


def works(plan: Plan, chosen: Work) -> list[Work]:
    """Return the candidates that fit, and the chosen one in smaller micro-batches."""
    fitting = [each.work for each in plan.candidates if each.peak_memory_bytes <= plan.budget_bytes]
    smaller = [rows for rows in range(1, chosen.rows) if chosen.window_rows % rows == 0]
    return [*fitting, *(replace(chosen, rows=rows) for rows in smaller)]


def way(work: Work) -> str:
    """Return the way's name."""
    return f"{work.rows} rows, {work.compile}, recomputed: {work.remat}"


def engine(work: Work, window: Batch) -> Resident:
    """Return a captured engine that trains in that way."""
    model = Llama(work.config).to(default_device())
    found = Resident(
        model, optim=AdamW(), clip=1.0, precision=Precision(work.precision), remat=named(work.remat),
        micro_batch=work.rows,
    )  # fmt: skip
    if obstacle := found.capture(window, scope=work.compile):  # type: ignore[arg-type]
        raise SystemExit(f"regret.py: {way(work)} cannot be captured: {obstacle}")
    return found


def measure(args: Namespace, case: Case) -> dict[str, Any]:
    """Time the planned way and all others that fit according to the planner."""
    device = default_device()
    everything = Work(
        case.config,
        rows=case.rows,
        length=case.length,
        optim=AdamW(),
        precision=case.precision,
        window_rows=case.rows,
        packed=False,
    )
    most = estimate_bytes(everything)
    # The planner leaves some of the memory alone: what it may fill is to be the share.
    allowed = planner.budget(replace(describe(), free_memory_bytes=2**36)) / 2**36
    machine = replace(describe(), free_memory_bytes=int(case.share * most / allowed))
    rate = measured_matmul_flops(device, DTYPES[case.precision], seconds=0.5)
    plan: Plan = planner.plan(request_of(case), machine, {case.precision: rate})
    if plan.chosen is None:
        raise SystemExit(f"regret.py: {case.name}: {plan.refusal}")
    chosen = plan.chosen.work
    window = {"tokens": torch.randint(case.config.vocab_size, (case.rows, case.length))}
    window["targets"] = window["tokens"].roll(-1, 1)
    ways = works(plan, chosen)
    engines = {way(work): engine(work, window) for work in ways}

    def update(each: Resident) -> None:
        each.accumulate(window)
        each.update()

    times = harness.interleaved(
        {name: lambda e=e: update(e) for name, e in engines.items()}, args.rounds, device
    )
    seconds = {
        name: harness.spread([t.cpu_s if device.type == "cpu" else t.wall_s for t in each])
        for name, each in times.items()
    }
    fastest = min(seconds, key=lambda name: float(seconds[name]["median"]))
    return {
        "case": case.name,
        "ways": len(engines),
        "chosen": way(chosen),
        "fastest": fastest,
        "reached": seconds[fastest]["median"] / seconds[way(chosen)]["median"],
        "predicted_s": {way(work): update_time(work, machine, rate).total_s for work in ways},
        "seconds": seconds,
    }


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cases: tuple[Case, ...] = CASES
    if args.smoke:
        cases, args.rounds = (Case("smoke", sizes(1, 32, 64, 16), 16, 2, 2.0, "fp32"),), 1
    found = harness.result("regret", {"rounds": args.rounds, "goal": GOAL, "smoke": args.smoke})
    harness.print_machine(found)
    for case in cases:
        torch.compiler.reset()
        found["cases"].append(measure(args, case))
        harness.write(args.out, found)
    rows = [
        [c["case"], str(c["ways"]), c["chosen"], c["fastest"], f"{c['reached']:.1%}"]
        for c in found["cases"]
    ]
    harness.print_table(["", "ways", "planned", "fastest", "reached"], rows)
    worst = min(case["reached"] for case in found["cases"])
    print(f"worst {worst:.1%}, goal {GOAL:.0%} {'met' if worst >= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
