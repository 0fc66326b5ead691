# Run what uses it: pytest tests/model/test_families.py
"""A gated short convolution in float64, token by token: slow, plain, and sharing no line with the
package.
"""

from __future__ import annotations


def mixed(own, config, xs, documents):
    """What such a layer adds for each position; `own` holds its tensors by their names in the block."""
    own = {
        name.removeprefix("conv."): value for name, value in own.items() if name.startswith("conv.")
    }
    taps = own["conv.weight"][:, 0]
    projected = [own["in_proj.weight"] @ x + own.get("in_proj.bias", 0) for x in xs]
    gates = [each.split(config.hidden_size) for each in projected]
    out = []
    for t, (_, after, _) in enumerate(gates):
        if t == 0 or documents[t] != documents[t - 1]:
            begun = t
        seen = range(max(begun, t - taps.shape[1] + 1), t + 1)
        total = sum(gates[s][0] * gates[s][2] * taps[:, taps.shape[1] - 1 - t + s] for s in seen)
        total = total + own.get("conv.bias", 0)
        out.append(own["out_proj.weight"] @ (after * total) + own.get("out_proj.bias", 0))
    return out
