"""Run: pytest tests/cli/test_arguments.py (what is typed, and what the commands get of it)."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import monograph
from cli.called import COMMANDS, ENVIRONMENT, Calls, monograph_
from monograph import cli
from monograph.cli.typed import example, first_sentence
from monograph.device import clock


def test_help_is_quick_and_imports_no_torch() -> None:
    program = "import sys, monograph.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    program += (
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Processor time: what this machine does besides is no matter.
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("-h",), *((name, "--help") for name in COMMANDS), ("data",)]
)
def test_help_goes_to_stdout(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments) == 0
    out, err = capsys.readouterr()
    assert "Usage: monograph" in out and not err
    assert max(map(len, out.splitlines())) <= 100


HEADINGS = ["Train", "Prepare and inspect", "Use", "Understand"]


def test_help_lists_all_commands_and_no_others_by_what_they_are_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    monograph_()
    headed = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", capsys.readouterr().out, re.M)
    assert [heading for heading, _ in headed] == [*HEADINGS, "Options"]
    listed = [name for _, lines in headed[:-1] for name in re.findall(r"^  (\w+)  ", lines, re.M)]
    assert sorted(listed) == sorted(COMMANDS)
    assert all(
        len(re.findall(r"^  example:  monograph \w", lines, re.M)) == 1 for _, lines in headed[:-1]
    )


@pytest.mark.parametrize("columns", [80, 100])
def test_help_cuts_no_sentence_and_breaks_no_example(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monograph_()
    overview = capsys.readouterr().out
    assert max(map(len, overview.splitlines())) <= columns
    for name, command in cli.command_tree().commands.items():
        assert first_sentence(command).endswith(".") and example(command).startswith(
            f"monograph {name}"
        ), name
        assert f"  {name} {first_sentence(command)} ".replace(" ", "") in "".join(
            overview.split()
        ), name
        monograph_(name, "--help")
        own = capsys.readouterr().out
        assert "[[" not in own and "  -h, --help  " in own, name
        assert (
            f"\n  Example: {example(command)}\n" in own
            and max(map(len, own.splitlines())) <= columns
        ), name
    examples = [example(command) for command in cli.command_tree().commands.values()]
    assert set(re.findall(r"^  example:  (.*)$", overview, re.M)) <= set(examples)


@pytest.mark.parametrize("asked", ["--version", "-v", "version"])
def test_the_version_is_said(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_(asked) == 0
    assert capsys.readouterr().out == f"monograph {monograph.__version__}\n"


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (["help"], ["--help"]),
        (["help", "train"], ["train", "--help"]),
        (["help", "data"], ["data"]),
    ],
)
def test_help_may_be_asked_for_by_a_word(
    asked: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*asked) == 0
    said = capsys.readouterr().out
    assert monograph_(*option) == 0
    assert capsys.readouterr().out == said


def test_help_names_what_is_typed_and_no_types_of_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (*COMMANDS, "data show", "data build"):
        monograph_(*name.split(), "--help")
        said = capsys.readouterr().out
        assert not re.search(r"<\w+|\b(INTEGER|FLOAT|BOOLEAN|TEXT RANGE)\b|x>=|<=x", said), name
    monograph_("serve", "--help")
    assert "[default: 8000; 0 to 65535]" in " ".join(capsys.readouterr().out.split())


def test_train_hands_on_settings_and_options(calls: Calls) -> None:
    Path("run.toml").write_text("[optim]\nlr = 1e-3\n")
    Path("texts").mkdir()
    assert (
        monograph_(
            "train",
            "texts",
            "--out",
            "here",
            "train.seed=7",
            "run.toml",
            "--minutes",
            "2",
            "--json",
        )
        == 0
    )
    ((settings,), options) = calls[0]
    assert options.pop("program_start_s") < clock()
    assert options == {"out": Path("here"), "resume": None, "from_": None, "json": True}
    assert (settings.optim.lr, settings.train.seed, settings.train.minutes) == (1e-3, 7, 2.0)
    assert settings.data.source == "texts"


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["--resume"], "last"),
        (["--resume", "--json"], "last"),
        (["--resume", "train.keep=3"], "last"),
        (["--resume", "run.toml"], "last"),
        (["--resume", "runs/a"], "runs/a"),
        (["--resume", "lr=3"], "lr=3"),  # which is there, and a run
        (["--resume=runs/a"], "runs/a"),
        ([], None),
    ],
)
def test_resume_takes_a_run_or_none(calls: Calls, arguments: list[str], resume: str | None) -> None:
    Path("run.toml").write_text("")
    Path("lr=3").mkdir()
    Path("lr=3/run.lock").touch()
    assert monograph_("train", *arguments) == 0
    assert calls[0][1]["resume"] == resume


def test_the_other_commands_hand_on_what_was_typed(calls: Calls) -> None:
    assert (
        monograph_(
            "generate", "last", "a", "b", "--top-k", "5", "--stop", "x", "--stop", "y", "-n", "2"
        )
        == 0
    )
    assert monograph_("evaluate", "last", "--data", "a", "--data", "b", "--json") == 0
    assert monograph_("compare", "last", "m", "--data", "q", "--chat") == 0
    assert monograph_("export", "last", "--to", "there", "--format", "gguf", "--dtype", "q8_0") == 0
    assert monograph_("follow", "last", "--to", "mlflow", "--out", "there") == 0
    assert monograph_("data", "show", "train.seed=1", "--row", "3") == 0
    assert monograph_("data", "build") == 0
    assert monograph_("check") == 0
    assert monograph_("profile", "train.seed=2", "--out", "there") == 0
    generated, evaluated, compared, exported, followed, shown, built, checked, profiled = calls
    how = {"n": 2, "max_tokens": 128, "stop": ["x", "y"], "pairs": [], "chat": False, "json": False}
    how |= {"adapters": [], "use": None, "tools": None, "tool_choice": None, "draft": None}
    how["flag_values"] = {"temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    how["constraints"] = {"choices": None, "regex": None, "json_schema": None, "grammar": None}
    assert generated == (("last", ["a", "b"]), {"file": None, "options": how})
    assert evaluated == (("last",), {"data": ["a", "b"], "chat": False, "json": True})
    assert compared == (
        (["last", "m"],),
        {"data": ["q"], "chat": True, "report": None, "json": False},
    )
    to_gguf = {"to": "there", "format": "gguf", "dtype": "q8_0"}
    assert exported == (("last",), {**to_gguf, "original": None})
    assert followed == (("last",), {"to": "mlflow", "out": Path("there")})
    assert shown[0][0].train.seed == 1 and shown[1] == {"row": 3}
    assert built[0][0].train.seed == 0 and built[1] == {}
    assert checked == ((None,), {"laws": False, "json": False})
    assert profiled[0][0].train.seed == 2 and profiled[1] == {"out": Path("there"), "json": False}


def test_print_config_is_a_file_that_loads(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_("train", "train.seed=7", "--print-config") == 0
    Path("printed.toml").write_text(capsys.readouterr().out)
    assert (
        "seed = 7                                        # command line\n"
        in Path("printed.toml").read_text()
    )
    assert monograph_("train", "printed.toml") == 0
    assert calls[0][0][0].train.seed == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["data", "shwo"], "Did you mean 'show'?"),
        (["train", "--resme"], "did you mean --resume?"),
        (["generate", "last", "--temprature", "1"], "did you mean --temperature?"),
        (["generate"], "RUN|FOLDER"),
        (["export", "last"], "--to"),
        (["follow", "last"], "--to"),
        (["generate", "last", "--top-k", "-1"], "--top-k"),
        (["train", "--minutes", "ten"], "--minutes"),
        (
            ["train", "train.minutes=3", "--minutes", "4"],
            "train.minutes is given twice, as 3 and as 4",
        ),
        (["train", "--resume="], "--resume has an empty value: give a value, or leave it out"),
        (["train", "--resume", "a", "--from", "b"], "give one of them"),
        (["train", "optim.lrr=3"], "did you mean optim.lr=3?"),
        (["train", "--draws", "3"], "did you mean rl.draws=3?"),
        (["train", "--learning-rate=3"], "did you mean optim.lr=3?"),
        (["swep"], "No such command 'swep'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    arguments: list[str], message: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not calls


@pytest.mark.parametrize("prompt", ["--- title", "-title", "--title"])
def test_text_that_begins_with_a_dash(
    prompt: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_("generate", "last", prompt) == 2
    assert "text that begins with a dash goes after --" in capsys.readouterr().err
    assert monograph_("generate", "last", "--", prompt) == 0 and calls[0][0] == ("last", [prompt])


def test_a_sweep_s_minutes_are_those_of_its_key(calls: Calls) -> None:
    assert monograph_("sweep", "texts", "--minutes", "0.5") == 0
    assert calls[0][0] == (["texts", "train.minutes=0.5"],)


def test_a_name_is_a_folder_in_runs(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_("train", "--name", "owls") == 0 and monograph_("sweep", "--name", "owls") == 0
    assert [options["out"] for _, options in calls] == [Path("runs/owls")] * 2
    for wrong in ("a/b", "..", "last"):
        assert monograph_("train", "--name", wrong) == 2
        assert f"--name {wrong}: expected the name of a folder in runs/" in capsys.readouterr().err
    assert (
        monograph_("train", "--name", "a", "--out", "b") == 2
        and monograph_("sweep", "--name", "a", "--out", "b") == 2
    )
