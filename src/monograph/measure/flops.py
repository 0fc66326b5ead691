"""Floating-point operations per trained token, from a model's shape, and the share of a device's peak they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig


def matmul_parameters(config: LlamaConfig) -> int:
    """Parameters that every token is multiplied with: all matrices of the blocks and the head, tied or not.

        N_matmul = L · (2·d·d_q + 2·d·d_kv + 3·d·d_ff) + V·d,     d_q = heads · head_dim,   d_kv = kv_heads · head_dim

    The input embedding is a lookup and norms are elementwise, so neither is counted. Unit: parameters.
    """
    width = config.hidden_size
    query_width = config.num_attention_heads * config.head_dim
    key_value_width = config.num_key_value_heads * config.head_dim
    block = 2 * width * query_width + 2 * width * key_value_width + 3 * width * config.intermediate_size
    return config.num_hidden_layers * block + config.vocab_size * width


def training_flops(matmul_parameters: int, layers: int, attention_width: int, sequence_length: int) -> int:
    """Operations of one token's forward and backward pass in any decoder with causal attention over whole rows.

        6 · N_matmul + 6 · L · d_attn · T

    A multiply-add is 2 operations; the backward pass costs twice the forward pass, hence 6 per parameter (Kaplan et al.
    2020, arXiv 2001.08361, section 2.1). Scores and mixing cost 4·d_attn per visible position forward, 12·d_attn with
    the backward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), and causal attention sees T/2 on average.
    `attention_width` is heads · head_dim. Left out: softmax, norms, rotary embedding, activation functions, loss and
    optimizer (elementwise), recomputation (it is not work of the model), and the shorter attention of packed documents.
    Non-causal counts, 12·L·d_attn·T, give a higher figure for the same run: compare only like with like.
    """
    return 6 * matmul_parameters + 6 * layers * attention_width * sequence_length


def flops_per_token(config: LlamaConfig, sequence_length: int) -> int:
    """`training_flops` of a Llama-shaped `config` on rows of `sequence_length` tokens. Unit: operations per token."""
    attention_width = config.num_attention_heads * config.head_dim
    return training_flops(matmul_parameters(config), config.num_hidden_layers, attention_width, sequence_length)


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilisation, tokens_per_s · flops_per_token / peak_flops: a fraction, not per cent.

    State which `peak_flops` it is of: a datasheet's (`device.Device.peak_flops`) or a measured one
    (`device.measured_matmul_flops`). Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return tokens_per_s * flops_per_token / peak_flops
