"""Answer a command line that typer refuses: say what to type instead, with the value that was
typed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typer.core import TyperGroup

from monograph.cli.typed import BadCommandLine, bounds, example, help_of
from monograph.config.elsewhere import COMMANDS, DEVICES, ELSEWHERE, OPTIONS
from monograph.config.given import COMMAND_LINE, MOST_FAULTS
from monograph.config.keys import KEYS
from monograph.config.settings import check
from monograph.config.sources import key_and_value
from monograph.config.unknown import meant, require_known, takes
from monograph.errors import UsageError, did_you_mean
from monograph.terminal import shell_words

if TYPE_CHECKING:
    from typer._click import Command, Parameter  # click's, in older releases of typer

_AFTER_DASHES = "; text that begins with a dash goes after --"


def answered(error: BadCommandLine, tree: Command, arguments: Sequence[str]) -> str:
    """Return the line about a wrong command line, with all that is wrong with its options and keys.

    Typer stops at the first wrong option. Here the rest of the line is read without it, and so on.

    Args:
        error: typer's exception.
        tree: all commands.
        arguments: the command line.
    """
    lines = [_about_error(error, tree, arguments)]
    if error.ctx is None:
        return lines[0]
    command = error.ctx.command
    name = str(command.name)
    left = list(arguments)
    while _is_unknown_option(error) and _takes_keys(command) and len(lines) < MOST_FAULTS:
        left = _without(_option_of(error), left)
        try:
            with command.make_context(name, left[left.index(name) + 1 :]) as context:
                lines += _wrong_keys(command, context.params)
            break
        except BadCommandLine as another:
            error = another
            lines.append(_about_error(error, tree, left))
    return "; also ".join(lines[:MOST_FAULTS])


def _is_unknown_option(error: BadCommandLine) -> bool:
    return str(error.format_message()).startswith("No such option")


def _option_of(error: BadCommandLine) -> str:
    """Return the option that an error is about, as it was read; "" if it is about another thing."""
    return getattr(error, "option_name", "")


def _without(option: str, arguments: Sequence[str]) -> list[str]:
    """Return a command line without an option, and without the value that stands after it."""
    typed, value = _typed(option, arguments)
    place = next(place for place, word in enumerate(arguments) if word.partition("=")[0] == typed)
    apart = value and arguments[place] == typed and not key_and_value(value)
    return [*arguments[:place], *arguments[place + 1 + bool(apart) :]]


def _wrong_keys(command: Command, values: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Return what is wrong with each key, or its value, among a command's arguments."""
    faults = []
    for param in command.params:
        if "KEY=" not in str(param.metavar):
            continue
        for argument in values[param.name] or ():
            given = key_and_value(argument)
            if given is None:
                continue
            key, value = given
            try:
                require_known(key, COMMAND_LINE, value)
                if not takes(key, value):
                    check(key, value, COMMAND_LINE, from_text=True)
            except UsageError as fault:
                faults.append(str(fault))
    return faults


def _about_error(error: BadCommandLine, tree: Command, arguments: Sequence[str]) -> str:
    """Return the line about one thing that is wrong.

    Args:
        error: typer's exception.
        tree: all commands.
        arguments: the command line.
    """
    said = str(error.format_message()).rstrip(".")
    if arguments and arguments[0] in COMMANDS:
        return f"No such command {arguments[0]!r}; {COMMANDS[arguments[0]]}"
    command = error.ctx.command if error.ctx is not None else _named(tree, arguments)
    if isinstance(command, TyperGroup):
        return said if "?" in said else f"{said}; there are {', '.join(command.commands)}"
    if _is_unknown_option(error):
        option = _option_of(error)
        possible = getattr(error, "possibilities", None) or ()
        return f"No such option: {option}{_about_option(command, option, possible, arguments)}"
    param = getattr(error, "param", None) or _option_named(command, _option_of(error))
    is_number = "valid number" in said or "valid integer" in said
    if param is not None and said.startswith("Invalid value") and (bounds(param) or is_number):
        return _wrong_number(param, said, arguments)
    if said.endswith("does not take a value"):
        return f"{said}: write {_option_of(error)} alone"
    if param is not None:
        return f"{said}; {_about(param)}, as in {example(command)}"
    if extra := re.match(r"Got unexpected extra argument\S* \((.*)\)$", said):
        return f"{said}{_about_extra(command, extra[1])}"
    return said


def _named(tree: Command, arguments: Sequence[str]) -> Command:
    """Return the command that a command line begins with."""
    for word in arguments:
        if isinstance(tree, TyperGroup):
            tree = tree.commands.get(word, tree)
    return tree


def _option_named(command: Command, name: str) -> Parameter | None:
    return next((each for each in command.params if name in each.opts), None)


def _wrong_number(param: Parameter, said: str, arguments: Sequence[str]) -> str:
    """Return the line about an option's value that is no number, or none of its range."""
    name, value = max(
        (_typed(option, arguments) for option in param.opts), key=lambda typed: bool(typed[1])
    )
    kind = "a whole number" if "integer" in said else "a number"
    return f"{name} {value}: expected {', '.join(filter(None, [kind, bounds(param)]))}"


def _about(param: Parameter) -> str:
    """Return an argument or option with its meaning."""
    names = [] if param.param_type_name == "argument" else [param.opts[0]]
    return f"{' '.join(filter(None, [*names, param.metavar]))}: {help_of(param)}"


def _about_option(
    command: Command, option: str, possible: Sequence[str], arguments: Sequence[str]
) -> str:
    """Return the end of the line about an option that a command does not have."""
    typed, value = _typed(option, arguments)
    name = typed.lstrip("-").replace("-", "_")
    if said := OPTIONS.get(str(command.name), {}).get(name.rpartition(".")[2]):
        return _filled(said, value)
    if name in DEVICES:
        return f"; {DEVICES[name]}"
    begin = [long for long in _options(command) if long.startswith(f"--{name}")]
    if len(name) == 1 and begin:
        return f"; did you mean {' or '.join(begin)}?"
    if _takes_keys(command):
        return _about_key(command, typed, value, possible)
    if near := did_you_mean(typed, _options(command)):
        return near
    if meant(name):
        return f"; {_no_keys(command)}"
    return _AFTER_DASHES if command.name == "generate" else f"; {_its_options(command)}"


def _about_key(command: Command, typed: str, value: str, possible: Sequence[str]) -> str:
    """Return the end of the line about an option of a command that takes keys."""
    name = typed.lstrip("-").replace("-", "_")
    near = did_you_mean(typed, possible)
    if name not in ELSEWHERE and near:
        return near
    if (
        name not in KEYS
        and name not in ELSEWHERE
        and (value.partition("=")[0] in KEYS or value.endswith(".toml"))
    ):
        return f"; type {shell_words(value)} as it is"
    return (
        meant(name, value)
        or near
        or f"; {_its_options(command)}; a path that begins with a dash is ./-NAME"
    )


def _about_extra(command: Command, text: str) -> str:
    """Return the end of the line about an argument too many."""
    name, equals, value = text.partition("=")
    option = f"--{name.rpartition('.')[2].replace('_', '-')}"
    if equals and option in _options(command):
        return f"; say {option} {shell_words(value)}"
    of_others = OPTIONS.get(str(command.name), {})
    said = of_others.get(name.rpartition(".")[2] if equals else "")
    if said:
        return _filled(said, value if equals else text)
    if equals and meant(name):
        return f"; {_no_keys(command)}"
    return f"; {_usage(command)}"


def _typed(option: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return an option as it was typed, which typer reads letter by letter after one dash, and its
    value or "".
    """
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != option and not (
            len(option) == 2 and re.fullmatch(rf"{re.escape(option)}\w+", name)
        ):
            continue
        following = arguments[place + 1 : place + 2]
        if (
            not equals
            and following
            and (not following[0].startswith("-") or _is_number(following[0]))
        ):
            value = following[0]
        return name, value
    return option, ""


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9.]+(e[-+]?[0-9]+)?", text))


def _filled(said: str, value: str) -> str:
    """Return a sentence, or an option with the value that was typed."""
    if not said.startswith("-"):
        return f"; {said}"
    if "{}" in said:
        return f"; say {said.format(shell_words(value) if value else 'NUMBER')}"
    return f"; say {said} {shell_words(value)}" if value else f"; say {said} VALUE"


def _takes_keys(command: Command) -> bool:
    return any(
        "KEY=" in str(each.metavar) for each in command.params if each.param_type_name == "argument"
    )


def _options(command: Command) -> list[str]:
    return [
        name for each in command.params if each.param_type_name == "option" for name in each.opts
    ]


def _its_options(command: Command) -> str:
    names = [name for name in _options(command) if name.startswith("--")]
    return f"its options are {', '.join(names)}" if names else "it has no options"


def _no_keys(command: Command) -> str:
    return f"`monograph {command.name}` takes no keys of a run; {_its_options(command)}"


def _usage(command: Command) -> str:
    named = [str(each.metavar) for each in command.params if each.param_type_name == "argument"]
    return f"after `monograph {command.name}` stands {' '.join(named) or 'no more'}; {_its_options(command)}"
