"""Predict and measure peak memory of a 1B and an 8B model: training all weights, and adapters on
16, 8 and 4 bits.

Each way is predicted for a GPU (`predict.footprint`: a trace, nothing is computed). Then the ways
that fit this machine are run: on a CPU the 1B shape on shorter rows, measured by the allocator's
own events and compared with the prediction for these rows; on a GPU the predicted shape itself.
bf16, micro-batches of one row, a graph for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import harness
import plan

from monograph.device import default_device, describe
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW, Optimizer
from monograph.predict.footprint import Work, footprint

RANK, LENGTH, ON_A_CPU = 16, 2048, 256  # tokens of a row
SHAPES = ("1b", "8b")
REMATS = ("none", "full")
WAYS: dict[str, tuple[Optimizer, Lora | None]] = {
    "all weights": (AdamW(), None),
    "all weights, optim.name=adamw optim.state=bf16 optim.master_weights=false": (
        AdamW(state="bf16", master_weights=False),
        None,
    ),
    "lora.rank=16": (AdamW(), Lora(RANK)),
    "lora.rank=16 lora.base=int8": (AdamW(), Lora(RANK, base="int8")),
    "lora.rank=16 lora.base=nf4": (AdamW(), Lora(RANK, base="nf4")),
}
SMOKE = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip
SHARE = 0.6  # of the free memory that may be used: a module is in fp32 before its base is rounded


def main() -> None:
    """Predict, measure the ways that fit, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of the models"
    )
    given = parser.parse_args()
    settings = {
        "rank": RANK,
        "length": 32 if given.smoke else LENGTH,
        "precision": "bf16",
        "rows": 1,
    }
    found = harness.result("adapters", settings)
    harness.print_machine(found)
    for name in ["smoke"] if given.smoke else given.shapes:
        shape = SMOKE if given.smoke else replace(LlamaConfig.preset(name), vocab_size=128_256)
        for way, (optim, lora) in WAYS.items():
            case = one(shape, settings["length"], optim, lora)
            found["cases"].append(
                {"model": name, "parameters": shape.parameter_count(), "way": way, **case}
            )
            print(line(found["cases"][-1]), flush=True)
            harness.write(given.out, found)
    print(table(found["cases"]))


def one(shape: LlamaConfig, length: int, optim: Optimizer, lora: Lora | None) -> dict[str, Any]:
    """Return the prediction for a GPU, and the prediction and measurement on this machine if the
    way fits.
    """
    work = Work(
        shape, rows=1, length=length, optim=optim, precision="bf16", compile="blocks", window_rows=2, packed=False,
        device_type="cuda", lora=lora,
    )  # fmt: skip
    peaks = {remat: footprint(replace(work, remat=remat)) for remat in REMATS}
    held = {name: peaks["none"].by_origin[name] for name in ("weights", "gradients", "moments")}
    here = work
    if default_device().type == "cpu":
        here = replace(work, device_type="cpu", length=min(length, ON_A_CPU))
    device = describe()
    free_bytes = device.free_memory_bytes
    # On the host the module exists in fp32 first.
    needed = max(
        footprint(here).peak_bytes, 4 * shape.parameter_count() * (default_device().type == "cpu")
    )
    measured = plan.compared(here) if needed < SHARE * free_bytes else None
    return {
        "held_bytes": sum(held.values()),
        "peak_bytes": {remat: peak.peak_bytes for remat, peak in peaks.items()},
        "measured": measured
        and {
            key: measured[key] for key in ("length", "predicted_bytes", "measured_bytes", "error")
        },
    }


def line(case: dict[str, Any]) -> str:
    """Return a finished case as a line of text."""
    peaks = ", ".join(
        f"{remat} {size / 2**30:.1f} GiB" for remat, size in case["peak_bytes"].items()
    )
    seen = case["measured"]
    here = (
        f"; here {seen['measured_bytes'] / 2**30:.2f} GiB, predicted {seen['error']:+.2%}"
        if seen
        else ""
    )
    return f"{case['model']}, {case['way']}: {peaks}{here}"


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return the cases as a Markdown table."""
    lines = [
        "| model | what is trained | weights, gradients, moments | peak | recomputed in full | run here |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        peaks = " | ".join(f"{case['peak_bytes'][remat] / 2**30:.1f} GiB" for remat in REMATS)
        seen = case["measured"]
        here = "" if seen is None else (
            f"{seen['length']} tokens: {seen['measured_bytes'] / 2**30:.2f} GiB, predicted {seen['error']:+.2%}"
        )  # fmt: skip
        lines.append(
            f"| {case['model']} | {case['way']} | {case['held_bytes'] / 2**30:.1f} GiB | {peaks} | {here} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
