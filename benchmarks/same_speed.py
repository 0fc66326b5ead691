"""Whether two versions of the code are equally fast: training and decode steps of two trees, in
turns, as ratios.

python benchmarks/same_speed.py OTHER_TREE        (a checkout of the version to compare this tree with)

Each tree runs in a process of its own, on one thread, and waits while the other one measures. A
round is some tenths of a second; the ratio of each pair of rounds is taken, so that what the
machine does meanwhile hits both alike. Where memory happens to lie makes 4 to 9 % of difference for
as long as a process lives (measured), so both start many times: a start is one sample, of which the
interval is computed.

glibc gives a large block pages of its own, or a piece of the heap once some larger block has been
freed, and what was given back costs page faults when it is asked for again. How many depends on where
blocks happen to lie: one update's copies took 0.5 ms in some starts and 4.9 ms in others, of both
trees alike (measured). `PLACES` keeps blocks below 32 MiB in the heap, and the heap's pages.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import harness
import torch

from monograph.device import default_device

ROUND_S = 0.3
PLACES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
RESAMPLES = 4000


def cases(smoke: bool, only: list[str]) -> dict[str, Callable[[], object]]:
    """Return functions that run one update, or some decode steps, of this process's tree."""
    import sampler
    import steps

    device, found = default_device(), {}
    shapes = steps.SMOKE if smoke else {name: steps.SHAPES[name] for name in ("nano", "micro")}
    for (name, shape), dtype, mode in (
        (item, dtype, mode)
        for item in shapes.items()
        for dtype in ("fp32", "bf16")
        for mode in ("eager", "captured")
    ):
        if only and f"{name} {dtype} {mode}" not in only:
            continue
        engine, window = steps.engine(shape, dtype, device), steps.packed_window(shape, device)
        if mode == "captured" and not smoke and (obstacle := engine.capture(window)):
            raise SystemExit(f"same_speed.py: {name} {dtype} cannot be captured: {obstacle}")
        found[f"{name} {dtype} {mode}"] = lambda engine=engine, window=window: steps.losses(
            engine, window, 1
        )
    for rows in (1, 8):
        if only and f"decode, {rows} rows" not in only:
            continue
        decode = sampler.Steps(
            sampler.Llama(sampler.SHAPE), "full chain", rows, 2 if smoke else 64, not smoke
        )
        found[f"decode, {rows} rows"] = decode
    return found


def repeated(run: Callable[[], object], count: int) -> None:
    """Run it so many times."""
    for _ in range(count):
        run()


def serve(smoke: bool, only: list[str]) -> None:
    """Measure as often as asked: a line `CASE REPEATS` comes in, the CPU seconds of one repeat go
    out.
    """
    torch.set_num_threads(1)
    made = cases(smoke, only)
    for run in made.values():
        repeated(run, 3)
    print(*made, sep="|", flush=True)
    for line in sys.stdin:
        name, _, repeats = line.rstrip("\n").rpartition("|")
        time = harness.timed(partial(repeated, made[name], int(repeats)), default_device())
        print(time.cpu_s / int(repeats), flush=True)


class Tree:
    """The process that measures one tree."""

    def __init__(self, tree: Path, smoke: bool, only: list[str]) -> None:
        folders = [str((tree / "benchmarks").resolve()), str(Path(__file__).resolve().parent)]
        # The other tree may be older than this script, so it is found after that tree's own
        # benchmarks.
        program = f"import sys; sys.path[:1] = {folders}; import same_speed; same_speed.serve({smoke}, {only})"
        self.process = Popen(
            [sys.executable, "-c", program],
            stdin=PIPE,
            stdout=PIPE,
            text=True,
            env=os.environ | PLACES,
        )
        self.cases = self._answer().split("|")

    def __call__(self, name: str, repeats: int) -> float:
        """Return the CPU seconds of one repeat."""
        assert self.process.stdin
        print(f"{name}|{repeats}", file=self.process.stdin, flush=True)
        return float(self._answer())

    def end(self) -> None:
        """End the process."""
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().rstrip("\n")
        if not line:
            raise SystemExit(f"same_speed.py: a tree's process ended with {self.process.wait()}")
        return line


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "other", type=Path, metavar="OTHER_TREE", help="a checkout of the version to compare with"
    )
    parser.add_argument("--rounds", type=int, default=4, help="after each start")
    parser.add_argument("--starts", type=int, default=24)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CASE",
        help="these cases, such as 'nano fp32 eager'",
    )
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.starts = 2, 1
    result = harness.result(
        "same_speed", {key: getattr(args, key) for key in ("rounds", "starts", "smoke")}
    )
    harness.print_machine(result)
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.starts):
        trees = {
            "this": Tree(harness.ROOT, args.smoke, args.only),
            "other": Tree(args.other, args.smoke, args.only),
        }
        for name in trees["this"].cases:
            repeats = 1 if args.smoke else max(1, round(ROUND_S / trees["this"](name, 1)))
            times = seconds.setdefault(name, {side: [] for side in trees})
            for side in harness.turns(trees, args.rounds):
                times[side].append(trees[side](name, repeats))
        for tree in trees.values():
            tree.end()
    for name, times in seconds.items():
        ratio = harness.spread([a / b for a, b in zip(times["this"], times["other"], strict=True)])
        pairs = ratio["values"]
        starts = [
            statistics.median(pairs[begin : begin + args.rounds])
            for begin in range(0, len(pairs), args.rounds)
        ]
        low, high = interval(starts)
        result["cases"].append(
            {
                "case": name,
                "cpu_s": times,
                "ratio": ratio,
                "of_starts": {"median": statistics.median(starts), "low": low, "high": high},
            }
        )
    harness.write(args.out, result)
    rows = [
        [x["case"], harness.shown(x["ratio"], 3), harness.shown(x["of_starts"], 3)]
        for x in result["cases"]
    ]
    harness.print_table(
        [
            "CPU time, this tree / the other",
            "median of pairs (range)",
            "median of starts (95 % interval)",
        ],
        rows,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the values' median, by resampling them."""
    draws = random.Random(0)
    medians = sorted(
        statistics.median(draws.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


if __name__ == "__main__":
    main()
