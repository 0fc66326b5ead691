"""Run: pytest tests/commands/test_damaged.py (a damaged file of a run: found by check, one line
from what reads it).
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import ONCE, TINY, newest, with_texts
from monograph import checkpointing
from monograph.config import load
from monograph.errors import UsageError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a run, and one that branched from it, that have come to their ends."""
    folder = with_texts(tmp_path_factory.mktemp("damaged"))
    assert server.run(folder, "train", *TINY, "--out", "runs/parent", figures=0).code == 0
    assert (
        server.run(
            folder, "train", "--from", "last", "train.updates=4", "--out", "runs/run", figures=0
        ).code
        == 0
    )
    assert server.run(folder, "check", "runs/run").code == 0
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """The branched run, in a copy of the folder."""
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy/runs/run"


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def garbage(content: bytes) -> bytes:
    return content + b"garbage{\n"


def changed(content: bytes) -> bytes:
    """A setting, a token or a number is another one, and the syntax is right."""
    for old, new in (
        (b"lr = 0.001", b"lr = 0.002"),
        ('"Ġ": '.encode(), '"Ǿ": '.encode()),
        (b'"update"', b'"Update"'),
    ):
        content = content.replace(old, new, 1)
    return content


FILES: list[tuple[str, Callable[[bytes], bytes]]] = [
    *(
        (name, cut)
        for name in ("config.toml", "tokenizer.json", "metrics.jsonl", "from.json", "run.lock")
    ),
    *(
        (name, garbage)
        for name in ("config.toml", "tokenizer.json", "metrics.jsonl", "from.json", "run.lock")
    ),
    *((name, changed) for name in ("config.toml", "tokenizer.json", "from.json")),
    ("run.lock", lambda _: b'{"serial": "x"}'),
    ("run.lock", lambda _: b"3"),
    ("metrics.jsonl", lambda content: b"3\n" + content),
    ("metrics.jsonl", lambda content: content.replace(b"\n", b"\n" + b"[" * 100_000 + b"\n", 1)),
]


# By day each file is cut, and the settings are changed, which only their digest tells.
BY_DAY = [*FILES[1:4], ("config.toml", changed)]


@pytest.mark.parametrize(
    ("name", "damage"),
    [pytest.param(*each, marks=() if each in BY_DAY else pytest.mark.slow) for each in FILES],
)
def test_check_names_the_file_and_every_command_is_one_line(
    name: str, damage: Callable[[bytes], bytes], run: Path, server: CommandServer
) -> None:
    here = run.parent.parent
    whole = (run / name).read_bytes()
    (run / name).write_bytes(damage(whole))
    assert damage(whole) != whole
    done = server.run(here, "check", "runs/run", "--json")
    found = json.loads(done.out.splitlines()[-1])["files"]
    assert done.code == 3 and done.err.count("\n") == 1 and name in done.err, done.err
    [(damaged, fault)] = [(each["name"], each["fault"]) for each in found if each["fault"]]
    assert damaged == name
    # It can be read: only its digest says that it is another.
    if damage is changed and name == "config.toml":
        assert re.search("expected (content of )?sha256 [0-9a-f]{64}, found [0-9a-f]{64}", fault), (
            fault
        )
    assert f"{name:<16}damaged: " in done.out
    for arguments in (
        ["generate", "runs/run", "--max-tokens", "1"],
        ["evaluate", "runs/run"],
        ["train", "--resume"],
    ):
        done = server.run(here, *arguments, figures=0)
        assert done.code in (0, 2, 3) and "bug: " not in done.err and "Traceback" not in done.err, (
            done.err
        )


def test_rows_after_the_checkpoint_are_logged_again_and_those_before_it_are_kept(
    run: Path, server: CommandServer
) -> None:
    here, metrics = run.parent.parent, run / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b"\0\0\0\ngarbage{\n")
    assert server.run(here, "train", "--resume", "runs/run", figures=0).code == 0
    assert server.run(here, "check", "runs/run").code == 0
    assert [row for row in metrics.read_bytes().splitlines() if b"grad_norm" in row] == [
        row for row in whole.splitlines() if b"grad_norm" in row
    ]
    damaged = b"garbage{\n" + whole
    metrics.write_bytes(damaged)
    done = server.run(here, "train", "--resume", "runs/run", figures=0)
    last = done.err.splitlines()[-1]
    assert done.code == 3 and "metrics.jsonl:1: not a row of metrics" in last, done.err
    assert metrics.read_bytes() == damaged, "nothing is cut off before all that stays is verified"


def test_where_a_run_branched_from_is_said_when_it_is_needed(
    run: Path, server: CommandServer
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    (run / "from.json").write_text("{")
    done = server.run(run.parent.parent, "train", "--resume", "runs/run", figures=0)
    assert done.code == 3 and "from.json: damaged" in done.err.splitlines()[-1], done.err


def test_a_run_with_a_damaged_lock_does_not_hide_the_others(
    run: Path, server: CommandServer
) -> None:
    here = run.parent.parent
    (here / "runs/parent/run.lock").write_text('{"serial": "x"}')
    (here / "runs/other/run.lock").mkdir(parents=True)
    assert server.run(here, "check", "last").out.splitlines()
    done = server.run(here, "train", "--from", "last", "train.updates=1", "--json", figures=0)
    assert done.code == 0 and json.loads(done.out)["update"] == 1, done.err


def test_a_damaged_tokenizer_can_be_put_back_as_is_said(run: Path, server: CommandServer) -> None:
    here = run.parent.parent
    whole = (run / "tokenizer.json").read_bytes()
    (run / "tokenizer.json").write_bytes(cut(whole))
    done = server.run(here, "generate", "runs/run", "alpha")
    assert done.code == 3 and "`monograph data build runs/run/config.toml`" in done.err
    shutil.copy(here / "runs/parent/tokenizer.json", run)
    assert (run / "tokenizer.json").read_bytes() == whole
    built = server.run(here, "data", "build", "runs/parent/config.toml").out.partition(":")[0]
    (run / "tokenizer.json").write_bytes(Path(built, "tokenizer.json").read_bytes())
    assert server.run(here, "check", "runs/run").code == 0


def test_files_next_to_a_tokenizer_have_their_digests_too(run: Path, server: CommandServer) -> None:
    """One that swaps the tokens at a document's borders is no part of the run; a template may be
    added.
    """
    here = run.parent.parent
    (run / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert server.run(here, "check", "runs/run").code == 0
    borders = {"bos_token": "<|eos|>", "eos_token": "<|bos|>"}
    for content, said in (
        (json.dumps(borders), "tokenizer_config.json: expected content of sha256 nothing, found"),
        ('{"eos_token": 5}', "tokenizer_config.json: "),
    ):
        (run / "tokenizer_config.json").write_text(content)
        for command in (
            ["check", "runs/run"],
            ["evaluate", "runs/run"],
            ["export", "runs/run", "--to", "out"],
        ):
            done = server.run(here, *command)
            assert done.code == 3 and said in done.out + done.err, done.err
    assert not (here / "out").exists()


def test_check_of_a_folder_without_a_model_calls_nothing_damaged(
    here: Path, server: CommandServer
) -> None:
    done = server.run(here, "check", "texts")
    assert done.code == 3 and not done.out, done.out
    assert (
        done.err
        == "error: texts: neither a run nor a model: expected a run's folder or a Hugging Face folder\n"
    )


def test_check_of_a_model_s_folder_ends_with_one_object_whatever_is_damaged(
    run: Path, server: CommandServer
) -> None:
    here = run.parent.parent
    assert server.run(here, "export", "runs/run", "--to", "sent").code == 0
    assert server.run(here, "check", "sent", "--json").code == 0
    weights = here / "sent" / "model.safetensors"
    weights.write_bytes(cut(weights.read_bytes()))
    done = server.run(here, "check", "sent", "--json")
    faults = {
        each["name"]: each["fault"] for each in json.loads(done.out.splitlines()[-1])["files"]
    }
    assert done.code == 3 and done.err.count("\n") == 1 and "model.safetensors" in faults["weights"]
    assert faults["tokenizer.json"] is None


def test_no_checkpoint_is_sound(run: Path, server: CommandServer) -> None:
    for path in (run / "checkpoints").rglob("model.safetensors"):
        path.write_bytes(cut(path.read_bytes()))
    done = server.run(run.parent.parent, "check", "runs/run", "--json")
    found = json.loads(done.out.splitlines()[-1])
    assert done.code == 4 and done.err.count("\n") == 1 and "no checkpoint is sound" in done.err
    assert (
        "{" not in done.err
        and all(each["fault"] for each in found["checkpoints"])
        and found["checkpoints"]
    )
    assert f"{newest(run).name:<16}damaged: " in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "RUN"],
        ["train", "--resume", "RUN"],
        ["train", "--from", "RUN", "train.updates=1", "--out", "out"],
        ["generate", "RUN", "--max-tokens", "1"],
        ["evaluate", "RUN"],
        ["compare", "runs/parent", "RUN"],
        ["export", "RUN", "--to", "out"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_an_altered_state_that_was_sealed_again_is_refused_by_whatever_reads_it(
    arguments: list[str], run: Path, server: CommandServer
) -> None:
    """What else is refused of a state, and in which words: tests/run/test_recorded_state.py."""
    found = checkpointing.load(newest(run))
    checkpointing.save(run / "checkpoints", replace(found, state={**found.state, "length": 2**70}))
    done = server.run(
        run.parent.parent, *(each.replace("RUN", "runs/run") for each in arguments), figures=0
    )
    said = done.out if arguments[0] == "check" else done.err.splitlines()[-1]
    assert (
        done.code == 3 and f"{newest(run).name}/state.json: length = {2**70}: it should be" in said
    ), done
    assert not (run.parent.parent / "out").exists() and "Traceback" not in done.err


READ_CONFIG: dict[str, list[str]] = {
    "evaluate": ["evaluate", "RUN"],
    "compare": ["compare", "runs/parent", "RUN"],
    "train --from": ["train", "--from", "RUN", "train.updates=1", "--out", "out"],
    "train --resume": ["train", "--resume", "RUN"],
    "train CONFIG.toml": ["train", "RUN/config.toml", "train.updates=1", "--out", "out"],
    "sweep": ["sweep", "--out", "out"],
    "sweep CONFIG.toml": ["sweep", "RUN/config.toml", "--out", "out"],
    "profile": ["profile", "RUN/config.toml", "--out", "out"],
    "plan": ["plan", "RUN/config.toml"],
    "data show": ["data", "show", "RUN/config.toml"],
    "data build": ["data", "build", "RUN/config.toml"],
    "check": ["check", "RUN"],
}
DIGESTS = re.compile(
    r"config\.toml: not what the run was begun with: expected content of sha256 \w{64}, found \w{64}"
)


def flips(config: Path, count: int) -> Iterator[str]:
    """config.toml with one bit of its settings flipped, at places that are spread over it, and
    where that was.
    """
    whole, draws = config.read_bytes(), random.Random(0)
    end, sound = whole.index(b"# mark "), load(config, {}, {}).fingerprint
    for number in range(count):
        at = end * number // count + draws.randrange(end // count)
        flipped = bytearray(whole)
        flipped[at] ^= 1 << draws.randrange(8)
        config.write_bytes(flipped)
        try:
            if load(config, {}, {}).fingerprint == sound:
                continue  # another spelling of the same
        except UsageError:
            pass
        yield f"byte {at}: {whole[at - 20 : at]!r} {chr(whole[at])!r} became {chr(flipped[at])!r}"
    config.write_bytes(whole)


def refused_flips(name: str, count: int, run: Path, server: CommandServer) -> None:
    """No command takes settings that are not the run's; prints a row of the table."""
    here, tried = run.parent.parent, 0
    for case in flips(run / "config.toml", count):
        done = server.run(
            here, *(each.replace("RUN", "runs/run") for each in READ_CONFIG[name]), figures=0
        )
        said = done.out if name == "check" else done.err.splitlines()[-1]
        assert done.code == 3 and DIGESTS.search(said), (case, done.err)
        assert not (here / "out").exists() and "Traceback" not in done.err, (case, done.err)
        tried += 1
    print(f"{name:<20} {tried:4} flipped bits   {tried:4} refused, both digests named   0 taken")
    assert tried > count / 2


# All of them read the settings in one place; by day one that reads a run, one that goes on with it
# and one of a file.
FLIPPED_BY_DAY = ("evaluate", "train --resume", "sweep CONFIG.toml")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in FLIPPED_BY_DAY else pytest.mark.slow)
        for each in READ_CONFIG
    ],
)
def test_a_flipped_bit_in_config_toml_is_refused_by_whatever_reads_it(
    name: str, run: Path, server: CommandServer
) -> None:
    refused_flips(name, 3, run, server)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READ_CONFIG)
def test_many_flipped_bits_in_config_toml(name: str, run: Path, server: CommandServer) -> None:
    refused_flips(name, 25, run, server)


def test_the_settings_of_a_sweep_have_their_digest_too(here: Path, server: CommandServer) -> None:
    assert server.run(here, "sweep", *ONCE, "optim.lr=1e-3,2e-3", "--out", "s", figures=0).code == 0
    config = here / "s/config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    for command in (["sweep", "--out", "s"], ["sweep", "--out", "s", "--verify", "0"]):
        done = server.run(here, *command, figures=0)
        assert done.code == 3 and DIGESTS.search(done.err.splitlines()[-1]), done.err
