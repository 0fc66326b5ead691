"""Measure how fast a GPU trains a model whose state is streamed from the host's memory, beside the same model
resident on it.

Two models with the same blocks: the preset 1b (1.24 billion parameters), and 56 of its layers with
a head of its own (3.93 billion). bf16 with fp32 masters, AdamW, clipping, captured by blocks,
random tokens. A large update has enough micro-batches that copies can hide behind them; a small
one has one micro-batch. Each way to train has its own process, which measures both sizes of update,
so that all memory is given back. Nothing of the streamed models stays on the device, which a plan
would use if there were room: this is the slowest placement, and the one that a smaller GPU needs.

Losses and norms of the first updates are compared bit by bit with the resident ones. They must be
equal if weights are updated on the device. Where head and embedding are tied (1b) only the first
loss must be, as the sum of their two gradients is taken in another order.

The memory that a streamed run needs at most is printed beside what the resident one needs, and
beside `--budget-gib`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import harness
import torch
from systems import BETAS, CLIP, DECAY, drawn_on
from torch import Tensor

from monograph.device import clock, default_device, describe, synchronize
from monograph.engine import Engine
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.predict.roofline import flops_per_token, mfu
from monograph.profiling.memory import peak_memory_bytes, reset_peak_memory
from monograph.resident import Resident
from monograph.stream import Placement, Streamed

SHORTEST_CASE_S = 15.0  # with less time left, a case is not begun
LR = 1e-4  # for random weights without warm-up
COMPARED = 2  # updates whose bits are compared
LINK_BYTES = 2**30  # copied in each direction to measure the link


@dataclass(frozen=True)
class Model:
    """A model and its updates: T positions of a row, rows of a micro-batch, and the micro-batches of
    a large update.
    """

    preset: str
    changes: dict[str, Any]
    length: int
    micro_batch: int
    large: int

    @property
    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        return LlamaConfig.preset(self.preset, **self.changes)

    def updates(self) -> dict[str, int]:
        """Return the number of micro-batches of each size of update."""
        return {"large": self.large, "small": 1}


UNTIED = {"tie_word_embeddings": False}
MODELS = {
    "1b": Model("1b", {}, length=2048, micro_batch=8, large=6),
    "4b": Model("1b", UNTIED | {"num_hidden_layers": 56}, length=2048, micro_batch=8, large=4),
}
SMOKE = {
    "1b": Model("nano", {}, length=32, micro_batch=2, large=2),
    "4b": Model("nano", UNTIED | {"num_hidden_layers": 3}, length=32, micro_batch=2, large=2),
}

# ── ways to train ─────────────────────────────────────────────────────────────────────────────────

RESIDENT = "resident"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "sweep": {"when": "sweep"},
    "next forward": {"when": "next forward"},
    "next forward, offloaded": {"when": "next forward", "offload": True},
    "next forward, updated on the host": {"when": "next forward", "where": "host"},
    "next forward, offloaded, updated on the host": {
        "when": "next forward",
        "where": "host",
        "offload": True,
    },
}
# In the order of what they tell, in case that time ends.
CASES = (
    ("1b", RESIDENT),
    ("1b", "next forward"),
    ("4b", "next forward, offloaded"),
    ("4b", RESIDENT),
    ("1b", "next forward, updated on the host"),
    ("4b", "next forward, offloaded, updated on the host"),
    ("1b", "sweep"),
)


def promised(model: Model, way: str) -> int:
    """Return how many of the compared updates must have the resident engine's bits; of a tied model
    this holds for the first loss alone, and 0 is returned.
    """
    if PLACEMENTS[way].get("where") == "host" or model.config.tie_word_embeddings:
        return 0
    return COMPARED


def engine_of(model: Model, way: str, device: torch.device) -> Engine:
    """Return an engine with weights that are the same in every process, drawn on the device."""
    torch.manual_seed(0)
    drawn = drawn_on(device, model.config)
    options: dict[str, Any] = {
        "optim": AdamW(lr=LR, betas=BETAS, weight_decay=DECAY),
        "clip": CLIP,
        "precision": Precision("bf16"),
        "micro_batch": model.micro_batch,
    }
    if way == RESIDENT:
        return Resident(drawn, **options)
    # Stages go from the device to their homes one by one. From the host, where a user's weights are
    # loaded, the same takes much longer, since most of the time is the first touch of its memory.
    engine = Streamed(drawn, placement=Placement(device, **PLACEMENTS[way]), **options)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return engine


def window(model: Model, micro_batches: int, device: torch.device) -> dict[str, Tensor]:
    """Return an update's rows of random ids."""
    generator = torch.Generator().manual_seed(micro_batches)
    shape = model.micro_batch * micro_batches, model.length + 1
    rows = torch.randint(model.config.vocab_size, shape, generator=generator)
    tensors = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    if device.type == "cuda":  # like the windows of the data room
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return tensors


# ── one process ───────────────────────────────────────────────────────────────────────────────────


def measure(model: Model, way: str, timed: int) -> None:
    """Train in one way; print the bits of the first updates, and what each size of update costs, as a
    line of JSON after each size.
    """
    device = default_device()
    found: dict[str, Any] = {}
    if way != RESIDENT and device.type == "cuda":
        found["link_bytes_per_s"] = link_rates(device)
    began = clock()
    engine = engine_of(model, way, device)
    synchronize(device)
    found["build_s"] = clock() - began
    windows = {size: window(model, count, device) for size, count in model.updates().items()}
    began = clock()
    if obstacle := engine.capture(windows["small"], scope="blocks"):
        raise SystemExit(f"stream_speed.py: the step cannot be captured: {obstacle}")
    synchronize(device)
    found["compile_s"] = clock() - began
    if isinstance(engine, Streamed):
        found["host_bytes"] = sum(engine.store.bytes_at().values())
    # The updates before those that are timed warm the engine; of the large ones they are compared.
    found["seen"] = [bits(engine, windows["large"]) for _ in range(COMPARED)]
    found["updates"] = {}
    for size, rows in windows.items():
        if size != "large":
            bits(engine, rows)
        found["updates"][size] = costs(engine, rows, timed, device)
        found["micro_batch"] = engine.micro_batch  # smaller than asked for if memory ran out
        print(json.dumps(found), flush=True)  # of a process that is stopped later, too


def bits(engine: Engine, rows: dict[str, Tensor]) -> list[str]:
    """Make an update; return its loss and its norm as they are in memory."""
    engine.accumulate(rows)
    update = engine.update()
    return [float(update.loss).hex(), float(update.grad_norm).hex()]


def costs(
    engine: Engine, rows: dict[str, Tensor], timed: int, device: torch.device
) -> dict[str, Any]:
    """Return the time, the memory and the bytes moved of some updates; an earlier one warmed them."""
    finish(engine, device)
    reset_peak_memory(device)
    before = moved(engine)
    seconds = []
    # An update that waits for the next forward pass is made in the next update's time. The first one
    # finds one such update waiting, and the last one leaves one.
    for _ in range(timed):
        began = clock()
        loss, _ = bits(engine, rows)
        finish(engine, device)
        seconds.append(clock() - began)
    after = moved(engine)
    return {
        "seconds": harness.spread(seconds),
        "peak_memory_bytes": peak_memory_bytes(device),
        "moved_bytes": {way: (after[way] - before[way]) / timed for way in after},
        "loss": float.fromhex(loss),
    }


def finish(engine: Engine, device: torch.device) -> None:
    """Wait for all work that was launched; an update that waits for the next forward pass was not."""
    if isinstance(engine, Streamed):
        engine.walk.lanes.finish()
    synchronize(device)


def moved(engine: Engine) -> dict[str, int]:
    """Return the bytes that were copied so far, to the device and to the host."""
    if not isinstance(engine, Streamed):
        return {"in": 0, "out": 0}
    sizes = engine.walk.lanes.moved_bytes
    return {
        "in": sum(size for (_, target), size in sizes.items() if target == "device"),
        "out": sum(size for (source, _), size in sizes.items() if source == "device"),
    }


def link_rates(device: torch.device) -> dict[str, float]:
    """Return the bytes per second of a large copy in each direction, with nothing else to do."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    rates = {}
    for way, (target, source) in {"in": (card, host), "out": (host, card)}.items():
        target.copy_(source)
        copies = [harness.timed(lambda t=target, s=source: t.copy_(s), device) for _ in range(3)]  # type: ignore[misc]
        rates[way] = LINK_BYTES / min(copy.wall_s for copy in copies)
    del host, card
    torch.cuda.empty_cache()
    return rates


# ── all processes ─────────────────────────────────────────────────────────────────────────────────


def run_case(name: str, way: str, given: Namespace, seconds: float) -> dict[str, Any]:
    """Measure a case in a new process; a failure or timeout is recorded, and the others go on."""
    case: dict[str, Any] = {"model": name, "way": way}
    if seconds < SHORTEST_CASE_S:
        return case | {"error": "not measured: out of time"}
    command = [sys.executable, __file__, *sys.argv[1:], "--case", name, way]
    began = clock()
    # Files and no pipes: a compiler's process may hold a pipe open longer than the case's own.
    with tempfile.TemporaryFile("w+") as said_file, tempfile.TemporaryFile("w+") as errors_file:
        process = subprocess.Popen(command, stdout=said_file, stderr=errors_file)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            case["error"] = f"still running after {seconds:.0f} s"
        case["process_s"] = clock() - began
        said_file.seek(0)
        errors_file.seek(0)
        said, errors = said_file.read(), errors_file.read()
    results = [line for line in said.splitlines() if line.startswith("{")]
    if results:
        case |= json.loads(results[-1])
    if process.returncode and "error" not in case:
        lines = [line for line in errors.splitlines() if line.strip()]
        case["error"] = lines[-1] if lines else f"exit code {process.returncode}"
        case["stderr"] = lines[-40:]
    return case


def compare(case: dict[str, Any], cases: list[dict[str, Any]], model: Model) -> None:
    """Add to a streamed case how it compares with the resident one, once both are measured."""
    resident = next((c for c in cases if (c["model"], c["way"]) == (case["model"], RESIDENT)), {})
    if case["way"] == RESIDENT or "updates" not in case or "updates" not in resident:
        return
    pairs = list(zip(case["seen"], resident["seen"], strict=True))
    case["equal_bits"] = [mine == its for mine, its in pairs]
    case["first_loss_equal"] = pairs[0][0][0] == pairs[0][1][0]
    case["promised_updates"] = promised(model, case["way"])
    case["as_promised"] = case["first_loss_equal"] and all(
        case["equal_bits"][: case["promised_updates"]]
    )
    for size, update in case["updates"].items():
        if size not in resident["updates"]:
            continue
        its = resident["updates"][size]
        update["speed_over_resident"] = its["seconds"]["median"] / update["seconds"]["median"]


def add_rates(case: dict[str, Any], model: Model, peak: float | None) -> None:
    """Add tokens per second, MFU and the rate of copies to each size of update."""
    per_token = flops_per_token(model.config, model.length)
    for size, update in case["updates"].items():
        seconds = update["seconds"]["median"]
        tokens = model.updates()[size] * model.micro_batch * model.length
        update["tokens"] = tokens
        update["tokens_per_s"] = tokens / seconds
        update["mfu"] = mfu(tokens / seconds, per_token, peak) if peak else None
        update["moved_bytes_per_s"] = {
            way: number / seconds for way, number in update["moved_bytes"].items()
        }


HEADERS = [
    "", "tokens", "s/update", "tokens/s", "MFU", "peak GiB", "in GB", "out GB", "in GB/s", "out GB/s", "x resident",
]  # fmt: skip


def rows_of(case: dict[str, Any]) -> list[list[str]]:
    """Return a case's lines of the table, one for each size of update."""
    label = f"{case['model']} {case['way']}"
    lines = []
    if "error" in case:
        lines.append([f"{label}: {case['error'][:100]}", *[""] * (len(HEADERS) - 1)])
    for update in case.get("updates", {}).values():
        size, rate = update["moved_bytes"], update["moved_bytes_per_s"]
        lines.append([
            label,
            f"{update['tokens']:,}",
            harness.shown(update["seconds"]),
            f"{update['tokens_per_s']:,.0f}",
            f"{update['mfu']:.1%}" if update["mfu"] else "-",
            f"{update['peak_memory_bytes'] / 2**30:.2f}",
            *(f"{size[way] / 1e9:.2f}" for way in ("in", "out")),
            *(f"{rate[way] / 1e9:.1f}" for way in ("in", "out")),
            f"{update['speed_over_resident']:.2f}" if "speed_over_resident" in update else "-",
        ])  # fmt: skip
    return lines


def peak_of(case: dict[str, Any]) -> float:
    """Return a case's largest memory on the device, in GiB."""
    peaks: list[int] = [update["peak_memory_bytes"] for update in case["updates"].values()]
    return max(peaks) / 2**30


def print_bits(case: dict[str, Any]) -> None:
    """Print whether a streamed case's first updates have the bits that they must have."""
    if "as_promised" not in case:
        return
    count = case["promised_updates"]
    promise = f"{count} updates" if count else "the first loss"
    outcome = "equal in every bit" if case["as_promised"] else "DIFFER, against the promise"
    print(
        f"{case['model']} {case['way']}: {promise} {outcome}; equal are {sum(case['equal_bits'])} of {COMPARED} updates"
    )


def print_memory(cases: list[dict[str, Any]], models: dict[str, Model], budget_gib: float) -> None:
    """Print what each streamed run holds on the device beside what the resident run needs."""
    for case in cases:
        if "updates" not in case or case["way"] == RESIDENT:
            continue
        config = models[case["model"]].config
        resident = next(
            (
                f"resident peaks at {peak_of(c):.2f} GiB"
                for c in cases
                if (c["model"], c["way"]) == (case["model"], RESIDENT) and "updates" in c
            ),
            "resident not measured",
        )
        peak = peak_of(case)
        print(
            f"{case['model']} {case['way']}: {config.parameter_count() / 1e9:.2f} billion parameters, "
            f"peak on the device {peak:.2f} GiB, {'within' if peak <= budget_gib else 'beyond'} {budget_gib:g} GiB; "
            f"{case['host_bytes'] / 2**30:.1f} GiB on the host; state {16 * config.parameter_count() / 2**30:.1f} GiB, "
            f"{resident}"
        )


def parse() -> Namespace:
    """Return the arguments, with the models as `models`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=(RESIDENT, *PLACEMENTS), metavar="WAY")
    parser.add_argument("--timed", type=int, default=2, help="updates of each size")
    parser.add_argument("--seconds", type=float, default=140.0, help="of all processes")
    parser.add_argument("--case-seconds", type=float, default=100.0, help="of one process")
    parser.add_argument("--budget-gib", type=float, default=16.0, help="a smaller device's memory")
    parser.add_argument(
        "--case", nargs=2, metavar=("MODEL", "WAY"), help="measure one, in this process"
    )
    given = parser.parse_args()
    given.models_by_name = SMOKE if given.smoke else MODELS
    return given


def main() -> None:
    """Measure and print; see `--help`."""
    began, given = clock(), parse()
    models: dict[str, Model] = given.models_by_name
    if given.case:
        name, way = given.case
        measure(models[name], way, given.timed)
        return
    peak = describe(default_device()).peak_flops.get("bf16")
    settings = {
        "models": {name: asdict(model) for name, model in models.items()},
        "timed": given.timed,
        "peak_flops_per_s": peak,
        "budget_gib": given.budget_gib,
    }
    found = harness.result("stream-speed", settings)
    harness.print_machine(found)
    cases: list[dict[str, Any]] = found["cases"]
    for name, way in CASES:
        if name not in given.models or (given.ways and way not in given.ways):
            continue
        left = given.seconds - (clock() - began)
        case = run_case(name, way, given, min(left, given.case_seconds))
        cases.append(case)
        if "updates" in case:
            add_rates(case, models[name], peak)
        for each in cases:
            compare(each, cases, models[each["model"]])
        harness.write(given.out, found)
        for line in rows_of(case):
            print(f"{clock() - began:4.0f} s  {'  '.join(line)}", flush=True)
    harness.print_table(HEADERS, [line for case in cases for line in rows_of(case)])
    for case in cases:
        print_bits(case)
    print_memory(cases, models, given.budget_gib)
    if any("error" in case or not case.get("as_promised", True) for case in cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
