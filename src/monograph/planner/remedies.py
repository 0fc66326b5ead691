"""List what can be changed so that a training fits a device or is faster there, and what each
change costs.

Memory and time are estimated in closed form, because tracing each change would take a minute.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from monograph.cards import CARDS
from monograph.device import Device, card_device
from monograph.errors import OutOfDeviceMemory
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.optim.formats import FORMATS, narrower
from monograph.planner.candidates import (
    ByPrecision,
    Candidate,
    PlanRequest,
    resident_ways,
    way_candidates,
)
from monograph.planner.defaults import Plan, budget
from monograph.planner.streaming import (
    HOST_SHARE,
    Limits,
    StreamCandidate,
    can_stream,
    stream_candidates,
)
from monograph.report.quantities import binary

# The share of a device's memory that an estimate may take. The rest is for errors: an estimate may be a
# few per cent too low.
ESTIMATE_SHARE = 0.95
MIN_LENGTH = 256  # tokens of a row
HOSTS_GIB = 64, 128, 256, 512  # the memory of usual hosts
# Tokens of smaller updates that are tried for a streamed model. Streaming keeps the input of each group
# of blocks for all tokens of an update.
FEWER_TOKENS = 2**17, 2**14


class Remedy(NamedTuple):
    """A change with which a training fits, or is faster.

    Attributes:
        arguments: what to add to the command line.
        cost: what it costs, in words, apart from time.
        best: the fastest way to train with the change.
    """

    arguments: str
    cost: str
    best: Candidate


class TrainingChange(NamedTuple):
    """A change of a training.

    Attributes:
        arguments: what to add to the command line.
        cost: what it costs, in words, apart from time.
        request: the changed training.
    """

    arguments: str
    cost: str
    request: PlanRequest


class RemedyChoices(NamedTuple):
    """What may be changed in a training.

    Attributes:
        may_add_adapters: whether adapters may be trained in place of all weights. A new model,
            whose weights are not trained yet, needs all of them.
        smaller_shapes: (what to add to the command line, shape) of smaller models, the largest
            first.
        may_change_card: whether another card may be taken.
        may_stream: whether weights may be streamed from the host.
        half_precision: the 16-bit precision of the device, such as bf16; "" if it has none.
    """

    may_add_adapters: bool
    smaller_shapes: tuple[tuple[str, LlamaConfig], ...] = ()
    may_change_card: bool = False
    may_stream: bool = False
    half_precision: str = ""


# If a training fits already, a change is worth a line if it gives at least this many times the
# tokens per second, or needs at most this share of the memory.
MIN_SPEEDUP = 1.05
MAX_MEMORY_SHARE = 0.75


def remedies_worth_showing(
    plan: Plan,
    request: PlanRequest,
    peak_flops: ByPrecision,
    choices: RemedyChoices,
    limits: Limits,
) -> list[Remedy]:
    """Return the changes that are worth a line in a plan.

    If the training does not fit, or fits only when it is streamed, these are the changes of
    `fitting_remedies`. Otherwise they are narrower numbers that make it faster or smaller.

    Args:
        plan: the plan without changes.
        request: the training, and the values that the planner may choose without a change of the
            settings, such as the rows of a micro-batch.
        peak_flops: FLOP/s by precision.
        choices: what may be changed in the settings.
        limits: the limits of streaming.
    """
    best = plan.chosen
    if best is None:
        return [*fitting_remedies(request, plan.device, peak_flops, choices, limits)]
    if isinstance(best, StreamCandidate):
        # The plan streams already, so only changes that keep the weights on the device are listed.
        choices = choices._replace(may_stream=False)
        return [*fitting_remedies(request, plan.device, peak_flops, choices, limits)]
    # No adapters are offered, because the training of all weights fits already.
    narrower_numbers = _narrower_or_adapted(request, choices._replace(may_add_adapters=False))
    return [
        remedy
        for remedy in _remedies_that_fit(narrower_numbers, plan.device, peak_flops)
        if remedy.best.tokens_per_s >= MIN_SPEEDUP * best.tokens_per_s
        or remedy.best.peak_memory_bytes <= MAX_MEMORY_SHARE * best.peak_memory_bytes
    ]


def fitting_remedies(
    request: PlanRequest,
    device: Device,
    peak_flops: ByPrecision,
    choices: RemedyChoices,
    limits: Limits,
) -> Iterator[Remedy]:
    """Yield the changes with which the training fits: all changes to narrower numbers or to adapters,
    then the least change of each other kind.

    The arguments are those of `remedies_worth_showing`.
    """
    narrower_or_adapted = [*_narrower_or_adapted(request, choices)]
    fitting_here = [*_remedies_that_fit(narrower_or_adapted, device, peak_flops)]
    yield from fitting_here
    # Of each other kind, only the first change that fits is estimated and shown.
    yield from itertools.islice(_remedies_that_fit(_shorter(request), device, peak_flops), 1)
    if choices.may_stream and can_stream(request.training):
        yield from itertools.islice(_streaming(request, device, peak_flops, limits), 1)
    smaller = (
        TrainingChange(
            arguments=arguments,
            cost="a smaller model",
            request=request.with_training(replace(request.training, config=shape)),
        )
        for arguments, shape in choices.smaller_shapes
    )
    yield from itertools.islice(_remedies_that_fit(smaller, device, peak_flops), 1)
    if choices.may_change_card:
        # On larger cards the training is tried unchanged, and with each change whose result trains
        # adapters but does not fit this device.
        arguments_here = [remedy.arguments for remedy in fitting_here]
        adapters_too_large_here = [
            change
            for change in narrower_or_adapted
            if change.request.training.lora is not None and change.arguments not in arguments_here
        ]
        unchanged = TrainingChange(arguments="", cost="", request=request)
        yield from _larger_cards([unchanged, *adapters_too_large_here], device)


def _remedies_that_fit(
    changes: Iterable[TrainingChange], device: Device, peak_flops: ByPrecision
) -> Iterator[Remedy]:
    """Yield the changes with which the training fits the device."""
    for change in changes:
        best = fastest_fitting(change.request, device, peak_flops)
        if best is not None:
            yield Remedy(arguments=change.arguments, cost=change.cost, best=best)


def fastest_fitting(
    request: PlanRequest, device: Device, peak_flops: ByPrecision
) -> Candidate | None:
    """Return the fastest way to train for which the device's memory is enough, by the closed form; None
    if there is none.

    A way is a choice of precision, compiled graphs and recomputation (`candidates.Way`). Only ways with
    compiled graphs count, and no way that streams.
    """
    limit = int(ESTIMATE_SHARE * budget(device))
    fitting = []
    for way in resident_ways(request):
        if way.scope == "none":
            continue
        # Nothing is traced or measured for a changed training. So neither the estimated memory is
        # corrected by traces, nor the predicted time by the slowness of earlier runs (the ratio of
        # measured to predicted time).
        candidates = way_candidates(
            request, way, device, limit, correction=1.0, peak_flops=peak_flops, slowness={}
        )
        for candidate in candidates:
            if candidate.peak_memory_bytes <= limit:
                fitting.append(candidate)
    return min(fitting, key=lambda candidate: candidate.update_s, default=None)


def _narrower_or_adapted(request: PlanRequest, choices: RemedyChoices) -> Iterator[TrainingChange]:
    """Yield changes to numbers of fewer bits, and to adapters in place of all weights."""
    training = request.training
    if request.precisions == ("fp32",) and choices.half_precision:
        yield TrainingChange(
            arguments=f"train.precision={choices.half_precision}",
            cost="products in 16 bits",
            request=replace(request, precisions=(choices.half_precision,)),
        )
    lora = training.lora
    if lora is not None:
        if lora.base == "auto":
            int8 = replace(training, lora=replace(lora, base="int8"))
            nf4 = replace(training, lora=replace(lora, base="nf4"))
            yield TrainingChange(
                arguments="lora.base=int8",
                cost="frozen weights rounded to 8 bits",
                request=request.with_training(int8),
            )
            yield TrainingChange(
                arguments="lora.base=nf4",
                cost="frozen weights rounded to 4 bits",
                request=request.with_training(nf4),
            )
        # Adapters are so few weights that their optimizer hardly changes memory and time. So no other
        # format of its state is offered.
        return
    optim = training.optim
    # Only the default format is replaced. Any other was chosen in the settings, so its moments and
    # weights are left as they are.
    if FORMATS[optim.state].exact:
        for state in narrower(optim.state):
            # bf16, which rounds stochastically, is not offered for the moments alone, only together
            # with weights in bf16, below.
            if FORMATS[state].stochastic:
                continue
            bits = round(8 * FORMATS[state].bytes_each)
            narrow = replace(training, optim=replace(optim, state=state))
            yield TrainingChange(
                arguments=f"optim.state={state}",
                cost=f"moments rounded to {bits} bits",
                request=request.with_training(narrow),
            )
        # Only a training in bf16 can do without weights in fp32, and none that rounds them.
        if request.precisions == ("bf16",) and training.quantize == "none":
            bits_16 = replace(training, optim=replace(optim, state="bf16", master_weights=False))
            yield TrainingChange(
                arguments="optim.state=bf16 optim.master_weights=false",
                cost="weights, moments in 16 bits",
                request=request.with_training(bits_16),
            )
    if choices.may_add_adapters and training.quantize == "none":
        rank = Lora().rank
        # The default optimizer stands for any other: an optimizer of adapters hardly changes memory and
        # time.
        adapted = replace(training, optim=AdamW(), lora=Lora())
        yield TrainingChange(
            arguments=f"lora.rank={rank}",
            cost="adapters in place of all weights",
            request=request.with_training(adapted),
        )
        adapted_nf4 = replace(adapted, lora=Lora(base="nf4"))
        yield TrainingChange(
            arguments=f"lora.rank={rank} lora.base=nf4",
            cost="adapters on weights of 4 bits",
            request=request.with_training(adapted_nf4),
        )


def _shorter(request: PlanRequest) -> Iterator[TrainingChange]:
    """Yield changes to rows of half the length, of a quarter of it and so on."""
    length = request.training.length // 2
    while length >= MIN_LENGTH:
        yield TrainingChange(
            arguments=f"data.sequence_length={length}",
            cost="longer texts are cut",
            request=request.with_tokens(request.tokens_per_update, length),
        )
        length //= 2


def _streaming(
    request: PlanRequest, device: Device, peak_flops: ByPrecision, given_limits: Limits
) -> Iterator[Remedy]:
    """Yield changes to streaming, one for each usual host that has enough memory, the smallest first;
    then the same with smaller updates.
    """
    length = request.training.length
    # An update has at least one row.
    fewer_tokens = [
        tokens for tokens in FEWER_TOKENS if length <= tokens < request.tokens_per_update
    ]
    for tokens in (request.tokens_per_update, *fewer_tokens):
        arguments = "train.memory=stream"
        cost_of_updates = ""
        if tokens != request.tokens_per_update:
            arguments += f" train.tokens_per_update={binary(tokens)}"
            cost_of_updates = ", small updates"
        # To keep the search short, only compiled blocks are tried, and no recomputation within a
        # stage (a group of blocks). It would save little: streaming keeps only the inputs of stages, and
        # has the other tensors of one stage at a time.
        changed = replace(request, remats=("none",), scopes=("blocks",))
        changed = changed.with_tokens(tokens, length)
        for gibibytes in HOSTS_GIB:
            host_bytes = int(HOST_SHARE * gibibytes * 2**30)
            # Without a disk, because the change only names the host's memory.
            limits = replace(given_limits, host_bytes=host_bytes, disk_bytes=0)
            # This error also says that the host's memory is too small.
            with suppress(OutOfDeviceMemory):
                best = stream_candidates(changed, device, limits, peak_flops)[0]
                yield Remedy(
                    arguments=arguments,
                    cost=f"a host of {gibibytes} GiB{cost_of_updates}",
                    best=best,
                )


def _larger_cards(changes: Iterable[TrainingChange], device: Device) -> Iterator[Remedy]:
    """Yield, for each change, the smallest card that has more memory than the device and that the
    training fits.
    """
    by_memory = sorted(map(card_device, CARDS), key=lambda card: card.memory_bytes)
    larger = [card for card in by_memory if card.memory_bytes > device.memory_bytes]
    short_names = {card.name: short_name for short_name, card in CARDS.items()}
    for change in changes:
        # The precision is never the planner's choice: it is that of the settings or of the change.
        (precision,) = change.request.precisions
        for card in larger:
            if precision not in card.peak_flops:
                continue
            best = fastest_fitting(change.request, card, card.peak_flops)
            if best is not None:
                arguments = f"{change.arguments} --device {short_names[card.name]}".strip()
                cost = f"{card.memory_bytes / 2**30:.0f} GiB"
                if change.cost:
                    cost += f"; {change.cost}"
                yield Remedy(arguments=arguments, cost=cost, best=best)
                break
