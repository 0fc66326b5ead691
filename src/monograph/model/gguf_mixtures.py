"""Give mixtures of experts the names and sizes that llama.cpp reads.

`monograph.model.gguf` writes a file, and calls the functions here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.mixer import USE_HF

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's names of the parts of a mixture of experts, by their names in a block.
ROUTER = "ffn_gate_inp"
SHARED_GATE = "ffn_gate_inp_shexp"
EXPERT_NAMES = {
    "mlp.gate": ROUTER,
    "mlp.router": ROUTER,
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": SHARED_GATE,
}


def check_experts(config: LlamaConfig, norm_topk_prob: bool) -> None:
    """Refuse mixtures that llama.cpp computes differently or does not load.

    Args:
        config: the model's configuration.
        norm_topk_prob: whether llama.cpp divides the weights of a token's experts by their sum.

    Raises:
        InputRefused: the configuration has such mixtures.
    """
    if not config.family.expert_width_key:
        return
    # The values with which llama.cpp computes the family, whatever the configuration says.
    computed = {
        "norm_topk_prob": norm_topk_prob,
        "mlp_only_layers": (),
        "clip_qkv": None,
    }
    if config.family.expert_bias:
        computed["attention_bias"] = True
    if config.family.head_dim_is_derived:
        computed["num_key_value_heads"] = config.num_attention_heads
    for key, computed_value in computed.items():
        value = getattr(config, key)
        if value != computed_value:
            raise InputRefused(
                f"{key} = {value}: llama.cpp computes {config.model_type} with {computed_value}{USE_HF}"
            )


def add_expert_sizes(writer: GGUFWriter, config: LlamaConfig) -> None:
    """Add to a file how many experts there are, how many compute a token, and how wide they are."""
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, config.family.expert_width_key))
    if config.shared_expert_intermediate_size:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
