# Run: pytest tests/laws/test_member_on_a_shared_base.py
"""Law 5 with a shared base: members that have their own adapters, and one frozen base in memory for
all of them, train as each would alone on a base of its own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from adapted import SMALL, trained
from alone import Alone, stacked
from batches import captured_to_train, ragged, tiny_llama
from monograph import compat
from monograph.ensemble import Ensemble
from monograph.graph.lora import Lora, adapt, adapted_layers, copy_with_shared_base
from monograph.graph.precision import Precision
from monograph.laws.comparisons import member_is_alone, outcome
from monograph.loop import train
from monograph.loss import token_loss
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.step.guard import memory_of

N, UPDATES = 3, 3
KNOBS = [SimpleNamespace(seed=20 + i, lr=1e-3 * 2**i, weight_decay=0.1 * i) for i in range(N)]
MIXTURE = {"model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2}
CASES = {
    "lora": (SMALL, {}),
    "experts": (replace(SMALL, targets=("q_proj", "gate_proj", "down_proj")), MIXTURE),
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
        solo = Alone(model.train(), token_loss, of.seed, optim=optim, clip=0.5, micro_batch=micro_batch)
        updates = list(train(solo.engine, [of_members[i] for of_members in batches]))
        assert member_is_alone(
            outcome(engine.member_state(i), seen, member=i),
            outcome(solo.engine.state(), updates),
            least=1.0,
        )


@pytest.mark.parametrize("name", CASES)
def test_members_on_one_base_train_as_alone(name):
    lora, sizes = CASES[name]
    compared(members_of(lora, **sizes))


DIFFERENT = [
    replace(SMALL, rank=7, alpha=20.0, rslora=True),
    replace(SMALL, rank=2, dropout=0.2, alpha=3.0),
]


@pytest.mark.parametrize("dora", [False, True])
def test_members_of_other_ranks_scales_and_dropout_train_as_alone(dora):
    lora = replace(SMALL, dropout=0.1, base="int8", dora=dora)
    others = [replace(each, dropout=each.dropout or 0.4, dora=dora) for each in DIFFERENT]
    compared(members_of(lora, others))


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_members_on_one_base_train_as_alone_captured(micro_batch):
    lora = replace(SMALL, base="nf4", dora=True)
    others = [replace(lora, rank=7, alpha=20.0), replace(lora, rank=2)]
    compared(members_of(lora, others), "aot_eager", micro_batch)


def test_the_base_is_in_memory_once():
    members = members_of(SMALL)
    expected = {name: memory_of(p) for name, p in frozen(members[0]).items()}
    engine = Ensemble(members, KNOBS, optim=AdamW, each=False)
    engine.accumulate(ragged(4, 0))
    engine.update()
    for module in (*members, engine.model):
        assert {name: memory_of(p) for name, p in frozen(module).items()} == expected
