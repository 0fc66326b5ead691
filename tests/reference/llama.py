# Run what uses it: pytest tests/model/test_llama.py tests/laws/test_packed_is_separate.py
"""The decoder in float64, token by token and head by head: slow, plain, and sharing no line with the package.

`weights` holds float64 tensors by their Hugging Face names; whatever requires a gradient gets one, and what a family
has beyond a Llama (biases, norms of heads) is used where its weights are there. `config` is any object with Hugging
Face's field names; without layer_types its sliding_window is every layer's.
"""

from __future__ import annotations

import math

import torch


def hidden_states(weights, config, tokens, segments=None, positions=None):
    """Final hidden states [B, T, D]; a position sees earlier ones, and itself, of its own segment."""
    rows = []
    for row, ids in enumerate(tokens.tolist()):
        documents = [1] * len(ids) if segments is None else segments[row].tolist()
        places = list(range(len(ids))) if positions is None else positions[row].tolist()
        rows.append(torch.stack(_row(weights, config, ids, documents, places)))
    return torch.stack(rows)


def logits(weights, config, hidden):
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return torch.einsum("btd,vd->btv", hidden, weights[head])


def _row(weights, config, ids, documents, places):
    embedding = weights["model.embed_tokens.weight"]
    # Looking up the row of the padding gives it no gradient.
    stream = [embedding[token].detach() if token == config.pad_token_id else embedding[token] for token in ids]
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = [_norm(x, own["input_layernorm.weight"], config) for x in stream]
        kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
        window = config.sliding_window if kinds[layer] == "sliding_attention" else None
        attended = _attention(own, config, normed, documents, places, window or len(ids))
        stream = [x + y for x, y in zip(stream, attended, strict=True)]
        normed = [_norm(x, own["post_attention_layernorm.weight"], config) for x in stream]
        stream = [x + _mlp(own, y) for x, y in zip(stream, normed, strict=True)]
    return [_norm(x, weights["model.norm.weight"], config) for x in stream]


def _norm(x, weight, config):
    return x / (x.dot(x) / len(x) + config.rms_norm_eps).sqrt() * weight


def _mlp(own, x):
    gate, up = own["mlp.gate_proj.weight"] @ x, own["mlp.up_proj.weight"] @ x
    return own["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def _attention(own, config, xs, documents, places, window):
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    frequencies = [_frequency(config, pair) for pair in range(size // 2)]

    def heads(name, turned):
        bias = own.get(f"self_attn.{name}_proj.bias", 0)
        vectors = [(own[f"self_attn.{name}_proj.weight"] @ x + bias).split(size) for x in xs]
        if f"self_attn.{name}_norm.weight" in own:
            vectors = [[_norm(v, own[f"self_attn.{name}_norm.weight"], config) for v in vs] for vs in vectors]
        if not turned:
            return vectors
        return [[_turn(v, p, frequencies) for v in vs] for vs, p in zip(vectors, places, strict=True)]

    queries, keys, values = heads("q", True), heads("k", True), heads("v", False)
    out = []
    for t in range(len(xs)):
        visible = [s for s in range(t + 1) if documents[s] == documents[t] and t - s < window]
        mixed = []
        for head in range(config.num_attention_heads):
            scores = torch.stack([queries[t][head].dot(keys[s][head // group]) / math.sqrt(size) for s in visible])
            shares = torch.exp(scores - scores.max())
            shares = shares / shares.sum()
            mixed.append(sum(share * values[s][head // group] for share, s in zip(shares, visible, strict=True)))
        out.append(own["self_attn.o_proj.weight"] @ torch.cat(mixed) + own.get("self_attn.o_proj.bias", 0))
    return out


def _turn(vector, position, frequencies):
    """Rotation as multiplication by exp(i angle) of the complex number whose parts are the halves of the head."""
    half = len(vector) // 2
    angles = torch.tensor([position * f for f in frequencies], dtype=torch.float64)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def _frequency(config, pair):
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if not hasattr(scaling, "low_freq_factor"):
        return frequency / scaling.factor
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # in the context of pre-training
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept * frequency + (1 - kept) * frequency / scaling.factor
