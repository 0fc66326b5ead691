"""Train a shape with each of the systems that `train.py` compares, in this process, and return how
fast it was.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import harness
import torch
from torch import Tensor

from monograph.device import clock, default_device, synchronize
from monograph.graph.precision import Precision
from monograph.loop import train
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.profiling.memory import peak_memory_bytes, reset_peak_memory
from monograph.resident import Resident

LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
WARM_UP = 3  # updates before the first that is timed


class Shape(NamedTuple):
    """A model and its update: T positions of a row, rows of a micro-batch, micro-batches of an
    update.
    """

    config: LlamaConfig
    length: int
    micro_batch: int
    micro_batches: int

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of one update."""
        return self.length * self.micro_batch * self.micro_batches


def sizes(layers: int, width: int, vocabulary: int, length: int) -> LlamaConfig:
    """Return a Llama with heads of 32 and a tied head."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )


class Pace:
    """A timer of updates in rounds, the same for every system: `updated()` returns True after the
    last update.

    After the warm-up one update is timed, which fixes how many make a round of about `round_s`;
    then `rounds` rounds, each ending with a wait for the device; then one more update in which the
    host's waits are counted.
    """

    def __init__(self, device: torch.device, rounds: int, round_s: float) -> None:
        self.device, self.round_s = device, round_s
        self.seconds: list[float] = []  # per update, one entry a round
        self.first_s, self.peak_bytes = 0.0, 0
        self.host_syncs: dict[str, int] | None = None
        self._steps = self._script(rounds)

    def begin(self) -> None:
        """Start the clock; to be called right before the first update."""
        next(self._steps)

    def updated(self) -> bool:
        """Count an update and return whether it was the last; to be called after each one."""
        return next(self._steps, True) is True

    def _now(self) -> float:
        synchronize(self.device)
        return clock()

    def _script(self, rounds: int) -> Iterator[bool]:
        began = self._now()
        yield False
        self.first_s = self._now() - began
        for _ in range(WARM_UP - 1):
            yield False
        reset_peak_memory(self.device)
        began = self._now()
        yield False
        count = max(1, round(self.round_s / (self._now() - began)))
        for _ in range(rounds):
            began = self._now()
            for _ in range(count):
                yield False
            self.seconds.append((self._now() - began) / count)
        self.peak_bytes = peak_memory_bytes(self.device)
        with harness.HostSyncs(self.device) as syncs:
            yield False
        self.host_syncs = syncs.counts


def random_rows(shape: Shape) -> Tensor:
    """Return one update's rows of random ids, [R, T + 1]; the last column is only a target."""
    generator = torch.Generator().manual_seed(0)
    rows = shape.micro_batch * shape.micro_batches
    return torch.randint(shape.config.vocab_size, (rows, shape.length + 1), generator=generator)


def monograph(shape: Shape, args: Namespace) -> dict[str, Any]:
    """Train with this project's resident engine, the whole step captured."""
    device = default_device()
    began = clock()
    rows = random_rows(shape)
    window = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    if device.type == "cuda":  # like the windows of the data room
        window = {name: tensor.pin_memory() for name, tensor in window.items()}
    engine = engine_of(shape)
    build_s = clock() - began
    began = clock()
    if obstacle := engine.capture(window):
        raise SystemExit(f"train.py: the step cannot be captured: {obstacle}")
    synchronize(device)
    compile_s = clock() - began
    pace = Pace(device, args.rounds, args.round_s)
    pace.begin()
    losses = []
    for update in train(engine, itertools.repeat(window)):
        losses.append(update.loss)
        if pace.updated():
            break
    mean_loss = float(torch.stack(losses).mean())
    return measured(pace, compile_s=compile_s, build_s=build_s, mean_loss=mean_loss)


def engine_of(shape: Shape) -> Resident:
    """Return this project's resident engine, not captured yet."""
    return Resident(
        drawn_on(default_device(), shape.config),
        optim=AdamW(lr=LR, betas=BETAS, weight_decay=DECAY),
        clip=CLIP,
        precision=Precision("bf16"),
        micro_batch=shape.micro_batch,
    )


def drawn_on(device: torch.device, config: LlamaConfig) -> Llama:
    """Return a Llama whose weights are drawn on the device: drawing 1.2B on the host takes longer
    than measuring.
    """
    with torch.device("meta"):
        model = Llama(config)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=config.initializer_range)
    return model


def trainer(shape: Shape, args: Namespace) -> dict[str, Any]:
    """Train with Hugging Face's Trainer on its own LlamaForCausalLM with SDPA, torch_compile and
    fused AdamW.
    """
    import transformers

    device = default_device()
    began = clock()
    values = shape.config.to_hf() | {"use_cache": False}
    with device:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    build_s = clock() - began
    pace = Pace(device, args.rounds, args.round_s)

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            control.should_training_stop = pace.updated()

    with tempfile.TemporaryDirectory() as folder:
        training = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                **trainer_arguments(shape, device), output_dir=folder
            ),
            train_dataset=Examples(random_rows(shape)[:, :-1]),
            callbacks=[Stopwatch()],
        )
        pace.begin()
        outcome = training.train()
    steady = sorted(pace.seconds)[len(pace.seconds) // 2]
    versions = {
        "transformers": transformers.__version__,
        "attention": model.config._attn_implementation,
    }
    compile_s = pace.first_s - steady  # Trainer compiles at its first update
    return (
        measured(pace, compile_s=compile_s, build_s=build_s, mean_loss=outcome.training_loss)
        | versions
    )


def trainer_arguments(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return Trainer's arguments for the same training as `monograph`'s; nothing is logged or
    saved.
    """
    return {
        "per_device_train_batch_size": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
        "max_steps": 1_000_000,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "torch_compile": True,
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type == "cuda",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Examples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The rows in Trainer's form, repeated: each with itself as labels (the model shifts them)."""

    def __init__(self, rows_RT: Tensor) -> None:
        self.rows_RT = rows_RT

    def __len__(self) -> int:
        return 10_000 * len(self.rows_RT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row_T = self.rows_RT[index % len(self.rows_RT)]
        return {"input_ids": row_T, "labels": row_T}


def measured(pace: Pace, *, compile_s: float, build_s: float, mean_loss: float) -> dict[str, Any]:
    """Return the result of a case's process."""
    return {
        "seconds_per_update": harness.spread(pace.seconds),
        "peak_memory_bytes": pace.peak_bytes,
        "compile_s": compile_s,
        "build_s": build_s,
        "host_syncs": pace.host_syncs,
        # Over all updates: it did train.
        "mean_loss": mean_loss if math.isfinite(mean_loss) else None,
    }


SYSTEMS = {"monograph": monograph, "trainer": trainer}
