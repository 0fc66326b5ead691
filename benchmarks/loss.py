"""Compare peak memory and time of the chunked linear cross-entropy with those of dense logits and
F.cross_entropy.

Forward and backward for one batch of tokens, at a large vocabulary. Memory is counted, not sampled:
every allocation of the pass, gradients included. Goal: at most 1/8 of the memory of dense logits in
eager mode, at no more than 1.25 times the time of dense logits in the same mode. Captured dense
logits take less memory than eager ones, so that ratio is printed, too; the weight's gradient, which
every implementation returns, is then a large part of the rest.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import Tensor

from monograph.device import default_device
from monograph.graph.capture import compiled
from monograph.graph.precision import DTYPES
from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy

MEMORY_GOAL, TIME_GOAL = 1 / 8, 1.25


class Pass:
    """Forward and backward of one implementation; the weight is an fp32 master, as in training."""

    def __init__(
        self, impl: str, mode: str, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor
    ) -> None:
        def loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
            return linear_cross_entropy(hidden_ND, weight_VD, targets_N, impl=impl)[0]  # type: ignore[arg-type]

        self.loss: Callable[..., Tensor] = compiled(loss) if mode == "captured" else loss
        self.hidden_ND, self.weight_VD, self.targets_N = hidden_ND, weight_VD, targets_N

    def __call__(self) -> None:
        """Run one pass; the gradients are new tensors each time."""
        self.hidden_ND.grad = self.weight_VD.grad = None
        self.loss(self.hidden_ND, self.weight_VD, self.targets_N).backward()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of one pass in fp32."""
        self()
        grads = [tensor.grad for tensor in (self.hidden_ND, self.weight_VD)]
        return [grad.float() for grad in grads if grad is not None]


def measure(args: Namespace, hidden: int, dtype: str, mode: str) -> dict[str, Any]:
    """Measure both implementations on the same tensors."""
    device = default_device()
    generator = torch.Generator(device=device).manual_seed(0)
    hidden_ND = (
        torch.randn(args.tokens, hidden, device=device, generator=generator)
        .to(DTYPES[dtype])
        .requires_grad_()
    )
    weight_VD = (
        torch.randn(args.vocabulary, hidden, device=device, generator=generator)
        .mul_(0.02)
        .requires_grad_()
    )
    targets_N = torch.randint(args.vocabulary, (args.tokens,), device=device, generator=generator)
    passes = {
        impl: Pass(impl, mode, hidden_ND, weight_VD, targets_N) for impl in ("chunked", "reference")
    }
    # The first call compiles, too.
    difference = relative_difference(*(run.gradients() for run in passes.values()))
    memory = {impl: harness.live_peak_bytes(run, device) for impl, run in passes.items()}
    memory["eager reference"] = memory["reference"]
    if mode != "eager":
        dense = Pass("reference", "eager", hidden_ND, weight_VD, targets_N)
        memory["eager reference"] = harness.live_peak_bytes(dense, device)
    times = harness.interleaved(passes, args.rounds, device)
    return {
        "hidden": hidden,
        "dtype": dtype,
        "mode": mode,
        "chunks": chunk_count(args.tokens, args.vocabulary, device.type),
        "gradient_difference": difference,
        "peak_bytes": memory,
        "wall_s": {impl: harness.spread([t.wall_s for t in each]) for impl, each in times.items()},
        "memory_ratio": memory["chunked"] / memory["eager reference"],
        "memory_ratio_in_mode": memory["chunked"] / memory["reference"],
        "time_ratio": harness.ratios(times["chunked"], times["reference"]),
    }


def relative_difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Return the norm of the difference over the norm of the reference, all tensors as one vector."""
    difference = sum(
        float((a - b).double().square().sum()) for a, b in zip(ours, reference, strict=True)
    )
    return (difference / sum(float(b.double().square().sum()) for b in reference)) ** 0.5


def row(case: dict[str, Any]) -> list[str]:
    """Return a case's line of the table."""
    memory, ratio = case["peak_bytes"], case["time_ratio"]
    return [
        f"D={case['hidden']} {case['dtype']} {case['mode']}",
        f"{memory['chunked'] / 2**20:,.0f}",
        f"{memory['reference'] / 2**20:,.0f}",
        f"1/{1 / case['memory_ratio_in_mode']:.1f}",
        f"1/{1 / case['memory_ratio']:.1f}",
        f"{case['wall_s']['chunked']['median']:.3f}",
        f"{case['wall_s']['reference']['median']:.3f}",
        harness.shown(ratio["wall"]),
        harness.shown(ratio["cpu"]),
        "yes"
        if case["memory_ratio"] <= MEMORY_GOAL and ratio["wall"]["median"] <= TIME_GOAL
        else "no",
    ]


HEADERS = [
    "",
    "chunked MiB",
    "dense MiB",
    "ratio",
    "of eager dense",
    "chunked s",
    "dense s",
    "time ratio",
]
HEADERS += ["CPU-time ratio", "goal met"]


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument(
        "--modes", nargs="+", choices=["eager", "captured"], default=["eager", "captured"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.vocabulary, args.hidden, args.rounds = 128, 512, [16], 2
    settings = {key: getattr(args, key) for key in ("tokens", "vocabulary", "rounds", "smoke")}
    found = harness.result("loss", settings | {"memory_goal": MEMORY_GOAL, "time_goal": TIME_GOAL})
    harness.print_machine(found)
    print(
        f"{args.tokens} tokens, vocabulary {args.vocabulary:,}, median (lowest-highest) of {args.rounds} rounds"
    )
    for hidden in args.hidden:
        for dtype in args.dtypes:
            for mode in args.modes:
                found["cases"].append(measure(args, hidden, dtype, mode))
                harness.write(args.out, found)
    harness.print_table(HEADERS, map(row, found["cases"]))


if __name__ == "__main__":
    main()
