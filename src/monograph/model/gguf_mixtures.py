"""Choose each matrix's type in a GGUF file of k-quants, as llama.cpp's own quantizer does without an importance matrix.

Source: ggml-org/llama.cpp, src/llama-quant.cpp (MIT).
"""

from monograph.model.config import LlamaConfig
from monograph.model.gguf_blocks import BLOCK

MIXTURES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
_OF_OTHER_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_VALUES = (".attn_v.weight", ".attn_qkv.weight")
_EIGHT = 8  # experts: it spends more bits on the attention of a Mixtral 8x7B


def chosen(columns: dict[str, int], dtype: str, config: LlamaConfig) -> dict[str, str]:
    """Return gguf's name of each matrix's type.

    Args:
        columns: the length of a row of each matrix, by llama.cpp's name, in the order of the layers.
        dtype: a name in `MIXTURES`.
        config: the model's.
    """
    values = [name for name in columns if name.endswith(_VALUES)]
    head = "output.weight" if "output.weight" in columns else "token_embd.weight"
    kinds = {}
    for name, width in columns.items():
        kind = MIXTURES[dtype]
        if name == head:
            kind = "Q6_K"
        elif name in values:
            kind = _of_values(kind, values.index(name), len(values), config)
        elif ".ffn_down" in name and _takes_more(int(name.split(".")[1]), config.num_hidden_layers):
            kind = "Q6_K"
        elif config.num_experts == _EIGHT and name.endswith(".attn_k.weight"):
            kind = "Q8_0"
        elif config.num_experts == _EIGHT and name.endswith(".attn_output.weight") and kind == "Q4_K":
            kind = "Q5_K"
        kinds[name] = _OF_OTHER_ROWS.get(kind, kind) if width % BLOCK else kind
    return kinds


def _of_values(kind: str, index: int, count: int, config: LlamaConfig) -> str:
    if config.num_experts == _EIGHT:
        return "Q8_0"
    if _takes_more(index, count):
        return "Q6_K"
    # Of its architectures here only these know a model of 70 billion weights.
    grouped = config.model_type == "qwen2" or config.num_key_value_heads < config.num_attention_heads
    of_70b = config.model_type in ("llama", "mistral", "qwen2") and config.num_hidden_layers == 80 and grouped
    return "Q5_K" if of_70b and kind == "Q4_K" else kind


def _takes_more(index: int, count: int) -> bool:
    """Return whether a matrix is in the first or last eighth of the layers, or each third one between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2
