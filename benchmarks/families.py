"""Compare the model with transformers' in every family: logits, gradients, and exported folders.

Random configurations of each family with large random weights (standard deviation 0.3, so that
every part of the model matters, and no expert chosen by rounding) and two rows of random tokens. An
error is the distance of two tensors over the norm of transformers'. The table has the largest error
of logits over configurations, and the largest error of gradients over configurations and
parameters. Goal: 1e-5 in fp32. In float64 transformers would still compute norms, rotary angles and
recurrences in fp32, so there whatever asks for fp32 gets float64. "Out and back" says whether
transformers loads an exported folder with no missing and no unexpected key, and whether the folder
that it then saves is the same model, to the bit and to the last key of the configuration.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import monograph as mono
from monograph.graph.experts import Router
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.families import FAMILIES
from monograph.model.hub import load_model, save_model
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.layouts import FusedExpertsRule, JoinedLayersRule
from monograph.model.rope import cos_sin
from monograph.model.scaling import (
    LONGROPE,
    QUERY_GROWTH,
    GrowingYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)

ROWS, LENGTH, CONFIGS, GOAL = 2, 48, 40, 1e-5
MARGIN = 1e-5  # of probabilities, so that rounding chooses no other expert
# As in published Granites: with much larger scores fp32 itself would be worse than the goal.
NUMBERS = {
    "embedding_multiplier": [1.0, 12.0], "residual_multiplier": [1.0, 0.22], "attention_multiplier": [None, 0.0625],
    "logits_scaling": [1.0, 3.0, 8.0],
}  # fmt: skip
# Names of a Granite 4's experts in files, and in transformers.
RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
}
WIDER = {torch.float32: torch.float64}
ERRORS = ("logits_fp32", "gradients_fp32", "logits_fp64", "gradients_fp64")


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--configs", type=int, default=CONFIGS, metavar="N", help="random configurations per family"
    )
    parser.add_argument("--seed", type=int, default=0, help="of configurations, weights and tokens")
    parser.add_argument("--family", choices=FAMILIES, help="measure this family alone")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    configs = 2 if given.smoke else given.configs
    found = harness.result(
        "families",
        {"configs": configs, "seed": given.seed, "rows": ROWS, "length": LENGTH, "goal": GOAL}
        | {"transformers": transformers.__version__},
        [
            measured(family, configs, given.seed)
            for family in ([given.family] if given.family else FAMILIES)
        ],
    )
    harness.print_machine(found)
    print(table(found["cases"]))
    harness.write(given.out, found)


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return the errors as a Markdown table."""
    names = [
        "model_type",
        "configurations",
        *(key.replace("_", ", ") for key in ERRORS),
        "out and back",
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for case in cases:
        errors = [f"{case[key]:.0e}" if case[key] else "0" for key in ERRORS]
        back = "same bits" if case["round_trip"] else "differs"
        lines.append(f"| {case['family']} | {case['configs']} | {' | '.join(errors)} | {back} |")
    return "\n".join(lines)


def measured(family: str, configs: int, seed: int) -> dict[str, Any]:
    """Return the largest errors of one family over its random configurations."""
    draw = random.Random(f"{family} {seed}")
    rows = [compared(drawn(family, draw), index) for index in range(configs)]
    worst = {key: max(row[key] for row in rows) for key in ERRORS}
    return {
        "family": family,
        "configs": configs,
        **worst,
        "round_trip": all(row["round_trip"] for row in rows),
    }


def drawn(family: str, draw: random.Random) -> mono.LlamaConfig:
    """Return a random configuration of a family, in which every key takes every kind of value."""
    keys = FAMILIES[family].optional_keys
    key_value, group, layers = (
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 4]),
        draw.choice([1, 2, 3]),
    )
    windowed = "sliding_window" in keys and draw.random() < 0.7
    linear, others = "linear_num_key_heads" in keys, FAMILIES[family].other_layer_type
    recurrent = not FAMILIES[family].other_layers.attends
    mixed = "layer_types" in keys and (windowed or recurrent)
    all_kinds = [FULL_ATTENTION, others, *FAMILIES[family].more_layer_types]
    kinds = tuple(draw.choice(all_kinds) for _ in range(layers)) if mixed else ()
    if FAMILIES[family].rotates_in_windows and set(kinds) == {FULL_ATTENTION}:
        kinds = (SLIDING_ATTENTION, *kinds[1:])  # a model with a window has a layer that has it
    yarn = YarnScaling(
        4.0,
        draw.choice([1.0, 1.2]),
        16,
        4.0,
        0.5,
        draw.random() < 0.5 or "rope_local_theta" in keys,
    )
    scalings: list[Scaling | None] = [
        None,
        LinearScaling(2.5),
        Llama3Scaling(4.0, 1.0, 4.0, 16),
        yarn,
    ]
    width, head = draw.choice([4, 6, 16]), draw.choice([0, 6, 8, 16])
    if FAMILIES[family].unscaled_scores:
        # Wide heads have large scores, and a norm after a branch leaves little of a few channels: with either,
        # fp32's own error is above the goal.
        head = min(head or 8, 8)
        width = 32
    part = ((head or width) - 2) / (head or width)
    numbers = {name: draw.choice(values) for name, values in NUMBERS.items() if name in keys}
    if linear:
        sizes = {
            "linear_conv_kernel_dim": [1, 2, 4],
            "linear_key_head_dim": [8, 17],
            "linear_value_head_dim": [8, 12],
        }
        numbers |= {name: draw.choice(values) for name, values in sizes.items()}
        numbers |= {"linear_num_key_heads": key_value, "linear_num_value_heads": key_value * group}
    if "conv_L_cache" in keys:
        numbers |= {"conv_L_cache": draw.choice([1, 2, 3, 5]), "conv_bias": draw.random() < 0.5}
    if "mamba_n_heads" in keys:
        groups, heads_of_group = draw.choice([1, 2]), draw.choice([1, 2, 3])
        numbers |= {
            "mamba_n_groups": groups,
            "mamba_n_heads": groups * heads_of_group,
            "mamba_d_head": key_value * group * width * draw.choice([1, 2]),
            "mamba_d_state": draw.choice([8, 17]),
            "mamba_d_conv": draw.choice([1, 2, 4]),
            "mamba_conv_bias": draw.random() < 0.5,
            "mamba_proj_bias": draw.random() < 0.5,
        }
    if "attention_k_eq_v" in keys:
        are_keys = draw.random() < 0.5
        numbers |= {
            # Scores have no factor, so with wider heads fp32's own error is above the goal.
            "global_head_dim": draw.choice([0, 6, 12]),
            "attention_k_eq_v": are_keys,
            "num_global_key_value_heads": draw.choice([0, 1]) if are_keys else 0,
            "final_logit_softcapping": draw.choice([None, 3.0, 30.0]),
        }
        scalings = [None, ProportionalScaling(0.25), ProportionalScaling(0.7, 2.0)]
    if kinds and FAMILIES[family].last_layer_is_full:
        kinds = (*kinds[:-1], FULL_ATTENTION)
    if "num_kv_shared_layers" in keys and draw.random() < 0.7:
        # As many layers at the end as there can be, if those before them have all kinds of layers. transformers
        # 5.23 computes them only if layers have inputs.
        of_layers = kinds or (FULL_ATTENTION,) * layers
        shared = next(n for n in range(layers) if {*of_layers[: layers - n - 1]} != {*of_layers})
        numbers |= {
            "hidden_size_per_layer_input": draw.choice([16, 24]),
            "num_kv_shared_layers": draw.randint(0, shared),
            "use_double_wide_mlp": draw.random() < 0.5,
        }
    if "time_step_min" in keys:
        numbers["time_step_min"] = draw.choice([0.001, 0.5, 1.0])
    if "position_embedding_type" in keys:
        numbers["position_embedding_type"] = draw.choice(["rope", "nope"])
    experts, longs = draw.randint(1, 9), LONGROPE in FAMILIES[family].rope_types
    if FAMILIES[family].may_lack_experts and draw.random() < 0.3:
        experts = 0
    whole = longs or FAMILIES[family].head_dim_is_derived
    part = (width - 2) / width if longs else part
    # A norm after the experts divides by what few channels leave.
    least_width = 16 if FAMILIES[family].mixture_beside_mlp else 3
    of_experts = {
        "num_experts": experts, "num_experts_per_tok": draw.randint(1, max(experts, 1)),
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": draw.randint(least_width, 40), "shared_expert_intermediate_size": draw.randint(3, 40),
        "mlp_only_layers": draw.choice([(), (0,), (1, 2)]),
        "clip_qkv": draw.choice([None, 0.5, 2.0]),
    }  # fmt: skip
    numbers |= {name: value for name, value in of_experts.items() if name in keys}
    if "rope_local_theta" in keys and windowed:
        numbers["rope_local_theta"] = draw.choice([1e2, 5e5])
    config = mono.LlamaConfig(
        model_type=family,
        vocab_size=draw.randint(17, 80),
        hidden_size=key_value * group * width,
        intermediate_size=draw.randint(9, 70),
        num_hidden_layers=layers,
        num_attention_heads=key_value * group,
        num_key_value_heads=key_value,
        head_dim=0 if whole else head,
        max_position_embeddings=64,
        rms_norm_eps=draw.choice([1e-6, 1e-5]),
        rope_theta=1e4 if FAMILIES[family].never_rotates else draw.choice([1e4, 5e5]),
        rope_scaling=None if longs or FAMILIES[family].never_rotates else draw.choice(scalings),
        tie_word_embeddings=FAMILIES[family].may_tie and draw.random() < 0.5,
        attention_bias="attention_bias" in keys and draw.random() < 0.5,
        sliding_window=draw.choice([1, 2, 5, 17, LENGTH - 1, LENGTH, 100]) if windowed else None,
        layer_types=kinds,
        no_rope_layers=tuple(draw.choice([0, 1]) for _ in range(layers))
        if "no_rope_layers" in keys
        else (),
        query_pre_attn_scalar=draw.choice([0, 5]) if "query_pre_attn_scalar" in keys else 0,
        partial_rotary_factor=draw.choice([1.0, part]) if "partial_rotary_factor" in keys else 1.0,
        **numbers,
        # With larger weights fp32's own error, in both, is above the goal where a state is
        # corrected again and again, and where gates are steep.
        initializer_range=0.1 if recurrent or FAMILIES[family].attention_sinks else 0.3,
        pad_token_id=draw.choice([None, 0, 5]),
        eos_token_id=(2, 5),
    )
    if QUERY_GROWTH in keys and draw.random() < 0.7:
        growing = GrowingYarnScaling(
            4.0,
            draw.choice([1.0, 1.2]),
            64,
            draw.choice([4.0, 32.0]),
            draw.choice([0.5, 1.0]),
            draw.random() < 0.5,
            llama_4_scaling_beta=draw.choice([0.1, 0.5]),
            max_position_embeddings=128,
        )
        return replace(config, rope_scaling=growing)
    if not longs or draw.random() < 0.5:
        return config
    factors = tuple(draw.uniform(1, 4) for _ in range(config.rotary_dim // 2))
    return replace(
        config, rope_scaling=LongScaling(factors, factors, draw.choice([1.0, 1.2]), 64, 128)
    )


def compared(config: mono.LlamaConfig, seed: int) -> dict[str, Any]:
    """Return one configuration's errors, and whether it comes back from transformers unchanged."""
    tokens = random_tokens(config, seed)
    model = next(model for model in models(config, seed) if margin(model, tokens) > MARGIN)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder, "ours"))
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder, "ours"),
            output_loading_info=True,
            dtype=torch.float32,
            experts_implementation="eager",
        )
        theirs.save_pretrained(Path(folder, "theirs"))
        back = load_model(Path(folder, "theirs"))
    kept = not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same = all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), back.parameters(), strict=True)
    )
    errors = dict(zip(ERRORS[:2], errors_of(model, theirs, tokens), strict=True))
    errors |= zip(
        ERRORS[2:], errors_of(model.double(), widened(theirs.double(), config), tokens), strict=True
    )
    return errors | {"round_trip": kept and same and back.config == config}


def errors_of(model: mono.Llama, theirs: Any, tokens: Tensor) -> tuple[float, float]:
    """Return the distance of the logits, and the largest distance of a parameter's gradient."""
    logits = model.logits(model(tokens))
    with Wide() if logits.dtype == torch.float64 else contextlib.nullcontext():
        # Without a cache, as theirs has none for models of delta nets alone.
        their_logits = theirs(tokens, use_cache=False).logits
    # A layer's factor, which is a buffer in transformers, is not trained.
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith(".layer_scalar")
    }
    their_named = dict(theirs.named_parameters())
    found = dict(zip(named, gradients_of(logits, list(named.values())), strict=True))
    unread = (
        UnreadTensor(name, gradient.to("meta"), gradient.clone) for name, gradient in found.items()
    )
    in_memory = FusedExpertsRule(model.config).to_files(
        JoinedLayersRule(model.config).to_files(unread)
    )
    mine = {name_in_memory(tensor.name): tensor.read() for tensor in in_memory}
    gradients, expected = (
        mine.values(),
        gradients_of(their_logits, [their_named[name] for name in mine]),
    )
    # Where every query sees one key only, the gradients of scores are zero, rounded by fp32's eps
    # of all gradients.
    least = 1e-2 * float(torch.stack([gradient.norm() for gradient in expected]).norm())
    worst = max(distance(one, other, least) for one, other in zip(gradients, expected, strict=True))
    return distance(logits, their_logits), worst


def name_in_memory(name: str) -> str:
    """Return the name in transformers of a tensor that its files call otherwise."""
    for in_files, in_memory in RENAMED.items():
        name = name.replace(in_files, in_memory)
    return name


def models(config: mono.LlamaConfig, seed: int) -> Iterator[mono.Llama]:
    """Yield models with random weights, without end."""
    for again in itertools.count():
        model = mono.Llama(config, seed + 1000 * again)
        unsettled(model, seed)
        yield model


def margin(model: mono.Llama, tokens: Tensor) -> float:
    """Return the least distance between the last probability that chose an expert and the first
    that did not.
    """
    found = [1.0]

    def note(router: Any, inputs: tuple[Tensor], _: Any) -> None:
        shares = (
            torch.nn.functional.linear(inputs[0], router.weight, router.bias)
            .softmax(-1)
            .sort(-1, descending=True)
            .values
        )
        if router.top_k < shares.shape[1]:
            found.append(float((shares[:, router.top_k - 1] - shares[:, router.top_k]).min()))

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, Router)
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return min(found)


def widened(theirs: nn.Module, config: mono.LlamaConfig) -> nn.Module:
    """Return transformers' float64 model with rotary angles in float64, too, whose frequencies are
    made in fp32.
    """
    # Layers without a window, as the last one, may have heads of another width.
    without_window = config.of_layer(config.num_hidden_layers - 1)
    tables = [
        cos_sin(torch.arange(LENGTH)[None], of_layer, torch.float64, local)
        for of_layer, local in ((without_window, False), (config, True))
    ]

    def rotary(x: Tensor, position_ids: Tensor, layer_type: str = "") -> tuple[Tensor, Tensor]:
        cos, sin = tables[layer_type == SLIDING_ATTENTION]
        again = 1 if config.model_type == "gpt_oss" else 2
        return cos.squeeze(1).repeat(1, 1, again), sin.squeeze(1).repeat(1, 1, again)

    for module in theirs.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = rotary
    return theirs


class Wide(TorchFunctionMode):
    """Makes whatever asks for fp32 get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with float64 in place of fp32."""
        args, named = (
            [WIDER.get(each, each) if isinstance(each, torch.dtype) else each for each in args],
            kwargs or {},
        )
        named = {
            key: WIDER.get(each, each) if isinstance(each, torch.dtype) else each
            for key, each in named.items()
        }
        return (Tensor.double if func is Tensor.float else func)(*args, **named)


def unsettled(model: nn.Module, seed: int) -> None:
    """Draw random biases and norm weights, since the zeros and ones of a fresh model would hide a
    fault.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def random_tokens(config: mono.LlamaConfig, seed: int) -> Tensor:
    """Return rows of ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)


def gradients_of(logits: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed function of the logits."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    return torch.autograd.grad((logits * weights).sum(), parameters)


def distance(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """Return the Euclidean distance over the norm of `other`, or over `least` if that is larger; in
    float64.
    """
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm()) / max(float(other.norm()), least)


if __name__ == "__main__":
    main()
