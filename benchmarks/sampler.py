"""Time of the compiled sampler alone, against taking the likeliest token.

Each variant is one graph; its logits are random normal numbers with a standard deviation of 3, as a model's are. The
full chain is penalties, temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05. Divide by the time of a decode step to
have the sampler's share of it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import harness
import torch

from monograph.decode.chain import OK, Rows, sample
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_row
from monograph.decode.penalties import COUNTS
from monograph.decode.sampling import Sampling
from monograph.device import default_device
from monograph.graph.capture import compiled

GREEDY, PLAIN = Sampling(0), Sampling(0.8)
FILTERED = Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05)
FULL = Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1, frequency_penalty=0.1)
VARIANTS: dict[str, tuple[Sampling, str]] = {
    "argmax": (GREEDY, "window"),
    "temperature": (PLAIN, "window"),
    "filters, window": (FILTERED, "window"),
    "full chain, window": (FULL, "window"),
    "full chain, search": (FULL, "search"),
    "full chain, sort": (FULL, "sort"),
}


def rows_of(sampling: Sampling, chain: Chain, count: int, vocabulary: int, device: torch.device) -> Rows:
    """The same request in every row, each with its own seed."""
    knobs = new_knobs(chain, count, device)
    for row in range(count):
        write_row(knobs, row, knobs_of(sampling, chain))
    ids_B = torch.arange(count, device=device)
    counts_BV = torch.zeros(count, vocabulary, dtype=COUNTS, device=device)
    return Rows(ids_B, ids_B + 100, ids_B * 0, knobs, counts_BV, counts_BV > 0)


class Draw:
    """One call of one variant's graph."""

    def __init__(self, name: str, logits_BV: torch.Tensor) -> None:
        sampling, truncation = VARIANTS[name]
        chain = chain_of([sampling])
        rows = rows_of(sampling, chain, *logits_BV.shape, logits_BV.device)

        # Every graph here comes from this one function.
        torch._dynamo.config.recompile_limit = 64

        def draw(logits_BV: torch.Tensor, rows: Rows) -> Any:
            return sample(logits_BV, rows, None, chain, truncation)  # type: ignore[arg-type]

        self.graph, self.eager, self.arguments = compiled(draw), draw, (logits_BV, rows)

    def __call__(self) -> None:
        """Draw one token per row."""
        self.graph(*self.arguments)

    def equals_eager(self) -> bool:
        """Whether the graph draws the tokens that the functions draw, all of them well; compiles at its first call."""
        ours, eager = self.graph(*self.arguments), self.eager(*self.arguments)
        return bool((ours.token_B == eager.token_B).all() and (ours.status_B == OK).all())


def measure(args: Namespace, vocabulary: int, batch: int) -> dict[str, Any]:
    """All variants on the same logits, taking turns."""
    device = default_device()
    logits_BV = 3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    draws = {name: Draw(name, logits_BV) for name in args.variants}
    same = {name: draw.equals_eager() for name, draw in draws.items()}

    def repeated(draw: Draw) -> None:
        for _ in range(args.repeats):
            draw()

    times = harness.interleaved({name: lambda d=d: repeated(d) for name, d in draws.items()}, args.rounds, device)
    return {
        "vocabulary": vocabulary,
        "batch": batch,
        "same_as_eager": same,
        "wall_ms": {name: spread_ms([t.wall_s for t in each], args.repeats) for name, each in times.items()},
        "cpu_ms": {name: spread_ms([t.cpu_s for t in each], args.repeats) for name, each in times.items()},
    }


def spread_ms(seconds: list[float], repeats: int) -> dict[str, Any]:
    """Milliseconds of one draw."""
    return harness.spread([1e3 * each / repeats for each in seconds])


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=5, help="draws per round")
    args = parser.parse_args()
    if args.smoke:
        args.vocabularies, args.batches, args.rounds, args.repeats = [500], [2], 2, 1
    settings = {key: getattr(args, key) for key in ("rounds", "repeats", "smoke")}
    found = harness.result("sampler", settings)
    harness.print_machine(found)
    print(f"ms a draw, median (lowest-highest) of {args.rounds} rounds, and the lowest CPU time")
    table = []
    for vocabulary in args.vocabularies:
        for batch in args.batches:
            case = measure(args, vocabulary, batch)
            found["cases"].append(case)
            harness.write(args.out, found)
            for name in args.variants:
                wall, cpu = case["wall_ms"][name], case["cpu_ms"][name]["low"]
                as_eager = "yes" if case["same_as_eager"][name] else "no"
                where = f"V={vocabulary:,} B={batch} {name}"
                table.append([where, harness.shown(wall, 3), f"{cpu:.3f}", as_eager])
    harness.print_table(["", "ms", "CPU ms, lowest", "tokens as eager"], table)


if __name__ == "__main__":
    main()
