"""Resident and streamed engines of one four-layer model, and everything that their training leaves
behind.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from batches import captured_to_train, packed, tiny_llama
from monograph.graph.precision import Precision
from monograph.laws.comparisons import differing, outcome
from monograph.loop import AnyEngine
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.schedule import warmup_cosine
from monograph.stream import Placement, Streamed

LAYERS, ROWS, MICRO_BATCH, UPDATES = 4, 8, 3, 3
FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "pad_token_id": 5},
    "qwen2": {"model_type": "qwen2", "sliding_window": 7, "layer_types": (FULL, SLIDING) * 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": (1,),
        "moe_intermediate_size": 24, "output_router_logits": True, "router_aux_loss_coef": 0.5,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
        "sliding_window": 5, "layer_types": (SLIDING, FULL) * 2,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": (1, 0, 1, 0)},
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 5, "layer_types": (SLIDING, FULL) * 2, "rope_local_theta": 1e2,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", FULL) * 2},
    "granite4": {"model_type": "granitemoehybrid", "layer_types": ("mamba", FULL) * 2, "mamba_d_state": 8},
    "nemotron_h": {
        "model_type": "nemotron_h", "layer_types": ("mamba", "mlp", FULL, "mlp"), "mamba_d_state": 8,
        "tie_word_embeddings": False,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ("conv", FULL) * 2},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True},
    "gemma4": {
        "model_type": "gemma4_text", "sliding_window": 5, "layer_types": (SLIDING, FULL) * 2, "rope_local_theta": 1e2,
        "global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "gemma4 with experts": {
        "model_type": "gemma4_text", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
WHOLE = frozenset(
    f"{name}{scale}"
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
    for scale in ("", "_scale")
)
# Stages are 0 before the blocks, 1 to 4 of one block each, 5 after them.
PLACEMENTS: dict[str, Placement] = {
    "on the host": Placement(),
    "next forward": Placement(when="next forward"),
    "offloaded": Placement(offload=True),
    "next forward, offloaded": Placement(when="next forward", offload=True),
    "moments on disk": Placement(on_disk=WHOLE),
    "all on disk": Placement(when="next forward", on_disk=WHOLE | {"weights", "rest", "gradient"}),
    "gradients on the device": Placement(
        on_device=frozenset((stage, "gradient") for stage in range(LAYERS + 2))
    ),
    "some stages on the device": Placement(
        when="next forward",
        offload=True,
        on_device=frozenset(
            (stage, name) for stage in (0, 2, 4) for name in ("weights", "rest", "gradient", *WHOLE)
        ),
    ),
    "updated on the host": Placement(where="host"),
    "updated on the host, next forward, in files": Placement(
        when="next forward", where="host", offload=True, on_disk=WHOLE | {"rest"}
    ),
    "updated on both": Placement(
        when="next forward",
        where="host",
        on_device=frozenset(
            {(1, "weights"), (2, "gradient"), (4, "rest"), (5, "exp_avg")}
            | {
                (stage, name)
                for stage in (0, 3)
                for name in ("weights", "rest", "gradient", *WHOLE)
            }
        ),
    ),
    "everywhere": Placement(
        on_device=frozenset(
            {
                (1, "weights"),
                (2, "gradient"),
                (2, "weights"),
                (3, "exp_avg"),
                (4, "rest"),
                (5, "weights"),
            }
        ),
        on_disk=frozenset({"exp_avg_sq", "gradient"}),
    ),
}
AT_ONCE: dict[str, Placement] = {
    "backward": Placement(when="backward"),
    "backward, offloaded": Placement(when="backward", offload=True, on_disk=WHOLE),
    "backward, updated on the host": Placement(when="backward", where="host", offload=True),
    "backward, updated on both": Placement(
        when="backward",
        where="host",
        on_device=frozenset(
            (stage, name) for stage in (2, 5) for name in ("weights", "rest", *WHOLE)
        ),
        on_disk=frozenset({"exp_avg"}),
    ),
    "backward, some stages on the device": Placement(
        when="backward",
        on_device=frozenset(
            (stage, name) for stage in (0, 2, 5) for name in ("weights", "rest", *WHOLE)
        ),
    ),
}
EVERY = PLACEMENTS | AT_ONCE
# Placements that together have every time and place of updates, every home, and every pair of
# these.
DAY = {
    "on the host",
    "all on disk",
    "some stages on the device",
    "updated on both",
    "everywhere",
    "backward, offloaded",
    "backward, updated on both",
}


def by_day(places: Iterable[str]) -> list[Any]:
    """The placements as parameters of a test, of which those that are not for the day are slow."""
    return [
        place if place in DAY else pytest.param(place, marks=pytest.mark.slow) for place in places
    ]


def crossed(one: Iterable[Any], other: Iterable[Any], *day: Iterable[tuple[Any, Any]]) -> list[Any]:
    """All pairs as parameters of a test, of which those that are not for the day are slow."""
    chosen = list(itertools.chain(*day))
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(*pair, marks=marks[pair in chosen]) for pair in itertools.product(one, other)
    ]


PRECISIONS = ("fp32", "bf16")


def arguments(precision: str | Precision = "fp32", **changes: Any) -> dict[str, Any]:
    """What both engines are made with."""
    usual = {
        "optim": AdamW(lr=1e-2),
        "schedule": warmup_cosine(2, 20),
        "clip": 0.1,
        "precision": Precision(precision) if isinstance(precision, str) else precision,
        "micro_batch": MICRO_BATCH,
    }
    return usual | changes


def resident(sizes: dict[str, Any] | None = None, **changes: Any) -> Resident:
    return Resident(
        tiny_llama(**{"num_hidden_layers": LAYERS} | (sizes or {})), **arguments(**changes)
    )


def streamed(
    sizes: dict[str, Any] | None = None,
    placement: Placement | None = None,
    blocks_per_stage: int = 1,
    **changes: Any,
) -> Streamed:
    """The other one; of a placement what the stages are there for."""
    sizes, placement = {"num_hidden_layers": LAYERS} | (sizes or {}), placement or Placement()
    last = -(-sizes["num_hidden_layers"] // blocks_per_stage) + 1
    there = frozenset(each for each in placement.on_device if each[0] <= last)
    changes["placement"] = replace(placement, blocks_per_stage=blocks_per_stage, on_device=there)
    return Streamed(tiny_llama(**sizes), **arguments(**changes))


def windows(
    count: int = UPDATES, first: int = 0, rows: Callable[..., dict[str, Tensor]] = packed
) -> list[Any]:
    """Windows of three micro-batches, the last one not full."""
    return [rows(ROWS, seed=seed) for seed in range(first, first + count)]


def trained(engine: AnyEngine, batches: Iterable[Any]) -> dict[str, Tensor]:
    """What every update returned, and the state in the end."""
    updates = []
    for batch in batches:
        engine.accumulate(batch)
        updates.append(engine.update())
    return outcome(engine.state(), updates)


# What resident engines left, by how they were made and what they were trained on: one resident run
# stands for all placements.
_TWINS = dict[str, dict[str, Tensor]]()


def twin(
    sizes: dict[str, Any] | None, batches: list[Any], capture: str | None = None, **changes: Any
) -> dict[str, Tensor]:
    """What `resident(sizes, **changes)` leaves after the batches; each such run is made once in a
    process.
    """
    made_with = {name: f"{type(value).__qualname__} {value}" for name, value in changes.items()}
    if "loss" in changes:
        # A function's own name would not say what it does.
        made_with["loss"] = type(changes["loss"]).__qualname__
        assert made_with["loss"] != "function", (
            "give a loss that is an instance of a class of its own"
        )
    content = hashlib.sha256()
    for name, tensor in [item for batch in batches for item in sorted(batch.items())]:
        content.update(
            f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
            + tensor.contiguous().numpy().tobytes()
        )
    key = repr((sizes, capture, sorted(made_with.items()), content.hexdigest()))
    if key not in _TWINS:
        engine = resident(sizes, **changes)
        if capture:
            captured_to_train(engine, batches[0], capture, "blocks")
        _TWINS[key] = trained(engine, batches)
    return _TWINS[key]


@functools.cache
def of_twin(follow: Callable[..., Any], *arguments: Any, **changes: Any) -> Any:
    """What a function finds of `resident(**changes)`, which is the same for all placements: made
    once in a process.
    """
    return follow(resident(**changes), *arguments)


def other_bits(mine: dict[str, Tensor], its: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same in every bit; NaN is NaN."""
    return differing(mine, its, equal_nan=True)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unclipped(placement):
    """What both are made with where weights are updated in the backward pass."""
    return {"clip": None} if placement.when == "backward" else {}
