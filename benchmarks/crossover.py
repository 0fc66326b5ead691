"""Find the size at which training several models at once stops paying: 16 two-layer MLPs of growing
width.

Times a captured update of 1, 2, 4, 8 and 16 members in one graph, interleaved. A gain is the time
of 16 members one after another, each captured, over the time of all 16 in graphs of the number of
members that `monograph.planner` chooses from these times, and over the time of one graph of 16. The
planner must never choose a way that is slower than one after another.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import harness
import torch
from ensemble_peers import LR, MLP, regression, squares

from monograph.device import default_device
from monograph.ensemble import Ensemble
from monograph.loss import Batch
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.sweeps.concurrency import WidthTime, choose_width, predict_update_s

MEMBERS, ROWS = 16, 32
WIDTHS = (1, 2, 4, 8, 16)
SIZES = (16, 32, 64, 128, 256, 512, 768)
LONG = 10**6  # updates, so that compiling does not count


def stepping(size: int, width: int, batch: Batch) -> Callable[[], object]:
    """Return a captured update of that many members; for one member it is the ordinary engine's."""
    device = default_device()
    models = [MLP(size).to(device) for _ in range(width)]
    optim = AdamW(lr=LR)
    if width == 1:
        engine: Resident = Resident(models[0], loss=squares, optim=optim)
    else:
        engine = Ensemble(
            models, [{"lr": LR * (1 + i / width)} for i in range(width)], loss=squares, optim=optim
        )
    if obstacle := engine.capture(batch):
        raise SystemExit(f"crossover.py: the step cannot be captured: {obstacle}")

    def step() -> None:
        engine.accumulate(batch)
        engine.update()

    return step


def measured(size: int, widths: tuple[int, ...], args: Namespace) -> dict[str, Any]:
    """Return one size's seconds for each number of members at once, and the gains."""
    device = default_device()
    batch = {name: tensor.to(device) for name, tensor in regression(ROWS, size).items()}
    steps = {width: stepping(size, width, batch) for width in widths}
    counts = {}
    for width, step in steps.items():
        step()
        counts[width] = max(1, round(args.round_s / harness.timed(step, device).wall_s))
    runs = {
        str(width): (lambda width=width: [steps[width]() for _ in range(counts[width])])
        for width in widths
    }
    times = harness.interleaved(runs, args.rounds, device)
    kind = "cpu_s" if device.type == "cpu" else "wall_s"
    seconds = {
        w: harness.spread([getattr(t, kind) / counts[w] for t in times[str(w)]]) for w in widths
    }
    timed = {width: WidthTime(seconds[width]["median"], 0.0) for width in widths}
    chosen = choose_width(timed, MEMBERS, LONG)
    alone = MEMBERS * timed[1].update_s
    every = [predict_update_s(timed, width) * MEMBERS / width for width in widths]
    return {
        "size": size,
        "parameters": sum(p.numel() for p in MLP(size).parameters()),
        "seconds": {str(width): spread for width, spread in seconds.items()},
        "gain": {str(width): alone / total for width, total in zip(widths, every, strict=True)},
        "chosen": chosen.members,
        "why": chosen.why,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--round-s", type=float, default=0.2, help="a round repeats a width for about so long"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, widths = ((8,), (1, MEMBERS)) if args.smoke else (SIZES, WIDTHS)
    if args.smoke:
        args.rounds, args.round_s = 2, 0.0
    settings = {"members": MEMBERS, "rows": ROWS, "rounds": args.rounds, "threads": args.threads}
    found = harness.result("crossover", settings)
    harness.print_machine(found)
    rows = []
    for size in sizes:
        torch.compiler.reset()
        one = measured(size, widths, args)
        found["cases"].append(one)
        rows.append(
            [
                f"{size}-{2 * size}-{size}",
                f"{one['parameters']:,}",
                *(f"{g:.2f}" for g in one["gain"].values()),
                one["why"],
            ]
        )
        harness.write(args.out, found)
    harness.print_table(
        ["model", "parameters", *(f"{width} at once" for width in widths), "recommended"], rows
    )


if __name__ == "__main__":
    main()
