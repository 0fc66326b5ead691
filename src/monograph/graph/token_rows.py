"""Train the rows of a few tokens as a separate parameter of an embedding and a head that are frozen.

PEFT calls them trainable tokens. An embedding and a head that are one matrix have one such parameter, else two: a token
that is written needs its row of the head as much as one that is read needs its row of the embedding.

Shapes: V tokens, D their size, K of them trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.inspect import head_of
from monograph.graph.mmap_weights import keep, kept_dtype
from monograph.ops.token_rows import Rows, embedding, linear, replaced

ROWS = "token_rows"  # the parameter's name, next to `weight`


class Table(nn.Module):
    """Base class of layers with a frozen `weight` [V, D], K rows of which are trained in `token_rows` [K, D]."""

    weight: Tensor
    token_rows: Tensor
    token_index: Tensor
    token_slots: Tensor

    @property
    def rows(self) -> Rows:
        """Return the trained rows and where they stand."""
        return Rows(self.token_rows, self.token_index, self.token_slots)


class TokenEmbedding(Table, nn.Embedding):
    """An embedding some rows of which are trained; `put_rows` gives an embedding this class."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ids [...] to [..., D]; see `monograph.ops.token_rows.embedding`."""
        rows = self.rows
        if self.padding_idx is not None:  # its row learns nothing from being looked up, as in PEFT
            padding_K1 = (rows.index_K == self.padding_idx).unsqueeze(-1)
            rows = rows._replace(values_KD=torch.where(padding_K1, rows.values_KD.detach(), rows.values_KD))
        return embedding(input, self.weight, rows)


class TokenHead(Table, nn.Linear):
    """A head some rows of which are trained; `put_rows` gives a head this class."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., D] to [..., V]; see `monograph.ops.token_rows.linear`."""
        # The rows' difference is added to the table's own logits: untouched rows keep their bits, no table is copied.
        return linear(input, self.weight, self.rows, self.bias)


def put_rows(module: nn.Module, tokens: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Give the rows of tokens a parameter, in place; they begin as the module's own, so that no bit changes.

    Args:
        module: has one embedding, or names it by `get_input_embeddings()`, and has its head as `lm_head` or names it by
            `get_output_embeddings()`.
        tokens: ids, each once.
        dtype: of the rows; None: the table's, but fp32 where that has fewer bits.

    Raises:
        UsageError: there are no such layers, they are of another kind, or an id has no row in them.
    """
    embedding, head = _embedding(module), head_of(module)
    wanted: list[tuple[Any, type[nn.Module], str]]
    wanted = [(embedding, nn.Embedding, "an embedding"), (head, nn.Linear, "a head")]
    for layer, plain, what in wanted:
        if getattr(type(layer), "forward", None) is not plain.forward:
            kind = "none that can be told" if layer is None else f"a {type(layer).__name__}"
            raise UsageError(
                f"lora.tokens: rows of {what} are trained of an nn.{plain.__name__}, and {type(module).__name__} has "
                f"{kind}: give it get_input_embeddings() and get_output_embeddings()"
            )
    for layer in (embedding, head):
        if beyond := [token for token in tokens if not 0 <= token < layer.weight.shape[0]]:
            rows = layer.weight.shape[0]
            raise UsageError(
                f"lora.tokens: id {beyond[0]} has no row in a table of {rows}: it needs its tokenizer.json"
            )
    # Nothing is changed before everything has been looked at.
    tied = head.weight is embedding.weight
    _put(embedding, TokenEmbedding, tokens, dtype)
    _put(head, TokenHead, tokens, dtype)
    if tied:
        head.token_rows = embedding.token_rows  # two parameters would tear one matrix apart


def _embedding(module: nn.Module) -> Any:
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    if embedding is not None:
        return embedding
    there = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    return there[0] if len(there) == 1 else None


@torch.no_grad()
def _put(layer: nn.Module, kind: type[Table], tokens: Sequence[int], dtype: torch.dtype | None) -> None:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    index = torch.tensor(tokens, dtype=torch.int64, device=weight.device)
    slots = torch.full((weight.shape[0],), -1, device=weight.device)
    slots.index_copy_(0, index, torch.arange(len(tokens), device=weight.device))
    layer.__class__ = kind
    wide = dtype or torch.promote_types(kept_dtype(weight), torch.float32)
    layer.token_rows = nn.Parameter(weight.detach()[index].to(wide))
    # No checkpoint holds these: the options name the tokens.
    layer.register_buffer("token_index", index, persistent=False)
    layer.register_buffer("token_slots", slots, persistent=False)


def tables(module: nn.Module) -> dict[str, Table]:
    """Return the layers of a module that have trained rows, by name; of a tied pair only the first."""
    by_rows: dict[int, tuple[str, Table]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, Table):
            by_rows.setdefault(id(layer.token_rows), (name, layer))
    return dict(by_rows.values())


def rows_of(layer: nn.Module) -> Rows | None:
    """Return the trained rows of a layer, None if it has none."""
    return layer.rows if isinstance(layer, Table) else None


@torch.no_grad()
def merge_rows(module: nn.Module) -> None:
    """Write the rows into their tables, in place, rounded once to the tables' dtype; plain layers are left."""
    for layer in [child for child in module.modules() if isinstance(child, Table)]:
        keep(layer.weight, replaced(layer.weight.detach().to(kept_dtype(layer.weight)), layer.rows))
        for name in (ROWS, "token_index", "token_slots"):
            delattr(layer, name)
        layer.__class__ = nn.Embedding if isinstance(layer, TokenEmbedding) else nn.Linear  # type: ignore[assignment]
