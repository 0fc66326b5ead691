"""Follow a run's settings through the calls of `monograph train`: `python tests/walk.py`, `--list`
names the places.

The walk begins at `run` in commands/train.py. It follows each call, depth first and each function
once, to the functions of the package that its name can mean: through imports, `self`, and methods
whose name is defined in one room alone, such as those that each objective has; and to functions
that a call is given, as `partial` is. Other methods are not followed, so the counts are lower
bounds.

- A *stop* is a function that receives or reads the settings: a parameter is named `settings` or
  annotated `Settings`, or it reads an attribute `.settings`.
- A *climb* is a step from one stop to the next whose file imports the earlier one's, directly or
  through others: who follows the settings down has to come back up.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "monograph"
BEGIN = "commands/train.py", "run"


@dataclass
class Function:
    """A function of the package: its file, its name with its class, and its body."""

    file: str
    name: str
    body: ast.FunctionDef

    @property
    def room(self) -> str:
        """Return the file's folder, or the file itself at the top."""
        return self.file.split("/")[0].removesuffix(".py")

    def __str__(self) -> str:
        """Return where it stands."""
        return f"{self.file}:{self.name}"

    @property
    def is_stop(self) -> bool:
        """Return whether it receives or reads settings."""
        arguments = (*self.body.args.posonlyargs, *self.body.args.args, *self.body.args.kwonlyargs)
        if any(each.arg == "settings" or _names_settings(each.annotation) for each in arguments):
            return True
        return any(
            isinstance(node, ast.Attribute) and node.attr == "settings"
            for node in ast.walk(self.body)
        )


def _names_settings(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(
        isinstance(node, ast.Name) and node.id == "Settings" for node in ast.walk(annotation)
    )


@dataclass
class Package:
    """The functions of a package, by file and by name, and what each file imports."""

    functions: dict[tuple[str, str], Function] = field(default_factory=dict)
    methods: dict[str, list[Function]] = field(default_factory=dict)
    imports: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def of_call(self, caller: Function, call: ast.Call) -> list[Function]:
        """Return the functions that a call can mean; none if they cannot be told, or are not the
        package's.
        """
        return [*self._called(caller, call.func), *self._given(caller, call)]

    def _given(self, caller: Function, call: ast.Call) -> Iterator[Function]:
        """Yield the functions that a call is given by their names, as `partial` is."""
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            found = (
                self._named(caller.file, argument.id) if isinstance(argument, ast.Name) else None
            )
            if found and not found.name.endswith("__init__"):
                yield found

    def _called(self, caller: Function, called: ast.expr) -> list[Function]:
        if isinstance(called, ast.Name):
            found = self._named(caller.file, called.id)
        elif isinstance(called, ast.Attribute):
            found = self._owned(caller, called)
        else:
            found = None
        if found or not isinstance(called, ast.Attribute):
            return [found] if found else []
        named = self.methods.get(called.attr, [])
        return named if len({method.room for method in named}) == 1 else []

    def _owned(self, caller: Function, called: ast.Attribute) -> Function | None:
        """Return the method of the caller's own class, or the function of a module or class that
        was imported.
        """
        if not isinstance(called.value, ast.Name):
            return None
        owner = called.value.id
        if owner in ("self", "cls"):
            kind = caller.name.split(".")[0]
            return self.functions.get((caller.file, f"{kind}.{called.attr}"))
        module, name = self.imports[caller.file].get(owner, ("", ""))
        if not module:
            return None
        inside = f"{module}/{name}" if name else module
        return self._in_module(inside, called.attr) or self._in_module(
            module, f"{name}.{called.attr}"
        )

    def _named(self, file: str, name: str) -> Function | None:
        own = self.functions.get((file, name)) or self.functions.get((file, f"{name}.__init__"))
        if own:
            return own
        module, original = self.imports[file].get(name, ("", ""))
        return self._in_module(module, original) if module else None

    def _in_module(self, module: str, name: str) -> Function | None:
        for file in (f"{module}.py", f"{module}/__init__.py"):
            if file not in self.imports:
                continue
            found = self.functions.get((file, name)) or self.functions.get(
                (file, f"{name}.__init__")
            )
            if found:
                return found
            passed_on, original = self.imports[file].get(name, ("", ""))
            if passed_on and (passed_on, original) != (module, name):
                return self._in_module(passed_on, original)
        return None

    def above(self, file: str) -> set[str]:
        """Return the files that a file imports, directly or through others: it is above all of
        them.
        """
        below, waiting = set[str](), [file]
        while waiting:
            for module, name in self.imports[waiting.pop()].values():
                named = (
                    f"{module}/{name}.py",
                    f"{module}/{name}/__init__.py",
                    f"{module}.py",
                    f"{module}/__init__.py",
                )
                imported = next((each for each in named if each in self.imports), None)
                if imported and imported not in below:
                    below.add(imported)
                    waiting.append(imported)
        return below


@cache
def package(root: Path = ROOT) -> Package:
    """Return the package whose files are below `root`."""
    found = Package()
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        found.imports[file] = dict(_imports(tree))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found.functions[file, node.name] = Function(file, node.name, node)
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        made = Function(file, f"{node.name}.{method.name}", method)
                        found.functions[file, made.name] = made
                        found.methods.setdefault(method.name, []).append(made)
    return found


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the names that a file imports from the package, each with (module's path, name there)."""
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or not node.module
            or node.module.split(".")[0] != "monograph"
        ):
            continue
        module = "/".join(node.module.split(".")[1:])
        for alias in node.names:
            yield alias.asname or alias.name, ((module, alias.name) if module else (alias.name, ""))


def stops(found: Package, begin: tuple[str, str] = BEGIN) -> list[Function]:
    """Return the stops of the walk from a function, in its order."""
    seen, reached = set[tuple[str, str]](), list[Function]()

    def visit(function: Function) -> None:
        key = function.file, function.name
        if key in seen:
            return
        seen.add(key)
        if function.is_stop:
            reached.append(function)
        for node in ast.walk(function.body):
            if isinstance(node, ast.Call):
                for callee in found.of_call(function, node):
                    visit(callee)

    visit(found.functions[begin])
    return reached


def climbs(found: Package, reached: list[Function]) -> list[tuple[Function, Function]]:
    """Return the pairs of a stop and the next one whose file is above it."""
    return [
        (one, other)
        for one, other in pairwise(reached)
        if one.file != other.file and one.file in found.above(other.file)
    ]


if __name__ == "__main__":
    train = package()
    all_stops = stops(train)
    all_climbs = climbs(train, all_stops)
    print(f"{len(all_stops)} stops, {len(all_climbs)} climbs")
    if "--list" in sys.argv:
        print(*all_stops, sep="\n")
        print(*(f"{one} -> {other}" for one, other in all_climbs), sep="\n")
