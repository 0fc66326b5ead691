"""Compare memory, traffic and time of `train.parallel=ddp|fsdp` on each rank with torch's own
engines in a plain loop.

Each case starts its ranks anew, on a CPU with gloo. It does so once for each loop, to measure the
process's anonymous memory beyond that before the model was built (between two updates, and the peak
of one; on the rank with the most), and once for both loops, which take turns, to measure time.
Traffic is counted: what rank 0 sends in an update if each collective is a ring. Both have the same
model, windows of two micro-batches per rank, clipping, the same optimizer (Muon for the matrices of
blocks beside AdamW, or AdamW alone), and a graph for each block (`--smoke`: none). Ranks share the
cores, so only the ratio of the times counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from loading import most_anonymous, trimmed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monograph.distributed.engine import Replicated, Sharded
from monograph.distributed.world import World, read_place
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.resident import Resident

ROUNDS, MICRO, CLIP, LR, DECAY = 9, 2, 1.0, 1e-3, 0.1
ADAMW, MUON = "adamw", "muon"
CASES = [
    ("none", 1, ADAMW),
    ("ddp", 2, ADAMW),
    ("ddp", 4, ADAMW),
    ("fsdp", 2, ADAMW),
    ("fsdp", 4, ADAMW),
]
CASES += [("fsdp", 2, MUON), ("fsdp", 4, MUON)]
WARM = 2  # updates, after which optimizers have their state, and DDP its buckets
Window = dict[str, Tensor]
Loop = Callable[[Window], object]


@dataclass(frozen=True)
class Shape:
    """A model, rows of a micro-batch and their length, whether each block is a graph, and the
    optimizer.
    """

    config: LlamaConfig
    length: int
    rows: int = 2
    captured: bool = True
    optim: str = ADAMW

    def window(self, ranks: int, index: int) -> Window:
        """Return the rows of an update, the same on every rank."""
        size = (MICRO * ranks * self.rows, self.length + 1)
        tokens = torch.randint(
            0, self.config.vocab_size, size, generator=torch.Generator().manual_seed(index)
        )
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def shape_of(vocabulary: int, width: int, layers: int, length: int) -> Shape:
    """Return a shape with few tokens per micro-step, so that most memory is that of the weights."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length, tie_word_embeddings=True,
    )  # fmt: skip
    return Shape(config, length)


SHAPE, TINY = shape_of(4096, 576, 6, 64), shape_of(64, 48, 2, 16)


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="leave out cases with more"
    )
    # PARALLEL OPTIMIZER LOOP [LOOP].
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape, rounds = (replace(TINY, captured=False), 2) if given.smoke else (SHAPE, ROUNDS)
    if given.rank:
        parallel, optim, *names = given.rank
        print(json.dumps(rank(parallel, names, replace(shape, optim=optim), rounds)))
        return
    settings = {
        "parameters": shape.config.parameter_count(),
        "rows": shape.rows,
        "length": shape.length,
    }
    found = harness.result("ranks", settings | {"rounds": rounds, "micro_batches": MICRO})
    harness.print_machine(found)
    rows = []
    for parallel, ranks, optim in CASES:
        if ranks <= given.ranks:
            case: dict[str, Any] = {"parallel": parallel, "ranks": ranks, "optim": optim}
            case |= {name: started(parallel, ranks, [optim, name], given.smoke) for name in LOOPS}
            case["slower"] = started(parallel, ranks, [optim, *LOOPS], given.smoke)
            found["cases"].append(case)
            harness.write(given.out, found)
            counted = [
                f"{case[name][kind]:.1f}" for kind in ("held", "peak", "sent") for name in LOOPS
            ]
            rows.append(
                [f"{parallel} x {ranks}, {optim}", *counted, harness.shown(case["slower"]["cpu"])]
            )
            print(f"{rows[-1][0]}: {', '.join(counted)}", flush=True)
    theirs = "torch's"
    headers = [
        "bytes a parameter",
        "held",
        theirs,
        "at the peak",
        theirs,
        "sent",
        theirs,
        "CPU time over torch's",
    ]
    harness.print_table(headers, rows)


def started(parallel: str, ranks: int, optim_and_names: list[str], smoke: bool) -> dict[str, Any]:
    """Start that many ranks and return the result of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    shared |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if len(optim_and_names) == 2:  # to measure memory: otherwise glibc keeps freed memory
        shared |= {"MALLOC_MMAP_THRESHOLD_": "65536"}
    arguments = ["--rank", parallel, *optim_and_names, *["--smoke"] * smoke]
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    processes = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(ranks)
    ]  # fmt: skip
    said = [each.communicate() for each in processes]
    for number, each in enumerate(processes):
        if each.returncode:
            raise SystemExit(
                f"{parallel} x {ranks}, rank {number}: exit {each.returncode}\n{said[number][1]}"
            )
    found: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return found


# ── in a rank ─────────────────────────────────────────────────────────────────────────────────────


def rank(parallel: str, names: list[str], shape: Shape, rounds: int) -> dict[str, Any]:
    """Return one loop's bytes per parameter, or the ratios of two loops' times."""
    world = World(None if parallel == "none" else read_place())
    windows = [shape.window(world.size, index) for index in range(WARM + 1)]
    if len(names) == 1:
        build = LOOPS[names[0]]
        tiny = replace(TINY, captured=shape.captured, optim=shape.optim)
        # Not counted: modules, threads.
        tried(build(parallel, tiny, world), [tiny.window(world.size, 0)])
        counted = memory(lambda: build(parallel, shape, world), windows, world)
        counted["sent"] = traffic(
            build(parallel, replace(shape, captured=False), world), windows[0], world
        )
        found = {name: each / shape.config.parameter_count() for name, each in counted.items()}
    else:
        loops = {name: LOOPS[name](parallel, shape, world) for name in names}
        for loop in loops.values():
            tried(loop, windows[:WARM])
        cases = {name: (lambda loop=loop: loop(windows[-1])) for name, loop in loops.items()}  # type: ignore[misc]
        times = harness.interleaved(cases, rounds, torch.device("cpu"))
        found = harness.ratios(*times.values())
    world.leave()
    return found


def memory(build: Callable[[], Loop], windows: list[Window], world: World) -> dict[str, float]:
    """Return the bytes held after some updates, and at the peak of another one, on the rank with
    the most.
    """
    before = trimmed()
    loop = build()
    tried(loop, windows[:WARM])
    held = trimmed() - before
    with most_anonymous() as peak:
        loop(windows[WARM])
    counted = torch.tensor([held, peak[0] - before], dtype=torch.float64)
    if not world.alone:
        dist.all_reduce(counted, dist.ReduceOp.MAX)
    return dict(zip(("held", "peak"), counted.tolist(), strict=True))


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends, if collectives are rings."""

    def __init__(self, ranks: int):
        """Count for so many ranks."""
        super().__init__()
        self.ranks, self.bytes = ranks, 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count a collective; sharded tensors come apart first."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        space, _, name = function._schema.name.partition("::")
        if "c10d" in space:
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            sizes = [each.nbytes for each in tensors]
            others = self.ranks - 1
            if "reduce_scatter" in name or "allgather" in name or "all_gather" in name:
                self.bytes += min(sizes) * others  # a rank's part
            elif "reduce" in name:
                self.bytes += 2 * sum(sizes) * others / self.ranks
            elif "alltoall" in name:
                self.bytes += tensors[1].nbytes * others / self.ranks
        return function(*args, **kwargs or {})


def traffic(loop: Loop, window: Window, world: World) -> float:
    """Return the bytes that this rank sends in an update."""
    with Sent(world.size) as sent:
        loop(window)
    return sent.bytes


def tried(loop: Loop, windows: list[Window]) -> None:
    """Run some updates."""
    for window in windows:
        loop(window)


def ours(parallel: str, shape: Shape, world: World) -> Loop:
    """Return the engine of a run."""
    optim = {ADAMW: AdamW, MUON: Muon}[shape.optim](lr=LR, weight_decay=DECAY)
    options: dict[str, Any] = {"optim": optim, "clip": CLIP, "micro_batch": shape.rows}
    model, engine = Llama(shape.config), Resident
    if parallel != "none":
        options["world"], engine = world, {"ddp": Replicated, "fsdp": Sharded}[parallel]
    made = engine(model, **options)
    if shape.captured and (obstacle := made.capture(shape.window(world.size, 0), scope="blocks")):
        raise SystemExit(f"ranks.py: cannot be captured: {obstacle}")

    def update(window: Window) -> None:
        made.accumulate(window)
        made.update()

    return update


class WithLoss(nn.Module):
    """A model with its mean loss over dense logits."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.model = Llama(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch, 0-d."""
        logits = self.model.lm_head(self.model(tokens))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(parallel: str, shape: Shape, world: World) -> Loop:
    """Return the loop of a tutorial: DDP averages gradients with the last micro-batch, FSDP2 with
    each one.
    """
    model: Any = WithLoss(shape.config)
    if shape.captured:
        for block in model.model.model.layers:
            block.compile(fullgraph=True)
    if parallel == "ddp":
        model = DistributedDataParallel(model)
    elif parallel == "fsdp":
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = dict(model.named_parameters())
    matrices = [groups.pop(name) for name in [*groups] if shape.optim == MUON and "_proj" in name]
    optimizers = [torch.optim.AdamW(groups.values(), lr=LR, weight_decay=DECAY, foreach=True)]
    optimizers += [torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY)] if matrices else []

    def update(window: Window) -> None:
        for turn in range(MICRO):
            start = (turn * world.size + world.rank) * shape.rows
            tokens, targets = (
                window[name][start : start + shape.rows] for name in ("tokens", "targets")
            )
            last = turn == MICRO - 1
            with nullcontext() if last or parallel != "ddp" else model.no_sync():
                (model(tokens, targets) / MICRO).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


LOOPS: dict[str, Callable[[str, Shape, World], Loop]] = {"monograph": ours, "torch": plain}

if __name__ == "__main__":
    main()
