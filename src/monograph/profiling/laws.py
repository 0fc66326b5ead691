"""Compare fast paths with slow ones on this machine: a small model, on the device that a run would take.

The error of a gradient and of an evaluated loss is relative, to each document computed alone in float64 on the CPU.
It may be twice that of the gradient of documents computed alone in the same dtype and eagerly, and a rounding. Where
all is to be equal, the error is how many tensors or tokens differ.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.decode.generator import Generator, Request
from monograph.decode.knobs import chain_of
from monograph.decode.sampling import Sampling
from monograph.device import describe
from monograph.engine import Engine
from monograph.errors import MonographError
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.stream import Placement, Streamed

SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
)  # fmt: skip
ROWS = ((300, 84), (100, 284), (384,), (200, 150))  # documents; the last row ends with padding
LENGTH, PROMPT, WRITTEN = 384, 40, 24


class Law(NamedTuple):
    """A law on this machine: how far a fast path is off, and how far it may be."""

    name: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """Return whether it holds, which it does not if the error is NaN."""
        return self.error <= self.bound

    @property
    def said(self) -> str:
        """Return the comparison in words."""
        if self.bound == 0:
            return "equal" if self.holds else f"BROKEN: {self.error:.0f} differ"
        return f"{'' if self.holds else 'BROKEN: '}{self.error:.1e} off, at most {self.bound:.1e}"


def laws(device: torch.device) -> Iterator[Law]:
    """Yield the laws one after another, as each takes seconds.

    Raises:
        MonographError: the step of this model cannot be compiled here.
    """
    packed, alone = _windows()
    exact = _computed(Resident(Llama(SHAPE).double(), optim=AdamW()), alone)
    for name in ("fp32", "bf16") if device.type == "cpu" or describe(device).has_bf16 else ("fp32",):
        options: dict[str, Any] = {"optim": AdamW(lr=0.01), "precision": Precision(name)}
        model = Llama(SHAPE).to(device)

        def engine(model: Llama = model, options: dict[str, Any] = options, **more: Any) -> Resident:
            return Resident(copy.deepcopy(model), **options, **more)

        slow, eager = _computed(engine(), alone), _computed(engine(), packed)
        bound = 2 * (_off(slow[:1], exact[:1]) + torch.finfo(options["precision"].dtype).eps / 2)
        yield Law(f"packed = separate, {name}", _off(eager, exact), bound)
        yield Law(f"accumulated = large batch, {name}", _off(_computed(engine(micro_batch=1), packed), exact), bound)
        captured = _captured(engine(), packed)
        yield Law(f"compiled = eager, {name}", _off(_computed(captured, packed), exact), bound)
        with _one_order():
            streamed = Streamed(copy.deepcopy(model).cpu(), placement=Placement(device), **options)
            yield Law(f"streamed = resident, {name}", _differing(streamed, engine(), packed), 0)
            if device.type == "cuda":
                called = engine()
                called.step.recorder = None
                yield Law(f"replayed = called, {name}", _differing(captured, _captured(called, packed), packed), 0)
    yield Law("generated = computed again", _misread(Llama(SHAPE).to(device).eval(), alone["tokens"][0, :PROMPT]), 0)


def _windows() -> tuple[Batch, Batch]:
    """Return the documents packed into rows, and each in a row of its own."""
    draw = torch.Generator().manual_seed(0)
    texts = [[torch.randint(SHAPE.vocab_size, (size + 1,), generator=draw) for size in row] for row in ROWS]
    packed = {name: torch.zeros(len(ROWS), LENGTH, dtype=torch.int64) for name in ("segments", "positions")}
    alone: dict[str, Tensor] = {}
    for window, rows in ((packed, texts), (alone, [[text] for row in texts for text in row])):
        window["tokens"] = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
        window["targets"] = torch.full_like(window["tokens"], -100)
        for index, row in enumerate(rows):
            begin = 0
            for number, text in enumerate(row):
                there = (index, slice(begin, begin + len(text) - 1))
                window["tokens"][there], window["targets"][there] = text[:-1], text[1:]
                if window is packed:
                    packed["segments"][there], packed["positions"][there] = number + 1, torch.arange(len(text) - 1)
                begin = there[1].stop
    return packed, alone


def _captured(engine: Resident, window: Batch) -> Resident:
    if obstacle := engine.capture(window):
        raise MonographError(f"the step of a small model cannot be compiled here: {obstacle}")
    return engine


def _computed(engine: Engine, window: Batch) -> tuple[Tensor, Tensor]:
    """Return the gradient of a window's mean loss, and that loss as an evaluation gives it."""
    engine.accumulate(window)
    gradient = torch.cat([p.grad.double().cpu().flatten() for p in engine.model.parameters() if p.grad is not None])
    engine.step.discard()
    total, count = engine.evaluate(window)
    return gradient, (total / count).cpu()


def _off(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error."""
    return max(float((ours - true).norm() / true.norm()) for ours, true in zip(found, exact, strict=True))


def _differing(one: Engine, other: Engine, window: Batch) -> int:
    """Return how many tensors of the two differ in a bit after three updates."""
    states: list[Mapping[str, Tensor]] = []
    for engine in (one, other):
        for _ in range(3):
            engine.accumulate(window)
            engine.update()
        state = engine.state()
        states.append({name: x.cpu() for part in (state.model, state.optimizer) for name, x in part.items()})
    return sum(not torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@contextmanager
def _one_order() -> Iterator[None]:
    """Let sums have one order, without which two calls of the same code differ in bits on a GPU."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that have no such order, and are not used here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@torch.no_grad()
def _misread(model: Llama, prompt: Tensor) -> int:
    """Return how many of the likeliest tokens the decode graph writes otherwise than whole forward passes."""
    slots = PROMPT + WRITTEN
    generator = Generator(
        model, chain_of([Sampling(0)]), rows=1, slots=slots, vocabulary=SHAPE.vocab_size, compiled=True
    )
    generator.submit(Request(tuple(prompt.tolist()), Sampling(0), WRITTEN))
    written = [token for event in generator.run() for token in event.token_ids]
    ids = prompt.to(model.lm_head.weight.device)
    for _ in range(WRITTEN):
        ids = torch.cat([ids, (model(ids[None])[0, -1] @ model.lm_head.weight.T).argmax()[None]])
    return sum(ours != its for ours, its in zip(written, ids[PROMPT:].tolist(), strict=True))
