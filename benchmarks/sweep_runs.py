"""Compare a sweep of learning rates and seeds with the same runs by one `monograph train` after
another.

Both are the installed command line on Python's standard library, with defaults except for the
model, the length and the swept keys. "Compile included" is each command's whole time as a person
waits for it: start, data, compilation, training, evaluation, checkpoints, report. "Compile
excluded" is training alone: the tokens of all runs over the measured tokens per second. Every
command finds the compile cache of earlier ones with the same graphs, as on a person's machine; the
first of each kind finds none. Half of the single runs come before the sweep and half after it, so
that disturbances of the machine affect both alike.

The losses of both sides are printed next to each other, since they are the same runs.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness

from monograph.config.axes import axes_of, points

RATES = "log:1e-3..1.28e-1:8"


def single(home: Path, common: list[str], rate: Any, seed: int) -> dict[str, Any]:
    """Train one run alone."""
    found, wall_s = harness.command(
        home, "train", *common, f"optim.lr={rate}", f"train.seed={seed}"
    )
    print(
        f"train   lr {float(rate):<9.4g} seed {seed}: {found['eval_loss']:.4f} in {wall_s:.1f} s",
        flush=True,
    )
    return {
        "lr": float(rate), "seed": seed, "eval_loss": found["eval_loss"], "wall_s": wall_s,
        "compile_s": found["compile_s"], "training_s": found["tokens"] / found["tokens_per_s"],
        "tokens": found["tokens"],
    }  # fmt: skip


def swept(home: Path, common: list[str], rates: str, seeds: list[int]) -> dict[str, Any]:
    """Train all runs in one command."""
    found, wall_s = harness.command(
        home, "sweep", *common, f"optim.lr={rates}", f"train.seed={','.join(map(str, seeds))}"
    )
    print(f"sweep   {len(found['members'])} members in {wall_s:.1f} s", flush=True)
    folder = (home / found["members"][0]["run"]).parents[1]
    record = json.loads((folder / "sweep.json").read_text())
    members = {
        (float(each["knobs"]["optim.lr"]), int(each["knobs"]["train.seed"])): each["eval_loss"]
        for each in found["members"]
    }
    return {
        "wall_s": wall_s,
        "tokens_per_s": found["tokens_per_s"],
        "members": members,
        "groups": record["groups"],
    }


def main(options: Namespace) -> None:
    """Measure both sides, print the table, and write the JSON."""
    rates, seeds = ("log:1e-3..1e-2:2", [0, 1]) if options.smoke else (RATES, [0, 1])
    updates = 4 if options.smoke else options.updates
    common = [f"model.preset={options.preset}", f"train.updates={updates}"]
    found = harness.result(
        "sweep-runs", {"preset": options.preset, "updates": updates, "lr": rates, "seeds": seeds}
    )
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _, axes = axes_of({"optim.lr": rates, "train.seed": ",".join(map(str, seeds))})
        pairs = [(point["optim.lr"], point["train.seed"]) for point in points(axes)]
        half = len(pairs) // 2
        alone = [single(home, common, *pair) for pair in pairs[:half]]
        crowd = swept(home, common, rates, seeds)
        alone += [single(home, common, *pair) for pair in pairs[half:]]
    for run in alone:
        run["swept_eval_loss"] = crowd["members"][run["lr"], run["seed"]]
    del crowd["members"]
    crowd["training_s"] = sum(run["tokens"] for run in alone) / crowd["tokens_per_s"]
    totals = {key: sum(run[key] for run in alone) for key in ("wall_s", "training_s")}
    found["cases"] = [{"single": alone, "sweep": crowd}]
    found["ratios"] = {
        "compile_included": totals["wall_s"] / crowd["wall_s"],
        "compile_excluded": totals["training_s"] / crowd["training_s"],
        "largest_loss_difference": max(
            abs(run["swept_eval_loss"] - run["eval_loss"]) for run in alone
        ),
    }
    harness.print_table(
        ["", f"{len(alone)} single runs", "one sweep", "ratio"],
        [
            [
                name,
                f"{totals[key]:.1f} s",
                f"{crowd[key]:.1f} s",
                f"{totals[key] / crowd[key]:.2f}x",
            ]
            for name, key in (("compile included", "wall_s"), ("compile excluded", "training_s"))
        ],
    )
    print(
        f"largest difference of a held-out loss: {found['ratios']['largest_loss_difference']:.2e}"
    )
    harness.write(options.out, found)


if __name__ == "__main__":
    parser = harness.arguments(__doc__)
    parser.add_argument("--preset", default="nano", help="the model")
    parser.add_argument("--updates", type=int, default=1000, help="of every run")
    main(parser.parse_args())
