"""Predict a training step's peak memory by origin, by tracing its own code at two depths before the
run.

The traced models have two and three blocks. The difference of the traces is what a block adds at
each moment, so a model of any depth takes the same few seconds to predict. Where kinds of blocks
take turns, one turn is what a block is elsewhere. Nothing is computed and no device is needed.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.graph.capture import capture_by
from monograph.graph.compilable import Scope
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.remat import named
from monograph.graph.token_rows import rows_of
from monograph.loss import Batch, Loss, TokenLoss, hidden_of
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import QUERIES
from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy, token_log_probabilities
from monograph.optim import Optimizer
from monograph.predict.fake_memory import ORIGINS, FakeMemory, Graphs, Sample
from monograph.step import Clip, OnDevice, Step, accumulate, update

Compile = Scope | Literal["none"]
Judged = Literal["", "rows", "exact"]
UPDATE_BYTES = 32
# With remat "offload", the inputs of this many blocks are on the device, all others on the host.
ON_THEIR_WAY = 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, whatever its shape and the device.

    Attributes:
        rows: rows of a micro-batch.
        length: tokens of a row.
        optim: the optimizer.
        precision: the compute precision, as in the settings: "fp32", "bf16", "fp16" or "fp8".
        compile: what one graph holds: the "whole" step; each of the "blocks", the loss and the
            update; or "none".
        remat: which activations the backward pass recomputes, as in the settings: "none",
            "pointwise", a share, "full", "offload".
        window_rows: rows of an update, all of whose tokens are on the device at once.
        packed: whether rows hold several documents.
        clip: the largest gradient norm; None for no bound.
        lora: the adapters that are trained next to the frozen model; None if the model itself is
            trained.
        judged: how answers are judged, whose log-probabilities the loss needs: "" on text; "exact"
            if each is scored in the bits in which it is drawn, by the cache's attention in a row of
            its own; "rows" otherwise.
    """

    rows: int
    length: int
    optim: Optimizer
    precision: str = "fp32"
    compile: Compile = "whole"
    remat: str | float = "none"
    window_rows: int = 0
    packed: bool = True
    clip: float | Clip | None = 1.0
    lora: Lora | None = None
    judged: Judged = ""

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of an update."""
        return self.window_rows * self.length

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of an update."""
        return -(-self.window_rows // self.rows)

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number of the compute dtype."""
        return 4 if self.precision == "fp32" else 2

    def of(self, config: LlamaConfig, device_type: str) -> "Work":
        """Return the work of training a model of this shape so, on a device of this type."""
        known = {each.name: getattr(self, each.name) for each in fields(Training)}
        return Work(config, device_type=device_type, **known)


@dataclass(frozen=True)
class Work(Training):
    """A training step: everything that its memory and its time depend on, apart from the device's
    speed.

    Attributes:
        config: the model's shape.
        device_type: "cpu" or "cuda".
    """

    config: LlamaConfig
    device_type: str = field(default="cpu", kw_only=True)

    @property
    def fused(self) -> bool:
        """Return whether products add gradients, as `monograph.step.on_device.fuses` decides for
        the engine.
        """
        # The losses of answers that are judged read gradients of their own.
        computes_narrow = self.device_type == "cuda" and self.precision in ("bf16", "fp16")
        return computes_narrow and not self.judged

    @property
    def inner_numbers(self) -> int:
        """Return the width of a token's feed-forward layer; of a mixture, the sum over the experts
        that compute it.
        """
        config = self.config
        return (
            self._experts * getattr(config, config.family.experts)
            if self._experts
            else config.intermediate_size
        )

    @property
    def routed_numbers(self) -> int:
        """Return the numbers per token that a mixture keeps beside its experts' inner ones.

        They are the inputs and the outputs of the pairs of a token and an expert, and the router's
        probabilities.
        """
        return (
            2 * self._experts * self.config.hidden_size
            + self.config.num_experts * 4 // self.number_bytes
        )

    @property
    def _experts(self) -> int:
        """Return how many experts compute a token; 0 without a mixture."""
        config = self.config
        return (
            config.num_experts_per_tok
            if any(map(config.is_mixture, range(config.num_hidden_layers)))
            else 0
        )

    @property
    def masked(self) -> bool:
        """Return whether attention reads dense masks, as for all borders but those in a CUDA
        graph's flex attention.
        """
        config = self.config
        layers = range(self.config.num_hidden_layers)
        bordered = self.packed or any(
            (config.window(layer) or self.length) < self.length for layer in layers
        )
        return bordered and (self.device_type == "cpu" or self.compile == "none")

    @property
    def repeats_heads(self) -> bool:
        """Return whether attention needs as many key-value heads as query heads: on CUDA, with a
        dense mask or in fp32.

        A T4's kernel for fp16 does, too, which is not known here.
        """
        return self.device_type == "cuda" and (
            self.masked or (self.precision == "fp32" and not self.packed)
        )

    @property
    def input_bytes(self) -> int:
        """Return the bytes of one block's input for a micro-batch."""
        return self.tokens * self.config.hidden_size * self.number_bytes


class Footprint(NamedTuple):
    """The bytes alive at a step's peak.

    Attributes:
        stage: the stage in which the peak lies: "forward", "backward" or "update".
        by_origin: bytes for each of ORIGINS: weights, gradients, moments, activations, loss head,
            workspace.
    """

    stage: str
    by_origin: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Return the sum over origins."""
        return sum(self.by_origin.values())


class Curve(NamedTuple):
    """The samples of a part of a step, and the stage that this part belongs to."""

    stage: str
    samples: list[Sample]


@functools.lru_cache(maxsize=64)  # plans for several cards or hosts ask for the same work
def footprint(work: Work) -> Footprint:
    """Return the peak of one update, with the gradients of earlier micro-batches on the device."""
    apart = _apart(work)
    curves = (
        _without_inputs(_deep(replace(apart, remat="full")), apart)
        if work.remat == "offload"
        else _deep(apart)
    )
    peak = footprint_of(curves)
    before, after = work.config, apart.config
    # These origins grow with the vocabulary; gradients and moments of adapters do not.
    of_model = ORIGINS[:1] if work.lora else ORIGINS[:3]
    ratios = dict.fromkeys(of_model, before.parameter_count() / after.parameter_count())
    ratios["loss head"] = before.vocab_size / after.vocab_size
    return Footprint(
        peak.stage,
        {name: round(size * ratios.get(name, 1)) for name, size in peak.by_origin.items()},
    )


def _apart(work: Work) -> Work:
    """Return the work with a vocabulary whose size no other axis has, so that the trace recognises
    the loss head by it.

    The vocabulary may get a few more entries than it has; `footprint` takes their bytes off again.
    """
    config, tokens = work.config, work.tokens
    heads = config.num_attention_heads, config.num_key_value_heads
    taken = {
        config.hidden_size,
        config.intermediate_size,
        config.moe_intermediate_size,
        config.head_dim,
        *heads,
    }
    taken |= {config.num_experts, tokens * config.num_experts_per_tok}
    taken |= {number * config.head_dim for number in heads}
    taken |= {
        work.length,
        tokens,
        work.window_rows * work.length,
        *range(QUERIES, work.length, QUERIES),
    }
    vocabulary = config.vocab_size
    while True:
        chunks = chunk_count(tokens, vocabulary, work.device_type)
        if vocabulary not in taken | {tokens // chunks, -(-tokens // chunks)}:
            return replace(work, config=replace(config, vocab_size=vocabulary))
        vocabulary += 1


def _deep(work: Work) -> list[Curve]:
    """Return the step's samples at its full depth.

    If the traces at two depths do not line up, the model is traced at its full depth.
    """
    layers = work.config.num_hidden_layers
    turn = turn_of(work.config)
    least = 2 if turn == 1 else turn + layers % turn
    depths = least, least + turn
    if layers <= depths[1]:
        return _curves(work)
    graphs = Graphs()
    cut = [replace(work, config=work.config.shortened(depth)) for depth in depths]
    if work.compile == "blocks":  # its graphs serve a second trace, too, if this does not suffice
        low, high = (_curves(shallow, graphs, updated=False) for shallow in cut)
        curves = _at_depth(low, high, (layers - least) // turn)
        if curves and not _may_peak_in_update(curves, work):
            return curves
    low, high = (_curves(shallow, graphs) for shallow in cut)
    return _at_depth(low, high, (layers - least) // turn) or _curves(work)


def _at_depth(low: list[Curve], high: list[Curve], beyond: int) -> list[Curve]:
    """Return the curves of a model with `beyond` more turns of blocks than `low`; none if they do
    not line up.
    """
    curves = []
    for one, other in zip(low, high, strict=True):
        of_low, of_high = (
            corners(each.samples) if each.stage == "update" else each.samples
            for each in (one, other)
        )
        if (samples := deepened(of_low, of_high, beyond)) is None:
            return []
        curves.append(Curve(one.stage, samples))
    return curves


def _may_peak_in_update(curves: list[Curve], work: Work) -> bool:
    """Return whether the optimizer's update might need more than the passes before it, whose curves
    these are.

    Its temporary values are fewer than UPDATE_BYTES for each trained number. The trace of an update
    takes as long as the rest, and most peaks are far above what it needs.
    """
    # Weights, gradients and moments.
    kept = sum(curves[-1].samples[-1][: ORIGINS.index("activations")])
    gradients = curves[-1].samples[-1][ORIGINS.index("gradients")]  # of 4 bytes each, or of 2
    peak = footprint_of(curves).peak_bytes
    return peak <= kept + UPDATE_BYTES // work.number_bytes * gradients


def turn_of(config: LlamaConfig) -> int:
    """Return after how many blocks the kinds of blocks, by their parts, come again in the same
    order.
    """
    kinds = [
        (config.is_linear(layer), config.is_mixture(layer))
        for layer in range(config.num_hidden_layers)
    ]
    return next(turn for turn in itertools.count(1) if kinds[turn:] == kinds[:-turn])


def _without_inputs(curves: list[Curve], work: Work) -> list[Curve]:
    """Subtract the blocks' inputs that wait on the host from the activations; those on their way
    stay.
    """
    away = max(0, work.config.num_hidden_layers - ON_THEIR_WAY) * work.input_bytes
    place = ORIGINS.index("activations")

    def less(sample: Sample) -> Sample:
        return (*sample[:place], max(0, sample[place] - away), *sample[place + 1 :])

    return [
        Curve(stage, samples if stage == "update" else [*map(less, samples)])
        for stage, samples in curves
    ]


def footprint_of(curves: list[Curve]) -> Footprint:
    """Return the largest of a step's samples."""
    peaks = [(sample, curve.stage) for curve in curves for sample in curve.samples]
    sample, stage = max(peaks, key=lambda peak: sum(peak[0]))
    return Footprint(stage, dict(zip(ORIGINS, sample, strict=True)))


def deepened(low: list[Sample], high: list[Sample], beyond: int) -> list[Sample] | None:
    """Extend the samples `low` to a model with `beyond` more blocks; `high` are those of a model
    with one block more.

    The difference between two corresponding samples is what each further block adds. Curves of the
    same length correspond sample by sample. Otherwise `high` has the samples of one more block
    somewhere in the middle: the curves correspond from their beginnings up to there, and from their
    ends back to there.

    Returns:
        The samples; None if the two correspondences together do not cover `low`.
    """
    if len(low) == len(high):
        return _along(low, high, beyond)
    ahead = _alike(low, high)
    back = _alike(low[::-1], high[::-1])
    if ahead + back < len(low):
        return None
    return _along(low[:ahead], high, beyond) + _along(low[::-1][:back], high[::-1], beyond)


def corners(samples: list[Sample]) -> list[Sample]:
    """Return the samples except those inside a run of equal steps, whose values lie between the
    run's ends.

    An update computes a number for each part of each plane, at several points: such runs are as
    long as the model is deep. Without them, models of all depths have equally many samples.
    """
    steps = [
        tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(samples)
    ]
    turns = [True, *(before != after for before, after in itertools.pairwise(steps)), True]
    return [*itertools.compress(samples, turns)]


def _alike(one: list[Sample], other: list[Sample]) -> int:
    """Count the samples up to which two curves differ from their own first samples by the same
    bytes.
    """
    pairs = zip(one, other, strict=False)
    same = (
        all(a - b == c - d for a, b, c, d in zip(x, one[0], y, other[0], strict=True))
        for x, y in pairs
    )
    return sum(1 for _ in itertools.takewhile(bool, same))


def _along(low: list[Sample], high: list[Sample], beyond: int) -> list[Sample]:
    return [
        tuple(a + beyond * (b - a) for a, b in zip(*pair, strict=True))
        for pair in zip(low, high, strict=False)
    ]


def _curves(work: Work, graphs: Graphs | None = None, *, updated: bool = True) -> list[Curve]:
    """Return the samples of a step, without its update's if that is not `updated`."""
    with FakeMemory(work.config.vocab_size, work.device_type, graphs) as memory:
        model = Llama(work.config)
        # Fused attention without a mask stands in for flex attention.
        if work.device_type == "cuda":
            model.use_attention("sdpa", "repeated" if work.repeats_heads else "torch", "cuda")
        if work.judged == "exact":
            model.use_attention("cached")
        loss = _judged_loss(work.device_type) if work.judged else _token_loss(work.device_type)
        if work.lora:
            install_adapters(model, work.lora, precision=Precision(work.precision))
        step = Step(
            model,
            optim=work.optim,
            clip=work.clip,
            precision=Precision(work.precision),
            remat=named(work.remat),
            loss=loss,
            parameters=OnDevice(fused=work.fused),
        )
        for plane in step.planes:
            memory.assign("gradients", [plane.grad])
            memory.assign("moments", plane.state.values())
        memory.origin = "activations"
        names = (
            "tokens",
            "targets",
            *(("segments", "positions") if work.packed and work.masked else ()),
        )
        window = {
            name: torch.zeros(max(work.rows, work.window_rows), work.length, dtype=torch.int64)
            for name in names
        }
        batch = {name: rows[: work.rows] for name, rows in window.items()}
        if work.compile != "none":
            capture_by(memory.captured, step, work.compile)
        with compat.without_modes():
            step.choose_kept(batch)
        begins = [("forward", len(memory.curve))]
        forward = step.forward.function

        def watched(batch: object, loss_factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            result = forward(batch, loss_factor)
            begins.append(("backward", len(memory.curve)))
            memory.origin = "workspace"
            return result

        step.forward.function = watched
        accumulate(step, [batch])
        if updated:
            begins.append(("update", len(memory.curve)))
            update(step)
        if work.compile == "whole":  # what follows a graph has its own samples for each block
            begins = [*zip(("forward", "backward"), memory.walked, strict=False), *begins]
            begins.sort(key=lambda begin: begin[1])
        pairs = itertools.pairwise([*begins, ("", len(memory.curve))])
        return [Curve(stage, memory.curve[begin:end]) for (stage, begin), (_, end) in pairs]


@functools.cache
def _judged_loss(device_type: str) -> Loss:
    """Return a loss with the memory of those that read each token's log-probability, in as many
    chunks as on the planned device.

    Unlike `TokenLoss` it has no `head`, which a step that is captured block by block would compile.
    """

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden_ND, head = hidden_of(model, batch)
        targets_N = batch["targets"].flatten()
        chunks = chunk_count(len(targets_N), len(head.weight), device_type)
        logs_N = token_log_probabilities(
            hidden_ND, head.weight, targets_N, rows=rows_of(head), chunks=chunks
        )
        return -logs_N.sum(), (targets_N >= 0).sum()

    return loss


def _token_loss(device_type: str) -> TokenLoss:
    loss = TokenLoss()
    loss.head = _head(device_type)
    return loss


@functools.cache  # one function for each device, so that traces of several depths share its graphs
def _head(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `linear_cross_entropy` in as many chunks as on the planned device, wherever the trace
    runs.
    """
    return functools.partial(linear_cross_entropy, device_type=device_type)
