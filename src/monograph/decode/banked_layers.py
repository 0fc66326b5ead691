"""The layers of a model with a bank of adapters (`monograph.decode.adapter_bank`).

In each pass, every row has the adapter in its slot, and slot 0 is the base:

    y = W x + b + (g_i - 1) W x + s_i B'_i A_i x        i = the row's slot

Without magnitudes (DoRA), g_i = 1 and B'_i is the adapter's B. With them, g_i = m / ||W + s B A||, which
is a number for each row of W, and B'_i = g_i B. In the embedding and the head, an adapter may have rows of
its own for a few tokens (`monograph.graph.token_rows`).

In slot 0, the last two terms are zero. Adding them keeps the bits of W x + b except for the sign of a
zero, and no operation of the model makes another number of that.

Shapes: S slots, B rows of the pass, T positions, K inputs, N outputs, R the bank's rank, C tokens with
rows of their own, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.graph import grouped
from monograph.graph.frozen import Int8Linear, NF4Linear
from monograph.graph.matmul import linear
from monograph.model.layers import Linear

# If the bank allows it, products of weights with at least this number of entries are computed in the
# fastest way. For smaller weights, sorting the rows and calling oneDNN takes more time than it saves.
LARGE_WEIGHT = 2**17


class RowGroups(NamedTuple):
    """The rows of a pass, sorted by their slots.

    Attributes:
        order_B: the row at each place.
        place_B: the place of each row.
        ends_S: the place after the last row of each slot, int32.
    """

    order_B: Tensor
    place_B: Tensor
    ends_S: Tensor


class BankOfRows:
    """What all layers of a bank share.

    Attributes:
        slot_B: the slots of the rows of the present pass; None: no row has an adapter.
        groups: the rows by their slots; None: no layer of the present pass has needed them yet.
        scale_S: s of each slot.
        token_ids_SC: for each slot, the ids of the tokens that have rows of their own, padded with -1;
            None: there is no room for such rows.
        has_fast_products: whether products of large weights are computed in the fastest way. If the
            machine's products give a row the same bits in any batch (`monograph.ops.padded_rows`), this
            way does, too, but not the bits of a model without a bank or with a single adapter.
    """

    has_fast_products = False
    slot_B: Tensor | None = None
    groups: RowGroups | None = None
    scale_S: Tensor
    token_ids_SC: Tensor | None = None

    def groups_of(self, slot_B: Tensor) -> RowGroups:
        """Return the rows of the present pass by their slots; computed by its first layer."""
        if self.groups is None:
            counts_S = torch.bincount(slot_B, minlength=len(self.scale_S))
            order_B = slot_B.argsort(stable=True)
            self.groups = RowGroups(order_B, order_B.argsort(), counts_S.cumsum(0).int())
        return self.groups


class Banked(nn.Linear):
    """Base class of linear layers with a bank of adapters.

    Attributes:
        bank: the bank.
        bank_A_SRK: A of each slot.
        bank_B_SRN: the transpose of B' of each slot.
        bank_gain_SN: g - 1 of each slot; None: no adapter has magnitudes.
    """

    bank: BankOfRows
    bank_A_SRK: Tensor
    bank_B_SRN: Tensor
    bank_gain_SN: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, T, K] to [B, T, N], or [B, K] to [B, N], with the adapter of each row."""
        output = self.base_output(input)
        slot_B = self.bank.slot_B
        if slot_B is None:
            return output
        # [B, K] becomes [B, 1, K].
        input_BTK = input.reshape(len(slot_B), -1, self.in_features).to(self.bank_A_SRK.dtype)
        if self._is_fast(input):
            added_BTN = self._added_by_groups(input_BTK, slot_B)
        else:
            low_BTR = torch.bmm(input_BTK, self.bank_A_SRK.index_select(0, slot_B).mT)
            # The factor s comes between A and B, as in the kernels (`monograph.ops.layer_kernels`).
            low_BTR = low_BTR * self.bank.scale_S.index_select(0, slot_B)[:, None, None]
            added_BTN = torch.bmm(low_BTR, self.bank_B_SRN.index_select(0, slot_B))
        if self.bank_gain_SN is not None:
            base = output if self.bias is None else output - self.bias
            gain_B1N = self.bank_gain_SN.index_select(0, slot_B)[:, None]
            added_BTN = added_BTN + gain_B1N * base.reshape(added_BTN.shape)
        # The sum is in the dtype of the adapters, and is rounded once.
        return (output + added_BTN.view(output.shape)).to(output.dtype)

    def base_output(self, input: Tensor) -> Tensor:
        """Return W x + b."""
        return super().forward(input)

    def _is_fast(self, input: Tensor) -> bool:
        """Return whether products are computed in the fastest way: on a CPU, without a graph.

        The answer does not depend on the number of rows, so the bits of a row do not either.
        """
        return (
            self.bank.has_fast_products
            and input.device.type == "cpu"
            and self.in_features * self.out_features >= LARGE_WEIGHT
            and not torch.compiler.is_compiling()
        )

    def _added_by_groups(self, input_BTK: Tensor, slot_B: Tensor) -> Tensor:
        """Return s_i B'_i A_i x of each row, [B, T, N], by one product for all rows of a slot.

        So the matrices of a slot are not copied for each of its rows. P is the rows' positions, one row
        after another, sorted by their slots.
        """
        order_B, place_B, row_ends_S = self.bank.groups_of(slot_B)
        rows, positions, _ = input_BTK.shape
        ends_S = row_ends_S * positions
        sorted_PK = input_BTK.index_select(0, order_B).flatten(0, 1)
        low_PR = grouped.plain_product(sorted_PK, self.bank_A_SRK, ends_S)
        scale_B = self.bank.scale_S.index_select(0, slot_B.index_select(0, order_B))
        low_BTR = low_PR.view(rows, positions, -1) * scale_B[:, None, None]
        added_PN = grouped.plain_product(low_BTR.flatten(0, 1), self.bank_B_SRN.mT, ends_S)
        return added_PN.view(rows, positions, -1).index_select(0, place_B)


class BankedLinear(Banked):
    """A linear layer with a bank of adapters."""

    def base_output(self, input: Tensor) -> Tensor:
        """Return W x + b, by the faster library if the bank allows it."""
        if self._is_fast(input):
            return linear(input, self.weight, self.bias)
        return super().base_output(input)


class BankedInt8Linear(Banked, Int8Linear):
    """An `Int8Linear` with a bank of adapters."""


class BankedNF4Linear(Banked, NF4Linear):
    """An `NF4Linear` with a bank of adapters."""


# The class that a layer gets with its bank, by the class that it has. Other layers can have none.
BANKED: dict[type[nn.Module], type[Banked]] = {
    Linear: BankedLinear,
    nn.Linear: BankedLinear,  # a layer whose adapter was merged
    Int8Linear: BankedInt8Linear,
    NF4Linear: BankedNF4Linear,
}


class BankedEmbedding(nn.Embedding):
    """An embedding with rows of their own for a few tokens of each adapter.

    Attributes:
        bank: the bank.
        bank_rows_SCD: the rows of each slot, for the tokens `bank.token_ids_SC`.
    """

    bank: BankOfRows
    bank_rows_SCD: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Map ids [B, T] to [B, T, D], or [B] to [B, D], with the rows of each row's adapter."""
        embedded = super().forward(input)
        slot_B = self.bank.slot_B
        if slot_B is None:
            return embedded
        token_ids_SC = self.bank.token_ids_SC
        assert token_ids_SC is not None  # the bank has tables
        ids_BC = token_ids_SC.index_select(0, slot_B)
        # No id is -1, which stands for no token.
        is_token_BTC = input.reshape(len(slot_B), -1, 1) == ids_BC[:, None]
        place_BT1 = is_token_BTC.long().argmax(-1, keepdim=True)
        rows_BCD = self.bank_rows_SCD.index_select(0, slot_B)
        own_BTD = rows_BCD.gather(1, place_BT1.expand(-1, -1, self.embedding_dim))
        has_own_BT1 = is_token_BTC.any(-1, keepdim=True)
        table_BTD = embedded.view(own_BTD.shape)
        return torch.where(has_own_BT1, own_BTD, table_BTD).view(embedded.shape)


class BankedHead(Linear):
    """A head with rows of their own for a few tokens of each adapter.

    Attributes:
        bank: the bank.
        bank_differences_SCD: the rows of each slot minus those of the weight, for the tokens
            `bank.token_ids_SC`; 0 where there is no token.
    """

    bank: BankOfRows
    bank_differences_SCD: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, V], or [B, D] to [B, V], with the rows of each row's adapter."""
        return self.with_own_rows(super().forward(input), input)

    def with_own_rows(self, logits: Tensor, input: Tensor) -> Tensor:
        """Return the logits of the weight with those of the adapters' own rows in their place.

        As in `monograph.ops.token_rows.linear_with_rows`, the difference of two rows is multiplied, so
        the logits of all other tokens keep their bits.
        """
        slot_B = self.bank.slot_B
        if slot_B is None:
            return logits
        token_ids_SC = self.bank.token_ids_SC
        assert token_ids_SC is not None  # the bank has tables
        input_BTD = input.reshape(len(slot_B), -1, self.in_features)
        differences_BCD = self.bank_differences_SCD.index_select(0, slot_B)
        added_BTC = torch.bmm(input_BTD, differences_BCD.mT)
        # Where there is no token, zero is added to the logit of token 0.
        index_BTC = token_ids_SC.index_select(0, slot_B).clamp_min(0)[:, None].expand_as(added_BTC)
        logits_BTV = logits.view(*added_BTC.shape[:2], -1)
        return logits_BTV.scatter_add(-1, index_BTC, added_BTC.to(logits.dtype)).view(logits.shape)
