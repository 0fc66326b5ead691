"""Compare what small texts give in the same wall time: one model, one that decays as before, four
distilled into one.

Each arm is a command of Monograph, run in processes with one thread, two at a time: `train` for
`--minutes`, which a text's most epochs may end earlier, and `sweep` over four seeds with
`--distill`. The members' length is given for each text, such that members, evaluations and
distilling take about the same minutes; how long an arm took is in the table. All are scored on the
same held-out documents, in bits per byte. Compiled code is in the cache before.

    python benchmarks/few_texts.py --minutes 16 --text notes/:train.epochs=3 --out found.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

SMOKE = [
    "model.preset=nano", "data.tokenizer=bytes", "data.sequence_length=32", "train.tokens_per_update=512",
    "train.compile=none", "data.held_out=0.2",
]  # fmt: skip
SEEDS = 4
DECAYS = (0.3, 0.6, 0.9, 1.0)  # of one to four epochs
ARMS = ("decay 0.1", "default", f"{SEEDS} seeds, distilled")


def command(arm: str, text: str, length: str, minutes: float) -> list[str]:
    """Return the arguments of the command that trains an arm."""
    if arm == ARMS[2]:
        return ["sweep", text, f"train.seed=0..{SEEDS - 1}", length, "--distill"]
    return [
        "train",
        text,
        f"train.minutes={minutes}",
        *(["optim.weight_decay=0.1"] if arm == ARMS[0] else []),
    ]


def called(arguments: list[str], home: Path) -> dict[str, Any]:
    """Run a command of Monograph with one thread; return its JSON object."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MONOGRAPH_HOME": str(home / "cache"),
        "PYTHONPATH": str(harness.ROOT / "src"),
    }  # fmt: skip
    python = [sys.executable, "-m", "monograph", *arguments, "--json"]
    done = subprocess.run(python, env=environment, capture_output=True, text=True, cwd=home)
    if done.returncode:
        raise SystemExit(f"few_texts.py: {' '.join(arguments)}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trained(
    arm: str, text: str, length: str, minutes: float, more: list[str], home: Path
) -> dict[str, Any]:
    """Train an arm; return its seconds, updates, and held-out bits per byte."""
    folder, began = home / f"{Path(text).name}, {arm}", time.monotonic()
    called([*command(arm, text, length, minutes), *more, "--out", str(folder)], home)
    seconds = time.monotonic() - began
    names = ["best", "mixture", "distilled"] if arm == ARMS[2] else ["."]
    scores = {
        name: called(["evaluate", str(folder / name)], home)["bits_per_byte"] for name in names
    }
    last = folder / ("distilled" if arm == ARMS[2] else ".") / "metrics.jsonl"
    updates = max(json.loads(line).get("update", 0) for line in last.read_text().splitlines())
    return {"arm": arm, "seconds": seconds, "updates": updates, "bits_per_byte": scores}


def table(cases: list[dict[str, Any]]) -> str:
    """Return the arms of each text as a Markdown table."""
    lines = [
        "| text | trained | minutes | updates of each model | bits per byte |",
        "|---|---|---:|---:|---:|",
    ]
    for case in cases:
        for name, score in case["bits_per_byte"].items():
            label = {"best": "the best of 4 seeds", "mixture": "their mixture"}.get(
                name, case["arm"]
            )
            minutes = "" if name in ("best", "mixture") else f"{case['seconds'] / 60:.1f}"
            lines.append(
                f"| {case['text']} | {label} | {minutes} | {case['updates']:,} | {score:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--text", nargs="+", default=["stdlib:train.updates=700"], metavar="SOURCE:LENGTH"
    )
    parser.add_argument("--minutes", type=float, default=16.0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    more = SMOKE if args.smoke else []
    if args.smoke:
        args.text, args.minutes = [f"{harness.ROOT / 'docs' / 'README.md'}:train.epochs=1"], 0.02
    texts = dict(each.rpartition(":")[::2] for each in args.text)
    found = harness.result("few-texts", {"minutes": args.minutes, "threads": 1, "jobs": args.jobs})
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(args.jobs) as pool:
        # Into the cache: an update's code depends on the decay, which depends on the number of
        # epochs.
        text, short = next(iter(texts)), [*more, "train.updates=2"]
        for decay in (0.1, *DECAYS):
            called(["train", text, *short, f"optim.weight_decay={decay}"], Path(home))
        called([*command(ARMS[2], text, "train.updates=2", 0), *more], Path(home))
        # The longest first.
        wanted = [(arm, text) for arm in reversed(ARMS) for text in texts]
        ends = [
            pool.submit(trained, arm, text, texts[text], args.minutes, more, Path(home))
            for arm, text in wanted
        ]
        for (arm, text), end in zip(wanted, ends, strict=True):
            found["cases"].append({"text": Path(text).name} | end.result())
            print(f"{arm}, {text}: {found['cases'][-1]}", file=sys.stderr, flush=True)
            harness.write(args.out, found)
    found["cases"].sort(key=lambda case: (case["text"], ARMS.index(case["arm"])))
    harness.write(args.out, found)
    harness.print_machine(found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
