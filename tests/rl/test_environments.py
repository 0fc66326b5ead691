"""Run: pytest tests/rl/test_environments.py (a user's environment in its process)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monograph.errors import InputRefused, UsageError
from monograph.rl import processes
from monograph.rl.environments import FileEnvironments, Observation, OwnEnvironments
from monograph.rl.rewards import reward_of, vouched_code

COUNTING = """
import random

class Counting:
    tools = [{"type": "function", "function": {"name": "add"}}]

    def __init__(self):
        self.first = random.random()

    def reset(self, record):
        self.said = 0
        return record["prompt"]

    def step(self, answer):
        self.said += 1
        return f"{answer}{self.said}{random.random()}{self.first}", {"right": 0.5, "short": -1}, self.said == 2
"""


def environments(folder: Path, source: str, name: str = "Counting", processes: int = 1) -> Any:
    file = folder / "played.py"
    file.write_text(source)
    code = vouched_code("rl.environment", f"{file}:{name}", None, "FILE.py:CLASS")
    return FileEnvironments(*code, processes)


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Any]:
    made = environments(tmp_path, COUNTING, processes=2)
    yield made
    made.close()


def test_episodes_have_objects_and_chance_of_their_own(counting: Any) -> None:
    record = {"prompt": "a"}
    said = []
    for episode, seed in enumerate((5, 5, 6)):
        assert counting.reset(episode, seed, record, "x:1").result() == "a"
    for _ in range(2):
        said.append([counting.step(episode, "b", "x:1").result() for episode in range(3)])
    assert [[found.said[:2] for found in turn] for turn in said] == [["b1"] * 3, ["b2"] * 3]
    assert said[0][0] == said[0][1] != said[0][2], "equal seeds, in two processes"
    assert said[0][0].said[2:] != said[1][0].said[2:]
    assert said[0][0].parts == {"right": 0.5, "short": -1} and not said[0][0].done
    assert said[1][0].done
    assert counting.tools == [{"type": "function", "function": {"name": "add"}}]


def test_a_class_of_this_process_plays_as_one_in_a_file(counting: Any) -> None:
    names: dict[str, Any] = {}
    exec(COUNTING, names)
    own = OwnEnvironments(names["Counting"])
    assert own.tools == counting.tools

    def played(each: Any) -> list[Any]:
        return [
            each.reset(0, 9, {"prompt": "a"}, "x:1").result(),
            *(each.step(0, "b", "x:1").result() for _ in range(2)),
        ]

    assert played(own) == played(counting)


def test_sets_of_texts_have_one_order_in_all_processes(tmp_path: Path) -> None:
    source = COUNTING.replace('return record["prompt"]', "return str(set(map(str, range(99))))")
    made = environments(tmp_path, source, processes=2)
    try:
        one, other = (made.reset(episode, 5, {}, "x:1").result() for episode in range(2))
    finally:
        made.close()
    assert one == other


def test_a_class_cannot_change_the_record_of_others() -> None:
    class Changing:
        def reset(self, record: dict[str, Any]) -> str:
            return str(record["words"].pop())

        def step(self, answer: str) -> tuple[str, float, bool]:
            raise NotImplementedError

    own = OwnEnvironments(Changing)
    record = {"words": ["rain"]}
    assert [own.reset(episode, 1, record, "x:1").result() for episode in range(2)] == ["rain"] * 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1", "returned 1 from step"),
        ("return 'a', 1", r"returned \('a', 1\) from step"),
        ("return 'a', float('nan'), True", "returned .*nan.* from step"),
        ("return 'a', 1e7, True", "returned .* from step"),
        ("return 'a', True, True", "returned .* from step"),
        ("return 'a', 1.0, 1", "returned .* from step"),
        ("return 7, 1.0, True", "returned .* from step"),
        ("return ['a'], 1.0, True", "returned .* from step"),
        ("return 'a', object(), True", "raised TypeError: object is not plain data"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ("import os; os._exit(3)", "ended its process .exit code 3"),
    ],
)
def test_what_is_no_step_stops_with_the_records_place(tmp_path: Path, body: str, said: str) -> None:
    source = f"class Counting:\n    def reset(self, record): return 'a'\n    def step(self, answer):\n        {body}\n"
    made = environments(tmp_path, source)
    try:
        assert made.reset(0, 1, {}, "records.jsonl:7").result() == "a"
        with pytest.raises(InputRefused, match=rf"records.jsonl:7: .*played.py:Counting {said}"):
            made.step(0, "b", "records.jsonl:7").result()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Other:\n    pass\n", "the file has no class 'Counting'"),
        ("class Counting:\n    def reset(self, record): return 'a'\n", "no method 'step'"),
        ("import nothing_like_this\n", "raised ModuleNotFoundError"),
    ],
)
def test_a_file_without_such_a_class_is_refused(tmp_path: Path, source: str, said: str) -> None:
    made = environments(tmp_path, source)
    try:
        with pytest.raises(InputRefused, match=f"rl.environment: .*{said}"):
            _ = made.tools
    finally:
        made.close()


def test_a_step_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ANSWER_TIMEOUT_S", 0.5)
    source = (
        "class Counting:\n    def reset(self, record): return 'a'\n"
        "    def step(self, answer):\n        while True: pass\n"
    )
    made = environments(tmp_path, source)
    try:
        made.reset(0, 1, {}, "x:1").result()
        began = time.monotonic()
        with pytest.raises(InputRefused, match="x:1: .* took more than"):
            made.step(0, "b", "x:1").result()
        assert time.monotonic() - began < 30
    finally:
        made.close()


# What an environment does once it reads a model's answers; True: it could do it.
ATTACKS = {
    "a file": "open(path, 'w').write('x'); return True",
    "a process": "import os; os.fork(); return True",
    "a program": "import subprocess; subprocess.run(['true']); return True",
    "a thread": "import threading; threading.Thread(target=print).start(); return True",
    "a socket": "import socket; socket.socket(); return True",
    "memory": "bytearray(6 << 30); return True",
    "another's memory": "open(f'/proc/{parent}/mem', 'rb').read(1); return True",
    "another's end": "import os; os.kill(int(parent), 9); return True",
}


def test_an_environment_that_reads_answers_has_given_up_its_rights(tmp_path: Path) -> None:
    """All attacks in one process, which says after each what came of it."""
    tries = "".join(
        f"    def _{number}(self, path, parent):\n        {body}\n"
        for number, body in enumerate(ATTACKS.values())
    )
    source = (
        f"class Counting:\n{tries}    def reset(self, record): return 'a'\n    def step(self, answer):\n"
        "        number, path, parent = answer.split()\n"
        "        try: done = getattr(self, f'_{number}')(path, parent)\n"
        "        except BaseException as error: done = type(error).__name__\n"
        "        return str(done), 0.0, False\n"
    )
    made = environments(tmp_path, source)
    (tmp_path / "open").mkdir(mode=0o777)
    path = tmp_path / "open" / "written"
    try:
        made.reset(0, 1, {}, "x:1").result()
        for number, name in enumerate(ATTACKS):
            if name == "another's end" and os.geteuid() != 0:
                continue  # without namespaces, a user's processes may end each other
            answer = f"{number} {path} {os.getpid()}"
            found: Observation = made.step(0, answer, "x:1").result()
            assert found.said != "True", name
        assert not path.exists() or path.stat().st_size == 0
    finally:
        made.close()


def test_an_environment_may_import_and_read_beside_its_file_before_it_plays(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("rain")
    source = (
        "import json, numpy, pathlib\nWORD = pathlib.Path(__file__).with_name('words.txt').read_text()\n"
        "class Counting:\n    def reset(self, record): return WORD\n"
        "    def step(self, answer): return str(numpy.arange(3).sum()), 0.0, True\n"
    )
    made = environments(tmp_path, source)
    try:
        assert made.reset(0, 1, {}, "x:1").result() == "rain"
        assert made.step(0, "b", "x:1").result().said == "3"
    finally:
        made.close()


def test_the_class_must_be_named_and_vouched_for() -> None:
    with pytest.raises(UsageError, match="give rl.environment, too"):
        reward_of("environment")
    with pytest.raises(UsageError, match="rl.environment = 'game': expected FILE.py:CLASS"):
        reward_of("environment", environment="game")
    with pytest.raises(InputRefused, match="nobody has said that this file may run"):
        reward_of("environment", {}, environment="game.py:Game")


def test_what_an_environment_printed_is_written_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "        print('z' * 200_000, end='')\n        import os; os._exit(3)\n"
    source = f"class Counting:\n    def reset(self, record): return 'a'\n    def step(self, answer):\n{body}"
    made = environments(tmp_path, source)
    try:
        made.reset(0, 1, {}, "x:1").result()
        with pytest.raises(InputRefused, match="exit code 3"):
            made.step(0, "b", "x:1").result()
        assert capsys.readouterr().err == "z" * 200_000
    finally:
        made.close()
