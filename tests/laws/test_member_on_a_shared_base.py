# Run: pytest tests/laws/test_member_on_a_shared_base.py
"""Law 5 with a shared base: members that have their own adapters, and one frozen base in memory for
all of them, train as each would alone on a base of its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapted import SMALL, trained
from alone import Alone, stacked
from batches import captured_to_train, ragged, tiny_llama
from monograph import compat
from monograph.ensemble import Ensemble
from monograph.errors import UsageError
from monograph.graph.frozen import NF4
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.shared_base import copy_with_shared_base
from monograph.laws.comparisons import member_is_alone, outcome
from monograph.loop import train
from monograph.loss import token_loss
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.step.guard import memory_of

N, UPDATES = 3, 3
KNOBS = [SimpleNamespace(seed=20 + i, lr=1e-3 * 2**i, weight_decay=0.1 * i) for i in range(N)]
MIXTURE = {"model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2}
CASES = {
    "lora": (SMALL, {}),
    "experts": (replace(SMALL, targets=("q_proj", "gate_proj", "down_proj")), MIXTURE),
    "experts, int8": (replace(SMALL, targets=("gate_proj", "down_proj"), base="int8"), MIXTURE),
    "int8, rslora": (replace(SMALL, base="int8", rslora=True), {}),
    "nf4, dora": (replace(SMALL, base="nf4", dora=True), {}),
    "dropout": (replace(SMALL, dropout=0.3), {}),
    "rows of tokens": (replace(SMALL, tokens=(3, 17)), {}),
}


def members_of(lora: Lora, others: list[Lora] | None = None, **sizes) -> list[Llama]:
    """Members in fp64 that share a base, each with trained adapters of its own."""
    first = tiny_llama(torch.float32, **sizes)
    adapt(first, lora)
    first.double()
    options = others or [lora] * (N - 1)
    members = [
        first,
        *(copy_with_shared_base(first, options[i], KNOBS[1 + i].seed) for i in range(N - 1)),
    ]
    for number, member in enumerate(members):
        trained(member, seed=number)
    return members


class Work(TorchDispatchMode):
    """Counts products and dequantised numbers."""

    def __init__(self):
        super().__init__()
        self.calls, self.looked_up = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        if func is torch.ops.aten.index.Tensor and args[0].numel() == len(NF4):
            self.looked_up += result.numel()
        return result


def frozen(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def compared(members: list[Llama], backend: str | None = None, micro_batch: int = 2) -> None:
    """Train together and alone, and compare losses, adapters and moments."""
    alone = copy.deepcopy(members)
    batches = [[ragged(4, 100 * i + step) for i in range(N)] for step in range(UPDATES)]
    windows = [stacked(of_members) for of_members in batches]
    engine = Ensemble(members, KNOBS, optim=AdamW, clip=0.5, micro_batch=micro_batch, each=True)
    if backend:
        captured_to_train(engine, windows[0], backend)
    graphs = compat.captured_graphs()
    seen = list(train(engine, windows))
    assert compat.captured_graphs() == graphs
    for i, (of, model) in enumerate(zip(KNOBS, alone, strict=True)):
        optim = AdamW(lr=of.lr, weight_decay=of.weight_decay)
        solo = Alone(
            model.train(), token_loss, of.seed, optim=optim, clip=0.5, micro_batch=micro_batch
        )
        updates = list(train(solo.engine, [of_members[i] for of_members in batches]))
        assert member_is_alone(
            outcome(engine.member_state(i), seen, member=i),
            outcome(solo.engine.state(), updates),
            least=1.0,
        )


ONE_LAYER = {"num_hidden_layers": 1}
# By night also alone what by day stands beside something else.
NIGHTLY = ("experts", "int8, rslora")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in NIGHTLY else name for name in CASES],
)
def test_members_on_one_base_train_as_alone(name):
    """Two layers have one base; by day what is beside plain LoRA is tried on one."""
    lora, sizes = CASES[name]
    if name != "lora":
        sizes = sizes | ONE_LAYER
    compared(members_of(lora, **sizes))


DIFFERENT = [
    replace(SMALL, rank=7, alpha=20.0, rslora=True),
    replace(SMALL, rank=2, dropout=0.2, alpha=3.0),
]


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_members_of_other_ranks_scales_and_dropout_train_as_alone(dora):
    lora = replace(SMALL, dropout=0.1, base="int8", dora=dora)
    others = [replace(each, dora=dora) for each in DIFFERENT]
    compared(members_of(lora, others, **ONE_LAYER))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_members_on_one_base_train_as_alone_captured(backend):
    compared(members_of(SMALL, **ONE_LAYER), backend)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_members_of_other_ranks_on_a_base_in_4_bits_train_as_alone_captured(micro_batch):
    lora = replace(SMALL, base="nf4", dora=True)
    others = [replace(lora, rank=7, alpha=20.0), replace(lora, rank=2)]
    compared(members_of(lora, others, **ONE_LAYER), "aot_eager", micro_batch)


def test_the_base_is_in_memory_once():
    members = members_of(SMALL)
    expected = {name: memory_of(p) for name, p in frozen(members[0]).items()}
    engine = Ensemble(members, KNOBS, optim=AdamW, each=False)
    engine.accumulate(ragged(4, 0))
    engine.update()
    for module in (*members, engine.model):
        assert {name: memory_of(p) for name, p in frozen(module).items()} == expected


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_the_base_is_read_once_for_all_members(base):
    members = members_of(replace(SMALL, base=base))
    tokens = ragged(2, 0)["tokens"]
    engine = Ensemble(members, KNOBS, optim=AdamW, each=True)
    calls = {"alone": lambda: members[0](tokens), "together": lambda: engine(tokens)}
    work = {}
    for name, call in calls.items():
        with torch.no_grad():
            call()  # the first call of an ensemble includes a trial
            with Work() as work[name]:
                call()
    products = {name: done.calls[torch.ops.aten.mm.default] for name, done in work.items()}
    layers = len(adapted_layers(members[0]))
    assert products == {"alone": 3 * layers, "together": layers}  # A and B are batched
    assert work["together"].looked_up == work["alone"].looked_up


def test_padding_of_a_smaller_rank_stays_zero():
    members = members_of(SMALL, [replace(SMALL, rank=7), replace(SMALL, rank=2)])
    engine = Ensemble(members, KNOBS, optim=AdamW, each=False)
    for seed in range(3):
        engine.accumulate(ragged(4, seed))
        engine.update()
    state = engine.state()
    for tensors in (state.model, state.optimizer):
        for name, stack in tensors.items():
            rank_axis = 1 if "lora_A" in name else 2 if "lora_B" in name else None
            if rank_axis is not None:
                assert stack.narrow(rank_axis, 4, 3)[0].abs().max() == 0
                assert stack.narrow(rank_axis, 2, 5)[2].abs().max() == 0
                assert stack[1].abs().max() > 0


def test_a_member_that_diverges_leaves_the_bits_of_the_others():
    def adapters(poisoned: bool) -> list[torch.Tensor]:
        members = members_of(replace(SMALL, base="int8"))
        if poisoned:
            next(p for p in members[1].parameters() if p.requires_grad).data.fill_(torch.nan)
        engine = Ensemble(members, KNOBS, optim=AdamW, clip=0.5)
        for seed in range(2):
            engine.accumulate(ragged(4, seed))
            engine.update()
        return [p for i in (0, 2) for p in members[i].parameters() if p.requires_grad]

    pairs = zip(adapters(poisoned=True), adapters(poisoned=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_members_with_other_ranks_refuse_muon():
    members = members_of(SMALL, [replace(SMALL, rank=7), SMALL])
    engine = Ensemble(members, KNOBS, optim=Muon())
    with pytest.raises(UsageError, match="another rank"):
        engine.accumulate(ragged(4, 0))
