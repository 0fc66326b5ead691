"""Many adapters on one base, so that rows of different adapters are decoded by one graph.

Each layer that has a bank holds the matrices of several adapters, one adapter in each slot. The slot of
a row says which adapter the row has; `monograph.decode.banked_layers` has the equations. The weight W of
the base is read once for all rows. Slot 0 is the base: its matrices are zero. An adapter whose rank is
smaller than the bank's is padded with zeros, which add nothing.

Adapters may have magnitudes (DoRA), and rows of the embedding and the head for a few tokens. The bank
has room for these if one of the adapters that it begins with has them.

A slot is written in place, so that a captured graph need not be captured again.

Shapes: S slots, B rows, K inputs, N outputs, R the bank's rank, Q an adapter's rank, C tokens with rows
of their own, D hidden size.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.decode.banked_layers import (
    BANKED,
    Banked,
    BankedEmbedding,
    BankedHead,
    BankOfRows,
)
from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.frozen import FrozenWeight
from monograph.graph.inspect import shared_parameters
from monograph.graph.lora import AdaptedExperts, Lora, adapted_layers
from monograph.graph.lora_targets import linear_layers
from monograph.graph.token_rows import TableWithRows
from monograph.model.llama import Llama
from monograph.ops.row_norms import row_norms

# The name that requests use for the model without an adapter.
BASE = "base"
BASE_SLOT = 0
# The rank of a bank is at least this, unless the user gives another one.
LEAST_RANK = 16
# The remedy for an adapter that a bank cannot hold. If a folder with an adapter is given as the model
# itself, the adapter is merged into the weights.
MERGE = "give this folder in the place of the model"
_BEGIN_WITH_IT = "begin with this adapter"


class AdapterFactors(NamedTuple):
    """The matrices of an adapter for one layer.

    Attributes:
        A_QK: A.
        B_NQ: B.
        magnitude_N: m of DoRA, or None.
    """

    A_QK: Tensor
    B_NQ: Tensor
    magnitude_N: Tensor | None = None


class TokenRows(NamedTuple):
    """An adapter's own rows of the embedding and the head, which replace the base's for a few tokens.

    Attributes:
        ids: the ids of these tokens, C of them.
        embedding_CD: their rows of the embedding.
        head_CD: their rows of the head; those of the embedding if the two are tied.
    """

    ids: tuple[int, ...]
    embedding_CD: Tensor
    head_CD: Tensor


class StoredAdapter(NamedTuple):
    """An adapter that a bank can take.

    Attributes:
        place: the folder that it was read from, for messages.
        rank: Q.
        scale: s, the factor of its output.
        factors: the matrices of each layer that it changes, by the layer's name.
        digest: a hash of the matrices, the scale and the rows of tokens.
        token_rows: its rows of tokens, or None.
    """

    place: str
    rank: int
    scale: float
    factors: Mapping[str, AdapterFactors]
    digest: str
    token_rows: TokenRows | None = None

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is DoRA."""
        return any(each.magnitude_N is not None for each in self.factors.values())

    @property
    def token_count(self) -> int:
        """The number of tokens for which it has rows of its own."""
        return len(self.token_rows.ids) if self.token_rows else 0


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


def stored_adapter(module: Llama, lora: Lora, place: str) -> StoredAdapter:
    """Return the adapters of a model as one that a bank can take; it shares their memory.

    Args:
        module: a model with adapters (`monograph.graph.lora.adapt`); its other weights are not read.
        lora: their options.
        place: the folder that they were read from.

    Raises:
        InputRefused: a layer has experts, whose adapters a bank cannot hold.
    """
    sha256 = hashlib.sha256(f"{lora.scale}".encode())
    factors: dict[str, AdapterFactors] = {}
    for name, layer in sorted(adapted_layers(module).items()):
        if isinstance(layer, AdaptedExperts):
            raise InputRefused(
                f"{place}: target_modules: adapters of experts ({name}) can only be merged: {MERGE}"
            )
        magnitude = layer.lora_magnitude_vector
        factors[name] = AdapterFactors(
            layer.lora_A.weight.detach(),
            layer.lora_B.weight.detach(),
            None if magnitude is None else magnitude.detach(),
        )
        sha256.update(f"{name} {lora.rank} ".encode())
        for factor in factors[name]:
            if factor is not None:
                sha256.update(_bytes_of(factor))
    token_rows = None
    if lora.tokens:
        embedding, head = module.model.embed_tokens, module.lm_head
        assert isinstance(embedding, TableWithRows) and isinstance(head, TableWithRows)
        token_rows = TokenRows(lora.tokens, embedding.token_rows.detach(), head.token_rows.detach())
        sha256.update(f"{lora.tokens} ".encode())
        sha256.update(_bytes_of(token_rows.embedding_CD))
        sha256.update(_bytes_of(token_rows.head_CD))
    return StoredAdapter(place, lora.rank, lora.scale, factors, sha256.hexdigest(), token_rows)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class AdapterBank(BankOfRows):
    """The adapters of a model.

    Attributes:
        capacity: how many adapters it has room for.
        rank: R.
        layers: the layers that have a bank, by name.
        embedding: the embedding, if there is room for rows of tokens; else None.
        head: the head, likewise.
        slots: the slot of each adapter that requests may ask for, by its name.
        has_magnitudes: whether there is room for magnitudes.
        token_count: C, the number of tokens for which an adapter may have rows of its own.
        last_writes: for each slot, the number of the write that filled it, where the writes to all slots
            are counted together; 0: it was never written. What was computed with a slot, such as keys
            and values, is valid as long as this number is the same.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        capacity: int,
        rank: int,
        *,
        has_magnitudes: bool,
        tables: tuple[nn.Embedding, nn.Linear] | None,
        tokens: int,
    ) -> None:
        """Give layers empty banks; `install` checks the arguments.

        Args:
            layers: the linear layers that get a bank, by name.
            capacity: see the attribute.
            rank: see the attribute.
            has_magnitudes: whether there is room for magnitudes.
            tables: the embedding and the head, which get room for rows of tokens; None: they do not.
            tokens: C, see `token_count`.
        """
        self.capacity = capacity
        self.rank = rank
        self.slots: dict[str, int] = {}
        self.last_writes = [0] * (capacity + 1)
        self.layers: dict[str, Banked] = {}
        self.embedding: BankedEmbedding | None = None
        self.head: BankedHead | None = None
        self.token_count = tokens
        self.has_magnitudes = has_magnitudes
        self._digests: dict[int, str] = {}
        self._free = list(range(1, capacity + 1))
        self._writes = 0
        for name, layer in layers.items():
            self.layers[name] = self._banked(layer)
        first = next(iter(self.layers.values()))
        self.scale_S = first.bank_A_SRK.new_zeros(capacity + 1)
        if tables is not None:
            self._add_tables(*tables)

    def _banked(self, layer: nn.Linear) -> Banked:
        """Give a layer an empty bank, in place, by changing its class; return the layer."""
        slots = self.capacity + 1
        dtype = _bank_dtype(layer)
        device = next(layer.parameters()).device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        layer.__class__ = BANKED[type(layer)]
        assert isinstance(layer, Banked)
        layer.bank = self
        gain = zeros(layer.out_features) if self.has_magnitudes else None
        layer.register_buffer("bank_A_SRK", zeros(self.rank, layer.in_features), persistent=False)
        layer.register_buffer("bank_B_SRN", zeros(self.rank, layer.out_features), persistent=False)
        layer.register_buffer("bank_gain_SN", gain, persistent=False)
        return layer

    def _add_tables(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        """Give the embedding and the head room for rows of tokens."""
        slots = self.capacity + 1
        weight = embedding.weight
        # -1 stands for no token.
        self.token_ids_SC = torch.full((slots, self.token_count), -1, device=weight.device)
        shape = (slots, self.token_count, weight.shape[1])
        embedding.__class__ = BankedEmbedding
        head.__class__ = BankedHead
        assert isinstance(embedding, BankedEmbedding) and isinstance(head, BankedHead)
        embedding.bank = self
        head.bank = self
        rows = weight.new_zeros(shape)
        differences = head.weight.new_zeros(shape)
        embedding.register_buffer("bank_rows_SCD", rows, persistent=False)
        head.register_buffer("bank_differences_SCD", differences, persistent=False)
        self.embedding = embedding
        self.head = head

    @property
    def nbytes(self) -> int:
        """The memory that the bank takes."""
        total = 0
        for owner in (*self.layers.values(), self.embedding, self.head):
            if owner is not None:
                buffers = dict(owner.named_buffers(recurse=False))
                total += sum(buffers[name].nbytes for name in buffers if name.startswith("bank_"))
        return total

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
            InputRefused: its rank is too large, it changes a layer that has no bank, or there is no room
                for its magnitudes or its rows of tokens.
        """
        require_rank(adapter.rank, self.rank, adapter.place)
        without_bank = [name for name in adapter.factors if name not in self.layers]
        if without_bank:
            raise InputRefused(
                f"{adapter.place}: target_modules has {without_bank[0]}, which none of the adapters at the start "
                f"changes: {_BEGIN_WITH_IT}"
            )
        if adapter.has_magnitudes and not self.has_magnitudes:
            raise InputRefused(
                f"{adapter.place}: magnitudes (lora.dora, use_dora), which none of the adapters at the start has: "
                f"{_BEGIN_WITH_IT}"
            )
        if adapter.token_count > self.token_count:
            raise InputRefused(
                f"{adapter.place}: {adapter.token_count} trained rows of tokens (lora.tokens, "
                f"trainable_token_indices), and the adapters at the start have at most {self.token_count}: "
                f"{_BEGIN_WITH_IT}"
            )

    def require_free_slot(self) -> None:
        """Refuse another adapter if there is no room for it.

        Raises:
            UsageError: no slot is free.
        """
        if self._free:
            return
        taken_by = list(self.slots)
        retired = self.capacity - len(self.slots)
        if retired:
            taken_by.append(f"{retired} removed, whose requests have not ended")
        raise UsageError(
            f"there is room for {self.capacity} adapters (--adapter-slots), and all of it is taken by "
            f"{', '.join(taken_by)}: remove one first"
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
        self.require_free_slot()
        slot = self._free.pop(0)
        self._write(slot, adapter)
        self._digests[slot] = adapter.digest
        self.slots[name] = slot
        return slot

    def replace(self, name: str, adapter: StoredAdapter) -> None:
        """Overwrite the adapter of this name. No request that uses it may be running.

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
        """Write an adapter's tensors to a slot, with zeros where the adapter has none."""
        self._writes += 1
        self.last_writes[slot] = self._writes
        self.scale_S[slot] = adapter.scale
        for name, layer in self.layers.items():
            A_RK = layer.bank_A_SRK[slot].zero_()
            B_RN = layer.bank_B_SRN[slot].zero_()
            if layer.bank_gain_SN is not None:
                layer.bank_gain_SN[slot].zero_()
            factors = adapter.factors.get(name)
            if factors is None:
                continue
            A_RK[: adapter.rank].copy_(factors.A_QK)
            B_RN[: adapter.rank].copy_(factors.B_NQ.T)
            if factors.magnitude_N is not None:
                assert layer.bank_gain_SN is not None  # `require_fits`
                # The equations are those of `monograph.decode.banked_layers`: g = m / ||W + s B A||.
                gain_N = factors.magnitude_N.to(B_RN) / _norms(layer, A_RK, B_RN, adapter.scale)
                layer.bank_gain_SN[slot].copy_(gain_N - 1)
                B_RN *= gain_N
        self._write_token_rows(slot, adapter.token_rows)

    def _write_token_rows(self, slot: int, rows: TokenRows | None) -> None:
        """Write an adapter's rows of tokens to a slot; None: it has none."""
        if self.token_ids_SC is None or self.embedding is None or self.head is None:
            return
        ids_C = self.token_ids_SC[slot].fill_(-1)
        embedding_CD = self.embedding.bank_rows_SCD[slot].zero_()
        difference_CD = self.head.bank_differences_SCD[slot].zero_()
        if rows is None:
            return
        count = len(rows.ids)
        ids_C[:count] = torch.tensor(rows.ids)
        embedding_CD[:count].copy_(rows.embedding_CD)
        # The row is rounded to the weight's dtype before the subtraction, so the difference is exactly zero
        # if the two rows are equal.
        difference_CD[:count].copy_(rows.head_CD)
        difference_CD[:count] -= self.head.weight[ids_C[:count]]


def _norms(layer: Banked, A_RK: Tensor, B_RN: Tensor, scale: float) -> Tensor:
    """Return ||W + s B A||, the norm of each row."""
    weight_NK = layer.dense() if isinstance(layer, FrozenWeight) else layer.weight
    return row_norms(torch.addmm(weight_NK.to(A_RK.dtype), B_RN.T, A_RK, alpha=scale))


def install(
    model: Llama,
    adapters: Mapping[str, StoredAdapter],
    *,
    capacity: int | None = None,
    rank: int | None = None,
) -> AdapterBank:
    """Give a model a bank with these adapters, in place.

    Layers that none of the adapters changes get no bank. Without any adapter, every linear layer
    gets one, except the head and those of mixtures, and there is room for magnitudes.

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
    tokens = max([0, *(adapter.token_count for adapter in adapters.values())])
    embedding, head = model.model.embed_tokens, model.lm_head
    _require_memory(chosen.values(), capacity, rank, tokens * head.weight[0].nbytes)
    bank = AdapterBank(
        chosen,
        capacity,
        rank,
        has_magnitudes=not adapters or any(each.has_magnitudes for each in adapters.values()),
        tables=(embedding, head) if tokens else None,
        tokens=tokens,
    )
    for name, adapter in adapters.items():
        bank.add(name, adapter)
    return bank


def _require_memory(
    layers: Iterable[nn.Linear], capacity: int, rank: int, token_bytes: int
) -> None:
    """Refuse a bank that would not fit into the free memory.

    Args:
        layers: the layers that get a bank.
        capacity: for how many adapters.
        rank: the bank's rank.
        token_bytes: the bytes of an adapter's rows of tokens, in one of the two tables.
    """
    slot_bytes = 2 * token_bytes
    for layer in layers:
        # Magnitudes are left out: they take less than one rank.
        slot_bytes += rank * (layer.in_features + layer.out_features) * _bank_dtype(layer).itemsize
    bank_bytes = (capacity + 1) * slot_bytes
    free_bytes = describe().free_memory_bytes
    if bank_bytes > free_bytes:
        raise OutOfDeviceMemory(
            f"room for {capacity} adapters of rank {rank} takes {bank_bytes / 2**30:.3g} GiB, and "
            f"{free_bytes / 2**30:.3g} GiB are free: give fewer --adapter-slots, or a smaller --adapter-rank"
        )


def _bank_dtype(layer: nn.Linear) -> torch.dtype:
    """Return the dtype of a layer's bank: its weight's, or fp32 if that has fewer bits."""
    if isinstance(layer, FrozenWeight):
        return torch.float32
    return torch.promote_types(layer.weight.dtype, torch.float32)


def _possible_layers(model: Llama) -> dict[str, nn.Linear]:
    """Return the layers that can have a bank, by name."""
    # A bank replaces a layer's class, and so its forward pass. So only layers of the classes in BANKED can
    # have one. No adapter changes a weight that several layers share (`monograph.graph.lora_targets`).
    shared = {name for names in shared_parameters(model).values() for name in names}
    return {
        name: layer
        for name, layer in linear_layers(model).items()
        if type(layer) in BANKED and f"{name}.weight" not in shared
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
    bank.groups = None
    try:
        yield
    finally:
        bank.slot_B = None


def bank_of(model: nn.Module) -> AdapterBank | None:
    """Return a model's bank, or None if it has none."""
    for module in model.modules():
        if isinstance(module, Banked):
            # `AdapterBank` sets this attribute to itself.
            assert isinstance(module.bank, AdapterBank)
            return module.bank
    return None
