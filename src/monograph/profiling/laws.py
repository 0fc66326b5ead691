"""Compare fast paths with slow paths on this machine, with a small model on the device of a run.

A law says that a fast path equals a slow, obviously correct path (docs/laws.md). The errors and
their bounds are those of the laws:

- The error of a gradient and of an evaluated loss is relative to exact values, which are computed
  for each document alone, in float64 on the CPU. In float64 the bound is 1e-12. In fewer bits it is
  twice the sum of a rounding and the error of a slow path, which computes documents alone, eagerly,
  in the same dtype.
- If two paths must be equal in every bit, the error is the number of tensors, tokens or numbers
  that differ, and the bound is 0.

Laws that need other programs, ranks, rewards or hours are left to the tests.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import ne
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.decode.cache import KVCache
from monograph.decode.chain import SamplerRows, apply_filters, sample
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
# The documents of each row of a packed window, by their numbers of tokens. The last row ends with
# padding.
ROWS = ((300, 84), (100, 284), (384,), (200, 150))
LENGTH = 384  # tokens of a row
PROMPT = 40  # tokens of a prompt
WRITTEN = 24  # tokens that are generated after a prompt
DRAWS = 64  # rows of logits, and draws from each row
DRAWN = Sampling(1.0, logprobs=0, seed=1)
LIKELIEST = Sampling(0.0, logprobs=0, seed=1)


class LawComparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        error: how far the fast path is off; with the bound 0, how many values differ.
        bound: the largest error that the law allows.
        why: why the paths could not be compared; "": they were compared.
    """

    error: float
    bound: float
    why: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the law holds; it does not if the error is NaN."""
        return not self.why and self.error <= self.bound

    @property
    def said(self) -> tuple[str, str, str]:
        """Return the error, the bound and the verdict in words."""
        if self.bound:
            error, bound = f"{self.error:.1e}", f"{self.bound:.1e}"
        else:
            error, bound = f"{self.error:.0f} differ", "0"
        if self.holds:
            return error, bound, "holds"
        return error, bound, f"BROKEN: {self.why}" if self.why else "BROKEN"


class Law(NamedTuple):
    """A law that can be compared.

    Attributes:
        number: its number in docs/laws.md.
        name: the two paths, and the precision.
        compare: compares the paths, which takes seconds.
    """

    number: int
    name: str
    compare: Callable[[], LawComparison]


def laws(device: torch.device) -> list[Law]:
    """Return the laws that can be compared on a device, in the order of their numbers."""
    fp64 = _Small(device, "fp64")
    fp32 = _Small(device, "fp32")
    # Llamas are trained in these precisions.
    trained = [fp32]
    if device.type == "cpu" or describe(device).has_bf16:
        trained.append(_Small(device, "bf16"))
    all_precisions = [fp64, *trained]
    # Graphs are replayed on CUDA only.
    replayed = trained if device.type == "cuda" else []
    table: list[tuple[int, str, Callable[[_Small], LawComparison], list[_Small]]] = [
        (1, "compiled = eager", _Small.compiled, trained),
        (1, "replayed = called", _Small.replayed, replayed),
        (2, "accumulated = large batch", _Small.accumulated, all_precisions),
        (3, "recomputed = stored", _Small.recomputed, trained),
        (4, "streamed = resident", _Small.streamed, trained),
        (5, "member = trained alone", _Small.member, [fp64]),
        (6, "fused siblings = separate", _Small.fused, all_precisions),
        (7, "sampled = reference", _Small.sampled, [fp32]),
        (8, "cached = full", _Small.cached, [fp64]),
        (8, "generated = computed again", _Small.generated, [fp32]),
        (9, "packed = separate", _Small.packed, all_precisions),
        (10, "resumed = uninterrupted", _Small.resumed, [fp32]),
        (16, "scored = sampled", _Small.scored, [fp32]),
        (18, "adapters off = base", _Small.adapted, [fp32]),
        (19, "used generator = new one", _Small.stale, [fp32]),
    ]
    return [
        Law(number, f"{paths}, {small.name}", functools.partial(compare, small))
        for number, paths, compare, smalls in table
        for small in smalls
    ]


class _Small:
    """A small model on a device in one precision, and the comparisons of its paths.

    Attributes:
        name: the name of the precision.
        device: the device.
        precision: the precision; for "fp64" the weights are float64, and nothing is cast.
        model: the model, which no comparison trains.
        rows: a window of documents that are packed into rows.
        alone: a window of the same documents, each in its own row.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.name = name
        self.device = device
        self.precision = Precision("fp32" if name == "fp64" else name)
        self.model = Llama(SHAPE).to(device, torch.float64 if name == "fp64" else torch.float32)
        self.rows, self.alone = _windows()

    def engine(self, model: Llama | None = None, **more: Any) -> Resident:
        """Return a resident engine of a model, by default of a copy of the small model."""
        model = copy.deepcopy(self.model) if model is None else model
        return Resident(model, optim=AdamW(lr=0.01), precision=self.precision, **more)

    @functools.cached_property
    def bound(self) -> float:
        """Return the bound of relative errors; the module explains it."""
        if self.name == "fp64":
            return 1e-12
        gradient, _ = _gradient_and_loss(self.engine(), self.alone)
        exact_gradient, _ = _exact_gradient_and_loss()
        error = _relative_error((gradient,), (exact_gradient,))
        rounding = torch.finfo(self.precision.dtype).eps / 2
        return 2 * (error + rounding)

    def captured(self, engine: Resident) -> Resident:
        """Compile an engine's step, and return the engine."""
        obstacle = engine.capture(self.rows)
        if obstacle:
            raise MonographError(f"the step of a small model cannot be compiled here: {obstacle}")
        return engine

    def compare_with_exact(self, engine: Engine) -> LawComparison:
        """Compare an engine's gradient and loss of packed rows with the exact ones."""
        found = _gradient_and_loss(engine, self.rows)
        return LawComparison(_relative_error(found, _exact_gradient_and_loss()), self.bound)

    def compiled(self) -> LawComparison:
        return self.compare_with_exact(self.captured(self.engine()))

    def accumulated(self) -> LawComparison:
        return self.compare_with_exact(self.engine(micro_batch=1))

    def packed(self) -> LawComparison:
        return self.compare_with_exact(self.engine())

    def replayed(self) -> LawComparison:
        replayed = self.engine()
        called = self.engine()
        notes = list[str]()
        called.step.recorder = None
        replayed.step.announce = notes.append
        # The compilation is inside as well, because the compiler chooses code by this setting.
        with _deterministic_sums():
            differing = _count_differing(self.captured(replayed), self.captured(called), self.rows)
        why = ""
        if not is_replayed(replayed.step):
            why = "; ".join(["nothing is replayed", *notes])
        return LawComparison(differing, 0, why)

    def recomputed(self) -> LawComparison:
        with _deterministic_sums():
            recomputing = self.engine(remat=Remat.Full())
            return LawComparison(_count_differing(recomputing, self.engine(), self.rows), 0)

    def streamed(self) -> LawComparison:
        placement = Placement(self.device)
        model = copy.deepcopy(self.model).cpu()
        with _deterministic_sums():
            streamed = Streamed(
                model, optim=AdamW(lr=0.01), precision=self.precision, placement=placement
            )
            return LawComparison(_count_differing(streamed, self.engine(), self.rows), 0)

    def member(self) -> LawComparison:
        """Compare the second of two members with the same model trained alone.

        Losses, norms, weights and moments are compared.
        """
        members = [Llama(SHAPE, seed).to(self.device, torch.float64) for seed in range(2)]
        alone = self.engine(copy.deepcopy(members[1]), clip=0.5)
        ensemble = Ensemble(members, optim=AdamW(lr=0.01), clip=0.5)
        windows = [self.rows] * 2
        found = list[Tensor]()
        expected = list[Tensor]()
        for of_ensemble, of_alone in zip(
            train(ensemble, windows), train(alone, windows), strict=True
        ):
            found += [of_ensemble.loss[1], of_ensemble.grad_norm[1]]
            expected += [of_alone.loss, of_alone.grad_norm]
        states = ensemble.member_state(1), alone.state()
        for values, state in zip((found, expected), states, strict=True):
            values += [
                part[name] for part in (state.model, state.optimizer) for name in sorted(part)
            ]
        return LawComparison(_relative_error(tuple(found), tuple(expected)), 1e-10)

    def fused(self) -> LawComparison:
        engine = self.engine()
        fusion = fuse_siblings(engine.model, self.rows["tokens"].to(self.device))
        if not fusion.families:
            return LawComparison(0, 0, str(fusion))
        return self.compare_with_exact(engine)

    @torch.no_grad()
    def sampled(self) -> LawComparison:
        """Count wrong tokens of the filters, and draws of tokens that the filters removed.

        A token is wrong if the filters keep or remove it against their definitions in float64.
        """
        options = Sampling(0.8, top_k=40, top_p=0.9, min_p=0.02)
        draw = torch.Generator().manual_seed(1)
        chain = chain_of([options])
        logits_BV = 2.5 * torch.randn(DRAWS, SHAPE.vocab_size, generator=draw)
        # Rounding may decide about a token at a threshold. Such a token is in `maybe_kept_BV` and
        # not in `surely_kept_BV`, so it is never counted as wrong.
        surely_kept_BV = _kept_by_definition(logits_BV.double(), options, 1 + 1e-6)
        maybe_kept_BV = _kept_by_definition(logits_BV.double(), options, 1 - 1e-6)
        logits_BV = logits_BV.to(self.device).repeat(DRAWS, 1)
        seed_B = torch.arange(len(logits_BV), device=self.device)
        knobs = new_knobs(chain, len(seed_B), self.device)
        write_rows(knobs, range(len(seed_B)), [knobs_of(options, chain)] * len(seed_B))
        rows = SamplerRows(seed_B, torch.full_like(seed_B, PROMPT), torch.zeros_like(seed_B), knobs)
        candidates = apply_filters(logits_BV, rows, chain, "window")
        assert candidates.ids_BN is not None
        kept_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(
            -1, candidates.ids_BN, candidates.scores_BN > -torch.inf
        )
        wrongly_kept_BV = kept_BV.cpu() & ~maybe_kept_BV.repeat(DRAWS, 1)
        wrongly_removed_BV = surely_kept_BV.repeat(DRAWS, 1) & ~kept_BV.cpu()
        wrong = int((wrongly_kept_BV | wrongly_removed_BV).sum())
        token_B = sample(logits_BV, rows, None, chain).token_B
        drawn_though_removed = int((~kept_BV[seed_B, token_B]).sum())
        return LawComparison(wrong + drawn_though_removed, 0)

    @torch.no_grad()
    def cached(self) -> LawComparison:
        """Compare the logits of a prompt that is read in parts with those of one forward pass.

        The first part is WRITTEN tokens long, and every other part is one token.
        """
        model = self.model.train(False)
        ids_BT = self.alone["tokens"][:2, :PROMPT].to(self.device)
        cache = KVCache.allocate(SHAPE, 2, PROMPT, torch.float64, self.device)
        positions_BT = torch.arange(PROMPT, device=self.device).expand(2, -1)
        parts = [slice(0, WRITTEN), *(slice(begin, begin + 1) for begin in range(WRITTEN, PROMPT))]
        hidden_of_parts = [
            model(ids_BT[:, part], positions=positions_BT[:, part], cache=cache) for part in parts
        ]
        found = model.logits(torch.cat(hidden_of_parts, 1))
        expected = model.logits(model(ids_BT))
        return LawComparison(_relative_error((found,), (expected,)), self.bound)

    @torch.no_grad()
    def generated(self) -> LawComparison:
        """Count likeliest tokens that the decode graph writes and whole forward passes do not."""
        generated = self._generate(self._generator(LIKELIEST, "compiled"), LIKELIEST)
        ids = self._prompt
        for _ in range(WRITTEN):
            logits = self.model.logits(self.model(ids[None])[0, -1])
            ids = torch.cat([ids, logits.argmax()[None]])
        found = [token for token, _ in generated]
        return LawComparison(sum(map(ne, found, ids[PROMPT:].tolist())), 0)

    def resumed(self) -> LawComparison:
        uninterrupted = self.engine()
        resumed = self.engine()
        no_data = SimpleNamespace(state=dict)
        with _deterministic_sums(), temporary_folder() as folder:
            list(train(uninterrupted, [self.rows] * 2))
            save_checkpoint(uninterrupted, no_data, folder)
            load_checkpoint(resumed, folder)
            return LawComparison(_count_differing(resumed, uninterrupted, self.rows), 0)

    def scored(self) -> LawComparison:
        """Compare log-probabilities of sampled tokens with those that a training pass computes."""
        sampled = self._generate(self._generator(DRAWN), DRAWN)
        tokens, log_probabilities = zip(*sampled, strict=True)
        ids = torch.cat([self._prompt, torch.tensor(tokens, device=self.device)])
        model = self.model.train()
        scored = token_log_probabilities(
            model(ids[None])[0, PROMPT - 1 : -1], model.lm_head.weight, ids[PROMPT:]
        )
        difference = scored.detach().cpu() - torch.tensor(log_probabilities)
        return LawComparison(float(difference.abs().max()), 1e-5)

    def adapted(self) -> LawComparison:
        """Count numbers in hidden states that differ from the base's after adapters are off.

        The adapters are trained first.
        """
        model = copy.deepcopy(self.model)
        window = {name: rows.to(self.device) for name, rows in self.rows.items()}
        layers = adapt(model, Lora(rank=4)).values()
        list(train(self.engine(model), [self.rows] * 2))
        trained = all(layer.lora_B.weight.any() for layer in layers)
        inputs = {"segments": window["segments"], "positions": window["positions"]}
        with torch.no_grad():
            for layer in layers:
                layer.lora_B.weight.zero_()
            found = model(window["tokens"], **inputs)
            expected = self.model(window["tokens"], **inputs)
        why = "" if trained else "the adapters learned nothing"
        return LawComparison(int((found != expected).sum()), 0, why)

    def stale(self) -> LawComparison:
        """Count tokens that a used generator writes after an update and a new generator does not.

        Their log-probabilities are compared as well.
        """
        model = copy.deepcopy(self.model)
        used = self._generator(DRAWN, model=model)
        engine = self.engine(model)
        before = self._generate(used, DRAWN)
        list(train(engine, [self.rows]))
        used.forget()
        after = self._generate(used, DRAWN)
        expected = self._generate(self._generator(DRAWN, model=model), DRAWN)
        why = "" if after != before else "the update changed nothing"
        return LawComparison(sum(map(ne, after, expected)), 0, why)

    @property
    def _prompt(self) -> Tensor:
        return self.alone["tokens"][0, :PROMPT].to(self.device)

    def _generator(
        self, sampling: Sampling, mode: Mode = "eager", model: Llama | None = None
    ) -> Generator:
        """Return a generator of one row, by default of the small model."""
        chain = chain_of([sampling])
        slots = PROMPT + WRITTEN
        return Generator(
            model or self.model, chain, rows=1, slots=slots, vocabulary=SHAPE.vocab_size, mode=mode
        )

    def _generate(self, generator: Generator, sampling: Sampling) -> list[tuple[int, float]]:
        """Return the generated tokens after the prompt, with their log-probabilities."""
        generator.submit(Request(tuple(self._prompt.tolist()), sampling, WRITTEN))
        return [
            (token, logprob.drawn)
            for event in generator.run()
            for token, logprob in zip(event.token_ids, event.logprobs, strict=True)
        ]


def _kept_by_definition(logits_BV: Tensor, options: Sampling, strictness: float) -> Tensor:
    """Return which tokens top-k, top-p and min-p keep, in this order, by their definitions.

    The thresholds of top-p and min-p are moved by the factor `strictness`; above 1, fewer tokens
    are kept.
    """
    logits_BV = logits_BV / options.temperature
    above_BVV = logits_BV[:, None, :] > logits_BV[:, :, None]
    logits_BV = logits_BV.masked_fill(above_BVV.sum(-1) >= options.top_k, -torch.inf)
    mass_above_BV = (above_BVV * logits_BV.softmax(-1)[:, None, :]).sum(-1)
    removed_BV = mass_above_BV >= options.top_p / strictness
    p_BV = logits_BV.masked_fill(removed_BV, -torch.inf).softmax(-1)
    return (p_BV > 0) & (p_BV >= strictness * options.min_p * p_BV.amax(-1, keepdim=True))


@functools.cache
def _exact_gradient_and_loss() -> tuple[Tensor, Tensor]:
    _, alone = _windows()
    return _gradient_and_loss(Resident(Llama(SHAPE).double(), optim=AdamW()), alone)


def _windows() -> tuple[Batch, Batch]:
    """Return a window of documents packed into rows, and one of each document in its own row."""
    draw = torch.Generator().manual_seed(0)
    # A document has one token more than inputs, because targets are the inputs' next tokens.
    documents_of_rows = [
        [torch.randint(SHAPE.vocab_size, (size + 1,), generator=draw) for size in sizes]
        for sizes in ROWS
    ]
    documents = [document for row in documents_of_rows for document in row]
    packed = _window(documents_of_rows)
    alone = _window([[document] for document in documents])
    return packed, {"tokens": alone["tokens"], "targets": alone["targets"]}


def _window(documents_of_rows: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return a window with these documents in its rows, one after another."""
    shape = len(documents_of_rows), LENGTH
    window = {
        name: torch.zeros(shape, dtype=torch.int64) for name in ("segments", "positions", "tokens")
    }
    window["targets"] = torch.full(shape, -100, dtype=torch.int64)
    for row, documents in enumerate(documents_of_rows):
        begin = 0
        for number, document in enumerate(documents):
            size = len(document) - 1
            place = row, slice(begin, begin + size)
            window["tokens"][place] = document[:-1]
            window["targets"][place] = document[1:]
            window["segments"][place] = number + 1
            window["positions"][place] = torch.arange(size)
            begin += size
    return window


def _gradient_and_loss(engine: Engine, window: Batch) -> tuple[Tensor, Tensor]:
    """Return the gradient of a window's mean loss, and the mean loss of an evaluation."""
    engine.accumulate(window)
    gradient = torch.cat(
        [p.grad.double().cpu().flatten() for p in engine.model.parameters() if p.grad is not None]
    )
    engine.step.discard()
    total, count = engine.evaluate(window)
    return gradient, (total / count).cpu()


def _relative_error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error of these tensors."""
    return max(
        float((approximate - true).norm() / true.norm())
        for approximate, true in zip(found, exact, strict=True)
    )


def _count_differing(one: Engine, other: Engine, window: Batch) -> int:
    """Train two engines for three updates, and count the tensors that differ in a bit."""
    states: list[Mapping[str, Tensor]] = []
    for engine in (one, other):
        list(train(engine, [window] * 3))
        state = engine.state()
        states.append(
            {name: x.cpu() for part in (state.model, state.optimizer) for name, x in part.items()}
        )
    state_of_one, state_of_other = states
    return sum(
        not torch.equal(tensor, state_of_other[name]) for name, tensor in state_of_one.items()
    )


@contextmanager
def _deterministic_sums() -> Iterator[None]:
    """Use deterministic algorithms within the block.

    Without them, two calls of the same code may differ in bits on a GPU, because sums have no fixed
    order.
    """
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        # torch warns of operators that have no deterministic algorithm; none of them is used here.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
