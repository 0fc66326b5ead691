# Run what uses it: pytest tests/model/test_llama.py tests/laws/test_packed_is_separate.py
"""The decoder in float64, token by token and head by head: slow, plain, and sharing no line with
the package but the facts in a family's row, which tests/model/test_families.py compares with
transformers.

`weights` holds float64 tensors by their Hugging Face names; whatever requires a gradient gets one,
and what a family has beyond a Llama (biases, norms of heads) is used where its weights are there.
`config` is any object with Hugging Face's field names; without layer_types its sliding_window is
every layer's.
"""

from __future__ import annotations

import math

import torch

from reference import delta_net, mamba, short_conv


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
    found = torch.einsum("btd,vd->btv", hidden, weights[head])
    cap = config.final_logit_softcapping
    return found if cap is None else cap * torch.tanh(found / cap)


def _row(weights, config, ids, documents, places):
    embedding = weights["model.embed_tokens.weight"]
    # Looking up the row of the padding gives it no gradient in most families.
    padding = None if config.family.trains_padding else config.pad_token_id
    stream = [embedding[token].detach() if token == padding else embedding[token] for token in ids]
    scaled = (
        torch.tensor(math.sqrt(config.hidden_size)).item() if config.family.embedding_scaled else 1
    )
    stream = [config.embedding_multiplier * scaled * x for x in stream]
    inputs = _inputs_of_layers(weights, config, ids, stream, padding)
    kept = {}  # the keys and values of the last layer of each kind that has its own
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        before, after, before_mlp, after_mlp = _places(config)
        normed = [before(own, x) for x in stream]
        kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
        window = config.sliding_window if kinds[layer] == "sliding_attention" else None
        turning = places if (config.no_rope_layers or [1] * (layer + 1))[layer] else None
        if (
            getattr(config, "position_embedding_type", "rope") == "nope"
            or config.family.never_rotates
        ):
            turning = None
        rope = (config.rope_theta, config.rope_scaling)
        if window and config.rope_local_theta:
            rope = (config.rope_local_theta, None)
        if kinds[layer] == "linear_attention":
            attended = delta_net.mixed(own, config, normed, documents)
        elif kinds[layer] == "mamba":
            attended = mamba.mixed(own, config, normed, documents)
        elif kinds[layer] == "mlp":
            inner = [own["plain_mlp.up_proj.weight"] @ x for x in normed]
            attended = [own["plain_mlp.down_proj.weight"] @ (x * (x > 0)) ** 2 for x in inner]
        elif kinds[layer] == "conv":
            attended = short_conv.mixed(own, config, normed, documents)
        else:
            attended = _attention(own, config, normed, documents, turning, window, *rope, kept)
        part = config.residual_multiplier
        stream = [x + part * after(own, y) for x, y in zip(stream, attended, strict=True)]
        if not config.family.has_feed_forward:
            continue
        branches = [_feed_forward(own, x, before_mlp, config) for x in stream]
        stream = [x + part * after_mlp(own, y) for x, y in zip(stream, branches, strict=True)]
        if "per_layer_input_gate.weight" in own:
            stream = [
                x
                + _norm(
                    _input_branch(own, x, its, config),
                    own["post_per_layer_input_norm.weight"],
                    config,
                )
                for x, its in zip(stream, inputs[layer], strict=True)
            ]
        if "layer_scalar" in own:
            stream = [own["layer_scalar"].detach() * x for x in stream]
    return [_norm(x, weights["model.norm.weight"], config) / config.logits_scaling for x in stream]


def _inputs_of_layers(weights, config, ids, stream, padding):
    """What each layer gets of each embedded token, [layers][tokens]."""
    if not config.hidden_size_per_layer_input:
        return None
    table = weights["model.embed_tokens_per_layer.weight"]
    matrix = weights["model.per_layer_model_projection.weight"]
    gain = weights["model.per_layer_projection_norm.weight"]
    size = config.hidden_size_per_layer_input
    inputs = []
    for layer in range(config.num_hidden_layers):
        rows = slice(layer * size, (layer + 1) * size)
        of_tokens = []
        for token, x in zip(ids, stream, strict=True):
            row = table[token].detach() if token == padding else table[token]
            projected = _norm(matrix[rows] @ x / math.sqrt(config.hidden_size), gain, config)
            scale = torch.tensor(math.sqrt(size)).item()
            of_tokens.append((projected + scale * row[rows]) / math.sqrt(2))
        inputs.append(of_tokens)
    return inputs


def _input_branch(own, x, its, config):
    gate = own["per_layer_input_gate.weight"] @ x
    return own["per_layer_projection.weight"] @ (_activated(gate, config) * its)


def _places(config):
    """The four norms of a layer, in the order of the computation; OLMo's are after the branches,
    most others' before.
    """

    def norm(name):
        return lambda own, x: _norm(x, own[f"{name}.weight"], config)

    return [norm(name) if name else lambda own, x: x for name in config.family.norm_names]


def _norm(x, weight, config):
    weight = 1 + weight if config.family.centred_norms else weight
    return x / (x.dot(x) / len(x) + config.rms_norm_eps).sqrt() * weight


def _feed_forward(own, x, norm_before, config):
    if "mlp.router.proj.weight" in own:
        return _mixture_beside_mlp(own, x, config)
    return _mlp(own, norm_before(own, x), config)


def _mixture_beside_mlp(own, x, config):
    """norm(mlp(norm x)) + norm(experts(norm x)), with other norms; the router reads x by its root mean
    square alone.
    """

    def norm(name, vector):
        return _norm(vector, own[f"mlp.{name}_feedforward_layernorm.weight"], config)

    def second_norm(name, vector):
        return _norm(vector, own[f"mlp.{name}_feedforward_layernorm_2.weight"], config)

    gated = _mlp(own, norm("pre", x), config)
    seen = _norm(x, 1, config) * own["mlp.router.scale"] / math.sqrt(len(x))
    mixed = _chosen_experts(
        own,
        second_norm("pre", x),
        own["mlp.router.proj.weight"] @ seen,
        config,
        factors=own["mlp.router.per_expert_scale"],
    )
    first_gain = own["mlp.post_feedforward_layernorm_1.weight"]
    return _norm(gated, first_gain, config) + second_norm("post", mixed)


def _mlp(own, x, config):
    if "mlp.gate.weight" in own:
        return _mixture(own, x, config)
    return _gated(
        x,
        own["mlp.gate_proj.weight"],
        own["mlp.up_proj.weight"],
        own["mlp.down_proj.weight"],
        config,
    )


def _mixture(own, x, config):
    scores = own["mlp.gate.weight"] @ x + own.get("mlp.gate.bias", 0)
    mixed = _chosen_experts(own, x, scores, config)
    if "mlp.shared_expert.gate_proj.weight" not in own:
        return mixed
    share = 1
    if "mlp.shared_expert_gate.weight" in own:
        share = 1 / (1 + torch.exp(-(own["mlp.shared_expert_gate.weight"] @ x)))
    shared = [own[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
    return mixed + share * _gated(x, *shared, config)


def _chosen_experts(own, x, scores, config, factors=None):
    shares = torch.exp(scores - scores.max())
    shares = shares / shares.sum()
    chosen = sorted(range(len(shares)), key=lambda expert: -shares[expert])[
        : config.num_experts_per_tok
    ]
    whole = sum(shares[expert] for expert in chosen) if config.norm_topk_prob else 1
    names = [f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")]

    def gated(expert):
        matrices = [own[f"{name}.weight"][expert] for name in names]
        return _gated(
            x,
            *matrices,
            config,
            [own[f"{name}.bias"][expert] if f"{name}.bias" in own else 0 for name in names],
        )

    factors = torch.ones_like(shares) if factors is None else factors
    return sum(factors[expert] * shares[expert] / whole * gated(expert) for expert in chosen)


def _gated(x, gate_matrix, up_matrix, down_matrix, config, biases=(0, 0, 0)):
    gate, up = gate_matrix @ x + biases[0], up_matrix @ x + biases[1]
    if config.family.clamped_gating:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return down_matrix @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)) + biases[2]
    return down_matrix @ (_activated(gate, config) * up)


def _activated(gate, config):
    turns = (
        2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        if config.family.activation[1] == "gelu_pytorch_tanh"
        else gate
    )
    # Not by exp(-x), whose gradient is not a number where it overflows.
    return gate * torch.sigmoid(turns)


def _attention(own, config, xs, documents, places, window, theta, scaling, kept):
    size, key_value_heads = config.head_dim, config.num_key_value_heads
    values_are_keys = config.attention_k_eq_v and window is None
    if window is None:
        size = config.global_head_dim or size
        key_value_heads = config.num_global_key_value_heads or key_value_heads
    group = config.num_attention_heads // key_value_heads
    turned_size = int(size * config.partial_rotary_factor)
    frequencies = [
        _frequency(pair, turned_size, theta, scaling) for pair in range(turned_size // 2)
    ]
    sharper = getattr(scaling, "attention_factor", 1)
    neighbours = config.family.interleaved_rotary
    factor = config.attention_multiplier or 1 / math.sqrt(config.query_pre_attn_scalar or size)
    if config.family.unscaled_scores:
        factor = 1

    def heads(name, turned):
        bias = own.get(f"self_attn.{name}_proj.bias", 0)
        whole = [own[f"self_attn.{name}_proj.weight"] @ x + bias for x in xs]
        gain = own.get(f"self_attn.{name}_norm.weight")
        if gain is not None and len(gain) == len(whole[0]):
            whole = [_norm(v, gain, config) for v in whole]
        if config.clip_qkv:
            whole = [v.clamp(-config.clip_qkv, config.clip_qkv) for v in whole]
        vectors = [v.split(size) for v in whole]
        if gain is not None and len(gain) != len(whole[0]):
            vectors = [[_norm(v, gain, config) for v in vs] for vs in vectors]
        if not turned or places is None:
            return vectors
        return [
            [
                torch.cat(
                    [sharper * _turn(v[:turned_size], p, frequencies, neighbours), v[turned_size:]]
                )
                for v in vs
            ]
            for vs, p in zip(vectors, places, strict=True)
        ]

    gates = None
    if config.family.gated_attention:  # each head's gate is below it in the projection
        pairs = own["self_attn.q_proj.weight"].unflatten(0, (-1, 2, size))
        biases = own.get("self_attn.q_proj.bias", torch.zeros(pairs.shape[:3].numel())).unflatten(
            0, (-1, 2, size)
        )
        weight, bias = pairs[:, 1].flatten(0, 1), biases[:, 1].flatten()
        gates = [1 / (1 + torch.exp(-(weight @ x + bias))) for x in xs]
        own = own | {
            "self_attn.q_proj.weight": pairs[:, 0].flatten(0, 1),
            "self_attn.q_proj.bias": biases[:, 0].flatten(),
        }

    def sink(head, largest):
        return torch.exp(own["self_attn.sinks"][head] - largest) if "self_attn.sinks" in own else 0

    queries = heads("q", True)
    if "self_attn.k_proj.weight" in own:
        keys = heads("k", True)
        if values_are_keys:  # what their projection gives, without their norm and rotation
            own = {name.replace("k_proj", "v_proj"): value for name, value in own.items()}
        values = heads("v", False)
        if config.family.value_norm:
            values = [[_norm(v, 1, config) for v in vs] for vs in values]
        kept[window is None] = keys, values
    else:
        keys, values = kept[window is None]
    out = []
    for t in range(len(xs)):
        seen = window or len(xs)
        visible = [s for s in range(t + 1) if documents[s] == documents[t] and t - s < seen]
        mixed = []
        for head in range(config.num_attention_heads):
            scores = torch.stack(
                [factor * queries[t][head].dot(keys[s][head // group]) for s in visible]
            )
            shares = torch.exp(scores - scores.max())
            shares = shares / (shares.sum() + sink(head, scores.max()))
            mixed.append(
                sum(
                    share * values[s][head // group]
                    for share, s in zip(shares, visible, strict=True)
                )
            )
        whole = torch.cat(mixed) if gates is None else torch.cat(mixed) * gates[t]
        out.append(own["self_attn.o_proj.weight"] @ whole + own.get("self_attn.o_proj.bias", 0))
    return out


def _turn(vector, position, frequencies, neighbours):
    """Rotation as multiplication by exp(i angle) of the complex number whose parts are the halves
    of the head.
    """
    half = len(vector) // 2
    order = [*range(len(vector))]
    if neighbours:  # the parts are neighbours instead
        order = [*order[::2], *order[1::2]]
    vector = vector[order]
    angles = torch.tensor([position * f for f in frequencies], dtype=torch.float64)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    turned = torch.cat([turned.real, turned.imag])
    return turned[[order.index(place) for place in range(len(order))]]


def _frequency(pair, size, theta, scaling):
    frequency = theta ** (-2 * pair / size)
    if scaling is None:
        return frequency
    if hasattr(scaling, "partial_rotary_factor"):
        is_turned = pair < math.floor(scaling.partial_rotary_factor * size / 2)
        return frequency / scaling.factor if is_turned else 0.0
    if hasattr(scaling, "short_factor"):
        # Rounded to fp32, as elsewhere.
        return frequency / torch.tensor(scaling.short_factor[pair]).item()
    if hasattr(scaling, "beta_fast"):
        return _yarn(frequency, pair, size, theta, scaling)
    if not hasattr(scaling, "low_freq_factor"):
        return frequency / scaling.factor
    return _llama3(frequency, scaling)


def _llama3(frequency, scaling):
    # In the context of pre-training.
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _yarn(frequency, pair, size, theta, scaling):
    """Pairs before the one that turns beta_fast times in the context are kept, those after
    beta_slow's stretched.
    """

    def turning(times):
        return (
            size
            * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # The share is rounded to fp32, as elsewhere.
    share = (
        torch.tensor((pair - first) / (last - first if last > first else 0.001)).clamp(0, 1).item()
    )
    return share * frequency / scaling.factor + (1 - share) * frequency
