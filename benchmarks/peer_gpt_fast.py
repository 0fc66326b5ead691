"""Generate with gpt-fast, which is no package: the environment variable GPT_FAST names the folder of
its clone.

As its generate.py does, the decode step is compiled with mode="reduce-overhead", the prompt's pass
is not, and attention is decomposed so that Inductor generates its kernels. Its sampler has a
temperature and top-k only, so its draws leave top-p and min-p out. Greedy is its temperature of 0:
logits divided by 1e-5, then a draw, by which equal logits are told apart.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from monograph.model import scaling

if TYPE_CHECKING:
    from generators import Task

    from monograph.model.config import LlamaConfig

NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def gpt_fast(task: Task) -> Callable[[int, bool], list[str]]:
    """Return gpt-fast's `generate`, with its decode step compiled."""
    theirs = their_module("generate")
    model, device = their_model(task), task.model.lm_head.weight.device
    with device:
        model.setup_caches(task.rows, task.slots)
    # Not dynamic: the second temperature would else be a symbol, which their program never has.
    theirs.decode_one_token = torch.compile(
        theirs.decode_one_token, mode="reduce-overhead", fullgraph=True, dynamic=False
    )
    # Theirs is deprecated, and by now it allows cuDNN's attention beside the decomposed one.
    theirs.torch.backends.cuda.sdp_kernel = lambda **_: sdpa_kernel(SDPBackend.MATH)
    ids_T = torch.tensor(task.prompt_ids, dtype=torch.int, device=device)

    def write(tokens: int, greedy: bool) -> list[str]:
        from generators import CHAIN

        torch.manual_seed(0)
        how = {"temperature": CHAIN["temperature"], "top_k": CHAIN["top_k"]}
        if greedy:
            how = {"temperature": 0.0, "top_k": None}
        if tokens == 1:  # `generate` needs a second one
            rows_BT = first_tokens(theirs, model, ids_T, task.rows, how)
        else:
            rows_BT, _ = theirs.generate(
                model, ids_T, tokens, task.rows, interactive=False, draft_model=None, **how
            )
            rows_BT = rows_BT[:, len(ids_T) :]
        assert rows_BT.shape == (task.rows, tokens)
        return [task.tokenizer.decode(row) for row in rows_BT.tolist()]

    return write


@torch.no_grad()
def first_tokens(
    theirs: Any, model: torch.nn.Module, ids_T: Tensor, rows: int, how: dict[str, Any]
) -> Tensor:
    """Return every row's first token, as the beginning of their `generate` draws it."""
    positions_T = torch.arange(len(ids_T), device=ids_T.device)
    found_B1: Tensor = theirs.prefill(model, ids_T.repeat(rows, 1), positions_T, **how)
    return found_B1


def their_module(name: str) -> Any:
    """Import a file of the clone, without the libraries of its tokenizers, which nobody calls."""
    folder = os.environ["GPT_FAST"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    unused: Any = types.ModuleType("tokenizer")
    unused.get_tokenizer = None
    sys.modules.setdefault("tokenizer", unused)
    return importlib.import_module(name)


def their_model(task: Task) -> Any:
    """Return their Transformer with the task's weights; all but the queries' and keys' are shared."""
    config, theirs = task.model.config, their_module("model")
    with torch.device("meta"):
        model = theirs.Transformer(theirs.ModelArgs(**sizes(config)))
    weights = {}
    for name, weight in task.model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, config.head_dim)
        weights[their_name(name)] = weight
    model.load_state_dict(weights, assign=True)
    return model.eval()


def sizes(config: LlamaConfig) -> dict[str, Any]:
    """Return the arguments of their ModelArgs.

    Raises:
        ValueError: their model has no such layer.
    """
    scaled = config.rope_scaling
    has_their_heads = config.head_dim * config.num_attention_heads == config.hidden_size
    has_their_wavelengths = scaled is None or isinstance(scaled, scaling.Llama3Scaling)
    if config.model_type != "llama" or not has_their_heads or not has_their_wavelengths:
        raise ValueError(f"gpt-fast has no such model: {config}")
    return {
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_local_heads": config.num_key_value_heads,
        "dim": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rope_base": config.rope_theta,
        "norm_eps": config.rms_norm_eps,
        "rope_scaling": config.to_hf()["rope_scaling"] if scaled else None,
    }


def their_name(name: str) -> str:
    """Return what they call a weight."""
    if name == "lm_head.weight":
        return "output.weight"
    name = name.removeprefix("model.").replace("embed_tokens", "tok_embeddings")
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head: a pair that is rotated together is (i, i + head_dim / 2) in
    this project and (2i, 2i + 1) in gpt-fast.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)
