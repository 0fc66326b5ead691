"""Run: pytest tests/test_one_address.py

An optimizer, and a form of its state, that are written in one place train in every engine; a number
that is declared in one place is drawn wherever numbers are; a format that is declared in one place
is exported, and a schedule trained with; a reward, a loss of preferences and a key are written into
a copy of the package. (A way to learn is added in tests/session/test_objective.py.)
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mono
from commands.inputs import TINY, over, with_texts
from four_bits import FOUR_BITS
from lion import Lion
from monograph import checkpointing, optim_table
from monograph.cli import command_tree
from monograph.commands import export
from monograph.config import load
from monograph.config.keys import key_declaration
from monograph.config.settings import choices
from monograph.device import describe
from monograph.errors import UsageError, join_with_or
from monograph.model import gguf
from monograph.model.config import LlamaConfig
from monograph.model.exports import EXPORTS, Export
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.optim import OPTIMIZERS
from monograph.optim.formats import FORMATS
from monograph.planner.placement_bytes import stages_of
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Work, footprint
from monograph.report import metrics, run_figures
from monograph.report.compare_report import Compared, compare_page
from monograph.report.metrics import Metric
from monograph.report.run_report import About, run_page
from monograph.report.trackers import LIBRARIES, Library, Tracker, tracker_named
from monograph.resident import Resident
from monograph.schedule import SCHEDULES, NamedSchedule
from monograph.session.requirements import require_compatible
from monograph.session.resolve import resolve
from monograph.step import Step
from monograph.text.tokenizer import Tokenizer

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
RUN_COMMANDS = """
import contextlib, io, json, sys
from monograph import optim_table
optim_table.OPTIMIZERS["lion"] = optim_table.TableRow("Lion for all weights", "lion:Lion")
optim_table.FORMATS["4bit"] = optim_table.TableRow("about 1 byte a parameter", "four_bits:FOUR_BITS")
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


@pytest.mark.slow
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
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)],
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
        names = set(stages.buffer_names) & set(
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
    assert metrics.printed_keys(rows[0]) == ["surprise"] and set(new.keys) <= set(
        metrics.metric_keys()
    )
    page = run_page(tmp_path, {}, rows, About())
    assert "Surprise, shannons" in page
    assert re.search(r"Scores on held-out text.*>surprise</button>.*3\.0000", page, re.DOTALL)
    sides = [
        Compared(name, params=9, score=1.0, tokens_per_s=None, curves=[rows], verdict="equal")
        for name in "ab"
    ]
    assert "Surprise, shannons" in compare_page("two", "bits", sides, [])
    assert [picture.name for picture in run_figures.draw(rows, {}, "", "")[1]] == ["surprise"]


def test_a_plan_makes_the_schedule_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    halving = NamedSchedule("halves each update", lambda warmup, total, final: lambda i: 0.5**i)
    monkeypatch.setitem(SCHEDULES, "cosine", halving)
    plan = resolve(load(None, {"train.updates": 3}), describe())
    assert [plan.schedule(3)(index) for index in range(3)] == [1, 0.5, 0.25]


def test_each_schedule_has_its_word_its_meaning_and_whether_a_floor_says_something() -> None:
    assert choices("optim.schedule") == tuple(SCHEDULES)
    meanings = {name: schedule.meaning for name, schedule in SCHEDULES.items()}
    assert key_declaration("optim.schedule").choices == meanings
    for name, schedule in SCHEDULES.items():
        given = load(None, {"optim.schedule": name, "optim.min_lr_ratio": 0.1})
        plan = resolve(load(None, {"optim.schedule": name}), describe())
        ends = plan.schedule(100)(10**6)
        assert (ends < 1) == schedule.falls, name
        if schedule.falls:
            require_compatible(given)
        else:
            with pytest.raises(UsageError, match=f"optim.schedule = {name} never falls"):
                require_compatible(given)


def test_every_number_that_is_drawn_is_described() -> None:
    pages = "".join(path.read_text() for path in Path("docs").glob("*.md"))
    assert not [key for key in metrics.metric_keys() if f"`{key}`" not in pages]


class Listing(Export):
    """Names and shapes, a line for each tensor."""

    tools = ("people",)
    noun_phrase = "a list"
    aliases = ("ls",)

    def write(self, model, folder, tokenizer, dtype, warn, write_extras):
        folder.mkdir()
        lines = [f"{name} {list(tensor.shape)}\n" for name, tensor in model.named_parameters()]
        (folder / "shapes.txt").write_text("".join(lines))
        write_extras(folder)

    def describe(self, folder):
        return f"{folder}: a list to read"


def test_a_new_format_is_exported_and_refused_as_the_others_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EXPORTS, "list", Listing())
    tokenizer = Tokenizer.bytes()
    shape = replace(SHAPE, vocab_size=tokenizer.vocab_size)
    save_model(Llama(shape), tmp_path / "model", tokenizer)
    export.run(str(tmp_path / "model"), to=tmp_path / "out", format="list", dtype=None)
    assert f"{tmp_path / 'out'}: a list to read" in capsys.readouterr().out
    written = (tmp_path / "out" / "shapes.txt").read_text()
    assert f"model.embed_tokens.weight [{shape.vocab_size}, 16]" in written
    for to, named, dtype, said in (
        ("out", "onnx", None, f"expected {join_with_or(EXPORTS)}"),
        ("out", "ls", None, "did you mean list?"),
        ("out", "list", "f16", "a list keeps the weights' dtype"),
        ("hf://me/model", "list", None, "only hf is pushed"),
    ):
        with pytest.raises(UsageError) as refused:
            export.run(str(tmp_path / "model"), to=to, format=named, dtype=dtype)
        assert said in str(refused.value)


def test_a_new_tracker_is_opened_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_run(name, key, settings, out):
        return Tracker(lambda points: None, lambda: None, "look")

    monkeypatch.setitem(LIBRARIES, "json", Library("JSON", open_run))  # a library that is there
    assert tracker_named("json") is open_run


def test_the_command_line_offers_the_declared_trackers_and_formats() -> None:
    commands = command_tree().commands
    [to] = [each for each in commands["follow"].params if each.name == "to"]
    assert to.help == join_with_or(LIBRARIES)
    assert "TensorBoard, W&B" in commands["follow"].help
    options = {each.name: each for each in commands["export"].params}
    assert options["format"].metavar.split("|") == [*EXPORTS]
    assert EXPORTS["gguf"].dtypes == tuple(gguf.DTYPES)
    assert options["dtype"].metavar.split("|") == [*gguf.DTYPES]


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


# ── what the settings name, written into a copy of the package ────────────────────────────────────

# By file, what is written before which line.
REWARD = {
    "rl/rewards.py": {
        "# The names that the key rl.reward takes, besides FILE.py:FUNCTION.": """
from monograph.ranges import ABOVE_0

class _Close(Reward):
    def __init__(self, tolerance):
        self.tolerance = tolerance

    def _score_one(self, answer):
        apart = abs(float(answer.completion) - answer.record["answer"])
        return max(0.0, 1 - apart / self.tolerance)
""",
        '    "python": NamedReward(': """
    "close": NamedReward("how close it is to the record's answer", _Close, (
        Parameter("rl.reward_tolerance", "With rl.reward = close: what is worth 0.", ABOVE_0, 1.0),
    )),
""",
    }
}
LOSS_OF_PAIRS = {
    "rl/preferences.py": {
        "@dataclass(frozen=True)\nclass LossOfPairs": """
def _slic(pairs, *, delta):
    return (delta - pairs.chosen + pairs.rejected).clamp_min(0)

""",
        '    "orpo": LossOfPairs(': """
    "slic": LossOfPairs("by a hinge of their likelihoods", _slic, (
        Parameter("prefer.delta", "Margin of slic.", _NOT_NEGATIVE, 1.0),
    ), needs_reference=False),
""",
    }
}
KEY = {
    "config/keys.py": {
        "    keep: Whole = _key(": """
    rest: Whole = _key(3, _EXPECTS_WHOLE, "Updates after which the device rests.", fixed=_NO_EFFECT)
""",
    },
    "session/job.py": {'    keep: int = of_key("train.keep")': 'rest: int = of_key("train.rest")'},
}
PROGRAM = """
import json, torch
from monograph.config import load
from monograph.config.axes import axes_of
from monograph.config.keys import key_declaration
from monograph.errors import UsageError
from monograph.rl.preferences import PreferenceInputs, losses
from monograph.rl.rewards import Answer, reward_of
from monograph.session.door import job_of
from monograph.session.objectives.preferences import preference_of
from monograph.session.objectives.rewards import Rewards
from monograph.session.requirements import require_compatible

def read(**keys):
    return load(None, {key.replace("__", "."): value for key, value in keys.items()}, {})

def refusal(function, *arguments, **keys):
    try:
        function(*arguments, **keys)
    except UsageError as error:
        return str(error)

def worth(**keys):
    opened = Rewards().decide(read(**keys), 64)
    reward = reward_of(opened.objective.reward, {}, **opened.objective.parameters)
    [score] = reward.score([Answer("", "3", {"answer": 2.5}, "")])
    return score, opened.values.get("rl.reward_tolerance")

def loss(**keys):
    chosen, rejected = torch.tensor([-1.0]), torch.tensor([-1.5])
    pairs = PreferenceInputs(chosen, rejected, None, None, None, None, None, None)
    return losses(preference_of(read(**keys)), pairs).item()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a reward, a loss of preferences and a key more."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "monograph"
    # With its bytecode: what is not changed is not compiled again.
    shutil.copytree(Path(mono.__file__).parent, package)
    for file, written in (REWARD | LOSS_OF_PAIRS | KEY).items():
        text = (package / file).read_text()
        for line, before in written.items():
            assert text.count(line) == 1, line
            indent = "    " if before.startswith("rest") else ""
            text = text.replace(line, f"{indent}{before}\n{line}")
        (package / file).write_text(text)
    return folder


def printed_by(copy: Path, expression: str) -> Any:
    """What an expression is in a process that uses the copy."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\nprint(json.dumps({expression}, default=dict))"],
        env=os.environ | {"PYTHONPATH": str(copy)},
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_new_reward_with_a_parameter_is_one_file(copy: Path) -> None:
    assert len(REWARD) == 1
    given, usual, key, rewards, wrong, strange, axis = printed_by(
        copy,
        "(worth(rl__reward='close', rl__reward_tolerance='2'), worth(rl__reward='close'),"
        " key_declaration('rl.reward_tolerance')._asdict(), key_declaration('rl.reward').expected,"
        " refusal(read, rl__reward='close', rl__reward_tolerance='-1'),"
        " refusal(require_compatible, read(rl__reward='exact', rl__reward_tolerance='2')),"
        " refusal(axes_of, {'rl.reward_tolerance': '1,2'}))",
    )
    assert given == [0.75, None], "the setting stays as it was given"
    assert usual == [0.5, 1.0], "the default is recorded, since a later version may have another"
    assert (key["default"], key["expected"]) == (1.0, "a number above 0")
    assert " close, python" in rewards
    assert 'rl.reward_tolerance = "-1": expected a number above 0' in wrong
    assert "rl.reward_tolerance = 2 is of rl.reward = close, not exact: leave it out" in strange
    assert "rl.reward_tolerance cannot be an axis: members are compared by rewards" in axis


@pytest.mark.slow
def test_a_new_loss_of_preferences_is_one_file(copy: Path) -> None:
    assert len(LOSS_OF_PAIRS) == 1
    given, usual, key, wrong, strange = printed_by(
        copy,
        "(loss(prefer__loss='slic', prefer__delta='2'), loss(prefer__loss='slic'),"
        " key_declaration('prefer.delta')._asdict(),"
        " refusal(read, prefer__loss='slic', prefer__delta='-1'),"
        " refusal(preference_of, read(prefer__loss='dpo', prefer__delta='2')))",
    )
    assert (given, usual) == (1.5, 0.5)
    assert (key["default"], key["meaning"]) == (1.0, "Margin of slic.")
    assert 'prefer.delta = "-1": expected a number, 0 or more' in wrong
    assert "prefer.delta does not go with prefer.loss = dpo, which has beta" in strange


def test_a_new_key_is_its_declaration_and_the_field_that_has_its_value(copy: Path) -> None:
    assert len(KEY) == 2, "and the place that uses it"
    given, usual, key, wrong, axis = printed_by(
        copy,
        "(job_of(read(train__rest='5')).rest, job_of(read()).rest,"
        " key_declaration('train.rest')._asdict(), refusal(read, train__rest='0'),"
        " refusal(axes_of, {'train.rest': '1,2'}))",
    )
    assert (given, usual) == (5, 3)
    assert key["meaning"] == "Updates after which the device rests."
    assert 'train.rest = "0": expected a whole number above 0' in wrong
    assert "train.rest cannot be an axis: it does not change what a member learns" in axis
