"""Many adapters on one base, so that rows of different adapters are decoded by one graph.

Each layer that has a bank holds the matrices of several adapters, one in each slot. A row says by its
slot which adapter it has:

    y = W x + b + s_i B_i A_i x        i = the row's slot

W is read once for all rows. Slot 0 is the base: its matrices are zero, so zeros are added to its rows.
This changes no bit of y except the sign of a zero, on which no other number of the model depends. An
adapter whose rank is smaller than the bank's is padded with zeros, which add nothing.

A slot is written in place, so that a captured graph need not be captured again.

Shapes: S slots, B rows, T positions, K inputs, N outputs, R the bank's rank, Q an adapter's rank.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.inspect import shared_parameters
from monograph.graph.lora import AdaptedExperts, Lora, adapted_layers
from monograph.graph.lora_targets import linear_layers
from monograph.model.layers import Linear
from monograph.model.llama import Llama

# The name that requests use for the model without an adapter.
BASE = "base"
BASE_SLOT = 0
# The rank of a bank is at least this, unless the user gives another one.
LEAST_RANK = 16
# The remedy for an adapter that a bank cannot hold. A folder with an adapter that is given as the model
# itself is loaded with its adapter merged into the weights.
MERGE = "give this folder in the place of the model"


class Factors(NamedTuple):
    """The two matrices of an adapter of one layer.

    Attributes:
        A_QK: A.
        B_NQ: B.
    """

    A_QK: Tensor
    B_NQ: Tensor


class StoredAdapter(NamedTuple):
    """An adapter that a bank can take.

    Attributes:
        place: the folder that it was read from, for messages.
        rank: Q.
        scale: s, the factor of its output.
        factors: the matrices of each layer that it changes, by the layer's name.
        digest: a hash of the matrices and the scale.
    """

    place: str
    rank: int
    scale: float
    factors: Mapping[str, Factors]
    digest: str


def require_form(lora: Lora, place: str) -> None:
    """Refuse adapters with parts that a bank cannot hold.

    Args:
        lora: the options of the adapters.
        place: the folder that they are in.

    Raises:
        InputRefused: they have magnitudes or rows of tokens.
    """
    if lora.dora:
        raise InputRefused(f"{place}: magnitudes (lora.dora, use_dora) can only be merged: {MERGE}")
    if lora.tokens:
        keys = "lora.tokens, trainable_token_indices"
        raise InputRefused(f"{place}: trained rows of tokens ({keys}) can only be merged: {MERGE}")


def require_rank(rank: int, max_rank: int, place: str) -> None:
    """Refuse a rank that is too large for a bank.

    Raises:
        InputRefused: the rank is above `max_rank`.
    """
    if rank > max_rank:
        raise InputRefused(
            f"{place}: r = {rank} is above {max_rank}, the largest rank that there is room for: begin with a larger "
            "--adapter-rank"
        )


def stored_adapter(module: nn.Module, lora: Lora, place: str) -> StoredAdapter:
    """Return the adapters of a module as one that a bank can take; it shares their memory.

    Args:
        module: a module with adapters (`monograph.graph.lora.adapt`); its other weights are not read.
        lora: their options, which `require_form` allows.
        place: the folder that they were read from.

    Raises:
        InputRefused: a layer has experts, whose adapters a bank cannot hold.
    """
    sha256 = hashlib.sha256(f"{lora.scale}".encode())
    factors = dict[str, Factors]()
    for name, layer in sorted(adapted_layers(module).items()):
        if isinstance(layer, AdaptedExperts):
            raise InputRefused(
                f"{place}: target_modules: adapters of experts ({name}) can only be merged: {MERGE}"
            )
        factors[name] = Factors(layer.lora_A.weight.detach(), layer.lora_B.weight.detach())
        sha256.update(f"{name} {lora.rank} ".encode())
        for factor in factors[name]:
            # As bytes, because numpy has no bf16.
            sha256.update(factor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return StoredAdapter(place, lora.rank, lora.scale, factors, sha256.hexdigest())


class BankedLinear(nn.Linear):
    """A linear layer with a bank of adapters; `AdapterBank` gives layers this class.

    Attributes:
        bank: the bank.
        bank_A_SRK: A of each slot.
        bank_B_SRN: the transpose of s B of each slot.
    """

    bank: "AdapterBank"
    bank_A_SRK: Tensor
    bank_B_SRN: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, T, K] to [B, T, N], with the adapter of each row."""
        output = super().forward(input)
        slot_B = self.bank.slot_B
        if slot_B is None:
            return output
        input_BTK = input.to(self.bank_A_SRK.dtype)
        low_BTR = torch.bmm(input_BTK, self.bank_A_SRK.index_select(0, slot_B).mT)
        adapted_BTN = torch.bmm(low_BTR, self.bank_B_SRN.index_select(0, slot_B))
        # The sum is in the dtype of the adapters, and is rounded once.
        return (output + adapted_BTN).to(output.dtype)


class AdapterBank:
    """The adapters of a model.

    Attributes:
        capacity: how many adapters it has room for.
        rank: R.
        layers: the layers that have a bank, by name.
        slots: the slot of each adapter that requests may ask for, by its name.
        slot_B: the slots of the rows of the present pass; None: no row has an adapter.
        last_writes: for each slot, the number of the write that filled it, counted over all slots; 0:
            none. What was computed with a slot is valid as long as this number is the same.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], capacity: int, rank: int) -> None:
        """Give layers empty banks; `install` checks the arguments."""
        self.capacity = capacity
        self.rank = rank
        self.slots = dict[str, int]()
        self.slot_B: Tensor | None = None
        self.last_writes = [0] * (capacity + 1)
        self.layers = dict[str, BankedLinear]()
        self._digests = dict[int, str]()
        self._free = list(range(1, capacity + 1))
        self._writes = 0
        for name, layer in layers.items():
            weight = layer.weight
            dtype = _bank_dtype(layer)
            layer.__class__ = BankedLinear
            assert isinstance(layer, BankedLinear)
            layer.bank = self
            for tensor_name, width in (
                ("bank_A_SRK", layer.in_features),
                ("bank_B_SRN", layer.out_features),
            ):
                zeros = weight.new_zeros(capacity + 1, rank, width, dtype=dtype)
                layer.register_buffer(tensor_name, zeros, persistent=False)
            self.layers[name] = layer

    @property
    def nbytes(self) -> int:
        """The memory that the banks of all layers take."""
        return sum(
            tensor.nbytes
            for layer in self.layers.values()
            for tensor in (layer.bank_A_SRK, layer.bank_B_SRN)
        )

    def slot_of(self, name: str) -> int:
        """Return the slot of an adapter, or that of the base for the name `BASE`.

        Raises:
            UsageError: there is no adapter with this name.
        """
        if name == BASE:
            return BASE_SLOT
        if name not in self.slots:
            raise UsageError(
                f"there is no adapter {name!r:.80}: expected {', '.join([*self.slots, BASE])}"
            )
        return self.slots[name]

    def digest(self, slot: int) -> str:
        """Return the digest of the adapter in a slot; "" for the base."""
        return self._digests.get(slot, "")

    def require_fits(self, adapter: StoredAdapter) -> None:
        """Refuse an adapter that the bank cannot hold.

        Raises:
            InputRefused: its rank is too large, or it changes a layer that has no bank.
        """
        require_rank(adapter.rank, self.rank, adapter.place)
        without_bank = [name for name in adapter.factors if name not in self.layers]
        if without_bank:
            raise InputRefused(
                f"{adapter.place}: target_modules has {without_bank[0]}, which none of the adapters at the start "
                "changes: begin with this adapter"
            )

    def add(self, name: str, adapter: StoredAdapter) -> int:
        """Write an adapter to a free slot, from which requests may use it; return the slot.

        Raises:
            InputRefused: it does not fit, see `require_fits`.
            UsageError: there is an adapter with this name, or no slot is free.
        """
        if name in self.slots or name == BASE:
            raise UsageError(f"there is an adapter {name!r:.80} already: choose another name")
        self.require_fits(adapter)
        if not self._free:
            raise UsageError(
                f"there is room for {self.capacity} adapters, and all of it is in use: remove one first"
            )
        slot = self._free.pop(0)
        self._write(slot, adapter)
        self._digests[slot] = adapter.digest
        self.slots[name] = slot
        return slot

    def replace(self, name: str, adapter: StoredAdapter) -> None:
        """Write an adapter to the slot of one that has this name. No request of it may be running.

        Raises:
            InputRefused: it does not fit, see `require_fits`.
            UsageError: there is no adapter with this name.
        """
        self.require_fits(adapter)
        slot = self.slot_of(name)
        self._write(slot, adapter)
        self._digests[slot] = adapter.digest

    def retire(self, name: str) -> int:
        """Remove an adapter's name, so that no new request uses it; return its slot.

        Requests that have begun still read the slot. Call `free` when they have ended.
        """
        return self.slots.pop(name)

    def free(self, slot: int) -> None:
        """Make a retired adapter's slot free for another adapter."""
        del self._digests[slot]
        self._free.append(slot)

    @torch.no_grad()
    def _write(self, slot: int, adapter: StoredAdapter) -> None:
        self._writes += 1
        self.last_writes[slot] = self._writes
        for name, layer in self.layers.items():
            A_RK = layer.bank_A_SRK[slot].zero_()
            B_RN = layer.bank_B_SRN[slot].zero_()
            factors = adapter.factors.get(name)
            if factors is not None:
                A_RK[: adapter.rank].copy_(factors.A_QK)
                B_RN[: adapter.rank].copy_(factors.B_NQ.T.to(B_RN.dtype) * adapter.scale)


def install(
    model: Llama,
    adapters: Mapping[str, StoredAdapter],
    *,
    capacity: int | None = None,
    rank: int | None = None,
) -> AdapterBank:
    """Give a model a bank with these adapters, in place.

    Layers that none of the adapters changes get no bank. Without any adapter, every linear layer
    gets one, except the head and those of mixtures.

    Args:
        model: the base, on its device, without adapters.
        adapters: the adapters by name.
        capacity: the number of adapters that there is room for; None: the number of `adapters`.
        rank: the largest rank of an adapter that may be added; None: that of `adapters`, but at least
            LEAST_RANK.

    Raises:
        InputRefused: an adapter does not fit.
        OutOfDeviceMemory: the bank would not fit into the free memory.
        UsageError: the capacity is too small, or the model has a bank.
    """
    if bank_of(model) is not None:
        raise UsageError("the model has a bank of adapters already")
    if capacity is None:
        capacity = len(adapters)
    if len(adapters) > capacity:
        raise UsageError(
            f"{len(adapters)} adapters, but there is room for {capacity}: give more --adapter-slots"
        )
    if rank is None:
        rank = max([LEAST_RANK, *(adapter.rank for adapter in adapters.values())])
    possible = _possible_layers(model)
    chosen = possible
    if adapters:
        for adapter in adapters.values():
            _require_possible(adapter, possible)
        changed = {name for adapter in adapters.values() for name in adapter.factors}
        chosen = {name: layer for name, layer in possible.items() if name in changed}
    _require_memory(chosen.values(), capacity, rank)
    bank = AdapterBank(chosen, capacity, rank)
    for name, adapter in adapters.items():
        bank.add(name, adapter)
    return bank


def _require_memory(layers: Iterable[nn.Linear], capacity: int, rank: int) -> None:
    bank_bytes = 0
    for layer in layers:
        number_bytes = _bank_dtype(layer).itemsize
        width = layer.in_features + layer.out_features
        bank_bytes += (capacity + 1) * rank * width * number_bytes
    free_bytes = describe().free_memory_bytes
    if bank_bytes > free_bytes:
        raise OutOfDeviceMemory(
            f"room for {capacity} adapters of rank {rank} takes {bank_bytes / 2**30:.3g} GiB, and "
            f"{free_bytes / 2**30:.3g} GiB are free: give fewer --adapter-slots, or a smaller --adapter-rank"
        )


def _bank_dtype(layer: nn.Linear) -> torch.dtype:
    """Return the dtype of a layer's bank: its weight's, or fp32 if that has fewer bits."""
    return torch.promote_types(layer.weight.dtype, torch.float32)


def _possible_layers(model: Llama) -> dict[str, nn.Linear]:
    """Return the layers that can have a bank, by name."""
    # A bank gives a layer another class, so the layer must have the forward pass of a plain one. No
    # adapter changes a weight that several layers share (`monograph.graph.lora_targets`).
    shared = {name for names in shared_parameters(model).values() for name in names}
    return {
        name: layer
        for name, layer in linear_layers(model).items()
        if type(layer) in (Linear, nn.Linear) and f"{name}.weight" not in shared
    }


def _require_possible(adapter: StoredAdapter, possible: Iterable[str]) -> None:
    impossible = [name for name in adapter.factors if name not in possible]
    if impossible:
        raise InputRefused(
            f"{adapter.place}: target_modules has {impossible[0]}, whose adapter can only be merged: {MERGE}"
        )


@contextmanager
def rows_with_adapters(bank: AdapterBank | None, slot_B: Tensor) -> Iterator[None]:
    """In the `with` block, each row of a pass of the model has the adapter in its slot of the bank.

    Args:
        bank: the model's bank; None: the model has none, and nothing happens.
        slot_B: the slot of each row, int64.
    """
    if bank is None:
        yield
        return
    bank.slot_B = slot_B
    try:
        yield
    finally:
        bank.slot_B = None


def bank_of(model: nn.Module) -> AdapterBank | None:
    """Return a model's bank, or None if it has none."""
    for module in model.modules():
        if isinstance(module, BankedLinear):
            return module.bank
    return None
