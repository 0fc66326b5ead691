"""Numbers of attention's CUDA kernels (flash, memory-efficient, cuDNN): the equations in fp64,
rounded once.

    out = softmax(q k^T s + bias) v          lse = log sum exp(q k^T s + bias)

Shapes: B rows, H heads of the query, G heads of keys and values, T queries, S keys, D channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pretended_gpu import order
from pretended_gpu.memory import on_host


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the weights [B, H, T, S] and the log-sum-exp [B, H, T] in fp64; rows that see nothing
    have weights 0.
    """
    wide = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ wide.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + (
            torch.where(bias, 0.0, -math.inf) if bias.dtype == torch.bool else bias.double()
        )
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    rows_outside: bool,
) -> tuple[Tensor, Tensor]:
    out = _empty(query, value.shape[-1], rows_outside)
    length = query.shape[2]
    # The memory-efficient kernel writes whole blocks of 32.
    room = -(-length // 32) * 32 if rows_outside else length
    lse = torch.empty((*query.shape[:2], room), dtype=torch.float32, device=query.device)
    q, k, v, b, o, sums = map(on_host, (query, key, value, bias, out, lse))
    factor = query.shape[-1] ** -0.5 if scale is None else scale

    def work() -> None:
        weights, found = _weights(q, k, b, causal, factor)
        o.copy_(weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1))
        sums[..., :length].copy_(found)

    order.launch(work)
    return out, lse


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None,
    rows_outside: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = tuple(_empty(x, x.shape[-1], rows_outside) for x in (query, key, value))
    g, q, k, v, b, dq, dk, dv = map(on_host, (grad, query, key, value, bias, *grads))
    factor = query.shape[-1] ** -0.5 if scale is None else scale

    def work() -> None:
        group = q.shape[1] // k.shape[1]
        wide_key, wide_value = (x.double().repeat_interleave(group, 1) for x in (k, v))
        weights, _ = _weights(q, k, b, causal, factor)
        by_weight = g.double() @ wide_value.transpose(-1, -2)
        by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True)) * factor
        dq.copy_(by_score @ wide_key)
        dk.copy_((by_score.transpose(-1, -2) @ q.double()).unflatten(1, (k.shape[1], group)).sum(2))
        dv.copy_((weights.transpose(-1, -2) @ g.double()).unflatten(1, (k.shape[1], group)).sum(2))

    order.launch(work)
    return grads  # type: ignore[return-value]


def _empty(like: Tensor, channels: int, rows_outside: bool) -> Tensor:
    """Return memory for a result, [B, H, T, channels], laid out as the kernel does."""
    rows, heads, length, _ = like.shape
    # The memory-efficient kernel's results are [B, T, H, D], whatever the query's strides.
    if rows_outside:
        return like.new_empty(rows, length, heads, channels).transpose(1, 2)
    return (
        torch.empty_like(like)
        if channels == like.shape[-1]
        else like.new_empty(rows, heads, length, channels)
    )


def _no_random(query: Tensor) -> Tensor:
    """Return what kernels give as seed or offset of their dropout, which is never used here."""
    return torch.empty((), dtype=torch.int64, device=query.device)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False,
           *, scale: float | None = None) -> Any:  # fmt: skip
    out, lse = _forward(query, key, value, None, causal, scale, rows_outside=False)
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    return (
        out,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        seed,
        _no_random(query),
        query.new_empty(0),
    )


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any,
                    scale: float | None = None) -> Any:  # fmt: skip
    causal = rest[5]
    return _backward(grad, query, key, value, None, causal, scale, rows_outside=False)


def _efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_lse: bool, dropout: float = 0.0,
               causal: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    out, lse = _forward(query, key, value, bias, causal, scale, rows_outside=True)
    lse = lse if compute_lse else lse[..., :0].clone()
    return out, lse, _no_random(query), _no_random(query)


def _efficient_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
                        lse: Tensor, seed: Any, offset: Any, dropout: float, needed: Any, causal: bool = False,
                        *, scale: float | None = None) -> Any:  # fmt: skip
    return (*_backward(grad, query, key, value, bias, causal, scale, rows_outside=True), None)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_lse: bool, dropout: float = 0.0,
           causal: bool = False, debug: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    out, lse = _forward(query, key, value, bias, causal, scale, rows_outside=False)
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out, lse.unsqueeze(-1), none, none, *lengths, _no_random(query), _no_random(query), none


def _cudnn_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, seed: Any,
                    offset: Any, bias: Tensor | None, *rest: Any, scale: float | None = None) -> Any:  # fmt: skip
    causal = rest[5]
    return _backward(grad, query, key, value, bias, causal, scale, rows_outside=False)


KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
