"""Find the best learning rate at a width and at twice and four times that, with width transfer and
without.

Two layers with heads of 16, the widths 32, 64 and 128, bytes of Python's own asyncio, 512 tokens
per update, warm-up and cosine; every rate with every seed, with data and initial weights paired.
Without transfer all tensors have one rate. The best rate is the vertex of the parabola through the
best mean and its neighbours. AdamW with an untied and with a tied head, Muon with a tied one.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from vertex import vertex

import monograph as mono
from monograph.data.corpus import Corpus
from monograph.optim import Optimizer

WIDTHS, RATES, SEEDS, UPDATES = (32, 64, 128), tuple(2.0**k for k in range(-9, -2)), (0, 1), 250
ROWS, LENGTH, HELD_OUT_ROWS = 8, 64, 256
DRIFT = 1.0  # factor-2 steps: the goal


@dataclass(frozen=True)
class Way:
    """The optimizer, whether the head is tied, and whether the rule is used."""

    rule: str
    tied: bool
    transfer: bool

    def __str__(self) -> str:
        return f"{self.rule}, {'tied' if self.tied else 'untied'}, {'width' if self.transfer else 'none'}"


KINDS = (("adamw", False), ("adamw", True), ("muon", True))


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    given = harness.arguments(__doc__).parse_args()
    widths, rates, seeds, updates = (WIDTHS, RATES, SEEDS, UPDATES)
    if given.smoke:
        widths, rates, seeds, updates = (32, 64), (2.0**-7, 2.0**-6, 2.0**-5), (0,), 4
    found = harness.result(
        "transfer",
        {
            "widths": widths,
            "rates": rates,
            "seeds": seeds,
            "updates": updates,
            "tokens": ROWS * LENGTH,
        },
    )
    harness.print_machine(found)
    text = mono.corpus(source(), tokenizer="bytes", sequence_length=LENGTH, held_out=0.1)
    began = time.process_time()
    for rule, tied in KINDS[: 1 if given.smoke else None]:
        for width in widths:
            for way in (Way(rule, tied, True), Way(rule, tied, False)):
                if width > widths[0] or way.transfer:
                    found["cases"].append(
                        measured(way, width, widths[0], text, (rates, seeds, updates))
                    )
                    print(*line(found["cases"][-1]), flush=True)
                else:  # at the base the rule is the identity
                    found["cases"].append({**found["cases"][-1], "way": str(way)})
    found["drifts"] = drifts(found["cases"])
    found["cpu_s"] = time.process_time() - began
    harness.print_table(
        ["way", "vertices, log2", "steps apart", "losses at the vertices"],
        map(row, found["drifts"]),
    )
    harness.write(given.out, found)


def source() -> str:
    """Return the folder of the text: half a megabyte that is part of every Python."""
    return str(Path(asyncio.__file__).parent)


def shape(width: int, tied: bool, vocabulary: int) -> mono.LlamaConfig:
    """Return nano, with heads of 16, at a width."""
    return mono.LlamaConfig.preset(
        "nano",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        tie_word_embeddings=tied,
    )


def measured(
    way: Way, width: int, base: int, text: Corpus, grid: tuple[Any, Any, int]
) -> dict[str, Any]:
    """Return the held-out loss of every rate and seed, in nats per byte, and the vertex of their
    means.
    """
    rates, seeds, updates = grid
    config = shape(width, way.tied, text.vocab_size)
    transfer = mono.WidthTransfer(config, mono.narrowed(config, base if way.transfer else width))
    optim: Optimizer = (mono.Muon if way.rule == "muon" else mono.AdamW)(weight_decay=0.1)
    engine = mono.Resident(
        mono.Llama(config),
        optim=transfer.optimizer(optim),
        schedule=mono.warmup_cosine(updates // 10, updates, 0.0),
        clip=1.0,
    )
    reason = engine.capture(next(iter(text.batches(ROWS * LENGTH))))
    assert reason is None, reason
    blank = {name: torch.zeros_like(tensor) for name, tensor in engine.state().optimizer.items()}
    losses = []
    for lr in rates:
        losses.append([])
        for seed in seeds:
            fresh = mono.Llama(config, seed)
            transfer.initialise_(fresh)
            state = replace(engine.state(), model=own(fresh, engine), optimizer=blank)
            engine.load_state(replace(state, scalars=dict.fromkeys(state.scalars, 0)))
            engine.step.optim = replace(engine.step.optim, lr=lr)
            for _ in mono.train(engine, text.batches(ROWS * LENGTH, seed=seed), updates):
                pass
            losses[-1].append(
                mono.evaluate(engine, text.held_out, batch_rows=ROWS, limit=HELD_OUT_ROWS).loss
            )
    means = [statistics.mean(each) for each in losses]
    best = vertex(rates, means)
    return {
        "way": str(way), "width": width, "parameters": config.parameter_count(), "rates": list(rates), "losses": losses,
        "best": rates[min(range(len(means)), key=means.__getitem__)], "vertex_log2": best.log2, "loss": best.loss,
        "bracketed": best.bracketed,
        "of_each_seed_log2": [vertex(rates, each).log2 for each in zip(*losses, strict=True)],
    }  # fmt: skip


def own(model: torch.nn.Module, engine: mono.Resident) -> dict[str, torch.Tensor]:
    """Return the model's weights under the names of the engine's state."""
    weights = model.state_dict()
    return {name: weights[name] for name in engine.state().model}


def drifts(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each way's vertices, by increasing width, and how far the last is from the first."""
    found = []
    for way in dict.fromkeys(case["way"] for case in cases):
        own_cases = [case for case in cases if case["way"] == way]
        places = [case["vertex_log2"] for case in own_cases]
        found.append({
            "way": way, "vertices_log2": places, "steps": places[-1] - places[0],
            "losses": [case["loss"] for case in own_cases], "within_goal": abs(places[-1] - places[0]) <= DRIFT,
            "bracketed": all(case["bracketed"] for case in own_cases),
        })  # fmt: skip
    return found


def line(case: dict[str, Any]) -> list[str]:
    """Return one case as a line of text."""
    means = [statistics.mean(each) for each in case["losses"]]
    curve = " ".join(
        f"{math.log2(lr):.0f}:{mean:.3f}" for lr, mean in zip(case["rates"], means, strict=True)
    )
    return [f"{case['way']:<24}", f"{case['width']:>4}", f"vertex {case['vertex_log2']:.2f}", curve]


def row(drift: dict[str, Any]) -> list[str]:
    """Return one way's line of the table."""
    places, losses = ([f"{each:.2f}" for each in drift[key]] for key in ("vertices_log2", "losses"))
    return [drift["way"], ", ".join(places), f"{drift['steps']:+.2f}", ", ".join(losses)]


if __name__ == "__main__":
    main()
