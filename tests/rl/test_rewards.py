"""Run: pytest tests/rl/test_rewards.py (what an answer is worth, and what foreign code cannot do)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daily import nightly
from monograph.errors import InputRefused, UsageError
from monograph.rl import processes, worker
from monograph.rl.rewards import Answer, Reward, reward_of

PLACE = "prompts.jsonl:12"
LINUX = sys.platform == "linux"


def confined() -> bool | None:
    return processes.ProgramScorer().confinement()


# What the system allows is asked of another program than the one under test.
APART = "unshare --user --map-root-user --mount --net --pid --fork mount --rbind /tmp /tmp"
PROGRAMS = pytest.mark.skipif(
    not LINUX or confined() is None, reason="this system limits no programs"
)
NAMESPACES = pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(APART.split(), stderr=subprocess.DEVNULL).returncode != 0,
    reason="this system allows no namespaces",
)


def score(name: str | Reward, completion: str, **record: Any) -> float:
    reward = reward_of(name) if isinstance(name, str) else name
    try:
        [value] = reward.score([Answer("prompt", completion, record, PLACE)])
    finally:
        if isinstance(name, str):
            reward.close()
    return value


def commands_with(words: str) -> list[str]:
    """The processes that have this in their command line, zombies left out, since those have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def soon(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


# ── what the plain rewards compare ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("completion", "answer", "worth"),
    [
        ("so 6 * 7 = 42.", 42, 1),
        ("so 6 * 7 = 42", "6 * 7 = 42\n#### 42", 1),
        ("$1,234,567.50", 1234567.5, 1),
        ("#### 1,234", "1234", 1),
        ("1,2345", 2345, 0),
        ("minus: -5", -5, 1),
        ("minus: \u22125", -5, 1),
        ("+5", 5, 1),
        ("10-12", 12, 1),
        ("2e3", 2000, 1),
        (".5", 0.5, 1),
        ("0.3333333", 1 / 3, 1),
        ("0.33333", 1 / 3, 0),
        ("100000000", 100000001, 0),
        ("12345678901234567890123", "12345678901234567890124", 0),
        ("42 and then 7", 42, 0),
        ("no number", 0, 0),
        ("", 0, 0),
        ("1e999999999999999999999999", 1, 0),
        ("9" * 200_000, 1, 0),
        ("1e999999999", "1e999999998", 0),
    ],
)
def test_the_last_number_is_compared_whole_ones_exactly(
    completion: str, answer: Any, worth: float
) -> None:
    assert score("number", completion, answer=answer) == worth


def test_exact_is_one_of_the_accepted_texts_up_to_spaces_around_it() -> None:
    assert score("exact", " yes\n", answer="yes ") == 1
    assert score("exact", "y", answer=["yes", "y"]) == 1
    assert score("exact", "yes.", answer=["yes", "y"]) == 0


def test_patterns_and_schemas_match_the_whole_completion(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    pattern = reward_of("regex", regex="[0-9]+:[ab]")
    schema = reward_of("json-schema", schema=str(tmp_path / "s.json"))
    for reward, right, wrong in (pattern, "12:a", "12:ab"), (schema, '{"a":1}', '{"a":"1"}'):
        texts = (right, f" {right}\n", wrong, f"{right} x", "\ud800")
        assert [score(reward, text) for text in texts] == [1, 1, 0, 0, 0]
        reward.close()


def test_a_pattern_that_would_backtrack_takes_linear_time() -> None:
    began = time.process_time()
    assert score(reward_of("regex", regex="(a|aa)*"), "a" * 20_000 + "b") == 0
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("number", {}), ("number", {"answer": "none"}), ("number", {"answer": True}), ("number", {"answer": [1]}),
        ("number", {"answer": float("inf")}), ("exact", {"answer": 1}), ("exact", {"answer": []}),
        ("python", {"test": "assert True"}), ("python", {"tests": [1]}), ("python", {"tests": "assert f("}),
        ("python", {"tests": ["assert True", ""]}),
    ],
)  # fmt: skip
def test_a_record_without_what_the_reward_needs_is_refused_before_any_training(
    name: str, record: dict[str, Any]
) -> None:
    reward = reward_of(name)
    with pytest.raises(InputRefused, match=f"{PLACE}: rl.reward needs .* under '{reward.field}'"):
        reward.require(record, PLACE)
    reward.close()


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nubmer", UsageError, "did you mean number"),
        ("", UsageError, "expected number"),
        ("file.py:", UsageError, "expected number"),
        ("file.py:a b", UsageError, "expected number"),
        ("regex", UsageError, "rl.reward = regex: give rl.reward_regex, too"),
        ("json-schema", UsageError, "rl.reward = json-schema: give rl.reward_schema, too"),
    ],
)
def test_a_name_that_is_no_reward_is_refused_in_one_line(
    name: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        reward_of(name)
    assert "\n" not in str(refused.value)


def test_a_pattern_or_schema_that_is_none_is_refused() -> None:
    with pytest.raises(InputRefused, match="not closed"):
        reward_of("regex", regex="(")
    with pytest.raises(InputRefused, match="nowhere.json"):
        reward_of("json-schema", schema="nowhere.json")


# ── a model's programs ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def python() -> Iterator[Reward]:
    if not LINUX or confined() is None:
        pytest.skip("this system limits no programs")
    reward = reward_of("python")
    yield reward
    reward.close()


def test_the_score_is_the_share_of_tests_that_the_last_fenced_block_passes(python: Reward) -> None:
    code = "def f(x):\n    return x + 1\n"
    tests = [
        "assert f(1) == 2",
        "assert f(1) == 3",
        "import math\nassert math.isclose(f(0.5), 1.5)",
    ]
    assert score(python, code, tests=tests) == pytest.approx(2 / 3)
    assert (
        score(
            python, f"No:\n```\nx\n```\nBut:\n```python\n{code}```\nDone.", tests="assert f(1) == 2"
        )
        == 1
    )
    assert score(python, f"```python\n{code}", tests="assert f(1) == 2") == 1
    assert score(python, "f(", tests="assert True") == 0
    # A reward of many answers keeps their order.
    answers = [
        Answer("", f"def f(): return {each}", {"tests": "assert f() == 2"}, PLACE)
        for each in range(5)
    ]
    assert python.score(answers) == [0, 0, 1, 0, 0]


def test_plain_data_of_every_kind_comes_back_as_it_was(python: Reward) -> None:
    code = "def same(x, *, key=None): return x"
    values = "[None, True, 10**30, 0.1, float('inf'), 'é\\ud800', [1, [2]], (1, ())"
    values += ", {1: {'a': (2,)}, (1,): []}, {1, 2}]"
    tests = [f"for x in {values}:\n    assert same(x, key=[x]) == x and type(same(x)) is type(x)"]
    # The names of the tests' own variables are not those of the machinery.
    tests += [
        "name = path = source = 1\nassert same(name, key=path) == source",
        "assert [same(x) for x in [1]] == [1]",
    ]
    tests += [
        "def check(candidate):\n    assert candidate(1) == 1\ncheck(same)",
        "assert same(7**9000) == 7**9000",
    ]
    assert score(python, code, tests=tests) == 1


def test_an_exception_arrives_as_the_builtin_one_of_its_name(python: Reward) -> None:
    code = (
        "class Odd(Exception): pass\n"
        "def f(x): raise {1: ValueError('no'), 2: Odd('odd'), 3: UnicodeError('u')}[x]\n"
        "def g(): raise SystemExit(0)\n"
    )
    caught = (
        "try:\n    {}\nexcept {} as error:\n    assert str(error) == {!r}\nelse:\n    assert False"
    )
    cases = [
        ("f(1)", "ValueError", "no"),
        ("f(2)", "RuntimeError", "odd"),
        ("f(3)", "UnicodeError", "u"),
    ]
    cases += [("g()", "RuntimeError", "0"), ("h()", "NameError", "name 'h' is not defined")]
    assert score(python, code, tests=[caught.format(*case) for case in cases]) == 1


HOSTILE = {
    "it exits": "import os\nos._exit(0)",
    "it exits in a function": "import os\ndef f(x): os._exit(0)",
    "it says that it exits well": "import sys\nsys.exit(0)",
    "it raises SystemExit in a function": "def f(x): raise SystemExit(0)",
    "it prints": "print('true\\ntrue')\ndef f(x):\n    print('true')\n    return 0",
    "it allocates ten gigabytes": "def f(x): return len(bytearray(10**10)) and 2",
    "it allocates more than half a gibibyte": "def f(x): return len(bytearray(1 << 29)) and 2",
    "it returns an object that equals everything": "class A:\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "it returns a text that equals everything": "class A(str):\n    __eq__ = lambda s, o: True\ndef f(x): return A('')",
    "it returns a number that equals all": "class A(int):\n    __eq__ = lambda s, o: True\ndef f(x): return A(0)",
    "it replaces builtins": "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\ndef f(x): return 0",
    "it replaces the worker": "import __main__\n__main__.encoded = lambda x: True\ndef f(x): return 0",
    "it writes verdicts wherever it can": (
        "import os\ndef f(x):\n    for number in range(16):\n        try: os.write(number, b'true\\n' * 9)\n"
        "        except OSError: pass\n    return 0"
    ),
    "it replies what no function returned": (
        "import os\nfor number in range(16):\n    try: os.write(number, b'[[], {}]\\n[1, 2, 3]\\n')\n"
        "    except OSError: pass\ndef f(x): return 2"
    ),
    "it replies without end": "import os\ndef f(x): return 'x' * (1 << 27)",
    "it recurses": "def f(x): return f(x)",
    "its result contains itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "it forks": "import os\ndef f(x): return 2 if os.fork() >= 0 else 0",
    "it starts a thread": "import threading\ndef f(x):\n    threading.Thread(target=print).start()\n    return 2",
    "it writes a file": "def f(x):\n    with open('x', 'w') as file: file.write('x' * 9000)\n    return 2",
    "it is no Python": "I would rather not.",
    "it has a NUL": "def f(x): return 2\n\0",
    "it has half of a surrogate pair": "def f(x): return 2\n'\ud800'",
    "it defines nothing": "",
}


# What a limit of the process stops, in a namespace or not.
LIMITED = ("ten gigabytes", "forks", "a thread", "writes a file", "without end")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_solution_gets_nothing(python: Reward, kind: str) -> None:
    tests = ["assert f(1) == 2", "assert True == (f(1) == 2)"]
    assert score(python, HOSTILE[kind], tests=tests) == 0


# What holds memory, or reaches somebody, that no limit of a process counts. Each returns whether it
# got it.
CALLS = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
def got(result):
    return result != -1
"""
HELD = {
    "shared memory of System V": "def f(): return got(libc.shmget(0, 64 << 20, 0o1600))",
    "a queue of System V": "def f(): return got(libc.msgget(0, 0o1600))",
    "semaphores of System V": "def f(): return got(libc.semget(0, 32000, 0o1600))",
    "a queue of POSIX": "def f(): return got(libc.syscall(NUMBER_mq_open, b'q', 0o102, 0o600, None))",
    "a key": "def f(): return got(libc.syscall(NUMBER_add_key, b'user', b'name', b'x' * 9000, 9000, -3))",
    "a file in memory": "def f(): return got(libc.syscall(NUMBER_memfd_create, b'name', 0))",
    "a ring of calls": "def f(): return got(libc.syscall(NUMBER_io_uring_setup, 4096, bytes(120)))",
    "a program of the kernel": "def f(): return got(libc.syscall(NUMBER_bpf, 0, bytes(128), 128))",
    "a namespace": "def f(): return got(libc.unshare(1 << 28))",
    "a socket": "def f():\n    try: return bool(socket.socket())\n    except PermissionError: return False",
}
COLUMN = 1 if os.uname().machine == "aarch64" else 0
for name, numbers in worker.FORBIDDEN.items():
    HELD = {
        kind: code.replace(f"NUMBER_{name},", f"{numbers[COLUMN]},") for kind, code in HELD.items()
    }
HELD = {kind: CALLS + code for kind, code in HELD.items()}


@pytest.mark.parametrize("kind", HELD)
def test_what_no_limit_counts_is_forbidden(python: Reward, kind: str) -> None:
    assert score(python, HELD[kind], tests="assert f() is False") == 1


def test_memory_that_is_not_of_the_process_is_within_its_limit(python: Reward) -> None:
    code = CALLS + (
        "def f(mib):\n    held = 0\n    for _ in range(mib // 64):\n"
        "        place = libc.shmat(libc.shmget(0, 64 << 20, 0o1600), None, 0)\n"
        "        ctypes.memset(place, 1, 64 << 20)\n        libc.shmdt(ctypes.c_void_p(place))\n        held += 64\n"
        "    return held"
    )
    assert score(python, code, tests="assert f(1280) == 1280") == 0


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_of_forbidden_calls_are_the_kernel_s(machine: str, header: str) -> None:
    if not Path(header).is_file():
        pytest.skip("the kernel's headers are not installed")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    found = {
        name: numbers[worker.MACHINES[machine].column] for name, numbers in worker.FORBIDDEN.items()
    }
    assert {name: str(number) for name, number in found.items() if number is not None} == {
        name: defined[name] for name in found if name in defined
    }


@pytest.mark.parametrize("machine", worker.MACHINES)
def test_every_forbidden_call_has_the_number_of_the_kernel_s_table(machine: str) -> None:
    lines = [
        line.split()
        for line in (Path(__file__).parent / "system_calls.txt").read_text().splitlines()
    ]
    known = {
        name: int(number)
        for of, name, number in (line for line in lines if line[0] != "#")
        if of == machine
    }
    found = {
        name: numbers[worker.MACHINES[machine].column] for name, numbers in worker.FORBIDDEN.items()
    }
    assert {name: number for name, number in found.items() if number is not None} == known


def test_an_unknown_machine_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = changed(
        monkeypatch, tmp_path, "MACHINES.get(os.uname().machine)", "MACHINES.get('other')"
    )
    with pytest.raises(InputRefused, match="no program can run"):
        other.require({"tests": "assert f(1)"}, PLACE)


ENDS = [
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "SystemExit",
    "KeyboardInterrupt",
    "asyncio.CancelledError",
]


@pytest.mark.parametrize(
    "raised",
    nightly(
        [*ENDS, "type('Own', (BaseException,), {})", "type('Own', (StopIteration,), {})"],
        {"StopIteration", "SystemExit", "type('Own', (BaseException,), {})"},
    ),
)
def test_what_ends_an_iterator_does_not_end_a_test_early(python: Reward, raised: str) -> None:
    code = f"import asyncio\ndef f(x):\n    if x:\n        raise {raised}\n    return True\n"
    tests = [
        "assert all(map(f, [0, 1, 0]))", "assert list(map(f, [1])) == []", "assert not any(map(f, [0, 1][1:]))",
        "for each in map(f, [1]):\n    assert each", "assert next(map(f, [1]), True)", "assert all(f(x) for x in [1])",
        "assert sorted(filter(f, [1])) == []", "assert list(iter(lambda: f(1), 5)) == []", "[*map(f, [1])]",
        "class Each:\n    def __iter__(self): return self\n    def __next__(self): return f(1)\nassert all(Each())",
    ]  # fmt: skip
    assert score(python, code, tests=tests) == 0
    assert score(python, code, tests="assert all(map(f, [0, 0]))") == 1


WALKS = """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if hasattr(value, "send"):
            for _ in range(50_000):
                value.send(True)
    frame = frame.f_back
f()
assert False
"""


def test_a_score_is_at_most_1_whatever_is_written_for_it(python: Reward) -> None:
    assert score(python, "def f(): pass", tests=[WALKS]) <= 1
    assert score(python, "def f(): pass", tests=["f()\nassert False", WALKS]) <= 0.5


def test_the_death_of_a_solution_fails_a_test_that_catches_everything(python: Reward) -> None:
    tests = ["assert True", "try:\n    f()\nexcept BaseException:\n    pass", "assert True"]
    assert score(python, "import os\ndef f(): os._exit(0)", tests=tests) == pytest.approx(1 / 3)


SEARCHES = """
import gc, os, sys
def finds(mark):
    mark = "".join(mark)
    texts = [repr(sys.argv), repr(dict(os.environ)), repr(vars(sys.modules["__main__"]))]
    texts += [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple)) and len(each) < 1000]
    for folder, _, names in os.walk("/proc/self"):
        for name in names[:200]:
            try: texts.append(open(os.path.join(folder, name), errors="replace").read(1 << 16))
            except OSError: pass
    return any(mark in text for text in texts)
def looks():
    return [os.getpid(), os.path.exists("/etc"), os.path.exists("/proc"), os.listdir("."), dict(os.environ)]
def connects():
    import socket
    socket.create_connection(("127.0.0.1", PORT), timeout=1)
def makes():
    open("made", "w").close()
def escapes():
    os.chroot("/lib")
def kills():
    os.kill(-1, 9)
"""


def test_a_solution_does_not_find_its_tests(python: Reward) -> None:
    # The mark goes to the solution in pieces, so that the question does not hold it.
    assert (
        score(
            python,
            SEARCHES,
            tests=["secret = 'tell' 'tale'\nassert finds(list('telltale')) is False"],
        )
        == 1
    )
    assert score(python, SEARCHES, tests=["assert finds(list('finds')) is True"]) == 1


@NAMESPACES
def test_a_solution_sees_no_file_no_process_and_no_network(python: Reward) -> None:
    import socket

    assert (
        score(python, SEARCHES, tests="assert looks()[0] == 2 and looks()[1:3] == [False, False]")
        == 1
    )
    assert score(python, SEARCHES, tests="assert set(looks()[4]) <= {'LC_CTYPE'}") == 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = SEARCHES.replace("PORT", str(server.getsockname()[1]))
        refused = "try:\n    connects()\nexcept {}:\n    pass\nelse:\n    assert False"
        assert score(python, code, tests=refused.format("(OSError, ConnectionError)")) == 1
    assert (
        score(python, SEARCHES, tests=refused.replace("connects", "makes").format("OSError")) == 1
    )
    assert (
        score(
            python, SEARCHES, tests=refused.replace("connects", "escapes").format("PermissionError")
        )
        == 1
    )
    # Nothing but its own processes can be killed, and these are not the tests'.
    assert (
        score(
            python,
            SEARCHES,
            tests=["try:\n    kills()\nexcept ProcessLookupError:\n    pass", "assert True"],
        )
        == 1
    )


def changed(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> Reward:
    """The reward with a worker that has this change."""
    source = Path(worker.__file__).read_text()
    assert source.count(old) == 1
    (folder / "worker.py").write_text(source.replace(old, new))
    os.chmod(folder, 0o755)
    monkeypatch.setattr(worker, "__file__", str(folder / "worker.py"))
    return reward_of("python")


FLEES = "import os, time\ndef f():\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n    return 2"


@NAMESPACES
def test_children_that_leave_the_process_group_end_with_their_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = "    for limit, value in limits.items():\n"
    limits += "        resource.setrlimit(limit, (value, value))\n    _forbid(libc)\n"
    with_children = changed(monkeypatch, tmp_path, limits, "")
    assert score(with_children, FLEES, tests="assert f() == 2") == 1
    with_children.close()
    assert soon(lambda: not commands_with(str(tmp_path)))


@PROGRAMS
def test_processor_time_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = changed(monkeypatch, tmp_path, "RLIMIT_CPU: 5", "RLIMIT_CPU: 1")
    monkeypatch.setattr(processes, "TESTS_TIMEOUT_S", 600.0)
    assert score(short, "def f():\n    while True: pass", tests=["assert True", "f()"]) == 0.5
    short.close()


@PROGRAMS
def test_time_has_a_limit_and_nothing_survives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reward = changed(monkeypatch, tmp_path, "import ast\n", "import ast\n\n")
    monkeypatch.setattr(processes, "TESTS_TIMEOUT_S", 1.0)
    sleeps = "import os, signal, time\ndef f():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)"
    began = time.monotonic()
    assert score(reward, sleeps, tests=["assert True", "f()"]) == 0.5
    assert time.monotonic() - began < worker.MAX_LIFETIME_S / 2
    reward.close()
    assert soon(lambda: not commands_with(str(tmp_path)))


PARTED = """
import hashlib
import os
def opens(program):
    parted = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and program in open(f"/proc/{pid}/cmdline").read():
                parted += 1
                open(f"/proc/{pid}/mem", "rb")
                return "opened"
        except OSError:
            pass
    return parted
"""


@PROGRAMS
def test_without_namespaces_nothing_runs_unless_told_and_then_within_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chmod(tmp_path.parents[0], 0o755)
    bare = changed(
        monkeypatch,
        tmp_path,
        "    namespaces = CLONE_NEWNET",
        "    return\n    namespaces = CLONE_NEWNET",
    )
    if confined() is None:
        bare.close()
        pytest.skip("root becomes nobody, who cannot read this Python")
    with pytest.raises(InputRefused, match="allows no namespaces.*--trust-code"):
        bare.require({"tests": "assert f(1)"}, PLACE)
    bare.unconfined = True
    bare.require({"tests": "assert f(1)"}, PLACE)
    assert "allows no namespaces" in capsys.readouterr().err
    assert not [kind for kind in HELD if score(bare, HELD[kind], tests="assert f() is False") < 1]
    hostile = [kind for kind in HOSTILE if any(word in kind for word in LIMITED)]
    assert len(hostile) == len(LIMITED)
    assert not [kind for kind in hostile if score(bare, HOSTILE[kind], tests="assert f(1) == 2")]
    assert score(bare, PARTED, tests=f"assert opens({worker.__file__!r}) == 1") == 1
    bare.close()


def test_where_no_program_runs_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = changed(
        monkeypatch,
        tmp_path,
        "    parent = _Channel(0)",
        "    raise SystemExit\n    parent = _Channel(0)",
    )
    with pytest.raises(InputRefused, match="no program can run"):
        broken.require({"tests": "assert f(1)"}, PLACE)


SLEEPS = Answer("", "import time\ntime.sleep(600)", {"tests": "assert f(1)"}, PLACE)


@PROGRAMS
def test_ctrl_c_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reward = changed(monkeypatch, tmp_path, "import ast\n", "import ast\n\n")

    # In a process of its own: a signal that came late would end the tests.
    if (trainer := os.fork()) == 0:
        waiting = threading.get_ident()

        def interrupt() -> None:
            soon(lambda: len(commands_with(str(tmp_path))) >= 2)
            # To the thread that waits: the system may give a process's signal to another one, which
            # wakes nobody.
            signal.pthread_kill(waiting, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            reward.score([SLEEPS] * 20)
        except KeyboardInterrupt:
            reward.close()
            os._exit(0)
        os._exit(1)
    began = time.monotonic()
    _, status = os.waitpid(trainer, 0)
    assert status == 0
    assert time.monotonic() - began < processes.TESTS_TIMEOUT_S
    assert soon(lambda: not commands_with(str(tmp_path)))


@PROGRAMS
def test_the_trainer_s_death_leaves_no_process_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reward = changed(monkeypatch, tmp_path, "import ast\n", "import ast\n\n")
    # Nobody could remove what a dead trainer left there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if (trainer := os.fork()) == 0:
        reward.score([SLEEPS])
        os._exit(0)
    assert soon(lambda: len(commands_with(str(tmp_path))) >= 2)
    time.sleep(0.5)  # until they have asked to end with it
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert soon(lambda: not commands_with(str(tmp_path)), 5.0)
    assert os.listdir(tmp_path) == ["worker.py"]


# ── a user's function ─────────────────────────────────────────────────────────────────────────────


def own(folder: Path, source: str) -> Reward:
    (folder / "neighbour.py").write_text("WORTH = 0.25")
    (folder / "mine.py").write_text(source)
    return reward_of(f"{folder / 'mine.py'}:score")


def test_a_function_gets_the_prompt_the_completion_and_the_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import os, neighbour\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n"
        "print('loaded')\n"
        "def score(prompt, completion, record):\n"
        "    print('seen', prompt); os.system('echo shell')\n    os.write(1, b'[null, 9]\\n')\n"
        "    return neighbour.WORTH + (record == {'a': [1, {'b': None}]}) + len(completion)\n"
    )
    reward = own(tmp_path, source)
    assert reward.digest == hashlib.sha256(source.encode()).hexdigest()
    reward.require({}, PLACE)
    try:
        for completion in ("", "é\u2028\n"):
            assert score(reward, completion, a=[1, {"b": None}]) == 1.25 + len(completion)
    finally:
        reward.close()
    out, err = capfd.readouterr()
    assert not out and all(words in err for words in ("loaded", "seen prompt", "shell"))


FAULTS = {
    "raise ValueError('two\\nlines')": "raised ValueError: two lines",
    "raise SystemExit(0)": "raised SystemExit",
    "return float('nan')": "returned nan",
    "return 10**400": "returned 1000",
    "return None": "returned None",
    "return '1'": "returned '1'",
    "return {'a': 1, 'b': None}": "returned .'a': 1, 'b': None.",
    "return {'a b': 1}": "returned .'a b': 1.",
    "return {}": "returned [{][}]",
    "return object()": "raised TypeError: object is not plain data",
    "import os; os.kill(os.getpid(), 9)": "ended its process .exit code -9",
    "import os; os._exit(3)": "ended its process .exit code 3",
    "import time; time.sleep(600)": "took more than 1 s",
    "import os, time\n    if os.fork(): os._exit(4)\n    time.sleep(600)": "ended its process .exit code 4",
}


@pytest.mark.parametrize("body", nightly(FAULTS, [*FAULTS][:1] + [*FAULTS][8:]))
def test_a_function_that_fails_is_refused_in_one_line_and_leaves_no_process(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ANSWER_TIMEOUT_S", 1.0)
    (tmp_path / "worker.py").write_text(Path(worker.__file__).read_text())
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "worker.py"))
    reward = own(
        tmp_path, f"def score(prompt, completion, record):\n    if prompt: {body}\n    return 1\n"
    )
    if "\n" in body:
        reward = own(tmp_path, f"def score(prompt, completion, record):\n    {body}\n")
    with pytest.raises(
        InputRefused, match=f"^{PLACE}: .*mine.py:score {FAULTS[body]}.*: correct it"
    ) as refused:
        score(reward, "")
    assert "\n" not in str(refused.value)
    assert soon(lambda: not commands_with(str(tmp_path)))
    if "\n" not in body:  # a later call finds a new process, and no reply to an earlier one
        assert reward.score([Answer("", "", {}, PLACE)]) == [1]
        reward.close()


@pytest.mark.parametrize(
    ("source", "fault"),
    [("x = ", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("score = 1", "no function 'score'")],
)
def test_a_file_that_fails_is_refused_before_any_training(
    source: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(InputRefused, match=f"rl.reward: .*{fault}"):
        own(tmp_path, source).require({}, PLACE)
    with pytest.raises(InputRefused, match=r"nothing\.py cannot be read"):
        reward_of(f"{tmp_path}/nothing.py:score").require({}, PLACE)


def test_a_file_is_not_run_before_the_caller_could_decide_about_trust(tmp_path: Path) -> None:
    own(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(*_): return 1").close()
    assert not (tmp_path / "ran").exists()


def test_a_child_of_a_function_neither_replies_nor_outlives_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(Path(worker.__file__).read_text())
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "worker.py"))
    source = "import os, time\ndef score(p, c, r):\n    child = os.fork() == 0\n    if child and c: time.sleep(600)\n"
    reward = own(tmp_path, source + "    return 7 if child else len(c)\n")
    assert [score(reward, text) for text in ("", "a", "", "bc", "")] == [0, 1, 0, 2, 0]
    assert commands_with(str(tmp_path))
    reward.close()
    assert soon(lambda: not commands_with(str(tmp_path)))


@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    assert candidate(1) == 2",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)",
        "assert sum([1, 2]) == 3",
        "f = 3\nassert f == 3",
    ],
)
def test_tests_that_would_pass_for_any_program_are_refused(tests: str) -> None:
    with pytest.raises(InputRefused, match="Python code that calls what it tests"):
        reward_of("python").require({"tests": ["assert f(1) == 2", tests]}, "p.jsonl:1")


def test_truth_and_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Single:\n    def item(self):\n        return 0.25\n\n"
        "def score(p, c, r):\n    return c == 'right' if c != 'half' else Single()\n"
    )
    reward = reward_of(f"{tmp_path / 'own.py'}:score")
    answers = [Answer("p", text, {}, PLACE) for text in ("right", "wrong", "half")]
    assert reward.score(answers) == [1.0, 0.0, 0.25]
    reward.close()
