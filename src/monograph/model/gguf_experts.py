"""Give mixtures of experts the names and sizes that llama.cpp reads."""

from typing import Any

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
ROUTER, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"
NAMES = {
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
# Whether a token's weights of its experts are divided by their sum.
_DIVIDES = {"qwen3_moe": True, "qwen3_5_moe_text": True, "qwen3_next": True, "olmoe": False, "gpt_oss": True}


def check(config: LlamaConfig, instead: str) -> None:
    """Refuse what llama.cpp computes otherwise, or does not load."""
    if not config.family.experts:
        return
    computed = {"norm_topk_prob": _DIVIDES[config.model_type], "mlp_only_layers": (), "clip_qkv": None}
    if config.family.expert_bias:
        computed["attention_bias"] = True
    if config.family.whole_heads:
        computed["num_key_value_heads"] = config.num_attention_heads
    for key, value in computed.items():
        if getattr(config, key) != value:
            actual = f"{key} = {getattr(config, key)}"
            raise InputRefused(f"{actual}: llama.cpp computes {config.model_type} with {value}{instead}")


def add_sizes(writer: Any, config: LlamaConfig) -> None:
    """Write how many experts there are, how many compute a token, and how wide they are."""
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, config.family.experts))
    if config.shared_expert_intermediate_size:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
