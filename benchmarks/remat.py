"""What each policy of recomputation keeps and what it needs at most, for one micro-batch of a model of 12 layers.

Both are counted, not sampled, with the allocator's own events: what lives after the forward pass, and the peak of the
forward and backward pass; weights do not count, gradients count in the peak. Eager, so that the bytes are the same on
every machine. The loss and the gradients of every policy are compared with those of the first, which must be equal to
the bit.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import harness
import torch

from monograph.graph.precision import DTYPES, Precision
from monograph.graph.remat import Policy, Remat
from monograph.measure.memory import LiveBytes
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.step import Step, accumulate

MIB = 2**20
POLICIES: dict[str, Policy] = {
    "none": Remat.Off(),
    "pointwise": Remat.Pointwise(),
    "0.3": Remat.Budget(0.3),
    "0.2": Remat.Budget(0.2),
    "0.1": Remat.Budget(0.1),
    "full": Remat.Full(),
}


def measure(args: Namespace, policy: str, dtype: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """One policy's bytes, and its loss and gradients."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        max_position_embeddings=args.length,
    )
    model = Llama(config)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(args.vocabulary, (2, args.rows, args.length), generator=generator)
    step, batch = (
        Step(model, precision=Precision(dtype), remat=POLICIES[policy]),
        {"tokens": tokens, "targets": targets},
    )
    step.settle(batch)
    seed = torch.ones(1)
    with LiveBytes() as forward, step.precision.context("cpu"):
        loss, *_ = step.forward(batch, seed)
    del loss
    with LiveBytes() as whole:
        accumulate(step, [batch])
    case = {"policy": policy, "dtype": dtype, "kept_bytes": forward.kept_bytes, "peak_bytes": whole.peak_bytes}
    return case, [step.loss_sum.clone(), *(plane.grad.clone() for plane in step.planes)]


def row(case: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A line of the table."""
    kept, peak = (f"{case[key] / MIB:.1f}" for key in ("kept_bytes", "peak_bytes"))
    shares = [f"{case[key] / first[key]:.1%}" for key in ("kept_bytes", "peak_bytes")]
    return [f"{case['dtype']} {case['policy']}", kept, shares[0], peak, shares[1], "yes" if case["same_bits"] else "NO"]


HEADERS = ["", "kept MiB", "of none", "peak MiB", "of none", "same bits"]


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    args = parser.parse_args()
    if args.smoke:
        args.layers, args.hidden, args.vocabulary, args.length, args.dtypes = 2, 32, 64, 16, ["fp32"]
    keys = ("layers", "hidden", "vocabulary", "rows", "length", "smoke")
    found = harness.result("remat", {key: getattr(args, key) for key in keys})
    harness.print_machine(found)
    print(f"{args.rows} x {args.length} tokens, {args.layers} layers of width {args.hidden}")
    rows = []
    for dtype in args.dtypes:
        reference: list[torch.Tensor] = []
        for policy in POLICIES:
            case, outcome = measure(args, policy, dtype)
            reference = reference or outcome
            case["same_bits"] = all(torch.equal(a, b) for a, b in zip(outcome, reference, strict=True))
            found["cases"].append(case)
            harness.write(args.out, found)
            rows.append(row(case, next(c for c in found["cases"] if c["dtype"] == dtype)))
    harness.print_table(HEADERS, rows)


if __name__ == "__main__":
    main()
