"""Compare captured updates of a mixture of experts with those of transformers, which computes
experts in several ways.

The same Qwen3 MoE with the same weights, AdamW, clipping and rows; all take turns in one process.
transformers loops over experts ("eager", for which its compiled model breaks into several graphs)
or calls torch's grouped products ("grouped_mm", its default), and is run as it is and compiled. The
first losses must agree. A ratio above 1 says how many times as many updates Monograph makes. Goal:
2 times as many as transformers with its loop over experts, eager or compiled, whichever is faster.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from torch import nn

from monograph.device import default_device
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

VOCABULARY, LENGTH, LR, GOAL = 2048, 256, 1e-3, 2.0
OURS, LOOP = "monograph", ("loop", "loop, compiled")
PEERS = {
    "loop": ("eager", False), "loop, compiled": ("eager", True), "grouped_mm": ("grouped_mm", False),
    "grouped_mm, compiled": ("grouped_mm", True),
}  # fmt: skip


def config(experts: int, smoke: bool) -> LlamaConfig:
    """Return a mixture whose token's four experts are together as wide as a Llama's feed-forward
    layer.
    """
    width = 64 if smoke else 256
    return LlamaConfig(
        model_type="qwen3_moe", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=2, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        max_position_embeddings=LENGTH, num_experts=experts, num_experts_per_tok=min(4, experts),
        moe_intermediate_size=3 * width // 4, norm_topk_prob=True,
    )  # fmt: skip


def window(rows: int) -> Batch:
    """Return full rows of one document each."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def ours(model: Llama, precision: str, batch: Batch) -> Callable[[], float]:
    """Return Monograph's captured update, which returns the loss."""
    engine = Resident(
        model.to(default_device()), optim=AdamW(LR), clip=1.0, precision=Precision(precision),
        micro_batch=len(batch["tokens"]),
    )  # fmt: skip
    if obstacle := engine.capture(batch):
        raise SystemExit(f"mixture_peers.py: cannot be captured: {obstacle}")

    def update() -> float:
        engine.accumulate(batch)
        return float(engine.update().loss)

    return update


def theirs(
    folder: Path, experts: str, compiled: bool, precision: str, batch: Batch
) -> Callable[[], float]:
    """Return an update of transformers' model, which returns the loss; rows are one document each
    to it.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=experts
    ).to(default_device())
    model.train()
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR, (0.9, 0.95), fused=True)
    tokens, targets = (batch[name].to(default_device()) for name in ("tokens", "targets"))

    def loss() -> torch.Tensor:
        with torch.autocast(default_device().type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    run = torch.compile(loss) if compiled else loss

    def update() -> float:
        total = run()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return update


def measure(args: Namespace, experts: int, precision: str) -> dict[str, Any]:
    """Time an update of each way in turns."""
    torch._dynamo.reset()
    model, batch = Llama(config(experts, args.smoke)), window(args.rows)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder, "model"))
        peers = [way for way, (_, compiled) in PEERS.items() if not (compiled and args.smoke)]
        ways = {way: theirs(Path(folder, "model"), *PEERS[way], precision, batch) for way in peers}
    ways |= {OURS: ours(model, precision, batch)}
    first = {way: [update() for _ in range(2)] for way, update in ways.items()}
    if max(abs(losses[0] / first[OURS][0] - 1) for losses in first.values()) > (
        1e-5 if precision == "fp32" else 1e-2
    ):
        raise SystemExit(f"mixture_peers.py: the losses differ: {first}")
    times = harness.interleaved(ways, args.rounds, default_device())
    return {
        "experts": experts,
        "precision": precision,
        "ms": {way: harness.spread([1e3 * each.wall_s for each in times[way]]) for way in ways},
        "times_as_fast": {way: harness.ratios(times[way], times[OURS]) for way in peers},
        "first_losses": first,
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return Monograph's times and the ratios as a Markdown table."""
    ways = list(cases[0]["times_as_fast"])
    lines = [
        f"| experts, precision | ms | {' | '.join(ways)} |",
        f"|---|{'---:|' * (1 + len(ways))}",
    ]
    for case in cases:
        ratios = [harness.shown(case["times_as_fast"][way]["wall"], 1) for way in ways]
        lines.append(
            f"| {case['experts']}, {case['precision']} | {case['ms'][OURS]['median']:.0f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.smoke:
        args.experts, args.precisions, args.rows, args.rounds = [4], ["fp32"], 1, 2
    transformers.utils.logging.disable_progress_bar()
    settings = {
        "rows": args.rows,
        "length": LENGTH,
        "vocabulary": VOCABULARY,
        "rounds": args.rounds,
        "goal": GOAL,
    }
    found = harness.result("mixture_peers", settings | {"transformers": transformers.__version__})
    harness.print_machine(found)
    for experts in args.experts:
        for precision in args.precisions:
            found["cases"].append(measure(args, experts, precision))
            harness.write(args.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
