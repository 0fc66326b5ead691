"""Compare captured updates of a hybrid of recurrent layers and attention with those of
transformers.

The same Qwen 3.5, whose recurrent layers are gated delta nets, or Granite 4, where they are of Mamba
2, with the same weights, AdamW, clipping and rows; all take turns in one process.
Rows are packed: Monograph keeps their documents apart, transformers, eager and compiled, takes each
row for one document (it has no other way without a GPU's kernels, and so its states leak from
document to document). On rows of one document each the first losses must agree. A ratio above 1
says how many times as many updates Monograph makes. Goal: 1.5 times as many as transformers
compiled.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from mixture_peers import ours, theirs

from monograph.device import default_device
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama

VOCABULARY, GOAL, DOCUMENTS = 2048, 1.5, 8
OURS = "monograph"
QWEN, GRANITE = FAMILIES = ("qwen3_5_text", "granitemoehybrid")
PEERS = {"transformers": False, "transformers, compiled": True}


def config(family: str, length: int, smoke: bool) -> LlamaConfig:
    """Return three recurrent layers and an attention."""
    width, head = (64, 16) if smoke else (256, 64)
    if family == GRANITE:
        return LlamaConfig(
            model_type=GRANITE, vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=4, num_attention_heads=width // head, num_key_value_heads=2, head_dim=head,
            layer_types=("mamba",) * 3 + ("full_attention",), mamba_d_head=head, mamba_d_state=2 * head,
            position_embedding_type="nope", max_position_embeddings=length,
        )  # fmt: skip
    return LlamaConfig(
        model_type=family, vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=4, num_attention_heads=width // head, num_key_value_heads=2, head_dim=head,
        layer_types=("linear_attention",) * 3 + ("full_attention",), partial_rotary_factor=0.25,
        linear_num_key_heads=width // head // 2, linear_num_value_heads=width // head,
        max_position_embeddings=length,
    )  # fmt: skip


def packed(rows: int, length: int) -> Batch:
    """Return rows of DOCUMENTS documents each, of random lengths."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    starts = torch.stack(
        [torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1] + 1 for _ in range(rows)]
    )
    begins = torch.zeros(rows, length, dtype=torch.int64).scatter_(1, starts, 1)
    places = torch.arange(length).expand(rows, -1)
    positions = places - torch.where(begins > 0, places, 0).cummax(dim=1).values
    return {
        "tokens": tokens, "targets": tokens.roll(-1, 1), "segments": begins.cumsum(1) + 1, "positions": positions,
    }  # fmt: skip


def measure(args: Namespace, length: int, precision: str) -> dict[str, Any]:
    """Time an update of each in turns."""
    torch._dynamo.reset()
    model, batch = Llama(config(args.family, length, args.smoke)), packed(args.rows, length)
    plain = {name: batch[name] for name in ("tokens", "targets")}
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder, "model"))
        peers = [way for way, compiled in PEERS.items() if not (compiled and args.smoke)]
        ways = {
            way: theirs(Path(folder, "model"), "eager", PEERS[way], precision, plain)
            for way in peers
        }
    with torch.no_grad():
        logits = model.logits(model(plain["tokens"]))
        first = float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), plain["targets"].flatten())
        )
    losses = {way: [update() for _ in range(2)] for way, update in ways.items()}
    if max(abs(each[0] / first - 1) for each in losses.values()) > (
        1e-5 if precision == "fp32" else 1e-2
    ):
        raise SystemExit(f"hybrid_peers.py: the losses differ: {losses}, {first}")
    ways |= {OURS: ours(model, precision, batch)}
    losses[OURS] = [ways[OURS]() for _ in range(2)]
    times = harness.interleaved(ways, args.rounds, default_device())
    return {
        "length": length,
        "precision": precision,
        "ms": {way: harness.spread([1e3 * each.wall_s for each in times[way]]) for way in ways},
        "times_as_fast": {way: harness.ratios(times[way], times[OURS]) for way in peers},
        "first_losses": losses,
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return Monograph's times and the ratios as a Markdown table."""
    ways = list(cases[0]["times_as_fast"])
    lines = [
        f"| tokens of a row, precision | ms | {' | '.join(ways)} |",
        f"|---|{'---:|' * (1 + len(ways))}",
    ]
    for case in cases:
        ratios = [harness.shown(case["times_as_fast"][way]["wall"], 1) for way in ways]
        lines.append(
            f"| {case['length']}, {case['precision']} | {case['ms'][OURS]['median']:.0f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--family", choices=FAMILIES, default=QWEN)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.precisions, args.rows, args.rounds = [70], ["fp32"], 1, 2
    transformers.utils.logging.disable_progress_bar()
    settings = {
        "family": args.family,
        "rows": args.rows,
        "vocabulary": VOCABULARY,
        "documents": DOCUMENTS,
        "rounds": args.rounds,
    }
    found = harness.result(
        "hybrid_peers", settings | {"goal": GOAL, "transformers": transformers.__version__}
    )
    harness.print_machine(found)
    for length in args.lengths:
        for precision in args.precisions:
            found["cases"].append(measure(args, length, precision))
            harness.write(args.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
