# Run: pytest tests/test_own_modules.py
"""Modules that are no language model of ours: a vision transformer, BatchNorm, an encoder-decoder
of transformers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import monograph as mono
from monograph.laws.comparisons import relative_error
from monograph.loop import load_checkpoint, save_checkpoint
from monograph.optim import hidden_matrices
from monograph.resident import Resident
from monograph.step import Step, accumulate, update


class ViT(nn.Module):
    """Patches by a convolution, torch's own encoder layers in an `nn.Sequential`, a classification
    head.
    """

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.position = nn.Parameter(torch.zeros(4, 16))
        layers = [nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)]
        self.encoder = nn.Sequential(*layers)
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).mT + self.position).mean(1))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        return self.layers(x)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, attn_implementation="eager",
        )  # fmt: skip
        self.inner = transformers.T5ForConditionalGeneration(config)

    def forward(self, batch):
        return self.inner(
            input_ids=batch["x"], labels=batch["y"].clamp_min(0), use_cache=False
        ).logits


def classified(model, batch):
    """Summed cross-entropy over the targets that are not -100, and their number."""
    logits, targets = model(batch if isinstance(model, T5) else batch["x"]), batch["y"]
    total = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def images(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
        "y": torch.randint(5, (rows,), generator=generator),
    }


def vectors(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(5, (rows,), generator=generator)}


def sentences(rows, seed):
    """Ragged: a row has between one and seven targets."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(1, 40, (2, rows, 7), generator=generator)
    lengths = torch.randint(1, 8, (rows, 1), generator=generator)
    return {"x": x, "y": y.masked_fill(torch.arange(7) >= lengths, -100)}


def built(kind):
    torch.manual_seed(0)
    return kind().double()


def cut(batch, *edges):
    edges = (0, *edges, len(batch["y"]))
    return [{k: v[a:b] for k, v in batch.items()} for a, b in zip(edges, edges[1:], strict=False)]


CASES = {"vit": (ViT, images), "t5": (T5, sentences)}


@pytest.mark.parametrize("case", CASES)
def test_accumulated_equals_the_large_batch(case):
    """Law 2 for modules and losses that are not ours; transformers' T5 computes its norms in fp32,
    whatever it is.
    """
    kind, batches = CASES[case]
    model, batch = built(kind), batches(12, seed=1)
    exact = copy.deepcopy(model)
    total, count = classified(exact, batch)
    (total / count).backward()
    step = Step(model, loss=classified)
    accumulate(step, cut(batch, 1, 3, 8))
    scale = step.count.double().reciprocal()  # a loss that cannot count before: the update divides
    bound = 1e-12 if case == "vit" else 1e-6
    for (name, ours), (_, its) in zip(
        model.named_parameters(), exact.named_parameters(), strict=True
    ):
        if its.grad is not None:
            assert (
                relative_error(ours.grad * scale, its.grad) <= bound
                or float(its.grad.norm()) < 1e-12
            ), name


@pytest.mark.parametrize(
    "case",
    [pytest.param("vit", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)],
)
def test_captured_equals_eager(case):
    kind, batches = CASES[case]
    optim = mono.Muon(lr=1e-2, ema=0.5)
    eager, captured = (Step(built(kind), loss=classified, optim=optim, clip=1.0) for _ in range(2))
    mono.capture(captured, backend="aot_eager")
    for seed in range(3):
        window = cut(batches(12, seed=seed), 4, 8)
        one, other = eager(window), captured(window)
        assert float(one.loss) == pytest.approx(
            float(other.loss), rel=1e-5 if case == "t5" else 1e-10
        )
        assert int(one.count) == int(other.count) and int(other.skipped) == 0
    assert list(captured.model.state_dict()) == list(built(kind).state_dict())


def test_what_muon_takes():
    assert {n.split(".", 2)[2] for n in hidden_matrices(built(ViT))} == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    }  # fmt: skip
    names = hidden_matrices(built(T5))
    assert names and not [
        name for name in names if "relative_attention_bias" in name or "shared" in name
    ]
    assert all(".block." in name for name in names) and "inner.lm_head.weight" not in names


# ---- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_running_statistics_change_once_per_micro_batch(backend):
    model, window = built(Normed), cut(vectors(12, seed=2), 4, 8)
    by_hand = copy.deepcopy(model.layers[:2])
    step = Step(model, loss=classified)
    if backend:
        mono.capture(step, backend=backend)
    for part in window:
        by_hand(part["x"])
    accumulate(step, window)
    for name, buffer in by_hand[1].named_buffers():
        torch.testing.assert_close(getattr(model.layers[1], name), buffer, rtol=1e-12, atol=0)
    assert int(model.layers[1].num_batches_tracked) == 3
    update(step)
    assert int(model.layers[1].num_batches_tracked) == 3


def test_trial_capture_and_evaluation_leave_the_running_statistics():
    engine, batch = Resident(built(Normed), loss=classified, micro_batch=4), vectors(12, seed=2)
    before = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    engine.trial(batch)
    assert engine.capture(batch, backend="aot_eager") is None
    engine.evaluate(batch)
    assert all(torch.equal(buffer, before[name]) for name, buffer in engine.model.named_buffers())
    engine.accumulate(batch)
    assert int(engine.model.layers[1].num_batches_tracked) == 3


def test_batch_statistics_are_those_of_the_micro_batch_so_law_2_cannot_hold():
    """What docs/training.md says of BatchNorm; without it the same cuts agree to 1e-12."""

    def gradient(kind, *edges):
        step = Step(built(kind), loss=classified)
        accumulate(step, cut(vectors(12, seed=2), *edges))
        return torch.cat([p.grad.flatten() for p in step.model.parameters()])

    class Plain(Normed):
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Identity()

    assert relative_error(gradient(Plain, 4, 8), gradient(Plain)) <= 1e-12
    assert relative_error(gradient(Normed, 4, 8), gradient(Normed)) > 0.05


def test_buffers_and_average_are_in_the_checkpoint(tmp_path):
    class Windows(list):
        def state(self):
            return {}

    def engine():
        return Resident(built(Normed), loss=classified, optim=mono.AdamW(ema=0.9), micro_batch=4)

    windows = Windows(vectors(12, seed=seed) for seed in range(6))
    whole, first, second = engine(), engine(), engine()
    for _ in mono.train(whole, windows):
        pass
    for _ in mono.train(first, windows[:3]):
        pass
    save_checkpoint(first, windows, tmp_path)
    load_checkpoint(second, tmp_path)
    for _ in mono.train(second, windows[3:]):
        pass
    for mine, its in (
        (whole.state().model, second.state().model),
        (whole.state().optimizer, second.state().optimizer),
    ):
        assert mine.keys() == its.keys() and all(
            torch.equal(mine[name], its[name]) for name in mine
        )
    assert int(second.model.layers[1].num_batches_tracked) == 18
