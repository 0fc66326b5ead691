"""Run: pytest tests/test_arguments.py

Arguments of the library's classes and functions: what the command line refuses they refuse too, in
one line.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mono
from batches import ENGINES, of_rows, ragged, tiny_llama
from monograph.config.settings import checked_value
from monograph.errors import UsageError
from monograph.loss import check_result
from monograph.optim import Group
from monograph.ranges import ABOVE_0, COUNT, whole
from monograph.step import Clip, Step

NUMBERS = (
    -1.0,
    -1e-9,
    0.0,
    1e-8,
    0.5,
    1.0,
    2.0,
    1e30,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "0.5",
    None,
)
# A rate of 0 is for measurements: it changes no weight. None is the settings' "none".
SAME = {
    "optim.lr": (lambda value: mono.AdamW(lr=value), (0.0,)),
    "optim.weight_decay": (lambda value: mono.AdamW(weight_decay=value), ()),
    "optim.betas": (lambda value: mono.Muon(betas=(0.9, value)), ()),
    "optim.eps": (lambda value: mono.Muon(eps=value), ()),
    "optim.ema": (lambda value: mono.AdamW(ema=value), (None,)),
    "optim.grad_clip": (Clip.of, (None,)),
    "lora.alpha": (lambda value: mono.Lora(alpha=value), (None,)),
    "lora.dropout": (lambda value: mono.Lora(dropout=value), (None,)),
}


def refused(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except UsageError as error:
        assert "expected" in str(error) and "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize("key", SAME)
def test_the_library_refuses_what_the_settings_refuse(key: str) -> None:
    make, apart = SAME[key]
    for value in (value for value in NUMBERS if value not in apart):
        given = [0.9, value] if key == "optim.betas" else value
        by_key = refused(
            lambda key=key, given=given: checked_value(key, given, "here", from_text=False)
        )
        assert (refused(lambda make=make, value=value: make(value)) is None) == (by_key is None), (
            value,
            by_key,
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mono.AdamW(lr=math.nan), "lr = nan: expected a number, 0 or more"),
        (
            lambda: mono.AdamW(betas=(1, 1)),
            r"betas = \(1, 1\): expected two numbers, 0 or more and below 1",
        ),
        (lambda: mono.AdamW(betas=0.9), "betas = 0.9: expected two numbers"),
        (lambda: mono.AdamW(betas=(0.9, 0.9, 0.9)), "0.9, 0.9, 0.9.: expected two numbers"),
        (
            lambda: mono.AdamW(groups=["*.bias"]),
            r"groups = \['\*.bias'\]: expected a list of monograph.Group",
        ),
        (
            lambda: mono.Muon(momentum=1.0),
            "momentum = 1.0: expected a number, 0 or more and below 1",
        ),
        (lambda: mono.Muon(embedding_lr=-1.0), "embedding_lr = -1.0: expected a number, 0 or more"),
        (lambda: Group(3), "pattern = 3: expected a text"),  # type: ignore[arg-type]
        (lambda: mono.Muon(matrices=[3]), r"matrices = \[3\]: expected a list of patterns"),  # type: ignore[list-item]
        (
            lambda: mono.Muon(matrices="*.weight"),
            r"matrices = '\*.weight': expected a list of patterns",
        ),
        (lambda: mono.AdamW(groups=3), "groups = 3: expected a list of monograph.Group"),  # type: ignore[arg-type]
        (lambda: mono.AdamW(lr=10**400), "lr = 10+: expected a number, 0 or more"),
        (lambda: Step(nn.Linear(1, 1))(True), "a window is a list of micro-batches, not a bool"),  # type: ignore[arg-type]
        (
            lambda: Step(nn.Linear(1, 1))(torch.ones(1)),
            "a window is a list of micro-batches, not a Tensor",
        ),
        (
            lambda: Step(nn.Linear(1, 1))([True]),
            "a window is a list of micro-batches, and True is not a micro-batch",
        ),
        (lambda: Group("*", lr=-1.0), r"lr of the group '\*' = -1.0"),
        (lambda: Group("*", eps=0.0), r"eps of the group '\*' = 0.0"),
        (
            lambda: mono.Precision("fp16", loss_scale=0.0),
            "loss_scale = 0.0: expected a number above 0",
        ),
        (lambda: mono.Remat.Budget("half"), r"Remat.Budget\(half\): expected a share"),
        (lambda: mono.Lora(rank=0), "rank = 0: expected a whole number above 0"),
        (lambda: mono.Lora(base="int4"), "base = 'int4': expected one of auto, int8, nf4"),
        (lambda: mono.warmup_cosine(-1, 10), "warmup = -1: expected a number, 0 or more"),
        (lambda: mono.warmup_cosine(1, 10, final=math.nan), "final = nan"),
        (
            lambda: mono.warmup_stable_decay(1, 10, decay=2.0),
            "decay = 2.0: expected a number from 0 to 1",
        ),
        (lambda: mono.constant(math.nan), "warmup = nan"),
        (
            lambda: mono.Resident(nn.Linear(1, 1), micro_batch=True),
            "micro_batch = True: expected rows",
        ),
        (
            lambda: mono.Resident(nn.Linear(1, 1), loss=3),
            r"loss is a int: expected a function of \(model, batch\)",
        ),
        (
            lambda: mono.Resident(nn.Linear(1, 1), schedule=0.1),
            "schedule is a float: expected a function",
        ),
        (
            lambda: mono.Resident(nn.Linear(1, 1), precision="bf16"),
            "precision is a str: expected a monograph.Precision",
        ),
        (
            lambda: mono.Resident(nn.Linear(1, 1), remat="full"),
            "remat is a str: expected one of monograph.Remat's",
        ),
        (
            lambda: mono.Ensemble([nn.Linear(1, 1), "two"]),
            "a member is a str: expected a torch.nn.Module",
        ),
        (
            lambda: mono.Ensemble([nn.Linear(1, 1)], mono.grid(lr=[-1.0])),
            "lr = -1.0: expected a number, 0 or more",
        ),
        (lambda: check_result((torch.ones(()), 1, 2)), "the loss must return"),
        (lambda: check_result(torch.ones(2)), "the loss must return"),
        (
            lambda: check_result((torch.ones(2), 1)),
            r"a tensor of shape \[2\], expected a tensor of one number",
        ),
        (
            lambda: list(mono.train(mono.Resident(nn.Linear(1, 1)), {"x": torch.ones(2)})),
            "is one window: expected",
        ),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_a_range_takes_numpy_s_numbers_and_rounds_none() -> None:
    assert (
        ABOVE_0.holds(np.float32(0.1))
        and COUNT.holds(np.int64(3))
        and not COUNT.holds(np.float64(3))
    )
    largest = 2**63 - 1  # as a float it would be 2**63
    assert whole(0, largest).holds(largest) and not whole(0, largest).holds(largest + 1)
    assert not ABOVE_0.holds(np.bool_(True))


# ---- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"masks": torch.eye(4, 8).to_sparse()},
            "window's 'masks' is sparse: expected a dense tensor, .to_dense()",
        ),
        (
            {"masks": "nested"},
            r"window's 'masks' is nested: expected a dense tensor, .to_padded_tensor\(\)",
        ),
        (
            {"causal": True},
            "window's 'causal' is True: expected a tensor that has rows as its dimension 0",
        ),
        ({"x": np.zeros((1000, 2))}, r"'x' is a ndarray of shape \[1000, 2\]: expected a tensor"),
        ({"scale": torch.tensor(2.0)}, r"'scale' is a Tensor of shape \[\]"),
        (
            {"targets": torch.zeros(3, 8, dtype=torch.int64)},
            r"equally many rows, 1 or more, but .*'targets': 3",
        ),
        (
            {name: torch.zeros(0, 8, dtype=torch.int64) for name in ("tokens", "targets")},
            "1 or more, but",
        ),
    ],
)
def test_a_window_is_tensors_of_equally_many_rows(change: dict[str, Any], words: str) -> None:
    engine = mono.Resident(tiny_llama(), micro_batch=2)
    if change.get("masks") == "nested":
        with warnings.catch_warnings(action="ignore"):  # of torch, about its prototype
            change = {"masks": torch.nested.nested_tensor([torch.ones(2)] * 4)}
    window = {name: ragged(4)[name] for name in ("tokens", "targets")} | change
    for use in (engine.accumulate, engine.evaluate, engine.trial, engine.capture):
        with pytest.raises(UsageError, match=words):
            use(window)
    with pytest.raises(UsageError, match="a window is a list: expected a dict of tensors"):
        engine.accumulate([window])


def failing(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    if batch["x"].max() > 99:
        raise KeyboardInterrupt
    return of_rows(model, batch)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("fault", ["loss", "schedule"])
def test_a_window_that_fails_leaves_nothing_to_the_next(kind: str, fault: str) -> None:
    def rate(index: int) -> float:
        return float("nan") if broken and fault == "schedule" else 1.0

    updates, window = [], {"x": torch.ones(4, 3)}
    for broken in (False, True):
        torch.manual_seed(0)
        engine = ENGINES[kind](
            nn.Linear(3, 2), loss=failing, optim=mono.AdamW(), schedule=rate, micro_batch=2
        )
        with pytest.raises((KeyboardInterrupt, UsageError)) if broken else contextlib.nullcontext():
            if broken:
                engine.accumulate(
                    window | {"x": torch.tensor([[5.0], [5.0], [5.0], [100.0]]).expand(4, 3)}
                )
                engine.update()
        if broken and fault == "schedule":
            with pytest.raises(UsageError, match="nan"):
                [engine.accumulate(window), engine.update()]
        broken = False
        engine.accumulate(window)
        updates.append(engine.update())
    for one, other in zip(*((u.loss, u.count, u.grad_norm) for u in updates), strict=True):
        assert torch.equal(one, other)
