"""Compare N small models at once with the alternatives: one after another, eager or compiled, and
`torch.func` by hand.

Inference and a training step (forward, backward, AdamW with each member's own learning rate; by
hand with one rate for all) are interleaved, each way in a process of its own. Ratios say how many
times faster the ensemble is: in CPU time with one thread, in wall time with more threads or on a
GPU. The fastest alternative is the one to compare with. On a GPU, the alternatives include eager
and compiled loops and `torch.func` that the user has captured as CUDA graphs, and inference of the
ensemble captured in the same way.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F
from rounds import Child, ChildFailed
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from monograph.allocator import keep_freed_memory
from monograph.device import clock, default_device
from monograph.ensemble import Ensemble
from monograph.loss import Batch, Loss, token_loss
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW

LR = 1e-3
OURS = "ensemble"
BEGAN = clock()


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, width] to [B, width]."""
        return self.down(F.relu(self.up(inputs)))


class ResBlock(nn.Module):
    """Two convolutions with norms, and a residual connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, channels, H, W] to the same shape."""
        hidden = F.relu(self.norms[0](self.first(inputs)))
        return F.relu(inputs + self.norms[1](self.second(hidden)))


def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean over a row's outputs of their squared distance from the targets, summed over
    rows.
    """
    out = model(batch["inputs"])
    rows = batch["inputs"].shape[0]
    return F.mse_loss(out, batch["targets"]) * rows, torch.full((), rows, device=out.device)


class Case(NamedTuple):
    """A model, N members, and a batch for all of them."""

    build: Callable[[], nn.Module]
    members: int
    batch: Batch
    loss: Loss

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs of one member, for inference."""
        return (next(iter(self.batch.values())),)


def regression(*shape: int) -> Batch:
    """Return random inputs and targets."""
    return {"inputs": torch.randn(*shape), "targets": torch.randn(*shape)}


def cases(smoke: bool) -> dict[str, Case]:
    """Return the three shapes for which the ensemble was designed."""
    shape = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    rows = torch.randint(256, (2, 33))
    tokens = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    few = 2 if smoke else None
    return {
        "MLP 64-128-64": Case(lambda: MLP(64), few or 100, regression(32, 64), squares),
        "ResBlock 64 channels 16x16": Case(
            lambda: ResBlock(64), few or 20, regression(few or 8, 64, 16, 16), squares
        ),
        "Llama 2 layers of 64": Case(lambda: Llama(shape), few or 8, tokens, token_loss),
    }


# ── the ways ──────────────────────────────────────────────────────────────────────────────────────


def one_after_another(
    case: Case,
    models: Sequence[nn.Module],
    train: bool,
    compiled: bool = False,
    captured: bool = False,
) -> Callable[[], object]:
    """Return a loop over the members; if compiled, one graph serves all, and the optimizer is
    torch's fused AdamW; `captured` prepares the optimizer for a CUDA graph.
    """

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        total, count = case.loss(model, batch)
        return total / count

    def infer(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        return model(*inputs)

    run, look = (
        (torch.compile(f, dynamic=False) for f in (forward, infer))
        if compiled
        else (forward, infer)
    )
    inputs = case.inputs()
    if not train:

        @torch.no_grad()
        def looked() -> None:
            for model in models:
                look(model, inputs)

        return looked
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=LR, fused=compiled, capturable=captured)
        for model in models
    ]

    def stepped() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            run(model, case.batch).backward()
            optimizer.step()

    return stepped


def by_hand(
    case: Case,
    models: Sequence[nn.Module],
    train: bool,
    compiled: bool = False,
    captured: bool = False,
) -> Callable[[], object]:
    """Return the recipe of `torch.func`'s documentation: stacked state, vmap, and one AdamW over the
    stacks.

    If compiled, what vmap returns is one graph, and the optimizer is torch's fused AdamW;
    `captured` prepares the optimizer for a CUDA graph.
    """
    parameters, buffers = stack_module_state(list(models))
    base = models[0]
    inputs = case.inputs()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = base

        def forward(self, batch: Batch) -> Tensor:
            total, count = case.loss(self.model, batch)
            return total / count

    def outputs(p: dict[str, Tensor], b: dict[str, Tensor]) -> Any:
        return vmap(lambda p, b: functional_call(base, (p, b), inputs))(p, b)

    if not train:
        look = torch.compile(outputs, dynamic=False) if compiled else outputs

        @torch.no_grad()
        def looked() -> None:
            look(parameters, buffers)

        return looked
    leaves = {name: nn.Parameter(tensor.detach()) for name, tensor in parameters.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=LR, fused=compiled, capturable=captured)
    wrapped = Loss()

    def of_one(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        named = {f"model.{name}": tensor for name, tensor in (p | b).items()}
        out: Tensor = functional_call(wrapped, named, (case.batch,))
        return out

    def gradients(p: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = vmap(grad(of_one))(p, b)
        return found

    differentiate = torch.compile(gradients, dynamic=False) if compiled else gradients

    def stepped() -> None:
        grads = differentiate({name: leaf.detach() for name, leaf in leaves.items()}, buffers)
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        optimizer.step()

    return stepped


def together(case: Case, models: Sequence[nn.Module], train: bool) -> Callable[[], object]:
    """Return the captured ensemble, with a learning rate for each member."""
    knobs = [{"lr": LR * (1 + index / len(models))} for index in range(len(models))]
    ensemble = Ensemble(models, knobs, loss=case.loss, optim=AdamW)
    if train:
        if obstacle := ensemble.capture(case.batch):
            raise SystemExit(f"ensemble_peers.py: the step cannot be captured: {obstacle}")

        def stepped() -> None:
            ensemble.accumulate(case.batch)
            ensemble.update()

        return stepped
    ensemble.compile()
    inputs = case.inputs()

    @torch.no_grad()
    def looked() -> None:
        ensemble(*inputs)

    return looked


class Graphed:
    """Work that was captured as a CUDA graph.

    A graph reads and writes addresses, and keeps no tensor alive. So this object keeps the work,
    which has the weights and the optimizers' states.
    """

    def __init__(self, run: Callable[[], object], graph: torch.cuda.CUDAGraph) -> None:
        self.run, self.graph = run, graph

    def __call__(self) -> None:
        """Replay it."""
        self.graph.replay()


def cuda_graphed(run: Callable[[], object]) -> Graphed:
    """Return the same work, captured once as a CUDA graph and replayed."""
    # Warm-up and capture use one stream, because autograd accumulates a gradient on the stream that
    # used the parameter first. The warm-up compiles all that is compiled.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return Graphed(run, graph)


def ways(case: Case, train: bool) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return, by name, a function that prepares each way. One process prepares only one of them."""
    device = default_device()
    case = case._replace(batch={name: tensor.to(device) for name, tensor in case.batch.items()})
    models = [case.build().to(device).train(train) for _ in range(case.members)]

    def graphed(way: Callable[..., Callable[[], object]], compiled: bool) -> Graphed:
        return cuda_graphed(way(case, models, train, compiled=compiled, captured=True))

    found: dict[str, Callable[[], Callable[[], object]]] = {
        OURS: lambda: together(case, models, train),
        "loop": lambda: one_after_another(case, models, train),
        "compiled loop": lambda: one_after_another(case, models, train, compiled=True),
        "torch.func": lambda: by_hand(case, models, train),
        "compiled torch.func": lambda: by_hand(case, models, train, compiled=True),
    }
    if device.type == "cuda":
        found |= {
            "graphed loop": lambda: graphed(one_after_another, compiled=False),
            "graphed compiled loop": lambda: graphed(one_after_another, compiled=True),
            "graphed torch.func": lambda: graphed(by_hand, compiled=True),
        }
        if not train:  # a training step replays graphs of its own
            found["graphed ensemble"] = lambda: cuda_graphed(together(case, models, train))
    return found


def way_names(train: bool) -> list[str]:
    """Return the names of the ways on this machine."""
    one = Case(lambda: MLP(1), 1, regression(1, 1), squares)
    return list(ways(one, train))


def progress(text: str) -> None:
    """Print a line with the seconds since the script began."""
    print(f"{clock() - BEGAN:6.1f} s  {text}", flush=True)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def run_way(way: str, case: Case, train: bool) -> None:
    """Prepare one way at the first line of the input, and run it as often as each later line says.

    Each line is answered by a line of JSON.
    """
    # What compilers print must not mix with the answers.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    device = default_device()
    keep_freed_memory()  # as a captured ensemble does, for all alike

    def answer(**found: object) -> None:
        print(json.dumps(found), file=replies, flush=True)

    prepare = ways(case, train)[way]
    sys.stdin.readline()
    began = clock()
    try:
        run = prepare()
        run()
        run()
        one = harness.timed(run, device)
    except Exception as error:
        answer(failed=first_line(error))
        return
    answer(ready_s=clock() - began, one_s=one.wall_s)

    def repeated(times: int) -> None:
        for _ in range(times):
            run()

    for line in sys.stdin:
        times = json.loads(line)["updates"]
        timing = harness.timed(functools.partial(repeated, times), device)
        answer(wall_s=timing.wall_s / times, cpu_s=timing.cpu_s / times)
    os._exit(0)  # freeing all at the end of a process takes seconds, and nothing needs it


def measured(
    name: str, case: Case, train: bool, threads: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return times and ratios of one case. An alternative that fails is named with its error."""
    arguments = ["--threads", str(threads), "--case", name, *["--smoke"] * args.smoke]
    arguments += ["--train"] * train
    children = {
        way: Child([__file__, "--way", way, *arguments], threads, {}) for way in way_names(train)
    }
    counts, ready, failed = {}, {}, {}

    def ask(way: str, **order: Any) -> dict[str, Any] | None:
        """Return a way's answer, or None if it has failed or fails now."""
        if way in failed:
            return None
        try:
            told = children[way].ask(**order)
        except ChildFailed as error:
            told = {"failed": error.args[0]}
        except BrokenPipeError:
            told = {"failed": "its process ended"}
        if "failed" not in told:
            return told
        if way == OURS:
            raise SystemExit(f"ensemble_peers.py: the ensemble failed: {told['failed']}")
        failed[way] = told["failed"]
        progress(f"{way} failed: {failed[way]}")
        return None

    for way in children:
        if told := ask(way, prepare=True):
            ready[way], counts[way] = told["ready_s"], max(1, round(args.round_s / told["one_s"]))
            progress(f"{way} ready in {ready[way]:.1f} s, {1000 * told['one_s']:.3f} ms once")
    answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ready}
    for way in harness.turns(ready, args.rounds):
        if told := ask(way, updates=counts[way]):
            answers[way].append(told)
    for way in failed:
        answers.pop(way, None)
    for way in answers:
        children[way].end()
    each = {
        way: [harness.Timing(told["wall_s"], told["cpu_s"]) for told in found]
        for way, found in answers.items()
    }
    ratios = {way: harness.ratios(found, each[OURS]) for way, found in each.items() if way != OURS}
    return {
        "name": name,
        "members": case.members,
        "train": train,
        "ready_s": ready,
        "failed": failed,
        "seconds": {way: harness.spread([t.cpu_s for t in found]) for way, found in each.items()},
        "wall_seconds": {
            way: harness.spread([t.wall_s for t in found]) for way, found in each.items()
        },
        "faster_than": ratios,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--round-s", type=float, default=0.3, help="a round repeats a way for about so long"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", help="each by itself; default 1 and 2, on a GPU only 1"
    )
    parser.add_argument("--case", nargs="+", help="only those whose name holds one of these")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a process that measures one way
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        torch.set_num_threads(args.threads[0])
        torch.manual_seed(0)
        (name,) = args.case
        run_way(args.way, cases(args.smoke)[name], args.train)
        return
    if args.threads is None:
        args.threads = [1] if default_device().type == "cuda" else [1, 2]
    if args.smoke:
        args.rounds, args.round_s, args.threads = 2, 0.0, [1]
    settings = {"rounds": args.rounds, "round_s": args.round_s}
    found = harness.result("ensemble-peers", settings)
    harness.print_machine(found)
    rows = []
    for threads, (name, case), train in itertools.product(
        args.threads, cases(args.smoke).items(), (False, True)
    ):
        if args.case and not any(part in name for part in args.case):
            continue
        label = (
            f"{name}, N = {case.members}, {'training' if train else 'inference'}, threads {threads}"
        )
        progress(label)
        one = measured(name, case, train, threads, args) | {"threads": threads}
        found["cases"].append(one)
        kind = "cpu" if threads == 1 and default_device().type == "cpu" else "wall"
        shown = {way: harness.shown(ratios[kind]) for way, ratios in one["faster_than"].items()}
        rows.append((label, shown))
        harness.write(args.out, found)
        progress(", ".join(f"{way} {ratio}" for way, ratio in shown.items()))
    others = list(dict.fromkeys(way for _, shown in rows for way in shown))
    harness.print_table(
        ["times faster than", *others],
        [[label, *(shown.get(way, "-") for way in others)] for label, shown in rows],
    )


if __name__ == "__main__":
    main()
