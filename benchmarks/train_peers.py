"""Compare training on a CPU with transformers' Trainer, Lightning, litgpt's pretrain and a plain
loop.

All have the same model, weights, documents, rows of a micro-batch, micro-batches of an update,
AdamW and clipping, in fp32, eager and compiled. Each runs its own loop in its own process, with
interleaved rounds. `overhead` has the smallest kernels, `compute` larger ones, `ragged` documents
with lengths around a quarter of a row: Trainer pads them with its usual collator, litgpt
concatenates them without a mask, Monograph packs them. tokens/s counts real targets only. Next to
each ratio is the relative distance of that system's first gradient from its rows' large-batch
gradient in float64.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from contestants import HOW_TO_INSTALL, SYSTEMS
from peer_litgpt import to_litgpt
from peers import Task, after_each_step
from rounds import Child, ChildFailed, FirstGradient, Orders, distance, interleaved, large_batch
from systems import Shape, sizes
from torch import Tensor

from monograph.data.rows import Rows
from monograph.data.store import Side
from monograph.model.llama import Llama

MODES = ("eager", "compiled")
# With changing lengths peers compile a second time, with a dynamic length.
WARM_UP = {"dense": 5, "ragged": 40}
DOCUMENTS = 512


class Case(NamedTuple):
    """A shape and Monograph's goals for it: at least so many times a system's tokens/s."""

    shape: Shape
    ragged: bool = False
    rows: int = 0  # of Monograph's update if it packs; 0: as many as the other systems
    goals: dict[str, float] = {}


SMALL, LARGE = sizes(2, 64, 256, 32), sizes(4, 192, 2048, 128)
TINY_GOALS = {"trainer": 2.5, "lightning": 2.2, "litgpt": 1.4}
CASES = {
    "overhead": Case(Shape(SMALL, 32, 16, 1), goals=TINY_GOALS),
    "overhead x4": Case(Shape(SMALL, 32, 4, 4), goals=TINY_GOALS),
    "compute": Case(
        Shape(LARGE, 128, 8, 1), goals=dict.fromkeys(("trainer", "lightning", "litgpt"), 1.0)
    ),
    # 24 documents of 43 targets on average are 1,032: as many as 8 packed rows hold.
    "ragged": Case(Shape(LARGE, 128, 8, 3), ragged=True, rows=8, goals={"trainer": 3.0}),
}
SMOKE = {"ragged": Case(Shape(SMALL, 32, 2, 2), ragged=True, rows=2)}


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


def documents(case: Case) -> list[Tensor]:
    """Return random tokens except 0, T + 1 each; ragged: at most T + 1, log-normal, median T / 4,
    sigma 0.9.
    """
    generator, length = torch.Generator().manual_seed(0), case.shape.length
    targets = torch.full((DOCUMENTS,), length)
    if case.ragged:
        spread = torch.randn(DOCUMENTS, generator=generator) * 0.9
        targets = (length / 4 * spread.exp()).round().long().clamp(1, length)
    size = case.shape.config.vocab_size
    return [torch.randint(1, size, (int(n) + 1,), generator=generator) for n in targets]


def rows(case: Case, texts: list[Tensor]) -> Rows:
    """Return the documents as the data room holds them: packed if they are ragged, otherwise one
    per row.
    """
    starts, records = (
        np.cumsum([0, *(len(text) for text in texts)]),
        np.zeros(len(texts), dtype=np.int64),
    )
    side = Side(
        torch.cat(texts).numpy(), starts, records, 0, ("random",), np.array([0, len(texts)])
    )
    return Rows(side, SimpleNamespace(pad_id=0), case.shape.length, packed=case.ragged)  # type: ignore[arg-type]


# ── a system's own process ────────────────────────────────────────────────────────────────────────


def serve(args: Namespace, name: str, system: str, mode: str) -> None:
    """Train in this process whenever stdin asks for it."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # systems may print; stdout is for answers
    torch.set_num_threads(args.threads)
    case = args.cases[name]
    shape, texts = case.shape, documents(case)
    if system == "monograph" and case.rows:
        shape = shape._replace(micro_batches=case.rows // shape.micro_batch)
    task = Task(shape, texts, rows(case, texts), case.ragged, mode == "compiled", lambda: None)
    first = FirstGradient(lambda: task.model)

    def ready() -> dict[str, Any]:
        model = task.model
        assert model is not None
        expected = large_batch(Llama(shape.config, seed=task.seed), task.first)
        if system == "litgpt":
            expected = to_litgpt(expected)
            # Tied, so litgpt names it so.
            expected["lm_head.weight"] = expected.pop("transformer.wte.weight")
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "first_targets": sum(len(targets) for _, targets in task.first),
            "gradient_error": distance(first.gradients, expected),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "versions": SYSTEMS[system].versions,
        }

    orders = Orders(
        reply, WARM_UP["ragged" if case.ragged else "dense"], lambda: int(task.targets), ready
    )
    task.updated = orders.updated
    with first, after_each_step(task):
        SYSTEMS[system].fit(task)


# ── the side that asks ────────────────────────────────────────────────────────────────────────────


def measure(args: Namespace, name: str) -> list[dict[str, Any]]:
    """Measure every system and mode of one case."""
    found, children = start_all(args, name)
    there = {f"{e['system']}, {e['mode']}": e for e in found if "error" not in e}
    trial = {key: child.ask(updates=3)["wall_s"] / 3 for key, child in children.items()}
    updates = {key: max(1, math.ceil(args.round_s / seconds)) for key, seconds in trial.items()}
    answers = interleaved(children, updates, args.rounds)
    for key, entry in there.items():
        entry["updates_per_round"] = updates[key]
        entry["rounds"] = answers[key]
        for clock in ("wall", "cpu"):
            entry[f"targets_per_{clock}_s"] = harness.spread(
                [a["targets"] / a[f"{clock}_s"] for a in answers[key]]
            )
        # Monograph keeps its gradient between updates, the others free it: it counts for all of
        # them.
        kept = entry["gradient_bytes"] if entry["system"] == "monograph" else 0
        entry["step_peak_bytes"] = children[key].ask(watch="bytes")["bytes"] + kept
    for child in children.values():
        child.end()
    if name == "compute":
        for entry in there.values():
            entry["kernels"] = kernels(args, entry)
    return found


def start_all(args: Namespace, name: str) -> tuple[list[dict[str, Any]], dict[str, Child]]:
    """Return an entry for every system and mode of a case, and the warmed-up processes of those
    that could start.
    """
    case = args.cases[name]
    found: list[dict[str, Any]] = []
    children: dict[str, Child] = {}
    for system in args.systems:
        if system == "trainer, own module" and not case.ragged:
            # This module only shows how Trainer treats its loss if documents differ in length.
            continue
        for mode in args.modes:
            entry: dict[str, Any] = {"case": name, "system": system, "mode": mode}
            found.append(entry)
            if missing := SYSTEMS[system].missing:
                entry["error"] = f"not measured: {', '.join(missing)} missing"
                continue
            child = started(args, name, system, mode)
            try:
                entry |= child.answer()
                children[f"{system}, {mode}"] = child
                entry["first_s"] = entry.pop("wall_s")
                print(
                    f"{name}: {system}, {mode} is ready after {entry['first_s']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            except ChildFailed as error:
                entry |= {"error": str(error.args[0]), "stderr": error.args[1]}
    return found, children


def started(args: Namespace, name: str, system: str, mode: str, **environment: str) -> Child:
    """Return a system's process."""
    own = [__file__, "--serve", name, system, mode, "--threads", str(args.threads)]
    own += ["--smoke"] if args.smoke else []
    return Child(own, args.threads, environment)


def kernels(args: Namespace, entry: dict[str, Any]) -> int:
    """Count operators and compiled kernels of one update, in a process that compiles kernels with
    profiling on.
    """
    child = started(
        args,
        entry["case"],
        entry["system"],
        entry["mode"],
        TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE="1",
    )
    child.answer()
    count = int(child.ask(watch="kernels")["kernels"])
    child.end()
    return count


def compare(found: list[dict[str, Any]], goals: dict[str, float]) -> None:
    """Add to each entry Monograph's tokens/s over its own, round by round; Monograph in its faster
    mode.
    """
    ours = [e for e in found if e["system"] == "monograph" and "error" not in e]
    if not ours:
        return
    best = max(ours, key=lambda e: e["targets_per_wall_s"]["median"])
    for entry in found:
        if "error" in entry:
            continue
        for clock in ("wall", "cpu"):
            values = zip(
                best[f"targets_per_{clock}_s"]["values"],
                entry[f"targets_per_{clock}_s"]["values"],
                strict=True,
            )
            entry[f"ratio_{clock}"] = harness.spread([a / b for a, b in values])
        entry["goal"] = goals.get(entry["system"])


HEADERS = [
    "",
    "tokens/s",
    "tokens/CPU-s",
    "Monograph is",
    "in CPU time",
    "goal",
    "gradient error",
    "step MiB",
    "kernels",
]


def row(entry: dict[str, Any]) -> list[str]:
    """Return the table's line of one system and mode."""
    label = f"{entry['case']}: {entry['system']}, {entry['mode']}"
    if "error" in entry:
        return [label, entry["error"][:60], *[""] * (len(HEADERS) - 2)]
    return [
        label,
        f"{entry['targets_per_wall_s']['median']:,.0f}",
        f"{entry['targets_per_cpu_s']['median']:,.0f}",
        harness.shown(entry["ratio_wall"]) if "ratio_wall" in entry else "-",
        harness.shown(entry["ratio_cpu"]) if "ratio_cpu" in entry else "-",
        f"{entry['goal']:.1f}" if entry.get("goal") else "-",
        f"{entry['gradient_error']:.1e}"
        if entry["gradient_error"] < 0.001
        else f"{entry['gradient_error']:.0%}",
        f"{entry['step_peak_bytes'] / 2**20:.1f}",
        str(entry.get("kernels", "-")),
    ]


def verdicts(found: list[dict[str, Any]]) -> list[str]:
    """Return one line for each goal, against the faster mode of the system."""
    lines = []
    for case, system in dict.fromkeys((e["case"], e["system"]) for e in found if e.get("goal")):
        modes = [
            e for e in found if (e["case"], e["system"]) == (case, system) and "ratio_wall" in e
        ]
        least = min(modes, key=lambda e: e["ratio_wall"]["median"])
        met = "met" if least["ratio_wall"]["median"] >= least["goal"] else "missed"
        shown = harness.shown(least["ratio_wall"])
        lines.append(
            f"{case}: {shown} times {system} ({least['mode']}), goal {least['goal']:.1f}: {met}"
        )
    return lines


def parse() -> Namespace:
    """Return the arguments, with the chosen cases as `args.cases`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), dest="names")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=1.0, help="about how long a round is")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--serve", nargs=3, metavar=("CASE", "SYSTEM", "MODE"), help="one system's own process"
    )
    args = parser.parse_args()
    args.cases = SMOKE if args.smoke else {name: CASES[name] for name in CASES}
    args.names = list(SMOKE) if args.smoke else args.names
    if args.smoke:
        args.rounds, args.round_s = 2, 0.0
    return args


def main() -> None:
    """Measure and print; see `--help`."""
    args = parse()
    if args.serve:
        return serve(args, *args.serve)
    settings = {
        "rounds": args.rounds,
        "round_s": args.round_s,
        "threads": args.threads,
        "smoke": args.smoke,
    }
    found = harness.result("train-peers", settings)
    harness.print_machine(found)
    if missing := sorted({name for system in args.systems for name in SYSTEMS[system].missing}):
        print(f"missing: {', '.join(missing)}. {HOW_TO_INSTALL}")
    for name in args.names:
        measured = measure(args, name)
        compare(measured, args.cases[name].goals)
        found["cases"] += measured
        harness.write(args.out, found)
    harness.print_table(HEADERS, [row(entry) for entry in found["cases"]])
    print("\n".join(verdicts(found["cases"])))
    return None


if __name__ == "__main__":
    main()
