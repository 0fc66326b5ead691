# Run: pytest tests/graph/test_siblings.py
"""What sibling fusion finds, what it leaves alone and says so, and that nothing that happens later
makes it wrong.
"""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monograph as mono
from batches import flat_gradient, ragged, tiny_llama
from monograph.errors import UsageError
from monograph.graph import siblings
from monograph.graph.capture import compiled
from monograph.graph.fused_linears import Sibling
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.siblings import families, fuse_siblings, unfuse_siblings
from monograph.laws.comparisons import relative_error
from monograph.optim import AdamW, Muon
from monograph.resident import Resident

FIRST = "model.layers.0.self_attn"
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Two layers of one tensor; `between` may do something to it, `after` to the first output."""

    def __init__(self, between=None, after=None, **second):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3, **second)
        self.between, self.after = between, after

    def forward(self, x):
        first = self.a(x)
        if self.between:
            x = self.between(x)
        if self.after:
            first = self.after(first)
        return first * self.b(x)


def alone(model, *tensors):
    """What the same module without fusion gives."""
    twin = copy.deepcopy(model)
    unfuse_siblings(twin)
    return twin(*tensors)


def test_the_line_that_is_reported():
    model = tiny_llama()
    fusion = mono.fuse_siblings(model, ragged(2)["tokens"])
    assert fusion.families[:2] == (
        tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
    )
    assert str(fusion) == "10 linear layers in 4 matrix products"
    assert str(fuse_siblings(nn.Linear(4, 4), X)) == "no siblings fused"


@pytest.mark.parametrize(
    "example", [X, (X,), {"x": X}, "call"], ids=["tensor", "arguments", "keywords", "function"]
)
def test_ways_to_give_an_example(example):
    model = Pair()
    fusion = fuse_siblings(model, (lambda: model(X)) if example == "call" else example)
    assert fusion.families == (("a", "b"),)


# ---- what stays separate -------------------------------------------------------------------------


class Own(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def hooked(pair):
    pair.b.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return pair


def tied(pair):
    pair.b.weight = pair.a.weight
    return pair


def subclass(pair):
    pair.b = Own(4, 3)
    return pair


def parametrized(pair):
    nn.utils.parametrizations.weight_norm(pair.b)
    return pair


def frozen(pair):
    pair.b.weight.requires_grad_(False)
    return pair


def in_place(tensor):
    return tensor.relu_()


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (hooked(Pair()), "b", "it has hooks"),
        (subclass(Pair()), "b", "its forward pass is not nn.Linear's"),
        (tied(Pair()), "a", "it shares its weight with b.weight"),
        (parametrized(Pair()), "b", "its weight is not a plain parameter"),
        (frozen(Pair()), "b", "none of the others is like it"),
        (Pair(bias=False), "b", "none of the others is like it"),
        (Pair(after=in_place), "a", "its output is changed in place"),
        (
            Pair(after=lambda y: y.view(-1).view(y.shape)),
            "a",
            "needs outputs of its own: view size",
        ),
    ],
    ids=["hooks", "subclass", "tied", "parametrized", "frozen", "bias", "in place", "view"],
)
def test_left_separate_and_said_so(model, name, reason):
    before = model(X)
    fusion = fuse_siblings(model, X)
    assert torch.equal(model(X), before)
    assert not fusion.families and reason in fusion.separate[name] and reason in str(fusion)
    assert not any(isinstance(layer, Sibling) for layer in model.modules())
    assert all(
        p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters()
    )


def test_layers_of_different_dtypes_are_no_siblings():
    model = Pair(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(X)
        assert "none of the others is like it" in fuse_siblings(model, X).separate["a"]
        assert torch.equal(model(X), before)


def test_layers_that_read_different_tensors_are_no_siblings():
    for between in (lambda x: x + 0, lambda x: x.add_(1), lambda x: x.view(x.shape)):
        model = Pair(between)
        assert fuse_siblings(model, X.clone()) == siblings.Fusion(())


def test_layers_that_are_called_in_changing_order():
    class Turns(Pair):
        def forward(self, x):
            return (
                self.a(x) + self.b(x) + self.b(2 * x + 1)
                if self.training
                else self.b(x) + self.a(x)
            )

    class Same(Pair):
        def forward(self, x):
            return self.a(x) + self.b(x) if self.training else self.b(x) + self.a(x)

    assert fuse_siblings(Turns(), X) == siblings.Fusion(())
    assert "changing order" in fuse_siblings(Same(), X).separate["a"]


def test_a_shared_block_is_fused_at_each_of_its_calls():
    class Twice(Pair):
        def forward(self, x):
            for _ in range(2):
                x = torch.cat([self.a(x) * self.b(x), x[:, :1]], 1)
            return x

    model = Twice()
    before = model(X)
    assert fuse_siblings(model, X).families == (("a", "b"),)
    assert relative_error(model(X), before) < 1e-6


def test_the_example_leaves_no_trace():
    model = nn.Sequential(Pair(), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[2].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    assert fuse_siblings(model, X).families
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.training for part in (model, model[1], model[2])] == [True, True, False]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# ---- what happens later --------------------------------------------------------------------------

LATER = {
    "another tensor": lambda x: x + 1,
    "changed in place": lambda x: x.add_(1),
    "the same": lambda x: x,
}


# Dynamo does not say how often a tensor was changed in place: that is seen where the example is
# watched, and eagerly.
@pytest.mark.parametrize(
    ("between", "compile_"),
    [*itertools.product(LATER, [False]), ("another tensor", True), ("the same", True)],
)
def test_a_decision_that_changes(between, compile_):
    model = Pair()
    fuse_siblings(model, X)
    model.between = LATER[between]
    truth = alone(model, X.clone())
    assert (
        relative_error((compiled(model, "aot_eager") if compile_ else model)(X.clone()), truth)
        < 1e-6
    )


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "captured"])
def test_a_gradient_or_a_dtype_that_only_one_has(compile_):
    class Modes(Pair):
        grad, cast = True, False

        def forward(self, x):
            with (
                torch.set_grad_enabled(self.grad),
                torch.autocast("cpu", torch.bfloat16, enabled=self.cast),
            ):
                first = self.a(x)
            return first.float() * self.b(x)

    for grad, cast in ((False, False), (True, True)):
        model = Modes()
        fuse_siblings(model, X)
        model.grad, model.cast = grad, cast
        twin = copy.deepcopy(model)
        unfuse_siblings(twin)
        for each in (model, twin):
            (compiled(each, "aot_eager") if compile_ and each is model else each)(
                X
            ).sum().backward()
        assert (model.a.weight.grad is None) == (twin.a.weight.grad is None) == (not grad)
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            if its.grad is not None:
                assert (
                    mine.grad.dtype == its.grad.dtype
                    and relative_error(mine.grad, its.grad) < 1e-2 * cast + 1e-6
                )


def test_a_layer_called_without_the_first_or_after_a_part_was_repeated():
    model = Pair()
    fuse_siblings(model, X)
    assert (
        relative_error(model.b(X), torch.nn.functional.linear(X, model.b.weight, model.b.bias))
        < 1e-6
    )
    model.a(X)
    assert families(model)[0]._waiting
    assert relative_error(model(X), alone(model, X)) < 1e-6
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    mine, model.a.weight.grad = model.a.weight.grad, None
    alone(model, X)
    twin = copy.deepcopy(model)
    unfuse_siblings(twin)
    twin(X).sum().backward()
    assert relative_error(mine, twin.a.weight.grad) < 1e-6


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_other_parameters_than_the_fused_ones(kind):
    """`torch.func` puts others in their place; inference mode does not say what was changed."""
    model = Pair()
    fuse_siblings(model, X)
    own = {name: p.detach() for name, p in model.named_parameters() if name.endswith(kind)}
    other = {name: p + 1 for name, p in own.items()}
    plain = Pair()
    plain.load_state_dict(model.state_dict() | other)
    calling = lambda parameters, x: torch.func.functional_call(model, parameters, (x,))  # noqa: E731
    for call in (calling, compiled(calling, "aot_eager")):
        assert relative_error(call(other, X), plain(X)) < 1e-6
    stacked = {name: torch.stack([p, other[name]]) for name, p in own.items()}
    both = torch.func.vmap(calling, (0, None))(stacked, X)
    assert (
        relative_error(both[1], plain(X)) < 1e-6 and relative_error(both[0], alone(model, X)) < 1e-6
    )
    assert relative_error(torch.func.vmap(model)(X[:, None])[:, 0], alone(model, X)) < 1e-6
    with torch.inference_mode():
        assert relative_error(model(X + 0), alone(model, X + 0)) < 1e-6


def test_weights_that_are_changed_before_the_backward_pass():
    model = Pair(after=torch.sin)
    fuse_siblings(model, X)
    loss = model(X.clone().requires_grad_()).sum()
    with torch.no_grad():
        model.a.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        loss.backward()


def test_memory_that_somebody_moves():
    model = Pair()
    fuse_siblings(model, X)
    model.b.weight.data = model.b.weight.data + 1
    plain = Pair()
    plain.load_state_dict(model.state_dict())
    assert relative_error(model(X), plain(X)) < 1e-6


# ---- copies, dtypes, checkpoints -----------------------------------------------------------------


def is_whole(model):
    return all(
        family.weight is not None and family.views_are_current() for family in families(model)
    )


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "part"])
def test_a_copy_is_fused_and_independent(how):
    model = tiny_llama()
    fuse_siblings(model, ragged(2)["tokens"])
    if how == "pickle":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model if how == "deepcopy" else model.model.layers[0])
    assert len(families(twin)) == (2 if how == "part" else 4) and is_whole(twin) and is_whole(model)
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(not family.weight.any() for family in families(twin))
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, before)
    assert torch.equal(families(model)[0].weight[32:48], before)


@pytest.mark.parametrize(
    "to", [lambda m: m.double(), lambda m: m.bfloat16().float(), lambda m: m.to("meta")]
)
def test_another_dtype_or_device(to):
    model = to(fused_llama())
    assert is_whole(model)
    if not model.lm_head.weight.is_meta:
        assert relative_error(model(ragged(2)["tokens"]), alone(model, ragged(2)["tokens"])) < 1e-6


def fused_llama(**sizes):
    model = tiny_llama(**sizes)
    fuse_siblings(model, ragged(2)["tokens"])
    return model


def test_checkpoints_both_ways():
    model, plain = fused_llama(), tiny_llama(seed=1)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert is_whole(model) and torch.equal(
        families(model)[0].weight[:32], plain.model.layers[0].self_attn.q_proj.weight
    )
    back = tiny_llama(seed=2)
    back.load_state_dict(model.state_dict())
    for (name, mine), its in zip(
        back.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, its), name
    own = {name: value.clone() for name, value in tiny_llama(seed=3).state_dict().items()}
    model.load_state_dict(own, assign=True)
    assert is_whole(model) and torch.equal(
        families(model)[0].weight[:32], own[f"{FIRST}.q_proj.weight"]
    )
    few = {name: value + 1 for name, value in own.items() if name == f"{FIRST}.k_proj.weight"}
    model.load_state_dict(few, strict=False, assign=True)
    assert relative_error(model(ragged(2)["tokens"]), alone(model, ragged(2)["tokens"])) < 1e-6


def test_an_export_is_the_same(tmp_path):
    for folder, model in (("fused", fused_llama()), ("plain", tiny_llama())):
        mono.save(model, tmp_path / folder)
    files = [sorted((tmp_path / folder).iterdir()) for folder in ("fused", "plain")]
    assert [[path.name for path in each] for each in files][0] == [path.name for path in files[1]]
    for mine, its in zip(*files, strict=True):
        assert mine.read_bytes() == its.read_bytes(), mine.name


def test_transformers_saves_and_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse_siblings(model, ragged(2)["tokens"]).families
    model.save_pretrained(tmp_path)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in back.state_dict().items())


# ---- steps ---------------------------------------------------------------------------------------


def test_siblings_lie_side_by_side_in_planes():
    """Also where the module's order does not have them so: no weight is copied for the product."""

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(
                nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 2)) for n in (3, 5)
            )

        def forward(self, x):
            return sum(branch(x) for branch in self.branches)

    model = Apart()
    fuse_siblings(model, X)
    step = mono.Step(model, loss=lambda model, x: (model(x).sum(), torch.tensor(5)))
    assert is_whole(model)
    [family] = families(model)
    plane = next(plane for plane in step.planes if plane.kind.weight_decay)
    assert family.weight.untyped_storage().data_ptr() == plane.param.untyped_storage().data_ptr()
    step([X])
    assert torch.equal(family.weight, torch.cat([branch[0].weight for branch in model.branches]))


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_told_whether_a_step_trains_a_model(fused):
    """Fused siblings lie in one memory without a step, too."""
    model = tiny_llama()
    if fused:
        siblings.fuse_known(model)
    assert not siblings.is_in_planes(model)
    engine = Resident(model)
    assert engine.step.planes and siblings.is_in_planes(model)


def test_a_step_that_tears_siblings_apart_keeps_what_it_can():
    model = fused_llama()
    Resident(model, optim=Muon())
    assert [len(family.layers) for family in families(model)] == [2] * 4 and is_whole(model)
    assert not isinstance(model.model.layers[0].self_attn.q_proj, Sibling)
    odd = fused_llama(hidden_size=24, num_attention_heads=4, intermediate_size=20)
    Resident(odd, optim=AdamW(state="8bit"))
    assert not families(odd)


def test_fusing_what_a_step_already_has():
    model = tiny_llama()
    engine = Resident(model)
    memory = model.lm_head.weight.untyped_storage().data_ptr()
    assert len(fuse_siblings(model, ragged(2)["tokens"]).families) == 4
    unfuse_siblings(model)
    assert all(p.untyped_storage().data_ptr() == memory for p in model.parameters() if p.ndim == 2)
    engine = Resident(tiny_llama(), optim=Muon())
    fusion = fuse_siblings(engine.model, ragged(2)["tokens"])
    assert [len(names) for names in fusion.families] == [2] * 4
    assert "fuse before the Step" in fusion.separate["model.layers.0.self_attn.q_proj"]


def test_siblings_in_different_blocks_part_where_blocks_are_repeated():
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    def loss(model, x):
        return model(x).square().sum(), torch.tensor(len(x))

    gradients = []
    for fused, remat in ((False, None), (True, None), (True, Remat.Full())):
        torch.manual_seed(0)
        model = Across()
        assert not fused or len(fuse_siblings(model, X).families) == 1
        step = mono.Step(model, loss=loss, remat=remat)
        assert len(families(model)) == (fused and remat is None)
        step.micro_step(X)
        gradients.append(flat_gradient(model))
        if fused and remat is None:
            mono.capture(step, "aot_eager", "blocks")
            assert not families(model)
    assert relative_error(gradients[1], gradients[0]) < 1e-6 and torch.equal(
        gradients[2], gradients[0]
    )


def test_fp8_is_refused():
    model = fused_llama(intermediate_size=64)
    with pytest.raises(UsageError, match=r"unfuse_siblings\(model\) first"):
        mono.Step(model, precision=Precision("fp8"))
    unfuse_siblings(model)
    mono.Step(model, precision=Precision("fp8"))
    fusion = fuse_siblings(model, ragged(2)["tokens"])
    assert (
        not fusion.families and "not nn.Linear's" in fusion.separate["model.layers.0.mlp.up_proj"]
    )


@pytest.mark.gpu
def test_a_look_leaves_a_card_s_random_numbers_as_they_are():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).cuda()
    before = torch.cuda.get_rng_state()
    fuse_siblings(module, torch.ones(2, 4, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), before)
