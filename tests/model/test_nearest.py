# Run: pytest tests/model/test_nearest.py
"""A model of an unknown model_type is computed as what it is, or refused by the key that differs."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from model import config_draws
from model.family_shapes import MIXED, SMALL
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES, MULTIPLIERS, keys_in_files
from monograph.model.hub import assumption, load_model, read_config, save_model
from monograph.model.llama import Llama
from monograph.model.nearest import HIDDEN_FAMILIES
from monograph.run.models import load
from monograph.run.source import ModelSource

UNKNOWN = "brand_new"
# What these small models are refused for: a window, or a part that is always on, without a key.
REFUSED = {
    "mistral": "layer_types",
    "ministral3": "layer_types",
    "phi3": "layer_types",
    "qwen3_moe": "use_sliding_window",
}
# Those of whose difference no key tells, and which are not taken for another model.
VISIBLE = [family for family in FAMILIES if family not in HIDDEN_FAMILIES]
# Keys of exports that only programs other than transformers read.
NOT_TRANSFORMERS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
# Keys of parts that are on in some family without their key.
ON_WITHOUT_KEY = {
    "layer_types",
    "no_rope_layers",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "rope_parameters",
    "rope_scaling",
    *MULTIPLIERS,
}
# Keys that are understood, though no value of theirs changes a configuration.
MAY_CHANGE_NOTHING = {
    "mamba_chunk_size",  # changes no number
    *("hidden_size", "intermediate_size", "num_local_experts", "vocab_size"),  # shapes tell
    *("num_hidden_layers", "tie_word_embeddings"),  # so do tensors
    *("norm_topk_prob", "use_sliding_window", "quantization_config"),  # only one value is taken
}
# Types of transformers that differ from a family in keys, tensors, or neither.
BY_DAY = ["cwm", "ministral", "seed_oss"]


def _rewrite(folder: Path, **changed) -> dict:
    """Change keys of a folder's config.json; None leaves a key out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: each for key, each in values.items() if each is not None}))
    return values


def _varied(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model whose biases and norms differ from those of a fresh one."""
    model, generator = Llama(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _logits(model: Llama, length: int = config_draws.LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        return model.logits(model(tokens))


@pytest.mark.parametrize("family", VISIBLE)
def test_a_family_under_another_name_computes_the_same_bits(tmp_path, family):
    model = _varied(LlamaConfig(model_type=family, **SMALL | MIXED[family]))
    save_model(model, tmp_path / "new")
    foreign = dict.fromkeys(NOT_TRANSFORMERS if family == "granitemoehybrid" else ())
    _rewrite(tmp_path / "new", model_type=UNKNOWN, **foreign)
    if family in REFUSED:
        with pytest.raises(
            InputRefused, match=rf"'{UNKNOWN}' is not supported: .* {REFUSED[family]}"
        ):
            load_model(tmp_path / "new")
        return
    loaded = load_model(tmp_path / "new")
    assert torch.equal(_logits(loaded), _logits(model))
    assert f"'{UNKNOWN}' is unknown: computed as {loaded.config.model_type}," in assumption(
        tmp_path / "new"
    )


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("exaone4", ""),
        ("gemma", ""),
        ("gemma4_text", ""),
        ("glm", ""),
        ("glm4", ""),
        ("helium", ""),
        ("ernie4_5", "it has no use_bias = False"),
    ],
)
def test_a_hidden_family_is_not_taken_for_another(tmp_path, family, said):
    save_model(_varied(LlamaConfig(model_type=family, **SMALL | MIXED[family])), tmp_path / "new")
    ernies = {"use_bias": False} if family == "ernie4_5" else {}
    _rewrite(tmp_path / "new", model_type=UNKNOWN, **ernies)
    with pytest.raises(InputRefused, match=rf"'{UNKNOWN}' is not supported: .*{said}"):
        load_model(tmp_path / "new")


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"tie_word_embeddings": None}),
        ("qwen2", {"layer_types": None, "sliding_window": 131_072, "max_window_layers": 1}),
        ("qwen3", {"layer_types": None, "head_dim": None, "num_key_value_heads": None}),
        ("granite", {"attention_multiplier": None}),
        ("smollm3", {"no_rope_layers": None}),
        ("gpt_oss", {"rope_parameters": None}),
    ],
)
def test_a_part_without_a_key_is_off(tmp_path, family, changed):
    """Not what the family itself would take for a key that is left out."""
    sizes = SMALL | {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    if family == "gpt_oss":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    model = _varied(LlamaConfig(model_type=family, **sizes))
    save_model(model, tmp_path / "new")
    _rewrite(tmp_path / "new", model_type=UNKNOWN, bos_token_id=None, **changed)
    loaded = load_model(tmp_path / "new")
    assert torch.equal(_logits(loaded), _logits(model))
    assert loaded.config.bos_token_id is None


def test_who_loads_it_is_told_once(tmp_path):
    save_model(Llama(LlamaConfig.preset("nano")), tmp_path / "new")
    _rewrite(tmp_path / "new", model_type=UNKNOWN)
    said = list[str]()
    load(tmp_path / "new", said.append)
    assert said == [assumption(tmp_path / "new")]
    assert ModelSource.open(str(tmp_path / "new")).assumption == said[0]


def test_a_known_family_has_nothing_assumed(tmp_path):
    save_model(Llama(LlamaConfig.preset("nano")), tmp_path / "known")
    assert assumption(tmp_path / "known") == ""


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"attention_out_scale": 1.0}, "attention_out_scale = 1.0"),
        ({"is_post_norm": False}, "is_post_norm = False"),
        ({"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"sliding_window": 8}, "layer_types is missing"),
        ({"sliding_window": 8, "use_sliding_window": True}, "use_sliding_window = True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_theta": None}, "rope_theta is missing"),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 5e5},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_theta is missing",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"hidden_act": None}, "hidden_act is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 3}}, "rope_scaling.beta = 3"),
        ({"residual_dropout": 0.1}, "residual_dropout = 0.1"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"head_dim": "8", "attention_multiplier": 0.3}, "head_dim"),
        ({"layer_types": 3}, "layer_types = 3"),
    ],
)  # fmt: skip
def test_what_no_family_has_is_refused_by_key(tmp_path, changed, key):
    save_model(Llama(LlamaConfig.preset("nano")), tmp_path / "new")
    _rewrite(tmp_path / "new", model_type=UNKNOWN, **changed)
    with pytest.raises(InputRefused) as caught:
        read_config(tmp_path / "new")
    assert key in str(caught.value)


def test_a_tensor_that_no_family_has_is_refused_by_name(tmp_path):
    save_model(Llama(LlamaConfig.preset("nano", num_hidden_layers=3)), tmp_path / "new")
    _rewrite(tmp_path / "new", model_type=UNKNOWN, tie_word_embeddings=False)
    with pytest.raises(InputRefused, match=r"missing in the weights .* 'lm_head.weight'"):
        read_config(tmp_path / "new")


def test_random_files_under_another_name_are_never_computed_wrongly(tmp_path):
    counts = _renamed(range(51), tmp_path)
    assert counts["equal"] >= 8 and counts["refused"] >= 5, counts


@pytest.mark.slow
def test_2000_random_files_under_another_name_are_never_computed_wrongly(tmp_path):
    counts = _renamed(range(2000), tmp_path)
    print(dict(counts))
    assert counts["equal"] >= 200, counts


def _renamed(seeds, folder: Path) -> Counter[str]:
    """Rename random files of families, whose keys and defaults are then those of the truth."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        family = VISIBLE[seed % len(VISIBLE)]
        draw = random.Random(f"{family} {seed}")
        drawn, target = config_draws.drawn(family, draw), folder / str(seed)
        try:
            whole = LlamaConfig.from_hf(drawn).to_hf()
            # More of what the family reads, and a few keys left out, but none of a part that would
            # then be on in this family.
            read = keys_in_files(FAMILIES[family]) | {*config_draws.IDLE}
            more = {
                key: each for key, each in drawn.items() if draw.random() < 0.03 and key in read
            }
            values = whole | more
            for key in draw.sample(sorted(values), draw.choice([0, 0, 1, 2])):
                if key not in ON_WITHOUT_KEY:
                    del values[key]
            values |= {"model_type": family}
            config = LlamaConfig.from_hf(values)
        except InputRefused:
            continue
        if config.max_position_embeddings < config_draws.LENGTH:
            continue
        model = _varied(dataclasses.replace(config, initializer_range=0.1), seed)
        save_model(model, target)
        if family == "granitemoehybrid":
            values = {key: each for key, each in values.items() if key not in NOT_TRANSFORMERS}
        text = json.dumps({**values, "model_type": UNKNOWN})
        (target / "config.json").write_text(text)
        try:
            loaded = load_model(target)
        except InputRefused as error:
            assert f"model_type = '{UNKNOWN}' is not supported" in str(error), (values, error)
            counts["refused"] += 1
            continue
        assert torch.equal(_logits(loaded), _logits(model)), (
            f"{family} {json.dumps(values)} {loaded.config}"
        )
        counts["equal"] += 1
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_counts_as_understood_is_read(family):
    """A key of the family changes its configuration, or is refused, for one of its values."""
    ignored = set()
    for key in keys_in_files(family=FAMILIES[family]) - MAY_CHANGE_NOTHING:
        reactions = set()
        for seed in range(300):
            draw = random.Random(f"{family} {key} {seed}")
            values = config_draws.drawn(family, draw)
            choices = {**config_draws.IDLE, **config_draws.keys_that_count(draw, 30, family)}
            if key not in choices:
                continue
            without = {name: each for name, each in values.items() if name != key}
            reactions.add(_read(without) != _read({**without, key: draw.choice(choices[key])}))
            if True in reactions:
                break
        if True not in reactions and reactions:
            ignored.add(key)
    assert not ignored


def _read(values: dict) -> LlamaConfig | str:
    try:
        return LlamaConfig.from_hf(values)
    except InputRefused as error:
        return str(error)


def _theirs(model_type: str, draw: random.Random):
    """A small random model of a type of transformers; None if it makes none of such sizes."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    cls = CONFIG_MAPPING[model_type]
    keys = {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map}
    counting = config_draws.keys_that_count(draw, 30)
    small = {
        "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": draw.choice([2, 5]), "intermediate_size": 24,
        "num_attention_heads": draw.choice([1, 4, 4]), "num_key_value_heads": draw.choice([1, 2, 4]),
        "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "pad_token_id": None,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "shared_expert_intermediate_size": 16, "max_position_embeddings": 64, "n_embd": 32, "n_layer": 2,
        "n_head": 4, "num_layers": 2, "d_model": 32, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    values = {key: draw.choice(choices) for key, choices in counting.items() if draw.random() < 0.3}
    if draw.random() < 0.7:
        values["hidden_act"] = "silu"
    values = {key: each for key, each in (values | small).items() if key in keys}
    if "layer_types" in values:
        kinds = ["full_attention", "sliding_attention"]
        values["layer_types"] = [draw.choice(kinds) for _ in range(small["num_hidden_layers"])]

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        config = cls(**values)
        with torch.device("meta"):
            size = sum(
                each.numel() for each in AutoModelForCausalLM.from_config(config).parameters()
            )
        if size > 2_000_000:
            return None
        torch.manual_seed(draw.randrange(1000))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, each in model.named_parameters():
                around = 1.0 if each.ndim == 1 and "norm" in name else 0.0
                each.copy_(around + 0.2 * torch.randn(each.shape))
        model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        return model
    except Exception:
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _all_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES))


@pytest.mark.parametrize("model_type", BY_DAY)
def test_other_types_of_transformers_are_equal_or_refused(tmp_path, model_type):
    _other_type(tmp_path, model_type, draws=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_types_of_transformers_are_equal_or_refused(tmp_path):
    counts: Counter[str] = Counter()
    for model_type in _all_types():
        found = _other_type(tmp_path, model_type, draws=6)
        counts += found
        if found["equal"]:
            print(model_type, dict(found))
    print(dict(counts))
    assert counts["equal"] >= 8 and counts["refused"] >= 200


def _other_type(folder: Path, model_type: str, draws: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(draws):
        theirs = _theirs(model_type, random.Random(f"{model_type} {seed}"))
        if theirs is None:
            continue
        target = folder / f"{model_type}-{seed}"
        theirs.save_pretrained(target)
        try:
            ours = load_model(target)
        except InputRefused as error:
            assert "is not supported" in str(error), error
            counts["refused"] += 1
            continue
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(30, (2, 40), generator=generator)
        with torch.no_grad():
            expected = theirs(tokens, use_cache=False).logits
            error = relative_error(ours.logits(ours(tokens)), expected)
        assert error < 1e-5, (model_type, theirs.config, ours.config)
        counts["equal"] += 1
    return counts
