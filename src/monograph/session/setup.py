"""From settings to a session that is ready to train: model and engine, the trial, the capture."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from monograph import planner
from monograph.config import Settings
from monograph.data.corpus import Corpus, corpus
from monograph.device import Device, describe
from monograph.distributed.engine import Replicated, Sharded
from monograph.distributed.world import World
from monograph.errors import InputRefused, UsageError
from monograph.graph.precision import Precision
from monograph.graph.remat import named
from monograph.graph.windows import settle
from monograph.loss import Loss
from monograph.measure.quantities import count, counted, megabytes
from monograph.model.adapter import put, read_adapter
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import Optimizer
from monograph.planner import Candidate, StreamCandidate
from monograph.resident import Resident
from monograph.run.base import digest, extended, recorded, require_base_of
from monograph.run.folder import Run
from monograph.run.models import build
from monograph.run.progress import Progress
from monograph.run.recipe import Recipe, is_weight_file
from monograph.session import randomness
from monograph.session.adapting import lora_of, usual_rate
from monograph.session.learning import make_clip, make_optimizer, optimizer_name
from monograph.session.new_tokens import said, words_of
from monograph.session.planning import fitting_choices, require_positions, require_together, shape_before, with_rows
from monograph.session.ranks import agreed
from monograph.session.session import Session
from monograph.session.warmup import mixing_rows
from monograph.session.width import require_rate, transfer_of
from monograph.stream import Placement, Streamed


def require_possible(settings: Settings, machine: Device) -> None:
    """Refuse what this machine has no arithmetic for and choices that exclude one another, before any text is read.

    Raises:
        UsageError: naming what to use.
    """
    require_together(settings)
    require_rate(settings)
    name = settings.train.precision
    obstacle = None if name == "auto" else Precision(name).obstacle(machine)
    if obstacle:
        origin, instead = settings.origins.get("train.precision", "default"), planner.precision(machine)
        raise UsageError(f"{origin}: train.precision = {name}: {obstacle}; use {instead}")


def open_corpus(settings: Settings, progress: Progress) -> Corpus:
    """The text that the settings name, tokenised and packed, and what a person should know of it; at least a row."""
    data, named = settings.data, settings.data.source
    if named == "stdlib":
        named = "Python's standard library"
    with progress.stage(
        "data", named if isinstance(named, str) else ", ".join(named[:3]) + (", ..." if len(named) > 3 else "")
    ) as stage:
        found = corpus(
            data.source,
            tokenizer=data.tokenizer,
            sequence_length=data.sequence_length,
            packing=data.packing,
            held_out=data.held_out,
            text_key=data.text_key,
            bad_records=data.bad_records,
            answers=data.answers,
            too_long=data.too_long,
            progress=stage.report,
        )
        stats, length = found.stats, data.sequence_length
        if stats.tokens < length and not stats.conversations:
            rows = f"{stats.tokens} training tokens, fewer than one row of {length}"
            raise InputRefused(f"{found.name}: {rows}; give more text or shorten sequence_length")
        held = stats.held_out_documents
        of_what = " of answers" if stats.conversations else ""
        stage.result = f"{counted(stats.files, 'file')}, {megabytes(stats.bytes)}{of_what}"
    for line in found.notes:
        progress.line("note", line)
    if stats.conversations:
        progress.line("chats", _conversations(found))
        return found
    progress.line(
        "tokens",
        f"{count(stats.tokens)} of {found.vocab_size:,} kinds, {stats.bytes_per_token:.2f} bytes each, "
        f"packed {stats.packed_share:.1%}; "
        + (f"held out: {counted(held, 'document')}, {megabytes(stats.held_out_bytes)}" if held else "nothing held out"),
    )
    return found


def _conversations(found: Corpus) -> str:
    stats, held = found.stats, found.held_out
    in_all = count(found.train.inputs)
    # Of a template that writes earlier turns in another way later, each answer has a sequence of its own.
    sequences = found.train.documents
    rows = f" in {counted(sequences, 'sequence')}" if sequences > stats.conversations else ""
    return (
        f"{counted(stats.conversations, 'conversation')}{rows}, {count(stats.tokens)} of {in_all} tokens trained "
        f"({stats.trained_share:.1%}), packed {stats.packed_share:.1%}; "
        + (f"held out: {counted(held.conversations, 'conversation')}" if held.conversations else "nothing held out")
    )


class Made(NamedTuple):
    """A model that was built from settings, before any engine has it.

    Attributes:
        settings: every value fixed but the number of updates and what follows from it.
        recipe: what the model is built from.
        model: its weights on the host, or in their files still.
        loss: of it.
        planned: what the planner expects of it, None where it was not asked.
        placement: where the buffers of a streamed model live, None of another.
        notes: lines on its tokens that a person should read.
    """

    settings: Settings
    recipe: Recipe
    model: nn.Module
    loss: Loss
    planned: Candidate | None
    placement: Placement | None = None
    notes: tuple[str, ...] = ()

    @property
    def optimizer(self) -> Optimizer:
        """The one that the settings name, for a model of this shape."""
        return make_optimizer(self.settings, _shape(self.model))


def open_session(
    run: Run, settings: Settings, text: Corpus, device: torch.device, progress: Progress, world: World | None = None
) -> Session:
    """The session of a run at its beginning; of several ranks rank 0 makes the choices."""
    world = world or World()
    made = make_model(settings, text, describe(), device, world.size) if world.leads else None
    settings = agreed(world, made.settings if made else settings)
    made = made or make_model(settings, text, describe(), device, world.size)
    for line in made.notes:
        progress.line("tokens", line)
    if dropout := getattr(_shape(made.model), "attention_dropout", 0):
        progress.line(
            "note", f"attention_dropout = {dropout} stays in config.json; nothing is dropped in training here"
        )
    settings, train = made.settings, made.settings.train
    size = int(train.tokens_per_update)
    batches = text.batches(size, seed=train.seed, epochs=train.epochs, pin=device.type == "cuda")
    engine = make_engine(made, device, world)
    randomness.seed(train.seed)
    return Session(run, settings, made.recipe, text, engine, batches, planned=made.planned, world=world)


def make_model(
    settings: Settings, text: Corpus, machine: Device, device: torch.device | None = None, ranks: int = 1
) -> Made:
    """Build the model and fix every remaining automatic value but the number of updates.

    Where it has adapters, its frozen weights go to `device`, each as soon as it is what is kept of it.
    """
    train, optim = settings.train, settings.optim
    preset = settings.model.preset
    sizes = {"vocab_size": text.vocab_size, "max_position_embeddings": settings.data.sequence_length}
    if settings.model.init and is_weight_file(settings.model.init):
        sizes = {}  # its tensors say more than text and row length do
    recipe = Recipe(settings.model.init, preset, sizes | settings.model.sizes(), train.seed).checked()
    rows = int(train.tokens_per_update) // settings.data.sequence_length
    words, before = words_of(settings, text.tokenizer), shape_before(recipe)
    if before:
        tokens = words.trained(before.vocab_size) if words else ()
        fitting = fitting_choices(with_rows(before, words), rows, settings, machine, tokens, ranks)
    model, loss = build(recipe)
    known = model.config.vocab_size if isinstance(model, Llama) else 0
    tokens, notes = words.trained(known) if words else (), said(settings, words, known)
    lora = lora_of(settings, tokens)
    if lora:
        recipe = recipe._replace(lora=recorded(lora), base_sha256=digest(model))
    if words and words.vocabulary and isinstance(model, Llama):
        recipe = recipe._replace(vocabulary=extended(model, words.vocabulary, str(recipe.init)))
    config = _shape(model)
    if config:
        _require_fit(config, text, settings)
    name = optimizer_name(settings, fresh=recipe.init is None)
    lr = usual_rate(settings, name.partition(":")[0]) if optim.lr == "auto" else optim.lr
    choices, plan = fitting if before else fitting_choices(config, rows, settings, machine, tokens, ranks)
    fixed: dict[str, Any] = {
        "optim.name": name,
        "optim.lr": lr,
        "train.tokens_per_update": int(train.tokens_per_update),
        "train.precision": planner.precision(machine) if train.precision == "auto" else train.precision,
        **choices,
    }
    settings = settings.resolve(fixed, "plan")
    if transfer := transfer_of(settings, _shape(model)):
        transfer.initialise_(model)
    if lora:
        start = read_adapter(recipe.adapter) if recipe.adapter else None
        if start:
            require_base_of(start, str(recipe.base_sha256))
        put(model, lora, seed=train.seed, start=start, precision=Precision(settings.train.precision), device=device)
    placement = plan.placement if isinstance(plan, StreamCandidate) else None
    return Made(settings, recipe, model, loss, plan, placement, notes)


def _shape(model: nn.Module) -> LlamaConfig | None:
    return model.config if isinstance(model, Llama) else None


def make_engine(made: Made, device: torch.device, world: World | None = None) -> Resident:
    """The engine of one model, whose weights are on the device or come to it.

    Raises:
        UsageError: several ranks, and a module whose running statistics would be another one's on each.
    """
    train = made.settings.train
    shared: dict[str, Any] = {
        "loss": made.loss,
        "optim": made.optimizer,
        "clip": make_clip(made.settings),
        "precision": Precision(train.precision),
        "remat": named(train.remat),
        "micro_batch": int(train.micro_batch),
    }
    if train.memory == "stream":
        return Streamed(made.model, placement=made.placement or Placement(device), **shared)
    if world is None or train.parallel == "none":
        return Resident(settle(made.model, device, trained=device.type != "cpu").to(device), **shared)
    share = -(-int(train.tokens_per_update) // (made.settings.data.sequence_length * world.size))
    shared["micro_batch"] = min(shared["micro_batch"], share)
    if mixing := mixing_rows(made.model):
        raise UsageError(f"{mixing[0]} normalises over the rows of one rank: with train.parallel take another norm")
    if train.parallel == "fsdp":
        return Sharded(made.model, world=world, **shared)
    return Replicated(settle(made.model, device).to(device), world=world, **shared)


def repeatable(device: torch.device) -> None:
    """Let the same run give the same bits, for this whole process: what a resume relies on.

    On several CPU threads Inductor adds up an embedding's gradient with atomic additions, in whatever order the threads
    come; torch's deterministic mode makes it call the ordered kernel, at no measurable cost (docs/log.md). On a GPU the
    mode costs speed and is left to its owner.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The part of it that would cost time; the module is a class in disguise, which type checkers do not see.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _require_fit(config: LlamaConfig, corpus: Corpus, settings: Settings) -> None:
    if config.vocab_size < corpus.vocab_size:
        raise InputRefused(
            f"model.vocab_size = {config.vocab_size} is smaller than the tokenizer's {corpus.vocab_size}: raise it"
        )
    require_positions(settings, config)
