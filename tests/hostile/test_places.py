"""Run: pytest tests/hostile/test_places.py [-m slow -s] (anything in the place of anything in a
folder of results).

The product of the places in the folders of a run, a sweep and an export, of what may stand there,
and of commands.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from batches import tiny_llama
from commands.forked import CommandServer, Done
from commands.inputs import OWN, TINY, newest, over, with_texts
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.config import load
from monograph.graph.inspect import unique_state
from monograph.run.folder import Run
from monograph.run.recipe import ModelRecipe
from monograph.serve.versions import Source
from monograph.text.tokenizer import Tokenizer
from recorded import recorded

CODES = (0, 2, 3, 4, 7)
LATE = "checkpoints/step-00777777"


def a_file(path: Path) -> None:
    path.write_text("something else\n")


def an_empty_file(path: Path) -> None:
    path.write_text("")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "note.txt").write_text("")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    """Of a short name, as a socket's is limited, which then gets its own."""
    short = Path(f"/tmp/s{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short))
    shutil.move(short, path) if os.stat(short).st_dev != os.stat(
        path.parent
    ).st_dev else short.rename(path)


def a_link_to_what_was_there(path: Path) -> None:
    """Or to a file, if nothing was there."""
    aside = path.with_name(f"{path.name}.aside")
    if not aside.exists():
        aside.write_text("")
    path.symlink_to(aside.name)


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def unreadable(path: Path) -> None:
    aside = path.with_name(f"{path.name}.aside")
    aside.rename(path) if aside.exists() else path.write_text("")
    path.chmod(0)


KINDS: list[Callable[[Path], None]] = [
    a_file, an_empty_file, a_folder, a_folder_with_a_file, a_fifo, a_socket, a_link_to_what_was_there,
    a_link_to_nothing, a_link_to_itself, unreadable,
]  # fmt: skip

STEP = "checkpoints/NEWEST"
OF_A_RUN = [
    "config.toml", "run.lock", "metrics.jsonl", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "from.json", "report.html", "figures", "exit.json", "sweep.json", "teachers.json", "reference.safetensors",
    "config.partial", "starts.jsonl", "checkpoints", LATE, f"{STEP}.replaced", "checkpoints/.tmp-step-00000009", STEP,
    f"{STEP}/model.safetensors", f"{STEP}/optimizer.safetensors", f"{STEP}/state.json", f"{STEP}/MANIFEST.json",
]  # fmt: skip
# What is not needed to go on from a checkpoint, whatever stands there.
BESIDE = {LATE, f"{STEP}.replaced", "checkpoints/.tmp-step-00000009", "report.html", "figures", "exit.json",
          "config.partial", "starts.jsonl"}  # fmt: skip
OF_A_SWEEP = [
    "sweep.json", "config.toml", "run.lock", "sweep.csv", "report.html", "figures", "members", "members/000",
    "members/000/config.toml", "members/000/run.lock", f"members/000/{LATE}", "members/000/metrics.jsonl", "best",
    "distilled",
]  # fmt: skip
OF_AN_EXPORT = [
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "adapter", "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors", "adapter/monograph_base.json",
]  # fmt: skip
ON_A_RUN = {
    "generate": ["generate", "IT", "--max-tokens", "1"],
    "generate last": ["generate", "last", "--max-tokens", "1"],
    "evaluate": ["evaluate", "IT", "--data", "texts"],
    "export": ["export", "IT", "--to", "out"],
    "check": ["check", "IT"],
    "train --resume": ["train", "--resume", "IT"],
    "train --from": ["train", "--from", "IT", "train.updates=1", "--out", "out"],
    "train CONFIG": ["train", "IT/config.toml", "train.updates=1", "--out", "out"],
    "train model.init": ["train", *over(OWN, "train.updates=1"), "model.init=IT", "--out", "out"],
    "compare": ["compare", "runs/b", "IT", "--data", "texts"],
    "plan": ["plan", "IT/config.toml"],
    "data show": ["data", "show", "IT/config.toml"],
    "follow": ["follow", "IT", "--to", "tensorboard", "--out", "out"],
}
WORKING = (
    "generate",
    "generate last",
    "evaluate",
    "export",
    "train --from",
    "train model.init",
    "compare",
)
ON_A_SWEEP = {
    "sweep --out": ["sweep", "--out", "IT"],
    "sweep --verify": ["sweep", "--out", "IT", "--verify", "0"],
    "generate best": ["generate", "IT/best", "--max-tokens", "1"],
    "evaluate mixture": ["evaluate", "IT/mixture", "--data", "texts"],
    "compare": ["compare", "runs/b", "IT"],
    "check": ["check", "IT/members/000"],
    "follow": ["follow", "IT", "--to", "tensorboard", "--out", "out"],
}
ON_AN_EXPORT = {
    "generate": ["generate", "IT", "--max-tokens", "1"],
    "evaluate": ["evaluate", "IT", "--data", "texts"],
    "check": ["check", "IT"],
    "train model.init": ["train", *over(OWN, "train.updates=1"), "model.init=IT", "--out", "out"],
    "train adapter": [
        "train",
        *over(OWN, "train.updates=1"),
        "model.init=IT/adapter",
        "--out",
        "out",
    ],
    "export": ["export", "IT", "--to", "out"],
    "export there": ["export", "runs/b", "--to", "IT"],
}
CROSS = [
    *(
        ("runs/a", place, kind, name)
        for place, kind, name in itertools.product(OF_A_RUN, KINDS, ON_A_RUN)
    ),
    *(
        ("swept", place, kind, name)
        for place, kind, name in itertools.product(OF_A_SWEEP, KINDS, ON_A_SWEEP)
    ),
    *(
        ("hf", place, kind, name)
        for place, kind, name in itertools.product(OF_AN_EXPORT, KINDS, ON_AN_EXPORT)
    ),
]
COMMANDS = {"runs/a": ON_A_RUN, "swept": ON_A_SWEEP, "hf": ON_AN_EXPORT}
KNOWN = [
    *(("runs/a", LATE, a_file, name) for name in ("generate", "check", "train --resume")),
    ("runs/a", LATE, a_link_to_nothing, "train --resume"),
    ("runs/a", LATE, a_fifo, "generate"),
    ("runs/a", f"{STEP}/MANIFEST.json", a_fifo, "generate"),
    ("runs/a", "exit.json", a_folder_with_a_file, "train --resume"),
    ("runs/a", "reference.safetensors", a_fifo, "check"),
    ("swept", f"members/000/{LATE}", a_file, "sweep --out"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    here = with_texts(tmp_path_factory.mktemp("places"))
    for arguments in (
        ["train", *TINY, "--out", "runs/b"],
        ["train", "--from", "runs/b", "train.updates=8", "train.save_every=3", "--out", "runs/a"],
        ["train", *OWN, "model.init=runs/b", "lora.rank=2", "--out", "adapted"],
        ["export", "adapted", "--to", "hf"],
        ["sweep", *TINY, "optim.lr=1e-3,2e-3", "--out", "swept"],
    ):
        done = server.run(here, *arguments, figures=0)
        assert done.code == 0, done.err
    rows = (here / "runs/a/metrics.jsonl").read_text().splitlines(keepends=True)
    (here / "runs/a/metrics.jsonl").write_text("".join(row for row in rows if "summary" not in row))
    return here


def named(run: Path, place: str) -> Path:
    return run / place.replace("NEWEST", newest(run).name if "NEWEST" in place else "")


def tried(
    begun: Path,
    here: Path,
    server: CommandServer,
    whose: str,
    place: str,
    kind: Callable[[Path], None],
    name: str,
) -> Done:
    """A command on a folder in which one thing was replaced."""
    shutil.copytree(begun, here, symlinks=True)
    path = named(here / whose, place)
    if path.exists() or path.is_symlink():
        path.rename(path.with_name(f"{path.name}.aside"))
    kind(path)
    if "checkpoints/" in place and (aside := path.with_name(f"{path.name}.aside")).is_dir():
        shutil.rmtree(aside) if not path.is_symlink() else None
    arguments = [each.replace("IT", whose) for each in COMMANDS[whose][name]]
    return server.run(here, *arguments, figures=0, modes=1)


def require_one_line(case: str, done: Done) -> None:
    assert done.code in CODES, f"{case}: ended with {done.code}, signal {done.signal}: {done.err}"
    assert "bug:" not in done.err and "Traceback" not in done.err, f"{case}: {done.err}"
    if done.code:
        lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and done.err.splitlines()[-1] == lines[0], f"{case}: {done.err}"


def require_sound_ones_used(
    case: str, done: Done, whose: str, place: str, kind: object, name: str
) -> None:
    spares = place in BESIDE or place.startswith(STEP)
    if whose == "runs/a" and name in WORKING and spares and kind is not unreadable:
        assert done.code == 0, (
            f"{case}: there is a sound checkpoint, and it was not used: {done.err}"
        )


def words(case: object) -> str:
    return case.__name__ if callable(case) else str(case).replace(" ", "_").replace("/", "-")


@pytest.mark.parametrize(("whose", "place", "kind", "name"), KNOWN, ids=words)
def test_whatever_stands_there_the_sound_is_used_or_one_line_said(
    whose: str,
    place: str,
    kind: Callable[[Path], None],
    name: str,
    begun: Path,
    tmp_path: Path,
    server: CommandServer,
) -> None:
    case = f"{kind.__name__} in the place of {whose}/{place}, {name}"
    done = tried(begun, tmp_path / "here", server, whose, place, kind, name)
    require_one_line(case, done)
    require_sound_ones_used(case, done, whose, place, kind, name)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("whose", COMMANDS)
@pytest.mark.parametrize("kind", KINDS, ids=words)
def test_everything_in_every_place(
    whose: str, kind: Callable[[Path], None], begun: Path, tmp_path: Path, server: CommandServer
) -> None:
    ends = dict.fromkeys(CODES, 0)
    faults = []
    for _, place, _, name in (each for each in CROSS if each[0] == whose and each[2] is kind):
        case = f"{kind.__name__} in the place of {whose}/{place}, {name}"
        done = tried(begun, tmp_path / "here", server, whose, place, kind, name)
        shutil.rmtree(tmp_path / "here")
        try:
            require_one_line(case, done)
            require_sound_ones_used(case, done, whose, place, kind, name)
        except AssertionError as error:
            faults.append(str(error).partition("\nassert")[0])
            continue
        ends[int(done.code or 0)] += 1
    print(f"{whose:<8} {kind.__name__:<26} {sum(ends.values()):4} commands   {ends}")
    assert not faults, f"{len(faults)} of them:\n" + "\n".join(faults)


def saved(run: Run, update: int) -> None:
    model = tiny_llama(vocab_size=259)
    state = recorded(ModelRecipe(None, "auto", {}, 0).entries(), model.config.to_hf(), update)
    state |= {
        "tokenizer": Tokenizer.bytes().digest,
        "settings": load(run.config, {}, {}).fingerprint,
    }
    checkpointing.save(run.checkpoints, Checkpoint(update, unique_state(model), {}, state))


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not unreadable], ids=words)
def test_an_endpoint_goes_on_to_later_checkpoints(
    kind: Callable[[Path], None], tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run")
    run.config.write_text("[train]\nprecision = 'fp32'\nupdates = 9\n")
    Tokenizer.bytes().save(run.tokenizer)
    saved(run, 1)
    source = Source(str(run.folder), 1, lambda line: None)
    assert source.has_newer() and source.load().id == "run@1"
    kind(run.folder / LATE)
    if source.has_newer():
        assert source.load().id == "run@1"
    assert not source.has_newer()
    saved(run, 2)
    assert source.has_newer() and source.load().id == "run@2" and not source.has_newer()


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not unreadable], ids=words)
def test_a_save_takes_the_place_of_what_is_no_checkpoint(
    kind: Callable[[Path], None], tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run")
    run.config.write_text("")
    saved(run, 1)
    for name in ("step-00000002", "step-00000002.replaced", "step-00777777"):
        kind(run.checkpoints / name)
    saved(run, 2)
    assert checkpointing.load_newest(run.checkpoints, pytest.fail).update == 2
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert [name for name in names if not name.endswith(".aside")] == [
        "step-00000001",
        "step-00000002",
    ]
