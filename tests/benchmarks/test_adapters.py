# Run: pytest tests/benchmarks/test_adapters.py [-m slow]
"""The benchmarks of adapters: every way is there, rows hold each conversation once, first losses
are equal.
"""

from __future__ import annotations

import pytest
import torch

from scripts import smoke


@pytest.mark.slow
def test_adapters(script, monkeypatch, tmp_path, uncompiled):
    found = smoke(script("adapters"), monkeypatch, tmp_path / "found.json")
    assert len(found["cases"]) == 5
    for case in found["cases"]:
        # What is held at the peak of `none` may be more than the peak of `full`, which comes when
        # copies are gone.
        assert case["held_bytes"] < case["peak_bytes"]["none"]
        assert case["peak_bytes"]["full"] <= case["peak_bytes"]["none"]
        assert case["measured"]["measured_bytes"] > 0


def test_a_packed_row_holds_whole_conversations(script):
    peers = script("adapter_peers")
    setting = peers.SMOKE._replace(conversations=40)
    made = peers.conversations(setting)
    window = peers.packed(setting, made)
    assert len(window["tokens"]) % setting.rows == 0
    assert int((window["segments"] > 0).sum()) == sum(len(tokens) for tokens, _ in made)
    found = set()
    for tokens, targets, segments, positions in zip(*(window[name] for name in
            ("tokens", "targets", "segments", "positions")), strict=True):  # fmt: skip
        assert bool((targets[segments == 0] == peers.IGNORE).all())
        for index in range(1, int(segments.max()) + 1):
            here = segments == index
            assert positions[here].tolist() == list(range(int(here.sum())))
            found.add((tuple(tokens[here].tolist()), tuple(targets[here].tolist())))
    assert found == {(tuple(tokens.tolist()), tuple(targets.tolist())) for tokens, targets in made}
    padded = peers.padded(made)
    assert int((padded["targets"] != peers.IGNORE).sum()) == int(
        (window["targets"] != peers.IGNORE).sum()
    )
    assert torch.equal(
        padded["attention_mask"].sum(1), torch.tensor([len(tokens) for tokens, _ in made])
    )


@pytest.mark.slow
def test_adapter_peers(script, monkeypatch, tmp_path):
    pytest.importorskip("peft")
    found = smoke(script("adapter_peers"), monkeypatch, tmp_path / "found.json")
    losses = [case["loss"] for case in found["cases"]]
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-4 * losses[0]


def test_shared_base(script, monkeypatch, tmp_path):
    [case] = smoke(script("shared_base"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["base"] == "nf4" and case["members"] == 2 and case["base_bytes"] > 0
    assert case["speedup"]["wall"]["median"] > 0


def test_member_rollouts(script, monkeypatch, tmp_path):
    [case] = smoke(script("member_rollouts"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["members"] == 2 and case["answers_of_a_member"] == 2
    assert case["tokens"]["all at once"] == case["tokens"]["one after another"]
    assert case["tokens"]["one member"] < case["tokens"]["all at once"]
    assert case["times_one"]["wall"]["median"] > 0
