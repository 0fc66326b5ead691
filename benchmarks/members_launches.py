"""Count what training 8 sets of adapters at once on one frozen base launches on a GPU, beside one set
alone, without a GPU: launches, the bytes that are moved, and how often each weight of the base is read.

The steps are compiled for sm_90 and run on a pretended card (`pretended.py`). Two depths are compiled
and extrapolated to the model's own, as in `launches.py`.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import harness
import pretended
import torch
from launches import Numbers, extrapolated, model_of
from steps import Shape, packed_window

from monograph import compat
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.graph.capture import stop_replaying
from monograph.graph.lora import Lora, adapted_layers
from monograph.graph.lora_base import Base
from monograph.graph.precision import Precision
from monograph.graph.shared_base import copy_with_shared_base
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

RANK = 16
DEPTHS = (1, 2)
# A length that is no width of the models, so that a product's operands tell weights from rows.
LENGTH = 1536
SEVEN_B = LlamaConfig(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096,
)  # fmt: skip


class Case(NamedTuple):
    """A model, and how its base is stored."""

    config: LlamaConfig
    base: Base


CASES = {
    "1b": Case(LlamaConfig.preset("1b"), "auto"),
    "1b int8": Case(LlamaConfig.preset("1b"), "int8"),
    "7b": Case(SEVEN_B, "auto"),
    "7b nf4": Case(SEVEN_B, "nf4"),
}
SMOKE = {"nano nf4": Case(LlamaConfig.preset("nano"), "nf4")}


def engine_of(first: Llama, lora: Lora, members: int) -> Engine:
    """Return the engine of this many members; one member trains alone in an engine of its own."""
    options: dict[str, Any] = {
        "optim": AdamW(lr=1e-4),
        "clip": 1.0,
        "precision": Precision("bf16"),
        "micro_batch": 1,
    }
    if members == 1:
        return Resident(first, **options)
    copies = [copy_with_shared_base(first, lora, seed) for seed in range(1, members)]
    return Ensemble([first, *copies], **options)


def counted(config: LlamaConfig, base: Base, members: int) -> dict[str, Numbers]:
    """Return the counts of a micro-step with a row for each member, and of an update."""
    gc.collect()
    torch._dynamo.reset()
    lora = Lora(rank=RANK, base=base)
    first = model_of(config)
    install_adapters(first, lora, precision=Precision("bf16"), device=torch.device("cuda"))
    window = packed_window(Shape(config, LENGTH, 1), torch.device("cuda"))
    if members > 1:  # as a sweep does: torch has no flex attention for members
        first.use_attention("sdpa", "torch")
    engine = engine_of(first, lora, members)
    if obstacle := engine.capture(window):
        raise SystemExit(f"members_launches.py: the step cannot be captured: {obstacle}")
    # A replay is one launch of the host, but the same kernels.
    stop_replaying(engine.step)
    engine.accumulate(window)
    engine.update()
    graphs = compat.captured_graphs()
    with pretended.Counted() as called:
        engine.accumulate(window)
    with pretended.Products() as products:
        engine.accumulate(window)
    with pretended.Counted() as updated:
        engine.update()
    if compat.captured_graphs() != graphs:
        raise SystemExit("members_launches.py: the step was compiled again")
    return {
        "micro-step": called.numbers()
        | {"flops": products.flops, "product_bytes": products.bytes}
        | base_bytes(first, called, products),
        "update": updated.numbers(),
    }


def base_bytes(model: Llama, called: pretended.Counted, products: pretended.Products) -> Numbers:
    """Return what the layers' frozen weights take, what kernels read of them as they are stored, and
    what products read of them.
    """
    layers = adapted_layers(model).values()
    stored = [
        p for layer in layers for name, p in layer.named_parameters(recurse=False) if name != "bias"
    ]
    shapes = {tuple(sorted((layer.out_features, layer.in_features))) for layer in layers}
    addresses = Counter(address for kernel in called.kernels for address in kernel.addresses)
    return {
        "base_bytes": sum(p.nbytes for p in stored),
        "base_bytes_by_kernels": sum(addresses[p.data_ptr()] * p.nbytes for p in stored),
        "base_bytes_by_products": sum(
            math.prod(shape) * itemsize
            for shape, itemsize in products.operands
            if tuple(sorted(shape[-2:])) in shapes
        ),
    }


def measured(name: str, case: Case, members: int) -> dict[str, Any]:
    """Count a case at its own depth, for one member and for all."""
    layers = case.config.num_hidden_layers
    counts = {}
    for many in (1, members):
        few, more = (
            counted(replace(case.config, num_hidden_layers=depth), case.base, many)
            for depth in DEPTHS
        )
        counts[str(many)] = extrapolated(few, more, DEPTHS, layers)
    return {
        "case": name,
        "base": case.base,
        "length": LENGTH,
        "rank": RANK,
        "members": members,
        "layers": layers,
        "compiled_layers": DEPTHS,
        "counts": counts,
    }


def moved_bytes(counts: dict[str, Numbers]) -> float:
    """Return the bytes that products and Triton's kernels read and write in a micro-step and an update."""
    return sum(
        part[name]
        for part in counts.values()
        for name in ("triton_bytes", "again_bytes", "attention_bytes", "product_bytes")
        if name in part
    )


HEADERS = [
    "base",
    "members",
    "launches",
    "ratio",
    "base, GB",
    "read by kernels",
    "by products",
    "GB moved",
    "over one by one",
]


def rows(case: dict[str, Any]) -> list[list[str]]:
    """Return a case's lines of the table."""
    lines = []
    alone = case["counts"]["1"]
    for many in (1, case["members"]):
        counts = case["counts"][str(many)]
        micro = counts["micro-step"]
        launches = [sum(part["launches"] for part in each.values()) for each in (counts, alone)]
        gigabytes = (
            micro[name] / 1e9
            for name in ("base_bytes", "base_bytes_by_kernels", "base_bytes_by_products")
        )
        lines.append(
            [
                case["case"],
                str(many),
                f"{launches[0]:,.0f}",
                f"{launches[0] / launches[1]:.2f}",
                *(f"{each:.2f}" for each in gigabytes),
                f"{moved_bytes(counts) / 1e9:.1f}",
                f"{moved_bytes(counts) / (many * moved_bytes(alone)):.2f}",
            ]
        )
    return lines


def main() -> None:
    """Count and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    pretended.watch()
    # No time is estimated here, for which each kernel would be disassembled.
    pretended.issued = lambda *_: 0.0
    found = harness.result("members_launches", {"members": args.members, "smoke": args.smoke})
    cases = SMOKE if args.smoke else {name: CASES[name] for name in args.cases}
    for name, case in cases.items():
        found["cases"].append(measured(name, case, 2 if args.smoke else args.members))
        harness.write(args.out, found)
    harness.print_table(HEADERS, [line for case in found["cases"] for line in rows(case)])


if __name__ == "__main__":
    main()
