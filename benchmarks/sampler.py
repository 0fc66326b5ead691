"""Measure the cost of sampling: the sampler's graph alone, and whole decode steps compared with
greedy ones.

Alone, each variant is one graph; its logits are random normal numbers with a standard deviation of
3, like a model's. The full chain is penalties, temperature 0.8, top-k 40, top-p 0.95 and min-p
0.05. Whole steps are those of a model of 6 layers, 384 channels and a vocabulary of 32,000, random
weights, fp32 on a CPU and bf16 on a GPU, through the generator.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import harness
import torch
from systems import drawn_on

from monograph.decode.chain import COUNT_DTYPE, OK, SamplerRows, sample
from monograph.decode.generator import Generator
from monograph.decode.knobs import Chain, chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import default_device
from monograph.graph.capture import compiled
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

GREEDY, PLAIN = Sampling(0), Sampling(0.8)
FILTERED = Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05)
FULL = Sampling(
    0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1, frequency_penalty=0.1
)
VARIANTS: dict[str, tuple[Sampling, str]] = {
    "argmax": (GREEDY, "window"),
    "temperature": (PLAIN, "window"),
    "filters, window": (FILTERED, "window"),
    "full chain, window": (FULL, "window"),
    "full chain, search": (FULL, "search"),
    "full chain, sort": (FULL, "sort"),
}


WHOLE = {"greedy": GREEDY, "filters": FILTERED, "full chain": FULL}
SHAPE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=6,
    max_position_embeddings=256,
)
PROMPT = tuple(range(5, 20))


def rows_of(
    sampling: Sampling, chain: Chain, count: int, vocabulary: int, device: torch.device
) -> SamplerRows:
    """Return the same request in every row, each with its own seed."""
    knobs = new_knobs(chain, count, device)
    for row in range(count):
        write_rows(knobs, [row], [knobs_of(sampling, chain)])
    ids_B = torch.arange(count, device=device)
    counts_BV = torch.zeros(count, vocabulary, dtype=COUNT_DTYPE, device=device)
    return SamplerRows(ids_B, ids_B + 100, ids_B * 0, knobs, counts_BV, counts_BV > 0)


class Draw:
    """One call of one variant's graph."""

    def __init__(self, name: str, logits_BV: torch.Tensor) -> None:
        sampling, truncation = VARIANTS[name]
        chain = chain_of([sampling])
        count, vocabulary = logits_BV.shape
        rows = rows_of(sampling, chain, count, vocabulary, logits_BV.device)

        # All graphs come from this one function.
        torch._dynamo.config.recompile_limit = 64

        def draw(logits_BV: torch.Tensor, rows: SamplerRows) -> Any:
            return sample(logits_BV, rows, None, chain, truncation)  # type: ignore[arg-type]

        self.graph, self.eager, self.arguments = compiled(draw), draw, (logits_BV, rows)

    def __call__(self) -> None:
        """Draw one token per row."""
        self.graph(*self.arguments)

    def equals_eager(self) -> bool:
        """Return whether graph and functions draw the same tokens, all successfully; the first call
        compiles.
        """
        ours, eager = self.graph(*self.arguments), self.eager(*self.arguments)
        return bool((ours.token_B == eager.token_B).all() and (ours.status_B == OK).all())


def measure(args: Namespace, vocabulary: int, batch: int) -> dict[str, Any]:
    """Time all variants on the same logits, taking turns."""
    device = default_device()
    logits_BV = 3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    draws = {name: Draw(name, logits_BV) for name in args.variants}
    same = {name: draw.equals_eager() for name, draw in draws.items()}

    def repeated(draw: Draw) -> None:
        for _ in range(args.repeats):
            draw()

    times = harness.interleaved(
        {name: lambda d=d: repeated(d) for name, d in draws.items()}, args.rounds, device
    )
    return {
        "vocabulary": vocabulary,
        "batch": batch,
        "same_as_eager": same,
        "wall_ms": {
            name: spread_ms([t.wall_s for t in each], args.repeats) for name, each in times.items()
        },
        "cpu_ms": {
            name: spread_ms([t.cpu_s for t in each], args.repeats) for name, each in times.items()
        },
    }


class Steps:
    """Decode steps of one chain, in the graph that its user gets."""

    def __init__(self, model: Llama, name: str, rows: int, steps: int, compiled: bool) -> None:
        self.sampling, self.rows, self.steps = WHOLE[name], rows, steps
        self.generator = Generator(
            model,
            chain_of([self.sampling]),
            rows=rows,
            slots=len(PROMPT) + steps,
            vocabulary=model.config.vocab_size,
            mode="compiled" if compiled else "eager",
        )

    def __call__(self) -> None:
        """Generate as many texts as there are rows."""
        for seed in range(self.rows):
            self.generator.submit(
                Request(PROMPT, dataclasses.replace(self.sampling, seed=seed), self.steps)
            )
        assert sum(len(event.token_ids) for event in self.generator.run()) == self.rows * self.steps


def measure_steps(args: Namespace, batch: int) -> dict[str, Any]:
    """Time every chain's steps, taking turns, and return how much longer than greedy ones they
    take.
    """
    device = default_device()
    model = Llama(SHAPE) if device.type == "cpu" else drawn_on(device, SHAPE).to(torch.bfloat16)
    chains = {
        name: Steps(model, name, batch, args.steps, compiled=not args.smoke) for name in WHOLE
    }
    for steps in chains.values():
        steps()
    times = harness.interleaved(chains, args.rounds, device)
    found: dict[str, Any] = {"batch": batch}
    for clock in ("wall", "cpu"):
        seconds = {name: [getattr(t, f"{clock}_s") for t in each] for name, each in times.items()}
        found[f"{clock}_ms"] = {name: spread_ms(each, args.steps) for name, each in seconds.items()}
        pairs = {name: zip(each, seconds["greedy"], strict=True) for name, each in seconds.items()}
        found[f"{clock}_tax"] = {
            name: harness.spread([a / b - 1 for a, b in each]) for name, each in pairs.items()
        }
    return found


def spread_ms(seconds: list[float], repeats: int) -> dict[str, Any]:
    """Return the milliseconds of one draw."""
    return harness.spread([1e3 * each / repeats for each in seconds])


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=5, help="draws per round")
    parser.add_argument("--steps", type=int, default=96, help="whole steps per round")
    args = parser.parse_args()
    if args.smoke:
        args.vocabularies, args.batches, args.rounds, args.repeats, args.steps = [500], [2], 2, 1, 2
    settings = {key: getattr(args, key) for key in ("rounds", "repeats", "steps", "smoke")}
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
    found["steps"], table = [], []
    for batch in args.batches:
        found["steps"].append(measure_steps(args, batch))
        harness.write(args.out, found)
        case = found["steps"][-1]
        for name in WHOLE:
            tax = (
                f"{100 * case[f'{clock}_tax'][name]['median']:.1f} %" for clock in ("wall", "cpu")
            )
            table.append([f"{batch} rows, {name}", harness.shown(case["wall_ms"][name], 3), *tax])
    harness.print_table(["whole steps", "ms", "longer than greedy", "in CPU time"], table)


if __name__ == "__main__":
    main()
