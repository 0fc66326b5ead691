"""Compare recipes of training: variants of the default run, as pairs with it, over seeds and texts.

A variant changes keys of the configuration (`optim.lr=1e-2`) or fields of the optimizer that have
no key: `rule.momentum=0.9`, and `group.PATTERN=FACTOR` for a learning rate of its own. Variant and
default have the same seed, so the same weights and order of rows, and the same number of tokens;
each run is a process with one thread. The effect is the mean of the pairs' differences in held-out
bits per byte, with its standard error if there are two or more; below 0 is better. Whether a
variant costs time is seen in the column of seconds. Runs that are in `--out` already are not
repeated.

    python benchmarks/recipe.py --variant "no floor: optim.min_lr_ratio=0" --text stdlib my_texts/
    --out found.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

DEFAULT = "default"
SMOKE = "model.preset=nano data.tokenizer=bytes data.sequence_length=32 train.tokens_per_update=64 train.compile=none"


def trained(source: str, changes: list[str], updates: int, seed: int) -> dict[str, Any]:
    """Train once in this process and return the held-out bits per byte and the seconds of the
    updates.
    """
    from first_run import plan_for, run

    from monograph.optim import Group
    from monograph.run.progress import Progress
    from monograph.session.objectives.texts import open_corpus

    values = dict(change.split("=", 1) for change in changes)
    keys = {
        name: value for name, value in values.items() if not name.startswith(("rule.", "group."))
    }
    plan = plan_for({"model.preset": "micro", "data.source": source} | keys, updates, seed)
    rule = {
        name.removeprefix("rule."): json.loads(v)
        for name, v in values.items()
        if name.startswith("rule.")
    }
    groups = [
        Group(name.removeprefix("group."), float(v))
        for name, v in values.items()
        if name.startswith("group.")
    ]
    changed = dataclasses.replace(
        plan.training.optim, **rule, groups=(*groups, *plan.training.optim.groups)
    )
    progress = Progress()
    text = open_corpus(plan.job.reading, progress)
    found = run(plan.with_training(replace(plan.training, optim=changed)), text, 1, 1, progress)
    return {"bits_per_byte": found["final"]["bits_per_byte"], "training_s": found["training_s"]}


def spawn(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with what `trained` finds in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"recipe.py: {case}: {done.stderr[-2000:]}")
    return case | json.loads(done.stdout.splitlines()[-1])


def effect(differences: list[float]) -> tuple[float, float]:
    """Return the mean of the pairs' differences and its standard error."""
    error = (
        statistics.stdev(differences) / math.sqrt(len(differences))
        if len(differences) > 1
        else math.nan
    )
    return statistics.mean(differences), error


def table(cases: list[dict[str, Any]]) -> str:
    """Return each variant's effect on each text as a Markdown table."""
    of = {(each["text"], each["variant"], each["seed"]): each for each in cases}
    texts, variants = (
        list(dict.fromkeys(each[name] for each in cases)) for name in ("text", "variant")
    )
    lines = [f"| variant | {' | '.join(texts)} | seconds |", f"|---|{'---:|' * (len(texts) + 1)}"]
    for variant in variants:
        cells, ratios = [], []
        for text in texts:
            seeds = [
                seed
                for t, v, seed in of
                if (t, v) == (text, variant) and (text, DEFAULT, seed) in of
            ]
            scores = [of[text, variant, seed]["bits_per_byte"] for seed in seeds]
            if variant == DEFAULT or not seeds:
                cells.append(f"{statistics.mean(scores):.3f}" if scores else "")
                continue
            pairs = [
                of[text, variant, seed]["bits_per_byte"] - of[text, DEFAULT, seed]["bits_per_byte"]
                for seed in seeds
            ]
            mean, error = effect(pairs)
            cells.append(f"{mean:+.4f}" + (f" ± {error:.4f}" if len(pairs) > 1 else ""))
            ratios += [
                of[text, variant, seed]["training_s"] / of[text, DEFAULT, seed]["training_s"]
                for seed in seeds
            ]
        lines.append(
            f"| {variant} | {' | '.join(cells)} | {statistics.median(ratios) if ratios else 1:.2f} x |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    if sys.argv[1:2] == ["--child"]:
        case = json.loads(sys.argv[2])
        print(json.dumps(trained(case["source"], case["changes"], case["updates"], case["seed"])))
        return
    import harness

    parser = harness.arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME: KEY=VALUE ...'")
    parser.add_argument("--text", nargs="+", default=["stdlib"], metavar="SOURCE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    base = SMOKE.split() if args.smoke else []
    if args.smoke:
        args.seeds, args.updates, args.variant = (
            2,
            2,
            ["no floor: optim.schedule=cosine optim.min_lr_ratio=0"],
        )
    variants = {DEFAULT: list[str]()} | {
        name: changes.split() for name, _, changes in (each.partition(":") for each in args.variant)
    }
    found = harness.result("recipe", {"updates": args.updates})
    known = json.loads(args.out.read_text())["cases"] if args.out and args.out.exists() else []
    found["cases"] = known
    asked = ("text", "changes", "updates", "seed")
    had = [[each[name] for name in asked] for each in known]
    wanted = [
        {"text": Path(source).name, "source": source, "variant": name, "changes": base + changes, "seed": seed,
         "updates": args.updates}
        for source in args.text for seed in range(args.seeds) for name, changes in variants.items()
    ]  # fmt: skip
    wanted = [case for case in wanted if [case[name] for name in asked] not in had]
    began = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        for count, case in enumerate(pool.map(spawn, wanted), 1):
            found["cases"].append(case)
            harness.write(args.out, found)
            left = (time.monotonic() - began) / count * (len(wanted) - count)
            told = f"{case['variant']}, seed {case['seed']}, {case['text']}: {case['bits_per_byte']:.4f}"
            print(f"{count}/{len(wanted)} {told}, {left / 60:.0f} min left", file=sys.stderr)
    harness.print_machine(found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
