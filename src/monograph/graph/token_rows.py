"""Train the rows of a few tokens as a separate parameter of a frozen embedding and a frozen head.

PEFT calls them trainable tokens. A model that reads a token needs the token's row of the embedding;
one that writes it needs the token's row of the head. So there are two such parameters, or one if
embedding and head are tied.

Shapes: V tokens in the vocabulary, D channels, K tokens trained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.inspect import head_of
from monograph.graph.mmap_weights import kept_dtype, replace_data
from monograph.ops.token_rows import (
    ReplacementRows,
    embedding_with_rows,
    linear_with_rows,
    with_replaced_rows,
)

ROWS = "token_rows"  # the parameter's name, next to `weight`


class TableWithRows(nn.Module):
    """Base class of layers with a frozen table of which K rows are trained.

    Attributes:
        weight: [V, D], the frozen table.
        token_rows: [K, D], the trained rows.
        token_index: [K] int64, the position of each trained row in the table.
        token_slots: [V] int64, the index of each token's row in `token_rows`; -1 if it has none.
    """

    weight: Tensor
    token_rows: Tensor
    token_index: Tensor
    token_slots: Tensor

    @property
    def rows(self) -> ReplacementRows:
        """Return the trained rows and their positions in the table."""
        return ReplacementRows(self.token_rows, self.token_index, self.token_slots)


class TokenEmbedding(TableWithRows, nn.Embedding):
    """An embedding with trained rows; `add_trained_rows` gives embeddings this class."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ids [...] to [..., D]; see `monograph.ops.token_rows.embedding_with_rows`."""
        rows = self.rows
        # Looking up the padding gives its row no gradient, as in PEFT.
        if self.padding_idx is not None:
            padding_K1 = (rows.index_K == self.padding_idx).unsqueeze(-1)
            rows = rows._replace(
                values_KD=torch.where(padding_K1, rows.values_KD.detach(), rows.values_KD)
            )
        return embedding_with_rows(input, self.weight, rows)


class TokenHead(TableWithRows, nn.Linear):
    """A head with trained rows; `add_trained_rows` gives heads this class."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., D] to [..., V]; see `monograph.ops.token_rows.linear_with_rows`."""
        # This adds the rows' difference to the table's logits, so all other rows keep their bits, and
        # the table is not copied.
        return linear_with_rows(input, self.weight, self.rows, self.bias)


def add_trained_rows(
    module: nn.Module, tokens: Sequence[int], dtype: torch.dtype | None = None
) -> None:
    """Make the rows of tokens a parameter of the embedding and of the head, in place.

    The initial values are those of the table, so the module computes the same bits as before.

    Args:
        module: has one embedding or `get_input_embeddings()`, and a head as `lm_head` or
            `get_output_embeddings()`.
        tokens: distinct ids.
        dtype: dtype of the rows; None: fp32, or the table's dtype if that is wider.

    Raises:
        UsageError: there are no such layers, they are of another kind, or an id has no row in them.
            Nothing is changed then.
    """
    embedding = _embedding(module)
    head = head_of(module)
    for layer, expected, role in (
        (embedding, nn.Embedding, "embedding"),
        (head, nn.Linear, "head"),
    ):
        if getattr(type(layer), "forward", None) is not expected.forward:
            kind = "none that can be found" if layer is None else f"a {type(layer).__name__}"
            raise UsageError(
                f"lora.tokens: rows can be trained only if the {role} is an nn.{expected.__name__}, but "
                f"{type(module).__name__} has {kind}: give it get_input_embeddings() and get_output_embeddings()"
            )
    for layer in (embedding, head):
        rows = layer.weight.shape[0]
        for token in tokens:
            if not 0 <= token < rows:
                raise UsageError(
                    f"lora.tokens: id {token} has no row in a table of {rows}: it needs its tokenizer.json"
                )
    are_tied = head.weight is embedding.weight
    _put_rows_into(embedding, TokenEmbedding, tokens, dtype)
    _put_rows_into(head, TokenHead, tokens, dtype)
    if are_tied:
        head.token_rows = embedding.token_rows


def _embedding(module: nn.Module) -> Any:
    """Return the module's embedding of tokens, or None if it is not found."""
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    if embedding is not None:
        return embedding
    embeddings = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    return embeddings[0] if len(embeddings) == 1 else None


@torch.no_grad()
def _put_rows_into(
    layer: nn.Module,
    layer_class: type[TableWithRows],
    tokens: Sequence[int],
    dtype: torch.dtype | None,
) -> None:
    """Give a layer its trained rows; the arguments are those of `add_trained_rows`."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    index = torch.tensor(tokens, dtype=torch.int64, device=weight.device)
    slots = torch.full((weight.shape[0],), -1, device=weight.device)
    slots.index_copy_(0, index, torch.arange(len(tokens), device=weight.device))
    layer.__class__ = layer_class
    rows_dtype = dtype or torch.promote_types(kept_dtype(weight), torch.float32)
    layer.token_rows = nn.Parameter(weight.detach()[index].to(rows_dtype))
    # Not part of checkpoints, because the options name the tokens.
    layer.register_buffer("token_index", index, persistent=False)
    layer.register_buffer("token_slots", slots, persistent=False)


def tables_with_rows(module: nn.Module) -> dict[str, TableWithRows]:
    """Return the layers with trained rows by name. If embedding and head share their rows, only the
    first of them is returned.
    """
    first_by_rows: dict[int, tuple[str, TableWithRows]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, TableWithRows):
            first_by_rows.setdefault(id(layer.token_rows), (name, layer))
    return dict(first_by_rows.values())


def trained_rows(layer: nn.Module) -> ReplacementRows | None:
    """Return the trained rows of a layer, or None."""
    return layer.rows if isinstance(layer, TableWithRows) else None


@torch.no_grad()
def merge_rows(module: nn.Module) -> None:
    """Write the rows into their tables, rounded once to the tables' dtype.

    The layers become plain embeddings and linear layers again.
    """
    layers = [child for child in module.modules() if isinstance(child, TableWithRows)]
    for layer in layers:
        table = layer.weight.detach().to(kept_dtype(layer.weight))
        replace_data(layer.weight, with_replaced_rows(table, layer.rows))
        for name in (ROWS, "token_index", "token_slots"):
            delattr(layer, name)
        layer.__class__ = nn.Embedding if isinstance(layer, TokenEmbedding) else nn.Linear  # type: ignore[assignment]
