# Run: pytest tests/model/test_config_keys.py
"""Every key of a config.json that transformers reads means here what it means there, or is refused
by its name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from model import config_draws
from model.family_shapes import in_files, margin
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.model.hub import read_config
from monograph.model.layer_types import LINEAR_ATTENTION
from monograph.model.llama import Llama

BOUND = 1e-5  # in fp32, what docs/model.md promises


def test_the_draws_have_every_key_that_transformers_reads():
    from transformers import CONFIG_MAPPING, PreTrainedConfig, cache_utils, masking_utils
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

    read = {
        field.name for family in FAMILIES for field in dataclasses.fields(CONFIG_MAPPING[family])
    }
    for taking in (
        PreTrainedConfig.__post_init__,
        RotaryEmbeddingConfigMixin.convert_rope_params_to_dict,
    ):
        read |= {*re.findall(r"\bkwargs\.(?:pop|get)\(\"(\w+)\"", inspect.getsource(taking))}
    homes = [
        CONFIG_MAPPING[family].__module__.replace("configuration_", "modeling_")
        for family in FAMILIES
    ]
    decoders = [importlib.import_module(home) for home in homes]
    for module in (masking_utils, cache_utils, *decoders):
        source = inspect.getsource(module)
        read |= {*re.findall(r"getattr\((?:self\.|\w*_)?config, \"(\w+)\"", source)}
        read |= (
            {*re.findall(r"\bself\.config\.([a-z]\w+)\b(?!\()", source)}
            if module in decoders
            else set()
        )
    draw = random.Random(0)
    drawn = {
        *config_draws.IDLE,
        *config_draws.keys_that_count(draw, 30),
        "model_type",
        "vocab_size",
        "hidden_size",
    }
    # Of a Gemma 3 or a Qwen 3.5 that sees, in the same file.
    of_images = {f"{each}_token_id" for each in ("image", "video", "vision_start", "audio")}
    of_images |= {"text_config", "vision_config", "spatial_merge_size"}
    # Of the parts of a Gemma 4 that see and hear.
    of_images |= {"audio_config"} | {
        field.name
        for part in ("gemma4_audio", "gemma4_vision")
        for field in dataclasses.fields(CONFIG_MAPPING[part])
    }
    assert read - drawn - of_images - {"_attn_implementation"} == set()


def test_random_files_are_computed_as_transformers_does_or_refused_by_name(tmp_path):
    counts = _compared(range(36), tmp_path)
    assert counts["equal"] >= 13 and counts["refused here"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_random_files_are_computed_as_transformers_does_or_refused_by_name(tmp_path):
    counts = _compared(range(500), tmp_path)
    print(dict(counts))
    # Enough of them are compared, though most draws have a key that one family or another refuses.
    assert counts["equal"] >= 200


def _compared(seeds, folder: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        family = list(FAMILIES)[seed % len(FAMILIES)]
        values = config_draws.drawn(family, random.Random(f"{family} {seed}"))
        (folder / "config.json").write_text(json.dumps(values))
        try:
            config = read_config(folder)
        except InputRefused as error:
            fault = str(error).partition("config.json: ")[2]
            # A file that leaves a key out has the family's default of it.
            may_be_named = _named(values) | {*FAMILIES[family].defaults}
            assert any(re.search(rf"\b{key}\b", fault) for key in may_be_named), (
                seed,
                values,
                fault,
            )
            counts["refused here"] += 1
            continue
        # With longrope, of which long texts are refused.
        if config.max_position_embeddings < config_draws.LENGTH:
            counts["refused here"] += 1
            continue
        theirs = _theirs(folder)
        if theirs is None:
            counts["refused by transformers alone"] += 1
            continue
        _assert_equal(config, theirs, (seed, values))
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
        assert read_config(folder) == config, (seed, values)
        _assert_equal(config, _theirs(folder), (seed, values))
        counts["equal"] += 1
    return counts


def _named(values: dict) -> set[str]:
    """What a refusal may name: a key of the file or of its rotary tables, or one that a table
    lacks.
    """
    inner = [_named(each) for each in values.values() if isinstance(each, dict)]
    return {*values, "rope_type", "factor"}.union(*inner)


def _theirs(folder):
    """The model that transformers makes of a config.json, in fp32; None where it refuses the file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.config.return_dict = True  # their own forward pass needs it
        # Some files make a model that cannot be called.
        model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        return model
    except Exception:
        return None


def _assert_equal(config: LlamaConfig, theirs, drawn) -> None:
    # Where a state is corrected again and again, fp32's own error (of both, compared with float64)
    # is larger.
    spread, bound = (
        (0.1, 5 * BOUND) if config.family.other_layer_type == LINEAR_ATTENTION else (0.3, BOUND)
    )
    spread = 0.1 if config.family.attention_sinks else spread  # as in benchmarks/families.py
    generator = torch.Generator().manual_seed(0)
    tokens = (
        torch.randperm(2 * config_draws.LENGTH, generator=generator).view(2, -1) % config.vocab_size
    )
    models = (
        Llama(dataclasses.replace(config, initializer_range=spread), seed)
        for seed in itertools.count()
    )
    model = next(model for model in models if margin(model, tokens) > 1e-5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    theirs.load_state_dict(in_files(model.state_dict(), config))
    # Every row of the vocabulary is looked up, the padding's too.
    ours, logits = model.logits(model(tokens)), theirs(tokens, use_cache=False).logits
    assert relative_error(ours, logits) < BOUND, drawn
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    named, others = dict(model.named_parameters()), dict(theirs.named_parameters())
    # A layer's factor, which is a buffer in transformers, is not trained.
    trained = {name: each for name, each in named.items() if not name.endswith(".layer_scalar")}
    gradients = torch.autograd.grad((ours * weights).sum(), list(trained.values()))
    found = in_files(dict(zip(trained, gradients, strict=True)), config)
    assert found.keys() == others.keys(), drawn
    expected = torch.autograd.grad((logits * weights).sum(), [others[name] for name in found])
    # Where a query sees one key only, the gradients of scores are zero, computed with fp32's eps of
    # the whole gradient.
    scale = torch.cat([gradient.flatten() for gradient in expected]).norm()
    for (name, mine), wanted in zip(found.items(), expected, strict=True):
        assert (mine - wanted).norm() < bound * max(wanted.norm(), 1e-2 * scale), (name, drawn)
        if name.endswith("embed_tokens.weight"):
            assert torch.equal(mine.norm(dim=1) == 0, wanted.norm(dim=1) == 0), drawn
    kept = ["attention_dropout", "bos_token_id", "eos_token_id"]
    balance_keys = ["output_router_logits", "router_aux_loss_coef"]
    kept += [key for key in balance_keys if key in config.family.optional_keys]
    # Some have no dropout, and a GLM's null means ids of its own there.
    same = {key: getattr(theirs.config, key) for key in kept if hasattr(theirs.config, key)}
    if config.eos_token_id is None and config.model_type in ("glm", "glm4"):
        del same["eos_token_id"]
    assert {key: config.to_hf()[key] for key in same} == same, drawn
