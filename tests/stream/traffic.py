"""What an update copies and what a device holds, in bytes, before anything is run: from the stages'
shapes alone.

Symbols: L stages of blocks, between a first stage 0 and a last one L + 1; for stage s
    w(s), g(s), o(s)    bytes of its weights, its gradient, and all else that an update reads (rest, moments, average)
    f(s)                bytes of its frozen tensors
of what does not live on the device, G micro-batches, and a the bytes of one's state at one
boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from monograph.stream.chunked_update import STAGING_BUFFERS, chunk_tensors_to_fetch, chunks
from monograph.stream.lanes import Home
from monograph.stream.placement import Placement
from monograph.stream.slots import BLOCK_SLOTS, frozen_to_fetch, tensors_to_fetch
from monograph.stream.store import GRADIENT, WEIGHTS, Stage, Store
from monograph.stream.walk import INPUT_SETS

Traffic = Counter[tuple[Home, Home]]
DECISION = 32  # bytes: four numbers of 8


def traffic(store: Store, placement: Placement, state_bytes: int, micro_batches: int) -> Traffic:
    """Bytes copied from one home to another by an update of one window, when the update before it
    has been made too.

        to the device     forward   w(0) + ... + w(L)        nothing, where stages are updated before their forward pass
                          back      w(1) + ... + w(L - 2)    blocks' last two stages are still in their slots
                                  + w(0)                     unless it shares weights with the last stage, and stays
                                  + w(L + 1)                 unless it is updated before
                          update    sum over s of w(s) + o(s), + g(s) unless updated in the backward pass
        from the device   update    sum over s of w(s) + o(s)
                          back      sum over s of g(s) unless updated in the backward pass
        both ways         L G a     offloaded states: the inputs of all stages of blocks

    Of planes that are updated on the host only weights and gradients cross:

        to the device     forward   w(0) + ... + w(L + 1), the last of them when it is next wanted;    back as above
        from the device   back      sum over s of g(s)
                          update    32 bytes of decision; in the backward pass for each stage with such planes
        from and to files           what of g, and of w and o and back, lies there

    Weights that a slot still holds from before the update are old ones, and are fetched again.
    Frozen tensors are not, so that blocks' first two stages wait in their slots for the next update:

        to the device     forward   f(3) + ... + f(L)
                          back      f(1) + ... + f(L - 2)
                          either    f(0) + f(L + 1)          unless they share weights, and both stay

    Nothing else depends on how many micro-batches there are.

    Args:
        store: the stages; their tensors may be on the meta device.
        placement: where they live and when they are updated.
        state_bytes: a.
        micro_batches: G.
    """
    first, *middle, last = store.stages
    before_forward, at_once = placement.when == "next forward", placement.when == "backward"
    again = middle[: max(0, len(middle) - BLOCK_SLOTS)]
    again += [] if store.tied else [first]
    found: Traffic = Counter()
    for on_host in (False, True):
        visits = again if before_forward and not on_host else [*store.stages, *again]
        for stage in visits:
            for home, size in _away(stage, lambda name: name == WEIGHTS, on_host).items():
                found[home, Home.DEVICE] += size
    for stage in store.stages:
        for home, size in _away(stage, lambda name: name != GRADIENT).items():
            found[home, Home.DEVICE] += size
            found[Home.DEVICE, home] += size
        for home, size in _away(stage, lambda name: name == GRADIENT and not at_once).items():
            found[home, Home.DEVICE] += size
            found[Home.DEVICE, home] += size
        for home, size in _away(stage, lambda name: name == GRADIENT, on_host=True).items():
            found[Home.DEVICE, home] += size
        in_files = [
            _away(stage, lambda name, g=g: (name == GRADIENT) == g, on_host=True)[Home.DISK]
            for g in (0, 1)
        ]
        found[Home.DISK, Home.HOST] += sum(in_files)
        found[Home.HOST, Home.DISK] += in_files[0]
    frozen_visits = [*middle[BLOCK_SLOTS:], *middle[: max(0, len(middle) - BLOCK_SLOTS)]]
    frozen_visits += [] if store.tied else [first, last]
    for stage in frozen_visits:
        for tensor in frozen_to_fetch(stage).values():
            found[stage.frozen.space.home, Home.DEVICE] += _size(tensor)
    told = sum(any(each.on_host for each in stage.stored_planes) for stage in store.stages)
    found[Home.DEVICE, Home.HOST] += DECISION * (told if at_once else min(1, told))
    if placement.offload:
        found[Home.HOST, Home.DEVICE] += len(middle) * micro_batches * state_bytes
        found[Home.DEVICE, Home.HOST] += len(middle) * micro_batches * state_bytes
    return +found


@dataclass(frozen=True)
class DeviceBytes:
    """What training takes on the device at most, beside what a pass makes and frees.

    Attributes:
        stored: planes that live there.
        slots: stages that were brought there, weights and gradients.
        staging: pieces that are updated.
        boundaries: what goes from stage to stage.
    """

    stored: int
    slots: int
    staging: int
    boundaries: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.stored + self.slots + self.staging + self.boundaries


def device_bytes(
    store: Store, placement: Placement, state_bytes: int, micro_batches: int
) -> DeviceBytes:
    """What a walk takes on the device.

        slots         w + g + f of the larger of stages 0 and L + 1 (of both, if they share weights)
                      + min(2, L) times that of the largest stage of blocks
        staging       4 times all buffers of the largest piece, see `chunked_update.chunks`; with the gradient, unless
                      weights are updated in the backward pass
        boundaries    (L + 1) G a + a, the latter the gradient of one of them;
                      offloaded 2 G a on the way there + min(2, L) G a for what comes back, at any
                      depth

    "Largest" is meant buffer by buffer, and by dtype: two planes of different dtypes share no
    memory.

    Args:
        store: the stages; their tensors may be on the meta device.
        placement: where they live and when they are updated.
        state_bytes: a.
        micro_batches: G.
    """
    first, *middle, last = store.stages
    turns = [([first], 1), ([last], 1)] if store.tied else [([first, last], 1)]
    turns.append((middle, min(BLOCK_SLOTS, len(middle))))
    slots = sum(
        count * _largest(tensors_to_fetch(stage, name) for stage in those)
        for those, count in turns
        for name in (WEIGHTS, GRADIENT)
    )
    slots += sum(count * _largest(map(frozen_to_fetch, those)) for those, count in turns)
    at_home = placement.when != "backward"
    cut = (piece for stage in store.stages for piece in chunks(stage))
    staging = STAGING_BUFFERS * _largest(
        chunk_tensors_to_fetch(piece, gradient=at_home) for piece in cut
    )
    states = (
        2 + min(INPUT_SETS, len(middle)) if placement.offload else len(middle) + 1
    ) * micro_batches
    boundaries = (states if placement.offload else states + 1) * state_bytes
    return DeviceBytes(store.bytes_at()[Home.DEVICE], slots, staging, boundaries)


def _away(stage: Stage, wanted: Callable[[str], bool], on_host: bool = False) -> Counter[Home]:
    """Bytes by home of buffers of the wanted names, of planes that are updated on the host, or on
    the device.
    """
    found: Counter[Home] = Counter()
    for each in (stored for stored in stage.stored_planes if stored.on_host == on_host):
        for name, (tensor, space) in each.buffers.items():
            if wanted(name) and space.home != Home.DEVICE:
                found[space.home] += _size(tensor)
    return found


def _largest(guests: Iterable[Mapping[Any, Tensor]]) -> int:
    """Bytes of memory in which each of the guests has room, one at a time."""
    sizes: dict[Any, int] = {}
    for guest_ in guests:
        for key, tensor in guest_.items():
            at = key, tensor.dtype
            sizes[at] = max(sizes.get(at, 0), _size(tensor))
    return sum(sizes.values())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
