"""Compare the gain that `monograph profile` predicts for a change with the measured gain, for nine
changes.

Each case runs in its own process, as a profile does. It profiles one way to train, makes the
change, and lets both ways take turns: the measured gain is the median ratio of tokens per second,
round by round. Goal: the predicted gain is within 25 % of it.
"""

from __future__ import annotations

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import torch

from monograph.device import default_device
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.profiling.profiler import profile
from monograph.resident import Resident

GOAL = 0.25
NANO = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=1, max_position_embeddings=128)  # fmt: skip
WIDE = replace(NANO, vocab_size=2048, hidden_size=192, intermediate_size=512, num_attention_heads=6,
               num_key_value_heads=3)  # fmt: skip
DEEP = replace(NANO, vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=5,
               num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256)  # fmt: skip
# No constant of a rule was fitted on these sizes.
OTHER = replace(NANO, vocab_size=768, hidden_size=256, intermediate_size=640, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96)  # fmt: skip
# The default model of `monograph train`, with Muon.
DEFAULT = LlamaConfig.preset("micro", vocab_size=4096, max_position_embeddings=256)
TINY = replace(
    NANO,
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    max_position_embeddings=16,
)


@dataclass(frozen=True)
class Way:
    """A way to train: rows of a window and of a micro-batch, precision, capture, and the part of a
    row that is text.
    """

    shape: LlamaConfig
    rows: int = 8
    micro: int = 8
    precision: str = "fp32"
    captured: bool = False
    used: float = 1.0
    muon: bool = False

    def engine(self) -> Resident:
        """Return an engine that is ready to train."""
        model = Llama(self.shape).to(default_device())
        optim = Muon() if self.muon else AdamW()
        made = Resident(
            model,
            optim=optim,
            clip=1.0,
            precision=Precision(self.precision),
            micro_batch=self.micro,
        )
        if self.captured:
            if obstacle := made.capture(self.window()):
                raise SystemExit(f"bottleneck.py: cannot be captured: {obstacle}")
        return made

    def window(self) -> Batch:
        """Return rows of one document each, with empty positions at their ends."""
        length = self.shape.max_position_embeddings
        draws = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.shape.vocab_size, (self.rows, length), generator=draws)
        targets, segments = tokens.roll(-1, 1), torch.ones_like(tokens)
        positions = torch.arange(length).repeat(self.rows, 1)
        for each, nothing in ((tokens, 0), (targets, -100), (segments, 0), (positions, 0)):
            each[:, round(self.used * length) :] = nothing
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}

    def endless(self) -> Iterator[Batch]:
        """Yield the same window again and again."""
        return itertools.repeat(self.window())


# name: before, after, the name of the change.
CASES: dict[str, tuple[Way, Way, str]] = {
    "padded to packed": (Way(WIDE, used=0.5), Way(WIDE), "data.packing=packed"),
    "micro-batch 1 to 2 rows": (Way(NANO, micro=1), Way(NANO, micro=2), "train.micro_batch"),
    "eager to captured, nano": (Way(NANO, micro=4), Way(NANO, micro=4, captured=True), "train.compile=whole"),
    "eager to captured, wide": (Way(WIDE), Way(WIDE, captured=True), "train.compile=whole"),
    "fp32 to bf16, wide": (Way(WIDE, captured=True), Way(WIDE, captured=True, precision="bf16"),
                           "train.precision=bf16"),
    "fp32 to bf16, deep": (Way(DEEP, captured=True), Way(DEEP, captured=True, precision="bf16"),
                           "train.precision=bf16"),
    "eager to captured, other": (Way(OTHER), Way(OTHER, captured=True), "train.compile=whole"),
    "fp32 to bf16, other": (Way(OTHER, captured=True), Way(OTHER, captured=True, precision="bf16"),
                            "train.precision=bf16"),
    "fp32 to bf16, default": (Way(DEFAULT, captured=True, muon=True),
                              Way(DEFAULT, captured=True, precision="bf16", muon=True), "train.precision=bf16"),
}  # fmt: skip


def measure(args: Namespace, name: str) -> dict[str, Any]:
    """Return the predicted and the measured gain of one change."""
    before, after, what = CASES[name]
    if args.smoke:
        before, after = (replace(way, shape=TINY) for way in (before, after))
    one, other = before.engine(), after.engine()
    with tempfile.TemporaryDirectory(prefix="monograph-bottleneck-") as folder:
        seen = profile(one, before.endless(), Path(folder, "trace.json"), used=before.used)
    offered = [change for change in seen.verdict.changes if what in change.what]
    predicted = seen.verdict.gain(offered[0]) if offered else 1.0

    def update(engine: Resident, window: Batch) -> None:
        engine.accumulate(window)
        engine.update()

    ways = {"before": (one, before.window()), "after": (other, after.window())}
    for engine, window in ways.values():
        update(engine, window)
    runs = {each: lambda pair=pair: update(*pair) for each, pair in ways.items()}
    times = harness.interleaved(runs, args.rounds, default_device())
    tokens = after.used / before.used
    gains = [
        tokens * a.wall_s / b.wall_s for a, b in zip(times["before"], times["after"], strict=True)
    ]
    return {
        "case": name, "predicted": predicted, "measured": harness.spread(gains), "bound_by": seen.verdict.bottleneck,
        "offered": [change.what for change in seen.verdict.changes],
        "shares": {part: seen.verdict.spent.share(part) for part in seen.verdict.spent.parts},
    }  # fmt: skip


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.cases = 3, ["padded to packed", "micro-batch 1 to 2 rows"]
    found = harness.result("bottleneck", {"rounds": args.rounds, "goal": GOAL, "smoke": args.smoke})
    harness.print_machine(found)
    rows = []
    for name in args.cases:
        with ProcessPoolExecutor(1, get_context("spawn")) as own:
            case = own.submit(measure, args, name).result()
        found["cases"].append(case)
        harness.write(args.out, found)
        off = case["predicted"] / case["measured"]["median"] - 1
        rows.append(
            [
                name,
                f"{case['predicted']:.2f}",
                harness.shown(case["measured"]),
                f"{off:+.0%}",
                case["bound_by"],
            ]
        )
    harness.print_table(["change", "predicted", "measured", "off", "limited by"], rows)


if __name__ == "__main__":
    main()
