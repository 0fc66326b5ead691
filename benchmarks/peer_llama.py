"""llama.cpp by its wheel `xllamacpp`: the model as a GGUF file, its server in this process, a slot for each row."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generators import Task

ORDER = ["temperature", "top_k", "top_p", "min_p"]


def llama_cpp(task: Task) -> Callable[[int, bool], list[str]]:
    """llama.cpp with its samplers on the host."""
    return _llama_cpp(task, backend_sampling=False)


def llama_cpp_backend(task: Task) -> Callable[[int, bool], list[str]]:
    """llama.cpp with its samplers inside the graph (`--backend-sampling`)."""
    return _llama_cpp(task, backend_sampling=True)


def _llama_cpp(task: Task, backend_sampling: bool) -> Callable[[int, bool], list[str]]:
    import xllamacpp
    from generators import CHAIN

    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "model.gguf")
    write_gguf(task, path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = task.rows, task.rows * -(-task.slots // 256) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # the others' keys are fp32 too
    params.sampling.backend_sampling, params.verbosity = backend_sampling, 0
    server = xllamacpp.Server(params)
    folder.cleanup()  # the file is mapped

    def one(tokens: int, greedy: bool, row: int) -> str:
        asked: dict[str, Any] = {"prompt": task.prompt_ids, "max_tokens": tokens, "seed": row, "cache_prompt": False}
        # One candidate is left by a temperature of 0, and llama.cpp aborts where a backend's top-k gets fewer than k.
        asked |= {"samplers": ORDER[:1], "temperature": 0.0} if greedy else {"samplers": ORDER, **CHAIN}
        answer = server.handle_completions(asked)
        assert answer["usage"]["completion_tokens"] == tokens, json.dumps(answer)[:300]
        return str(answer["choices"][0]["text"])

    def write(tokens: int, greedy: bool) -> list[str]:
        with ThreadPoolExecutor(task.rows) as pool:
            return list(pool.map(lambda row: one(tokens, greedy, row), range(task.rows)))

    return write


def write_gguf(task: Task, path: Path) -> None:
    """The task's model and tokenizer in fp32, as llama.cpp reads a Llama."""
    import gguf

    config, tokenizer = task.model.config, task.tokenizer
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    content = json.loads(tokenizer.to_json())
    entries = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    kinds = dict.fromkeys(tokenizer.special, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(entries)
    writer.add_token_types([kinds.get(entry, gguf.TokenType.NORMAL) for entry in entries])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_add_bos_token(False)
    for name, tensor in task.model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        values = tensor.detach().float().cpu()
        for projection, count in heads.items():
            if projection in name:  # llama.cpp turns neighbouring pairs, Hugging Face the two halves
                values = values.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(gguf_name(name), values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
OUTER["lm_head.weight"] = "output.weight"


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
