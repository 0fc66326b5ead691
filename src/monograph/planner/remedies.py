"""List what can be changed so that a training fits a device or is faster there, and what each
change costs.

Everything here is estimated in closed form, as tracing each change would take a minute.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from monograph.cards import CARDS
from monograph.device import Device, named
from monograph.errors import OutOfDeviceMemory
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.optim.formats import FORMATS, narrower
from monograph.planner.candidates import ByDtype, Candidate, Request, of_way, ways
from monograph.planner.defaults import Plan, budget
from monograph.planner.streaming import HOST_SHARE, Limits, StreamCandidate, streamed
from monograph.report.quantities import binary

# The share of a device's memory that an estimate may take, as it may be a few per cent too low.
ROOM = 0.95
SHORTEST = 256  # tokens of a row
HOSTS_GIB = 64, 128, 256, 512
FEWER_TOKENS = 2**17, 2**14  # of an update that is streamed, whose states between stages are kept


class Remedy(NamedTuple):
    """A change, and what it gives.

    Attributes:
        change: what to add to the command line.
        cost: what it costs, in words, apart from time.
        best: the fastest way with it.
    """

    change: str
    cost: str
    best: Candidate


Changed = tuple[str, str, Request]  # what to type, what it costs, and the training with it


class Choices(NamedTuple):
    """What may be changed in a training.

    Attributes:
        existing: whether the model has weights that adapters can be added to.
        smaller: smaller shapes, by what to type for each, the largest first.
        card: whether another card may be taken.
        may_stream: whether weights may be streamed from the host.
        halves: the 16-bit precision of the device; "" if it has none.
    """

    existing: bool
    smaller: tuple[tuple[str, LlamaConfig], ...] = ()
    card: bool = False
    may_stream: bool = False
    halves: str = ""


# A change is worth a line where a training fits already if it is this much faster, or needs this
# share of the memory.
FASTER, SMALLER = 1.05, 0.75


def better(
    plan: Plan, request: Request, peaks: ByDtype, choices: Choices, limits: Limits
) -> list[Remedy]:
    """Return the changes that are worth a line: all with which it fits, or where it does already,
    the better ones.
    """
    best = plan.chosen
    if best is None:
        return [*remedies(request, plan.device, peaks, choices, limits)]
    if isinstance(best, StreamCandidate):
        return [*remedies(request, plan.device, peaks, choices._replace(may_stream=False), limits)]
    return [
        remedy
        for remedy in _fitting(
            _numerics(request, choices._replace(existing=False)), plan.device, peaks
        )
        if remedy.best.tokens_per_s >= FASTER * best.tokens_per_s
        or remedy.best.peak_memory_bytes <= SMALLER * best.peak_memory_bytes
    ]


def remedies(
    request: Request, device: Device, peaks: ByDtype, choices: Choices, limits: Limits
) -> Iterator[Remedy]:
    """Yield the changes with which the training fits, those that keep most of it first."""
    numerics = [*_numerics(request, choices)]
    fitting = [*_fitting(numerics, device, peaks)]
    yield from fitting
    yield from itertools.islice(_fitting(_shorter(request), device, peaks), 1)
    if choices.may_stream:
        yield from itertools.islice(_streamed(request, device, peaks, limits), 1)
    smaller = (
        (change, "a smaller model", request.having(replace(request.training, config=shape)))
        for change, shape in choices.smaller
    )
    yield from itertools.islice(_fitting(smaller, device, peaks), 1)
    if choices.card:
        here = [remedy.change for remedy in fitting]
        elsewhere = [
            changed
            for changed in numerics
            if changed[0] not in here and changed[2].training.lora is not None
        ]
        yield from _larger_cards([("", "", request), *elsewhere], device)


def _fitting(changes: Iterable[Changed], device: Device, peaks: ByDtype) -> Iterator[Remedy]:
    """Yield the changes with which it fits."""
    for change, cost, request in changes:
        best = fastest(request, device, peaks)
        if best is not None:
            yield Remedy(change, cost, best)


def fastest(request: Request, device: Device, peaks: ByDtype) -> Candidate | None:
    """Return the fastest way that fits a device by the closed form; None if none does."""
    limit = int(ROOM * budget(device))
    found = [
        candidate
        for way in ways(request)
        if way[1] != "none"
        for candidate in of_way(request, way, device, limit, 1.0, peaks, {})
        if candidate.peak_memory_bytes <= limit
    ]
    return min(found, key=lambda candidate: candidate.update_s, default=None)


def _numerics(request: Request, choices: Choices) -> Iterator[Changed]:
    """Yield (change, cost, request) for narrower numbers, and for adapters in place of all weights."""
    training = request.training
    optim = training.optim
    lora = training.lora
    if request.precisions == ("fp32",) and choices.halves:
        change = f"train.precision={choices.halves}"
        yield change, "products in 16 bits", replace(request, precisions=(choices.halves,))
    if lora is not None:
        if lora.base == "auto":
            eight = replace(lora, base="int8")
            four = replace(lora, base="nf4")
            yield (
                "lora.base=int8",
                "frozen weights rounded to 8 bits",
                request.having(replace(training, lora=eight)),
            )
            yield (
                "lora.base=nf4",
                "frozen weights rounded to 4 bits",
                request.having(replace(training, lora=four)),
            )
        return
    if FORMATS[optim.state].exact:
        for state in narrower(optim.state):
            if FORMATS[state].stochastic:  # below, with the weights
                continue
            narrow = request.having(replace(training, optim=replace(optim, state=state)))
            bits = round(8 * FORMATS[state].bytes_each)
            yield f"optim.state={state}", f"moments rounded to {bits} bits", narrow
        if request.precisions == ("bf16",):
            whole = replace(optim, state="bf16", master_weights=False)
            halved = request.having(replace(training, optim=whole))
            change = "optim.state=bf16 optim.master_weights=false"
            yield change, "weights, moments in 16 bits", halved
    if choices.existing:
        adapted = replace(training, optim=AdamW(), lora=Lora())
        rank = Lora().rank
        yield f"lora.rank={rank}", "adapters in place of all weights", request.having(adapted)
        change = f"lora.rank={rank} lora.base=nf4"
        yield (
            change,
            "adapters on weights of 4 bits",
            request.having(replace(adapted, lora=Lora(base="nf4"))),
        )


def _shorter(request: Request) -> Iterator[Changed]:
    """Yield half of the row's length, a quarter of it and so on."""
    length = request.training.length // 2
    while length >= SHORTEST:
        yield (
            f"data.sequence_length={length}",
            "longer texts are cut",
            request.of_tokens(request.tokens_per_update, length),
        )
        length //= 2


def _streamed(request: Request, device: Device, peaks: ByDtype, known: Limits) -> Iterator[Remedy]:
    """Yield streaming from each usual host that has room, the smallest first; then with smaller
    updates.
    """
    for tokens in (request.tokens_per_update, *FEWER_TOKENS):
        if not request.training.length <= tokens <= request.tokens_per_update:
            continue
        smaller = (
            ""
            if tokens == request.tokens_per_update
            else f" train.tokens_per_update={binary(tokens)}"
        )
        asked = replace(request, remats=("none",), scopes=("blocks",)).of_tokens(
            tokens, request.training.length
        )
        for gibibytes in HOSTS_GIB:
            limits = replace(known, host_bytes=int(HOST_SHARE * gibibytes * 2**30), disk_bytes=0)
            with suppress(OutOfDeviceMemory):
                best = streamed(asked, device, limits, peaks)[0]
                cost = f"a host of {gibibytes} GiB" + (", small updates" if smaller else "")
                yield Remedy(f"train.memory=stream{smaller}", cost, best)


def _larger_cards(changes: Iterable[Changed], device: Device) -> Iterator[Remedy]:
    """Yield for each change the card with the least memory that it fits, of those with more than
    the device has.
    """
    every = sorted(map(named, CARDS), key=lambda card: card.memory_bytes)
    larger = [card for card in every if card.memory_bytes > device.memory_bytes]
    names = {card.name: short for short, card in CARDS.items()}
    for change, cost, request in changes:
        able = [card for card in larger if request.precisions[0] in card.peak_flops]
        found = ((card, fastest(request, card, card.peak_flops)) for card in able)
        for card, best in found:
            if best is not None:
                said = f"{card.memory_bytes / 2**30:.0f} GiB" + (f"; {cost}" if cost else "")
                yield Remedy(f"{change} --device {names[card.name]}".strip(), said, best)
                break
