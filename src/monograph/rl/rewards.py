"""Score a model's answers: the rewards that `rl.reward` names.

A user's file and a model's programs run in separate processes (`monograph.rl.processes`).

`monograph.config.keys` makes keys of the settings from the table `REWARDS`. So this file is imported
whenever settings are read, and must not import torch or numpy itself. A reward that needs one of them
imports it where it is used.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import json
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from monograph.data.records import list_names
from monograph.errors import InputRefused, UsageError
from monograph.ranges import between, whole
from monograph.rl import worker
from monograph.rl.environments import KEY as ENVIRONMENT_KEY
from monograph.rl.environments import Environments, FileEnvironments
from monograph.rl.numbers import answer_number, last_number
from monograph.rl.parameters import Parameter, values_of
from monograph.rl.processes import FunctionProcess, ProgramScorer, function_error, score_parts
from monograph.storage.code import Code, code_named
from monograph.storage.reading import read_json
from monograph.terminal import warn

if TYPE_CHECKING:
    from monograph.model.llama import Llama

# What a value that names code looks like.
OWN_FUNCTION = "FILE.py:FUNCTION"
OWN_CLASS = "FILE.py:CLASS"
# The relative difference up to which two numbers are equal, unless both are whole.
TOLERANCE = Fraction(1, 10**6)
MAX_SCHEMA_BYTES = 1 << 20
# The number of characters of a refused value that a message shows.
MAX_SHOWN_CHARACTERS = 60
# A fenced block of Markdown; the group is its content. The last block may lack its end.
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class FormName(NamedTuple):
    """The form that answers must have, as the settings give it.

    Attributes:
        kind: "regex" or "json_schema".
        value: the regular expression or the schema, as `monograph.automata.constraint` takes it.
    """

    kind: str
    value: str | dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the hex sha256 of a schema; "" for a regular expression, which is not from a file."""
        if self.kind != "json_schema":
            return ""
        return hashlib.sha256(json.dumps(self.value).encode()).hexdigest()


def form_named(regex: str | None, schema: str | None) -> FormName | None:
    """Return the form of a regular expression or of a file with a JSON schema.

    Args:
        regex: the regular expression; None: not given.
        schema: the path of the file with the schema; None: not given.

    Returns:
        the form; None if neither is given.

    Raises:
        InputRefused: the file is not JSON, or is missing.
        Unreadable: the system failed to read the file.
    """
    if regex is not None:
        return FormName("regex", regex)
    if schema is not None:
        return _schema_in(Path(schema))
    return None


def _schema_in(file: Path) -> FormName:
    """Return the form of the JSON schema in a file."""
    return FormName("json_schema", read_json(file, most_bytes=MAX_SCHEMA_BYTES))


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


class AnswerScore(NamedTuple):
    """The score of an answer.

    Attributes:
        value: the score, a finite number.
        parts: the named parts that add up to it; empty if it has no parts.
    """

    value: float
    parts: Mapping[str, float] = {}


def score_of(parts: Mapping[str, float]) -> AnswerScore:
    """Return the score with these parts; the part "" is a plain number."""
    # fsum rounds once, so the order of the parts does not matter.
    value = math.fsum(parts.values())
    return AnswerScore(value, {name: part for name, part in parts.items() if name})


class Reward:
    """A reward: it scores a model's answers.

    Attributes:
        field: the key that each record needs; None: no key.
        expected: what the value under this key must be, for messages.
        digest: hex sha256 of the file on which its scores depend; "" if they depend on no file.
        teacher: the model that gives an answer its score, by its probabilities of the answer's tokens;
            None for all other rewards.
        environments: what the model talks to in episodes of several turns. They also score each turn.
            None for all other rewards.
        unconfined: whether programs that the model writes may run on a system that cannot confine
            them. The caller sets it.
    """

    field: str | None = None
    expected = ""
    digest = ""
    teacher: Llama | None = None
    environments: Environments | None = None
    unconfined = False

    def require(self, record: Mapping[str, Any], where: str) -> None:
        """Require that a record has what the reward reads.

        Raises:
            InputRefused: it does not, or the reward cannot work on this machine.
        """
        if self.field is None:
            return
        if self.field not in record:
            problem = f"is missing; its keys are {list_names(list(record))}"
        elif not self._is_valid(record[self.field]):
            problem = f"is {_shown(record[self.field])}"
        else:
            return
        raise InputRefused(
            f"{where}: rl.reward needs {self.expected} under {self.field!r}, which {problem}"
        )

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the score of each answer, a finite number.

        Raises:
            InputRefused: a user's function fails; the message names the record.
        """
        return [self._score_one(answer) for answer in answers]

    def scores(self, answers: Sequence[Answer]) -> list[AnswerScore]:
        """Return what `score` returns, with the parts of each score."""
        return [AnswerScore(value) for value in self.score(answers)]

    def close(self) -> None:
        """End the processes of this reward."""

    def _is_valid(self, value: object) -> bool:
        """Return whether a value can stand under `field`."""
        return True

    def _score_one(self, answer: Answer) -> float:
        raise NotImplementedError


class _NumberReward(Reward):
    """1 if the last number of the completion equals the number under "answer", else 0.

    `monograph.rl.numbers` says what a number is.
    """

    field = "answer"
    expected = (
        "one number (such as 9500, or a text that ends with #### 9500 or has it in \\boxed{})"
    )

    def _is_valid(self, value: object) -> bool:
        return answer_number(value) is not None

    def _score_one(self, answer: Answer) -> float:
        number = last_number(answer.completion)
        expected = answer_number(answer.record["answer"])
        if number is None or expected is None:
            return 0.0
        return float(_equal(number, expected))


class _ExactReward(Reward):
    """1 if the completion is the text under "answer", or a text of the list there, else 0.

    Spaces around the texts are ignored.
    """

    field = "answer"
    expected = "a text or a list of texts"

    def _is_valid(self, value: object) -> bool:
        return _are_texts(value)

    def _score_one(self, answer: Answer) -> float:
        accepted = [text.strip() for text in _as_list(answer.record["answer"])]
        return float(answer.completion.strip() in accepted)


class _FormReward(Reward):
    """1 if the whole completion, without spaces around it, has a form, else 0."""

    def __init__(self, form: FormName) -> None:
        from monograph.automata import acceptor  # numpy comes with it

        self._automaton = acceptor(form.kind, form.value)
        self.digest = form.digest

    def _score_one(self, answer: Answer) -> float:
        text = answer.completion.strip().encode("utf-8", "surrogatepass")
        return float(self._automaton.accepts(text))


class _ProgramReward(Reward):
    """The share of the texts under "tests" that the completion's program passes.

    The program is the last fenced block of the completion, or all of it if there is no such block.
    """

    field = "tests"
    expected = "Python code that calls what it tests, a text or a list of texts,"

    def __init__(self) -> None:
        self._scorer: ProgramScorer | None = None

    def require(self, record: Mapping[str, Any], where: str) -> None:
        super().require(record, where)
        if self._scorer is not None:
            return
        is_confined = self._start().confinement()
        if is_confined is None:
            self.close()
            raise InputRefused(
                "rl.reward = python: no program can run in a process with limits here; it needs Linux on x86-64 or "
                "arm64 with seccomp, and as root also a Python that every user can read"
            )
        if is_confined:
            return
        danger = (
            "rl.reward = python: this system allows no namespaces, so the model's programs can use this user's "
            "files and processes"
        )
        if not self.unconfined:
            self.close()
            raise InputRefused(
                f"{danger}: train where namespaces are allowed, or, where such programs can do no harm, add "
                "--trust-code (in Python trust_code=True)"
            )
        warn(danger)

    def score(self, answers: Sequence[Answer]) -> list[float]:
        pairs = [(_code(answer.completion), _as_list(answer.record["tests"])) for answer in answers]
        return self._start().scores(pairs)

    def close(self) -> None:
        self._scorer = None

    def _is_valid(self, value: object) -> bool:
        return _are_texts(value) and all(map(_tests_something, _as_list(value)))

    def _start(self) -> ProgramScorer:
        """Return the scorer of programs, which is made at the first call."""
        self._scorer = self._scorer or ProgramScorer()
        return self._scorer


class _RewardOfParts(Reward):
    """The sum of the named parts that a function returns, or the number that it returns."""

    def score(self, answers: Sequence[Answer]) -> list[float]:  # noqa: D102 - of the base class
        return [score.value for score in self.scores(answers)]

    def scores(self, answers: Sequence[Answer]) -> list[AnswerScore]:  # noqa: D102 - of the base class
        return [score_of(self._call(answer)) for answer in answers]

    def _call(self, answer: Answer) -> dict[str, float]:
        """Return the parts that the function returns; a plain number is the part ""."""
        raise NotImplementedError


class FunctionReward(_RewardOfParts):
    """The score that a function of (prompt, answer, record) returns.

    The function returns a number, or {name: number} of parts, whose sum is the score.
    """

    def __init__(self, function: Callable[[str, str, Mapping[str, Any]], object]) -> None:
        """Take the function, which is called in this process."""
        self._function = function

    def _call(self, answer: Answer) -> dict[str, float]:
        score = self._function(answer.prompt, answer.completion, answer.record)
        parts = None
        # Encoding raises these for a score that is not plain data.
        with suppress(TypeError, ValueError, RuntimeError):
            parts = score_parts(worker.decoded(worker.encoded(score)))
        if parts is None:
            raise function_error(
                answer.where,
                getattr(self._function, "__name__", "the reward"),
                f"returned {score!r:.60}",
            )
        return parts


class _FileFunctionReward(_RewardOfParts):
    """The score that a function in a file returns, as in `FunctionReward`.

    The function is called in a separate process.
    """

    def __init__(self, code: Code, sha256: str) -> None:
        self._function = FunctionProcess(code, sha256)
        self.digest = sha256

    def require(self, record: Mapping[str, Any], where: str) -> None:
        self._function.start()

    def close(self) -> None:
        self._function.close()

    def _call(self, answer: Answer) -> dict[str, float]:
        return self._function.score(answer.prompt, answer.completion, answer.record, answer.where)


class EnvironmentReward(Reward):
    """What an environment gives, over the turns of an episode; see `monograph.rl.environments`.

    `EpisodeDrawer` samples the episodes, and gets their scores from the environments, so this class has
    no `score`.

    Attributes:
        environments: the environments of the episodes.
        turns: the maximum number of answers of an episode.
        discount: the reward of turn t = 0, 1, ... is multiplied by discount^t.
    """

    environments: Environments

    def __init__(
        self, environments: Environments, turns: int, discount: float, digest: str = ""
    ) -> None:
        """Set the attributes; `digest` is the digest of the file that defines the environments."""
        self.environments = environments
        self.turns = turns
        self.discount = discount
        self.digest = digest

    def close(self) -> None:
        """End the processes of the environments."""
        self.environments.close()


class TeacherReward(Reward):
    """How much likelier a teacher finds an answer than the model in training, its student, does.

    The reward is the mean, over the tokens of the answer, of the teacher's log-probability minus the
    student's. It estimates minus the KL divergence KL(student || teacher) per token. The caller loads
    the teacher and sets `teacher`. `Drawer.teacher_advantages` computes the differences.
    """


@dataclass(frozen=True)
class NamedReward:
    """A reward that the key rl.reward can name.

    Attributes:
        meaning: what an answer's score is, in one line, as the key says it.
        make: returns the reward, given the values of its parameters by name. A model is not among
            the values: the caller loads it and sets it as `Reward.teacher`.
        parameters: its parameters, each of which is a key of [rl].
        judges_tokens: whether it scores each token of an answer. Keys about the scores of whole
            answers then have no meaning.
    """

    meaning: str
    make: Callable[..., Reward]
    parameters: tuple[Parameter, ...] = ()
    judges_tokens: bool = False


def _regex_reward(regex: str) -> Reward:
    return _FormReward(FormName("regex", regex))


def _schema_reward(schema: str) -> Reward:
    return _FormReward(_schema_in(Path(schema)))


def _environment_reward(environment: VouchedCode, turns: int, discount: float) -> Reward:
    environments = FileEnvironments(*environment)
    return EnvironmentReward(environments, turns, discount, environment.sha256)


ENVIRONMENT = "environment"
# The names that the key rl.reward takes, besides FILE.py:FUNCTION.
REWARDS = {
    "number": NamedReward("1 if its last number is the record's answer", _NumberReward),
    "exact": NamedReward("1 if it is the record's answer", _ExactReward),
    "regex": NamedReward(
        "1 if rl.reward_regex matches it",
        _regex_reward,
        (
            Parameter(
                "rl.reward_regex",
                "With rl.reward = regex: what an answer matches.",
                "a regular expression",
                example="[0-9]+",
            ),
        ),
    ),
    "json-schema": NamedReward(
        "1 if it is JSON that rl.reward_schema allows",
        _schema_reward,
        (
            Parameter(
                "rl.reward_schema",
                "With rl.reward = json-schema: the schema.",
                "a file with a JSON schema",
                example="FILE.json",
            ),
        ),
    ),
    ENVIRONMENT: NamedReward(
        "what rl.environment gives, over several turns",
        _environment_reward,
        (
            Parameter(
                ENVIRONMENT_KEY,
                "With rl.reward = environment: the class that the model talks to.",
                OWN_CLASS,
                example=OWN_CLASS,
                is_code=True,
            ),
            Parameter(
                "rl.turns",
                "With rl.reward = environment: maximum number of answers in an episode.",
                whole(1, 1000),
                default=8,
            ),
            Parameter(
                "rl.discount",
                "With rl.reward = environment: each turn's reward counts this many times the one before it.",
                between(0, 1),
                default=1.0,
            ),
        ),
    ),
    "python": NamedReward("the share of the record's tests that its code passes", _ProgramReward),
    "teacher": NamedReward(
        "how much likelier rl.teacher finds its tokens than the model does",
        TeacherReward,
        (
            Parameter(
                "rl.teacher",
                "With rl.reward = teacher: the model that scores each token.",
                "a run or a folder",
                example="RUN",
                is_model=True,
            ),
        ),
        judges_tokens=True,
    ),
}


def reward_of(name: str, vouched: Mapping[str, str] | None = None, **parameters: object) -> Reward:
    r"""Return the reward that `rl.reward` names.

    Its processes start at its first `require` or `score`.

    - "number": 1 if the completion's last number equals the record's "answer". Whole numbers must be
      equal, others may differ by TOLERANCE. The answer is a number, or a text such as "#### 1,234";
      `monograph.rl.numbers` has the grammar.
    - "exact": 1 if the completion is the record's "answer", a text or a list of accepted texts.
    - "regex": 1 if `regex` matches the whole completion; see `monograph.automata.acceptor`.
    - "json-schema": 1 if the completion is JSON that the file `schema` allows, in the compact form
      that `generate --json-schema` writes.
    - "python": the share of the record's "tests" that the completion's code passes; see
      `monograph.rl.processes`.
    - "teacher": see `TeacherReward`; the caller loads the teacher.
    - "FILE.py:FUNCTION": the number that the function returns for (prompt, completion, record), or
      the sum of the numbers if it returns several by name.

    The first four are 1 or 0. "exact", "regex" and "json-schema" ignore spaces around the completion.

    Args:
        name: the reward's name.
        vouched: the digest of each Python file that may run, by the value that names the file; None
            if the caller names the reward itself, and so trusts the file as it is.
        parameters: values of the reward's parameters, by their names in `REWARDS`; None stands for
            a value that is not given. Models are left out.

    Raises:
        UsageError: there is no such reward or no such parameter, or a parameter is missing or out
            of range.
        InputRefused: `vouched` lacks the Python file, the file cannot be read, or the pattern or
            the schema cannot be used.
        Unreadable: the system failed to read the schema.
    """
    code = code_named(name)
    if code is None and name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"rl.reward = {name!r}: expected {', '.join(REWARDS)} or {OWN_FUNCTION}{hint}"
        )
    declared = [parameter for parameter in parameters_of(name) if not parameter.is_model]
    names = [parameter.name for parameter in declared]
    for argument, value in parameters.items():
        if value is not None and argument not in names:
            has = ", ".join(names) or "no parameters"
            raise UsageError(f"{argument} does not go with rl.reward = {name}, which has {has}")
    if code is None:
        values = values_of(declared, parameters, f"rl.reward = {name}")
        for parameter in declared:
            if parameter.is_code:
                code_name = values[parameter.name]
                values[parameter.name] = vouched_code(parameter.key, code_name, vouched, OWN_CLASS)
        return REWARDS[name].make(**values)
    return _FileFunctionReward(*vouched_code("rl.reward", name, vouched, OWN_FUNCTION))


class VouchedCode(NamedTuple):
    """A function or class in a Python file that may run.

    Attributes:
        code: the function or class.
        sha256: the digest that the file must have.
    """

    code: Code
    sha256: str


def vouched_code(
    key: str, value: object, vouched: Mapping[str, str] | None, expected: str
) -> VouchedCode:
    """Return the code that the value of a key names.

    Args:
        key: the key.
        value: its value.
        vouched: see `reward_of`.
        expected: what the value must be, for messages.

    Raises:
        UsageError: the value names no code.
        InputRefused: `vouched` lacks the file, or it cannot be read.
    """
    name = str(value or "")
    code = code_named(name)
    if code is None:
        raise UsageError(f"{key} = {name!r}: expected {expected}")
    sha256 = code.digest() if vouched is None else vouched.get(name)
    if sha256 is None:
        raise InputRefused(f"{key} = {name}: nobody has said that this file may run")
    return VouchedCode(code, sha256)


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of the reward that `rl.reward` names; a user's function has none."""
    return REWARDS[name].parameters if name in REWARDS else ()


def _shown(value: object) -> str:
    """Return a value in one short line: of a long text the end, since a text ends with its answer."""
    text = repr(value)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"...{text[-MAX_SHOWN_CHARACTERS:]}"


def _as_list(value: str | list[str]) -> list[str]:
    """Return a list of texts unchanged, and a text as a list of this text alone."""
    return [value] if isinstance(value, str) else value


def _are_texts(value: object) -> TypeGuard[str | list[str]]:
    """Return whether this is a text, or a list of at least one text."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(each, str) for each in texts)


def _tests_something(test: str) -> bool:
    """Return whether this is Python code that can fail for a wrong solution.

    Code fails for no solution if it only defines functions that are never called, or if it uses no name
    of the solution. So it must have a call outside of definitions, and must read a name that is neither
    its own nor a builtin.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    executed = [line for line in tree.body if not isinstance(line, definition)]
    has_call = any(isinstance(node, ast.Call) for line in executed for node in ast.walk(line))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own_names = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    known_names = own_names | set(dir(builtins))
    reads_solution = any(node.id not in known_names for node in names)
    return has_call and reads_solution


def _code(completion: str) -> str:
    """Return the last fenced block of the completion, or all of it if there is none.

    The last block may lack its end if the answer was cut.
    """
    blocks = _FENCED.findall(completion)
    code = blocks[-1] if blocks else completion
    return textwrap.dedent(code)


def _equal(number: Fraction, expected: Fraction) -> bool:
    """Return whether two numbers are equal: exactly if both are whole, otherwise up to TOLERANCE."""
    if number.denominator == expected.denominator == 1:
        return number == expected
    return abs(number - expected) <= TOLERANCE * abs(expected)
