"""Peak memory of a training step in closed form: microseconds, for a search; `footprint` has the verdict.

static     = P (bytes of weights + 4 gradients + bytes of optimizer state)
stored     = L times numbers per token and layer, times bytes of a number        (`stored_numbers`)
head       = logits of a chunk and their gradient, the head's gradient twice, the hidden states' gradient
peak       = static + max(stored + head,  stored + one block's work,  new gradients where a graph returns them,
                          an eager update's intermediates)
"""

from __future__ import annotations

from monograph.measure.footprint import ON_THEIR_WAY, Work
from monograph.ops.cross_entropy import chunk_count

# Of a parameter: AdamW keeps two moments; Muon one of a matrix in a block, and of the rest, an eighth, two.
MOMENTS = {"adamw": 2, "muon": 1.125}
STATE_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256, "all-bf16": 2}
EAGER_TEMPORARIES = 7  # copies of the largest plane that an update has alive at once


def stored_numbers(work: Work, remat: str) -> float:
    """What a block keeps for its backward pass, in numbers of the compute dtype per token, its input included.

    With r = key-value width and q = query width over d, phi = d_ff / d: captured d (4 + 2q + 2r + 3 phi), which is the
    closed form of a Llama block with fused elementwise code; eager what each operation keeps, d (7 + 2q + 2r + 4 phi),
    and in bf16 the norms' fp32 copies, d more each three times. Recomputed: the input, d; 0 if that is on the host.
    """
    config = work.config
    width = config.hidden_size
    if remat != "none":
        return width if remat == "full" else 0
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    if work.compile != "none":
        return 4 * width + 2 * query + 2 * key_value + 3 * config.intermediate_size
    wide = 4 * width if work.precision != "fp32" else 0
    return 7 * width + 2 * query + 2 * key_value + 4 * config.intermediate_size + wide


def estimate_bytes(work: Work, optimizer: str, ema: bool = False) -> int:
    """The closed form above, for a device of `work.device_type`."""
    config, number = work.config, 4 if work.precision == "fp32" else 2
    parameters, tokens = config.parameter_count(), work.rows * work.length
    rule, _, state = optimizer.partition(":")
    weight = 2 if state == "all-bf16" else 4
    static = parameters * (weight + 4 + MOMENTS[rule] * STATE_BYTES[state or "fp32"] + weight * ema)
    stored = config.num_hidden_layers * stored_numbers(work, work.remat) * number * tokens
    if work.remat == "offload":
        stored = ON_THEIR_WAY * config.hidden_size * number * tokens
    block = stored_numbers(work, "none") * number * tokens
    head = config.vocab_size * config.hidden_size
    logits = tokens / chunk_count(tokens, config.vocab_size, work.device_type) * config.vocab_size * (4 + number)
    loss = logits + 8 * head + 2 * tokens * config.hidden_size * number
    if work.compile == "none":
        after = EAGER_TEMPORARIES * 4 * parameters
    else:
        after = 4 * (parameters if work.compile == "whole" else head)
    return int(static + max(stored + max(loss, 2 * block), after))
