"""Write docs/commands.md: every command with its example, arguments and options, as the program
declares them.

Usage: python docs/make_commands.py (rewrites the page between the markers; tests/test_readme.py
compares)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph.cli import command_tree
from monograph.cli.typed import bounds, by_heading, example

PAGE = Path(__file__).resolve().parent / "commands.md"
BEGIN = "<!-- made by docs/make_commands.py -->"
DEFAULT = "; default: "  # what stands before a default in an option's help, where it is no value
HEAD = "| {} | value | default | meaning |\n|---|---|---|---|"
GUIDES = {
    "train": "training",
    "sweep": "sweep",
    "plan": "plan",
    "recipes": "configuration",
    "keys": "configuration",
    "runs": "runs",
    "follow": "runs",
    "data": "data",
    "generate": "generate",
    "chat": "generate",
    "serve": "serve",
    "export": "export",
    "profile": "profile",
    "evaluate": "evaluate",
    "compare": "evaluate",
}


def page(text: str) -> str:
    """Return the page's text with a new middle part."""
    return with_made_parts(text, BEGIN, [made()])


def made() -> str:
    """Return the headings of the help with their commands, and the options that need no command."""
    tree = command_tree()
    parts: list[str] = []
    for heading, commands in by_heading(tree).items():
        parts.append(f"## {heading}")
        for command in commands:
            parts += _command(f"monograph {command.name}", command)
    options = "\n".join(_row(each) for each in tree.params)
    return "\n\n".join([*parts, "## Without a command", f"{HEAD.format('option')}\n{options}"])


def _command(name: str, command: Any) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for each in inner.values():
            yield from _command(f"{name} {each.name}", each)
        return
    yield f"### {name}"
    guide = GUIDES.get(name.split()[1])
    said, *more = (" ".join(paragraph.split()) for paragraph in str(command.help).split("\n\n"))
    yield said + (f" [Guide]({guide}.md)." if guide else "")
    yield from more
    yield f"```bash\n{example(command)}\n```"
    kinds = sorted({each.param_type_name for each in command.params})
    yield "\n".join([HEAD.format(" or ".join(kinds)), *map(_row, command.params)])


def _row(each: Any) -> str:
    """Return the row of an argument or option."""
    meaning, _, default = str(each.help).partition(DEFAULT)
    if each.required:
        default = "required"
    elif each.default is not None and each.default is not False:
        default = f"`{each.default}`"
    if each.param_type_name == "argument":
        names, values = _listed(str(each.metavar)), "any number" if each.nargs < 0 else "one"
    else:
        values = ", ".join(filter(None, [_listed(each.metavar or ""), bounds(each)]))
        names = ", ".join(f"`{name}`" for name in sorted(each.opts, key=len))
    return f"| {names} | {values} | {default} | {meaning} |"


def _listed(values: str) -> str:
    """Return the values of "a|b" without the bar, which would end a table's cell."""
    return ", ".join(f"`{value.strip()}`" for value in values.split("|") if value)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
