"""Explain a command line that typer refuses, and say what to type instead.

Functions whose names end in `_advice` return the end of a message, which begins with "; ".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typer.core import TyperGroup

from monograph.cli.typed import BadCommandLine, bounds, example, help_of
from monograph.config.elsewhere import COMMANDS, DEVICES, ELSEWHERE, OPTIONS
from monograph.config.given import COMMAND_LINE, MAX_FAULTS
from monograph.config.keys import KEYS
from monograph.config.settings import checked_value
from monograph.config.sources import key_and_value
from monograph.config.unknown import accepts, key_advice, require_known
from monograph.errors import UsageError, did_you_mean
from monograph.terminal import shell_words

if TYPE_CHECKING:
    from typer._click import Command, Parameter  # click's, in older releases of typer


def usage_message(error: BadCommandLine, tree: Command, arguments: Sequence[str]) -> str:
    """Return one line that names everything that is wrong with the options and keys.

    Typer stops at the first unknown option. This function removes that option and parses the rest
    again, until the rest has no unknown option or `MAX_FAULTS` faults are known.

    Args:
        error: typer's exception.
        tree: the group of all commands.
        arguments: the command line.
    """
    messages = [_message_of(error, tree, arguments)]
    if error.ctx is None:  # the error is in the command's name
        return messages[0]
    command = error.ctx.command
    name = str(command.name)
    remaining = list(arguments)
    while _is_unknown_option(error) and _takes_keys(command) and len(messages) < MAX_FAULTS:
        remaining = _without_option(_option_of(error), remaining)
        command_arguments = remaining[remaining.index(name) + 1 :]
        try:
            with command.make_context(name, command_arguments) as context:
                messages += _key_faults(command, context.params)
            break  # no unknown option is left
        except BadCommandLine as next_error:
            error = next_error
            messages.append(_message_of(error, tree, remaining))
    return "; also ".join(messages[:MAX_FAULTS])


def _is_unknown_option(error: BadCommandLine) -> bool:
    return str(error.format_message()).startswith("No such option")


def _option_of(error: BadCommandLine) -> str:
    """Return the option that an error is about, as typer read it; "" if there is none."""
    return getattr(error, "option_name", "")


def _without_option(option: str, arguments: Sequence[str]) -> list[str]:
    """Return a command line without an option and its value."""
    typed_option, value = _option_and_value(option, arguments)
    names = [argument.partition("=")[0] for argument in arguments]
    index = names.index(typed_option)
    has_equals_sign = arguments[index] != typed_option
    # An unknown option may take no value. So a KEY=VALUE after it counts as an argument, and stays.
    value_is_next_argument = value and not has_equals_sign and not key_and_value(value)
    end = index + 2 if value_is_next_argument else index + 1
    return [*arguments[:index], *arguments[end:]]


def _key_faults(command: Command, values: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Return a message for each KEY=VALUE argument whose key or value is wrong.

    Args:
        command: the command.
        values: the values of the command's parameters, by their names.
    """
    faults = []
    for param in command.params:
        if "KEY=" not in str(param.metavar):
            continue  # KEY=VALUE cannot be an argument of this parameter
        for argument in values[param.name] or ():
            pair = key_and_value(argument)
            if pair is None:
                continue
            key, value = pair
            try:
                require_known(key, COMMAND_LINE, value)
                # The axes of a sweep are accepted, too. `checked_value` would refuse them.
                if not accepts(key, value):
                    checked_value(key, value, COMMAND_LINE, from_text=True)  # raises the fault
            except UsageError as fault:
                faults.append(str(fault))
    return faults


def _message_of(error: BadCommandLine, tree: Command, arguments: Sequence[str]) -> str:
    """Return the message for one of typer's exceptions: typer's own words, with advice.

    Args:
        error: typer's exception.
        tree: the group of all commands.
        arguments: the command line.
    """
    typer_message = str(error.format_message()).rstrip(".")
    if arguments and arguments[0] in COMMANDS:  # a command of another program
        return f"No such command {arguments[0]!r}; {COMMANDS[arguments[0]]}"
    command = error.ctx.command if error.ctx is not None else _command_in(tree, arguments)
    if isinstance(command, TyperGroup):
        if "?" in typer_message:  # typer suggests a command
            return typer_message
        return f"{typer_message}; the commands are {', '.join(command.commands)}"
    if _is_unknown_option(error):
        option = _option_of(error)
        similar = getattr(error, "possibilities", None) or ()
        advice = _unknown_option_advice(command, option, similar, arguments)
        return f"No such option: {option}{advice}"
    param = getattr(error, "param", None) or _option_named(command, _option_of(error))
    is_number = "valid number" in typer_message or "valid integer" in typer_message
    is_invalid = typer_message.startswith("Invalid value")
    if param is not None and is_invalid and (bounds(param) or is_number):
        return _wrong_number_message(param, typer_message, arguments)
    if typer_message.endswith("does not take a value"):
        return f"{typer_message}: write {_option_of(error)} alone"
    if param is not None:
        return f"{typer_message}; {_param_with_help(param)}, as in {example(command)}"
    extra_argument = re.match(r"Got unexpected extra argument\S* \((.*)\)$", typer_message)
    if extra_argument:
        return f"{typer_message}{_extra_argument_advice(command, extra_argument[1])}"
    return typer_message


def _command_in(tree: Command, arguments: Sequence[str]) -> Command:
    """Return the command, or the group of commands, that the arguments name."""
    command = tree
    for argument in arguments:
        if isinstance(command, TyperGroup):
            command = command.commands.get(argument, command)
    return command


def _option_named(command: Command, name: str) -> Parameter | None:
    return next((param for param in command.params if name in param.opts), None)


def _wrong_number_message(param: Parameter, typer_message: str, arguments: Sequence[str]) -> str:
    """Return the message for an option whose value is not a number, or is out of range."""
    # An option may have several names. The one that was typed has a value.
    names_and_values = [_option_and_value(name, arguments) for name in param.opts]
    with_value = [(name, value) for name, value in names_and_values if value]
    name, value = with_value[0] if with_value else names_and_values[0]
    expected = "a whole number" if "integer" in typer_message else "a number"
    if bounds(param):
        expected += f", {bounds(param)}"
    return f"{name} {value}: expected {expected}"


def _param_with_help(param: Parameter) -> str:
    """Return an argument or option as "--NAME METAVAR: HELP"."""
    words = [] if param.param_type_name == "argument" else [param.opts[0]]
    if param.metavar:
        words.append(param.metavar)
    return f"{' '.join(words)}: {help_of(param)}"


def _unknown_option_advice(
    command: Command, option: str, similar: Sequence[str], arguments: Sequence[str]
) -> str:
    """Return what to type instead of an option that the command does not have.

    Args:
        command: the command.
        option: the option, as typer read it.
        similar: options of the command that typer finds similar.
        arguments: the command line.
    """
    typed_option, value = _option_and_value(option, arguments)
    name = typed_option.lstrip("-").replace("-", "_")
    # `OPTIONS` has options of other programs, and what to type here instead of each.
    advice = OPTIONS.get(str(command.name), {}).get(name.rpartition(".")[2])
    if advice:
        return _with_typed_value(advice, value)
    if name in DEVICES:
        return f"; {DEVICES[name]}"
    with_this_beginning = [
        known for known in _option_names(command) if known.startswith(f"--{name}")
    ]
    if len(name) == 1 and with_this_beginning:
        return f"; did you mean {' or '.join(with_this_beginning)}?"
    if _takes_keys(command):
        return _key_as_option_advice(command, typed_option, value, similar)
    suggestion = did_you_mean(typed_option, _option_names(command))
    if suggestion:
        return suggestion
    if key_advice(name):
        return f"; {_no_keys_message(command)}"
    if command.name == "generate":
        return "; text that begins with a dash goes after --"
    return f"; {_list_options(command)}"


def _key_as_option_advice(
    command: Command, typed_option: str, value: str, similar: Sequence[str]
) -> str:
    """Return what to type instead of an unknown option, for a command that takes keys."""
    name = typed_option.lstrip("-").replace("-", "_")
    suggestion = did_you_mean(typed_option, similar)
    if name not in ELSEWHERE and suggestion:
        return suggestion
    is_unknown_name = name not in KEYS and name not in ELSEWHERE
    # As in `--config run.toml` or `--set optim.lr=1e-3`: the option is unnecessary.
    is_argument = value.partition("=")[0] in KEYS or value.endswith(".toml")
    if is_unknown_name and is_argument:
        return f"; type {shell_words(value)} as it is"
    return (
        key_advice(name, value)
        or suggestion
        or f"; {_list_options(command)}; a path that begins with a dash is ./-NAME"
    )


def _extra_argument_advice(command: Command, argument: str) -> str:
    """Return what to type instead of an argument that the command does not take."""
    name, equals, value = argument.partition("=")
    short_name = name.rpartition(".")[2]
    option = f"--{short_name.replace('_', '-')}"
    if equals and option in _option_names(command):
        return f"; say {option} {shell_words(value)}"
    # `OPTIONS` has advice for an argument without a name under "".
    advice = OPTIONS.get(str(command.name), {}).get(short_name if equals else "")
    if advice:
        return _with_typed_value(advice, value if equals else argument)
    if equals and key_advice(name):
        return f"; {_no_keys_message(command)}"
    return f"; {_list_arguments(command)}"


def _option_and_value(option: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return an option as a person typed it, and its value; the value is "" if there is none.

    Typer reads `-lr` as the two options -l and -r. So if `option` is -l, a person may have typed `-lr`.
    """
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        begins_with_it = len(option) == 2 and re.fullmatch(rf"{re.escape(option)}\w+", name)
        if name != option and not begins_with_it:
            continue
        if not equals and index + 1 < len(arguments):
            next_argument = arguments[index + 1]
            # A negative number begins with a dash, too.
            if not next_argument.startswith("-") or _is_number(next_argument):
                value = next_argument
        return name, value
    return option, ""


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9.]+(e[-+]?[0-9]+)?", text))


def _with_typed_value(advice: str, value: str) -> str:
    """Return the end of a message: an entry of `OPTIONS` as advice, with the value that was typed.

    An entry is a sentence, an option, or an option with {} in the place of a number.
    """
    if not advice.startswith("-"):
        return f"; {advice}"
    if "{}" in advice:
        return f"; say {advice.format(shell_words(value) if value else 'NUMBER')}"
    return f"; say {advice} {shell_words(value) if value else 'VALUE'}"


def _takes_keys(command: Command) -> bool:
    """Return whether KEY=VALUE can be an argument of the command."""
    return any(
        "KEY=" in str(param.metavar)
        for param in command.params
        if param.param_type_name == "argument"
    )


def _option_names(command: Command) -> list[str]:
    return [
        name for param in command.params if param.param_type_name == "option" for name in param.opts
    ]


def _list_options(command: Command) -> str:
    """Return the options of a command, as the end of a sentence."""
    long_names = [name for name in _option_names(command) if name.startswith("--")]
    return f"its options are {', '.join(long_names)}" if long_names else "it has no options"


def _no_keys_message(command: Command) -> str:
    """Return a sentence that says that a command takes no keys, and which options it takes."""
    return f"`monograph {command.name}` takes no keys of a run; {_list_options(command)}"


def _list_arguments(command: Command) -> str:
    """Return the arguments and the options of a command, in a sentence."""
    metavars = [
        str(param.metavar) for param in command.params if param.param_type_name == "argument"
    ]
    arguments = " ".join(metavars) or "no more"
    return f"after `monograph {command.name}` stands {arguments}; {_list_options(command)}"
