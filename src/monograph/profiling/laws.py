"""Compare fast paths with slow ones on this machine: a small model, on the device that a run would
take.

The bounds are the laws' own. In float64 that is an error of 1e-12. In fewer bits the error of a
gradient and of an evaluated loss, relative to each document computed alone in float64 on the CPU,
may be twice that of the gradient of documents computed alone in the same dtype and eagerly, and a
rounding. Where all is to be equal, the error is how many tensors, tokens or numbers differ. Laws
that need other programs, ranks, rewards or hours are left to the tests.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import ne
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.decode.cache import KVCache
from monograph.decode.chain import Rows, narrowed, sample
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of, knobs_of, new_knobs, write_rows
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import describe
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import MonographError
from monograph.graph.capture import is_replayed
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.siblings import fuse_siblings
from monograph.loop import load_checkpoint, save_checkpoint, train
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cross_entropy import token_log_probabilities
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.storage.writing import temporary_folder
from monograph.stream import Placement, Streamed

SHAPE = LlamaConfig.preset(
    "nano", vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False
)
ROWS = ((300, 84), (100, 284), (384,), (200, 150))  # documents; the last row ends with padding
LENGTH = 384
PROMPT = 40
WRITTEN = 24
DRAWS = 64
DRAWN, LIKELIEST = (Sampling(temperature, logprobs=0, seed=1) for temperature in (1.0, 0.0))


class Compared(NamedTuple):
    """A law on this machine: how far a fast path is off, how far it may be, and why they could not
    be compared.
    """

    error: float
    bound: float
    why: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the law holds, which it does not if the error is NaN."""
        return not self.why and self.error <= self.bound

    @property
    def said(self) -> tuple[str, str, str]:
        """Return the error, the bound and the verdict in words."""
        figures = (
            (f"{self.error:.1e}", f"{self.bound:.1e}")
            if self.bound
            else (f"{self.error:.0f} differ", "0")
        )
        return (*figures, "holds" if self.holds else ": ".join(filter(None, ("BROKEN", self.why))))


class Law(NamedTuple):
    """A law's number in the README, what is compared, and the comparison, which takes seconds."""

    number: int
    name: str
    compare: Callable[[], Compared]


def laws(device: torch.device) -> list[Law]:
    """Return the laws that can be compared on a device, by number."""
    has_bf16 = device.type == "cpu" or describe(device).has_bf16
    exact, single, *half = (_Small(device, name) for name in ("fp64", "fp32", *["bf16"] * has_bf16))
    trained, all_ = (single, *half), (exact, single, *half)
    table: tuple[tuple[int, str, Callable[[_Small], Compared], tuple[_Small, ...]], ...] = (
        (1, "compiled = eager", lambda small: small.off(small.captured()), trained),
        (1, "replayed = called", _Small.replayed, trained if device.type == "cuda" else ()),
        (
            2,
            "accumulated = large batch",
            lambda small: small.off(small.engine(micro_batch=1)),
            all_,
        ),
        (3, "recomputed = stored", _Small.recomputed, trained),
        (4, "streamed = resident", _Small.streamed, trained),
        (5, "member = trained alone", _Small.member, (exact,)),
        (6, "fused siblings = separate", _Small.fused, all_),
        (7, "sampled = reference", _Small.sampled, (single,)),
        (8, "cached = full", _Small.cached, (exact,)),
        (8, "generated = computed again", _Small.generated, (single,)),
        (9, "packed = separate", lambda small: small.off(small.engine()), all_),
        (10, "resumed = uninterrupted", _Small.resumed, (single,)),
        (16, "scored = sampled", _Small.scored, (single,)),
        (18, "adapters off = base", _Small.adapted, (single,)),
        (19, "used generator = new one", _Small.stale, (single,)),
    )
    return [
        Law(number, f"{what}, {small.name}", functools.partial(compare, small))
        for number, what, compare, smalls in table
        for small in smalls
    ]


class _Small:
    """A small model on a device, in one precision."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.name, self.device = name, device
        self.precision = Precision("fp32" if name == "fp64" else name)
        self.model = Llama(SHAPE).to(device, torch.float64 if name == "fp64" else torch.float32)
        self.rows, self.alone = _windows()

    def engine(self, model: Llama | None = None, **more: Any) -> Resident:
        model = copy.deepcopy(self.model) if model is None else model
        return Resident(model, optim=AdamW(lr=0.01), precision=self.precision, **more)

    @functools.cached_property
    def bound(self) -> float:
        if self.name == "fp64":
            return 1e-12
        slow = _computed(self.engine(), self.alone)
        return 2 * (_off(slow[:1], _exact()[:1]) + torch.finfo(self.precision.dtype).eps / 2)

    def captured(self, given: Resident | None = None) -> Resident:
        engine = given or self.engine()
        if obstacle := engine.capture(self.rows):
            raise MonographError(f"the step of a small model cannot be compiled here: {obstacle}")
        return engine

    def off(self, engine: Engine) -> Compared:
        return Compared(_off(_computed(engine, self.rows), _exact()), self.bound)

    def replayed(self) -> Compared:
        replayed = self.engine()
        called = self.engine()
        notes = list[str]()
        called.step.recorder = None
        replayed.step.announce = notes.append
        with _one_order():  # for the compiler, too
            found = _differing(self.captured(replayed), self.captured(called), self.rows)
        return Compared(
            found,
            0,
            "" if is_replayed(replayed.step) else "; ".join(["nothing is replayed", *notes]),
        )

    def recomputed(self) -> Compared:
        with _one_order():
            return Compared(
                _differing(self.engine(remat=Remat.Full()), self.engine(), self.rows), 0
            )

    def streamed(self) -> Compared:
        place = Placement(self.device)
        model = copy.deepcopy(self.model).cpu()
        with _one_order():
            engine = Streamed(
                model, optim=AdamW(lr=0.01), precision=self.precision, placement=place
            )
            return Compared(_differing(engine, self.engine(), self.rows), 0)

    def member(self) -> Compared:
        """Compare the second of two members with the same model alone: losses, norms, weights and
        moments.
        """
        members = [Llama(SHAPE, seed).to(self.device, torch.float64) for seed in range(2)]
        solo = self.engine(copy.deepcopy(members[1]), clip=0.5)
        together = Ensemble(members, optim=AdamW(lr=0.01), clip=0.5)
        found = list[Tensor]()
        expected = list[Tensor]()
        for ours, its in zip(
            train(together, [self.rows] * 2), train(solo, [self.rows] * 2), strict=True
        ):
            found += [ours.loss[1], ours.grad_norm[1]]
            expected += [its.loss, its.grad_norm]
        states = together.member_state(1), solo.state()
        for values, state in zip((found, expected), states, strict=True):
            values += [
                part[name] for part in (state.model, state.optimizer) for name in sorted(part)
            ]
        return Compared(_off(tuple(found), tuple(expected)), 1e-10)

    def fused(self) -> Compared:
        engine = self.engine()
        fusion = fuse_siblings(engine.model, self.rows["tokens"].to(self.device))
        return self.off(engine) if fusion.families else Compared(0, 0, str(fusion))

    @torch.no_grad()
    def sampled(self) -> Compared:
        """Count tokens that filters leave otherwise than their definitions in float64, and draws of
        tokens not left.
        """
        options = Sampling(0.8, top_k=40, top_p=0.9, min_p=0.02)
        draw = torch.Generator().manual_seed(1)
        chain = chain_of([options])
        logits_BV = 2.5 * torch.randn(DRAWS, SHAPE.vocab_size, generator=draw)
        # Rounding may decide on a token beside a threshold, which a threshold moved a little shows.
        least_BV, most_BV = (_left(logits_BV.double(), options, by) for by in (1 + 1e-6, 1 - 1e-6))
        logits_BV = logits_BV.to(self.device).repeat(DRAWS, 1)
        seed_B = torch.arange(len(logits_BV), device=self.device)
        knobs = new_knobs(chain, len(seed_B), self.device)
        write_rows(knobs, range(len(seed_B)), [knobs_of(options, chain)] * len(seed_B))
        rows = Rows(seed_B, torch.full_like(seed_B, PROMPT), torch.zeros_like(seed_B), knobs)
        left = narrowed(logits_BV, rows, chain, "window")
        assert left.ids_BN is not None
        left_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(
            -1, left.ids_BN, left.scores_BN > -torch.inf
        )
        wrong_BV = (left_BV.cpu() & ~most_BV.repeat(DRAWS, 1)) | (
            least_BV.repeat(DRAWS, 1) & ~left_BV.cpu()
        )
        token_B = sample(logits_BV, rows, None, chain).token_B
        return Compared(int(wrong_BV.sum()) + int((~left_BV[seed_B, token_B]).sum()), 0)

    @torch.no_grad()
    def cached(self) -> Compared:
        """Compare the logits of a prompt's rest, read token by token, with those of a whole pass."""
        model = self.model.train(False)
        ids_BT = self.alone["tokens"][:2, :PROMPT].to(self.device)
        cache = KVCache.allocate(SHAPE, 2, PROMPT, torch.float64, self.device)
        positions_BT = torch.arange(PROMPT, device=self.device).expand(2, -1)
        parts = [slice(0, WRITTEN), *(slice(place, place + 1) for place in range(WRITTEN, PROMPT))]
        steps = [
            model(ids_BT[:, part], positions=positions_BT[:, part], cache=cache) for part in parts
        ]
        return Compared(
            _off((model.logits(torch.cat(steps, 1)),), (model.logits(model(ids_BT)),)), self.bound
        )

    @torch.no_grad()
    def generated(self) -> Compared:
        """Count the likeliest tokens that the decode graph writes and whole forward passes do not."""
        written = self._written(self._generator(LIKELIEST, "compiled"), LIKELIEST)
        ids = self._prompt
        for _ in range(WRITTEN):
            ids = torch.cat([ids, self.model.logits(self.model(ids[None])[0, -1]).argmax()[None]])
        return Compared(sum(map(ne, [token for token, _ in written], ids[PROMPT:].tolist())), 0)

    def resumed(self) -> Compared:
        whole = self.engine()
        resumed = self.engine()
        no_data = SimpleNamespace(state=dict)
        with _one_order(), temporary_folder() as folder:
            list(train(whole, [self.rows] * 2))
            save_checkpoint(whole, no_data, folder)
            load_checkpoint(resumed, folder)
            return Compared(_differing(resumed, whole, self.rows), 0)

    def scored(self) -> Compared:
        """Compare the log-probabilities of drawn tokens with those that the training pass computes."""
        tokens, drawn = zip(*self._written(self._generator(DRAWN), DRAWN), strict=True)
        ids = torch.cat([self._prompt, torch.tensor(tokens, device=self.device)])
        model = self.model.train()
        scored = token_log_probabilities(
            model(ids[None])[0, PROMPT - 1 : -1], model.lm_head.weight, ids[PROMPT:]
        )
        return Compared(float((scored.detach().cpu() - torch.tensor(drawn)).abs().max()), 1e-5)

    def adapted(self) -> Compared:
        """Count the numbers of hidden states that differ from the base's once trained adapters are
        off.
        """
        model = copy.deepcopy(self.model)
        window = {name: rows.to(self.device) for name, rows in self.rows.items()}
        layers = adapt(model, Lora(rank=4)).values()
        list(train(self.engine(model), [self.rows] * 2))
        trained = all(layer.lora_B.weight.any() for layer in layers)
        with torch.no_grad():
            for layer in layers:
                layer.lora_B.weight.zero_()
            given = {"segments": window["segments"], "positions": window["positions"]}
            ours, its = (each(window["tokens"], **given) for each in (model, self.model))
        return Compared(
            int((ours != its).sum()), 0, "" if trained else "the adapters learned nothing"
        )

    def stale(self) -> Compared:
        """Count the tokens, with their probabilities, that a decoder writes after an update and a
        new one does not.
        """
        model = copy.deepcopy(self.model)
        kept = self._generator(DRAWN, model=model)
        engine = self.engine(model)
        before = self._written(kept, DRAWN)
        list(train(engine, [self.rows]))
        kept.forget()
        after, fresh = (
            self._written(each, DRAWN) for each in (kept, self._generator(DRAWN, model=model))
        )
        return Compared(
            sum(map(ne, after, fresh)), 0, "" if after != before else "the update changed nothing"
        )

    @property
    def _prompt(self) -> Tensor:
        return self.alone["tokens"][0, :PROMPT].to(self.device)

    def _generator(
        self, sampling: Sampling, mode: Mode = "eager", model: Llama | None = None
    ) -> Generator:
        chain = chain_of([sampling])
        slots = PROMPT + WRITTEN
        return Generator(
            model or self.model, chain, rows=1, slots=slots, vocabulary=SHAPE.vocab_size, mode=mode
        )

    def _written(self, generator: Generator, sampling: Sampling) -> list[tuple[int, float]]:
        """Return the tokens that follow the prompt and their log-probabilities."""
        generator.submit(Request(tuple(self._prompt.tolist()), sampling, WRITTEN))
        pairs = (
            pair
            for event in generator.run()
            for pair in zip(event.token_ids, event.logprobs, strict=True)
        )
        return [(token, logprob.drawn) for token, logprob in pairs]


def _left(logits_BV: Tensor, options: Sampling, by: float) -> Tensor:
    """Return which tokens top-k, top-p and min-p leave, by definition, with the last two's
    thresholds times `by`.
    """
    logits_BV = logits_BV / options.temperature
    above_BVV = logits_BV[:, None, :] > logits_BV[:, :, None]
    logits_BV = logits_BV.masked_fill(above_BVV.sum(-1) >= options.top_k, -torch.inf)
    mass_BV = (above_BVV * logits_BV.softmax(-1)[:, None, :]).sum(-1)
    p_BV = logits_BV.masked_fill(mass_BV >= options.top_p / by, -torch.inf).softmax(-1)
    return (p_BV > 0) & (p_BV >= by * options.min_p * p_BV.amax(-1, keepdim=True))


@functools.cache
def _exact() -> tuple[Tensor, Tensor]:
    return _computed(Resident(Llama(SHAPE).double(), optim=AdamW()), _windows()[1])


def _windows() -> tuple[Batch, Batch]:
    """Return the documents packed into rows, and each in a row of its own."""
    draw = torch.Generator().manual_seed(0)
    texts = [
        [torch.randint(SHAPE.vocab_size, (size + 1,), generator=draw) for size in row]
        for row in ROWS
    ]
    packed = {
        name: torch.zeros(len(ROWS), LENGTH, dtype=torch.int64)
        for name in ("segments", "positions")
    }
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
                    packed["segments"][there], packed["positions"][there] = (
                        number + 1,
                        torch.arange(len(text) - 1),
                    )
                begin = there[1].stop
    return packed, alone


def _computed(engine: Engine, window: Batch) -> tuple[Tensor, Tensor]:
    """Return the gradient of a window's mean loss, and that loss as an evaluation gives it."""
    engine.accumulate(window)
    gradient = torch.cat(
        [p.grad.double().cpu().flatten() for p in engine.model.parameters() if p.grad is not None]
    )
    engine.step.discard()
    total, count = engine.evaluate(window)
    return gradient, (total / count).cpu()


def _off(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error."""
    return max(
        float((ours - true).norm() / true.norm()) for ours, true in zip(found, exact, strict=True)
    )


def _differing(one: Engine, other: Engine, window: Batch) -> int:
    """Return how many tensors of the two differ in a bit after three updates."""
    states: list[Mapping[str, Tensor]] = []
    for engine in (one, other):
        list(train(engine, [window] * 3))
        state = engine.state()
        states.append(
            {name: x.cpu() for part in (state.model, state.optimizer) for name, x in part.items()}
        )
    return sum(not torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@contextmanager
def _one_order() -> Iterator[None]:
    """Let sums have one order, without which two calls of the same code differ in bits on a GPU."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        # Of operators that have no such order, and are not used here.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
