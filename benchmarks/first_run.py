"""Measure what a preset reaches on Python's own standard library: held-out bits per byte by tokens
seen.

Trains with the default settings for the given numbers of updates and seeds, each with its own full
schedule. Prints the curve, the yardsticks, and the number of tokens after which the curve is below
each of them. The planner's ladder of presets quotes these numbers. Any key of the configuration can
be changed: first_run.py optim.lr=3e-3 model.hidden_size=256
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness

from monograph.config import load
from monograph.data.corpus import Corpus
from monograph.device import clock, default_device, describe, synchronize
from monograph.evaluation import evaluate
from monograph.evaluation.yardsticks import yardsticks
from monograph.loop import train
from monograph.planner import defaults
from monograph.run.progress import Progress
from monograph.session.objectives.texts import TextTask, open_corpus
from monograph.session.plan import RunPlan
from monograph.session.resolve import resolve
from monograph.session.setup import build_run, make_engine

MARGIN = 0.1  # bits per byte below the order-6 model: the goal of the default run
SMOKE = {
    "model.preset": "nano",
    "data.tokenizer": "bytes",
    "data.sequence_length": "32",
    "train.tokens_per_update": "64",
    "train.compile": "none",
}


def plan_for(overrides: dict[str, str], updates: int, seed: int) -> RunPlan:
    """Return the plan with which `monograph train` would train."""
    return resolve(
        load(None, overrides | {"train.updates": str(updates), "train.seed": str(seed)}), describe()
    )


def run(plan: RunPlan, text: Corpus, points: int, rows: int, progress: Progress) -> dict[str, Any]:
    """Train once; return the curve on `rows` held-out rows, and the last point on all of them."""
    built = build_run(plan, TextTask(text), describe())
    updates, tokens = plan.updates, plan.training.tokens_per_update
    engine = make_engine(built, default_device())
    engine.step.schedule = plan.schedule(updates)
    batches = text.batches(tokens, seed=plan.job.seed, pin=engine.step.device.type == "cuda")
    with progress.stage("compile", f"{updates} updates, seed {plan.job.seed}") as stage:
        window = next(text.batches(tokens, seed=plan.job.seed))
        if built.plan.training.compile == "none":
            stage.result = "not asked for"
        elif obstacle := engine.capture(window):
            stage.result = f"eager: {obstacle}"
    curve: list[dict[str, float]] = []
    began, evaluating_s = clock(), 0.0
    every = defaults.interval(updates, points)
    for update in train(engine, batches, updates):
        done = update.index + 1
        if done % every and done != updates:
            continue
        synchronize(engine.step.device)
        paused = clock()
        last = done == updates
        held_out = evaluate(
            engine, text.held_out, batch_rows=engine.micro_batch or 16, limit=None if last else rows
        )
        assert held_out.bits_per_byte is not None  # the loss counts tokens
        curve.append({"tokens": int(update.tokens), "bits_per_byte": held_out.bits_per_byte})
        evaluating_s += clock() - paused
        progress.line(
            "held out", f"{done}/{updates} updates: {held_out.bits_per_byte:.3f} bits per byte"
        )
    batches.close()
    return {
        "updates": updates,
        "seed": plan.job.seed,
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "lr": engine.step.optim.lr,
        "tokens_per_update": tokens,
        "precision": engine.step.precision.name,
        "curve": curve,
        "final": curve[-1],
        "training_s": clock() - began - evaluating_s,
    }


def levels(found: dict[str, float]) -> dict[str, float]:
    """Return the levels to get below: the yardsticks, and the order-6 model's minus the margin."""
    wanted = found | {f"order 6 - {MARGIN}": found["order 6"] - MARGIN}
    return dict(sorted(wanted.items(), key=lambda item: -item[1]))


def crossing(points: Sequence[dict[str, float]], level: float) -> int | None:
    """Return after how many tokens a curve stays below a level, interpolated linearly; None: it
    never does.
    """
    above = [i for i, point in enumerate(points) if point["bits_per_byte"] > level]
    if not above:
        return int(points[0]["tokens"])
    if above[-1] == len(points) - 1:
        return None
    first, second = points[above[-1]], points[above[-1] + 1]
    share = (first["bits_per_byte"] - level) / (first["bits_per_byte"] - second["bits_per_byte"])
    return round(first["tokens"] + share * (second["tokens"] - first["tokens"]))


def shown(tokens: int | None) -> str:
    """Return thousands of tokens as text."""
    return "-" if tokens is None else f"{tokens / 1e3:,.0f}k"


def print_runs(runs: Sequence[dict[str, Any]], lines: dict[str, float]) -> None:
    """Print each run's curve, then a table with the tokens after which each run is below each
    level.
    """
    for each in runs:
        print(f"\n{each['updates']} updates, seed {each['seed']}: tokens, held-out bits per byte")
        harness.print_table(
            ["tokens", "bits/byte", "below"],
            [
                [shown(int(p["tokens"])), f"{p['bits_per_byte']:.3f}", beaten(p, lines)]
                for p in each["curve"]
            ],
        )
    print("\ntokens after which a run is below (its schedule not ended, but for the last point)")
    headers = [
        "updates, seed",
        "tokens",
        "final",
        *(f"{name} {value:.2f}" for name, value in lines.items()),
        "train s",
    ]
    rows = []
    for each in runs:
        crossings = [shown(each["tokens_to_beat"][name]) for name in lines]
        final = each["final"]
        row = [
            f"{each['updates']}, {each['seed']}",
            shown(int(final["tokens"])),
            f"{final['bits_per_byte']:.3f}",
        ]
        rows.append([*row, *crossings, f"{each['training_s']:.0f}"])
    harness.print_table(headers, rows)


def beaten(point: dict[str, float], lines: dict[str, float]) -> str:
    """Return the lowest level that a point is below."""
    below = [name for name, value in lines.items() if point["bits_per_byte"] < value]
    return min(below, key=lambda name: lines[name], default="")


def annealed(runs: Sequence[dict[str, Any]], level: float) -> int | None:
    """Return the tokens of a whole run, schedule included, that reaches the level, by the worst
    seed of each length.
    """
    worst: dict[int, dict[str, float]] = {}
    for each in runs:
        known = worst.get(each["updates"])
        if known is None or each["final"]["bits_per_byte"] > known["bits_per_byte"]:
            worst[each["updates"]] = each["final"]
    return crossing([worst[updates] for updates in sorted(worst)], level)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys of the configuration"
    )
    parser.add_argument("--preset", default="micro")
    parser.add_argument(
        "--updates", type=int, nargs="+", default=[250, 500, 1000, 2000], help="one run each"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--lr", help="the same as optim.lr=")
    parser.add_argument("--tokens-per-update", help="the same as train.tokens_per_update=")
    parser.add_argument("--points", type=int, default=16, help="of a curve")
    parser.add_argument(
        "--rows", type=int, default=128, help="held-out rows behind a point but the last"
    )
    args = parser.parse_intermixed_args()
    overrides = {"model.preset": args.preset} | dict(each.split("=", 1) for each in args.overrides)
    given = {"optim.lr": args.lr, "train.tokens_per_update": args.tokens_per_update}
    overrides |= {key: value for key, value in given.items() if value}
    if args.smoke:
        overrides |= SMOKE
        args.updates, args.seeds, args.points, args.rows = [2, 4], [0], 2, 2
    progress = Progress()
    text = open_corpus(plan_for(overrides, 1, 0).job.reading, progress)
    lines = levels(yardsticks(b"".join(text.train.texts()), b"".join(text.held_out.texts())))
    found = harness.result(
        "first-run", {"overrides": overrides, "rows": args.rows, "smoke": args.smoke}
    )
    found |= {"levels": lines, "fingerprint": text.fingerprint}
    for updates in args.updates:
        for seed in args.seeds:
            case = run(plan_for(overrides, updates, seed), text, args.points, args.rows, progress)
            case["tokens_to_beat"] = {
                name: crossing(case["curve"], value) for name, value in lines.items()
            }
            found["cases"].append(case)
            harness.write(args.out, found)
    found["annealed_tokens_to_beat"] = {
        name: annealed(found["cases"], value) for name, value in lines.items()
    }
    harness.write(args.out, found)
    harness.print_machine(found)
    print_runs(found["cases"], lines)
    print("\ntokens of a whole run that ends below, through the worst seed of each length:")
    harness.print_table(
        ["", "tokens"], [[k, shown(v)] for k, v in found["annealed_tokens_to_beat"].items()]
    )


if __name__ == "__main__":
    main()
