# Run: pytest tests/benchmarks/test_preference_peers.py [-m slow]
"""Learning from pairs beside TRL: gradients are compared with the right one, and TRL's absence is
said.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch

from monograph.data.options import ReadingOptions
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.rl.pairs import read_pairs
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import preference
from scripts import smoke

RECORDS = [("57=", "20+37", "20+36"), ("04=", "04+00", "1"), ("91=", "90+01", "909+0")]


@pytest.fixture
def peers(script):
    return script("preference_peers")


@pytest.fixture
def rows(tmp_path):
    names = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(names, record, strict=True))) for record in RECORDS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    reading = {
        "source": str(tmp_path / "pairs.jsonl"), "tokenizer": "bytes", "sequence_length": 48, "held_out": 0.0,
        "bad_records": "refuse",
    }  # fmt: skip
    return read_pairs(ReadingOptions(**reading)).train


def small():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return Llama(LlamaConfig(vocab_size=260, num_hidden_layers=2, **sizes), seed=3)


def test_gradients_of_the_same_pairs(peers, rows, tmp_path):
    """Rows of pairs become the pairs that were written, and the gradient of each answer alone is
    that of the rows.
    """
    window = {
        name: torch.as_tensor(value) for name, value in rows.window(np.arange(len(rows))).items()
    }
    pairs = peers.pairs_of(window)
    assert sorted(pairs) == sorted(peers.tokens_of(tmp_path / "pairs.jsonl")) and len(
        window["tokens"]
    ) < len(pairs)
    model, loss = (
        small(),
        PreferenceLoss(preference("dpo", beta=peers.BETA), rows.answers, rows.max_row_answers),
    )
    loss.recording.fill_(True)
    loss(model, window)
    loss.recording.fill_(False)
    total, count = loss(model, window)
    (total / count).backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    expected = peers.exact(small().double(), pairs)
    assert 1e-9 < peers.distance(found, expected) < 1e-6
    turned = peers.exact(
        small().double(), [[prompt, rejected, chosen] for prompt, chosen, rejected in pairs]
    )
    assert peers.distance(found, turned) == pytest.approx(2)


def test_pairs_that_are_ahead(peers, tmp_path, rows):
    """A model is level with itself; one that made a gradient step is ahead, and its opposite
    behind.
    """
    pairs, base = peers.tokens_of(tmp_path / "pairs.jsonl"), small().double()
    assert peers.ahead(base, base, pairs) == 0
    for rate, share in ((0.1, 1.0), (-0.1, 0.0)):
        moved = small().double()
        gradient = peers.exact(moved, pairs)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter -= rate * gradient[name]
        assert peers.ahead(moved, base, pairs) == share


def test_what_is_compared(peers):
    """Rates are over all rounds of all seeds, and ratios those of rounds that took turns."""

    def seed(*wall):
        rounds = [{"wall_s": each, "cpu_s": 2 * each} for each in wall]
        shown = dict.fromkeys(
            ("ahead", "ahead_unseen", "gradient_error", "first_loss_less_ln_2"), 0.5
        )
        return {"rounds": rounds, "reference": {"cpu_s": 3.0}, **shown}

    options = Namespace(ways=[peers.OURS, "trl", "trl, precomputed"], updates=6)
    seeds = [
        {
            peers.OURS: seed(2.0, 3.0),
            "trl": seed(4.0, 3.0),
            "trl, precomputed": {"error": "not measured: no"},
        }
    ]
    ours, theirs, missing = peers.summed(options, seeds)
    assert ours["updates_per_wall_s"]["values"] == [3.0, 2.0] and ours["pairs_per_cpu_s"][
        "values"
    ] == [96.0, 64.0]
    assert theirs["ratio_wall"]["values"] == theirs["ratio_cpu"]["values"] == [2.0, 1.0]
    assert ours["reference_cpu_s"]["median"] == 3.0 and "not measured" in missing["error"]
    assert [len(peers.row(each)) for each in (ours, theirs, missing)] == [len(peers.HEADERS)] * 3


@pytest.mark.slow
def test_preference_peers(peers, monkeypatch, tmp_path, capsys):
    """TRL has an environment of its own, which the tests have not."""
    found = smoke(peers, monkeypatch, tmp_path / "found.json", "--peer-python", sys.executable)
    ours, theirs = found["cases"]
    assert ours["first_loss_less_ln_2"]["median"] == 0 and ours["gradient_error"]["median"] < 1e-5
    assert "trl" in capsys.readouterr().out
    assert theirs["seeds"][0].get("rounds") or "is not installed" in theirs["error"]


@pytest.mark.slow
def test_preferences(script, monkeypatch, tmp_path):
    cases = smoke(script("preferences"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["way"] for case in cases] == [
        "before",
        "chosen texts",
        "dpo",
        "rl.reward",
        "teacher",
    ]
