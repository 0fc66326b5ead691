"""Score a model's answers: the rewards that `rl.reward` names.

A user's function and a model's code run in processes of their own (`functions`, `solutions`), never
in this one.
"""

import ast
import builtins
import difflib
import hashlib
import json
import math
import re
import statistics
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from monograph.automata import ByteAutomaton, acceptor
from monograph.data.records import few
from monograph.errors import InputRefused, UsageError
from monograph.model.llama import Llama
from monograph.rl import worker
from monograph.rl.numbers import last_number, whole_number
from monograph.rl.processes import Function, Solutions, parts_of, refused
from monograph.storage.code import Code, code_named
from monograph.storage.reading import read_json
from monograph.terminal import warn

TOLERANCE = Fraction(1, 10**6)  # relative, of numbers that are not whole
MOST_SCHEMA_BYTES = 1 << 20
MOST_SHOWN = 60  # letters of a value that is refused
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class FormName(NamedTuple):
    """A form of answers: `kind` and `value` as `monograph.automata.constraint` takes them."""

    kind: str
    value: str | dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the hex sha256 of what is read from a file; empty if nothing is."""
        return (
            hashlib.sha256(json.dumps(self.value).encode()).hexdigest()
            if self.kind == "json_schema"
            else ""
        )


def form_named(regex: str | None, schema: str | None) -> FormName | None:
    """Return the form that a regular expression or a file with a JSON schema describes; None if
    neither is given.

    Raises:
        InputRefused: the file is no JSON, or missing.
        Unreadable: the system failed to read it.
    """
    if regex is not None:
        return FormName("regex", regex)
    if schema is not None:
        return FormName("json_schema", read_json(Path(schema), most_bytes=MOST_SCHEMA_BYTES))
    return None


class Answer(NamedTuple):
    """An answer of the model.

    Attributes:
        prompt: the prompt.
        completion: what the model wrote after it.
        record: the prompt's record in the file of JSON lines.
        where: the record's place, such as "prompts.jsonl:12".
    """

    prompt: str
    completion: str
    record: Mapping[str, Any]
    where: str


class Reward:
    """A reward: what a model's answers are worth.

    Attributes:
        field: the key that each record needs; None if it needs none.
        digest: hex sha256 of what its scores depend on and is read from a file; empty if there is
            nothing.
        teacher: the model whose probabilities of an answer's tokens are its score; None for all
            other rewards.
        unconfined: whether the model's programs may run where the system keeps them from nothing;
            the caller decides.
    """

    field: str | None = None
    expected = ""  # what stands under the key
    digest = ""
    teacher: Llama | None = None
    unconfined = False

    def parts(self) -> dict[str, float]:
        """Return the mean of each named part of the scores since the last call; empty if scores
        have no parts.
        """
        return {}

    def require(self, record: Mapping[str, Any], where: str) -> None:
        """Require that a record holds what the reward needs.

        Raises:
            InputRefused: it does not, or the reward cannot work here at all.
        """
        if self.field is not None and not (self.field in record and self._fits(record[self.field])):
            missing = f"is missing; its keys are {few(list(record))}"
            found = f"is {_shown(record[self.field])}" if self.field in record else missing
            raise InputRefused(
                f"{where}: rl.reward needs {self.expected} under {self.field!r}, which {found}"
            )

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the score of each answer, a finite number.

        Raises:
            InputRefused: a user's function fails; the message names the record.
        """
        return [self._one(answer) for answer in answers]

    def close(self) -> None:
        """End the processes and remove the files of this reward."""

    def _fits(self, value: object) -> bool:
        return True

    def _one(self, answer: Answer) -> float:
        raise NotImplementedError


class _Number(Reward):
    """1 if the number that the completion ends with equals the one under "answer", else 0; see
    `numbers`.
    """

    field = "answer"
    expected = (
        "one number (such as 9500, or a text that ends with #### 9500 or has it in \\boxed{})"
    )

    def _fits(self, value: object) -> bool:
        return whole_number(value) is not None

    def _one(self, answer: Answer) -> float:
        found = last_number(answer.completion)
        wanted = whole_number(answer.record["answer"])
        return float(found is not None and wanted is not None and _equal(found, wanted))


class _Exact(Reward):
    """1 if the completion is the text under "answer" or one of the texts there, up to spaces around
    it, else 0.
    """

    field, expected = "answer", "a text or a list of texts"

    def _fits(self, value: object) -> bool:
        return _are_texts(value)

    def _one(self, answer: Answer) -> float:
        return float(
            answer.completion.strip() in [text.strip() for text in _listed(answer.record["answer"])]
        )


class _Accepted(Reward):
    """1 if an automaton accepts the whole completion without spaces around it, else 0."""

    def __init__(self, automaton: ByteAutomaton, digest: str = "") -> None:
        self._automaton, self.digest = automaton, digest

    def _one(self, answer: Answer) -> float:
        return float(
            self._automaton.accepts(answer.completion.strip().encode("utf-8", "surrogatepass"))
        )


class _Python(Reward):
    """The share of the texts under "tests" that the completion's last fenced block, or else all of
    it, passes.
    """

    field, expected = "tests", "Python code that calls what it tests, a text or a list of texts,"

    def __init__(self) -> None:
        self._solutions: Solutions | None = None

    def require(self, record: Mapping[str, Any], where: str) -> None:
        super().require(record, where)
        if self._solutions is None:
            confined = self._started().confinement()
            if confined is None:
                self.close()
                raise InputRefused(
                    "rl.reward = python: no program can run in a process with limits here; it needs Linux on x86-64 or "
                    "arm64 with seccomp, and as root also a Python that every user can read"
                )
            danger = (
                "rl.reward = python: this system allows no namespaces, so the model's programs can use this user's "
                "files and processes"
            )
            if not confined and not self.unconfined:
                self.close()
                raise InputRefused(
                    f"{danger}: train where namespaces are allowed, or, where such programs can do no harm, add "
                    "--trust-code (in Python trust_code=True)"
                )
            if not confined:
                warn(danger)

    def score(self, answers: Sequence[Answer]) -> list[float]:
        pairs = [(_code(answer.completion), _listed(answer.record["tests"])) for answer in answers]
        return self._started().scores(pairs)

    def close(self) -> None:
        self._solutions = None

    def _fits(self, value: object) -> bool:
        return _are_texts(value) and all(map(_tests_something, _listed(value)))

    def _started(self) -> Solutions:
        self._solutions = self._solutions or Solutions()
        return self._solutions


class _InParts(Reward):
    """The sum of the parts that a function names, or the number that it returns."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[float]] = defaultdict(list)

    def parts(self) -> dict[str, float]:  # noqa: D102 - of the base class
        means = {name: statistics.fmean(values) for name, values in self._parts.items() if name}
        self._parts.clear()
        return means

    def _one(self, answer: Answer) -> float:
        parts = self._scored(answer)
        for name, part in parts.items():
            self._parts[name].append(part)
        # Rounded once, so that the order of the parts' names does not matter.
        return math.fsum(parts.values())

    def _scored(self, answer: Answer) -> dict[str, float]:
        """Return what the function returns, by part."""
        raise NotImplementedError


class Called(_InParts):
    """What a function of (prompt, answer, record) returns: a number, or the sum of the parts that
    it names.
    """

    def __init__(self, function: Callable[[str, str, Mapping[str, Any]], object]) -> None:
        """Take the function, which is called in this process."""
        super().__init__()
        self._function = function

    def _scored(self, answer: Answer) -> dict[str, float]:
        score = self._function(answer.prompt, answer.completion, answer.record)
        parts = None
        with suppress(TypeError, ValueError, RuntimeError):  # of what is no plain data
            parts = parts_of(worker.decoded(worker.encoded(score)))
        if parts is None:
            raise refused(
                answer.where,
                getattr(self._function, "__name__", "the reward"),
                f"returned {score!r:.60}",
            )
        return parts


class _Own(_InParts):
    """The same for a function in a file, which is called in a process of its own."""

    def __init__(self, code: Code, sha256: str) -> None:
        super().__init__()
        self._function = Function(code, sha256)
        self.digest = sha256

    def require(self, record: Mapping[str, Any], where: str) -> None:
        self._function.start()

    def close(self) -> None:
        self._function.close()

    def _scored(self, answer: Answer) -> dict[str, float]:
        return self._function.score(answer.prompt, answer.completion, answer.record, answer.where)


class Taught(Reward):
    """The mean over an answer's tokens of log-probability of a teacher - of the student: minus the
    reverse KL.

    `Drawer.advantages` computes it, once the caller has loaded and set `teacher`.
    """


# Rewards that have no keys of their own.
REWARDS: dict[str, type[Reward]] = {"number": _Number, "exact": _Exact, "python": _Python}
_FORMS = [*REWARDS, "regex", "json-schema", "teacher", "FILE.py:FUNCTION"]


def reward_of(
    name: str,
    vouched: Mapping[str, str] | None = None,
    *,
    regex: str | None = None,
    schema: str | None = None,
) -> Reward:
    r"""Return the reward that `rl.reward` names; nothing is started before its first `require` or
    `score`.

    - "number": 1 if the completion's last number equals the record's "answer": whole numbers
      exactly, others up to TOLERANCE. The answer may be a number or a text such as "#### 1,234";
      `monograph.rl.numbers` has the grammar.
    - "exact": 1 if the completion is the record's "answer", a text or a list of accepted ones, up
      to spaces around it.
    - "regex": 1 if `regex` matches the whole completion, up to spaces around it; see `acceptor`.
    - "json-schema": 1 if the completion is JSON that `schema` allows, up to spaces around it, in
      the compact form that `generate --json-schema` writes.
    - "python": the share of the record's "tests" that the completion's code passes; see
      `monograph.rl.processes`.
    - "teacher": see `Taught`; the caller loads the teacher.
    - "FILE.py:FUNCTION": what the function returns for (prompt, completion, record), or the sum if
      it returns several numbers by their names.

    All but the last three give 1 or 0.

    Args:
        name: the reward's name.
        vouched: the digest of each Python file that may run, by the value that names it; None if
            the caller names the reward here and now, and so the file as it is.
        regex: the regular expression of the reward "regex".
        schema: the file of the reward "json-schema".

    Raises:
        UsageError: there is no such reward, or its pattern or schema is missing.
        InputRefused: nobody vouches for the Python file, or it cannot be read.
        InputRefused: the pattern or the schema cannot be used.
        Unreadable: the system failed to read the schema.
    """
    if code := code_named(name):
        sha256 = code.digest() if vouched is None else vouched.get(name)
        if sha256 is None:
            raise InputRefused(f"rl.reward = {name}: nobody has said that this file may run")
        return _Own(code, sha256)
    if name in REWARDS:
        return REWARDS[name]()
    if name == "teacher":
        return Taught()
    if name in ("regex", "json-schema"):
        form = form_named(regex, None) if name == "regex" else form_named(None, schema)
        if form is None:
            raise UsageError(
                f"rl.reward = {name}: give rl.reward_{'regex' if name == 'regex' else 'schema'}, too"
            )
        return _Accepted(acceptor(*form), form.digest)
    near = difflib.get_close_matches(name, _FORMS[:-1], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"rl.reward = {name!r}: expected {', '.join(_FORMS[:-1])} or {_FORMS[-1]}{hint}"
    )


def _shown(value: object) -> str:
    """Return a value in one short line; of a long text the end, where an answer is."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"...{text[-MOST_SHOWN:]}"


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _are_texts(value: object) -> TypeGuard[str | list[str]]:
    """Return whether this is a text, or a list of at least one."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(each, str) for each in texts)


def _tests_something(test: str) -> bool:
    """Return whether this is Python that does more than define, and reads a name that neither it
    nor Python has.

    Tests in a function that nobody calls would pass for any solution.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    defining = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    done = [node for line in tree.body if not isinstance(line, defining) for node in ast.walk(line)]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    return any(isinstance(node, ast.Call) for node in done) and any(
        node.id not in own for node in names
    )


def _code(completion: str) -> str:
    """Return the completion's last fenced block, which a cut may have left open, or else all of it."""
    return textwrap.dedent(([completion] + _FENCED.findall(completion))[-1])


def _equal(found: Fraction, wanted: Fraction) -> bool:
    if found.denominator == wanted.denominator == 1:
        return found == wanted
    return abs(found - wanted) <= TOLERANCE * abs(wanted)
