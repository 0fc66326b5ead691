"""Predict a training step's peak memory by origin, by tracing its own code at two depths before the
run.

The traced models have two and three blocks. The difference of the traces is what a block adds at
each moment, so a model of any depth takes the same few seconds to predict. In some models the kinds
of blocks alternate, such as attention and gated delta nets. There a period, which is the shortest
sequence of kinds that repeats, takes the place of a block. Nothing is computed and no device is needed.

A curve is a list of samples, one after each operation; a sample has the bytes alive of each origin
(`predict.fake_memory`). Shape suffixes: N = tokens of a micro-batch, D = hidden size.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.ensemble import Ensemble
from monograph.graph.capture import capture_with
from monograph.graph.compilable import Scope
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.graph.token_rows import trained_rows
from monograph.loss import Batch, Loss, MtpLoss, TokenLoss, hidden_of
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.feed_forward import FeedForward
from monograph.model.gguf import block_formats
from monograph.model.llama import (
    BlockKind,
    Llama,
    feed_forward_of,
    feed_forward_of_family,
    kind_of_block,
)
from monograph.ops.attention import BLOCK_QUERIES
from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy, token_log_probabilities
from monograph.ops.logit_cap import cap_of
from monograph.optim import Optimizer
from monograph.predict.fake_members import members_like
from monograph.predict.fake_memory import ORIGINS, FakeMemory, Graphs, MemorySample
from monograph.step import Clip, OnDevice, Step, accumulate, update
from monograph.step.on_device import fuses_gradients

Compile = Scope | Literal["none"]
AnswerScoring = Literal["", "rows", "exact"]  # see `Training.answer_scoring`
# An update's temporary values take fewer bytes than this for each trained parameter.
MAX_UPDATE_BYTES = 32
# With remat "offload", the inputs of this many blocks are on the device, all others on the host.
INPUTS_ON_DEVICE = 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, apart from its shape and the device.

    Attributes:
        rows: rows of a micro-batch.
        length: tokens of a row.
        optim: the optimizer.
        precision: the compute precision, as in the settings: "fp32", "bf16",
            "fp16", "fp8" or "fp8_head".
        compile: what one graph holds: the "whole" step; each of the "blocks", the loss and the
            update; or "none".
        remat: which activations the backward pass recomputes, as in the settings. "none": none.
            "pointwise": all but the results of matrix products. A number from 0 to 1: all but this
            share of the activations. "full": each block, from its input. "offload": the same, with
            the inputs kept on the host.
        window_rows: rows of an update, all of whose tokens are on the device at once.
        packed: whether rows hold several documents.
        clip: the largest gradient norm; None: norms are not clipped.
        lora: the adapters that are trained next to the frozen model; None: the model itself is
            trained.
        answer_scoring: how the loss gets the log-probabilities of answers. "": there are no answers,
            because the model learns from text. "exact": each answer is in its own row, and attention
            is computed as in sampling, so that log-probabilities have the same bits. "rows": by the
            usual attention.
        quantize: to which integers weights are rounded after each update, as in the settings: "none",
            "int4" or "int8".
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
    answer_scoring: AnswerScoring = ""
    quantize: str = "none"

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
        return math.ceil(self.window_rows / self.rows)

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number of the compute dtype."""
        return 4 if self.precision == "fp32" else 2

    def of(self, config: LlamaConfig, device_type: str) -> "Work":
        """Return the work of training a model of this shape on a device of this type."""
        training = {option.name: getattr(self, option.name) for option in fields(Training)}
        return Work(config, device_type=device_type, **training)


@dataclass(frozen=True)
class Work(Training):
    """A training step: everything that its memory and its time depend on, apart from the device's
    speed.

    Attributes:
        config: the model's shape.
        device_type: "cpu" or "cuda".
        members: for an ensemble, the adapters of each member; an entry is None if all of that member
            is trained. Empty: one model trains alone. `lora` has the largest rank of the members.
        own_rows: whether each member has its own rows.
    """

    config: LlamaConfig
    device_type: str = field(default="cpu", kw_only=True)
    members: tuple[Lora | None, ...] = field(default=(), kw_only=True)
    own_rows: bool = field(default=False, kw_only=True)

    def of_members(
        self, adapters: Sequence[Lora | None], *, own_rows: bool, compiled: bool | None = None
    ) -> "Work":
        """Return the work of training an ensemble with one member for each entry of `adapters`.

        Args:
            adapters: the adapters of each member; None: all of a member is trained.
            own_rows: whether each member has its own rows.
            compiled: whether the step is captured; None: as it is for one model.
        """
        if compiled is None:
            compiled = self.compile != "none"
        lora = self.lora
        if lora:
            # All adapters are counted with the largest rank.
            ranks = [member_lora.rank for member_lora in adapters if member_lora]
            lora = replace(lora, rank=max(ranks))
        return replace(
            self,
            lora=lora,
            # An ensemble is captured as a whole, and recomputes nothing.
            compile="whole" if compiled else "none",
            remat="none",
            members=tuple(adapters),
            own_rows=own_rows,
        )

    @property
    def fused(self) -> bool:
        """Return whether matrix products add gradients to the planes, as an engine decides it."""
        return fuses_gradients(Llama, self.loss, self.precision, self.device_type == "cuda")

    @property
    def loss(self) -> Loss:
        """Return the loss to trace, which has the same memory as the run's own loss."""
        if self.answer_scoring:
            return _answer_loss(self.device_type)
        if self.config.mtp_num_hidden_layers:
            loss = MtpLoss()
            loss.head = _cross_entropy_head(self.device_type)
            return loss
        return token_loss_on(self.device_type)

    @property
    def inner_numbers(self) -> int:
        """Return how many inner channels of a feed-forward layer compute a token."""
        return self._feed_forward.inner_numbers(self.config)

    @property
    def routed_numbers(self) -> int:
        """Return the numbers per token that a feed-forward layer keeps besides `inner_numbers`."""
        return self._feed_forward.routed_numbers(self.config, self.number_bytes)

    @property
    def _feed_forward(self) -> type[FeedForward]:
        """Return the class of the feed-forward layers. If the layers have several classes, this is
        that of the family.
        """
        layers = range(self.config.num_hidden_layers)
        layer_classes = {feed_forward_of(self.config, layer) for layer in layers}
        family_class = feed_forward_of_family(self.config)
        return family_class if family_class in layer_classes else layer_classes.pop()

    @property
    def masked(self) -> bool:
        """Return whether attention reads dense masks.

        Packed documents and attention windows need a mask. In captured code on CUDA, flex attention
        needs none.
        """
        config = self.config
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        has_window = any(window and window < self.length for window in windows)
        has_flex_attention = self.device_type != "cpu" and self.compile != "none"
        return (self.packed or has_window) and not has_flex_attention

    @property
    def repeats_heads(self) -> bool:
        """Return whether keys and values are repeated, because attention needs as many key-value
        heads as query heads: on CUDA, with a dense mask or in fp32.

        The kernel for fp16 on a T4 also needs them, but this class does not know the card.
        """
        if self.device_type != "cuda":
            return False
        return self.masked or (self.precision == "fp32" and not self.packed)

    @property
    def input_bytes(self) -> int:
        """Return the bytes of one block's input for a micro-batch."""
        return self.tokens * self.config.hidden_size * self.number_bytes


class Footprint(NamedTuple):
    """The bytes alive at a step's peak.

    Attributes:
        stage: the stage of the step that has the peak: "forward", "backward" or "update".
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
    """The samples of a part of a step.

    Attributes:
        stage: "forward", "backward" or "update".
        samples: the bytes alive, in the order of the operations.
    """

    stage: str
    samples: list[MemorySample]


@functools.lru_cache(maxsize=64)  # plans for several cards or hosts ask for the same work
def footprint(work: Work) -> Footprint:
    """Return the peak of one update, with the gradients of earlier micro-batches on the device."""
    traced = _with_distinct_vocabulary(work)
    if work.remat == "offload":
        # "offload" differs from "full" only in the blocks' inputs, which "full" keeps on the device. So
        # "full" is traced, and the inputs are subtracted.
        curves = _without_offloaded(_full_depth_curves(replace(traced, remat="full")), traced)
    else:
        curves = _full_depth_curves(traced)
    peak = footprint_of(curves)
    # The traced vocabulary may be larger, so bytes that grow with the vocabulary are scaled back.
    # Gradients and moments of adapters do not grow with it.
    parameter_ratio = work.config.parameter_count() / traced.config.parameter_count()
    growing_origins = ["weights"] if work.lora else ["weights", "gradients", "moments"]
    ratios = dict.fromkeys(growing_origins, parameter_ratio)
    ratios["loss head"] = work.config.vocab_size / traced.config.vocab_size
    by_origin = {
        origin: round(size * ratios.get(origin, 1)) for origin, size in peak.by_origin.items()
    }
    return Footprint(peak.stage, by_origin)


def _with_distinct_vocabulary(work: Work) -> Work:
    """Return the work with a vocabulary whose size no other axis has.

    By this size, the trace recognises the loss head. The vocabulary may get a few more entries, whose
    bytes `footprint` takes off again.
    """
    config = work.config
    tokens = work.tokens
    heads = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_global_key_value_heads,
    )
    other_sizes = {
        config.hidden_size,
        config.intermediate_size,
        config.moe_intermediate_size,
        config.num_experts,
        tokens * config.num_experts_per_tok,
        config.head_dim,
        *heads,
        *(
            number * width
            for number in heads
            for width in (config.head_dim, config.global_head_dim)
        ),
        config.global_head_dim,
        work.length,
        tokens,
        work.window_rows * work.length,
        *range(BLOCK_QUERIES, work.length, BLOCK_QUERIES),  # the keys that a block of queries reads
    }
    # An axis of an ensemble may be the members' axis, or another one folded with it.
    members = len(work.members)
    other_sizes |= {members, *(members * size for size in other_sizes)}
    vocabulary = config.vocab_size
    while True:
        chunks = chunk_count(tokens, vocabulary, work.device_type)
        chunk_sizes = {tokens // chunks, -(-tokens // chunks)}  # rounded down, and up
        if vocabulary not in other_sizes | chunk_sizes:
            return replace(work, config=replace(config, vocab_size=vocabulary))
        vocabulary += 1


def _full_depth_curves(work: Work) -> list[Curve]:
    """Return the step's curves at its full depth, from traces at two depths.

    If the two traces do not line up, the model is traced at its full depth.
    """
    layers = work.config.num_hidden_layers
    period = layer_period(work.config)
    # Whole periods are added to the low depth, so it has the same remainder as the full depth.
    low_depth = 2 if period == 1 else period + layers % period
    high_depth = low_depth + period
    if layers <= high_depth:
        return _curves(work)
    further_periods = (layers - low_depth) // period
    graphs = Graphs()
    low_work = replace(work, config=work.config.shortened(low_depth))
    high_work = replace(work, config=work.config.shortened(high_depth))
    if work.compile == "blocks":
        # The first try is without the optimizer's update, whose trace takes as long as the rest. If
        # the update may be the peak, the traces below use the graphs of this try again.
        low = _curves(low_work, graphs, with_update=False)
        high = _curves(high_work, graphs, with_update=False)
        curves = _extend_curves(low, high, further_periods)
        if curves and not _may_peak_in_update(curves, work):
            return curves
    low = _curves(low_work, graphs)
    high = _curves(high_work, graphs)
    curves = _extend_curves(low, high, further_periods)
    if not curves:
        curves = _curves(work)
    return curves


def _extend_curves(low: list[Curve], high: list[Curve], further_periods: int) -> list[Curve]:
    """Return the curves of a deeper model; an empty list if the given curves do not line up.

    Args:
        low: the curves of a shallow model.
        high: the curves of a model with one more period of blocks.
        further_periods: how many more periods than the model of `low` the deeper model has.
    """
    curves = []
    for low_curve, high_curve in zip(low, high, strict=True):
        low_samples = low_curve.samples
        high_samples = high_curve.samples
        if low_curve.stage == "update":
            low_samples = corners(low_samples)
        if high_curve.stage == "update":
            high_samples = corners(high_samples)
        samples = extend_samples(low_samples, high_samples, further_periods)
        if samples is None:
            return []
        curves.append(Curve(low_curve.stage, samples))
    return curves


def _may_peak_in_update(curves: list[Curve], work: Work) -> bool:
    """Return whether the optimizer's update might need more memory than the passes before it.

    Most peaks are far above what an update needs, and its trace takes as long as the rest.

    Args:
        curves: the curves of the passes.
        work: the step.
    """
    end = dict(zip(ORIGINS, curves[-1].samples[-1], strict=True))
    kept = end["weights"] + end["gradients"] + end["moments"]
    peak = footprint_of(curves).peak_bytes
    # The gradient of a parameter has at least `number_bytes`, so this is at least MAX_UPDATE_BYTES for
    # each trained parameter.
    max_update_bytes = MAX_UPDATE_BYTES // work.number_bytes * end["gradients"]
    return peak <= kept + max_update_bytes


def layer_period(config: LlamaConfig) -> int:
    """Return the number of blocks after which the kinds of blocks repeat; 1 if all are of one kind."""
    kinds = [kind_of_block(config, layer) for layer in range(config.num_hidden_layers)]
    # With a period, all blocks from this index on repeat the kinds from the beginning. The number of
    # blocks always is one.
    return next(period for period in itertools.count(1) if kinds[period:] == kinds[:-period])


def kinds_of_block_stages(config: LlamaConfig, blocks_per_stage: int) -> list[int]:
    """Return a number for each stage of blocks, by which stages of the same kinds of blocks are known.

    The numbers begin with 0, and a kind that no earlier stage has gets the next number.

    Args:
        config: the model's shape.
        blocks_per_stage: the number of blocks in a stage.
    """
    kinds = [kind_of_block(config, layer) for layer in range(config.num_hidden_layers)]
    stages = [
        kinds[begin : begin + blocks_per_stage] for begin in range(0, len(kinds), blocks_per_stage)
    ]
    different: list[list[BlockKind]] = []
    for stage in stages:
        if stage not in different:
            different.append(stage)
    return [different.index(stage) for stage in stages]


def _without_offloaded(curves: list[Curve], work: Work) -> list[Curve]:
    """Return the curves without the blocks' inputs that are on the host.

    The inputs of INPUTS_ON_DEVICE blocks stay, which are in use or being copied.
    """
    on_host_bytes = max(0, work.config.num_hidden_layers - INPUTS_ON_DEVICE) * work.input_bytes
    position = ORIGINS.index("activations")

    def subtract(sample: MemorySample) -> MemorySample:
        activations = max(0, sample[position] - on_host_bytes)
        return (*sample[:position], activations, *sample[position + 1 :])

    reduced_curves = []
    for stage, samples in curves:
        # During the update no input is kept.
        if stage != "update":
            samples = [subtract(sample) for sample in samples]
        reduced_curves.append(Curve(stage, samples))
    return reduced_curves


def footprint_of(curves: list[Curve]) -> Footprint:
    """Return the largest of a step's samples, which is its peak."""
    samples = [(sample, curve.stage) for curve in curves for sample in curve.samples]
    peak, stage = max(samples, key=lambda sample_and_stage: sum(sample_and_stage[0]))
    return Footprint(stage, dict(zip(ORIGINS, peak, strict=True)))


def extend_samples(
    low: list[MemorySample], high: list[MemorySample], further_periods: int
) -> list[MemorySample] | None:
    """Extend the samples of a shallow model to a deeper one.

    The difference between two corresponding samples is what each further period of blocks adds. Lists
    of the same length correspond sample by sample. Otherwise `high` has the samples of one more
    period somewhere in the middle: the lists correspond from their beginnings up to there, and from
    their ends back to there.

    Args:
        low: the samples of a shallow model.
        high: the samples of a model with one more period of blocks.
        further_periods: how many more periods than the model of `low` the deeper model has.

    Returns:
        The samples; None if the two correspondences together do not cover `low`.
    """
    if len(low) == len(high):
        return _extrapolate(low, high, further_periods)
    backward_low = low[::-1]
    backward_high = high[::-1]
    from_beginning = _count_alike(low, high)
    from_end = _count_alike(backward_low, backward_high)
    if from_beginning + from_end < len(low):
        return None
    beginning = _extrapolate(low[:from_beginning], high, further_periods)
    # The end stays in backward order. Callers need no order: they look for the largest sample, or at
    # origins that do not change during a pass.
    return beginning + _extrapolate(backward_low[:from_end], backward_high, further_periods)


def corners(samples: list[MemorySample]) -> list[MemorySample]:
    """Return the samples at which the difference to the next sample changes, and the ends.

    The samples that are left out are on a straight line between two that stay. At several points, an
    update computes a number for each part of each plane. This gives lines that are as long as the
    model is deep. Without the samples inside them, models of all depths have equally many samples.
    """
    differences = [
        tuple(b - a for a, b in zip(before, after, strict=True))
        for before, after in itertools.pairwise(samples)
    ]
    is_corner = [before != after for before, after in itertools.pairwise(differences)]
    is_kept = [True, *is_corner, True]  # the two ends are kept
    return [*itertools.compress(samples, is_kept)]


def _count_alike(one: list[MemorySample], other: list[MemorySample]) -> int:
    """Count the samples up to which two curves differ from their own first samples by the same
    bytes.
    """
    count = 0
    for sample, other_sample in zip(one, other, strict=False):
        difference = [a - b for a, b in zip(sample, one[0], strict=True)]
        other_difference = [a - b for a, b in zip(other_sample, other[0], strict=True)]
        if difference != other_difference:
            break
        count += 1
    return count


def _extrapolate(
    low: list[MemorySample], high: list[MemorySample], further_periods: int
) -> list[MemorySample]:
    """Return the samples of a model that has `further_periods` more periods than the model of `low`.

    Samples of the longer list that have no counterpart in the other are left out.
    """
    return [
        tuple(a + further_periods * (b - a) for a, b in zip(low_sample, high_sample, strict=True))
        for low_sample, high_sample in zip(low, high, strict=False)
    ]


def _curves(work: Work, graphs: Graphs | None = None, *, with_update: bool = True) -> list[Curve]:
    """Trace a step and return its samples.

    Args:
        work: the step.
        graphs: the graphs of earlier traces, which are used again; None: new ones.
        with_update: whether the optimizer's update is traced, too.
    """
    with FakeMemory(work.config.vocab_size, work.device_type, graphs) as memory:
        model = Llama(work.config)
        # Flex attention is not traced. Fused attention without a mask takes its place.
        if work.device_type == "cuda":
            model.use_attention("sdpa", "repeated" if work.repeats_heads else "torch", "cuda")
        if work.answer_scoring == "exact":
            model.use_attention("cached")
        if work.lora:
            install_adapters(model, work.lora, precision=Precision(work.precision))
        step = _members_step(model, work) if work.members else _step(model, work)
        for plane in step.planes:
            memory.assign("gradients", [plane.grad])
            memory.assign("moments", plane.state.values())
        memory.origin = "activations"
        names = ["tokens", "targets"]
        if work.packed and work.masked:
            names += ["segments", "positions"]
        shape = [max(work.rows, work.window_rows), work.length]
        if work.own_rows:
            shape.insert(0, len(work.members))
        window = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        batch = {name: rows[..., : work.rows, :] for name, rows in window.items()}
        if work.compile != "none":
            capture_with(memory.captured, step, work.compile)
        # This runs a copy of the blocks, which must not be counted.
        with compat.without_modes():
            step.choose_kept_results(batch)
        # The stages of the step, each with the index of its first sample in `memory.curve`.
        begins = [("forward", len(memory.curve))]
        forward = step.forward.function

        def forward_then_mark(batch: object, loss_factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            result = forward(batch, loss_factor)
            begins.append(("backward", len(memory.curve)))
            memory.origin = "workspace"  # the origin of what the backward pass allocates
            return result

        step.forward.function = forward_then_mark
        accumulate(step, [batch])
        if with_update:
            begins.append(("update", len(memory.curve)))
            update(step)
        if work.compile == "whole":
            # A pass consists of its graph and of the code after the graph, and both have samples for
            # each block. `extend_samples` finds only one place in a curve where a period was added,
            # so the code after the graph begins another curve of the same stage.
            after_graphs = zip(("forward", "backward"), memory.graph_ends, strict=False)
            begins = [*after_graphs, *begins]
            begins.sort(key=lambda begin: begin[1])
        ends = [begin for _, begin in begins[1:]] + [len(memory.curve)]
        return [
            Curve(stage, memory.curve[begin:end])
            for (stage, begin), end in zip(begins, ends, strict=True)
        ]


def _step(model: nn.Module, work: Work) -> Step:
    """Return the step of one model that trains alone."""
    return Step(
        model,
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        remat=policy_named(work.remat),
        loss=work.loss,
        parameters=OnDevice(fused=work.fused, rounds_in_update=True),
        block_formats=block_formats(model, work.quantize),
    )


def _members_step(model: nn.Module, work: Work) -> Step:
    """Return the step of an ensemble whose first member is this model."""
    ensemble = Ensemble(
        members_like(model, work.members),
        [{"seed": number} for number in range(len(work.members))],
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        loss=work.loss,
        micro_batch=work.rows,
        each=work.own_rows,
        block_formats=block_formats(model, work.quantize),
    )
    parameters = ensemble.stacked_parameters
    parameters.caller.assume_batched()
    if work.fused and work.compile != "none":  # as `Ensemble.capture` does
        parameters.fuse_gradients_of_adapters()
    return ensemble.step


# The loss and the head below are cached, so that traces of several depths share their graphs.


@functools.cache
def _answer_loss(device_type: str) -> Loss:
    """Return a loss that needs as much memory as a run's loss which reads each token's
    log-probability. It has as many chunks of logits as on a device of this type.

    Unlike `TokenLoss` it has no attribute `head`, which a step that is captured block by block would
    compile.
    """

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden_ND, head = hidden_of(model, batch)
        targets_N = batch["targets"].flatten()
        chunks = chunk_count(len(targets_N), len(head.weight), device_type)
        logs_N = token_log_probabilities(
            hidden_ND,
            head.weight,
            targets_N,
            rows=trained_rows(head),
            chunks=chunks,
            cap=cap_of(head),
        )
        return -logs_N.sum(), (targets_N >= 0).sum()

    return loss


def token_loss_on(device_type: str) -> TokenLoss:
    """Return the loss for texts, with as many chunks of logits as on a device of this type."""
    loss = TokenLoss()
    loss.head = _cross_entropy_head(device_type)
    return loss


@functools.cache
def _cross_entropy_head(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `linear_cross_entropy` with as many chunks of logits as on a device of this type."""
    return functools.partial(linear_cross_entropy, device_type=device_type)
