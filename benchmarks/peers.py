"""Train the same task with each system: Monograph, a plain loop, transformers' Trainer, Lightning.

Each runs its own loop, as in its documentation, and stays in it until `Task.updated`, which is
called after each update, raises. Nothing is logged, evaluated or saved. Shapes: B rows, T
positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from systems import BETAS, CLIP, DECAY, Shape, trainer_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from monograph.data.batches import Batches
from monograph.data.rows import Rows
from monograph.device import synchronize
from monograph.graph.precision import Precision
from monograph.loop import train
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

IGNORE, PADDING = -100, 0  # no document contains the padding id
EXAMPLES = 500_000  # length of the endless data set


class Finished(BaseException):
    """Raised by `Task.updated` to leave a system's loop; a BaseException, so that no loop handles
    it as an error.
    """


@dataclass
class Task:
    """A training task, and how to run it.

    Attributes:
        shape: sizes, positions of a row, rows of a micro-batch, micro-batches of an update.
        documents: int64 tokens of each; a document is a row, or a part of a row if rows are packed.
        rows: the same documents, laid out by Monograph's data room.
        ragged: whether documents differ in length, so that rows must be padded, packed or
            concatenated.
        compiled: through torch.compile, in the way that the system offers.
        updated: called after each update; raises `Finished` to end.
        lr: peak learning rate.
        schedule: the factor of the learning rate by the update's index.
        precision: "fp32" or "bf16" (autocast).
        seed: of the initial weights.
        model: the trained module, set once it is built.
        first: (inputs, targets) of each document of the first update.
        targets: number of targets used since the start.
    """

    shape: Shape
    documents: list[Tensor]
    rows: Rows
    ragged: bool
    compiled: bool
    updated: Callable[[], None]
    lr: float = 1e-3
    schedule: Callable[[int], float] = lambda index: 1.0
    precision: str = "fp32"
    seed: int = 0
    model: nn.Module | None = None
    first: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    targets: int = 0

    def llama(self) -> Llama:
        """Return the model, with the same weights for every system."""
        self.model = Llama(self.shape.config, seed=self.seed)
        return self.model

    @property
    def rows_per_update(self) -> int:
        """Return the rows of all micro-batches."""
        return self.shape.micro_batch * self.shape.micro_batches

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the precision."""
        return Precision(self.precision).context("cpu")


class Documents(Dataset):  # type: ignore[type-arg]
    """A task's documents over and over, which records those of the first update and counts targets."""

    def __init__(self, task: Task, documents: list[Tensor]) -> None:
        self.task, self.documents = task, documents

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Tensor:
        document = self.documents[index % len(self.documents)]
        self.task.targets += len(document) - 1
        if len(self.task.first) < self.task.rows_per_update:
            self.task.first.append((document[:-1], document[1:]))
        return document


def loader(
    task: Task, documents: list[Tensor], collate: Callable[[list[Tensor]], Any]
) -> DataLoader[Any]:
    """Return micro-batches in the documents' own order, so that every system's first update has the
    same ones.
    """
    return DataLoader(Documents(task, documents), task.shape.micro_batch, collate_fn=collate)


def padded(documents: list[Tensor]) -> dict[str, Tensor]:
    """Return [B, T] inputs and targets, T of the longest document, made by PyTorch's own
    `pad_sequence`.
    """
    return {
        "tokens": pad_sequence(
            [d[:-1] for d in documents], batch_first=True, padding_value=PADDING
        ),
        "targets": pad_sequence([d[1:] for d in documents], batch_first=True, padding_value=IGNORE),
    }


def dense_loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy on the whole logits, as most training code computes it."""
    logits_BTV = model.logits(model(tokens_BT))
    return cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE
    )


def fused_adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return torch's fused AdamW, with decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


@contextlib.contextmanager
def after_each_step(task: Task) -> Iterator[None]:
    """Call `task.updated` after every step of any torch optimizer."""
    hook = register_optimizer_step_post_hook(lambda *_: task.updated())
    try:
        yield
    finally:
        hook.remove()


# ── Monograph ─────────────────────────────────────────────────────────────────────────────────────


def monograph(task: Task) -> None:
    """Train with the resident engine over the data room's windows; `task.model` is set before the
    first update.
    """
    shape = task.shape
    model = Llama(shape.config, seed=task.seed)
    engine = Resident(
        model,
        optim=AdamW(lr=task.lr, betas=BETAS, weight_decay=DECAY),
        schedule=task.schedule,
        clip=CLIP,
        precision=Precision(task.precision),
        micro_batch=shape.micro_batch,
    )
    batches = Batches(task.rows, task.rows_per_update * shape.length)
    window = next(Batches(task.rows, task.rows_per_update * shape.length))
    if task.compiled and (obstacle := engine.capture(window)):
        raise SystemExit(f"the step cannot be captured: {obstacle}")
    task.first = list(pieces(window))
    task.model = model
    for update in train(engine, batches):
        task.targets = update.tokens  # type: ignore[assignment]  # read where it is wanted, not here
        task.updated()
    synchronize(engine.step.device)


def pieces(window: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) of each document of a window, packed or padded."""
    for row, (tokens_T, targets_T) in enumerate(
        zip(window["tokens"], window["targets"], strict=True)
    ):
        segments_T = (
            window["segments"][row] if "segments" in window else (targets_T != IGNORE).long()
        )
        for number in range(1, int(segments_T.max()) + 1):
            yield tokens_T[segments_T == number], targets_T[segments_T == number]


# ── the peers ─────────────────────────────────────────────────────────────────────────────────────


def plain(task: Task) -> None:
    """Train with a hand-written loop: mean loss over micro-batches, clipping, fused AdamW."""
    model = task.llama()
    loss = torch.compile(dense_loss) if task.compiled else dense_loss
    optimizer, count = fused_adamw(model, task.lr), task.shape.micro_batches
    for index, batch in enumerate(loader(task, task.documents, padded)):
        with task.autocast():
            mean = loss(model, batch["tokens"], batch["targets"])
        (mean / count).backward()
        if (index + 1) % count:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = task.lr * task.schedule(index // count)
        optimizer.step()
        optimizer.zero_grad()


def trainer(task: Task) -> None:
    """Train with Trainer on transformers' LlamaForCausalLM and its usual collator, which pads to
    the longest.
    """
    import transformers

    weights = Llama(task.shape.config, seed=task.seed).state_dict()
    values = task.shape.config.to_hf() | {"use_cache": False}
    task.model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    task.model.load_state_dict(weights)
    _trainer(task)


class Scored(nn.Module):
    """Your own module in the form that Trainer needs: `labels` in, mean loss out."""

    def __init__(self, net: Llama) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the mean loss; the labels are the inputs, and the last input predicts nothing."""
        return {"loss": dense_loss(self.net, input_ids[:, :-1], labels[:, 1:])}


def trainer_module(task: Task) -> None:
    """Train with Trainer on this project's Llama, which is a custom nn.Module for it."""
    task.model = Scored(task.llama())
    _trainer(task)


def _trainer(task: Task) -> None:
    import transformers
    from tokenizers import Tokenizer, models

    optimizer = fused_adamw(task.model, task.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": PADDING}, "[PAD]")), pad_token="[PAD]"
    )
    # transformers' models shift the labels themselves, so a full row is one token shorter than in
    # the other systems.
    documents = task.documents if task.ragged else [document[:-1] for document in task.documents]
    own = {
        "bf16": task.precision == "bf16",
        "torch_compile": task.compiled,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(task.shape, torch.device("cpu")) | own
        transformers.Trainer(
            model=task.model,
            args=transformers.TrainingArguments(**arguments, output_dir=folder),
            train_dataset=Rewrapped(task, documents),
            data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
            optimizers=(optimizer, schedule),
        ).train()


class Rewrapped(Documents):
    """Documents in the form that transformers' collators take."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"input_ids": super().__getitem__(index)}


def lightning(task: Task) -> None:
    """Train with Lightning's Trainer on this project's Llama (it has no model) and a dense loss,
    compiled together.
    """
    import lightning as L

    model = task.llama()
    loss = torch.compile(dense_loss) if task.compiled else dense_loss

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return loss(self.net, batch["tokens"], batch["targets"])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = fused_adamw(self, task.lr)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, **_: Any
        ) -> None:
            # Lightning's precision refuses fused AdamW under mixed precision, though on a CPU it
            # scales nothing.
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
        accumulate_grad_batches=task.shape.micro_batches,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader(task, task.documents, padded))
