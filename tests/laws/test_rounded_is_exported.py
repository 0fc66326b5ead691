"""Run: pytest tests/laws/test_rounded_is_exported.py [-m slow]

Law 11 for weights that are rounded in training (train.quantize): the model that was trained is the GGUF
file of it, bit for bit; and its training is the slow, obvious one.

The slow way rounds the weights by the package that writes GGUF files before each window, computes the
gradient there, puts the unrounded weights back, and updates these by an ordinary engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import monograph as mono
from alone import stacked
from batches import captured_to_train, packed, ragged, tiny_config, tiny_llama
from chats import speaking
from laws.test_exported_is_original import SHAPES, SIZES, in_blocks, logits_of, model_of, read_back
from llama_cpp import LlamaCpp
from monograph.errors import InputRefused, UsageError
from monograph.graph.lora_merge import plain_parameters
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.gguf import (
    FILE,
    TRAINED_DTYPES,
    block_formats,
    llama_cpp_tensors,
    require_blocks,
    save_gguf,
)
from monograph.model.llama import Llama
from monograph.ops.weight_blocks import round_to_blocks
from monograph.optim import AdamW, Muon
from monograph.resident import Resident
from monograph.step import Clip, Step
from monograph.text.tokenizer import Tokenizer

gguf = pytest.importorskip(
    "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
)
RATE = 0.01  # large, so that many weights change their integers


def untied(dtype: torch.dtype = torch.float32, seed: int = 0) -> Llama:
    """With an embedding and a head, which may have other formats, and inner layers of another width."""
    return tiny_llama(dtype, seed, intermediate_size=64, tie_word_embeddings=False)


def of_a_file(weights: Tensor, block_format: str) -> Tensor:
    """Weights as the package that writes GGUF files rounds them."""
    kind = gguf.GGMLQuantizationType[block_format]
    rows = weights.detach().float().numpy()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(rows, kind), kind)).to(weights.dtype)


class SlowWay:
    """An ordinary engine, whose weights are rounded while it computes a gradient.

    Attributes:
        masters: the unrounded weights by name.
    """

    def __init__(self, model: Llama, quantize: str, **options: Any) -> None:
        self.formats = block_formats(model, quantize)
        self.engine = Resident(model, **options)
        self.parameters = dict(model.named_parameters())
        self.masters = {name: self.parameters[name].detach().clone() for name in self.formats}

    def rounded(self) -> dict[str, Tensor]:
        """Return all parameters, rounded as a file has them."""
        return {
            name: of_a_file(self.masters[name], self.formats[name])
            if name in self.formats
            else parameter.detach().clone()
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, window: dict[str, Tensor]) -> None:
        """Make one update of the masters, by the gradient at the rounded weights."""
        for name, values in self.rounded().items():
            self.parameters[name].copy_(values)
        with torch.enable_grad():
            self.engine.accumulate(window)
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)
        self.engine.update()
        self.masters = {name: self.parameters[name].detach().clone() for name in self.formats}


def trained(model: Llama, quantize: str, **options: Any) -> Resident:
    return Resident(model, block_formats=block_formats(model, quantize), **options)


def master_of(engine: Any) -> dict[str, Tensor]:
    prefix = "master."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in engine.state().optimizer.items()
        if name.startswith(prefix)
    }


def require_equal(fast: Resident, slow: SlowWay) -> None:
    """Require the same bits of the weights that are computed with and of those that are kept."""
    expected = slow.rounded()
    found = dict(fast.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    masters = master_of(fast)
    assert masters.keys() == slow.masters.keys()
    for name, values in slow.masters.items():
        assert torch.equal(masters[name], values), name


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize(
    ("optim", "options"),
    [
        (AdamW(lr=RATE), {}),
        (Muon(lr=RATE), {"precision": Precision("bf16"), "remat": Remat.Full()}),
        (AdamW(lr=RATE, state="8bit"), {"micro_batch": None}),
    ],
    ids=["adamw", "muon bf16 recomputed", "8bit"],
)
def test_training_is_the_slow_way(
    quantize: str, optim: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several micro-batches an update; none is clipped, as the sum of squares has another order."""
    # Otherwise the slow way moves one weight of 131,072 for a streamed engine, which does not round.
    monkeypatch.setattr("monograph.step.clip.splittable", lambda weights: weights)
    options = {"micro_batch": 2, "optim": optim, **options}
    fast, slow = trained(untied(), quantize, **options), SlowWay(untied(), quantize, **options)
    require_equal(fast, slow)
    first = {name: tensor.clone() for name, tensor in fast.model.named_parameters()}
    for seed in range(4):
        window = ragged(6, seed)
        fast.accumulate(window)
        fast.update()
        slow.update(window)
        require_equal(fast, slow)
    # An engine that trains nothing, or loses what is below a step, would pass otherwise.
    moved = {
        name: float((tensor != first[name]).float().mean())
        for name, tensor in fast.model.named_parameters()
        if name in slow.formats
    }
    assert min(moved.values()) > 0.01, moved


def test_the_gradient_is_straight_through_and_not_rounded() -> None:
    """The accumulated gradient of any cut of the window is that at the rounded weights."""
    model = untied(torch.float64)
    engine = trained(model, "int4", micro_batch=2)
    reference = untied(torch.float64)
    formats = block_formats(reference, "int4")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in formats:
                parameter.copy_(of_a_file(parameter, formats[name]))
    window = packed(6)
    engine.accumulate(window)
    losses, count = mono.token_loss(reference, window)
    (losses / count).backward()
    for (name, parameter), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert relative_error(parameter.grad, expected.grad) < 1e-12, name


def test_a_format_that_no_file_has_is_refused() -> None:
    with pytest.raises(UsageError, match="^quantize = 'int5': expected none, int4 or int8$"):
        block_formats(untied(), "int5")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_tensor_of_a_file_is_rounded_as_the_file_has_it(family: str) -> None:
    """The head, tied or not, has 8 bits; norms and biases stay as they are."""
    shape = LlamaConfig(**{"model_type": family, "vocab_size": 96, **SIZES, **SHAPES[family]})
    model = Llama(shape)
    formats = block_formats(model, "int4")
    embedding, head = formats["model.embed_tokens.weight"], formats.get("lm_head.weight")
    assert (embedding, head) == (("Q8_0", None) if family == "qwen3" else ("Q4_0", "Q8_0"))
    assert set(formats) == {name for name, p in model.named_parameters() if p.ndim == 2}
    assert set(block_formats(model, "int8").values()) == {"Q8_0"}
    assert block_formats(model, "none") == {}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow if at % 3 else ())
        for at, each in enumerate(SHAPES)
    ],
)
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_the_file_holds_the_numbers_of_training(tmp_path: Path, family: str, quantize: str) -> None:
    """In every family: in each tensor of the file, whatever the order of its rows and columns."""
    tokenizer = Tokenizer.bytes()
    model = model_of(family, tokenizer).requires_grad_(True)
    require_blocks(model.config, quantize)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    trained(model, quantize)
    save_gguf(model, tmp_path / "out", tokenizer, TRAINED_DTYPES[quantize], lambda line: None)
    stored = read_back(tmp_path / "out" / FILE)
    for tensor in llama_cpp_tensors(plain_parameters(model), model.config):
        assert torch.equal(stored[tensor.name], tensor.read()), tensor.name
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_delta_net_whose_heads_are_not_whole_blocks_is_refused() -> None:
    """Otherwise a block of the file would have weights of two blocks of the model."""
    shape = {"model_type": "qwen3_5_text", "vocab_size": 96, **SIZES, **SHAPES["qwen3_5_text"]}
    config = LlamaConfig(**shape)
    require_blocks(config, "int4")
    with pytest.raises(InputRefused, match=r"other blocks of 32 weights.*: leave it out"):
        narrow_heads = replace(config, linear_key_head_dim=16, linear_value_head_dim=16)
        require_blocks(narrow_heads, "int4")
    with pytest.raises(InputRefused, match=r"none of this model: intermediate_size = 48 is not"):
        require_blocks(tiny_config(), "int8")


def read_model(path: Path, like: Llama) -> Llama:
    """The model of a file, whose tensors are those of `like` in llama.cpp's order."""
    stored = read_back(path)
    model = Llama(like.config)
    own = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    positions = {
        name: torch.arange(p.numel(), dtype=torch.float64).view_as(p)
        for name, p in like.named_parameters()
    }
    probe = Llama(like.config).double()
    with torch.no_grad():
        for name, parameter in probe.named_parameters():
            parameter.copy_(positions[name])
    names = [name for name, _ in probe.named_parameters()]
    tensors = [*llama_cpp_tensors(plain_parameters(probe), like.config)]
    assert len(names) == len(tensors)
    for name, tensor in zip(names, tensors, strict=True):
        own[name].view(-1)[tensor.read().long().flatten()] = stored[tensor.name].flatten()
    model.load_state_dict(own, strict=False)
    return model


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_logits_are_those_of_the_file_and_llama_cpp_goes_on_alike(
    tmp_path: Path, quantize: str
) -> None:
    """Bit for bit if the file's weights are read as fp32. llama.cpp rounds what goes into each product
    to blocks of 8 bits, so each logit may be off by twice what that does to the model in fp32.
    """
    tokenizer = speaking(tmp_path / "words", "chatml")
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, "initializer_range": 0.1}
    model = Llama(LlamaConfig(**sizes))
    engine = trained(model, quantize, optim=AdamW(lr=RATE))
    text = tokenizer.encode("the user said that the answer is a word and the user said it again")
    tokens = torch.tensor([[tokenizer.bos_id, *text]])
    for _ in range(6):
        engine.accumulate({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        engine.update()
    model.requires_grad_(False)
    save_gguf(model, tmp_path / "out", tokenizer, TRAINED_DTYPES[quantize], lambda line: None)
    path = tmp_path / "out" / FILE
    ids = tokens[0].tolist()
    assert torch.equal(logits_of(model, ids), logits_of(read_model(path, model), ids))

    prompt = ids[:4]
    drawn = LlamaCpp(path).greedy(prompt, 24)["tokens"]
    exact_model = Llama(model.config).double().requires_grad_(False)
    exact_model.load_state_dict(model.state_dict())
    exact = logits_of(exact_model, prompt + drawn)[len(prompt) - 1 : -1]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, values: (in_blocks(values[0]),))
    head = model.lm_head.weight
    model.logits = lambda hidden: in_blocks(hidden) @ head.T
    error = (logits_of(model, prompt + drawn)[len(prompt) - 1 : -1] - exact).abs().amax(-1)
    best = exact.topk(2, dim=-1)
    is_clear = (best.values[:, 0] - best.values[:, 1]) > 4 * error
    assert is_clear.sum() >= 6
    assert torch.equal(torch.tensor(drawn)[is_clear], best.indices[:, 0][is_clear])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_captured_step_is_the_eager_one_without_another_graph(backend: str) -> None:
    import torch._dynamo.utils as counters_of_dynamo

    engines = [trained(untied(), "int4", optim=AdamW(lr=RATE), clip=Clip(1.0)) for _ in range(2)]
    captured_to_train(engines[1], packed(4), backend)
    counters_of_dynamo.counters.clear()
    for seed in range(4):
        for engine in engines:
            engine.accumulate(packed(4, seed))
            engine.update()
    assert counters_of_dynamo.counters["stats"]["unique_graphs"] == 0
    masters = [master_of(engine) for engine in engines]
    for name, master in masters[0].items():
        assert relative_error(masters[1][name], master) < 1e-4, name
    # Whatever bits the masters have, the weights are these, rounded.
    formats = engines[1].step.block_formats
    for name, parameter in engines[1].model.named_parameters():
        if name in formats:
            assert torch.equal(parameter, of_a_file(masters[1][name], formats[name])), name


def test_a_skipped_update_changes_neither_master_nor_weight() -> None:
    engine = trained(untied(), "int4", optim=AdamW(lr=RATE))
    window = ragged(4)
    before = {name: tensor.clone() for name, tensor in engine.state().optimizer.items()}
    weights = [p.detach().clone() for p in engine.model.parameters()]
    window["targets"].fill_(-100)
    engine.accumulate(window)
    assert engine.update().skipped == 1
    after = engine.state().optimizer
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(map(torch.equal, weights, engine.model.parameters()))


def test_a_resumed_engine_goes_on_with_the_same_bits_and_needs_the_masters() -> None:
    def engine_of(seed: int) -> Resident:
        return trained(untied(seed=seed), "int4", optim=AdamW(lr=RATE), clip=Clip(1.0))

    uninterrupted, resumed, without = engine_of(0), engine_of(1), engine_of(2)

    def after(engine: Resident, window: dict[str, Tensor]) -> dict[str, Tensor]:
        engine.accumulate(window)
        engine.update()
        state = engine.state()
        return {**state.model, **state.optimizer}

    for seed in range(2):
        after(uninterrupted, ragged(4, seed))
    state = uninterrupted.state()
    resumed.load_state(state)
    without.load_state(state)
    for name, parameter in without.model.named_parameters():
        if f"master.{name}" in state.optimizer:
            without.state().optimizer[f"master.{name}"].copy_(parameter)
    ends = [after(engine, ragged(4, 9)) for engine in (uninterrupted, resumed, without)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert any(not torch.equal(ends[0][name], ends[2][name]) for name in ends[0])
    with pytest.raises(InputRefused, match=r"'master\..*train\.quantize"):
        Resident(untied(), optim=AdamW(lr=RATE), clip=Clip(1.0)).load_state(state)


def test_members_are_trained_as_alone() -> None:
    """In float64, in which no weight is so near to the middle of two integers that an order of sums
    decides.
    """
    rates = (RATE, 3 * RATE)
    members = [untied(torch.float64, seed) for seed in range(2)]
    formats = block_formats(members[0], "int4")
    optims = [AdamW(lr=rate) for rate in rates]
    ensemble = mono.Ensemble(members, optim=optims, clip=1.0, each=True, block_formats=formats)
    alone = [
        trained(untied(torch.float64, seed), "int4", optim=optim, clip=1.0)
        for seed, optim in enumerate(optims)
    ]
    for seed in range(3):
        windows = [packed(3, 2 * seed), packed(3, 2 * seed + 1)]
        ensemble.accumulate(stacked(windows))
        ensemble.update()
        for engine, window in zip(alone, windows, strict=True):
            engine.accumulate(window)
            engine.update()
    for engine, member in zip(alone, ensemble.members, strict=True):
        for (name, found), expected in zip(
            member.named_parameters(), engine.model.parameters(), strict=True
        ):
            if name in formats:
                assert torch.equal(found, expected), name
            assert relative_error(found, expected) < 1e-9, name


def test_evaluation_uses_the_rounded_weights() -> None:
    engine = trained(untied(), "int4")
    reference = untied()
    formats = block_formats(reference, "int4")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in formats:
                parameter.copy_(round_to_blocks(parameter, formats[name]))
    window = packed(3)
    found, count = engine.evaluate(window)
    expected, _ = Resident(reference).evaluate(window)
    assert torch.equal(found, expected) and count > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"optim": AdamW(ema=0.9)}, "a mean of rounded weights is not rounded"),
        (
            {
                "optim": AdamW(state="bf16", master_weights=False),
                "precision": Precision("bf16"),
            },
            "block_formats keep the unrounded weights",
        ),
        ({"precision": Precision("fp8")}, "would round the weights again"),
    ],
    ids=["ema", "no masters", "fp8"],
)
def test_what_would_round_again_or_lose_the_masters_is_refused(
    options: dict[str, Any], problem: str
) -> None:
    model = untied()
    with pytest.raises(UsageError, match=problem):
        Step(model, block_formats=block_formats(model, "int4"), **options)
