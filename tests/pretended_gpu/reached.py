"""Which lines of the package only a GPU reaches, and which of them were reached.

    PYTHONPATH=tests python -m pretended_gpu.reached            lists the lines, by reading the code
    PYTHONPATH=tests python -m pretended_gpu.reached FOLDER     those that coverage's files in the folder do not have

A line is a GPU's if it is

- in a file that imports Triton when it is imported, or imports such a file: a CPU's torch has none;
- under a condition that asks for a GPU (`x.is_cuda`, `type == "cuda"`, `torch.cuda.is_available()`),
  or behind a return of everything else. A file may give such a condition a name (`is_on_gpu = ...`),
  or have a thing that is None elsewhere (`stream = Stream() if cuda else None`). Where plans are made,
  such conditions ask for the device of a plan, and do not count: a CPU plans for GPUs;
- behind a call of `torch.cuda` that has no condition, in the same block;
- in a function or class that is named after CUDA, whose constructor is a GPU's, or that only a GPU's
  lines mention.

So a line that is on the list may be reached by a CPU, too; it is reached on a GPU then, or has a reason.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "monograph"
# Reasons for lines that no test on a pretended sm_90 executes, by how the line's name begins: its
# file, its function and its text.
_OLD_TORCH = "torch 2.11 alone needs it"
CANNOT = {
    "compat/inductor.py split_cat_options: lowering": _OLD_TORCH,
    "compat/inductor.py split_cat_options: concatenate_in_one_kernel": _OLD_TORCH,
    "compat/inductor.py split_cat_options.concatenate:": _OLD_TORCH,
    'compat/inductor.py split_cat_options: return {"max_pointwise': _OLD_TORCH,
    "session/setup.py make_engine: model = nn.SyncBatchNorm":
        "its kernels are torch's own: tests/distributed/test_batch_norms.py has their equations on a CPU",
}  # fmt: skip
# Where conditions ask for the device of a plan.
_OF_PLANS = ("planner/", "predict/", "cards.py", "commands/plan.py")
# What torch.cuda answers where there is no GPU.
_ANSWERS_ANYWHERE = ("is_available", "is_initialized", "device_count")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Line(NamedTuple):
    """The first line of a statement.

    Attributes:
        file: its file, from the package on.
        number: from 1 on.
        function: the function and class it is in, such as "Streams.run".
        text: what it says.
    """

    file: str
    number: int
    function: str
    text: str

    @property
    def name(self) -> str:
        """Its name, which stays when lines above it come and go."""
        return f"{self.file} {self.function}: {self.text}"


class Conditions:
    """What asks for a GPU in one file.

    Attributes:
        signs: names that the file gives a condition, and what `asks` returns for it.
        absent: names of what is None where there is no GPU.
    """

    def __init__(self, tree: ast.Module, of_plans: bool) -> None:
        """Read the file's assignments."""
        self.signs: dict[str, int] = {}
        self.absent: set[str] = set()
        self._of_plans = of_plans
        if of_plans:
            return
        for node in ast.walk(tree):
            match node:
                case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
                    self._assigned(_last_name(target), value)

    def _assigned(self, name: str, value: ast.expr) -> None:
        if sign := self.asks(value):
            self.signs[name] = sign
        match value:
            case ast.IfExp(test, _, ast.Constant(None)) if self.asks(test) == 1:
                self.absent.add(name)

    def asks(self, test: ast.expr) -> int:
        """Return 1 if a condition holds on a GPU only, -1 if it fails on a GPU only, else 0."""
        if self._of_plans:
            return 0
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                return -self.asks(operand)
            case ast.BoolOp(operator, values):
                signs = [self.asks(value) for value in values]
                if isinstance(operator, ast.And):
                    return int(1 in signs and -1 not in signs)
                return -int(-1 in signs and 1 not in signs)
            case ast.Call(ast.Attribute(ast.Attribute(attr="cuda"), "is_available")):
                return 1
            case ast.Attribute(attr="is_cuda") | ast.Name("cuda" | "on_cuda"):
                return 1
            case ast.Compare(ast.Attribute(attr="type"), [operator], [ast.Constant("cuda")]):
                return 1 if isinstance(operator, ast.Eq) else -1
            case ast.Compare(ast.Attribute(attr="type"), [operator], [ast.Constant("cpu")]):
                return -1 if isinstance(operator, ast.Eq) else 1
            case ast.Compare(left, [operator], [ast.Constant(None)]):
                if _last_name(left) in self.absent:
                    return 1 if isinstance(operator, ast.IsNot) else -1
            case ast.Name() | ast.Attribute():
                name = _last_name(test)
                return 1 if name in self.absent else self.signs.get(name, 0)
        return 0

    def parts(self, node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
        """Yield the nodes within a node, and whether a condition within it leads to them on a GPU
        only.
        """
        match node:
            case ast.IfExp(test, body, orelse):
                sign = self.asks(test)
                yield from [(test, False), (body, sign == 1), (orelse, sign == -1)]
            case ast.BoolOp(operator, values):
                leads = 1 if isinstance(operator, ast.And) else -1
                behind = False
                for value in values:
                    yield value, behind
                    behind = behind or self.asks(value) == leads
            case _:
                yield from ((child, False) for child in ast.iter_child_nodes(node))

    def needs_gpu(self, node: ast.AST) -> bool:
        """Return whether an expression calls `torch.cuda` wherever it is computed."""
        match node:
            case ast.Lambda():
                return False
            case ast.Call(ast.Attribute(ast.Attribute(ast.Name("torch"), "cuda"), name)):
                if name not in _ANSWERS_ANYWHERE:
                    return True
        return any(self.needs_gpu(part) for part, behind in self.parts(node) if not behind)


def _last_name(node: ast.AST) -> str:
    """Return `c` of `a.b.c`."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


class File:
    """A file's statements, and which of them are a GPU's.

    Attributes:
        statements: all of them, with the function each is in, but those that say nothing at run time.
        gpu: those that are a GPU's.
        definitions: its functions and classes, by the names that `statements` has.
        mentions: for each name that an expression mentions, the statement it is in, and whether a
            condition within this statement leads to it on a GPU only.
    """

    def __init__(self, tree: ast.Module, imports_triton: bool, of_plans: bool) -> None:
        """Read a file."""
        self.conditions = Conditions(tree, of_plans)
        self.statements: dict[ast.stmt, str] = {}
        self.gpu: set[ast.stmt] = set()
        self.definitions: dict[str, _Definition] = {}
        self.mentions: defaultdict[str, list[tuple[ast.stmt, bool]]] = defaultdict(list)
        self._block(tree.body, imports_triton, "")

    def _block(self, body: Sequence[ast.stmt], inside: bool, function: str) -> None:
        """Read a block; `inside`: it is a GPU's."""
        needing = next((at for at, each in enumerate(body) if self._needs_gpu(each)), None)
        if needing is not None and not any(map(_may_leave, body[:needing])):
            needing = 0
        for at, statement in enumerate(body):
            inside = inside or at == needing
            self._statement(statement, inside, function)
            if isinstance(statement, ast.If) and not statement.orelse:
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                inside = inside or (leaves and self.conditions.asks(statement.test) == -1)

    def _statement(self, statement: ast.stmt, inside: bool, function: str) -> None:
        """Read a statement and its blocks."""
        if isinstance(statement, _DEFINITIONS):
            self._definition(statement, inside, function)
            return
        if _has_code(statement):
            self.statements[statement] = function
            if inside:
                self.gpu.add(statement)
        for node in _expressions(statement):
            self._mentioned(node, statement, False)
        sign = self.conditions.asks(statement.test) if isinstance(statement, ast.If) else 0
        for name, leads in (("body", 1), ("orelse", -1), ("finalbody", 0)):
            self._block(
                getattr(statement, name, []), inside or (sign != 0 and sign == leads), function
            )
        for each in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            self._block(each.body, inside, function)

    def _definition(self, statement: _Definition, inside: bool, function: str) -> None:
        name = f"{function}.{statement.name}".removeprefix(".")
        self.definitions[name] = statement
        for node in _expressions(statement):
            self._mentioned(node, statement, False)
        self._block(statement.body, inside or "cuda" in statement.name.lower(), name)
        if isinstance(statement, ast.ClassDef):
            made = [each for each in statement.body if _last_defined(each) == "__init__"]
            if made and all(each in self.gpu for each in self._within(made)):
                self.add(statement.body)

    def _mentioned(self, node: ast.AST, statement: ast.stmt, behind: bool) -> None:
        match node:
            case ast.Name(name, ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                self.mentions[name].append((statement, behind))
            case ast.Constant(str() as text) if ":" in text:  # such as "module:Name"
                self.mentions[text.rpartition(":")[2]].append((statement, behind))
        for part, leads in self.conditions.parts(node):
            self._mentioned(part, statement, behind or leads)

    def _needs_gpu(self, statement: ast.stmt) -> bool:
        """Return whether a statement calls `torch.cuda` whenever it is executed."""
        if isinstance(statement, _DEFINITIONS):
            return False
        if any(self.conditions.needs_gpu(node) for node in _expressions(statement)):
            return True
        always = statement.body if isinstance(statement, ast.With | ast.Try) else []
        return any(self._needs_gpu(each) for each in always)

    def _within(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements of a block and of its inner blocks that have code."""
        for outer in body:
            for node in ast.walk(outer):
                if isinstance(node, ast.stmt) and node in self.statements:
                    yield node

    def add(self, body: Iterable[ast.stmt]) -> None:
        """Note that a block and its inner blocks are a GPU's."""
        self.gpu.update(self._within(body))


def _may_leave(statement: ast.stmt) -> bool:
    """Return whether a statement may end its block, or hand something to the caller."""
    leaving = ast.Return | ast.Raise | ast.Continue | ast.Break | ast.Yield | ast.YieldFrom
    return any(isinstance(node, leaving) for node in ast.walk(statement))


def _last_defined(statement: ast.stmt) -> str:
    return statement.name if isinstance(statement, _DEFINITIONS) else ""


def _has_code(statement: ast.stmt) -> bool:
    """Return whether Python executes a line for a statement."""
    match statement:
        case ast.Expr(ast.Constant()) | ast.Global() | ast.Nonlocal() | ast.AnnAssign(value=None):
            return False
        case ast.Import() | ast.ImportFrom():
            return False
    return True


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement computes itself, not its blocks, and no annotation."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.expr | ast.withitem | ast.keyword | ast.pattern):
                yield each
            elif isinstance(each, ast.ExceptHandler | ast.match_case | ast.arguments):
                yield from _expressions(each)


def files(root: Path = PACKAGE) -> dict[Path, File]:
    """Return the files of a package, read."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(root.rglob("*.py"))}
    imports = {path: set(_imported(tree)) for path, tree in trees.items()}
    triton = {"triton"}
    while True:
        more = {
            ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
            for path, names in imports.items()
            if names & triton
        }
        if more <= triton:
            break
        triton |= more
    found = dict[Path, File]()
    for path, tree in trees.items():
        of_plans = path.relative_to(root).as_posix().startswith(_OF_PLANS)
        found[path] = File(tree, bool(imports[path] & triton), of_plans)
    _add_what_only_a_gpu_mentions(list(found.values()))
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports when it is imported."""
    for statement in tree.body:
        match statement:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(str() as module):
                yield module


def _add_what_only_a_gpu_mentions(every: list[File]) -> None:
    """Note functions and classes that are mentioned, and by a GPU's lines alone."""
    count = Counter(each.name for file in every for each in file.definitions.values())
    mentions = defaultdict[str, list[tuple[File, ast.stmt, bool]]](list)
    for file in every:
        for name, places in file.mentions.items():
            mentions[name] += [(file, *place) for place in places]
    waiting = [
        (file, name, each)
        for file in every
        for name, each in file.definitions.items()
        if count[each.name] == 1 and mentions[each.name]
    ]
    grows = True
    while grows:
        grows = False
        for candidate in list(waiting):
            file, name, each = candidate
            outside = [
                behind or at in where.gpu
                for where, at, behind in mentions[each.name]
                if where is not file
                or not f"{where.statements.get(at, '')}.".startswith(f"{name}.")
            ]
            if outside and all(outside):
                file.add(each.body)
                waiting.remove(candidate)
                grows = True


def lines(root: Path = PACKAGE) -> list[Line]:
    """Return the lines that only a GPU reaches."""
    found = list[Line]()
    for path, file in files(root).items():
        text = path.read_text(encoding="utf-8").splitlines()
        numbered = sorted((each.lineno, file.statements[each]) for each in file.gpu)
        name = str(path.relative_to(root))
        found += [Line(name, at, function, text[at - 1].strip()) for at, function in numbered]
    return found


def settings(folder: Path) -> str:
    """Return coverage's settings for runs that write to a folder, in whatever process they are."""
    return f"""[run]
parallel = true
data_file = {folder}/coverage
source = {PACKAGE}
patch = subprocess, _exit
"""


def trace_backward() -> None:
    """Let coverage see backward passes, too, which torch computes in a thread of its own for a GPU.

    Python tells coverage of new threads, but not of those that it did not begin.
    """
    from torch.autograd.function import BackwardCFunction

    if (trace := threading.gettrace()) is None:
        return
    apply = BackwardCFunction.apply

    @functools.wraps(apply)
    def traced(self: Any, *arguments: Any) -> Any:
        if sys.gettrace() is None:
            sys.settrace(trace)  # of what is called from here on
        return apply(self, *arguments)

    BackwardCFunction.apply = traced  # type: ignore[method-assign]


def executed(folder: Path) -> dict[str, set[int]]:
    """Return the lines of the package that the runs executed, by file."""
    import coverage

    found = defaultdict[str, set[int]](set)
    for file in folder.glob("coverage.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            found[str(Path(name).relative_to(PACKAGE))].update(data.lines(name) or [])
    return found


def judged(
    mine: Sequence[Line], reached: Mapping[str, set[int]], reasons: Mapping[str, str]
) -> tuple[list[str], int]:
    """Return what there is to say of lines that were not reached, and how many have no reason.

    A reason that no such line needs is said, too.
    """
    said, wrong = list[str](), 0
    needed = set[str]()
    missed = [line for line in mine if line.number not in reached.get(line.file, ())]
    for line in missed:
        keys = [key for key in reasons if line.name.startswith(key)]
        needed.update(keys)
        wrong += not keys
        reason = f"   # {reasons[keys[0]]}" if keys else ""
        said.append(f"{line.file}:{line.number} {line.function}: {line.text}{reason}")
    unneeded = [key for key in reasons if key not in needed]
    said += [f"a reason for no line that was not reached: {key}" for key in unneeded]
    said.append(
        f"{len(mine) - len(missed)} of {len(mine)} lines that only a GPU reaches were reached, "
        f"{wrong} are not explained"
    )
    return said, wrong


def main(arguments: list[str]) -> int:
    """Print the lines; with a folder those that were not reached, and return 1 if one has no reason."""
    if not arguments:
        for line in lines():
            print(f"{line.file}:{line.number} {line.function}: {line.text}")
        return 0
    said, wrong = judged(lines(), executed(Path(arguments[0])), CANNOT)
    print("\n".join(said))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
