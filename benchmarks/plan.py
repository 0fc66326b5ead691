"""Compare predicted and measured peak memory of a training step, over families, depths, widths,
vocabularies, batches.

The prediction (`predict.footprint`) is made from a trace of the step, with nothing computed. The
measurement builds model and engine, accumulates an update of some micro-batches and applies it: on
a CPU under the allocator's own events (`profiling.memory.LiveBytes`), on a GPU, with larger models,
by `torch.cuda.max_memory_allocated`. A captured step is measured after the call that compiles it.
Goal: 5 % at worst, 1 % at the median, each prediction in less than 10 seconds of CPU time. On a GPU
also kinds of steps that are not drawn: packed rows, adapters, other precisions and states, and
streaming, whose prediction is that of `planner.placement_bytes`, with traced passes.
"""

from __future__ import annotations

import gc
import importlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import harness
import torch

from monograph.device import default_device, describe
from monograph.engine import Engine
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.loss import MtpLoss, token_loss
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.gguf import block_formats
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.planner.placement_bytes import StreamWay, stages_of
from monograph.predict.footprint import Work, footprint
from monograph.profiling.memory import LiveBytes, peak_memory_bytes, reset_peak_memory
from monograph.resident import Resident
from monograph.stream import Streamed

GOAL, MEDIAN_GOAL, SECONDS = 0.05, 0.01, 10.0
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EAGER, CAPTURED = 36, 8
ON_A_GPU = 6, 10  # the same for a GPU
BYTES_OF_ONE = 24 * 2**30  # of device memory that a configuration may need
RESIDENT = 5  # buffers of a streamed model that stay on the device
STEPS = {"none": "eager", "whole": "whole step", "blocks": "block by block"}
INSTRUMENTS = {
    "cpu": "LiveBytes: events of torch's CPU allocator",
    "cuda": "torch.cuda.max_memory_allocated",
}


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    device = default_device()
    of_eager, of_captured = (EAGER, CAPTURED) if device.type == "cpu" else ON_A_GPU
    parser.add_argument(
        "--eager", type=int, default=of_eager, metavar="N", help="random configurations, eager"
    )
    parser.add_argument(
        "--captured", type=int, default=of_captured, metavar="N", help="the same, compiled"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the configurations")
    parser.add_argument(
        "--kinds", default="", help="of a GPU's other kinds only these, separated by semicolons"
    )
    given = parser.parse_args()
    if harness.machine()["type"] == "pretended":
        # Otherwise kernels would need the interpreter, and cuDNN a card.
        importlib.import_module("pretended").watch()
    eager, captured = (1, 0) if given.smoke else (given.eager, given.captured)
    kinds = [] if given.smoke or device.type == "cpu" else of_kinds()
    if given.kinds:
        kinds = [each for each in kinds if each[0] in given.kinds.split(";")]
    settings = {"seed": given.seed, "goal": GOAL, "median_goal": MEDIAN_GOAL, "seconds": SECONDS}
    found = harness.result("plan", settings | {"instrument": INSTRUMENTS[device.type]})
    harness.print_machine(found)
    draw = random.Random(given.seed)
    works: list[tuple[str, Work | StreamWay]] = []
    for index in range(eager + captured):
        scope = "none" if index < eager else ("whole", "blocks")[index % 2]
        work = (
            drawn(draw, index, scope)
            if device.type == "cpu" or given.smoke
            else drawn_large(draw, index, scope)
        )
        works.append((STEPS[scope], work))
    works += kinds
    failed = []
    for index, ((kind, work), case) in enumerate(
        zip(works, attempts([work for _, work in works]), strict=True)
    ):
        if error := case.get("error_of_step"):
            failed.append({"kind": kind, "work": str(work), "error": error})
        else:
            found["cases"].append({"kind": kind} | case)
            found["summary"] = summary(found["cases"])
        print(f"{index + 1}: {kind}: {error or format(case['error'], '+.2%')}", flush=True)
        harness.write(given.out, found | ({"failed": failed} if failed else {}))
    print(table(found["cases"]))
    if failed:
        sys.exit(1)


def attempts(works: Sequence[Work | StreamWay]) -> Iterator[dict[str, Any]]:
    """Yield each configuration's result in order; on a GPU in several processes, as each counts its
    own memory.
    """
    here = describe()
    at_once = (
        min(here.cores // 2, (here.memory_bytes or 0) // BYTES_OF_ONE)
        if harness.machine()["type"] == "cuda"
        else 1
    )
    if at_once > 1:
        with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
            yield from pool.map(attempted, works)
    else:
        yield from map(attempted, works)


def attempted(work: Work | StreamWay) -> dict[str, Any]:
    """Return a configuration's result, or the error that ended it: the others go on."""
    try:
        return compared(work)
    except Exception as error:
        return {"error_of_step": repr(error).partition("\\n")[0]}


def drawn(draw: random.Random, index: int, scope: str) -> Work:
    """Return a random configuration; the families take turns."""
    family, key_value = FAMILIES[index % 4], draw.choice([1, 2])
    heads, length = key_value * draw.choice([1, 2, 4]), draw.choice([32, 64, 128, 200])
    layers = draw.choice([1, 2, 4, 5, 7])
    shape = LlamaConfig(
        model_type=family,
        vocab_size=draw.choice([97, 500, 2000, 8000]),
        hidden_size=heads * draw.choice([16, 32]),
        intermediate_size=draw.choice([64, 200, 344]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        max_position_embeddings=256,
        tie_word_embeddings=draw.random() < 0.5,
        sliding_window=draw.choice([None, 48]) if family in ("mistral", "qwen2") else None,
    )
    rows, optim = (
        draw.choice([1, 3, 8, 16]),
        AdamW(ema=draw.choice([None, 0.9])) if draw.random() < 0.7 else Muon(),
    )
    remat = (
        draw.choice(["none", "none", "none", "pointwise", 0.5, 0.25, "full"])
        if scope != "whole"
        else "none"
    )
    more = {
        "precision": draw.choice(["fp32", "bf16"]),
        "compile": scope,
        "remat": remat,
        "packed": draw.random() < 0.7,
    }
    return Work(
        shape,
        rows=rows,
        length=length,
        optim=optim,
        window_rows=rows * draw.choice([1, 2, 4]),
        **more,
    )


def drawn_large(draw: random.Random, index: int, scope: str) -> Work:
    """Return a random configuration for a GPU: rows of 1,024 or 2,048 tokens in bf16."""
    heads, layers = draw.choice([8, 16]), draw.choice([4, 8, 16])
    width = heads * draw.choice([64, 128])
    shape = LlamaConfig(
        model_type=FAMILIES[index % 4],
        vocab_size=draw.choice([32_000, 128_256]),
        hidden_size=width,
        intermediate_size=draw.choice([3, 4]) * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // draw.choice([1, 4]),
        max_position_embeddings=2048,
        tie_word_embeddings=draw.random() < 0.5,
    )
    rows, optim = draw.choice([1, 2, 4, 8]), AdamW() if draw.random() < 0.7 else Muon()
    remat = draw.choice(["none", "pointwise", 0.5, 0.25, "full"]) if scope != "whole" else "none"
    more = {
        "precision": "bf16",
        "compile": scope,
        "remat": remat,
        "packed": False,
        "device_type": "cuda",
    }
    return Work(
        shape,
        rows=rows,
        length=draw.choice([1024, 2048]),
        optim=optim,
        window_rows=2 * rows,
        **more,
    )


SHAPE = LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=2048,
)  # fmt: skip

MIXTURE = replace(
    SHAPE, model_type="qwen3_moe", num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512
)


def of_kinds() -> list[tuple[str, Work | StreamWay]]:
    """Return steps of a GPU by kind: each eagerly and block by block, a large head block by block and
    as a whole.
    """
    found: list[tuple[str, Work | StreamWay]] = []
    for scope in ("none", "blocks"):
        usual = Work(
            SHAPE,
            rows=4,
            length=2048,
            optim=AdamW(),
            precision="bf16",
            compile=scope,
            window_rows=8,
            packed=False,
            device_type="cuda",
        )  # type: ignore[arg-type]
        wide = replace(usual, config=replace(SHAPE, vocab_size=2_000), rows=8)
        found += [
            ("packed", replace(usual, packed=True, remat=remat)) for remat in ("none", 0.5, "full")
        ]
        for base in ("auto", "int8", "nf4"):
            found += [
                ("adapters", replace(usual, lora=Lora(16, base=base), packed=packed))
                for packed in (False, True)
            ]
        found += [
            ("other precisions", replace(usual, precision=name)) for name in ("fp32", "fp16", "fp8")
        ]
        optims = (
            AdamW(state="8bit"),
            Muon(state="8bit"),
            AdamW(state="bf16"),
            AdamW(state="bf16", master_weights=False),
        )
        found += [("narrow states", replace(usual, optim=optim)) for optim in optims]
        for work in (
            usual,
            replace(usual, packed=True),
            wide,
            replace(wide, remat=0.5),
            replace(wide, remat="full"),
        ):
            found.append(("streamed", streaming(work, "next forward", offload=False)))
        for work in (replace(usual, optim=Muon()), replace(wide, optim=AdamW(state="8bit"))):
            found.append(("streamed", streaming(work, "sweep", offload=True)))
        # The base of adapters: dense in 16 bits, and experts of 4 bits.
        frozen = replace(usual, lora=Lora(16))
        experts = replace(usual, config=MIXTURE, lora=Lora(16, base="nf4"), remat="pointwise")
        for work in (frozen, experts):
            found.append(("streamed adapters", streaming(work, "sweep", offload=True)))
    # Few tokens and blocks, so that the peak is where the head's gradient is added to the update's sum.
    head = replace(
        usual,
        compile="blocks",
        rows=1,
        window_rows=2,
        length=512,
        config=replace(SHAPE, vocab_size=64_000, hidden_size=512, num_hidden_layers=2),
    )
    for tied in (False, True):
        work = replace(head, config=replace(head.config, tie_word_embeddings=tied))
        found += [("large head", work), ("large head", replace(work, compile="whole"))]
    for optim in (AdamW(), Muon()):
        found.append(("rounded weights", replace(usual, optim=optim, quantize="int4")))
    return found


def streaming(work: Work, when: Any, *, offload: bool) -> StreamWay:
    """Return a way to stream the work's model, two blocks a stage."""
    stages = stages_of(work.config, work.optim, work.precision, 2, work.lora)
    return StreamWay(work, stages, 2, when, offload)


def compared(case: Work | StreamWay) -> dict[str, Any]:
    """Return prediction, measurement and their difference."""
    work, began, stage = (
        case.work if isinstance(case, StreamWay) else case,
        time.process_time(),
        "stream",
    )
    if isinstance(case, StreamWay):
        # A few buffers stay on the device, as a plan leaves as many there as fit.
        predicted_bytes = sum(
            case.device_bytes(case.first_resident(RESIDENT), traced=True).values()
        )
    else:
        peak = footprint(case)
        predicted_bytes, stage = peak.peak_bytes, peak.stage
    seconds = time.process_time() - began
    torch.compiler.reset()
    measured_bytes = measured(case)
    config = work.config
    return {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "rows": work.rows,
        "window_rows": work.window_rows,
        "length": work.length,
        "precision": work.precision,
        "optimizer": type(work.optim).__name__,
        "compile": work.compile,
        "remat": work.remat,
        "stage": stage,
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error": predicted_bytes / measured_bytes - 1,
        "cpu_s": seconds,
    }


def measured(case: Work | StreamWay) -> int:
    """Return the bytes alive at the peak of an update, weights, gradients and optimizer state
    included.
    """
    gc.collect()  # an engine is in cycles, and the last one's tensors would count as this one's
    others_bytes = 0
    if default_device().type == "cuda":
        # With its first product, a thread's matrix library takes memory that no plan counts: 32 MiB
        # on an H200.
        ones = torch.ones(8, 8, device=default_device(), requires_grad=True)
        (ones @ ones).sum().backward()
        del ones
        reset_peak_memory(default_device())
        others_bytes = peak_memory_bytes(default_device())  # what graphs of others hold included
    work = case.work if isinstance(case, StreamWay) else case
    engine: Engine = _streamed(case) if isinstance(case, StreamWay) else _engine(case)
    # A replay allocates nothing: it reads and writes what its recording has allocated.
    engine.step.recorder = None
    window = _window(work, work.config.vocab_size)
    if work.compile != "none" and (obstacle := engine.capture(window, scope=work.compile)):  # type: ignore[arg-type]
        raise RuntimeError(obstacle)

    def updated() -> None:
        engine.accumulate(window)
        engine.update()

    if default_device().type == "cuda":
        updated()
        reset_peak_memory(default_device())
        updated()
        return peak_memory_bytes(default_device()) - others_bytes
    if work.compile != "none":
        updated()
    return peak_bytes(engine, window)


def peak_bytes(engine: Engine, window: Any) -> int:
    """Return the bytes alive on a CPU at the peak of one update more."""
    with LiveBytes() as live:
        engine.accumulate(window)
        engine.update()
    frozen = [p for p in engine.model.parameters() if not p.requires_grad]
    planes = [
        t for plane in engine.step.planes for t in (plane.param, plane.grad, *plane.state.values())
    ]
    return live.peak_bytes + sum(tensor.nbytes for tensor in [*frozen, *planes, *window.values()])


def _engine(work: Work) -> Resident:
    model = Llama(work.config)
    if work.lora:
        install_adapters(model, work.lora, precision=Precision(work.precision))
    return Resident(
        model.to(default_device()),
        loss=MtpLoss() if work.config.mtp_num_hidden_layers else token_loss,
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        remat=policy_named(work.remat),
        micro_batch=work.rows,
        block_formats=block_formats(model, work.quantize),
    )


def _streamed(way: StreamWay) -> Streamed:
    work = way.work
    model = Llama(work.config)
    if work.lora:
        install_adapters(model, work.lora, precision=Precision(work.precision))
    return Streamed(
        model,
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        remat=policy_named(work.remat),
        micro_batch=work.rows,
        placement=replace(way.placement(way.first_resident(RESIDENT)), device=default_device()),
    )


def _window(work: Work, vocabulary: int) -> dict[str, torch.Tensor]:
    shape = (max(work.rows, work.window_rows), work.length)
    names = ("tokens", "targets", *(("segments", "positions") if work.packed else ()))
    window = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
    for name in names[:2]:
        window[name].random_(vocabulary)
    if work.packed:
        window["segments"].fill_(1)
        window["positions"].add_(torch.arange(work.length))
    return window


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst and median error, eager and captured, and the slowest prediction."""
    found: dict[str, Any] = {"slowest_cpu_s": max(case["cpu_s"] for case in cases)}
    for kind in dict.fromkeys(case["kind"] for case in cases):
        errors = [abs(case["error"]) for case in cases if case["kind"] == kind]
        found[kind] = {
            "cases": len(errors),
            "worst": max(errors),
            "median": statistics.median(errors),
        }
    return found


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return the errors as a Markdown table."""
    lines = ["| step | configurations | worst | median |", "|---|---|---|---|"]
    for name, found in summary(cases).items():
        if isinstance(found, dict):
            lines.append(
                f"| {name} | {found['cases']} | {found['worst']:.2%} | {found['median']:.2%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
