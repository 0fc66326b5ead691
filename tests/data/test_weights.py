# Run: pytest tests/data/test_weights.py
"""Sources with weights: how they are written, how often an epoch sees their rows, and resuming
among them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest

from monograph.config.sources import classify, path_and_weight
from monograph.data import store
from monograph.data.batches import Batches
from monograph.data.corpus import corpus
from monograph.data.rows import weighted_rows_at
from monograph.data.sources import find_sources
from monograph.errors import InputRefused, UsageError


@pytest.fixture
def mixed(texts, tmp_path):
    """mixed(0.5, 2): a corpus of the texts and of 60 records, with these weights."""
    lines = [json.dumps({"text": f"record {i} " + "again and " * (i % 7)}) for i in range(60)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))

    def build(*weights, **settings):
        usual = {"tokenizer": "bytes", "sequence_length": 32, "cache": tmp_path / "cache"}
        return corpus(
            [texts, tmp_path / "records.jsonl"], weights=weights or None, **(usual | settings)
        )

    return build


@pytest.mark.parametrize(
    ("item", "place", "weight"),
    [
        ("books/@2", "books/", 2.0),
        ("b.jsonl@0.5", "b.jsonl", 0.5),
        ("stdlib@1e-2", "stdlib", 0.01),
        ("-@3", "-", 3.0),
        ("a@b@.5", "a@b", 0.5),
        ("hf://owner/name@2", "hf://owner/name", 2.0),
        ("texts/*.txt@2", "texts/*.txt", 2.0),
        ("books@home", "books@home", 1.0),
        ("books@", "books@", 1.0),
        ("@2", "@2", 1.0),
        ("a@1.2.3", "a@1.2.3", 1.0),
    ],
)
def test_how_a_weight_is_written(item, place, weight):
    assert path_and_weight(item) == (place, weight)


def test_a_file_of_the_whole_name_wins(tmp_path):
    (tmp_path / "a@2").write_text("named so")
    assert path_and_weight(str(tmp_path / "a@2")) == (str(tmp_path / "a@2"), 1.0)
    assert path_and_weight(str(tmp_path / "a@2@3")) == (str(tmp_path / "a@2"), 3.0)


@pytest.mark.parametrize("weight", ["0", "-1", "1001", "0.0001", "1e9"])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(
        UsageError, match=f"a.txt@{weight}: a weight is how often .*from 0.001 to 1000"
    ):
        path_and_weight(f"a.txt@{weight}")


def test_the_command_line_takes_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "b.jsonl").touch()
    named = ["books/@2", "b.jsonl@0.5", "stdlib@2", "hf://owner/name", "*.jsonl@3"]
    places = ["books/", "b.jsonl", "stdlib", "hf://owner/name", "*.jsonl"]
    assert classify(named).overrides == {
        "data.source": places,
        "data.weights": [2.0, 0.5, 2.0, 1.0, 3.0],
    }
    assert classify(["books/", "stdlib@1"]).overrides == {"data.source": ["books/", "stdlib"]}
    [fault] = classify(["c.jsonl@2"]).faults
    assert isinstance(fault, InputRefused)
    assert str(fault) == "c.jsonl@2: no such file or folder; did you mean b.jsonl?"


def test_two_weights_for_one_file_are_refused(texts, tmp_path):
    with pytest.raises(
        UsageError, match=r"001.txt has the weights 2 and 1; leave it out at one place"
    ):
        find_sources([texts, texts / "001.txt"], tmp_path, weights=[2, 1])
    assert {
        file.weight
        for file in find_sources([texts, texts / "001.txt"], tmp_path, weights=[2, 2]).files
    } == {2.0}


def test_there_are_as_many_weights_as_sources_and_each_is_in_range(texts, tmp_path):
    with pytest.raises(
        UsageError, match="data.weights has 1 numbers and data.source 2: give one for each"
    ):
        find_sources([texts, texts / "001.txt"], tmp_path, weights=[2])
    for weight in (0, -1, 1001, 1e-4, float("nan")):
        with pytest.raises(UsageError, match="data.weights: .* is not from 0.001 to 1000"):
            find_sources(texts, tmp_path, weights=[weight])


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_sources_of_different_weights_share_no_row(mixed, packing):
    built = mixed(0.5, 2, packing=packing, held_out=0.2)
    rows = built.train
    kinds = [{".jsonl:" in piece.document for piece in rows.pieces(i)} for i in range(len(rows))]
    assert all(len(kind) == 1 for kind in kinds) and len(set(map(tuple, kinds))) == 2
    texts, records = (sum(kind == {each} for kind in kinds) for each in (False, True))
    assert [(each.rows, each.visits) for each in rows.shares] == [
        (texts, round(texts / 2)),
        (records, 2 * records),
    ]
    assert rows.per_epoch == sum(each.visits for each in rows.shares) != len(rows)
    assert built.held_out.per_epoch == len(built.held_out)  # each row once, whatever the weights


def drawn(batches, windows=None):
    return [
        tuple(row.tolist())
        for batch in itertools.islice(batches, windows)
        for row in batch["tokens"]
    ]


def test_epochs_see_what_the_weights_say(mixed):
    rows = mixed(0.5, 2).train
    texts, records = (each.rows for each in rows.shares)
    every = [tuple(row) for row in rows.window(np.arange(len(rows)))["tokens"].tolist()]
    first = Counter(drawn(Batches(rows, 32 * 7, epochs=1)))
    second = Counter(drawn(Batches(rows, 32 * 7, epochs=2, start=rows.per_epoch)))
    wanted = Counter(every[texts:])
    for epoch in (first, second):
        assert sum(epoch.values()) == rows.per_epoch
        assert all(epoch[row] >= 2 * count for row, count in wanted.items())
    both = first + second
    odd = texts % 2  # half of an odd number of rows is rounded
    assert abs(sum((both - Counter(every[:texts] + 4 * every[texts:])).values())) <= odd
    assert records > 5 and texts > 5


@pytest.mark.slow  # by day law 10 resumes a run of sources with weights
def test_resumed_is_uninterrupted_among_weighted_records(mixed):
    rows = mixed(0.5, 2).train
    whole = drawn(Batches(rows, 32, seed=3), 3 * rows.per_epoch)
    for place in (1, rows.per_epoch - 3, rows.per_epoch + rows.per_epoch // 2, 2 * rows.per_epoch):
        before = Batches(rows, 32 * 5, seed=3)
        seen = drawn(before, place // 5)
        state = before.state()
        after = drawn(Batches(rows, 32 * 8, seed=state["seed"], start=state["rows"]), 4)
        assert seen + after == whole[: len(seen) + len(after)]


def test_a_weight_tokenises_nothing_again_and_is_in_the_fingerprint(mixed, monkeypatch):
    plain = mixed()
    monkeypatch.setattr(store, "_build", None)
    weighted_ = [mixed(0.5, 2), mixed(2, 2), mixed(1, 1)]
    assert all(built.folder == plain.folder for built in weighted_)
    prints = [built.fingerprint for built in (plain, *weighted_)]
    assert len(set(prints)) == 3 and prints[3] == prints[0]
    assert len(plain.train.shares) == 1 and plain.train.per_epoch == len(plain.train)


@pytest.mark.parametrize("weights", [(0.5, 2.0), (1.0, 1.0), (3.0, 0.3)])
def test_the_lengths_of_pieces_are_those_of_the_visits(mixed, weights):
    """Over so many epochs that each row of a file was visited equally often."""
    rows = mixed(*weights, sequence_length=256).train
    epochs = math.lcm(*(share.rows // math.gcd(*share) for share in rows.shares))
    visits = np.bincount(weighted_rows_at(0, epochs * rows.per_epoch, rows.shares, 7))
    counted = Counter()
    for row, count in enumerate(visits.tolist()):
        for piece in rows.pieces(row):
            counted[piece.length] += count
    found = dict(zip(*rows.piece_lengths, strict=True))
    assert found == pytest.approx({length: n / epochs for length, n in counted.items()})
