"""Compare fast paths with slow paths on this machine, with a small model on the device of a run.

A law says that a fast path equals a slow, obviously correct path (docs/laws.md).
`monograph.laws.comparisons` defines what is compared, and the bounds; the tests of the laws use it
as well. This file runs the paths:

- Gradients and evaluated losses are compared with exact ones, which are computed for each document
  alone, in float64 on the CPU. The bound comes from the error of a naive path, which computes each
  document alone, eagerly, in the dtype of the fast path.
- If two paths must be equal in every bit, the error is the number of tensors, tokens or numbers
  that differ, and the bound is 0.

A window is a dict of tensors with all rows of one update.

Laws that need other programs, several processes, rewards or hours are left to the tests.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from monograph.laws.comparisons import (
    LawComparison,
    accumulated_is_large_batch,
    cached_is_full,
    differing,
    differing_draws,
    equal_in_float64,
    error_within,
    greedy_ids,
    log_probabilities_agree,
    member_is_alone,
    outcome,
    relative_error,
)
from monograph.laws.reference_sampler import support_of, wrong_tokens
from monograph.loop import load_checkpoint, save_checkpoint, train
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cross_entropy import token_log_probabilities
from monograph.ops.logit_cap import cap_of
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.storage.writing import temporary_folder
from monograph.stream import Placement, Streamed

SHAPE = LlamaConfig.preset(
    "nano", vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False
)
# For each row of a packed window, the numbers of tokens of its documents. The last row ends with
# padding.
DOCUMENT_SIZES = ((300, 84), (100, 284), (384,), (200, 150))
ROW_TOKENS = 384
PROMPT_TOKENS = 40
NEW_TOKENS = 24  # tokens that are generated after a prompt
DRAWS = 64  # rows of logits, and draws from each row
# Options of generation, by temperature: 1 draws from the model's own distribution, and 0 takes the
# likeliest token. `logprobs=0` returns the log-probability of each generated token, and of no others.
DRAW = Sampling(1.0, logprobs=0, seed=1)
GREEDY = Sampling(0.0, logprobs=0, seed=1)


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
    fp64 = _SmallModel(device, "fp64")
    fp32 = _SmallModel(device, "fp32")
    # In the precisions in which Llamas are trained.
    trained = [fp32]
    if device.type == "cpu" or describe(device).has_bf16:
        trained.append(_SmallModel(device, "bf16"))
    all_precisions = [fp64, *trained]
    # Graphs are replayed on CUDA only.
    replayed = trained if device.type == "cuda" else []
    # (the law's number, the two paths, the comparison, the models on which it is made)
    table: list[tuple[int, str, Callable[[_SmallModel], LawComparison], list[_SmallModel]]] = [
        (1, "compiled = eager", _SmallModel.compiled, trained),
        (1, "replayed = called", _SmallModel.replayed, replayed),
        (2, "accumulated = large batch", _SmallModel.accumulated, all_precisions),
        (3, "recomputed = stored", _SmallModel.recomputed, trained),
        (4, "streamed = resident", _SmallModel.streamed, trained),
        (5, "member = trained alone", _SmallModel.member, [fp64]),
        (6, "fused siblings = separate", _SmallModel.fused, all_precisions),
        (7, "sampled = reference", _SmallModel.sampled, [fp32]),
        (8, "cached = full", _SmallModel.cached, [fp64]),
        (8, "generated = computed again", _SmallModel.generated, [fp32]),
        (9, "packed = separate", _SmallModel.packed, all_precisions),
        (10, "resumed = uninterrupted", _SmallModel.resumed, [fp32]),
        (16, "scored = sampled", _SmallModel.scored, [fp32]),
        (18, "adapters off = base", _SmallModel.adapted, [fp32]),
        (19, "used generator = new one", _SmallModel.stale, [fp32]),
    ]
    return [
        Law(
            number=number,
            name=f"{paths}, {model.precision_name}",
            compare=functools.partial(compare, model),
        )
        for number, paths, compare, models in table
        for model in models
    ]


class _SmallModel:
    """A small model on a device in one precision, and the comparisons of its paths.

    A comparison is a method whose name says what the fast path does.

    Attributes:
        precision_name: the name of the precision.
        device: the device.
        precision: the precision; for "fp64" the weights are float64, and nothing is cast.
        model: the model, which no comparison trains.
        packed_window: a window of documents that are packed into rows.
        unpacked_window: a window of the same documents, each in its own row.
    """

    def __init__(self, device: torch.device, precision_name: str) -> None:
        self.precision_name = precision_name
        self.device = device
        if precision_name == "fp64":
            # There is no precision of this name. With "fp32" nothing is cast, so a model with float64
            # weights computes in float64.
            self.precision = Precision("fp32")
            weights_dtype = torch.float64
        else:
            self.precision = Precision(precision_name)
            weights_dtype = torch.float32
        self.model = Llama(SHAPE).to(device, weights_dtype)
        self.packed_window, self.unpacked_window = _windows()

    def engine(self, model: Llama | None = None, **more: Any) -> Resident:
        """Return a resident engine of a model, by default of a copy of the small model."""
        if model is None:
            model = copy.deepcopy(self.model)
        return Resident(model, optim=AdamW(lr=0.01), precision=self.precision, **more)

    @functools.cached_property
    def naive_gradient(self) -> Tensor:
        """Return the naive path's gradient: of each document alone, eagerly, in this precision."""
        gradient, _ = _gradient_and_loss(self.engine(), self.unpacked_window)
        return gradient

    def captured(self, engine: Resident) -> Resident:
        """Compile an engine's step, and return the engine."""
        obstacle = engine.capture(self.packed_window)
        if obstacle:
            raise MonographError(f"the step of a small model cannot be compiled here: {obstacle}")
        return engine

    def compare_with_exact(self, engine: Engine) -> LawComparison:
        """Compare an engine's gradient and loss of packed rows with the exact ones.

        The loss is held to the gradient's bound, because the naive path's loss, a single number, may be
        exact by chance.
        """
        gradient, loss = _gradient_and_loss(engine, self.packed_window)
        exact_gradient, exact_loss = _exact_gradient_and_loss()
        if self.precision_name == "fp64":
            comparison = equal_in_float64(gradient, exact_gradient)
        else:
            comparison = error_within(gradient, self.naive_gradient, exact_gradient)
        return _with_loss(comparison, loss, exact_loss)

    def compiled(self) -> LawComparison:
        """Compare the gradient and loss of a compiled step with the exact ones."""
        return self.compare_with_exact(self.captured(self.engine()))

    def accumulated(self) -> LawComparison:
        """Compare micro-batches of one row with one large batch; in bf16, with exact values.

        The law has no bound in bf16, since each micro-batch rounds its gradient.
        """
        engine = self.engine(micro_batch=1)
        if self.precision_name == "bf16":
            return self.compare_with_exact(engine)
        gradient, loss = _gradient_and_loss(engine, self.packed_window)
        large_batch_gradient, large_batch_loss = _gradient_and_loss(
            self.engine(), self.packed_window
        )
        comparison = accumulated_is_large_batch(gradient, large_batch_gradient)
        return _with_loss(comparison, loss, large_batch_loss)

    def packed(self) -> LawComparison:
        """Compare the gradient and loss of packed rows with those of documents alone."""
        return self.compare_with_exact(self.engine())

    def replayed(self) -> LawComparison:
        """Compare a step whose recorded kernels are replayed with one whose kernels are launched."""
        replayed = self.engine()
        called = self.engine()
        notes = list[str]()
        called.step.recorder = None  # without a recorder nothing is replayed
        replayed.step.announce = notes.append  # gets the reason if nothing can be replayed
        # The steps are compiled inside the block as well, because the compiler chooses code by this setting.
        with _deterministic_sums():
            found = _compare_bits(
                self.captured(replayed), self.captured(called), self.packed_window
            )
        if not is_replayed(replayed.step):
            return found._replace(why="; ".join(["nothing is replayed", *notes]))
        return found

    def recomputed(self) -> LawComparison:
        """Compare a step that recomputes its blocks with one that stores all activations."""
        with _deterministic_sums():
            recomputing = self.engine(remat=Remat.Full())
            return _compare_bits(recomputing, self.engine(), self.packed_window)

    def streamed(self) -> LawComparison:
        """Compare an engine that streams weights from the host with one that has them on the device."""
        placement = Placement(self.device)
        model = copy.deepcopy(self.model).cpu()
        with _deterministic_sums():
            streamed = Streamed(
                model, optim=AdamW(lr=0.01), precision=self.precision, placement=placement
            )
            return _compare_bits(streamed, self.engine(), self.packed_window)

    def member(self) -> LawComparison:
        """Compare the second of an ensemble's two members with the same model trained alone."""
        members = [Llama(SHAPE, seed).to(self.device, torch.float64) for seed in range(2)]
        alone = self.engine(copy.deepcopy(members[1]), clip=0.5)
        ensemble = Ensemble(members, optim=AdamW(lr=0.01), clip=0.5)
        windows = [self.packed_window] * 2
        updates = [*train(ensemble, windows)]
        member_outcome = outcome(ensemble.member_state(1), updates, member=1)
        updates_alone = [*train(alone, windows)]
        return member_is_alone(member_outcome, outcome(alone.state(), updates_alone))

    def fused(self) -> LawComparison:
        """Compare the gradient and loss of a model with fused projections with the exact ones.

        Fused projections are computed as one product, such as those to queries, keys and values.
        """
        engine = self.engine()
        fusion = fuse_siblings(engine.model, self.packed_window["tokens"].to(self.device))
        if not fusion.families:
            return LawComparison(error=0, bound=0, why=str(fusion))
        return self.compare_with_exact(engine)

    @torch.no_grad()
    def sampled(self) -> LawComparison:
        """Count the tokens that filters keep or remove wrongly, and the draws of tokens that they removed.

        How often each token is drawn is left to the tests, which need tens of thousands of draws.
        """
        options = Sampling(0.8, top_k=40, top_p=0.9, min_p=0.02)
        random = torch.Generator().manual_seed(1)
        chain = chain_of([options])
        distinct_logits = 2.5 * torch.randn(DRAWS, SHAPE.vocab_size, generator=random)
        # For each row, the tokens that may be drawn according to the reference.
        supports = [support_of(logits_V, options) for logits_V in distinct_logits]
        # Each row of logits is repeated DRAWS times, and each repetition has another seed.
        logits_BV = distinct_logits.to(self.device).repeat(DRAWS, 1)
        row_B = torch.arange(len(logits_BV), device=self.device)
        # The sampler gets its options as a chain of stages and, for each row, the numbers that the
        # stages read, which are called knobs.
        knobs = new_knobs(chain, len(row_B), self.device)
        write_rows(knobs, range(len(row_B)), [knobs_of(options, chain)] * len(row_B))
        rows = SamplerRows(
            seed_B=row_B,
            position_B=torch.full_like(row_B, PROMPT_TOKENS),
            generated_B=torch.zeros_like(row_B),
            knobs=knobs,
        )
        candidates = apply_filters(logits_BV, rows, chain, truncation="window")
        assert candidates.ids_BN is not None
        # Removed tokens have the score -inf, or are not among the candidates.
        kept_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(
            -1, candidates.ids_BN, candidates.scores_BN > -torch.inf
        )
        wrong = sum(map(wrong_tokens, kept_BV.cpu(), supports * DRAWS))
        token_B = sample(logits_BV, rows, allowed_BV=None, chain=chain).token_B
        is_kept_B = kept_BV[row_B, token_B]
        drawn_though_removed = int((~is_kept_B).sum())
        return LawComparison(error=wrong + drawn_though_removed, bound=0)

    @torch.no_grad()
    def cached(self) -> LawComparison:
        """Compare the logits of a prompt that is read in parts with those of one forward pass.

        The first part has NEW_TOKENS tokens, and every other part has one.
        """
        model = self.model.train(False)
        ids_BT = self.unpacked_window["tokens"][:2, :PROMPT_TOKENS].to(self.device)
        cache = KVCache.allocate(
            SHAPE, rows=2, slots=PROMPT_TOKENS, dtype=torch.float64, device=self.device
        )
        positions_BT = torch.arange(PROMPT_TOKENS, device=self.device).expand(2, -1)
        parts = [
            slice(0, NEW_TOKENS),
            *(slice(begin, begin + 1) for begin in range(NEW_TOKENS, PROMPT_TOKENS)),
        ]
        hidden_of_parts = [
            model(ids_BT[:, part], positions=positions_BT[:, part], cache=cache) for part in parts
        ]
        found = model.logits(torch.cat(hidden_of_parts, 1))
        return cached_is_full(found, model.logits(model(ids_BT)))

    def generated(self) -> LawComparison:
        """Write the likeliest tokens by compiled decode steps, and count those that full forward passes
        would not write.
        """
        generated = self._generate(self._generator(GREEDY, "compiled"), GREEDY)
        expected = greedy_ids(self.model, self._prompt.tolist(), NEW_TOKENS)
        return LawComparison(
            error=differing_draws([token for token, _ in generated], expected), bound=0
        )

    def resumed(self) -> LawComparison:
        """Compare an engine with another one that loads its checkpoint.

        The tests go further: they kill whole runs, resume them from their files and compare the results.
        """
        uninterrupted = self.engine()
        resumed = self.engine()
        # A checkpoint also has the state of the data, which is an empty dict here.
        no_data = SimpleNamespace(state=dict)
        with _deterministic_sums(), temporary_folder() as folder:
            list(train(uninterrupted, [self.packed_window] * 2))
            save_checkpoint(uninterrupted, no_data, folder)
            load_checkpoint(resumed, folder)
            return _compare_bits(resumed, uninterrupted, self.packed_window)

    def scored(self) -> LawComparison:
        """Compare log-probabilities of sampled tokens with those that a training pass computes.

        Here they agree up to rounding. In training with rewards they agree in every bit, because rows are
        padded there to sizes for which products round alike. The tests compare those bits.
        """
        sampled = self._generate(self._generator(DRAW), DRAW)
        tokens, log_probabilities = zip(*sampled, strict=True)
        ids = torch.cat([self._prompt, torch.tensor(tokens, device=self.device)])
        model = self.model.train()
        # The hidden states from which the tokens after the prompt are predicted.
        hidden = model(ids[None])[0, PROMPT_TOKENS - 1 : -1]
        scored = token_log_probabilities(
            hidden, model.lm_head.weight, ids[PROMPT_TOKENS:], cap=cap_of(model.lm_head)
        )
        return log_probabilities_agree(scored.detach(), torch.tensor(log_probabilities))

    def adapted(self) -> LawComparison:
        """Train adapters, turn them off, and compare hidden states with those of the base model.

        Losses of preferences use a model with its adapters off as their reference model. The tests also
        compare the first of these losses.
        """
        model = copy.deepcopy(self.model)
        window = {name: rows.to(self.device) for name, rows in self.packed_window.items()}
        layers = adapt(model, Lora(rank=4)).values()
        list(train(self.engine(model), [self.packed_window] * 2))
        trained = all(layer.lora_B.weight.any() for layer in layers)
        inputs = {"segments": window["segments"], "positions": window["positions"]}
        with torch.no_grad():
            for layer in layers:
                layer.lora_B.weight.zero_()  # then the adapter adds nothing
            found = model(window["tokens"], **inputs)
            expected = self.model(window["tokens"], **inputs)
        why = "" if trained else "the adapters learned nothing"
        return LawComparison(
            error=len(differing({"hidden": found}, {"hidden": expected})), bound=0, why=why
        )

    def stale(self) -> LawComparison:
        """Count the tokens in which a generator that was used before an update differs from a new one.

        A token also counts if only its log-probability differs.
        """
        model = copy.deepcopy(self.model)
        used = self._generator(DRAW, model=model)
        engine = self.engine(model)
        before = self._generate(used, DRAW)
        list(train(engine, [self.packed_window]))
        used.forget()  # the keys and values of the old weights
        after = self._generate(used, DRAW)
        expected = self._generate(self._generator(DRAW, model=model), DRAW)
        why = "" if after != before else "the update changed nothing"
        return LawComparison(error=differing_draws(after, expected), bound=0, why=why)

    @property
    def _prompt(self) -> Tensor:
        return self.unpacked_window["tokens"][0, :PROMPT_TOKENS].to(self.device)

    def _generator(
        self, sampling: Sampling, mode: Mode = "eager", model: Llama | None = None
    ) -> Generator:
        """Return a generator of one row, by default of the small model."""
        chain = chain_of([sampling])
        slots = PROMPT_TOKENS + NEW_TOKENS
        return Generator(
            model or self.model, chain, rows=1, slots=slots, vocabulary=SHAPE.vocab_size, mode=mode
        )

    def _generate(self, generator: Generator, sampling: Sampling) -> list[tuple[int, float]]:
        """Return the generated tokens after the prompt, with their log-probabilities."""
        generator.submit(Request(tuple(self._prompt.tolist()), sampling, NEW_TOKENS))
        return [
            (token, logprob.drawn)
            for event in generator.run()
            for token, logprob in zip(event.token_ids, event.logprobs, strict=True)
        ]


@functools.cache
def _exact_gradient_and_loss() -> tuple[Tensor, Tensor]:
    """Return the gradient and loss of each document alone, in float64 on the CPU."""
    _, alone = _windows()
    return _gradient_and_loss(Resident(Llama(SHAPE).double(), optim=AdamW()), alone)


def _windows() -> tuple[Batch, Batch]:
    """Return a window of documents packed into rows, and one of each document in its own row."""
    draw = torch.Generator().manual_seed(0)
    # A document has one token more than it has inputs, because a target is the token after its input.
    documents_of_rows = [
        [torch.randint(SHAPE.vocab_size, (size + 1,), generator=draw) for size in sizes]
        for sizes in DOCUMENT_SIZES
    ]
    documents = [document for row in documents_of_rows for document in row]
    packed = _window(documents_of_rows)
    alone = _window([[document] for document in documents])
    # A row with one document needs no segments and positions.
    return packed, {"tokens": alone["tokens"], "targets": alone["targets"]}


def _window(documents_of_rows: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return a window with these documents in its rows, one after another."""
    shape = len(documents_of_rows), ROW_TOKENS
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
        [p.grad.cpu().flatten() for p in engine.model.parameters() if p.grad is not None]
    )
    engine.step.discard()
    total, count = engine.evaluate(window)
    return gradient, (total / count).cpu()


def _with_loss(comparison: LawComparison, loss: Tensor, exact_loss: Tensor) -> LawComparison:
    """Return a comparison of gradients whose error is the larger one of the gradient's and the loss's."""
    return comparison._replace(error=max(comparison.error, relative_error(loss, exact_loss)))


def _compare_bits(one: Engine, other: Engine, window: Batch) -> LawComparison:
    """Train two engines for three updates, and count the results that differ in a bit."""
    windows = [window] * 3
    updates_of_one = [*train(one, windows)]
    updates_of_other = [*train(other, windows)]
    found = outcome(one.state(), updates_of_one)
    expected = outcome(other.state(), updates_of_other)
    return LawComparison(error=len(differing(found, expected)), bound=0)


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
