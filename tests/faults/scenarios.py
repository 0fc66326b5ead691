"""Whatever else writes: each with what is there before, what is done, and what has to be there
afterwards.

A case's `look` says what a folder holds after a fault, "former" or "new", and fails where it is
neither; `again` is what a person does next, which must come to the new and leave nothing else
behind. `steps` run in a FaultServer's forks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapted import SMALL, adapted_llama
from batches import tiny_llama
from commands.inputs import with_texts
from faults.examples import checkpoint, same, two_saves
from faults.harness import EVERY_FAULT, Scenario
from laws.resumed import SETTINGS as SETTINGS_OF_RUN
from laws.resumed import fingerprint, start, write_inputs
from laws.resumed import resume as go_on
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.commands import export as export_a_run
from monograph.commands import follow
from monograph.config import load
from monograph.data.corpus import Corpus, corpus
from monograph.device import describe
from monograph.errors import MonographError
from monograph.graph.lora import checkpoint_state
from monograph.laws.comparisons import outcome
from monograph.loop import EngineState, train
from monograph.model.adapter import install_adapters, pack_adapters, save_adapter
from monograph.model.hub import mapped_model, save_model
from monograph.model.llama import Llama
from monograph.model.whole_folder import save_whole
from monograph.run.folder import TEACHERS, Run
from monograph.run.models import save
from monograph.run.progress import Progress
from monograph.run.recipe import ModelRecipe, lora_record, module_digest
from monograph.run.run_index import serial_number
from monograph.run.writing import discard, record_parent, write_tokenizer
from monograph.session import reporting
from monograph.session.objectives.teachers import write_teachers
from monograph.session.objectives.texts import TextTask
from monograph.session.record import write_config
from monograph.session.resolve import resolve
from monograph.stream import Placement, Streamed
from monograph.sweeps import cohort as cohorts
from monograph.sweeps.cohort import Cohort
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import members_of
from monograph.text.tokenizer import Tokenizer
from recorded import recorded
from streamed import other_bits, streamed, windows

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """See the module. `modes`, `stride`: the faults of a short run of the tests, and of how many
    operations one.
    """

    prepare: Callable[[Path], object]
    steps: Scenario
    look: Callable[[Path], str]
    again: Callable[[Path], object]
    modes: Sequence[str] = EVERY_FAULT
    stride: int = 3


def quiet(line: str) -> None:
    """Warnings are looked at by the tests of what warns."""


# ---- metrics -------------------------------------------------------------------------------------

LOGGED: Rows = [{"update": update, "train_loss": 1 / update} for update in range(1, 9)]
BEFORE = 3


def log(folder: Path, rows: Rows) -> Run:
    run = Run(folder / "run")
    run.log(*rows)
    return run


def begin_metrics(folder: Path) -> None:
    write_config(Run.create(folder / "run"), load(None, {"train.updates": 5}, {}))
    log(folder, LOGGED[:BEFORE])


def append_metrics(folder: Path) -> None:
    run = Run.open(folder / "run")
    with run.lock():
        run.truncate_metrics(run.metrics_offset)
        run.log(*LOGGED[BEFORE:5])
        run.log(LOGGED[5])
        run.sync_metrics()
        run.log(*LOGGED[6:])


def look_at_metrics(folder: Path) -> str:
    run = Run.open(folder / "run")
    rows = run.rows()
    assert serial_number(run.folder) == 1
    assert rows == LOGGED[: len(rows)] and len(rows) >= BEFORE, rows
    return "new" if rows == LOGGED else "former"


def log_again(folder: Path) -> None:
    """As a resume does: back to what a checkpoint recorded, then on."""
    run = Run.open(folder / "run")
    run.truncate_metrics(len("".join(json.dumps(row) + "\n" for row in LOGGED[:BEFORE])))
    append_metrics(folder)
    assert look_at_metrics(folder) == "new"


# ---- the beginning of a run ----------------------------------------------------------------------

SETTINGS = load(None, {"train.updates": 5}, {})


def begin(folder: Path) -> None:
    """What `train` writes before its first checkpoint, and what it removes where it fails before
    that.
    """
    run = Run.create(folder / "run")
    with run.lock(new=True):
        try:
            record_parent(run, Run(folder / "parent"), 7)
            write_config(run, SETTINGS)
            write_tokenizer(run, Tokenizer.bytes())
        except MonographError:
            discard(run)
            raise


def look_at_beginning(folder: Path) -> str:
    run = Run(folder / "run")
    if not run.has_begun:
        return "former"
    assert load(run.config, {}, {}).fingerprint == SETTINGS.fingerprint
    assert json.loads(run.parent_file.read_bytes())["update"] == 7
    assert (
        not run.tokenizer.exists()
        or Tokenizer.from_file(run.tokenizer).hash == Tokenizer.bytes().hash
    )
    return "new" if run.tokenizer.exists() else "former"


def begin_again(folder: Path) -> None:
    run = Run(folder / "run")
    if not run.has_begun:
        begin(folder)
    elif not run.tokenizer.exists():
        write_tokenizer(run, Tokenizer.bytes())
    assert look_at_beginning(folder) == "new"
    assert sorted(path.name for path in run.folder.iterdir()) == sorted(
        [
            "config.toml",
            "from.json",
            "run.lock",
            "tokenizer.json",
            *Tokenizer.bytes().config.files(),
        ]
    )


# ---- the beginning of a run that learns from a sweep's members -----------------------------------


def begin_student(folder: Path) -> None:
    run = Run.create(folder / "distilled")
    with run.lock(new=True):
        write_teachers(run, [])
        write_config(run, SETTINGS)


def look_at_student(folder: Path) -> str:
    run = Run(folder / "distilled")
    if not run.has_begun:
        return "former"
    assert load(run.config, {}, {}).fingerprint == SETTINGS.fingerprint
    assert json.loads((run.folder / TEACHERS).read_bytes())["teachers"] == [], (
        "it would learn from the text alone"
    )
    return "new"


def begin_student_again(folder: Path) -> None:
    if not Run(folder / "distilled").has_begun:
        begin_student(folder)
    assert look_at_student(folder) == "new"
    assert {path.name for path in (folder / "distilled").iterdir()} == {
        "config.toml",
        "run.lock",
        TEACHERS,
    }


# ---- going on ------------------------------------------------------------------------------------


def begin_resume(folder: Path) -> None:
    begin_metrics(folder)
    two_saves(folder / "run" / "checkpoints")
    log(folder, LOGGED[5:])  # of updates after the last checkpoint, which go


def resume(folder: Path) -> None:
    """What `train --resume` does with its folder."""
    run = Run.open(folder / "run")
    with run.lock():
        found = checkpointing.load_newest(run.checkpoints, quiet)
        run.truncate_metrics(len("".join(json.dumps(row) + "\n" for row in LOGGED[:BEFORE])))
        run.log(LOGGED[BEFORE])
        run.sync_metrics()
        checkpointing.save(run.checkpoints, checkpoint(found.update + 1))


def look_at_resumed(folder: Path) -> str:
    run = Run.open(folder / "run")
    assert run.rows()[:BEFORE] == LOGGED[:BEFORE] and serial_number(run.folder) == 1
    found = checkpointing.load_newest(run.checkpoints, quiet)
    assert found.update in (2, 3) and same(found, checkpoint(found.update))
    assert found.update == 2 or run.rows() == LOGGED[: BEFORE + 1], (
        "a checkpoint is newer than its metrics"
    )
    return "new" if found.update == 3 else "former"


def resume_again(folder: Path) -> None:
    if look_at_resumed(folder) == "former":
        resume(folder)
        assert not list((folder / "run" / "checkpoints").glob(".tmp-*"))
    assert look_at_resumed(folder) == "new"


# ---- exports -------------------------------------------------------------------------------------


def model_for_export() -> Llama:
    return tiny_llama(vocab_size=259, hidden_size=32, num_hidden_layers=1)


def begin_export(folder: Path) -> None:
    save_model(model_for_export(), folder / "model", Tokenizer.bytes())


def export(folder: Path, format: str) -> None:
    if format == "adapter":
        save_adapter(pack_adapters(adapted_llama(), SMALL, "model"), folder / "out")
    elif format == "whole":
        trained = model_for_export()
        with torch.no_grad():
            for weight in trained.parameters():
                weight.mul_(2)
        save_whole(trained, folder / "model", folder / "out", Tokenizer.bytes())
    else:  # of weights that lie in their files still
        save(mapped_model(folder / "model"), folder / "out", Tokenizer.bytes(), format)


def export_hf(folder: Path) -> None:
    export(folder, "hf")


def export_gguf(folder: Path) -> None:
    export(folder, "gguf")


def export_whole(folder: Path) -> None:
    export(folder, "whole")


def export_adapter(folder: Path) -> None:
    export(folder, "adapter")


def begin_adapted(folder: Path) -> None:
    """A run of adapters, to which nothing more is done."""
    begin_export(folder)
    base = mapped_model(folder / "model")
    sha256 = module_digest(base)
    install_adapters(base, SMALL)
    recipe = ModelRecipe(
        str(folder / "model"), "auto", {}, 0, lora=lora_record(SMALL), base_sha256=sha256
    )
    state = recorded(recipe.entries(), base.config.to_hf(), 2) | {
        "tokenizer": Tokenizer.bytes().digest
    }
    run = Run.create(folder / "run")
    checkpointing.save(run.checkpoints, Checkpoint(2, checkpoint_state(base), {}, state))
    write_config(run, load(None, {"train.updates": 5}, {}))
    Tokenizer.bytes().save(run.tokenizer)


def export_command(folder: Path, format: str) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        export_a_run.run(str(folder / "run"), to=folder / "out", format=format, dtype=None)


def export_adapted_hf(folder: Path) -> None:
    export_command(folder, "hf")


def export_adapted_gguf(folder: Path) -> None:
    export_command(folder, "gguf")


@cache
def exported_with_adapters(format: str, scratch: Path) -> dict[str, bytes]:
    expected = scratch / f"expected {format}"
    shutil.copytree(scratch / "prepared", expected)
    export_command(expected, format)
    return contents(expected / "out")


def look_at_both(folder: Path, format: str) -> str:
    """The model and its adapters are one export: both are there, or neither."""
    if not (folder / "out").exists():
        return "former"
    found = contents(folder / "out")
    assert found == exported_with_adapters(format, folder.parent)
    assert any(name.startswith("adapter/") for name in found)
    return "new"


def export_both_again(folder: Path, format: str) -> None:
    if look_at_both(folder, format) == "former":
        export_command(folder, format)
    elif (folder / ".out.partial").exists():
        (folder / "out").rename(folder / "elsewhere")
        export_command(folder, format)
    assert look_at_both(folder, format) == "new"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@cache
def exported(format: str, scratch: Path) -> dict[str, bytes]:
    begin_export(scratch / format)
    export(scratch / format, format)
    return contents(scratch / format / "out")


def look_at_export(folder: Path, format: str) -> str:
    if not (folder / "out").exists():
        return "former"
    assert contents(folder / "out") == exported(format, folder.parent)
    return "new"


def export_again(folder: Path, format: str) -> None:
    if look_at_export(folder, format) == "former":
        export(folder, format)
    elif [path for path in folder.iterdir() if path.name == ".out.partial"]:
        (folder / "out").rename(folder / "elsewhere")
        export(folder, format)
        (folder / "elsewhere").rename(folder / "moved")
    assert look_at_export(folder, format) == "new"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


# ---- follow --------------------------------------------------------------------------------------


def begin_follow(folder: Path) -> None:
    write_config(Run.create(folder / "run"), load(None, {"train.updates": 5}, {}))
    log(folder, LOGGED)


if importlib.util.find_spec("tensorboard"):  # once for all forks
    import tensorboard.compat.proto.event_pb2
    import tensorboard.plugins.hparams.summary_v2
    import tensorboard.summary.writer.record_writer  # noqa: F401
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader


def follow_in_tensorboard(folder: Path) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        follow.run(str(folder / "run"), to="tensorboard", out=folder / "out")


def look_at_tensorboard(folder: Path) -> str:
    """The newest file begins the run there anew, so it has all rows, or those before the fault."""
    files = sorted((folder / "out/run").glob("events.*"), key=lambda file: file.name.split(".")[-2])
    events = [*LegacyEventFileLoader(str(files[-1])).Load()] if files else []
    losses = [each.summary.value[0].simple_value for each in events if each.step]
    assert losses == pytest.approx([row["train_loss"] for row in LOGGED][: len(losses)])
    return "new" if len(losses) == len(LOGGED) else "former"


def follow_again(folder: Path) -> None:
    follow_in_tensorboard(folder)
    assert look_at_tensorboard(folder) == "new"


# ---- sweeps --------------------------------------------------------------------------------------

POINTS: list[dict[str, Any]] = [{"optim.lr": 1e-2}, {"optim.lr": 2e-2}]
MEMBER: dict[str, Any] = {
    "data.tokenizer": "bytes", "data.sequence_length": 32, "model.hidden_size": 16, "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2, "train.updates": 6, "train.tokens_per_update": 128, "train.compile": "none",
    "train.precision": "fp32", "optim.name": "adamw", "train.save_every": 2, "train.keep": 1,
}  # fmt: skip


@cache
def text(scratch: Path) -> Corpus:
    if not (scratch / "sweep" / "texts").exists():
        (scratch / "sweep").mkdir()
        with_texts(scratch / "sweep")
    folder = scratch / "sweep"
    return corpus(
        folder / "texts",
        tokenizer="bytes",
        sequence_length=32,
        held_out=0.2,
        cache=folder / "cache",
    )


def cohort_of(folder: Path) -> Cohort:
    these, words = members_of(load(None, MEMBER, {}), POINTS), TextTask(text(folder.parent))
    for member in these:
        member.plan = resolve(member.settings, describe())
    made = cohorts.with_length(
        cohorts.build_models(these, words, describe()), MEMBER["train.updates"]
    )
    runs = [Run(folder / "sweep" / "members" / f"{member.index:03d}") for member in these]
    return cohorts.begin_cohort(
        these, runs, made, words, cohorts.make_members_engine(made, False, torch.device("cpu"))
    )


def weights(cohort: Cohort) -> dict[str, Tensor]:
    states = [session.engine.state().model for session in cohort.sessions]
    return {
        f"{index} {name}": each.clone()
        for index, state in enumerate(states)
        for name, each in state.items()
    }


def advance(cohort: Cohort, updates: int) -> None:
    for update in train(cohort.engine, cohort.windows, updates):
        for session in cohort.sessions:
            session.run.log({"update": update.index + 1})
    cohort.save()


def begin_sweep(folder: Path) -> None:
    sweep = Sweep.create(folder / "sweep", load(None, MEMBER, {}), POINTS, None)
    with sweep.lock_members(members_of(sweep.settings, sweep.points)):
        cohort = cohort_of(folder)
        advance(cohort, 2)
        cohort.close()


@cache
def expected_of_sweep(scratch: Path) -> dict[int, dict[str, Tensor]]:
    begin_sweep(scratch / "expected-sweep")
    cohort = cohort_of(scratch / "expected-sweep")
    cohorts.resume_cohort(cohort, {}, Progress())
    expected = {2: weights(cohort)}
    advance(cohort, 4)
    cohort.close()
    return expected | {4: weights(cohort)}


def save_sweep(folder: Path) -> None:
    """Two updates more of both members, a checkpoint of each, and what the sweep writes beside
    them.
    """
    sweep = Sweep.open(folder / "sweep")
    with sweep.run.lock(), sweep.lock_members(members_of(sweep.settings, sweep.points)):
        cohort = cohort_of(folder)
        cohorts.resume_cohort(cohort, {}, Progress())
        advance(cohort, 4)
        cohort.close()
        sweep.record["training_s"] = 1.0
        sweep.write()
        sweep.link_best(1)
        sweep.write_table([{"knobs": point, "eval_loss": 1.0} for point in POINTS])


def look_at_sweep(folder: Path) -> str:
    sweep, cohort = Sweep.open(folder / "sweep"), cohort_of(folder)
    found = cohorts.resume_cohort(cohort, {}, Progress())
    cohort.close()
    expected = expected_of_sweep(folder.parent)
    assert found in expected, "every member has checkpoints, and no update is in all of them"
    assert not other_bits(weights(cohort), expected[found])
    for session in cohort.sessions:
        assert [row["update"] for row in session.run.rows()] == list(range(1, found + 1))
    assert found == 4 or "training_s" not in sweep.record
    return "new" if (folder / "sweep" / "sweep.csv").exists() else "former"


def save_sweep_again(folder: Path) -> None:
    save_sweep(folder)
    assert {path.name for path in (folder / "sweep").iterdir()} == {
        "best", "config.toml", "members", "run.lock", "sweep.csv", "sweep.json",
    }  # fmt: skip
    assert (folder / "sweep" / "best").resolve() == (folder / "sweep" / "members" / "001").resolve()


# ---- a streamed model, with moments in files -----------------------------------------------------


def engine_in(folder: Path) -> Streamed:
    (folder / "planes").mkdir(exist_ok=True)
    return streamed(
        {"num_hidden_layers": 1},
        Placement(on_disk=frozenset({"exp_avg"}), folder=folder / "planes"),
    )


def stream(folder: Path, engine: Streamed, updates: int) -> None:
    for window in windows(updates, first=engine.index):
        engine.accumulate(window)
        engine.update()
        state = engine.state()
        found = Checkpoint(engine.index, state.model, state.optimizer, {"engine": state.scalars})
        checkpointing.save(folder / "checkpoints", found)


def begin_stream(folder: Path) -> None:
    stream(folder, engine_in(folder), 2)


def taken_up(folder: Path) -> Streamed:
    found = checkpointing.load_newest(folder / "checkpoints", quiet)
    engine = engine_in(folder)
    engine.load_state(EngineState(found.model, found.optimizer, dict(found.state["engine"])))
    engine.step.index = found.update
    return engine


def save_stream(folder: Path) -> None:
    stream(folder, taken_up(folder), 1)


@cache
def expected_of_stream(scratch: Path) -> dict[int, dict[str, Tensor]]:
    (scratch / "expected-stream").mkdir()
    engine, found = engine_in(scratch / "expected-stream"), {}
    for update in range(1, 4):
        stream(scratch / "expected-stream", engine, 1)
        found[update] = outcome(engine.state())
    return found


def look_at_stream(folder: Path) -> str:
    found = checkpointing.load_newest(folder / "checkpoints", quiet)
    assert found.update in (2, 3)
    state = EngineState(found.model, found.optimizer, dict(found.state["engine"]))
    assert not other_bits(outcome(state), expected_of_stream(folder.parent)[found.update])
    return "new" if found.update == 3 else "former"


def save_stream_again(folder: Path) -> None:
    if look_at_stream(folder) == "former":
        save_stream(folder)
    assert look_at_stream(folder) == "new"
    left = list((folder / "planes").iterdir())
    assert len(left) <= 1 and not any(path.stat().st_size for path in left), (
        "a plane that nobody can reach"
    )


# ---- the whole of `monograph train` --------------------------------------------------------------

RUN = SETTINGS_OF_RUN | {"train.updates": 3, "train.eval_every": 2, "train.keep": 2}


@contextmanager
def commanding(folder: Path) -> Iterator[None]:
    """In the folder, without figures and without a word."""
    before, reporting.write_report = os.getcwd(), lambda *_: None
    os.chdir(folder)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        os.chdir(before)


def begin_run(folder: Path) -> None:
    write_inputs(folder)
    with commanding(folder):
        start("elsewhere", RUN)  # the text is tokenised once for all
        shutil.rmtree("elsewhere")


def train_run(folder: Path) -> None:
    with commanding(folder):
        start("run", RUN)


@cache
def expected_of_run(scratch: Path) -> dict[str, Any]:
    shutil.copytree(scratch / "prepared", scratch / "expected-run")
    train_run(scratch / "expected-run")
    return fingerprint(scratch / "expected-run" / "run")


def look_at_run(folder: Path) -> str:
    """That nothing is lost is what `again` shows: a run that goes on comes to the same bits."""
    run = Run(folder / "run")
    if not (run.metrics.exists() and any("summary" in row for row in run.rows())):
        return "former"
    assert fingerprint(run.folder) == expected_of_run(folder.parent)
    return "new"


def resume_run(folder: Path) -> None:
    begun = Run(folder / "run").has_begun
    with commanding(folder):
        if begun:
            go_on("run")
        else:
            start("run", RUN)
    assert look_at_run(folder) == "new"
    assert not [
        path
        for path in (folder / "run").rglob("*")
        if "partial" in path.name or ".tmp" in path.name
    ]


CASES: dict[str, Case] = {
    "metrics": Case(begin_metrics, append_metrics, look_at_metrics, log_again),
    "beginning": Case(lambda folder: None, begin, look_at_beginning, begin_again, stride=12),
    "student": Case(
        lambda folder: None, begin_student, look_at_student, begin_student_again, stride=4
    ),
    "resume": Case(begin_resume, resume, look_at_resumed, resume_again, stride=19),
    **{
        f"export {format}": Case(
            begin_export,
            steps,
            partial(look_at_export, format=format),
            partial(export_again, format=format),
            stride=8 if format == "adapter" else 19,
        )
        for format, steps in (
            ("hf", export_hf),
            ("whole", export_whole),
            ("gguf", export_gguf),
            ("adapter", export_adapter),
        )
        if format != "gguf" or importlib.util.find_spec("gguf")
    },
    **{
        f"export of adapters, {format}": Case(
            begin_adapted,
            steps,
            partial(look_at_both, format=format),
            partial(export_both_again, format=format),
            stride=31,
        )
        for format, steps in (("hf", export_adapted_hf), ("gguf", export_adapted_gguf))
        if format != "gguf" or importlib.util.find_spec("gguf")
    },
    **(
        {
            "follow": Case(
                begin_follow, follow_in_tensorboard, look_at_tensorboard, follow_again, stride=2
            )
        }
        if importlib.util.find_spec("tensorboard")
        else {}
    ),
    "sweep": Case(begin_sweep, save_sweep, look_at_sweep, save_sweep_again, ("kill",)),
    "stream": Case(
        begin_stream, save_stream, look_at_stream, save_stream_again, ("kill", "torn"), stride=13
    ),
    "train": Case(begin_run, train_run, look_at_run, resume_run),
}
