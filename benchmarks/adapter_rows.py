"""Compare eight rows that have eight different adapters with eight rows of the base.

One generator writes with a model that has a bank of eight adapters, of ranks 2 to 16 on all linear
layers except the head, the other with the same model without a bank. They take turns in one process,
and write the same number of tokens after the same prompts. tokens/s counts every token of every row
over the whole call, the prompts' share included. "A bank, rows of the base" has the bank, and no row
uses it. The goal is 0.85 of the base's tokens/s with mixed rows, at 20 M parameters or more.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import harness
import torch
from generate_peers import shape

from monograph.decode import adapter_bank
from monograph.decode.adapter_bank import AdapterFactors, StoredAdapter
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import default_device
from monograph.graph.lora_targets import linear_layers
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

ROWS, PROMPT = 8, 18
RANKS = (2, 4, 8, 16)
GOAL, GOAL_PARAMETERS = 0.85, 20_000_000
SAMPLING = Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05)
CASES = {
    "6 x 384, vocabulary 32,000": shape(6, 384, 32_000),
    "4 x 768, vocabulary 32,000": shape(4, 768, 32_000),
    "2 x 1,536, vocabulary 32,000": shape(2, 1536, 32_000),
}
BASE, MIXED, UNUSED = "base", "mixed rows", "a bank, rows of the base"


def random_adapter(model: Llama, rank: int, seed: int) -> StoredAdapter:
    """Return an adapter of all linear layers except the head."""
    draw = torch.Generator().manual_seed(seed)
    factors = {
        name: AdapterFactors(
            torch.randn(rank, layer.in_features, generator=draw) * 0.02,
            torch.randn(layer.out_features, rank, generator=draw) * 0.02,
        )
        for name, layer in linear_layers(model).items()
    }
    return StoredAdapter(f"random {seed}", rank, 2.0, factors, str(seed))


def generator(model: Llama) -> Generator:
    """Return a decoder as `generate` and `serve` have it for few texts."""
    return Generator(
        model,
        chain_of([SAMPLING]),
        rows=ROWS,
        slots=256,
        vocabulary=model.config.vocab_size,
        mode="captured",
    )


def write(generator: Generator, slots: Sequence[int], tokens: int) -> int:
    """Write a text in each row; return the number of tokens."""
    draw = torch.Generator().manual_seed(0)
    for row, slot in enumerate(slots):
        prompt = torch.randint(3, generator.vocabulary, (PROMPT,), generator=draw).tolist()
        generator.submit(Request(tuple(prompt), SAMPLING, tokens, seed=row, adapter=slot))
    return sum(len(event.token_ids) for event in generator.run())


def measure(config: LlamaConfig, args: Namespace) -> dict[str, Any]:
    """Time all ways in turns."""
    device = default_device()
    base, adapted = (Llama(config, seed=0).to(device) for _ in range(2))
    adapters = {
        f"adapter {number}": random_adapter(base, RANKS[number % len(RANKS)], number)
        for number in range(ROWS)
    }
    bank = adapter_bank.install(adapted, adapters)
    plain, banked = generator(base), generator(adapted)
    ways = {
        BASE: (plain, [0] * ROWS),
        MIXED: (banked, list(range(1, ROWS + 1))),
        UNUSED: (banked, [0] * ROWS),
    }
    for each, slots in ways.values():
        written = write(each, slots, args.tokens)
    times = harness.interleaved(
        {
            name: (lambda each=each, slots=slots: write(each, slots, args.tokens))
            for name, (each, slots) in ways.items()
        },
        args.rounds,
        device,
    )
    return {
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "bank_bytes": bank.nbytes,
        "tokens_per_s": {
            name: harness.spread([written / each.wall_s for each in times[name]]) for name in ways
        },
        # More tokens/s is less time.
        "of_the_base": {name: harness.ratios(times[BASE], times[name]) for name in (MIXED, UNUSED)},
    }


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    cases = CASES
    if args.smoke:
        cases = {"smoke": shape(1, 64, 300)}
        args.rounds, args.tokens = 2, 3
    settings = {"rows": ROWS, "prompt": PROMPT, "tokens": args.tokens, "rounds": args.rounds}
    found = harness.result("adapter_rows", settings | {"smoke": args.smoke})
    harness.print_machine(found)
    lines = []
    for name, config in cases.items():
        case = {"name": name} | measure(config, args)
        found["cases"].append(case)
        harness.write(args.out, found)
        speed = case["tokens_per_s"]
        ratio = case["of_the_base"]
        lines.append(
            [
                f"{name}, {case['parameters'] / 1e6:.0f} M",
                *(f"{speed[way]['median']:.0f}" for way in (BASE, MIXED)),
                *(harness.shown(ratio[MIXED][kind]) for kind in ("wall", "cpu")),
                harness.shown(ratio[UNUSED]["wall"]),
                "yes" if ratio[MIXED]["wall"]["median"] >= GOAL else "no",
            ]
        )
    headers = [
        "",
        "base, tokens/s",
        "mixed rows",
        "of the base",
        "in CPU time",
        "unused bank",
        f">= {GOAL}",
    ]
    harness.print_table(headers, lines)


if __name__ == "__main__":
    main()
