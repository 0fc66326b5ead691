"""Count floating-point operations per trained token from a model's shape, and their share of a device's peak."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig


def matmul_parameters(config: LlamaConfig) -> int:
    """Count the parameters that every token is multiplied with: all matrices of the blocks and the head, tied or not.

        N_matmul = L · (2·d·d_q + 2·d·d_kv + 3·d·d_ff) + V·d,     d_q = heads · head_dim,   d_kv = kv_heads · head_dim

    The input embedding is a lookup, norms and biases are elementwise, so none is counted. Unit: parameters.
    """
    block = sum(math.prod(shape) for shape in config.layer_shapes().values() if len(shape) == 2)
    return config.num_hidden_layers * block + config.vocab_size * config.hidden_size


def training_flops(matmul_parameters: int, layers: int, attention_width: int, sequence_length: int) -> int:
    """Count the FLOPs of a token's forward and backward pass in any decoder with causal attention over whole rows.

        6 · N_matmul + 6 · L · d_attn · T

    A multiply-add is 2 operations; the backward pass costs twice the forward pass, hence 6 per parameter (Kaplan et al.
    2020, arXiv 2001.08361, section 2.1). Scores and mixing cost 4·d_attn per visible position forward, 12·d_attn with
    the backward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), and causal attention sees T/2 on average.
    `attention_width` is heads · head_dim. Left out: softmax, norms, rotary embedding, activation functions, loss and
    optimizer (elementwise), recomputation (it is not work of the model), and the shorter attention of packed documents.
    Non-causal counts, 12·L·d_attn·T, give a higher figure for the same run: compare only like with like.
    """
    return 6 * matmul_parameters + 6 * layers * attention_width * sequence_length


def flops_per_token(config: LlamaConfig, sequence_length: int, adapter_parameters: int = 0) -> int:
    """Return `training_flops` of `config` on rows of `sequence_length` tokens. Unit: FLOPs per token.

    With adapters of A parameters next to frozen weights, 4 · N_matmul + 6 · A replaces 6 · N_matmul: the gradient of a
    weight costs as much as the forward pass, and a frozen weight has none.

    A layer with an attention window w < T sees w · (1 - w / 2T) positions on average, as many as causal attention over
    rows of w · (2 - w / T) tokens. This length, rounded down, counts for the layer instead of T.
    """
    windows = [
        min(config.window(layer) or sequence_length, sequence_length) for layer in range(config.num_hidden_layers)
    ]
    lengths = sum(w * (2 * sequence_length - w) // sequence_length for w in windows)  # over all layers
    width, matrices = config.num_attention_heads * config.head_dim, matmul_parameters(config)
    not_computed = 2 * matrices - 6 * adapter_parameters if adapter_parameters else 0
    return training_flops(matrices, 1, width, lengths) - not_computed


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation, tokens_per_s · flops_per_token / peak_flops: a fraction, not per cent.

    State which `peak_flops` was used: a datasheet's (`device.Device.peak_flops`) or a measured one
    (`device.measured_matmul_flops`). Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return tokens_per_s * flops_per_token / peak_flops
