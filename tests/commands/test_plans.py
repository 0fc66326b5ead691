# Run: pytest tests/commands/test_plans.py        (with -s it prints each plan)
"""Plans that people ask for: each is one screen of plain words, and names what would fit where the
request does not.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from monograph.cli import main
from monograph.planner import defaults
from monograph.planner.placement_bytes import StreamWay
from monograph.predict.estimate import estimate_bytes

LINES, COLUMNS = 25, 100


COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def shape(**values):
    return {
        **COMMON,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        **values,
    }


# The published shapes of models of these names.
MODELS = {
    "Meta-Llama-3-70B": shape(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Llama-3.2-3B": shape(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": shape(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=151936, hidden_size=896,
        intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        tie_word_embeddings=True, rope_theta=1000000.0, rms_norm_eps=1e-6, use_sliding_window=False,
        max_position_embeddings=32768,
    ),
    "Qwen3-30B-A3B": shape(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, rope_theta=1000000.0, rms_norm_eps=1e-6,
        max_position_embeddings=40960, router_aux_loss_coef=0.001,
    ),
}  # fmt: skip


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path):
    """Run `monograph plan` with memory by the closed form, as traces take seconds each; return
    code, out and err.

    It runs in a folder that has a folder for each of MODELS, with its config.json alone.
    """
    monkeypatch.chdir(tmp_path)
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    def estimated(work):
        return SimpleNamespace(by_origin={"weights": estimate_bytes(work)})

    monkeypatch.setattr(defaults, "traced_bytes", lambda work: estimated(work).by_origin)
    by_closed_form = property(lambda way: way.pass_bytes)
    monkeypatch.setattr(StreamWay, "traced_pass_bytes", by_closed_form)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["plan", *arguments])
        return stop.value.code, *capsys.readouterr()

    return run


ADAPTERS = ("lora.rank=16",)
REQUESTS = {
    "8B adapters, 24 GB": (("model.preset=8b", *ADAPTERS, "--device", "RTX 4090"), "8.03 G parameters frozen in 16"),
    "8B adapters, 16 GB": (("model.preset=8b", *ADAPTERS, "--device", "RTX 4080"), "lora.base=nf4"),
    "1B from scratch": (("model.preset=1b", "--device", "H100"), "256 rows of 4,096 tokens"),
    "124M, 12 GB": (("model.preset=124m", "--device", "RTX 3060"), "20 a parameter"),
    "30B-A3B adapters": (
        ("model.init=Qwen3-30B-A3B", *ADAPTERS, "--device", "4090", "--host-memory", "8GiB"), "what would fit"
    ),
    "70B adapters": (
        ("model.init=Meta-Llama-3-70B", *ADAPTERS, "--device", "4090"),
        "lora.base=nf4 --device",
    ),
    "8B streamed": (
        ("model.preset=8b", "train.memory=stream", "train.tokens_per_update=128Ki", "--device", "4090",
         "--host-memory", "512GiB"),
        "streamed",
    ),
    "1B rewards": (
        ("model.preset=1b", "rl.reward=number", "rl.max_new_tokens=256", "--device", "4090"),
        "RTX 4090, 24.0 GiB, 12.9 GiB usable; speed by datasheet\n         beside answers 10.1 GiB",
    ),
    "8B preferences": (("model.preset=8b", *ADAPTERS, "prefer.loss=dpo", "--device", "L40S"), "fits"),
    "0.5B, T4": (("model.init=Qwen2.5-0.5B", "--device", "T4"), "Qwen2.5-0.5B, vocabulary 151,936"),
    "3B adapters, 8 GB": (
        ("model.init=Llama-3.2-3B", *ADAPTERS, "--device", "RTX 3070"),
        "lora.base=",
    ),
    "a budget": (("model.preset=124m", "--device", "4090", "--minutes", "60"), "what the time allows"),
}  # fmt: skip


# They take seconds, as many placements of many layers are timed; the others say the same words by day.
NIGHTLY = {"70B adapters", "8B streamed", "30B-A3B adapters"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each in NIGHTLY else ()) for each in REQUESTS],
)
def test_a_plan_is_one_screen_of_plain_words(plan, name):
    arguments, words = REQUESTS[name]
    code, out, err = plan(*arguments)
    print(f"$ monograph plan {' '.join(arguments)}\n{out}{err}")
    lines = out.splitlines()
    assert code == 0 and not err
    assert words in out
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert not re.search(r"\b[1-9]\d{2,}% slower", out)


def test_a_plan_here_is_of_what_train_does(plan, tmp_path):
    """So its rows and its vocabulary are those that a text of this size gets."""
    (tmp_path / "text.txt").write_text("a text to train on\n" * 100)
    code, out, _ = plan(str(tmp_path / "text.txt"), "model.preset=8b", "model.num_hidden_layers=1")
    assert (
        code == 0
        and "8b, vocabulary 4,096" in out
        and "8 rows of 256 tokens" in out
        and "add to train" not in out
    )


def test_each_change_that_would_fit_can_be_typed(plan):
    """A row of the table, added to the command, gives a plan that fits. The host is too small to stream
    from.
    """
    arguments = ("model.preset=8b", *ADAPTERS, "--device", "RTX 4080", "--host-memory", "1GiB")
    found = json.loads(plan(*arguments, "--json")[1].splitlines()[-1])
    assert found["chosen"] is None
    changes = [change["change"] for change in found["changes"]]
    assert {"lora.base=int8", "lora.base=nf4"} <= {*changes}
    for change in changes:
        typed = change.split()
        kept = arguments[:2] if "--device" in typed else arguments
        kept = kept[1:] if change.startswith("model.preset=") else kept
        if change.startswith("train.memory=stream"):
            kept = (*kept[:-1], "64GiB")  # the host that the row names, or a larger one
        again = json.loads(plan(*kept, *typed, "--json")[1].splitlines()[-1])
        assert again["chosen"], change


def test_weights_that_a_plan_stands_in_for_are_not_taken_for_a_new_model(plan):
    """The rates, the rows and the precision are those of a model that exists; nothing is left on
    the disk.
    """
    code, out, _ = plan(
        "model.preset=1b", "model.num_hidden_layers=4", *ADAPTERS, "--device", "H100"
    )
    assert code == 0 and "16 rows of 1,024 tokens" in out and "add to train" in out


def test_adapters_without_any_shape_are_told_both_ways_to_give_one(plan):
    code, _, err = plan(*ADAPTERS, "--device", "H100")
    assert code == 2 and "model.init" in err and "model.preset" in err
