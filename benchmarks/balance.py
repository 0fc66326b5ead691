"""Measure how evenly the experts of a new mixture are used after some hundred updates, with and
without their balance.

The same model with the same rows of bytes of Python's standard library, for several factors of the
balance; 0 is none. Use is counted on held-out rows. An entropy of 1 is that of experts that all get
as many tokens.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from monograph.graph.experts import Router
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.schedule import warmup_cosine

LENGTH, ROWS, HELD_OUT_ROWS, LR = 256, 8, 32, 2e-3
FACTORS = (0.0, 0.001, 0.01)


def text() -> Tensor:
    """Return the bytes of the modules at the top of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


def window(data: Tensor, seed: int, rows: int) -> Batch:
    """Return rows of one stretch of text each, from random places."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(len(data) - LENGTH - 1, (rows, 1), generator=generator) + torch.arange(
        LENGTH + 1
    )
    return {"tokens": data[at[:, :-1]], "targets": data[at[:, 1:]]}


def measure(family: str, preset: str, factor: float, updates: int, data: Tensor) -> dict[str, Any]:
    """Train a model, and return its held-out loss and the use of its experts by layer."""
    balance = {"output_router_logits": factor > 0, "router_aux_loss_coef": factor}
    config = LlamaConfig.preset(preset, family=family, vocab_size=256, **balance)
    model, counts = Llama(config, seed=0), list[Tensor]()
    engine = Resident(
        model, optim=AdamW(LR), schedule=warmup_cosine(updates // 20, updates), clip=1.0
    )
    for index in range(updates):
        engine.accumulate(window(data, index, ROWS))
        engine.update()
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(
            lambda _, __, out: counts.append(
                torch.bincount(out[0].flatten(), minlength=config.num_experts).double()
            )
        )
    total, targets = engine.evaluate(window(data, updates, HELD_OUT_ROWS))
    shares = [count / count.sum() for count in counts]
    return {
        "preset": f"{family} {preset}",
        "factor": factor,
        "loss": float(total / targets),
        "entropy": [
            float(torch.special.entr(share).sum()) / math.log(len(share)) for share in shares
        ],
        "least": [float(share.min()) * len(share) for share in shares],
        "most": [float(share.max()) * len(share) for share in shares],
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each model and factor."""
    lines = [
        "| model | factor | held-out loss | entropy of use, by layer | least used / mean | most used / mean |",
        "|---|---:|---:|---|---|---|",
    ]
    for case in cases:
        uses = (
            ", ".join(f"{each:.2f}" for each in case[name]) for name in ("entropy", "least", "most")
        )
        lines.append(
            f"| {case['preset']} | {case['factor']:g} | {case['loss']:.3f} | {' | '.join(uses)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--presets", nargs="+", default=["nano", "micro"])
    parser.add_argument("--updates", type=int, default=300)
    args = parser.parse_args()
    if args.smoke:
        args.presets, args.updates = ["nano"], 2
    settings = {"updates": args.updates, "rows": ROWS, "length": LENGTH, "lr": LR}
    found, data = harness.result("balance", settings), text()
    harness.print_machine(found)
    for preset in args.presets:
        for factor in FACTORS:
            found["cases"].append(measure("qwen3_moe", preset, factor, args.updates, data))
            harness.write(args.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
