"""What the planner is asked, from the settings of a run: the shape, what is pinned, and what is left to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from monograph import planner
from monograph.config import Settings
from monograph.device import Device, compiler_obstacle, default_device
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.measure.calibration import Calibration
from monograph.measure.footprint import Compile
from monograph.measure.quantities import count, gibibytes
from monograph.model import hub
from monograph.model.adapter import is_adapter, read_adapter, resolved_base
from monograph.model.config import LlamaConfig
from monograph.planner import Asked, Candidate, Limits, StreamCandidate
from monograph.run.recipe import Recipe, is_weight_file, run_named, shape_in
from monograph.session.adapting import lora_of, require_with_lora
from monograph.session.learning import make_clip, make_optimizer, optimizer_name
from monograph.session.tokens import Words
from monograph.storage.cache_dir import cache_root, calibration_file
from monograph.text.tokenizer import parse

# What the planner knows, and chooses from where the key is "auto"; on a CPU there is no other memory to go to.
REMATS = ("none", "pointwise", 0.5, 0.25, "full", "offload")
LEAST_BYTES, FP32_BYTES, COPIES = 2, 4, 4  # of a parameter: weight, gradient, two moments
RANKING_FLOPS = 1e12  # where only the order of candidates of one precision is asked


def shape_of(settings: Settings, words: Words | None = None) -> LlamaConfig:
    """The shape that a run with these settings would have, with no text read: a BPE has the size that it is asked for.

    Args:
        settings: of the run.
        words: its tokens, as far as they are known.

    Raises:
        UsageError: a module of one's own, a run or a weight file, whose shape only loading it would tell.
        InputRefused: a folder without a model.
    """
    model, data = settings.model, settings.data
    if model.init and is_adapter(model.init):
        return with_rows(hub.read_config(resolved_base(read_adapter(model.init))), words)
    if model.init and (":" in model.init or is_weight_file(model.init) or run_named(model.init)):
        raise UsageError(f"model.init = {model.init}: a plan is made for a preset, sizes or a Hugging Face folder")
    if model.init:
        return with_rows(hub.read_config(model.init), words)
    kind = data.tokenizer.partition(":")[0]
    defaults: dict[str, Any] = {"max_position_embeddings": data.sequence_length}
    if kind == "bpe":
        defaults["vocab_size"] = parse(data.tokenizer)
    elif kind == "bytes":
        defaults["vocab_size"] = 259  # the bytes and three special tokens
    elif not model.vocab_size and model.preset == "auto":
        raise UsageError("model.vocab_size: give it, as a plan reads no tokenizer's file")
    return Recipe(None, model.preset, model.sizes(), settings.train.seed).shape(**defaults)


def with_rows(config: LlamaConfig, words: Words | None) -> LlamaConfig:
    """The shape with a row for each token."""
    return replace(config, vocab_size=max(config.vocab_size, words.vocabulary.all if words and words.vocabulary else 0))


def shape_before(recipe: Recipe) -> LlamaConfig | None:
    """The shape that a recipe's model is loaded in, with nothing of it built; None where only building it tells.

    Raises:
        InputRefused: a folder whose config.json cannot be used.
    """
    return recipe.shape() if recipe.init is None else shape_in(recipe.init)


def require_positions(settings: Settings, config: LlamaConfig | None) -> None:
    """Refuse rows that are longer than a model of that shape reads; None: nobody knows it yet.

    Raises:
        InputRefused: naming both lengths.
    """
    length, positions = settings.data.sequence_length, config.max_position_embeddings if config else math.inf
    if length > positions:
        raise InputRefused(
            f"data.sequence_length = {length} is longer than the model's max_position_embeddings = {positions}: "
            "shorten the rows"
        )


def require_room(settings: Settings, config: LlamaConfig, machine: Device, limits: Limits) -> None:
    """Refuse a new model whose weights alone are more than all there is to keep them in, before anything of it is made.

    Raises:
        OutOfDeviceMemory: naming the keys that shape it, what it needs and what there is.
    """
    needed, device_bytes = LEAST_BYTES * config.parameter_count(), 0 if limits.shared else machine.memory_bytes
    if settings.model.init is None and needed > device_bytes + limits.host_bytes + limits.disk_bytes:
        keys = (f"{key} = {value}" for key, value in settings.pinned().items() if key.startswith("model."))
        raise OutOfDeviceMemory(
            f"{', '.join(keys)}: {count(config.parameter_count())} parameters, whose weights alone are "
            f"{gibibytes(needed)} at {LEAST_BYTES} bytes each; {machine.name} has {gibibytes(machine.memory_bytes)}, "
            f"the host {gibibytes(limits.host_bytes)} and the disk {gibibytes(limits.disk_bytes)}: make it smaller"
        )


def notes_on(settings: Settings) -> Iterator[str]:
    """What is said where settings of known sizes mean something else than a reader may expect."""
    train, length = settings.train, settings.data.sequence_length
    rows = max(1, int(train.tokens_per_update) // length)
    if train.micro_batch != "auto" and train.micro_batch > rows:
        yield f"train.micro_batch = {train.micro_batch}: an update has {rows} rows, so micro-batches of {rows}"
    if train.parallel == "fsdp" and settings.optim.name == "auto":
        yield "train.parallel = fsdp: AdamW and its rate, as a new model's Muon needs whole matrices"


def require_together(settings: Settings) -> None:
    """Refuse choices that exclude one another.

    Raises:
        UsageError: naming both.
    """
    train = settings.train
    if (train.remat, train.compile) == ("offload", "whole"):
        raise UsageError("train.remat = offload crosses between graphs: with it train.compile is blocks or none")
    if train.memory == "stream" and (train.compile == "whole" or train.remat == "offload"):
        key, instead = (
            ("compile", "blocks or none")
            if train.compile == "whole"
            else ("remat", "none, full, pointwise or a number")
        )
        raise UsageError(
            f"train.memory = stream brings one stage after another to the device: with it train.{key} is {instead}, "
            f"not {train.compile if key == 'compile' else train.remat}"
        )
    require_with_lora(settings)
    require_with_ranks(settings)
    name, precision = settings.optim.name, train.precision
    if train.memory == "stream" and name.endswith(":all-bf16"):
        raise UsageError(f"train.memory = stream keeps full-precision weights: optim.name = {name} is for device")
    if name.endswith(":all-bf16") and precision in ("fp32", "fp16"):
        raise UsageError(
            f"optim.name = {name} keeps the weights in bf16, which train.precision = {precision} cannot use: "
            "take bf16 or fp8"
        )


def require_with_ranks(settings: Settings) -> None:
    """Refuse what several devices cannot do together.

    Raises:
        UsageError: naming both.
    """
    train, name = settings.train, settings.optim.name
    if train.parallel == "none":
        return
    beside: dict[str, tuple[bool, str]] = {
        "train.memory = stream": (train.memory == "stream", "weights stay on the devices: leave it out"),
        "train.precision = fp8": (train.precision == "fp8", "take bf16"),
        f"optim.name = {name}": (name.endswith(":all-bf16"), "gradients are of the weights' dtype: take :bf16"),
    }
    if train.parallel == "fsdp":
        beside |= {
            f"optim.name = {name}": (
                not name.startswith(("auto", "adamw")) or name.endswith(("8bit", "all-bf16")),
                "a rank has some rows of each matrix: take adamw or adamw:bf16, or ddp",
            ),
            "train.compile = whole": (train.compile == "whole", "blocks are gathered one by one: take blocks or none"),
            f"train.remat = {train.remat}": (
                train.remat not in ("auto", "none", "full"),
                "what to keep is found on a whole model: take none or full",
            ),
            "lora.rank": (settings.lora.rank is not None, "it shards weights that are trained: take ddp"),
        }
    if odd := [(what, instead) for what, (is_so, instead) in beside.items() if is_so]:
        raise UsageError(f"train.parallel = {train.parallel} does not go with {odd[0][0]}: {odd[0][1]}")


def asked_of(settings: Settings, config: LlamaConfig, device: Device, tokens: tuple[int, ...] = ()) -> Asked:
    """What is pinned, and what may be chosen of what is built.

    Args:
        settings: of the run.
        config: its model's shape.
        device: where it is to train.
        tokens: ids whose rows are trained beside adapters.

    Raises:
        UsageError: choices that exclude one another.
    """
    require_together(settings)
    train, optim, lora = settings.train, settings.optim, lora_of(settings, tokens)
    name = optimizer_name(settings, fresh=settings.model.init is None)
    fixed = settings.resolve({"optim.name": name, "optim.lr": 1e-3 if optim.lr == "auto" else optim.lr}, "plan")
    return Asked(
        config,
        settings.data.sequence_length,
        int(train.tokens_per_update),
        make_optimizer(fixed, config),
        name,
        None if train.micro_batch == "auto" else train.micro_batch,
        (planner.precision(device) if train.precision == "auto" else train.precision,),
        _scopes(settings, config) if train.compile == "auto" else (train.compile,),
        _remats(settings, device) if train.remat == "auto" else (train.remat,),
        settings.data.packing == "packed",
        make_clip(settings),
        lora,
    )


def fitting_choices(
    config: LlamaConfig | None,
    rows: int,
    settings: Settings,
    machine: Device,
    tokens: tuple[int, ...] = (),
    ranks: int = 1,
) -> tuple[dict[str, Any], Candidate | None]:
    """Micro-batch, recomputation, what one graph holds: as pinned, as the plan chooses for a Llama, else all at once.

    What another module would need nobody knows. Of several ranks it is one rank's share of the rows that is planned;
    no plan is returned of one that has some rows of each weight.

    Raises:
        OutOfDeviceMemory: by the plan nothing fits.
    """
    train, plan, share = settings.train, None, -(-rows // ranks)
    found: dict[str, Any] = {
        "train.micro_batch": share,
        "train.remat": "none",
        "train.compile": "whole",
        "train.memory": "device",
    }
    if config:
        plan = planned(*_of_rank(settings, config, machine, share, ranks), tokens)
        found |= {"train.micro_batch": plan.work.rows, "train.remat": plan.work.remat}
        # Where nothing can be compiled the plan is of eager steps, and this is said when it is tried.
        graph_holds = plan.work.compile
        found["train.compile"] = _scopes(settings, config)[0] if graph_holds == "none" else graph_holds
    if train.memory == "stream" or isinstance(plan, StreamCandidate):
        found |= {"train.memory": "stream", "train.compile": "blocks"}
    if train.remat == "offload" or train.parallel == "fsdp":  # what leaves the device, or comes, is between graphs
        found["train.compile"] = "blocks"
    pinned = {key: getattr(train, key.removeprefix("train.")) for key in found}
    if pinned["train.micro_batch"] != "auto":  # no more rows than the update has, or the rest would be empty ones
        pinned["train.micro_batch"] = min(pinned["train.micro_batch"], rows)
    plan = None if train.parallel == "fsdp" else plan
    return {key: found[key] if value == "auto" else value for key, value in pinned.items()}, plan


def _of_rank(
    settings: Settings, config: LlamaConfig, machine: Device, rows: int, ranks: int
) -> tuple[Settings, LlamaConfig, Device]:
    """What is planned for a rank that computes so many rows of an update, on a device with what sharding spares.

    DDP has a second copy of the gradients. FSDP2 has a rank's share of weights, gradients and moments, and two blocks
    whole, in whose place all but the share is taken to be free.
    """
    parallel, weights = settings.train.parallel, FP32_BYTES * config.parameter_count()
    if parallel == "none":
        return settings, config, machine
    share = {"train.tokens_per_update": rows * settings.data.sequence_length, "train.memory": "device"}
    spared = -weights if parallel == "ddp" else int(COPIES * weights * (1 - 1 / ranks))
    memory, free = machine.memory_bytes + spared, machine.free_memory_bytes + spared
    return settings.resolve(share, "plan"), config, replace(machine, memory_bytes=memory, free_memory_bytes=free)


def planned(settings: Settings, config: LlamaConfig, machine: Device, tokens: tuple[int, ...] = ()) -> Candidate:
    """What a run on this machine does with its "auto" keys, and where its weights live: `monograph plan`'s own choice.

    Raises:
        OutOfDeviceMemory: nothing fits, with what is nearest and by how much it misses.
    """
    asked, memory = asked_of(settings, config, machine, tokens), settings.train.memory
    eager = settings.train.compile == "none" or (machine.type == "cpu" and compiler_obstacle() is not None)
    scopes: tuple[Compile, ...] = ("none",) if eager else tuple(each for each in asked.scopes if each != "none")
    rates, known = dict.fromkeys(asked.precisions, RANKING_FLOPS), Calibration(calibration_file())
    limits = Limits.here(machine, planner.budget(machine), cache_root()[0])
    require_room(settings, config, machine, limits)
    if machine.type == "cpu" and memory == "auto":
        memory = "device"  # there is no other memory to stream from
    found = planner.plan_anywhere(replace(asked, scopes=scopes), machine, rates, known, memory, limits)
    if not found.candidates or (found.chosen is None and found.nearest.peak_memory_bytes > machine.free_memory_bytes):
        raise OutOfDeviceMemory(found.refusal)
    best = found.nearest
    if isinstance(best, StreamCandidate):
        return replace(best, placement=replace(best.placement, device=default_device(), folder=limits.folder))
    return best


def _scopes(settings: Settings, config: LlamaConfig) -> tuple[Compile, ...]:
    return ("blocks",) if settings.train.parallel == "fsdp" else planner.scopes(config.num_hidden_layers)


def _remats(settings: Settings, device: Device) -> tuple[str | float, ...]:
    if settings.train.parallel == "fsdp":
        return "none", "full"
    return REMATS if device.type == "cuda" else REMATS[:-1]
