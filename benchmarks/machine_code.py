"""List what the machine code of every way to train and decode needs on a card, without one:
registers, spills, waits.

    python tests/pretended_gpu/environment.py run 90 python benchmarks/machine_code.py --out FILE

Everything is compiled down to cubins and launched on a pretended card, where kernels compute
nothing. A file that has other cards' cases keeps them. Widths are small where kernels would be of
the same kind, and depths are one or two, as blocks share their kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cubins
import harness
import launches
import own_kernels
import pretended
import torch
from sampler import FULL
from steps import Shape, packed_window
from torch import nn

import automata
from monograph.automata import Automaton, constraint
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import clock, describe
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.graph.capture import is_replayed
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.replay import CudaGraphs
from monograph.loss import Batch
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import AttentionKernel, attention
from monograph.ops.attention_kernels import time_kernels
from monograph.optim import AdamW, Muon, Optimizer
from monograph.resident import Resident
from monograph.session import warmup
from monograph.stream import Placement, Streamed
from pretended_gpu import card

SM = int(os.environ.get("PRETENDED_SM", "90"))
HALF = "bf16" if SM >= 80 else "fp16"  # of 16 bits
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
ROWS, LENGTH = 2, 1024
EVERY = Sampling(
    0.8, top_k=40, top_p=0.95, min_p=0.05, typical_p=0.9, top_a=0.1, epsilon_cutoff=1e-4, eta_cutoff=1e-4,
    top_n_sigma=2.0, xtc_probability=0.5, min_keep=2, mirostat_tau=3.0, temperature_range=0.2, repetition_penalty=1.1,
    frequency_penalty=0.1, penalty_last_n=64, dry_multiplier=0.8, min_tokens=4, logit_bias={5: 1.0}, logprobs=5,
)  # fmt: skip
OWN = "kernels written by hand,"  # cases that begin so launch nothing else
Parts = dict[str, pretended.Counted]


class Refused(Exception):
    """One line says why this card cannot do it."""


class Found(dict[str, Any]):
    """What a case found: `parts` by name, and the lines that the engine announced."""


def small(**over: Any) -> Shape:
    """Return a small shape."""
    return Shape(LlamaConfig(**SMALL | over), LENGTH, ROWS)


def preset(name: str) -> Shape:
    """Return a preset's shape with two layers."""
    return Shape(LlamaConfig.preset(name, num_hidden_layers=2), LENGTH, ROWS)


def resident(
    model: nn.Module, optim: Optimizer | None = None, precision: str = HALF, micro_batch: int = ROWS
) -> Resident:
    """Return an engine like that of `monograph train`."""
    if obstacle := Precision(precision).obstacle(describe()):
        raise Refused(obstacle)
    return Resident(
        model,
        optim=optim or AdamW(lr=1e-3),
        clip=1.0,
        precision=Precision(precision),
        micro_batch=micro_batch,
    )


def counted(work: Callable[[], object]) -> pretended.Counted:
    """Return what a call launches."""
    with pretended.Counted() as counts:
        work()
    return counts


def trained(engine: Engine, window: Batch) -> Found:
    """Capture the step as a run does, and count a micro-step, called and replayed, an update and an
    evaluation.
    """
    step, said = engine.step, list[str]()
    step.announce = engine.announce = said.append
    # As a run does where flex attention's kernels need more shared memory than the card has.
    eager = warmup.capture_engine(engine, window, "whole")
    engine.accumulate(window)
    engine.update()
    batch = next(engine._micro_batches(window))
    parts = {
        "micro-step replayed": counted(lambda: step.micro_step(batch)),
        "micro-step called": counted(lambda: step._micro_step(batch)),
        "update": counted(engine.update),
        "evaluation": counted(lambda: engine.evaluate(batch)),
    }
    attention = getattr(engine.model, "attention", None)
    return Found(
        parts=parts, said=said, eager=eager, captured=is_replayed(step), attention=attention
    )


def on_card(shape: Shape) -> Llama:
    """Return a model on the card whose weights nobody wrote."""
    return launches.model_of(shape.config)


def training(shape: Shape, optim: Optimizer | None = None, precision: str = HALF) -> Found:
    """Train the shape on packed rows."""
    return trained(
        resident(on_card(shape), optim, precision), packed_window(shape, torch.device("cuda"))
    )


def plain_training(shape: Shape) -> Found:
    """Train the shape on rows of one document, by the kernel for attention that torch chooses."""
    window = packed_window(shape, torch.device("cuda"))
    return trained(resident(on_card(shape)), {name: window[name] for name in ("tokens", "targets")})


def adapting(base: Any) -> Found:
    """Train adapters on a frozen base."""
    shape = small()
    model = Llama(shape.config)
    install_adapters(
        model, Lora(rank=16, base=base), precision=Precision(HALF), device=torch.device("cuda")
    )
    return trained(resident(model.to("cuda")), packed_window(shape, torch.device("cuda")))


def ensemble() -> Found:
    """Train three members at once."""
    shape = small()
    members = [on_card(shape) for _ in range(3)]
    engine = Ensemble(
        members, optim=AdamW(lr=1e-3), clip=1.0, precision=Precision(HALF), micro_batch=ROWS
    )
    return trained(engine, packed_window(shape, torch.device("cuda")))


def streaming(**placed: Any) -> Found:
    """Train stage by stage; the second window's passes and update are counted."""
    shape = small(num_hidden_layers=2)
    window = packed_window(shape, torch.device("cuda"))
    clip = None if placed.get("when") == "backward" else 1.0
    placement = Placement(torch.device("cuda", 0), **placed)
    engine = Streamed(
        Llama(shape.config), optim=AdamW(lr=1e-3), clip=clip, precision=Precision(HALF), micro_batch=1,
        placement=placement,
    )  # fmt: skip
    eager = warmup.capture_engine(engine, window, "blocks")

    def update() -> None:
        engine.accumulate(window)
        engine.update()
        engine.walk.lanes.finish()  # or the host's thread would wait for the device some time later

    update()
    update()
    parts = {"update": counted(update), "evaluation": counted(lambda: engine.evaluate(window))}
    return Found(parts=parts, said=[], eager=eager, captured=None, attention=engine.model.attention)


def decoding(
    shape: Shape,
    sampling: Sampling,
    rows: int,
    machines: Sequence[Automaton] = (),
    prompt: int = 300,
) -> Found:
    """Decode by blocks of steps, which are replayed, and call the step with both ways to narrow the
    tokens.
    """
    generator = Generator(
        on_card(shape).to(Precision(HALF).dtype), chain_of([sampling], stop_ids=1), rows=rows, slots=576,
        vocabulary=shape.config.vocab_size, automata=machines, mode="compiled",
    )  # fmt: skip
    for row in range(rows):
        machine = machines[row % len(machines)] if machines else None
        generator.submit(
            Request((5,) * prompt, dataclasses.replace(sampling, seed=row), 64, (1,), machine)
        )
    # Not `run`, which would wait for the end of a text: no token is drawn here.
    generator.advance()
    block = generator._launch_block()
    assert block
    parts = {
        "block of 16 replayed": counted(generator._launch_block),
        "block read": counted(lambda: generator.outbox.read(block.half, block.lines)),
    }
    step, blocks = generator.steps.step_for(generator.chain), generator.cache.block_counts[-1]
    for truncation in ("window", "search"):
        step(blocks, truncation)
        parts[f"step called, {truncation}"] = counted(lambda t=truncation: step(blocks, t))
    return Found(
        parts=parts, said=[], eager=None, captured=generator.replays.graph_count > 0, attention=None
    )


def hybrid() -> Found:
    """Decode with delta nets, whose heads have the sizes of Qwen3-Next's, and gated attention."""
    shape = small(
        num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), model_type="qwen3_next",
        head_dim=128, partial_rotary_factor=0.25, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    # cuBLAS' triangular solver, by which delta nets read prompts, cannot be pretended.
    return decoding(shape, Sampling(0.8), 2, prompt=1)


def constrained(rows: int) -> Found:
    """Decode with the full chain, a regular expression and a schema, at the width and the
    vocabulary of 1b.
    """
    shape = preset("1b")
    pieces = automata.vocabulary(shape.config.vocab_size)
    machines = [
        constraint("regex", r"[0-9a]{1000,1100}", pieces, [automata.END]),
        constraint("json_schema", automata.PERSON, pieces, [automata.END]),
    ]
    return decoding(shape, FULL, rows, machines)


def kernels_of_attention() -> Found:
    """Capture causal attention, forward and backward, by each kernel that a run may choose here."""
    device, dtype, parts = torch.device("cuda", 0), Precision(HALF).dtype, Parts()
    for size in (64, 128):
        for kernel in time_kernels(ROWS, (4, 2), LENGTH, size, dtype, device):
            parts[f"{kernel}, {size} channels"] = attending(kernel, size, dtype, device)
    return Found(parts=parts, said=[], eager=None, captured=True, attention="sdpa")


def attending(
    kernel: AttentionKernel, size: int, dtype: torch.dtype, device: torch.device
) -> pretended.Counted:
    """Capture a kernel for grouped heads, then count what it launches."""
    query, key, value = (
        torch.empty(ROWS, heads, LENGTH, size, dtype=dtype, device=device).requires_grad_()
        for heads in (4, 2, 2)
    )

    def work() -> None:
        out = attention(query, key, value, None, "sdpa", kernel)
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))

    CudaGraphs(device).record(work)
    return counted(work)


def called_alone(model: str) -> Found:
    """Launch each kernel that is written by hand at the shapes of a model."""
    if SM < 80:
        raise Refused("kernels for decoding need a GPU of compute capability 8.0 or higher")

    total = pretended.Counted()
    # What a call needs is made before it is counted.
    for name, call in own_kernels.CALLS[model](Precision(HALF).dtype):
        with cubins.computing(name):
            called = counted(call)
        total.launches += called.launches
        total.waits += called.waits
        total.waiting_copies += called.waiting_copies
    return Found(parts={"all": total}, said=[], eager=None, captured=None, attention=None)


CASES: dict[str, Callable[[], Found]] = {
    "attention's kernels": kernels_of_attention,
    "124m": lambda: training(preset("124m")),
    "1b": lambda: training(preset("1b")),
    "one document a row": lambda: plain_training(small()),
    "heads of 16": lambda: training(small(num_attention_heads=16)),
    "heads of 256": lambda: training(small(hidden_size=1024)),
    "fp8": lambda: training(small(), precision="fp8"),
    "fp32": lambda: training(small(), precision="fp32"),
    "adamw, 8bit": lambda: training(small(), AdamW(state="8bit")),
    "adamw, bf16": lambda: training(small(), AdamW(state="bf16")),
    "muon": lambda: training(small(), Muon()),
    "lora on nf4": lambda: adapting("nf4"),
    "lora on int8": lambda: adapting("int8"),
    "ensemble of 3": ensemble,
    "streamed": lambda: streaming(when="next forward", offload=True),
    "streamed, updated at once": lambda: streaming(when="backward"),
    "streamed, updated on the host": lambda: streaming(where="host"),
    "decoding, batch 1": lambda: constrained(1),
    "decoding, batch 64": lambda: constrained(64),
    "decoding, no filter": lambda: decoding(small(), Sampling(0.8), 2),
    "decoding, every stage": lambda: decoding(small(), EVERY, 2),
    "decoding, delta nets": hybrid,
    **{f"{OWN} {model}": functools.partial(called_alone, model) for model in own_kernels.CALLS},
}


def watch() -> None:
    """Note kernels and launches from now on."""
    pretended.watch()
    # No time is estimated here, for which each kernel would be disassembled.
    pretended.issued = lambda *_: 0.0
    cubins.watch()


def measured(name: str) -> tuple[dict[str, Any], list[cubins.Kernel]]:
    """Run a case; return what it needs on this card, and its kernels."""
    torch._dynamo.reset()
    began, before = clock(), len(card.faults())
    case: dict[str, Any] = {"case": name, "sm": SM, "dtype": HALF}
    with cubins.compiled(SM) as kernels:
        try:
            found = CASES[name]()
        except Refused as refused:
            return case | {"refused": str(refused)}, []
    if faults := card.faults()[before:]:
        raise SystemExit(f"machine_code.py: {name}: {faults[0]}")
    case |= {name: found[name] for name in ("eager", "captured", "said", "attention")}
    case["parts"] = {part: counts_of(counted) for part, counted in found["parts"].items()}
    case["kernels"] = dict(by_kind(kernels))
    case["seconds"] = round(clock() - began)
    found.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return case, kernels


def counts_of(counted: pretended.Counted) -> dict[str, float]:
    """Return the launches by library, graphs and waits of a part."""
    numbers = counted.numbers()
    names = ("launches", *pretended.LIBRARIES, "graphs", "waits", "waiting_copies")
    return {name: numbers[name] for name in names}


def by_kind(kernels: Sequence[cubins.Kernel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by kind of kernel how many there are, and the most that one of them needs."""
    for kind in sorted({kernel.kind for kernel in kernels}):
        own = [kernel for kernel in kernels if kernel.kind == kind]
        most: dict[str, Any] = {
            "kernels": len({kernel.name for kernel in own}),
            "configurations": len(own),
        }
        for need in ("registers", "stack_bytes", "spilled_bytes", "shared_bytes"):
            most[need] = max(getattr(kernel, need) for kernel in own)
        worst = max(own, key=lambda kernel: kernel.spilled_bytes)
        yield kind, most | ({"spilling": worst.name} if worst.spilled_bytes else {})


HEADERS = ["", "captured", "launches", "waits", "registers", "stack", "spilled", "shared", "s"]


def row(case: dict[str, Any]) -> list[str]:
    """Return a case's line of the table: its first part, and the most that a kernel needs."""
    if "refused" in case:
        return [f"{case['case']}: {case['refused']}", *[""] * (len(HEADERS) - 1)]
    parts = list(case["parts"].values())
    most = [max((kind[need] for kind in case["kernels"].values()), default=0) for need in NEEDS]
    waits = sum(part["waits"] + part["waiting_copies"] for part in parts)
    launched = "/".join(f"{part['launches']:.0f}" for part in parts)
    return [
        case["case"],
        str(case["captured"]),
        launched,
        f"{waits:.0f}",
        *map(str, most),
        str(case["seconds"]),
    ]


NEEDS = ("registers", "stack_bytes", "spilled_bytes", "shared_bytes")


def main() -> None:
    """Compile, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    watch()
    found = harness.result(
        "machine_code", {"rows": ROWS, "length": LENGTH}, others(args.out, args.cases)
    )
    for name in args.cases:
        print(name, flush=True)
        found["cases"].append(measured(name)[0])
        print(json.dumps(found["cases"][-1]), flush=True)
        harness.write(args.out, found)
    harness.print_table(HEADERS, [row(case) for case in found["cases"] if case["sm"] == SM])


def others(path: Path | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the file's cases but those that are run again."""
    there = json.loads(path.read_text())["cases"] if path and path.exists() else []
    return [case for case in there if case["sm"] != SM or case["case"] not in names]


if __name__ == "__main__":
    main()
