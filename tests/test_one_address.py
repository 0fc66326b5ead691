"""Run: pytest tests/test_one_address.py

An optimizer, and a form of its state, that are written in one place train in every engine; a number
that is declared in one place is drawn wherever numbers are. (A way to learn is added in
tests/session/test_objective.py.)
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import monograph as mono
from commands.inputs import TINY, over, with_texts
from four_bits import FOUR_BITS
from lion import Lion
from monograph import checkpointing, optim_table
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import OPTIMIZERS
from monograph.optim.formats import FORMATS
from monograph.planner.placement_bytes import stages_of
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Work, footprint
from monograph.report import figures, metrics
from monograph.report.compare_report import Compared, compare_page
from monograph.report.metrics import Metric
from monograph.report.run_report import About, run_page
from monograph.resident import Resident
from monograph.step import Step

SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
UPDATES = 3
SOURCES, TESTS = Path(mono.__file__).parents[1], Path(__file__).parent


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", Lion)
    monkeypatch.setitem(FORMATS, "4bit", FOUR_BITS)


def model():
    torch.manual_seed(0)
    return Llama(SHAPE)


def windows():
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        tokens = torch.randint(0, 32, (2, 9), generator=generator)
        yield {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def trained(engine):
    for window in windows():
        engine.accumulate(window)
        engine.update()
    return engine


def test_a_new_optimizer_is_its_formula():
    engine = trained(Resident(model(), optim=Lion(lr=0.01, betas=(0.9, 0.99))))
    other = model()
    moments = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    for batch in windows():
        total, count = mono.token_loss(other, batch)
        names, parameters = zip(*other.named_parameters(), strict=True)
        grads = torch.autograd.grad(total / count, parameters)
        with torch.no_grad():
            for name, parameter, grad in zip(names, parameters, grads, strict=True):
                m = moments[name]
                decay = 0.1 if parameter.ndim > 1 else 0.0
                parameter -= 0.01 * decay * parameter + 0.01 * (0.9 * m + 0.1 * grad).sign()
                moments[name] = 0.99 * m + 0.01 * grad
    for name, parameter in other.named_parameters():
        # Where rounding decides about a sign, a weight differs by a whole step.
        near = (engine.model.get_parameter(name) - parameter).abs() < 1e-6
        assert near.float().mean() > 0.99, name


def test_a_new_optimizer_trains_streamed_and_stacked_as_resident():
    resident = trained(Resident(model(), optim=Lion(lr=0.01)))
    kept = mono.Placement(on_device=frozenset({(1, "sign_momentum")}))  # as a plan may choose
    streamed = trained(mono.Streamed(model(), optim=Lion(lr=0.01), placement=kept))
    for name, parameter in resident.model.state_dict().items():
        assert torch.equal(streamed.model.state_dict()[name], parameter), name
    stacked = mono.Ensemble([model(), model()], optim=Lion(lr=0.01))
    trained(stacked)
    member = stacked.members[1].state_dict()
    for name, parameter in resident.model.state_dict().items():
        near = (member[name] - parameter).abs() < 1e-5
        assert near.float().mean() > 0.99, name


@pytest.mark.parametrize("optim", [mono.AdamW, mono.Muon, Lion])
def test_a_new_form_of_the_state_trains_with_every_optimizer(optim):
    exact = trained(Resident(model(), optim=optim(lr=1e-3)))
    engine = trained(Resident(model(), optim=optim(lr=1e-3, state="4bit")))
    for plane in engine.step.planes:
        moments = sum(buffer.nbytes for buffer in plane.state.values())
        assert moments == FOUR_BITS.bytes_each * plane.param.numel() * len(plane.kind.rule.moments)
    for name, parameter in exact.model.named_parameters():
        assert (engine.model.get_parameter(name) - parameter).abs().max() < 0.01, name


# Their rows stand in the table before anything else is imported, as those of `optim_table` do.
PROGRAM = """
import contextlib, io, json, sys
from monograph import optim_table
optim_table.OPTIMIZERS["lion"] = optim_table.Row("Lion for all weights", "lion:Lion")
optim_table.FORMATS["4bit"] = optim_table.Row("about 1 byte a parameter", "four_bits:FOUR_BITS")
from monograph import cli
results = []
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.main(command)
        except SystemExit as ended:
            code = ended.code
    results.append([code or 0, said.getvalue()])
print(json.dumps(results))
"""
NEW = ["optim.name=lion", "optim.state=4bit"]


def test_each_optimizer_of_the_table_has_a_public_name() -> None:
    for row in optim_table.OPTIMIZERS.values():
        assert getattr(mono, row.load().__name__) is row.load()


def test_keys_and_engines_know_what_is_in_the_table(tmp_path: Path) -> None:
    with_texts(tmp_path)
    settings = over(TINY, *NEW, "train.updates=3")
    commands = [
        ["train", *settings, "--out", "resident"],
        ["train", *settings, "train.memory=stream", "--out", "streamed"],
        ["train", "--from", "streamed", "train.updates=1", "train.compile=none", "--out", "more"],
        ["train", *over(settings, "optim.master_weights=false"), "--out", "refused"],
        ["keys", "optim.name"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{SOURCES}:{TESTS}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *trained, (refused, refusal), (_, key) = json.loads(done.stdout)
    assert [code for code, _ in trained] == [0, 0, 0], trained
    one, other = (
        checkpointing.load(tmp_path / name / "checkpoints" / "step-00000003")
        for name in ("resident", "streamed")
    )
    for left, right in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
    assert "sign_momentum_scale.model.norm.weight" in one.optimizer
    assert "betas = [0.9, 0.99]" in (tmp_path / "resident" / "config.toml").read_text()
    assert refused == 2 and "say optim.state = bf16, not 4bit" in refusal
    assert "Lion for all weights" in key


def test_plans_know_their_bytes():
    optims = [Lion(state=state) for state in ("fp32", "4bit")]
    # Whole blocks of 64, as the trace of a shorter model is scaled to the model's size.
    shape = replace(SHAPE, vocab_size=256, hidden_size=64, intermediate_size=128)
    works = [Work(shape, rows=64, length=16, optim=optim, compile="none") for optim in optims]
    exact, narrow = map(estimate_bytes, works)
    spared = shape.parameter_count() * (4 - FOUR_BITS.bytes_each)
    assert abs(exact - narrow - spared) <= 1
    for optim, work in zip(optims, works, strict=True):
        step = Step(Llama(shape), optim=optim)
        sizes = [buffer.nbytes for plane in step.planes for buffer in plane.state.values()]
        # The allocator gives each buffer a multiple of 64 bytes.
        assert footprint(work).by_origin["moments"] == sum(-(-size // 64) * 64 for size in sizes)
        stages = stages_of(shape, optim, "fp32", 1)
        names = set(stages.names) & set(
            FORMATS[optim.state].numbers_per_element(optim.rules[0].moments)
        )
        streamed = [stages.size_bytes(i, name) for i in range(stages.count) for name in names]
        assert sum(streamed) == sum(sizes)


def test_a_new_number_is_checked_drawn_compared_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = Metric(
        "surprise", "surprise", "Surprise, shannons", held_out="eval_surprise", is_printed=True
    )
    monkeypatch.setattr(metrics, "METRICS", [*metrics.METRICS, new])
    rows = [
        {"update": update, "tokens": 10 * update, "surprise": 1.0 + update}
        for update in range(1, 9)
    ]
    rows.append({"update": 8, "tokens": 80, "eval_surprise": 3.0})
    assert metrics.printed(rows[0]) == ["surprise"] and set(new.keys) <= set(metrics.keys())
    assert "Surprise, shannons" in run_page(tmp_path, {}, rows, About())
    sides = [
        Compared(name, params=9, score=1.0, tokens_per_s=None, curves=[rows], verdict="equal")
        for name in "ab"
    ]
    assert "Surprise, shannons" in compare_page("two", "bits", sides, [])
    assert [picture.name for picture in figures.draw(rows, {}, "", "")[1]] == ["surprise"]


def test_every_number_that_is_drawn_is_described() -> None:
    pages = "".join(path.read_text() for path in Path("docs").glob("*.md"))
    assert not [key for key in metrics.keys() if f"`{key}`" not in pages]


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    tree = ast.walk(ast.parse(path.read_text()))
    return {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}


def test_only_an_objective_knows_of_rewards_and_preferences() -> None:
    """Whoever asks of which kind a run is has to know of the kinds; all others ask the run's
    objective.
    """
    source = Path(mono.__file__).parent
    files = [
        *source.glob("session/*.py"),
        *source.glob("commands/*.py"),
        *source.glob("sweeps/*.py"),
    ]
    files += [*source.glob("planner/*.py"), *source.glob("report/*.py")]
    assert len(files) > 60
    knowing = {
        path.name
        for path in files
        if any(name.startswith("monograph.rl") for name in imported(path))
    }
    assert not knowing
