"""Compare fast paths with slow ones on this machine: a small model, on the device that a run would take.

The error of a gradient and of an evaluated loss is relative, to each document computed alone in float64 on the CPU.
It may be twice that of the gradient of documents computed alone in the same dtype and eagerly, and a rounding. Where
all is to be equal, the error is how many tensors or tokens differ.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import describe
from monograph.engine import Engine
from monograph.errors import MonographError
from monograph.graph.capture import is_replayed
from monograph.graph.precision import Precision
from monograph.loop import train
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.stream import Placement, Streamed

SHAPE = LlamaConfig.preset("nano", vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False)
ROWS = ((300, 84), (100, 284), (384,), (200, 150))  # documents; the last row ends with padding
LENGTH, PROMPT, WRITTEN = 384, 40, 24


class Compared(NamedTuple):
    """A law on this machine: how far a fast path is off, how far it may be, and why they could not be compared."""

    error: float
    bound: float
    why: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the law holds, which it does not if the error is NaN."""
        return not self.why and self.error <= self.bound

    @property
    def said(self) -> str:
        """Return the comparison in words."""
        off = f"{self.error:.1e} off, at most {self.bound:.1e}" if self.bound else f"{self.error:.0f} differ"
        return off if self.holds else f"BROKEN: {self.why or off}"


def laws(device: torch.device) -> Iterator[tuple[str, Callable[[], Compared]]]:
    """Yield each law's name and its comparison, which takes seconds."""
    names = ("fp32", "bf16") if device.type == "cpu" or describe(device).has_bf16 else ("fp32",)
    for small in (_Small(device, name) for name in names):
        once = functools.partial(small.engine, micro_batch=1)
        for what, make in (("packed = separate", small.engine), ("accumulated = large batch", once)):
            yield f"{what}, {small.name}", functools.partial(small.off, make)
        yield f"compiled = eager, {small.name}", functools.partial(small.off, small.captured)
        yield f"streamed = resident, {small.name}", small.streamed
        if device.type == "cuda":
            yield f"replayed = called, {small.name}", small.replayed
    yield "generated = computed again, fp32", functools.partial(_generated, device)


class _Small:
    """A small model on a device, in one precision."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.name, self.device, self.precision = name, device, Precision(name)
        self.model = Llama(SHAPE).to(device)
        self.rows, self.alone = _windows()

    def engine(self, **more: Any) -> Resident:
        return Resident(copy.deepcopy(self.model), optim=AdamW(lr=0.01), precision=self.precision, **more)

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        return _computed(Resident(Llama(SHAPE).double(), optim=AdamW()), self.alone)

    @functools.cached_property
    def bound(self) -> float:
        slow = _computed(self.engine(), self.alone)
        return 2 * (_off(slow[:1], self.exact[:1]) + torch.finfo(self.precision.dtype).eps / 2)

    def captured(self, given: Resident | None = None) -> Resident:
        engine = given or self.engine()
        if obstacle := engine.capture(self.rows):
            raise MonographError(f"the step of a small model cannot be compiled here: {obstacle}")
        return engine

    def off(self, make: Callable[[], Engine]) -> Compared:
        return Compared(_off(_computed(make(), self.rows), self.exact), self.bound)

    def streamed(self) -> Compared:
        place, model = Placement(self.device), copy.deepcopy(self.model).cpu()
        with _one_order():
            engine = Streamed(model, optim=AdamW(lr=0.01), precision=self.precision, placement=place)
            return Compared(_differing(engine, self.engine(), self.rows), 0)

    def replayed(self) -> Compared:
        replayed, called, notes = self.engine(), self.engine(), list[str]()
        called.step.recorder, replayed.step.announce = None, notes.append
        with _one_order():  # for the compiler, too
            found = _differing(self.captured(replayed), self.captured(called), self.rows)
        return Compared(found, 0, "" if is_replayed(replayed.step) else "; ".join(["nothing is replayed", *notes]))


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
        list(train(engine, [window] * 3))
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
def _generated(device: torch.device) -> Compared:
    """Compare the likeliest tokens that the decode graph writes with those of whole forward passes."""
    model, slots = Llama(SHAPE).to(device).train(False), PROMPT + WRITTEN
    ids = _windows()[1]["tokens"][0, :PROMPT].to(device)
    generator = Generator(
        model, chain_of([Sampling(0)]), rows=1, slots=slots, vocabulary=SHAPE.vocab_size, mode="compiled"
    )
    generator.submit(Request(tuple(ids.tolist()), Sampling(0), WRITTEN))
    written = [token for event in generator.run() for token in event.token_ids]
    for _ in range(WRITTEN):
        ids = torch.cat([ids, (model(ids[None])[0, -1] @ model.lm_head.weight.T).argmax()[None]])
    return Compared(sum(ours != its for ours, its in zip(written, ids[PROMPT:].tolist(), strict=True)), 0)
