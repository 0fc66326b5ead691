# Run: pytest tests/laws/test_fused_siblings.py    (transformers' models through every scope, and Inductor: -m slow)
"""Law 6: fused siblings equal separate ones, in outputs and gradients, for our models, others' and
one's own.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from batches import flat_gradient, packed, ragged, tiny_llama
from monograph import compat
from monograph.graph.capture import compiled
from monograph.graph.fused_linears import FusedLinears
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.siblings import families, fuse_siblings, unfuse_siblings
from monograph.laws.comparisons import equal_in_float64, error_within, relative_error
from monograph.optim import AdamW, Muon
from monograph.resident import Resident


class Branches(nn.Module):
    """Three branches of one tensor, a gate without a bias beside them, and two layers in every
    block.
    """

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))
            for width in (4, 7, 5)
        )
        self.gate = nn.Linear(6, 3, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(6, 9), "b": nn.Linear(6, 2)}) for _ in range(2)
        )
        self.unused = nn.Linear(6, 6)

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        y = torch.stack([branch(x) for branch in self.branches], -1) @ gates.unsqueeze(-1)
        y = y.squeeze(-1)
        for layer in self.layers:
            y = torch.sin(layer["a"](y)).sum(-1, keepdim=True) * y + layer["b"](y).prod(
                -1, keepdim=True
            )
        return y


def own():
    torch.manual_seed(0)
    return Branches()


def theirs(name, attention):
    """A small model of transformers, whose biases are not zero."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5)
    return model


TOKENS = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
POINTS = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MODELS = {
    "own": (own, POINTS, [3, 2, 2]),
    "llama": (lambda: tiny_llama(initializer_range=0.2), TOKENS, [3, 2] * 2),
    "biased": (lambda: tiny_llama(model_type="qwen2", initializer_range=0.2), TOKENS, [3, 2] * 2),
    "qwen3": (lambda: tiny_llama(model_type="qwen3", tie_word_embeddings=True), TOKENS, [3, 2] * 2),
    "olmo2": (lambda: tiny_llama(model_type="olmo2"), TOKENS, [3, 2] * 2),
    "Llama, eager": (lambda: theirs("Llama", "eager"), TOKENS, [3, 2] * 2),
    "Llama, sdpa": (lambda: theirs("Llama", "sdpa"), TOKENS, [3, 2] * 2),
    "Qwen2, eager": (lambda: theirs("Qwen2", "eager"), TOKENS, [3, 2] * 2),
    "Qwen2, sdpa": (lambda: theirs("Qwen2", "sdpa"), TOKENS, [3, 2] * 2),
}


def given(example, dtype):
    return example.to(dtype) if example.is_floating_point() else example


def both(model, example, function=None):
    """Output, and gradient of its weighted sum, of a module as it is called or as `function` calls
    it.
    """
    output = (function or model)(given(example, next(model.parameters()).dtype))
    output = getattr(output, "logits", output)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    model.zero_grad()
    (output.double() * weights).sum().backward()
    return output.detach(), flat_gradient(model)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name):
    build, example, sizes = MODELS[name]
    exact, separate, fused, fused_exact = build().double(), build(), build(), build().double()
    for module in (fused, fused_exact):
        fusion = fuse_siblings(module, given(example, next(module.parameters()).dtype))
        assert [len(names) for names in fusion.families] == sizes and set(fusion.separate) <= {
            "gate"
        }
    truth, naive, ours = both(exact, example), both(separate, example), both(fused, example)
    for true, mine in zip(truth, both(fused_exact, example), strict=True):
        assert equal_in_float64(mine, true)
    for quantity in zip(ours, naive, truth, strict=True):
        assert error_within(*quantity)


@pytest.mark.parametrize("name", ["own", "biased", "Llama, sdpa"])
def test_one_product_for_each_family(name):
    """The law is not held by computing each layer alone: as many products as families and other
    layers.
    """
    build, example, sizes = MODELS[name]
    module = build()
    counts = []
    for _ in range(2):
        with torch.profiler.profile(acc_events=True) as profile:
            both(module, example)
        counts.append({e.key: e.count for e in profile.key_averages()}["aten::linear"])
        fuse_siblings(module, given(example, torch.float32))
    assert counts[0] - counts[1] == sum(sizes) - len(sizes)


@pytest.mark.parametrize(
    "name",
    ["own", *(pytest.param(name, marks=pytest.mark.slow) for name in ("biased", "Qwen2, sdpa"))],
)
def test_captured(name):
    build, example, _ = MODELS[name]
    exact, module = build().double(), build().double()
    fuse_siblings(module, given(example, torch.float64))
    breaks = compat.graph_breaks()
    for mine, true in zip(
        both(module, example, compiled(module, "aot_eager")), both(exact, example), strict=True
    ):
        assert equal_in_float64(mine, true)
    assert compat.graph_breaks() == breaks


@pytest.mark.slow
def test_through_inductor():
    build, example, _ = MODELS["biased"]
    exact, eager, module = build().double(), build(), build()
    fuse_siblings(module, example)
    quantities = both(module, example, compiled(module)), both(eager, example), both(exact, example)
    for quantity in zip(*quantities, strict=True):
        assert error_within(*quantity)


# ---- the step ------------------------------------------------------------------------------------


def engine(dtype=torch.float64, fused=True, **options):
    model = tiny_llama(dtype, num_key_value_heads=4, initializer_range=0.2)
    if fused:
        assert len(fuse_siblings(model, ragged(2)["tokens"]).families) == 4
    return Resident(model, clip=0.5, micro_batch=3, **({"optim": AdamW(lr=1e-2)} | options))


POLICIES = [Remat.Off(), Remat.Full(), Remat.Pointwise(), Remat.Budget(0.3)]


SCOPES = [
    "none",
    pytest.param("whole", marks=pytest.mark.slow),
    pytest.param("blocks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("scope", SCOPES)  # `test_captured` has graphs by day
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_step_with_every_policy_and_scope(policy, scope):
    separate, fused = engine(fused=False), engine(remat=policy)
    before = compat.captured_graphs()
    if scope != "none":
        assert fused.capture(packed(6), "aot_eager", scope) is None
        assert compat.captured_graphs() - before <= 5, "blocks that are alike share a graph"
    graphs = compat.captured_graphs()
    for seed in range(2):
        for each in (separate, fused):
            each.accumulate(packed(6, seed))
        assert equal_in_float64(flat_gradient(fused.model), flat_gradient(separate.model))
        assert equal_in_float64(*(each.update().loss for each in (fused, separate)))
        assert equal_in_float64(*(each.evaluate(packed(6, 9))[0] for each in (fused, separate)))
    assert compat.captured_graphs() == graphs, "nothing recompiles"
    assert all(family._left is None for family in families(fused.model))


def test_bf16():
    exact, eager, fused = (
        engine(torch.float64, fused=False),
        engine(torch.float32, fused=False, precision=Precision("bf16")),
        engine(torch.float32, precision=Precision("bf16")),
    )
    for each in (exact, eager, fused):
        each.accumulate(packed(6))
    truth = flat_gradient(exact.model)
    naive = flat_gradient(eager.model)
    assert 1e-4 < relative_error(naive, truth) < 0.1
    assert error_within(flat_gradient(fused.model), naive, truth, rounding=0)


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Muon(lr=1e-2, ema=0.9)], ids=["adamw", "muon"])
def test_weights_of_several_updates(optim):
    """Whole families in AdamW's plane; Muon has one for each shape, where query, key and value have
    the same.
    """
    separate, fused = engine(fused=False, optim=optim), engine(optim=optim)
    assert [len(family.layers) for family in families(fused.model)] == [3, 2] * 2
    for seed in range(4):
        for each in (separate, fused):
            each.accumulate(packed(6, seed))
            each.update()
    for (name, mine), its in zip(
        fused.state().model.items(), separate.state().model.values(), strict=True
    ):
        assert relative_error(mine, its) <= 1e-10, name
    for name, mine in fused.state().optimizer.items():
        assert relative_error(mine, separate.state().optimizer[name]) <= 1e-9, name


@pytest.mark.parametrize(
    "optim",
    [
        AdamW(lr=1e-2, state="bf16"),
        AdamW(lr=1e-2, state="8bit"),
        AdamW(lr=1e-2, state="bf16", master_weights=False),
    ],
    ids=["bf16", "8bit", "no masters"],
)
def test_narrow_optimizer_state(optim):
    """The gradient with planes of every kind, in which blocks of 256 may tear siblings apart."""
    precision = None if optim.master_weights else Precision("bf16")
    separate, fused = (
        engine(torch.float32, fused, optim=optim, precision=precision) for fused in (False, True)
    )
    exact = Resident(copy.deepcopy(separate.model).double(), clip=0.5)
    for each in (exact, separate, fused):
        each.accumulate(packed(6))
    truth, naive, ours = (by_name(each.model) for each in (exact, separate, fused))
    assert error_within(ours, naive, truth, rounding=0)
    fused.update()


def by_name(model):
    """The gradients in one order, whatever the planes'."""
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


def test_unfused_is_the_module_that_it_was():
    for name in ("own", "biased"):
        build, example, _ = MODELS[name]
        module, original = build(), build()
        kinds = [type(part) for part in original.modules()]
        fuse_siblings(module, given(example, torch.float32))
        unfuse_siblings(module)
        assert [type(part) for part in module.modules()] == kinds and not families(module)
        for (key, mine), its in zip(
            module.state_dict().items(), original.state_dict().values(), strict=True
        ):
            assert torch.equal(mine, its), key
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size(), key
        for mine, its in zip(both(module, example), both(original, example), strict=True):
            assert torch.equal(mine, its)


def test_a_wrong_product_is_noticed(monkeypatch):
    """The law would fail if siblings got each other's outputs."""
    build, example, _ = MODELS["llama"]
    module = build().double()
    fuse_siblings(module, example)
    products = FusedLinears.products
    monkeypatch.setattr(
        FusedLinears, "products", lambda self, x: [p.flip(-1) for p in products(self, x)]
    )
    assert relative_error(both(module, example)[1], both(build().double(), example)[1]) > 1e-3
