"""Compare N sets of adapters that train at once on one frozen base with the same N one after another:
the time of an update of all, interleaved, and the bytes of the base.

python benchmarks/shared_base.py [--members 8] [--only SHAPE ...] [--bases auto int8 nf4]
"""

from __future__ import annotations

from typing import Any

import harness
from steps import Shape, packed_window

from monograph import compat
from monograph.allocator import keep_freed_memory
from monograph.device import default_device
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.graph.lora import Lora, adapt
from monograph.graph.shared_base import copy_with_shared_base, frozen_parameters
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

ROUND_S = 1.0  # a round repeats quick updates for this long


def llama(hidden: int, layers: int, vocabulary: int, length: int, rows: int) -> Shape:
    """Return a Llama with heads of 32, of which two share a key-value head, and its update."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    return Shape(config, length, rows)


# Small: bound by the host. The others: 26 M parameters, with ever more tokens of a member. With few, reading (and
# dequantising) the base takes most of the time, with many the products, of which nothing is shared.
SHAPES = {
    "small": llama(64, 2, 512, length=32, rows=2),
    **{
        f"large, {rows * length} tokens": llama(512, 8, 4096, length=length, rows=rows)
        for rows, length in ((1, 64), (1, 128), (1, 256), (2, 256), (4, 256))
    },
}
SMOKE = {"small": llama(64, 1, 64, length=16, rows=1)}


class Contestants:
    """The same adapters in one ensemble, and in an engine that trains one set at a time."""

    def __init__(self, shape: Shape, base: str, members: int) -> None:
        lora = Lora(rank=8, base=base)  # type: ignore[arg-type]
        device = default_device()
        first = Llama(shape.config, seed=0)
        adapt(first, lora)
        first.to(device)
        self.window = packed_window(shape, device)
        self.members = members
        copies = [copy_with_shared_base(first, lora, seed) for seed in range(members)]
        self.base_bytes = sum(p.nbytes for p in frozen_parameters(first))
        self.engines: dict[str, Engine] = {
            "at once": Ensemble(copies, optim=AdamW(lr=1e-3), clip=1.0),
            "one by one": Resident(
                copy_with_shared_base(first, lora, 0), optim=AdamW(lr=1e-3), clip=1.0
            ),
        }

    def capture(self) -> None:
        """Compile both."""
        for name, engine in self.engines.items():
            if obstacle := engine.capture(self.window):
                raise SystemExit(f"shared_base.py: {name} cannot be captured: {obstacle}")

    def update(self, name: str, count: int) -> None:
        """Update every member so many times."""
        repeats = count if name == "at once" else count * self.members
        engine = self.engines[name]
        for _ in range(repeats):
            step(engine, self.window)


def step(engine: Engine, window: Batch) -> None:
    """Run one update."""
    engine.accumulate(window)
    engine.update()


def measure(name: str, shape: Shape, base: str, mode: str, args: Any) -> dict[str, Any]:
    """Measure one shape with one form of the base."""
    device = default_device()
    contest = Contestants(shape, base, args.members)
    if mode == "captured":
        contest.capture()
    for side in contest.engines:
        contest.update(side, 1)
    graphs = compat.captured_graphs()
    once = harness.timed(lambda: contest.update("at once", 1), device).wall_s
    count = 1 if args.smoke else max(1, round(ROUND_S / once))
    times = harness.interleaved(
        {side: lambda side=side: contest.update(side, count) for side in contest.engines},
        args.rounds,
        device,
    )
    return {
        "shape": name,
        "parameters": shape.config.parameter_count(),
        "tokens_of_a_member": shape.rows * shape.length,
        "base": base,
        "mode": mode,
        "members": args.members,
        "base_bytes": contest.base_bytes,
        "update_of_all_s": {
            side: harness.spread([t.wall_s / count for t in each]) for side, each in times.items()
        },
        "recompiles": compat.captured_graphs() - graphs,
        "speedup": harness.ratios(times["one by one"], times["at once"]),
    }


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], metavar="SHAPE", help="these shapes")
    parser.add_argument("--bases", nargs="+", default=["auto", "int8", "nf4"])
    parser.add_argument("--modes", nargs="+", default=["eager", "captured"])
    args = parser.parse_args()
    if unknown := set(args.only) - set(SHAPES):
        parser.error(f"--only {sorted(unknown)}: the shapes are {', '.join(SHAPES)}")
    if args.smoke:
        args.rounds, args.members, args.modes, args.bases = 2, 2, ["eager"], ["nf4"]
    result = harness.result(
        "shared_base", {key: getattr(args, key) for key in ("rounds", "members", "smoke")}
    )
    harness.print_machine(result)
    keep_freed_memory()  # as the command line does
    shapes = SMOKE if args.smoke else SHAPES
    for name, shape in shapes.items():
        if args.only and name not in args.only:
            continue
        for base in args.bases:
            for mode in args.modes:
                result["cases"].append(measure(name, shape, base, mode, args))
                harness.write(args.out, result)
    rows = [
        [
            x["shape"],
            x["base"],
            x["mode"],
            f"{x['base_bytes'] / 2**20:.1f} MiB",
            harness.shown(x["update_of_all_s"]["one by one"], 3),
            harness.shown(x["update_of_all_s"]["at once"], 3),
            harness.shown(x["speedup"]["wall"]),
            harness.shown(x["speedup"]["cpu"]),
            str(x["recompiles"]),
        ]
        for x in result["cases"]
    ]
    headers = ["shape", "base", "mode", "its bytes, once", "one by one, s", "at once, s", "ratio"]
    headers += ["in CPU time", "recompiles"]
    harness.print_table(headers, rows)


if __name__ == "__main__":
    main()
