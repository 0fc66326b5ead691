"""The mutation score: of small faults put into the rooms that hold the equations, how many do the
fast tests notice?

Run: make mutants        (hours; ARGS='--room step --count 20' for less, --list to see what would be tried)

cosmic-ray makes the faults (another operator, comparison, number, a loop that does not run, ...),
each in a copy of the project. A sample is drawn by the seed, so many for each room; faults in
annotations change nothing and are left out. A fault is noticed if a test of the room's fails, or
does not end. Each is printed with the test that failed first. Those that are not noticed are for a
person to judge: some change nothing that can be seen, for instance how fast it is.

The tests are run once without a fault, to see which functions each of them calls and how long it
takes. A fault in a function is tried by the tests that call it, the quickest first, and by the
others only if these notice nothing.

Tests count as endless by the clock, and on a busy machine sound ones are slow as well. So faults that
are noticed by time only are counted apart, and --patience says how long to wait for them.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import cosmic_ray.plugins
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[1]
SRC = "src/monograph"


class Room(NamedTuple):
    """Files, and the tests that shall notice a fault in them, the cheapest first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "loss": Room(
        ("loss.py",),
        ("test_loss.py", "laws/test_mixture_is_its_equation.py", "laws/test_preference_is_its_equation.py",
         "test_resident.py", "laws/test_accumulated_is_large_batch.py"),
    ),
    "schedule": Room(("schedule.py",), ("test_schedule.py",)),
    "clip": Room(("step/clip.py",), ("test_clip.py", "laws/test_one_bad_number.py")),
    "step": Room(
        ("engine.py", "loop.py", "step/fill.py", "step/guard.py", "step/losses.py", "step/on_device.py",
         "step/parameters.py", "step/parts.py", "step/retries.py", "step/step.py"),
        ("test_parts.py", "test_step.py", "test_resident.py", "test_loop.py", "laws/test_accumulated_is_large_batch.py",
         "laws/test_one_bad_number.py", "test_clip.py", "laws/test_replayed_is_called.py",
         "ops/test_fused_gradients.py", "test_modules.py"),
    ),
    "optim": Room(
        (
            "optim/adamw.py",
            "optim/kinds.py",
            "optim/muon.py",
            "optim/narrow.py",
            "optim/optimizer.py",
            "optim/planes.py",
            "optim/state_format.py",
            "optim/updates.py",
        ),
        ("test_optim.py", "test_muon.py", "test_narrow.py", "test_transfer.py", "test_arguments.py", "test_modules.py"),
    ),
    "ops": Room(
        ("ops/attention.py", "ops/cross_entropy.py", "ops/philox.py", "ops/rms_norm.py",
         "ops/token_rows.py"),
        ("ops/test_rms_norm.py", "ops/test_cached_attention.py", "ops/test_cross_entropy.py",
         "ops/test_log_probabilities.py", "ops/test_token_rows.py",
         "ops/test_attention.py", "ops/test_attention_kernels.py", "decode/test_reproducible.py",
         "ops/test_fused_gradients.py"),
    ),
    "pack": Room(("data/pack.py",), ("data/test_pack.py", "laws/test_packed_is_separate.py")),
    "sampler": Room(
        ("decode/chain.py",),
        ("decode/test_chain.py", "decode/test_candidates.py", "decode/test_completion.py",
         "laws/test_sample_is_reference.py", "laws/test_written_is_reference.py", "laws/test_a_row_is_alone.py"),
    ),
    "cache": Room(
        ("decode/cache.py", "decode/prompt_reader.py"),
        ("decode/test_cache.py", "decode/test_generator.py", "laws/test_cached_is_full.py",
         "laws/test_cached_over_blocks.py", "laws/test_schedule_changes_nothing.py"),
    ),
    "generator": Room(
        ("decode/generator.py", "decode/request.py", "decode/outbox.py"),
        ("decode/test_generator.py", "decode/test_outbox.py", "decode/test_completion.py",
         "laws/test_cached_over_blocks.py", "laws/test_schedule_changes_nothing.py"),
    ),
    "decoding": Room(
        ("decode/step.py",),
        ("decode/test_step.py", "decode/test_generator.py", "decode/test_completion.py",
         "laws/test_written_is_reference.py", "laws/test_a_row_is_alone.py", "laws/test_schedule_changes_nothing.py"),
    ),
    "automata": Room(
        ("automata/__init__.py", "automata/tokens.py", "decode/automaton_tables.py", "automata/dfa.py",
         "automata/expression.py", "automata/pattern.py", "automata/schema.py",
         "automata/values.py"),
        ("automata/test_tables.py", "automata/test_lift.py", "automata/test_automaton_tables.py",
         "automata/test_dfa.py", "automata/test_pattern.py", "automata/test_schema.py"),
    ),
    "rl": Room(
        ("rl/arrange.py", "rl/loss.py", "rl/pairs.py", "rl/preferences.py",
         "rl/preference_loss.py", "rl/prompts.py", "rl/rollouts.py"),
        ("rl/test_samples.py", "rl/test_prompts.py", "rl/test_pairs.py", "rl/test_public.py",
         "laws/test_preference_is_its_equation.py", "laws/test_off_policy_is_its_equation.py",
         "laws/test_estimator_is_gradient.py", "laws/test_scored_is_drawn.py"),
    ),
    "text": Room(
        ("text/chat.py", "text/lossless.py", "text/sentence_pieces.py", "text/template.py", "text/tokenizer.py",
         "text/tokenizer_file.py"),
        ("text/test_tokenizer_file.py", "text/test_sentence_pieces.py", "text/test_tokenizer.py", "text/test_chat.py",
         "text/test_template.py", "data/test_loss_mask.py"),
    ),
    "data": Room(
        ("data/batches.py", "data/conversations.py", "data/documents.py", "data/encoding.py", "data/loss_mask.py",
         "data/records.py", "data/rows.py", "data/shards.py", "data/sources.py", "data/store.py", "data/tables.py"),
        ("data/test_shards.py", "data/test_split.py", "data/test_sources.py", "data/test_damaged_records.py",
         "data/test_order.py", "data/test_records.py", "data/test_weights.py", "data/test_rows.py",
         "data/test_batches.py", "data/test_store.py", "data/test_conversations.py", "data/test_encoding.py",
         "data/test_loss_mask.py"),
    ),
    "checkpoint": Room(
        ("checkpointing/folder.py", "checkpointing/rotation.py"), ("checkpointing", "laws/test_nothing_lost.py")
    ),
    "ranks": Room(
        ("distributed/engine.py", "distributed/sharded.py"),
        ("distributed/test_refused.py", "laws/test_sharded_is_single.py"),
    ),
    "ensemble": Room(
        ("ensemble/stacked_parameters.py", "ensemble/stack.py", "ensemble/call.py"),
        ("ensemble", "laws/test_members_are_one_program.py", "laws/test_one_bad_number.py"),
    ),
    "stream": Room(("stream/lanes.py",), ("stream/test_lanes.py", "stream/test_clock.py")),
}  # fmt: skip
SOUND = "sound.json"  # what the tests did without a fault
FAILED = "failed.txt"  # the test that failed first with a fault
ENDLESS = -100  # the code of tests that did not end; less than any signal's
TIME = "the tests did not end"


class Mutant(NamedTuple):
    """A fault: which operator, at which of the places in a file that it applies to."""

    file: str
    operator: str
    occurrence: int


class Score(NamedTuple):
    """What became of a room's faults.

    Attributes:
        by_time: those that were noticed only because the tests did not end.
        survivors: those that were not noticed.
    """

    tried: int
    noticed: int
    by_time: list[str]
    survivors: list[str]


def meaning(code: str) -> str:
    """What a file does: its tree without annotations."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)  # type: ignore[assignment]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


def mutants(file: str) -> Iterator[Mutant]:
    """All faults of a file."""
    tree = get_ast((ROOT / SRC / file).read_text())
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if not kind.arguments():
            places = [
                place for node in ast_nodes(tree) for place in kind().mutation_positions(node)
            ]
            yield from (Mutant(file, name, occurrence) for occurrence in range(len(places)))


def mutated(mutant: Mutant) -> str | None:
    """The file with the fault; None where it changes nothing, or is no Python."""
    code = (ROOT / SRC / mutant.file).read_text()
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    other = mutate_code(code, operator, mutant.occurrence)
    try:
        return other if other and meaning(other) != meaning(code) else None
    except SyntaxError:
        return None


def drawn(room: Room, count: int, draws: random.Random) -> dict[Mutant, str]:
    """So many faults of a room, each file by the number of its own."""
    every = [mutant for file in room.files for mutant in mutants(file)]
    draws.shuffle(every)
    found = dict[Mutant, str]()
    for mutant in every:
        if len(found) == count:
            break
        if (code := mutated(mutant)) is not None:
            found[mutant] = code
    return found


def function_of(line: int, code: str) -> int | None:
    """Return the first line of the innermost function with this line; None if it runs when the file
    is imported.
    """
    within = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not within:
        return None
    innermost = max(within, key=lambda node: node.lineno)
    return min(part.lineno for part in (innermost, *innermost.decorator_list))


class Watched:
    """A plugin of pytest that sees which functions of a package each test calls, and how long the
    test takes.

    Attributes:
        seconds: of each test, by its id.
        calls: each test's functions, as file and first line.
    """

    def __init__(self, package: Path) -> None:
        """Take the folder of the package."""
        self.package = f"{package}/"
        self.seconds, self.calls = dict[str, float](), dict[str, list[tuple[str, int]]]()
        self._called = set[tuple[str, int]]()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(self.package):
            self._called.add(
                (frame.f_code.co_filename.removeprefix(self.package), frame.f_code.co_firstlineno)
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch a test, with the fixtures that are made for it."""
        self._called, began = set(), time.monotonic()
        threading.settrace(self._note)
        sys.settrace(self._note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid], self.calls[item.nodeid] = (
                time.monotonic() - began,
                sorted(self._called),
            )


class First:
    """A plugin of pytest that writes down which test, or file of tests, fails first."""

    def __init__(self, file: Path) -> None:
        """Take the file to write to."""
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down a test that failed."""
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down a file that cannot be imported."""
        self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


class Sound(NamedTuple):
    """What a room's tests did without a fault, by each test's id; see `Watched`."""

    seconds: dict[str, float]
    calls: dict[str, list[tuple[str, int]]]

    def parted(self, file: str, function: int | None) -> tuple[list[str], list[str]]:
        """Return the tests that call a function, the quickest first, and the others; None: all of
        them call it.
        """
        ids = sorted(self.seconds, key=self.seconds.__getitem__)
        calls = {name: function is None or (file, function) in self.calls[name] for name in ids}
        return [name for name in ids if calls[name]], [name for name in ids if not calls[name]]


def outcome(copy: Path, tests: Sequence[str], limit_s: float, *, faulty: bool) -> int:
    """Return pytest's exit code, or ENDLESS, for tests of a copy of the project.

    They run in a child, which has torch already, and a group of its own.
    """
    (copy / FAILED).unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(copy)
        sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
        os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        if faulty:  # nothing that is compiled of this fault may be read as the next one
            sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = 1
        try:
            watched = Watched(copy / SRC)
            options = [
                "-q",
                "-m",
                "not slow",
                "-p",
                "no:cacheprovider",
                *(["-x"] if faulty else []),
            ]
            plugin = First(copy / FAILED) if faulty else watched
            code = int(pytest.main([*options, *tests], plugins=[plugin]))
            if not faulty:
                found = {
                    "libraries": libraries(),
                    "seconds": watched.seconds,
                    "calls": watched.calls,
                }
                (copy / SOUND).write_text(json.dumps(found))
        finally:  # whatever a fault raises, the child must not go on as its parent
            os._exit(code)
    ends = time.monotonic() + limit_s
    try:
        while time.monotonic() < ends:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ENDLESS
    finally:
        try:  # what the tests started and left
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass


def libraries() -> list[str]:
    """Return the modules of large libraries that are loaded, in the order in which they were."""
    # Not transformers: it loads plugins of pytest, which then starts with a warning that its tests
    # take for an error.
    return [
        name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "pydantic")
    ]


def sound(name: str, copy: Path) -> Sound:
    """Run a room's tests without a fault, and load what they load once for all children."""
    tests = [f"tests/{test}" for test in ROOMS[name].tests]
    # Watching slows tests down, so one that bounds its time may fail here. That they are sound,
    # they show unwatched.
    if outcome(copy, tests, 3600, faulty=False) not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
    ):
        sys.exit(f"{name}: its tests cannot be run without a fault")
    found = json.loads((copy / SOUND).read_text())
    for library in found["libraries"]:
        with suppress(Exception):
            importlib.import_module(library)
    calls = {test: [(file, line) for file, line in those] for test, those in found["calls"].items()}
    return Sound(found["seconds"], calls)


def noticed_by(
    mutant: Mutant, line: int, room: Room, before: Sound, copy: Path, patience: float
) -> str | None:
    """Return which test of the room's fails first in a copy that has the fault, or TIME; None if
    none does.
    """
    code = (ROOT / SRC / mutant.file).read_text()
    for tests in before.parted(mutant.file, function_of(line, code)):
        if not tests:
            continue
        limit_s = patience * sum(before.seconds[test] for test in tests) + 60
        found = outcome(copy, tests, limit_s, faulty=True)
        if found == pytest.ExitCode.USAGE_ERROR:  # the fault changes the names of tests
            limit_s = patience * sum(before.seconds.values()) + 60
            found = outcome(copy, [f"tests/{test}" for test in room.tests], limit_s, faulty=True)
        if found == ENDLESS:
            return TIME
        if found != 0:
            failed = copy / FAILED
            return failed.read_text() if failed.exists() else f"pytest ended with {found}"
    return None


def shown(mutant: Mutant, code: str) -> tuple[int, str]:
    """Return the first line that the fault changes, and the fault in words: where, what it was,
    what it is.
    """
    before, after = (ROOT / SRC / mutant.file).read_text().splitlines(), code.splitlines()
    changes = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    number = changes[0].split()[1].lstrip("-").partition(",")[0]
    old, new = (" ".join(line[1:].strip() for line in changes if line[0] == sign) for sign in "-+")
    return int(number), f"{mutant.file}:{number}: {old}  ->  {new}"


def tried(name: str, count: int, seed: int, patience: float, copy: Path) -> Score:
    """The score of a room, said as it comes."""
    room, began = ROOMS[name], time.monotonic()
    before = sound(name, copy)
    if outcome(copy, list(before.seconds), 3600, faulty=True) != 0:
        sys.exit(
            f"{name}: its tests fail without a fault, one by one, in a child that has the libraries"
        )
    chosen = drawn(room, count, random.Random(f"{seed} {name}"))
    survivors, by_time = list[str](), list[str]()
    for number, (mutant, code) in enumerate(chosen.items(), 1):
        target = copy / SRC / mutant.file
        without = target.read_text()
        target.write_text(code)
        line, words = shown(mutant, code)
        by = noticed_by(mutant, line, room, before, copy, patience)
        if by is None:
            survivors.append(words)
        if by == TIME:
            by_time.append(words)
        verdict = "not noticed" if by is None else f"noticed ({by})"
        print(f"{name}: {verdict}: {words}", flush=True)
        target.write_text(without)
        if number % 10 == 0:
            left_s = (time.monotonic() - began) / number * (len(chosen) - number)
            print(
                f"{name}: {number - len(survivors)} of {number} noticed, {left_s / 60:.0f} min left",
                flush=True,
            )
    return Score(len(chosen), len(chosen) - len(survivors), by_time, survivors)


def main() -> None:
    """Try the rooms that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", action="append", choices=ROOMS, help="of these rooms only")
    parser.add_argument("--count", type=int, default=50, help="faults for each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience",
        type=float,
        default=4,
        metavar="TIMES",
        help="tests do not end if they take so many times what they take without a fault",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the scores and what was not noticed as JSON"
    )
    parser.add_argument("--list", action="store_true", help="print the faults, and try none")
    asked = parser.parse_args()
    rooms = asked.room or list(ROOMS)
    if asked.list:
        for name in rooms:
            for mutant, code in drawn(
                ROOMS[name], asked.count, random.Random(f"{asked.seed} {name}")
            ).items():
                print(f"{name}: {shown(mutant, code)[1]}")
        return
    scores = dict[str, dict[str, object]]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "project")
        left_out = shutil.ignore_patterns(
            ".venv", ".git", "__pycache__", ".*_cache", "runs", "shared"
        )
        shutil.copytree(ROOT, copy, ignore=left_out)
        for name in rooms:
            score = tried(name, asked.count, asked.seed, asked.patience, copy)
            scores[name] = score._asdict()
            print(
                f"{name}: {score.noticed} of {score.tried} noticed, {len(score.by_time)} of them by"
                " time only",
                flush=True,
            )
            if asked.out:
                found = {
                    "schema": "monograph-mutants-1",
                    "machine": {"type": "cpu"},
                    "seed": asked.seed,
                    "rooms": scores,
                }
                asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
