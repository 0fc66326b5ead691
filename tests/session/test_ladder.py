"""Run: pytest tests/session/test_ladder.py (each rung is one change, and the first is an obviously
correct step).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from batches import packed, rows_of, tiny_llama
from commands.inputs import TINY, over, with_texts
from monograph.config import classify, load
from monograph.device import Device, describe
from monograph.errors import UsageError
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.loss import MtpLoss, TokenLoss
from monograph.optim import AdamW, Muon
from monograph.predict.footprint import Work, footprint
from monograph.resident import Resident
from monograph.run.progress import Progress
from monograph.session import ladder as module
from monograph.session.ladder import RUNGS, Ladder, Rung, TrainingVariant, Unfused, unfuse
from monograph.session.objectives.texts import TextTask
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.stream import Streamed

CARD = Device("card", "cuda", 2**36, 2**36, 8, has_bf16=True, has_fp8=True)


def ladder(folder: Path, *settings: str) -> Ladder:
    """Of a few short documents, which fill a good half of their rows."""
    given = over(TINY, "data.sequence_length=256", "train.tokens_per_update=2048", *settings)
    if {"train.tokens", "train.epochs"} & {setting.partition("=")[0] for setting in settings}:
        given.remove("train.updates=8")
    return Ladder.of(resolve(load(*classify(given)[:2]), describe()), folder, Progress())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(with_texts(tmp_path))
    for number in range(10, 100):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " * (30 + number // 3))
    return tmp_path


# ---- one change a rung ---------------------------------------------------------------------------


def test_each_rung_changes_one_thing_and_all_of_them_everything() -> None:
    stack, changed = {"": TrainingVariant()}, list[str]()
    for rung in RUNGS:
        assert rung.base in (None, *stack)
        before = stack[rung.base or [*stack][-1]]
        after = rung.applied_to(before)
        differ = [key for key, value in asdict(after).items() if value != asdict(before)[key]]
        assert differ == list(rung.fields) and len(differ) == (rung is not RUNGS[0])
        changed += differ
        if rung.base is None:
            stack[rung.name] = after
    assert set(changed) == set(asdict(TrainingVariant()))


OPTIMIZERS = (AdamW(lr=1e-2), Muon(lr=1e-2), AdamW(lr=1e-2, ema=0.9))
# By day each optimizer and each way to keep activations.
WAYS = [
    pytest.param(
        optim,
        remat,
        marks=() if (remat == Remat.Full()) == isinstance(optim, Muon) else pytest.mark.slow,
    )
    for optim in OPTIMIZERS
    for remat in (Remat.Off(), Remat.Full())
]


@pytest.mark.parametrize(("optim", "remat"), WAYS)
def test_an_unfused_step_makes_the_same_updates(
    optim: AdamW | Muon, remat: Remat.Off | Remat.Full
) -> None:
    engines = [
        Resident(tiny_llama(torch.float64), optim=optim, clip=0.5, remat=remat, micro_batch=2)
        for _ in range(2)
    ]
    unfuse(engines[0])
    slow, fast = (engine.step for engine in engines)
    assert (
        isinstance(slow.parameters, Unfused)
        and isinstance(slow.loss, TokenLoss)
        and slow.loss.impl == "reference"
    )
    assert len(slow.planes) == len(list(engines[0].model.parameters())) > len(fast.planes)
    for seed in range(4):
        window = rows_of(packed(8, seed), 0, 5)
        one, other = (engine.update() for engine in engines if engine.accumulate(window) is None)
        assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-12)
        assert float(one.grad_norm) == pytest.approx(float(other.grad_norm), rel=1e-12)
    for mine, its in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        assert relative_error(mine, its) < 1e-10


def test_an_unfused_step_trains_a_head_for_multi_token_prediction_as_the_fused_one_does() -> None:
    engines = [
        Resident(tiny_llama(torch.float64, mtp_num_hidden_layers=1), loss=MtpLoss())
        for _ in range(2)
    ]
    unfuse(engines[0])
    for engine in engines:
        engine.step([rows_of(packed(8, 0), 0, 5)])
    slow, fast = (dict(engine.model.named_parameters()) for engine in engines)
    for name in fast:
        assert relative_error(slow[name], fast[name]) < 1e-10, name
    slow_loss, fast_loss = (engine.loss for engine in engines)
    assert isinstance(slow_loss, MtpLoss) and isinstance(fast_loss, MtpLoss)
    assert (slow_loss.impl, fast_loss.impl) == ("reference", "chunked")
    assert float(slow_loss.take_mean()) == pytest.approx(float(fast_loss.take_mean()), rel=1e-12)


def test_a_loss_of_ones_own_stays() -> None:
    engine = Resident(tiny_llama(), loss=lambda model, batch: TokenLoss()(model, batch))
    before = engine.step.loss
    unfuse(engine)
    assert engine.step.loss is before


@pytest.mark.slow
def test_each_rung_trains_the_way_that_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, stack, seen = ladder(folder), {"": TrainingVariant()}, {}
    made.machine = CARD

    def look(session: Session, _: Progress) -> None:
        seen[each.name] = session
        raise UsageError("seen")

    monkeypatch.setattr(module, "prepare", look)
    for each in RUNGS[1:]:
        way = stack[each.base or [*stack][-1]]
        made.measure(each, way, Progress())
        if each.base is None:
            stack[each.name] = each.applied_to(way)
    steps = {name: session.engine.step for name, session in seen.items()}
    # Of a new model.
    assert [rung.name for rung in RUNGS[1:] if rung.name not in seen] == ["adapters"]
    assert [name for name, step in steps.items() if isinstance(step.parameters, Unfused)] == [
        "compiled"
    ]
    assert {name: step.precision.name for name, step in steps.items() if step.precision.name != "bf16"} == {
        "compiled": "fp32", "fused loss and optimizer": "fp32", "fp8": "fp8",
    }  # fmt: skip
    assert {name: step.remat for name, step in steps.items() if step.remat != Remat.Off()} == {
        "recompute": Remat.Full(), "offload": Remat.Offload(),
    }  # fmt: skip
    assert [name for name, session in seen.items() if session.engine.micro_batch != 8] == [
        "accumulation"
    ]
    assert [name for name, session in seen.items() if session.records is made.texts["padded"]] == [
        *seen
    ][:3]
    assert [name for name, step in steps.items() if step.optim.state == "8bit"] == ["8-bit state"]
    assert [name for name, session in seen.items() if isinstance(session.engine, Streamed)] == [
        "streaming"
    ]


# ---- the same tokens -----------------------------------------------------------------------------


def test_an_update_has_as_many_tokens_padded_as_packed(folder: Path) -> None:
    made, means = ladder(folder), {}
    for form in ("padded", "packed"):
        plan = made.plan_of(TrainingVariant(packing=form))
        batches = made.texts[form].batches(plan.training.tokens_per_update)
        counts = [int((next(batches)["targets"] != -100).sum()) for _ in range(40)]
        batches.close()
        means[form] = sum(counts) / len(counts)
    rows = made.plan_of(TrainingVariant()).training.tokens_per_update // 256
    assert rows > 8, "short documents fill a part of their rows"
    assert means["padded"] == pytest.approx(means["packed"], rel=0.5 / rows + 0.05)


def test_the_micro_batch_is_the_plans_and_a_quarter_of_it_where_more_is_accumulated(
    folder: Path,
) -> None:
    made = ladder(folder)
    assert made.plan_of(TrainingVariant(packing="packed")).training.rows == 8
    assert made.plan_of(TrainingVariant(packing="packed", accumulated=True)).training.rows == 2
    assert (
        ladder(folder, "train.micro_batch=2")
        .plan_of(TrainingVariant(accumulated=True))
        .training.rows
        == 1
    )


def test_what_the_rungs_differ_in_is_theirs_and_a_rung_is_no_longer_than_the_run(
    folder: Path,
) -> None:
    made = ladder(folder, "train.precision=fp32", "train.remat=full", "data.packing=padded")
    assert made.max_updates == 8 and made.plan_of(TrainingVariant()).training.remat == "none"
    assert made.plan_of(TrainingVariant(captured=True)).training.compile == "whole"
    assert made.plan_of(TrainingVariant(captured=True, streamed=True)).training.compile == "blocks"
    of_blocks = ladder(folder, "train.compile=blocks")
    assert [
        of_blocks.plan_of(TrainingVariant(captured=each)).training.compile for each in (False, True)
    ] == ["none", "blocks"]
    tokens = ladder(folder, "train.tokens=10000").max_updates
    assert tokens == round(10_000 / 2048) and ladder(folder, "train.epochs=3").max_updates is None


def test_weights_without_fp32_masters_have_no_first_rung(folder: Path) -> None:
    with pytest.raises(UsageError, match="a ladder begins in fp32"):
        ladder(
            folder,
            "optim.name=adamw",
            "optim.state=bf16",
            "optim.master_weights=false",
            "train.precision=bf16",
        )


# ---- what a machine cannot do --------------------------------------------------------------------


def rung(name: str) -> Rung:
    return next(each for each in RUNGS if each.name == name)


def test_a_machine_says_what_it_cannot_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ladder(folder)
    made.machine = Device("old", "cpu", 2**34, 2**34, 2, has_bf16=False)
    monkeypatch.setattr(module, "compiler_obstacle", lambda: "no C++ compiler")
    found = {each.name: made.obstacle(each.applied_to(TrainingVariant()), each) for each in RUNGS}
    without_card = {"CUDA graphs", "fp8", "offload", "streaming"}
    assert {name for name, why in found.items() if why} == {
        "compiled",
        "bf16",
        "adapters",
        *without_card,
    }
    assert found["compiled"] == "no C++ compiler" and found["CUDA graphs"] == "no CUDA device"
    made.machine = CARD
    found = {each.name: made.obstacle(each.applied_to(TrainingVariant()), each) for each in RUNGS}
    # This way is not compiled, and the model is new.
    assert {name for name, why in found.items() if why} == {"CUDA graphs", "adapters"}
    assert not made.obstacle(
        rung("CUDA graphs").applied_to(TrainingVariant(captured=True)), rung("CUDA graphs")
    )
    one = ladder(folder, "train.micro_batch=1")
    assert "one row" in str(one.obstacle(TrainingVariant(accumulated=True), rung("accumulation")))
    narrow = ladder(folder, "optim.name=adamw", "optim.state=8bit")
    assert "all rungs have it" in str(
        narrow.obstacle(TrainingVariant(narrow_state=True), rung("8-bit state"))
    )


def test_what_fails_on_a_rung_is_its_reason_and_the_next_one_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no blocks")

    made = ladder(folder)
    monkeypatch.setattr(module, "prepare", refuse)
    assert made.measure(rung("recompute"), TrainingVariant(), Progress()) == "no blocks"
    with pytest.raises(UsageError, match="no blocks"):
        made.measure(RUNGS[0], TrainingVariant(), Progress())


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_peak_is_the_one_that_is_predicted(folder: Path) -> None:
    made = ladder(folder, "model.num_hidden_layers=2", "model.hidden_size=64", "train.updates=8")
    found = made.measure(
        rung("fused loss and optimizer"), TrainingVariant(packing="packed"), Progress()
    )
    assert not isinstance(found, str)
    plan, text = made.plan, made.texts["packed"]
    config = module.build_run(plan, TextTask(text), made.machine).recipe.shape()
    work = Work(
        config, rows=8, length=256, optim=type(plan.training.optim)(), compile="none", window_rows=8
    )
    assert found.peak_memory_bytes == pytest.approx(footprint(work).peak_bytes, rel=0.05)
    assert (found.micro_batch, found.micro_steps, len(found.seconds)) == (8, 1, 6)
    assert found.held_out and 4 < found.held_out.loss < 7 and 4 < found.train_loss < 7


@pytest.mark.slow  # three graphs are compiled
def test_the_captured_rungs_compute_what_the_eager_one_does(folder: Path) -> None:
    made, way, losses = ladder(folder), TrainingVariant(), []
    for each in RUNGS[:3]:
        found = made.measure(each, way, Progress())
        assert not isinstance(found, str) and found.held_out, found
        way = each.applied_to(way)
        assert bool(found.compile_s) == (each is not RUNGS[0]) and not found.notes
        losses.append(found.held_out.loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
