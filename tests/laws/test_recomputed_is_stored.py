# Run: pytest tests/laws/test_recomputed_is_stored.py
"""Law 3: whatever is recomputed, loss, gradients and buffers are those of a step that stores
everything.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from batches import flat_gradient, packed, ragged, tiny_llama
from daily import nightly
from monograph import compat
from monograph.errors import UsageError
from monograph.graph import recompute
from monograph.graph.capture import capture, compiled
from monograph.graph.inspect import blocks
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import differing, error_within, outcome
from monograph.loss import token_loss
from monograph.optim import AdamW
from monograph.profiling.memory import LiveBytes
from monograph.resident import Resident
from monograph.step import Step, accumulate, update

POLICIES = [
    Remat.Pointwise(),
    Remat.Budget(0.2),
    Remat.Full(),
    Remat.PerLayer((Remat.Full(), Remat.Budget(0.3))),
]
FAMILIES = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
        "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention"),
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text"},
    "qwen3_5": {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention")},
    "granite4": {"model_type": "granitemoehybrid", "layer_types": ("mamba", "full_attention"), "mamba_d_state": 8},
    "nemotron_h": {"model_type": "nemotron_h", "layer_types": ("mamba", "mlp"), "mamba_d_state": 8},
    "lfm2": {"model_type": "lfm2", "layer_types": ("conv", "full_attention")},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "gemma4": {
        "model_type": "gemma4_text", "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5,
        "global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "small gemma4": {
        "model_type": "gemma4_text", "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 6,
    },
    "gemma4 with experts": {
        "model_type": "gemma4_text", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip


def engine(policy, precision="fp32", **sizes):
    return Resident(
        tiny_llama(**sizes),
        optim=AdamW(lr=1e-2),
        clip=0.5,
        precision=Precision(precision),
        remat=policy,
        micro_batch=3,
    )


def trained(engine, windows):
    """What some updates of two micro-batches leave, the second one not full, and their gradients."""
    gradients, updates = {}, []
    for window in windows:
        engine.accumulate(window)
        gradients[f"gradient {len(updates)}"] = flat_gradient(engine.model)
        updates.append(engine.update())
    return gradients | outcome(engine.state(), updates)


# By day four families that differ, two in each precision.
BY_DAY = {"llama": "bf16"}


@pytest.mark.parametrize(
    ("family", "precision", "rows"),
    [
        pytest.param(family, *way, marks=() if BY_DAY.get(family) == way[0] else pytest.mark.slow)
        for family in FAMILIES
        for way in [("fp32", ragged), ("bf16", packed)]
    ],
)
def test_bits_of_losses_gradients_and_weights(family, precision, rows):
    windows = [rows(5, seed=seed) for seed in range(2)]
    stored = trained(engine(Remat.Off(), precision, **FAMILIES[family]), windows)
    for policy in POLICIES:
        again = trained(engine(policy, precision, **FAMILIES[family]), windows)
        assert not differing(again, stored), policy


# ---- modules of one's own ------------------------------------------------------------------------


class Powered(nn.Module):
    """A linear layer divided by an estimate of its norm that every forward pass improves, and first
    reads.
    """

    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.register_buffer("direction", torch.ones(size, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            direction = self.inner.weight @ self.direction
            self.direction.copy_(direction / direction.norm())
        return self.inner(x) / (self.inner.weight.T @ self.direction.clone()).norm()


class Counted(nn.Module):
    """Divides by how often it ran; the buffer is another tensor each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ran", torch.zeros(()))

    def forward(self, x):
        self.ran = self.ran + 1
        return x / self.ran


class Careless(nn.Module):
    """Dropout, running statistics, states of its own, an activation in place, and blocks that are
    used twice.
    """

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 8),
                nn.ReLU(inplace=True),
                nn.BatchNorm1d(8),
                Powered(8),
                nn.Dropout(0.3),
                Counted(),
                nn.Linear(8, 8),
            )
            for _ in range(2)
        )

    def forward(self, x):
        x = self.enter(x)
        for block in [*self.blocks, *self.blocks]:
            x = x + block(x)
        return self.leave(x)


def classified(model, batch):
    return nn.functional.cross_entropy(
        model(batch["x"]), batch["y"], reduction="sum"
    ), torch.tensor(len(batch["y"]))


def careless(policy):
    torch.manual_seed(0)
    return Step(Careless().double(), loss=classified, remat=policy)


def vectors(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(5, (7,), generator=generator)}


@pytest.mark.parametrize("policy", nightly(POLICIES, {Remat.Budget(0.2), Remat.Full()}))
def test_dropout_and_buffers_are_as_if_the_block_had_run_once(policy):
    """Two updates of two micro-batches, in each of which a block runs twice."""
    outcomes = []
    for each in (Remat.Off(), policy):
        step = careless(each)
        torch.manual_seed(1)
        for seed in range(2):
            accumulate(step, [vectors(seed), vectors(seed + 2)])
            grads = flat_gradient(step.model)
            step.apply()
        outcomes.append([grads, torch.get_rng_state(), *step.model.state_dict().values()])
    assert all(torch.equal(mine, its) for mine, its in zip(*outcomes, strict=True))
    assert int(step.model.blocks[0][2].num_batches_tracked) == int(step.model.blocks[0][5].ran) == 8


@pytest.mark.parametrize("policy", nightly(POLICIES, {Remat.Budget(0.2), Remat.Full()}))
def test_weights_of_bf16_alone_are_those_of_stored_activations(policy):
    """Their gradients are fp32, so parameters and gradients have different dtypes."""
    outcomes = []
    for each in (Remat.Off(), policy):
        optim = AdamW(lr=1e-2, state="bf16", master_weights=False)
        step = Step(
            tiny_llama(), loss=token_loss, optim=optim, precision=Precision("bf16"), remat=each
        )
        accumulate(step, [packed(2), packed(2, seed=1)])
        outcomes.append([update(step).grad_norm, *step.model.state_dict().values()])
    assert all(torch.equal(mine, its) for mine, its in zip(*outcomes, strict=True))


@pytest.mark.parametrize(
    ("policy", "backend", "scope"),
    [
        (Remat.Full(), "eager", "whole"),
        pytest.param(Remat.Full(), "aot_eager", "whole", marks=pytest.mark.slow),
        pytest.param(Remat.Full(), "eager", "blocks", marks=pytest.mark.slow),
        pytest.param(Remat.Pointwise(), "eager", "blocks", marks=pytest.mark.slow),
        (Remat.Budget(0.3), "eager", "blocks"),
    ],
)
def test_a_captured_block_drops_the_same_when_it_is_recomputed(policy, backend, scope):
    """The loss is linear in the weight, so it is the weight's product with its gradient if both
    dropped the same.
    """
    block = nn.Sequential(
        nn.Linear(6, 6, bias=False), nn.Dropout(0.5), nn.Dropout(0.5), nn.Sequential()
    )
    model = nn.Sequential(block).double()
    step = Step(model, loss=lambda model, batch: (model(batch["x"]).sum(), 7), remat=policy)
    capture(step, backend, scope)
    accumulate(step, [vectors(0)])
    torch.testing.assert_close(
        (block[0].weight * block[0].weight.grad).sum(), step.loss_sum, rtol=1e-9, atol=1e-9
    )


def test_names_copies_and_taking_it_back():
    model = tiny_llama()
    names, forwards = list(model.state_dict()), [block.forward for block in blocks(model).values()]
    recompute.apply_policy(model, Remat.Full())
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == list(twin.state_dict()) == names
    with torch.no_grad():
        # A copy's block runs the copy's weights, not the first's.
        twin.model.layers[0].mlp.down_proj.weight.zero_()
    tokens = ragged(2)["tokens"]
    plain = tiny_llama()
    assert torch.equal(model(tokens), plain(tokens)) and not torch.equal(
        twin(tokens), plain(tokens)
    )
    recompute.apply_policy(model, Remat.Off())
    assert [block.forward for block in blocks(model).values()] == forwards


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (Remat.PerLayer((Remat.Full(),)), "has 1 policies, but the module has 2 blocks"),
        (Remat.PerLayer((Remat.Full(), "full")), "holds 'full': expected the policy of one block"),
        (Remat.Full, "expected one of monograph.Remat's"),
        ("full", "expected one of monograph.Remat's"),
    ],
)
def test_what_is_no_policy_is_refused(policy, line):
    with pytest.raises(UsageError, match=line):
        Step(tiny_llama(), remat=policy)


def test_a_module_without_blocks_has_nothing_to_recompute():
    assert Step(nn.Linear(6, 5), loss=classified)
    with pytest.raises(UsageError, match="the module has no block"):
        Step(nn.Linear(6, 5), loss=classified, remat=Remat.Pointwise())


def test_a_budget_says_so_where_it_cannot_be_known():
    class Early(Careless):
        def forward(self, x):
            return super().forward(x if x.sum().item() else -x)

    step = Step(Early().double(), loss=classified, remat=Remat.Budget(0.5))
    with pytest.raises(UsageError, match=r"blocks.0 computes.*use Remat.Full\(\)"):
        accumulate(step, [vectors(0)])


# ---- memory --------------------------------------------------------------------------------------


def kept_bytes(policy, precision="fp32"):
    """What lives after a forward pass beside what lived before it, and what each block was given."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    model, batch = tiny_llama(**sizes), ragged(4)
    step = Step(model, remat=policy, precision=Precision(precision))
    step.choose_kept_results(batch)
    with LiveBytes() as live, step.precision.context("cpu"):
        hidden = model(batch["tokens"])
    assert hidden.requires_grad
    return live.kept_bytes


def test_memory_falls_as_it_is_told_to():
    off, full, pointwise = (
        kept_bytes(policy) for policy in (Remat.Off(), Remat.Full(), Remat.Pointwise())
    )
    assert full < 0.2 * off
    assert full < pointwise < 0.6 * off
    shares = [0.15, 0.35]
    budgets = [kept_bytes(Remat.Budget(share)) for share in shares]
    assert budgets == sorted(budgets) and len(set(budgets)) == len(shares)
    for share, kept in zip(shares, budgets, strict=True):
        assert kept - full <= share * (off - full)
    assert kept_bytes(Remat.Budget(0.0)) == full and kept_bytes(Remat.Budget(1.0)) == off
    mixed = Remat.PerLayer((Remat.Full(), Remat.Off()))
    assert abs(kept_bytes(mixed) - (off + full) / 2) < 0.05 * off


# ---- captured ------------------------------------------------------------------------------------


# By day test_scopes.py captures every policy by blocks, and test_cross.py one in one graph.
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        Remat.PerLayer((Remat.Pointwise(), Remat.Budget(0.3))),
        Remat.PerLayer((Remat.Full(), Remat.Budget(0.3))),
    ],
)
def test_captured_within_the_bound_of_law_1(policy):
    batch, exact = packed(6), Resident(tiny_llama(torch.float64), micro_batch=3)
    eager, captured = engine(Remat.Off()), engine(policy)
    captured.step.forward.function = compiled(captured.step.forward.function, "aot_eager")
    captured.step.scope = "whole"  # what a budget keeps is then chosen for one graph
    graphs = compat.captured_graphs()
    for each in (exact, eager, captured):
        each.accumulate(batch)
    truth = flat_gradient(exact.model)
    assert error_within(flat_gradient(captured.model), flat_gradient(eager.model), truth)
    captured.update()
    captured.accumulate(packed(6, seed=1))
    assert compat.captured_graphs() == graphs + 1 and compat.graph_breaks() == 0


# By day test_scopes.py counts the graphs of blocks that are alike, and of those that are not.
@pytest.mark.slow
def test_blocks_share_a_graph_only_if_they_keep_the_same():
    graphs = []
    for shares in ((0.2, 0.2), (0.2, 0.6)):
        torch.compiler.reset()
        policy = Remat.PerLayer(tuple(Remat.Budget(share) for share in shares))
        step = capture(Step(tiny_llama(), loss=token_loss, remat=policy), "eager", "blocks")
        before = compat.captured_graphs()
        accumulate(step, [ragged(4)])
        graphs.append(compat.captured_graphs() - before)
    assert graphs == [2, 3]  # one of them is the loss's


# By day test_compiled_is_eager.py, where a block that writes what it reads is recomputed in a
# graph.
@pytest.mark.slow
def test_captured_buffers_change_once():
    """Dropout is left out: a compiler draws other numbers, so there is nothing to compare with."""
    finals = []
    for policy in (Remat.Off(), Remat.PerLayer((Remat.Pointwise(), Remat.Full()))):
        step = careless(policy)
        for block in step.model.blocks:
            block[1], block[4], block[5] = nn.ReLU(), nn.Identity(), nn.Identity()
        if policy != Remat.Off():
            step.forward.function = compiled(step.forward.function, "aot_eager")
        accumulate(step, [vectors(0), vectors(1)])
        finals.append([flat_gradient(step.model), *step.model.state_dict().values()])
    for mine, its in zip(*finals, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)
