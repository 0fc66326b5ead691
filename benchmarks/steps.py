"""Compare tokens per second of the training step, eager and captured: same model, optimizer, packed
batch, interleaved.

nano is bound by overhead, wide by arithmetic, and micro is between them. On a GPU it also prints
MFU, raw TFLOP/s, and the events that made the host wait during one update (goal: none).
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import numpy as np
import torch

from monograph import compat
from monograph.data.piece_lengths import PieceLengths
from monograph.device import default_device, describe
from monograph.graph.precision import DTYPES, Precision
from monograph.loop import train
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.predict.roofline import flops_per_token, mfu
from monograph.resident import Resident

ROUND_S = 0.5  # a round repeats quick steps for this long


class Shape(NamedTuple):
    """A model and its update: T positions of a row, `rows` rows of an update."""

    config: LlamaConfig
    length: int
    rows: int


WIDE = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
SHAPES = {
    "nano": Shape(LlamaConfig.preset("nano"), length=256, rows=4),
    "micro": Shape(LlamaConfig.preset("micro"), length=256, rows=4),
    "wide": Shape(WIDE, length=512, rows=4),
}
SMOKE = {"nano": Shape(LlamaConfig.preset("nano"), length=16, rows=2)}


def packed_window(shape: Shape, device: torch.device) -> Batch:
    """Return a window like the data room's: every row full, with two documents and the border at a
    random place.

    On a GPU in page-locked host memory, as in training.
    """
    generator = torch.Generator().manual_seed(0)
    size = (shape.rows, shape.length)
    border_R1 = torch.randint(1, shape.length, (shape.rows, 1), generator=generator)
    column_T = torch.arange(shape.length)
    window = {
        "tokens": torch.randint(shape.config.vocab_size, size, generator=generator),
        "targets": torch.randint(shape.config.vocab_size, size, generator=generator),
        "segments": 1 + (column_T >= border_R1).long(),
        "positions": torch.where(column_T < border_R1, column_T, column_T - border_R1),
    }
    return (
        {name: tensor.pin_memory() for name, tensor in window.items()}
        if device.type == "cuda"
        else window
    )


def piece_lengths(window: Batch) -> PieceLengths:
    """Return the lengths of a window's documents; whole rows if it has no positions."""
    columns_T = torch.arange(window["tokens"].shape[1])
    positions_N = window.get("positions", columns_T.expand_as(window["tokens"])).flatten()
    starts_P = (positions_N == 0).nonzero().flatten().tolist()
    return PieceLengths.of_pieces(np.diff(np.array([*starts_P, len(positions_N)])))


def engine(shape: Shape, dtype: str, device: torch.device) -> Resident:
    """Return the engine that `monograph train` builds by default."""
    model = Llama(shape.config, seed=0).to(device)
    return Resident(
        model, optim=AdamW(lr=1e-3), clip=1.0, precision=Precision(dtype), micro_batch=shape.rows
    )


def measure(args: Namespace, name: str, shape: Shape, dtype: str) -> dict[str, Any]:
    """Measure both modes of one shape and dtype."""
    device = default_device()
    window = packed_window(shape, device)
    engines = {mode: engine(shape, dtype, device) for mode in ("eager", "captured")}
    if obstacle := engines["captured"].capture(window):
        raise SystemExit(f"steps.py: {name} {dtype} cannot be captured: {obstacle}")
    first = {mode: losses(each, window, 2) for mode, each in engines.items()}
    graphs = compat.captured_graphs()

    def updates(mode: str, count: int) -> Callable[[], object]:
        return lambda: losses(engines[mode], window, count)

    memory = {mode: harness.live_peak_bytes(updates(mode, 1), device) for mode in engines}
    count = max(1, round(args.round_s / harness.timed(updates("captured", 1), device).wall_s))
    times = harness.interleaved(
        {mode: updates(mode, count) for mode in engines}, args.rounds, device
    )
    tokens = count * shape.rows * shape.length
    case: dict[str, Any] = {
        "shape": name,
        "dtype": dtype,
        "parameters": shape.config.parameter_count(),
        "sequence_length": shape.length,
        "tokens_per_update": shape.rows * shape.length,
        "updates_per_round": count,
        "tokens_per_s": {
            mode: harness.spread([tokens / t.wall_s for t in each]) for mode, each in times.items()
        },
        "speedup": harness.ratios(times["eager"], times["captured"]),
        "step_peak_bytes": memory,
        "first_losses": first,
        "recompiles": compat.captured_graphs() - graphs,
        "host_syncs": {mode: waits(updates(mode, 1), device) for mode in engines},
    }
    return case | {
        "flops": {
            mode: rates(shape, window, dtype, case["tokens_per_s"][mode]["median"])
            for mode in engines
        }
    }


def losses(engine: Resident, window: Batch, count: int) -> list[float] | None:
    """Train on the window `count` times; the losses are read, which waits for the device, only if
    it is new.
    """
    early = engine.index < 2
    done = list(train(engine, itertools.repeat(window, count)))
    return [float(update.loss) for update in done] if early else None


def waits(run: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Count the host's waits in one update (see `harness.HostSyncs`)."""
    with harness.HostSyncs(device) as syncs:
        run()
    return syncs.counts


def rates(shape: Shape, window: Batch, dtype: str, tokens_per_s: float) -> dict[str, float | None]:
    """Return raw FLOP/s by the formula of `predict.roofline`, and its share of the GPU's datasheet
    rate, if known.
    """
    per_token = flops_per_token(shape.config, piece_lengths(window))
    peak = describe().peak_flops.get(dtype)
    return {
        "flops_per_s": tokens_per_s * per_token,
        "peak_flops_per_s": peak,
        "mfu": mfu(tokens_per_s, per_token, peak) if peak else None,
    }


def row(case: dict[str, Any]) -> list[str]:
    """Return a case's line of the table."""
    rate, memory, flops = case["tokens_per_s"], case["step_peak_bytes"], case["flops"]["captured"]
    syncs = case["host_syncs"]["captured"]
    return [
        f"{case['shape']} {case['dtype']}",
        f"{rate['eager']['median']:,.0f}",
        f"{rate['captured']['median']:,.0f}",
        harness.shown(case["speedup"]["wall"]),
        harness.shown(case["speedup"]["cpu"]),
        f"{memory['eager'] / 2**20:,.1f}",
        f"{memory['captured'] / 2**20:,.1f}",
        f"{flops['flops_per_s'] / 1e12:.3f}",
        f"{flops['mfu']:.1%}" if flops["mfu"] else "-",
        "-" if syncs is None else str(sum(syncs.values())),
        str(case["recompiles"]),
    ]


HEADERS = [
    "",
    "eager tok/s",
    "captured tok/s",
    "speed-up",
    "in CPU time",
    "eager MiB",
    "captured MiB",
]
HEADERS += ["TFLOP/s", "MFU", "syncs", "recompiles"]


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.round_s = ROUND_S
    shapes = {name: SHAPES[name] for name in args.shapes}
    if args.smoke:
        shapes, args.rounds, args.round_s, args.dtypes = SMOKE, 2, 0.0, args.dtypes[:1]
    found = harness.result(
        "steps", {"rounds": args.rounds, "round_s": args.round_s, "smoke": args.smoke}
    )
    harness.print_machine(found)
    print(
        f"median (lowest-highest) of {args.rounds} rounds; MiB: the most one update holds besides weights, gradients"
    )
    print(
        "and optimizer state; TFLOP/s = tokens/s x (6 N_matmul + 12 L d P), captured, where a token sees P positions; "
        "speed-up: captured over eager"
    )
    for name, shape in shapes.items():
        for dtype in args.dtypes:
            found["cases"].append(measure(args, name, shape, dtype))
            harness.write(args.out, found)
    harness.print_table(HEADERS, map(row, found["cases"]))
    speedups = [case["speedup"]["wall"]["median"] for case in found["cases"]]
    print(f"geometric mean of the speed-ups: {statistics.geometric_mean(speedups):.2f}")


if __name__ == "__main__":
    main()
