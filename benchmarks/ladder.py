"""Measure how much each usual change gains: `monograph profile --ladder`, several times, rung by
rung.

A rung's ratios to the rung that it changes, in wall time and in CPU time, are medians of the
rounds' own ratios. Losses are those of the first round, since the time of the first rung decides
the length of the others.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness

SMOKE = ["model.preset=nano", "data.tokenizer=bytes", "data.sequence_length=32", "train.tokens_per_update=128",
         "train.updates=8"]  # fmt: skip
SPEEDS = ("tokens_per_s", "tokens_per_cpu_s", "update_s", "cpu_s")
UPDATES = 32  # of a rung at most, so that rounds are alike on every machine that is fast enough


def rung(rounds: list[dict[str, Any]], before: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one rung over all rounds, compared with the rung that it changes, if there is one."""
    first = rounds[0]
    case = {
        name: first[name] for name in ("rung", "change", "over", "obstacle", "notes", "micro_batch")
    }
    if first["obstacle"]:
        return case
    case |= {name: harness.spread([each[name] for each in rounds]) for name in SPEEDS}
    if before:
        pairs = list(zip(rounds, before, strict=True))
        case["times"] = {
            clock: harness.spread([one[speed] / last[speed] for one, last in pairs])
            for clock, speed in (("wall", "tokens_per_s"), ("cpu", "tokens_per_cpu_s"))
        }
    kept = ("peak_memory_bytes", "memory_times", "eval_loss", "eval_bits_per_byte")
    return case | {name: first[name] for name in kept}


def cases(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rungs over all rounds."""
    climbed = {
        each[0]["rung"]: list(each)
        for each in zip(*(found["rungs"] for found in rounds), strict=True)
    }
    return [rung(each, climbed.get(each[0]["over"], [])) for each in climbed.values()]


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = SMOKE if args.smoke else [f"model.preset={args.preset}", f"train.updates={UPDATES}"]
    args.rounds = 1 if args.smoke else args.rounds
    no_compiler = {"CXX": "none"} if args.smoke else {}  # compiling takes minutes
    found = harness.result(
        "ladder", {"preset": args.preset, "rounds": args.rounds, "smoke": args.smoke}
    )
    harness.print_machine(found)
    rounds = []
    with (
        patch.dict(os.environ, no_compiler),
        tempfile.TemporaryDirectory(prefix="monograph-ladder-") as home,
    ):
        for _ in range(args.rounds):
            climbed, seconds = harness.command(Path(home), "profile", "--ladder", *settings)
            rounds.append(climbed)
            found["cases"] = cases(rounds)
            found["settings"] |= {
                name: rounds[0][name]
                for name in ("params", "updates", "tokens_per_update", "tokens")
            }
            found["settings"]["seconds"] = [*found["settings"].get("seconds", []), seconds]
            harness.write(args.out, found)
    rows = []
    for case in found["cases"]:
        if case["obstacle"]:
            rows.append([case["rung"], *[""] * 6, case["obstacle"]])
            continue
        times = [harness.shown(ratio) for ratio in case.get("times", {}).values()] or ["", ""]
        memory, loss = f"{case['peak_memory_bytes'] / 2**20:.1f}", f"{case['eval_loss']:.3f}"
        speeds = (harness.shown(case[name], 0) for name in ("tokens_per_s", "tokens_per_cpu_s"))
        rows.append([case["rung"], *speeds, *times, memory, loss, ""])
    heads = [
        "rung",
        "tokens/s",
        "tokens/CPU-s",
        "speed",
        "in CPU time",
        "peak MiB",
        "held-out loss",
        "",
    ]
    harness.print_table(heads, rows)


if __name__ == "__main__":
    main()
