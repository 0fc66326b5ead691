"""What each rank of law 13's test runs: every case against one process, errors written by rank 0 as
JSON.

By day fewer cases, such that each engine, dtype, way and kind of window is there.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from batches import large_batch_gradient, packed, ragged, tiny_llama
from four_bits import FOUR_BITS
from monograph import checkpointing, compat
from monograph.checkpointing import Checkpoint
from monograph.device import default_device
from monograph.distributed import replicated
from monograph.distributed import sharded as room
from monograph.distributed.checkpoint import save
from monograph.distributed.engine import Replicated, Sharded, streamed_replica
from monograph.distributed.world import World, read_place
from monograph.errors import OutOfDeviceMemory
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.loop import EngineState
from monograph.loss import MtpLoss
from monograph.optim import AdamW, Group, Muon, muon, newton_schulz
from monograph.optim.formats import FORMATS
from monograph.predict.estimate import gathered_copy_bytes
from monograph.resident import Resident
from monograph.storage import blocks
from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement

ENGINES = {"ddp": Replicated, "fsdp": Sharded}
ROWS = 2  # of a micro-batch
SMALL_BLOCK = 10_000  # bytes: a file has many, most of them written by several ranks
# By day one: what FSDP2 and DDP do with a second, they do with what is around it.
LAYERS = {"num_hidden_layers": 2}


def windows(size: int) -> dict[str, int]:
    """Rows of a window: so many micro-batches for W ranks, the last of the third cut short, the
    last for one rank.
    """
    return {"W": ROWS * size, "2W": 2 * ROWS * size, "2W+1": ROWS * (2 * size + 1) - 1, "1": 1}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def in_state(world: World, tensor: Tensor, exact: Tensor) -> float:
    """Return the error of a tensor of a state; of scales of 8-bit blocks, the sum of those of each
    rank's own.
    """
    place: slice | None = getattr(tensor, "unusual_slice", None)
    if place is None:
        return relative_error(whole(tensor).double(), exact.double())
    own = relative_error(tensor.to_local().double(), exact[place].double())  # type: ignore[attr-defined]
    return float(world.sum(torch.tensor(own, dtype=torch.float64)))


def gradient(engine: Any) -> Tensor:
    """As one flat vector in the order of the module's parameters."""
    views = {name: view for plane in engine.step.planes for name, view in plane.views(plane.grad)}
    return torch.cat([whole(views[name]).flatten() for name, _ in engine.model.named_parameters()])


def model(dtype: torch.dtype, tied: bool, **sizes: Any) -> Any:
    return tiny_llama(dtype, tie_word_embeddings=tied, **(LAYERS | sizes)).to(default_device())


@functools.cache
def exact_gradient(dtype: torch.dtype, tied: bool, rows: int) -> Tensor:
    return large_batch_gradient(model(dtype, tied), ragged(rows, seed=rows))


MODELS = [*itertools.product(ENGINES, (torch.float32, torch.float64), (False, True))]
MODELS_BY_DAY = [
    ("ddp", torch.float64, True),
    ("fsdp", torch.float64, False),
    ("fsdp", torch.float32, True),
]


def gradients(world: World, by_day: bool) -> dict[str, Any]:
    """Relative error of the gradient, and the ratio of its norm, of every case."""
    found = {}
    for kind, dtype, tied in MODELS_BY_DAY if by_day else MODELS:
        engine = ENGINES[kind](model(dtype, tied), world=world, micro_batch=ROWS)
        ways = ("each", "last") if kind == "fsdp" else ("last",)
        for (name, rows), way in itertools.product(windows(world.size).items(), ways):
            if by_day and name not in ("2W+1", "1"):
                continue
            if kind == "fsdp":
                reduce_with(engine, way)
            batch = ragged(rows, seed=rows)
            engine.step.discard()
            engine.accumulate(batch)
            exact = exact_gradient(dtype, tied, rows)
            found[f"{kind} {dtype} tied={tied} {name} {way}"] = compared(gradient(engine), exact)
    return found


def reduce_with(engine: Sharded, way: str) -> None:
    """Let FSDP2 sum gradients over the ranks with each micro-batch, or with the last one of a
    window.
    """
    root = engine.shards.root
    engine.shards.micro_batch_context = lambda is_last: (
        root.set_requires_gradient_sync(way == "each" or is_last) or nullcontext()
    )


def compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    return {"error": relative_error(found, exact), "norm": float(found.norm() / exact.norm())}


def wrong_ways(world: World, by_day: bool) -> dict[str, float]:
    """Errors of what looks right and is not: law 13's bound has to fail for each."""
    found = {}
    batch = ragged(windows(world.size)["2W+1"], seed=3)
    exact = large_batch_gradient(model(torch.float64, False), batch)
    for kind, way in itertools.product(ENGINES, ("counted alone", "averaged", "summed every time")):
        if by_day and kind == "fsdp":
            continue
        engine = ENGINES[kind](model(torch.float64, False), world=world, micro_batch=ROWS)
        if way == "counted alone":
            engine.step.sum_over_ranks = lambda total: total
        elif way == "averaged":
            average(engine)
        elif kind == "ddp":
            engine.replicas.micro_batch_context = lambda is_last: nullcontext()
        else:
            continue
        engine.accumulate(batch)
        found[f"{kind} {way}"] = relative_error(gradient(engine), exact)
    return found


def average(engine: Any) -> None:
    """Let the engine do what both of torch's do unless they are told otherwise."""
    if isinstance(engine, Sharded):
        for module in engine.shards.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(engine.shards.world.size)
    else:
        engine.replicas.parallel = DistributedDataParallel(engine.replicas.parallel.module)


def trajectories(world: World, by_day: bool) -> dict[str, dict[str, float]]:
    """Thirty clipped updates in fp64 and an evaluation: the largest relative error of each number
    and tensor.
    """
    found = {}
    windows = [ragged((3, 5, 8)[index % 3], seed=index) for index in range(6 if by_day else 30)]
    windows[4]["targets"].fill_(-100)  # nothing to learn: refused alike on all ranks
    for optim, kind in ((AdamW(lr=1e-3, ema=0.9), "ddp"), (Muon(lr=1e-3, ema=0.9), "fsdp")):
        found |= trajectory(world, optim, windows, [kind] if by_day else [*ENGINES])
    return found


def trajectory(
    world: World, optim: AdamW | Muon, windows: list[dict[str, Tensor]], kinds: list[str]
) -> dict[str, dict[str, float]]:
    found = {}
    options: dict[str, Any] = {"clip": 0.5, "micro_batch": ROWS, "optim": optim}
    one, numbers = (
        Resident(model(torch.float64, True), **options),
        ("loss", "grad_norm", "count", "tokens"),
    )
    expected = [one_update(one, window) for window in windows]
    exact = {**one.state().model, **one.state().optimizer}
    for kind in kinds:
        many = ENGINES[kind](model(torch.float64, True), world=world, **options)
        worst = dict.fromkeys(numbers, 0.0)
        for index, (window, alone) in enumerate(zip(windows, expected, strict=True)):
            shared = one_update(many, window)
            for name in numbers if index != 4 else ():
                a, b = float(getattr(alone, name)), float(getattr(shared, name))
                worst[name] = max(worst[name], abs(a - b) / abs(a))
            assert int(alone.skipped) == int(shared.skipped) == (index >= 4)
        for at, name in enumerate(("sum", "targets")):
            a, b = (float(engine.evaluate(ragged(13, seed=99))[at]) for engine in (one, many))
            worst[name] = abs(a - b) / a
        state = {**many.state().model, **many.state().optimizer}
        assert state.keys() == exact.keys()
        worst["state"] = max(
            relative_error(whole(tensor), exact[name]) for name, tensor in state.items()
        )
        found[f"{kind} {type(optim).__name__}"] = worst
    return found


def owners(world: World, by_day: bool) -> dict[str, float]:
    """Of one update with Muon: the matrices that ranks iterate on, and how often each number leaves
    a rank.
    """
    odd = model(torch.float64, False, num_hidden_layers=3)
    # Three of each shape.
    optim = Muon(matrices=["*.q_proj.weight", "*.k_proj.weight", "*.down_proj.weight"])
    iterated, left, exchange = [0] * world.size, [0], world.all_to_all

    def counted(matrices: Tensor, compute: torch.dtype) -> Tensor:
        iterated[world.rank] += len(matrices)
        return newton_schulz(matrices, compute)

    def counting(tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        left[0] += sum(sent) - sent[world.rank]
        return exchange(tensor, sent, received)

    with (
        patch.object(muon, "MUON", muon.MUON._replace(orthogonalise=counted)),
        patch.object(world, "all_to_all", counting),
    ):
        engine = Sharded(odd, world=world, micro_batch=ROWS, optim=optim)
        one_update(engine, ragged(5, seed=0))
    shapes = [
        plane.kind.matrix_shape
        for plane in engine.step.planes
        if plane.kind.matrix_shape is not None
    ]
    *each, sent = world.sum(torch.tensor([*iterated, *left])).tolist()
    return {
        "matrices": len(shapes), "iterated": sum(each), "most": max(each), "least": min(each),
        "sent": sent / sum(math.prod(shape) for shape in shapes),
    }  # fmt: skip


# What stands beside ddp and fsdp: the dtype of the weights, and the engine's options.
BESIDE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.float32, {"precision": Precision("bf16")}),
    "fp16": (torch.float32, {"precision": Precision("fp16")}),
    "fp8": (torch.float32, {"precision": Precision("fp8")}),
    "recomputed": (torch.float64, {"remat": Remat.Full()}),
    "pointwise": (torch.float64, {"remat": Remat.Pointwise()}),
    "budget": (torch.float64, {"remat": Remat.Budget(0.3)}),
    "offloaded": (torch.float64, {"remat": Remat.Offload()}),
    "state in bf16": (torch.float64, {"optim": AdamW(state="bf16")}),
    "state in 8 bits": (torch.float64, {"optim": AdamW(state="8bit")}),
    "state in 4 bits": (torch.float64, {}),
    "groups": (torch.float64, {"optim": AdamW(groups=[Group("*.q_proj.*", lr=3.0, eps=0.1)])}),
    "muon": (torch.float64, {"optim": Muon()}),
    "muon in bf16": (torch.float64, {"optim": Muon(state="bf16")}),
    "muon of experts": (torch.float64, {"optim": Muon()}),
    "muon in 8 bits": (torch.float64, {"optim": Muon(state="8bit")}),
    "packed": (torch.float64, {}),
    "adapters": (torch.float64, {}),
    "adapters in int8": (torch.float32, {}),
    "adapters in nf4": (torch.float32, {}),
    "balanced experts": (torch.float64, {}),
    "packed head for several tokens": (torch.float64, {"loss": MtpLoss(0.7)}),
    "packed granitemoehybrid": (torch.float64, {}),
    "packed bamba": (torch.float64, {}),
    "packed nemotron_h": (torch.float64, {}),
    "packed lfm2": (torch.float64, {}),
    "packed qwen3_5_text": (torch.float64, {}),
    "packed gemma4_text": (torch.float64, {}),
    "packed gemma4_text with experts": (torch.float64, {}),
}
EXPERTS = {
    "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip
# Of each kind of layer that carries a state along the row, and layers that take keys of others.
RECURRENT: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ("mamba", "full_attention"), "mamba_n_groups": 2, "mamba_d_state": 8,
    },
    "bamba": {"layer_types": ("mamba", "full_attention"), "mamba_d_state": 6},
    "nemotron_h": {
        "num_hidden_layers": 3, "layer_types": ("mamba", "mlp", "full_attention"), "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ("conv", "full_attention"), "conv_bias": True},
    "qwen3_5_text": {"layer_types": ("linear_attention", "full_attention")},
    "gemma4_text": {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 6},
    "gemma4_text with experts": {
        "model_type": "gemma4_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip


# By day: a scaled loss, a state in 8 bits with matrices, one whose codes share bytes, experts, a
# narrow base.
BESIDE_BY_DAY = {
    "fp16": ["ddp"],
    "muon in 8 bits": ["fsdp"],
    "state in 4 bits": ["fsdp"],
    "adapters in nf4": ["fsdp"],
    "balanced experts": ["fsdp"],
    "packed head for several tokens": ["fsdp"],
}


def combinations(world: World, by_day: bool) -> dict[str, dict[str, float]]:
    """Two clipped updates of each combination beside one process's: relative errors, and those of
    fp64 ones.
    """
    found = {}
    for name, kinds in (BESIDE_BY_DAY if by_day else dict.fromkeys(BESIDE, [*ENGINES])).items():
        dtype, options = BESIDE[name]
        if name == "state in 4 bits":
            # Registered here, in a rank's process, since pytest's own must not know the form.
            FORMATS["4bit"] = FOUR_BITS
            options = {"optim": AdamW(state="4bit")}
        one = Resident(beside(name, dtype), clip=0.5, micro_batch=ROWS, **options)
        rows = packed if name.startswith("packed") else ragged
        windows = [rows(5, seed=index) for index in range(2)]
        expected = [
            (one_update(one, window), one.step.loss_factor.clone(), mean_ahead(one))
            for window in windows
        ]
        exact = {**one.state().model, **one.state().optimizer}
        for kind in kinds:
            many = ENGINES[kind](
                beside(name, dtype), world=world, clip=0.5, micro_batch=ROWS, **options
            )
            worst = 0.0
            for window, (alone, factor, ahead) in zip(windows, expected, strict=True):
                shared = one_update(many, window)
                worst = max(worst, abs(mean_ahead(many, world.sum) - ahead) / ahead)
                # Another factor would overflow fp16 elsewhere, and round what is subnormal
                # otherwise.
                assert torch.equal(factor, many.step.loss_factor)
                for a, b in ((alone.loss, shared.loss), (alone.grad_norm, shared.grad_norm)):
                    worst = max(worst, abs(float(a) - float(b)) / abs(float(a)))
            state = {**many.state().model, **many.state().optimizer}
            assert state.keys() == exact.keys() and kept_results(many.model) == kept_results(
                one.model
            )
            errors = {n: in_state(world, tensor, exact[n]) for n, tensor in state.items()}
            found[f"{kind} {name} {dtype}"] = {"numbers": worst, "state": max(errors.values())}
    return found


def mean_ahead(engine: Any, sum_over_ranks: Any = lambda total: total) -> float:
    """The mean loss of the targets ahead in an update of all ranks; 1 if there is no head for them."""
    if not isinstance(engine.loss, MtpLoss):
        return 1.0
    return float(engine.loss.take_mean(sum_over_ranks))


def kept_results(module: Any) -> list[str]:
    """What the blocks keep for the backward pass."""
    return [getattr(block.__dict__.get("remat"), "kept_names", "") for block in module.model.layers]


def halved_weights(world: World, by_day: bool) -> dict[str, float]:
    """Of a gradient in bf16, of weights that are gathered in bf16: errors beside one process's, and
    who reads what.

    Norms are ones at first, which bf16 holds.
    """
    options: dict[str, Any] = {"micro_batch": ROWS, "precision": Precision("bf16")}
    one = Resident(model(torch.float32, True, num_hidden_layers=2), **options)
    many = Sharded(
        model(torch.float32, True, num_hidden_layers=2), world=world, gathers_bf16=True, **options
    )
    read = []
    for layer in (*many.model.model.layers, many.model.model.norm):
        layer.register_forward_pre_hook(
            lambda layer, _: read.append(next(layer.parameters()).dtype.itemsize)
        )
    for engine in (one, many):
        engine.accumulate(ragged(windows(world.size)["2W+1"], seed=7))
    ours, exact = (
        {n: whole(v) for p in each.step.planes for n, v in p.views(p.grad)} for each in (many, one)
    )
    errors = {name: relative_error(ours[name], exact[name]) for name in exact}
    matrices = max(error for name, error in errors.items() if exact[name].ndim == 2)
    return {
        "matrices": matrices,
        "all": max(errors.values()),
        "blocks": max(read[:2]),
        "norm": read[2],
    }


def streamed(world: World, by_day: bool) -> dict[str, dict[str, float]]:
    """Three clipped updates and an evaluation of ranks that each stream, beside one process's:
    relative errors.
    """
    found = {}
    for name in ["tied, next forward"] if by_day else STREAMED:
        options = STREAMED[name]
        dtype = torch.float32 if options.get("precision") else torch.float64
        settings: dict[str, Any] = {"clip": 0.5, "micro_batch": ROWS, **options}
        sizes = {"num_hidden_layers": 3, "tie_word_embeddings": "tied" in name}
        one = Streamed(tiny_llama(dtype, **sizes), **settings)
        many = streamed_replica(tiny_llama(dtype, **sizes), world=world, **settings)
        numbers = []
        for index in range(3):
            window = ragged(windows(world.size)["2W+1"], seed=index)
            alone, shared = one_update(one, window), one_update(many, window)
            numbers += [
                (alone.loss, shared.loss),
                (alone.grad_norm, shared.grad_norm),
                (alone.count, shared.count),
            ]
        numbers += zip(one.evaluate(window), many.evaluate(window), strict=True)
        state, exact = (each.state().model | each.state().optimizer for each in (many, one))
        worst = max(abs(float(a) - float(b)) / abs(float(a)) for a, b in numbers)
        errors = [relative_error(state[n].double(), tensor.double()) for n, tensor in exact.items()]
        found[f"{name} {dtype}"] = {"numbers": worst, "state": max(errors)}
    return found


STREAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, next forward": {"placement": Placement(when="next forward"), "optim": Muon()},
    "backward": {"placement": Placement(when="backward"), "clip": None},
    "on the host, bf16": {"placement": Placement(where="host"), "precision": Precision("bf16")},
}


def beside(name: str, dtype: torch.dtype) -> Any:
    sizes: dict[str, Any] = EXPERTS if "experts" in name else {}
    if "several tokens" in name:
        sizes = {"mtp_num_hidden_layers": 1}
    family = name.removeprefix("packed ")
    if family in RECURRENT:
        sizes = {"model_type": family, **RECURRENT[family]}
    if "8 bits" in name:
        sizes = {"hidden_size": 40}  # rows end in the middle of blocks
    made = model(dtype, family != "nemotron_h", **sizes)  # which has a head of its own
    if name.startswith("adapters"):
        base: Any = name.partition(" in ")[2] or "auto"
        adapt(made, Lora(rank=4, base=base, tokens=(3, 5), dora=base != "int8"), seed=0)
    return made


def one_update(engine: Any, window: dict[str, Tensor]) -> Any:
    engine.accumulate(window)
    return engine.update()


def by_machine(world: World, folder: Path) -> dict[str, Any]:
    """Of two machines with two ranks each: updates beside one process's, and the checkpoint beside
    that of `fsdp`.
    """
    machines = functools.partial(Sharded, by_machine=True)
    windows = [ragged((3, 5, 8)[index % 3], seed=index) for index in range(6)]
    windows[4]["targets"].fill_(-100)
    with patch.dict(ENGINES, {"hsdp": machines}, clear=True):  # type: ignore[dict-item]
        found: dict[str, Any] = trajectory(world, Muon(lr=1e-3, ema=0.9), windows, ["hsdp"])
    engine = machines(model(torch.float32, False), world=world, micro_batch=ROWS)
    for index in range(2):
        one_update(engine, ragged(7, seed=index))
    manifests = []
    for number, each in enumerate(
        (
            engine,
            Sharded(model(torch.float32, False), world=world),
            machines(model(torch.float32, False), world=world),
        )
    ):
        if number:
            last = checkpointing.load_newest(folder / str(number - 1), print)
            each.load_state(EngineState(last.model, last.optimizer, last.state["engine"]))
        state = each.state()
        save(
            world,
            folder / str(number),
            Checkpoint(2, state.model, state.optimizer, {"engine": state.scalars}),
            keep=2,
        )
        manifests.append((folder / str(number) / "step-00000002" / "MANIFEST.json").read_text())
    weight = engine.model.model.layers[0].mlp.down_proj.weight
    return {
        "errors": found,
        "same": len({*manifests}) == 1,
        "share": weight.to_local().numel() / weight.numel(),
    }


SAVED = {
    "plain": AdamW(lr=1e-2),
    "ema": AdamW(lr=1e-2, ema=0.9),
    "8bit": AdamW(lr=1e-2, state="8bit"),
}


SAVED_BY_DAY = ("ddp", "ema"), ("fsdp", "8bit")


def saved(world: World, folder: Path, by_day: bool) -> dict[str, str]:
    """Three updates on these ranks, saved; or, where there is a checkpoint, that one loaded and
    saved once more.
    """
    found = {}
    blocks.BLOCK_BYTES = SMALL_BLOCK
    for kind, form in SAVED_BY_DAY if by_day else itertools.product(ENGINES, SAVED):
        name, optim = f"{kind} {form}", SAVED[form]
        engine = ENGINES[kind](
            model(torch.float32, False), world=world, micro_batch=ROWS, optim=optim
        )
        here = folder / f"{world.size} ranks" / name
        # Which rank 0 may have begun by now.
        before = [path for path in folder.glob(f"*/{name}") if path != here]
        if before:
            last = checkpointing.load_newest(
                max(before, key=lambda path: path.stat().st_mtime_ns), print
            )
            engine.load_state(EngineState(last.model, last.optimizer, last.state["engine"]))
        else:
            for index in range(3):
                one_update(engine, ragged(7, seed=index))
        state = engine.state()
        record = {"engine": state.scalars}
        save(world, here, Checkpoint(engine.index, state.model, state.optimizer, record), keep=2)
        if world.leads:
            checkpointing.verify(here / "step-00000003")
            manifest = (here / "step-00000003" / "MANIFEST.json").read_bytes()
            found[name] = hashlib.sha256(manifest).hexdigest()
    return found


def restarted(world: World, by_day: bool) -> dict[str, list[bool]]:
    """Of each of two updates: whether an engine that begins with it, as a restarted run's does, has
    the same bits.
    """
    found = {}
    options: dict[str, Any] = {"optim": AdamW(lr=1e-2), "clip": 0.5, "micro_batch": ROWS}
    # FSDP2 has no buckets whose order changes after the first update.
    for kind in ["ddp"] if by_day else ENGINES:
        throughout = ENGINES[kind](model(torch.float32, True), world=world, **options)
        found[kind] = []
        for index in range(2):
            before = snapshot(throughout)
            window = ragged(windows(world.size)["2W+1"], seed=index)
            usual = one_update(throughout, window)
            begun = ENGINES[kind](model(torch.float32, True), world=world, **options)
            begun.load_state(before)
            other = one_update(begun, window)
            same = [
                torch.equal(getattr(usual, name), getattr(other, name))
                for name in ("loss", "grad_norm")
            ]
            ours, theirs = snapshot(throughout), snapshot(begun)
            for a, b in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
                same += [torch.equal(a[name], b[name]) for name in a]
            found[kind].append(all(same))
    return found


OUT_OF_MEMORY = ("trial", "first forward", "last forward", "last backward", "evaluation", "one row")


def halved(world: World, by_day: bool) -> dict[str, dict[str, Any]]:
    """The last rank runs out of memory at more than one row, once in each place: how all ranks go
    on.
    """
    found, window = {}, ragged(4 * world.size - 1, seed=5)
    there = {name: tensor.to(default_device()) for name, tensor in window.items()}
    exact = large_batch_gradient(model(torch.float64, False), there)
    for where in ("last backward", "one row") if by_day else OUT_OF_MEMORY:
        lines: list[str] = []
        # Some buckets are summed before it fails.
        small_buckets = functools.partial(DistributedDataParallel, bucket_cap_mb=0.01)
        with patch.object(replicated, "DistributedDataParallel", small_buckets):
            engine = Replicated(model(torch.float64, False), world=world, micro_batch=ROWS)
            engine.announce = lines.append
            if world.rank == world.size - 1:
                run_out(engine.model, where)
            scored, ended = None, ""
            try:
                if where == "trial":
                    engine.trial(window)
                elif where == "evaluation":
                    scored = engine.evaluate(window)
                engine.accumulate(window)
            except OutOfDeviceMemory as error:
                ended = str(error)
        error = relative_error(gradient(engine), exact)
        if scored:
            alone = Resident(model(torch.float64, False), micro_batch=ROWS).evaluate(window)
            error = max(
                error, *(abs(float(a) / float(b) - 1) for a, b in zip(scored, alone, strict=True))
            )
        alike = int(world.sum(torch.tensor(engine.micro_batch))) == world.size * engine.micro_batch
        found[where] = {
            "error": error,
            "rows": engine.micro_batch,
            "lines": lines,
            "ended": ended,
            "alike": alike,
        }
        found[where] |= {"buckets": len(engine.replicas.buckets)}
    return found


def run_out(module: Any, where: str) -> None:
    """Let the module's first block run out of memory in a micro-batch of several rows, or of one."""
    seen = [0]

    def fail(*of_hook: Any) -> None:
        raise torch.OutOfMemoryError("no room\nof any kind")

    def hook(block: Any, inputs: Any, output: Tensor) -> None:
        if where == "one row":
            fail()
        if len(output) > 1:
            seen[0] += 1
        if len(output) > 1 and where == "last backward" and seen[0] == 2:
            output.register_hook(fail)
        elif (
            len(output) > 1
            and where != "last backward"
            and seen[0] == (2 if where == "last forward" else 1)
        ):
            fail()

    module.model.layers[0].register_forward_hook(hook)


def snapshot(engine: Any) -> EngineState:
    """A copy of its state, of whole tensors."""
    state = engine.state()
    model, optimizer = (
        {name: whole(tensor).clone() for name, tensor in tensors.items()}
        for tensors in (state.model, state.optimizer)
    )
    return EngineState(model, optimizer, dict(state.scalars))


def captured(world: World, by_day: bool) -> dict[str, Any]:
    """Compiled steps beside an eager one: recompiles, graph breaks, and the largest difference of
    loss and norm.
    """
    found = {}
    adamw, muon, narrow = AdamW(ema=0.9), Muon(ema=0.9), Muon(state="8bit")
    cases = (
        ("ddp", "whole", Remat.Off(), adamw), ("ddp", "blocks", Remat.Full(), adamw),
        ("fsdp", "blocks", Remat.Full(), adamw), ("fsdp", "blocks", Remat.Off(), muon),
        ("fsdp", "blocks", Remat.Budget(0.4), muon), ("fsdp", "blocks", Remat.Offload(), adamw),
        ("fsdp", "blocks", Remat.Off(), narrow),
    )  # fmt: skip
    for kind, scope, remat, optim in cases:
        one = Resident(model(torch.float64, True), micro_batch=ROWS, clip=0.5, optim=optim)
        many = ENGINES[kind](
            model(torch.float64, True),
            world=world,
            micro_batch=ROWS,
            clip=0.5,
            optim=optim,
            remat=remat,
        )
        many.trial(ragged(7))
        assert many.capture(ragged(7), scope=scope) is None
        graphs, worst = compat.captured_graphs(), 0.0
        for index in range(4):
            window = ragged(7 + index, seed=index)
            alone, shared = one_update(one, window), one_update(many, window)
            pairs = [(alone.loss, shared.loss), (alone.grad_norm, shared.grad_norm)]
            pairs.append((one.evaluate(window)[0], many.evaluate(window)[0]))
            worst = max(worst, *(abs(float(a) - float(b)) / abs(float(a)) for a, b in pairs))
        recompiles = compat.captured_graphs() - graphs
        found[f"{kind} {scope} {remat} {type(optim).__name__} {optim.state}"] = {
            "error": worst,
            "recompiles": recompiles,
            "breaks": compat.graph_breaks(),
        }
    return found


def assembled(world: World, by_day: bool) -> dict[str, float]:
    """The model as it is sampled from, averaged weights included, beside one process's."""
    found = {}
    for kind in ["fsdp"] if by_day else ENGINES:
        optim = AdamW(lr=1e-2, ema=0.5)
        one = Resident(model(torch.float64, True), micro_batch=ROWS, optim=optim)
        shared = model(torch.float64, True)
        shared.register_buffer("beside", torch.arange(4.0), persistent=False)
        many = ENGINES[kind](shared, world=world, micro_batch=ROWS, optim=optim)
        for index in range(3):
            one_update(one, ragged(7, seed=index)), one_update(many, ragged(7, seed=index))
        tokens = ragged(2)["tokens"]
        with (
            torch.no_grad(),
            one.step.averaged(),
            many.step.averaged(),
            many.step.assembled() as module,
        ):
            if world.leads:
                found[kind] = relative_error(module(tokens), one.model(tokens))
                assert (
                    module.beside.tolist() == [0, 1, 2, 3]
                    and module.lm_head.weight is module.model.embed_tokens.weight
                )
    return found


# Engines whose ranks gather the model: options, and what stands beside it.
GATHERED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("", {}),
    "bf16": ("", {"precision": Precision("bf16")}),
    "halved": ("", {"precision": Precision("bf16"), "gathers_bf16": True}),
    "adapters in nf4": ("adapters in nf4", {"precision": Precision("bf16")}),
    "experts": ("balanced experts", {"precision": Precision("bf16")}),
}


def gathered(world: World, by_day: bool) -> dict[str, dict[str, Any]]:
    """The whole copy that draws answers, before and after an update: whether it is the weights' and
    scores their bits.

    It stays in one place, takes the planned bytes, and what is gathered the second time is rounded
    before.
    """
    found = {}
    for name in ["halved"] if by_day else GATHERED:
        stands, options = GATHERED[name]
        engine = Sharded(
            beside(stands, torch.float32),
            world=world,
            micro_batch=ROWS,
            optim=AdamW(lr=0.1),
            **options,
        )
        step, memory, batch, same = engine.step, list[list[int]](), ragged(3), list[bool]()
        for _ in range(2):
            with patch.object(room, "gather_rows", side_effect=room.gather_rows) as called:
                copied: Any = step.parameters.gathered()
            memory.append([parameter.data_ptr() for parameter in copied.parameters()])
            state = step.model.state_dict()
            same += [
                torch.equal(p, whole(state[key]).to(p.dtype))
                for key, p in copied.named_parameters()
            ]
            with torch.no_grad(), step.context():
                [(trained, _)], (drawn, _) = (
                    step.parameters.score([batch]),
                    step.loss(copied, batch),
                )
            same += [torch.equal(trained, drawn), not copied.training]
            one_update(engine, ragged(5))
        same += [memory[0] == memory[1], copied.lm_head.weight is copied.model.embed_tokens.weight]
        held = sum(parameter.nbytes for parameter in copied.parameters())
        planned = gathered_copy_bytes(
            copied.config, None, step.precision.name, bool(options.get("gathers_bf16"))
        )
        sent = [given[0].dtype for given, _ in called.call_args_list]
        found[name] = {"same": all(same), "planned": "adapters" in name or held == planned}
        found[name] |= {"in 16 bits": sent.count(torch.bfloat16), "in all": len(sent)}
    return found


PROGRAMS = {
    "equations": (
        gradients,
        wrong_ways,
        trajectories,
        assembled,
        gathered,
        owners,
        combinations,
        streamed,
        halved_weights,
    ),  # fmt: skip
    "combinations": (combinations, streamed),  # a part of "equations", for pretended cards
    "halved": (halved,),
    "restarted": (restarted,),
    "captured": (captured,),
}


def main() -> None:
    ours, program = World(read_place()), sys.argv[1].removesuffix(" by day")
    by_day = program != sys.argv[1]
    if by_day and program != "saved":
        LAYERS["num_hidden_layers"] = 1
    if program == "saved":
        results: dict[str, Any] = saved(ours, Path(sys.argv[3]), by_day)
    elif program == "by_machine":
        results = by_machine(ours, Path(sys.argv[3]))
    else:
        results = {each.__name__: each(ours, by_day) for each in PROGRAMS[program]}
    if ours.leads:
        Path(sys.argv[2]).write_text(json.dumps(results))
    ours.leave()
