# Run what uses it: pytest tests/model/test_families.py
"""A layer of Mamba 2 in float64, token by token and head by head: slow, plain, and sharing no line
with the package.
"""

from __future__ import annotations

import torch


def mixed(own, config, xs, documents):
    """What a layer without attention adds for each position; `own` holds its tensors by their names
    in the layer.
    """
    own = {
        name.removeprefix("mamba."): value
        for name, value in own.items()
        if name.startswith("mamba.")
    }
    heads, wide = config.mamba_n_heads, config.mamba_d_head
    groups, size = config.mamba_n_groups, config.mamba_d_state
    taps = own["conv1d.weight"][:, 0]
    projected = [own["in_proj.weight"] @ x + own.get("in_proj.bias", 0) for x in xs]
    parts = [
        each.split([heads * wide, heads * wide + 2 * groups * size, heads]) for each in projected
    ]
    out = []
    for t, (gate, _, steps) in enumerate(parts):
        if t == 0 or documents[t] != documents[t - 1]:
            states = [torch.zeros(size, wide, dtype=torch.float64) for _ in range(heads)]
            begun = t
        seen = range(max(begun, t - taps.shape[1] + 1), t + 1)
        total = sum(parts[s][1] * taps[:, taps.shape[1] - 1 - t + s] for s in seen)
        channels = _silu(total + own.get("conv1d.bias", 0))
        inputs, keys, queries = channels.split([heads * wide, groups * size, groups * size])
        steps = torch.log1p(torch.exp(steps + own["dt_bias"])).clamp(min=config.time_step_min)
        read = []
        for head in range(heads):
            group = head // (heads // groups)
            x = inputs.split(wide)[head]
            decay = torch.exp(-torch.exp(own["A_log"][head]) * steps[head])
            written = torch.outer(keys.split(size)[group], steps[head] * x)
            states[head] = decay * states[head] + written
            read.append(states[head].T @ queries.split(size)[group] + own["D"][head] * x)
        gated = (torch.cat(read) * _silu(gate)).split(heads * wide // groups)
        normed = [
            each / (each.dot(each) / len(each) + config.rms_norm_eps).sqrt() for each in gated
        ]
        result = own["out_proj.weight"] @ (torch.cat(normed) * own["norm.weight"])
        out.append(result + own.get("out_proj.bias", 0))
    return out


def _silu(x):
    return x / (1 + torch.exp(-x))
