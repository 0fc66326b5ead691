# Run what uses it: pytest tests/model/test_families.py
"""A gated delta net in float64, token by token and head by head: slow, plain, and sharing no line
with the package.
"""

from __future__ import annotations

import torch


def mixed(own, config, xs, documents):
    """What a layer without attention adds for each position; `own` holds its tensors by their names
    in the layer.
    """
    own = {
        name.removeprefix("linear_attn."): value
        for name, value in own.items()
        if name.startswith("linear_attn.")
    }
    size, wide = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if "in_proj_qkvz.weight" in own:
        own |= _parted(own, keys, values, size, wide)
    inputs = [own["in_proj_qkv.weight"] @ x for x in xs]
    taps = own["conv1d.weight"][:, 0]
    states, out = None, []
    for t, x in enumerate(xs):
        if t == 0 or documents[t] != documents[t - 1]:
            states, begun = [torch.zeros(size, wide, dtype=torch.float64) for _ in range(values)], t
        seen = range(max(begun, t - taps.shape[1] + 1), t + 1)
        channels = _silu(sum(inputs[s] * taps[:, taps.shape[1] - 1 - t + s] for s in seen))
        query, key, value = channels.split([keys * size, keys * size, values * wide])
        rates = torch.log1p(torch.exp(own["in_proj_a.weight"] @ x + own["dt_bias"])) * torch.exp(
            own["A_log"]
        )
        writes = 1 / (1 + torch.exp(-(own["in_proj_b.weight"] @ x)))
        gates = _silu(own["in_proj_z.weight"] @ x).split(wide)
        heads = []
        for head in range(values):
            of_key = head // (values // keys)
            q, k = (each.split(size)[of_key] for each in (query, key))
            q, k = (each / (each.dot(each) + 1e-6).sqrt() for each in (q, k))
            state = torch.exp(-rates[head]) * states[head]
            states[head] = state + torch.outer(
                k, writes[head] * (value.split(wide)[head] - state.T @ k)
            )
            read = states[head].T @ q / size**0.5
            heads.append(
                read
                / (read.dot(read) / wide + config.rms_norm_eps).sqrt()
                * own["norm.weight"]
                * gates[head]
            )
        out.append(own["out_proj.weight"] @ torch.cat(heads))
    return out


def _parted(own, keys, values, size, wide):
    """Projections that are ordered by key heads as if they were four."""
    group = values // keys
    heads = own["in_proj_qkvz.weight"].split(2 * size + 2 * group * wide)
    rows = [head.split([size, size, group * wide, group * wide]) for head in heads]
    parts = [torch.cat(part) for part in zip(*rows, strict=True)]
    numbers = [head.split(group) for head in own["in_proj_ba.weight"].split(2 * group)]
    pairs = [torch.cat(part) for part in zip(*numbers, strict=True)]
    names = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
    return {"in_proj_qkv.weight": torch.cat(parts[:3])} | dict(
        zip(names, (parts[3], *pairs), strict=True)
    )


def _silu(x):
    return x / (1 + torch.exp(-x))
