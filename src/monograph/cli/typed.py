"""Declare each command with its arguments, options and help.

Typer derives a command's arguments and options from its function's parameters, and its help from
the function's docstring. A function here imports the code of its command (`monograph.commands`)
only when it is called, since that code imports torch, which takes seconds.

During these imports, Ctrl-C ends the program immediately. After them, `interrupts.interruptible(run)` returns
the command's function `run` as it is, and lets Ctrl-C raise KeyboardInterrupt from then on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from monograph import __version__, cards, interrupts
from monograph.errors import UsageError, join_with_or
from monograph.model.exports import EXPORTS
from monograph.report.trackers import LIBRARIES

if TYPE_CHECKING:
    # New releases of typer have a copy of click in typer._click. Older ones import click, whose
    # classes are the same.
    from typer._click import Command, Context, HelpFormatter, Parameter
    from typer._click.exceptions import UsageError as ClickUsageError

    from monograph.config import Settings

    BadCommandLine = ClickUsageError
else:
    # The base class of all exceptions for a wrong command line. Its module depends on the release
    # of typer, so it is found through a class that derives from it.
    BadCommandLine = typer.BadParameter.__bases__[0]

F = TypeVar("F", bound=Callable[..., int | None])

# The headings of the commands in `monograph --help`. Headings and commands are in the order in
# which this file declares the commands.
TRAIN = "Train"
INSPECT = "Prepare and inspect"
USE = "Use"
UNDERSTAND = "Understand"
# The beginning of the line with an example, which ends a command's help.
EXAMPLE = "Example: "


def bounds(param: Parameter | None) -> str:
    """Return the range of a number that an argument or option takes; "" if it has no range.

    For example "at least 0" or "0 to 65535".
    """
    # Only a parameter that takes a number has these attributes.
    minimum = getattr(param, "min", None)
    maximum = getattr(param, "max", None)
    if minimum is None:
        return ""
    if maximum is None:
        return f"at least {minimum:g}"
    return f"{minimum:g} to {maximum:g}"


def help_of(param: Parameter) -> str | None:
    """Return the help of an argument or option."""
    return getattr(param, "help", None)


def _write_params(heading: str, params: Sequence[Parameter], formatter: HelpFormatter) -> None:
    """Write a section of the help: what a person types for each parameter, and what it means."""
    rows = []
    for param in params:
        words = []
        if param.param_type_name == "option":
            words.append(", ".join(sorted(param.opts, key=len)))
        if param.metavar:
            words.append(param.metavar)
        details = []
        if param.default is not None and param.default is not False:
            details.append(f"default: {param.default}")
        if bounds(param):
            details.append(bounds(param))
        if param.required:
            details.append("required")
        meaning = help_of(param) or ""
        if details:
            meaning = f"{meaning} [{'; '.join(details)}]".lstrip()
        rows.append((" ".join(words), meaning))
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


class _Command(TyperCommand):
    """A command whose help does not name Python's types, which mean nothing on a command line."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments and the options."""
        params = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            params_of_kind = [param for param in params if param.param_type_name == kind]
            _write_params(heading, params_of_kind, formatter)


class _Group(TyperGroup):
    """A group of commands whose help lists the commands under headings, before the options.

    Typer would cut a command's help to the width of the terminal. Here it is a whole sentence, and
    each heading has an example.
    """

    def format_help_text(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the group's help, and its commands."""
        super().format_help_text(ctx, formatter)
        for heading, commands in by_heading(self).items():
            rows = [(str(command.name), first_sentence(command)) for command in commands]
            if heading:
                rows.append(("example:", example(commands[0])))
            with formatter.section(heading or "Commands"):
                formatter.write_dl(rows)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write nothing: typer calls this after the options, but the commands come before them."""


def by_heading(group: TyperGroup) -> dict[str, list[Command]]:
    """Return a group's commands by their headings; "" is the heading of commands without one."""
    commands_by_heading: dict[str, list[Command]] = {}
    for command in group.commands.values():
        # Typer calls a heading a panel.
        heading = getattr(command, "rich_help_panel", None)
        commands_by_heading.setdefault(heading or "", []).append(command)
    return commands_by_heading


def first_sentence(command: Command) -> str:
    """Return the first paragraph of a command's help; each command's is a single sentence."""
    return str(command.help).partition("\n\n")[0].replace("\n", " ")


def example(command: Command) -> str:
    """Return the example with which a command's help ends."""
    return str(command.epilog).removeprefix(EXAMPLE)


app = typer.Typer(
    name="monograph",
    cls=_Group,
    help="Train, finetune and serve language models on one GPU, or on none.",
    epilog="`last` is the newest run. `monograph COMMAND --help` lists a command's options, "
    "`monograph keys` lists the keys of a configuration.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
data_app = typer.Typer(cls=_Group, rich_markup_mode=None)
app.add_typer(
    data_app,
    name="data",
    help="Show the rows that a model is trained on, or tokenize the text.",
    rich_help_panel=INSPECT,
    epilog=f"{EXAMPLE}monograph data show my_texts/",
)


def _command(heading: str, example: str, help: str | None = None) -> Callable[[F], F]:
    """Return a decorator that declares a command.

    Args:
        heading: the heading of `monograph --help` under which the command is.
        example: the example with which the command's own help ends.
        help: the command's help; None for the function's docstring.
    """
    return app.command(cls=_Command, rich_help_panel=heading, epilog=EXAMPLE + example, help=help)


ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.toml | KEY=VALUE | PATH",
        help="a configuration, single keys and text to train on, in any order",
        show_default=False,
    ),
]
AxisArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.toml | KEY=AXIS | PATH",
        help="as in train, and keys with several values: 1e-3,1e-2 or log:1e-4..1e-2:8 or lin:0..0.2:3 or 0..3",
        show_default=False,
    ),
]


def _download(context: typer.Context, names: str | list[str]) -> str | Path | list[str | Path]:
    """Return the names of models, with the local folder in place of each hf://OWNER/NAME."""
    if isinstance(names, list):
        return [_download_one(context, name) for name in names]
    return _download_one(context, names)


def _download_one(context: typer.Context, name: str) -> str | Path:
    """Return a model's name, with the local folder in place of hf://OWNER/NAME."""
    # Typer sets `resilient_parsing` when a shell completes a line, which must not download a model.
    if context.resilient_parsing or not name.startswith("hf://"):
        return name
    from monograph.run.repository import fetch_if_on_hub

    return fetch_if_on_hub(name)


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER",
        callback=_download,
        help="a run, `last`, a checkpoint's folder, a Hugging Face folder, hf://OWNER/NAME or a .pth file",
    ),
]


def _option(
    metavar: str,
    help: str,
    *names: str,
    min: float | None = None,
    max: float | None = None,
    readable: bool = True,
) -> Any:
    """Return an option that takes a value.

    `names` are what a person types. Without `names`, typer makes the option of the parameter's name, such
    as --max-tokens for `max_tokens`.
    """
    return typer.Option(*names, metavar=metavar, help=help, min=min, max=max, readable=readable)


def _flag(name: str, help: str, *more_names: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(name, *more_names, help=help)


def _path_option(metavar: str, help: str, *names: str) -> Any:
    """Return an option that takes a path."""
    # The command opens the path, and says why it cannot be read. With `readable`, typer would look first,
    # and say that the value is invalid.
    return _option(metavar, help, *names, readable=False)


TemperatureOption = Annotated[
    float, _option("T", "sampling temperature; 0: always the most likely token", min=0.0)
]
TopKOption = Annotated[int, _option("K", "sample from the K most likely tokens; 0: off", min=0)]
TopPOption = Annotated[
    float, _option("P", "sample from the most likely tokens, up to this total probability")
]
MinPOption = Annotated[
    float, _option("P", "leave out tokens less likely than P times the most likely one")
]
SamplerOption = Annotated[
    list[str] | None,
    _option("KEY=VALUE", "another sampling option (docs/generate.md); may be repeated"),
]
SeedOption = Annotated[int, _option("S", "the same seed writes the same text", min=0)]
StopOption = Annotated[list[str] | None, _option("S", "end before this text; may be repeated")]
ChoiceOption = Annotated[
    list[str] | None, _option("TEXT", "write one of these texts; repeat it for each")
]
RegexOption = Annotated[
    str | None, _option("PATTERN", "write text that matches this pattern as a whole")
]
JsonSchemaOption = Annotated[
    Path | None, _path_option("FILE", "write JSON that follows this schema")
]
GrammarOption = Annotated[
    Path | None, _path_option("FILE", "write text of this grammar, in GBNF as llama.cpp reads it")
]
AdapterOption = Annotated[
    list[str] | None,
    _option(
        "NAME=FOLDER",
        "an adapter of this model: a folder that PEFT can load, or a run; may be repeated",
    ),
]
DraftOption = Annotated[
    str | None,
    _option(
        "RUN",
        "a small model that proposes tokens, which the model checks together; mtp: the model's own head does",
    ),
]
UseOption = Annotated[
    str | None,
    _option("NAME", "the adapter that writes; default: the first; base: none of them"),
]
TrustCodeOption = Annotated[
    bool,
    _flag(
        "--trust-code", "run the Python file that a run names, even if the run was not made here"
    ),
]
FromRecipeOption = Annotated[
    str | None,
    _option(
        "NAME", "start from the settings of this recipe; `monograph recipes` lists all", "--recipe"
    ),
]
NameOption = Annotated[str | None, _option("NAME", "a name in runs/: short for --out runs/NAME")]
MinutesOption = Annotated[
    float | None, _option("M", "train for this many minutes; short for train.minutes=M")
]
JsonOption = Annotated[bool, _flag("--json", "end stdout with one JSON object")]
# Commands that the processes of a launcher run together. None is `monograph` without a command.
SHARED_COMMANDS = (None, "train", "sweep")


@app.callback(invoke_without_command=True)
def _monograph(
    context: typer.Context,
    version: Annotated[bool, _flag("--version", "print the version", "-v")] = False,
) -> None:
    if version:
        print(f"monograph {__version__}")
        raise typer.Exit
    command = context.invoked_subcommand
    processes = launched_processes()
    if command not in SHARED_COMMANDS and processes > 1:
        raise UsageError(
            f"{processes} processes were started, but `monograph {command}` runs in one: leave the launcher out"
        )
    _print_help_without_command(context)


def launched_processes() -> int:
    """Return the number of processes that a launcher, such as torchrun, has started; 1 without a
    launcher.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    # WORLD_SIZE alone may be another program's variable.
    is_launched = world_size.isdecimal() and "MASTER_ADDR" in os.environ
    return int(world_size) if is_launched else 1


@data_app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    _print_help_without_command(context)


def _print_help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@_command(TRAIN, "monograph train my_texts/ --minutes 30")
def train(
    arguments: ConfigArguments = None,
    out: Annotated[
        Path | None, _path_option("DIR", "the run's folder; default: runs/DATE-TIME")
    ] = None,
    name: NameOption = None,
    recipe: FromRecipeOption = None,
    resume: Annotated[
        str | None, _option("[RUN]", "continue a stopped run; without a name the newest one")
    ] = None,
    from_: Annotated[
        str | None,
        _option("RUN[@UPDATE]", "start a new run from the weights of this one", "--from"),
    ] = None,
    minutes: MinutesOption = None,
    wall_minutes: Annotated[
        float | None,
        _option(
            "M",
            "end within this many minutes, preparation and report included; short for train.wall_minutes=M",
        ),
    ] = None,
    print_config: Annotated[
        bool,
        _flag("--print-config", "print all keys with their meaning, value and origin, and stop"),
    ] = False,
    trust_code: TrustCodeOption = False,
    json: JsonOption = False,
) -> None:
    """Train a model on text, chats, rewards or preferences.

    Without arguments it trains a small model on Python's own sources for three minutes.
    """
    # The run's total time begins here: it includes the imports below.
    program_start_s = perf_counter()
    if resume and from_:
        raise UsageError("--resume continues a run and --from starts a new one; give one of them")
    out = _run_folder(out, name)
    _trust_code_if(trust_code)
    short_options = {"train.minutes": minutes, "train.wall_minutes": wall_minutes}
    settings = _settings(_with_recipe(recipe, arguments), short_options, runs_code=not print_config)
    if print_config:
        from monograph.config.commented import commented

        print(commented(settings), end="")
        return
    from monograph.commands.train import run

    interrupts.interruptible(run)(
        settings, out=out, resume=resume, from_=from_, json=json, program_start_s=program_start_s
    )


@_command(TRAIN, "monograph sweep my_texts/ optim.lr=1e-3,3e-3,1e-2 train.seed=0,1")
def sweep(
    arguments: AxisArguments = None,
    samples: Annotated[
        int | None, _option("N", "train N random combinations instead of all")
    ] = None,
    verify: Annotated[
        int | None, _option("I", "train member I of the newest sweep again, alone, and compare")
    ] = None,
    out: Annotated[
        Path | None,
        _path_option("DIR", "the sweep's folder, new or to continue; default: runs/DATE-TIME"),
    ] = None,
    name: NameOption = None,
    recipe: FromRecipeOption = None,
    minutes: MinutesOption = None,
    distill: Annotated[
        bool,
        _flag(
            "--distill", "at the end, train one more model on the members' averaged probabilities"
        ),
    ] = False,
    prune: Annotated[
        float | None,
        _option(
            "P",
            "stop members early if they can hardly win; the best is stopped with a probability of at most P",
        ),
    ] = None,
    trust_code: TrustCodeOption = False,
    json: JsonOption = False,
) -> int:
    """Train many runs that differ in a few settings, and compare them.

    Without arguments it tries learning rates for the newest run's text, on a narrow copy of its
    model.
    """
    out = _run_folder(out, name)
    from monograph.commands.sweep import run

    _trust_code_if(trust_code)
    all_arguments = _with_recipe(recipe, arguments)
    if minutes is not None:
        # The command itself reads the arguments, because their values may be axes of the sweep.
        all_arguments = [*all_arguments, f"train.minutes={minutes:g}"]
    return interrupts.interruptible(run)(
        all_arguments,
        samples=samples,
        verify=verify,
        out=out,
        distill=distill,
        prune=prune,
        json=json,
    )


# The help of `plan` has a list of GPUs, which a docstring cannot have.
_PLAN = "Predict which settings fit a device, and how fast they train."


@_command(
    INSPECT,
    "monograph plan model.preset=8b lora.rank=16 --device 4090",
    "\n\n".join((_PLAN, *cards.card_lines())),
)
def plan(
    arguments: ConfigArguments = None,
    recipe: FromRecipeOption = None,
    device: Annotated[
        str | None, _option("NAME", "one of the GPUs above; default: this machine")
    ] = None,
    device_memory: Annotated[
        str | None,
        _option("24GiB", "memory of the device; default: what is free here, or all of a named GPU"),
    ] = None,
    host_memory: Annotated[
        str | None,
        _option("512GiB", "host memory for a streamed model; default: what is free here"),
    ] = None,
    minutes: Annotated[
        float | None, _option("M", "the time to train; short for train.minutes=M")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict which settings fit a device, and how fast they train."""
    from monograph.commands.plan import run

    short_options = {"train.minutes": minutes}
    settings = _settings(_with_recipe(recipe, arguments), short_options, needs_shape_alone=True)
    # Not `interrupts.interruptible(run)`: a plan writes nothing, so Ctrl-C may end it immediately.
    return run(
        settings, device=device, device_memory=device_memory, host_memory=host_memory, json=json
    )


@_command(INSPECT, "monograph recipes lora")
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="print the file of this recipe; default: a list of all recipes"
        ),
    ] = None,
) -> None:
    """List configurations for common jobs, for the option --recipe of train, sweep and plan."""
    from monograph.commands.recipes import run as command

    interrupts.interruptible(command)(name)


@_command(INSPECT, "monograph keys optim.lr")
def keys(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION|KEY|WORD",
            help="a section, a key, a part of its name, or what another program calls it; default: all keys",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain the keys of a configuration: meaning, values, default, and an example."""
    from monograph.commands.keys import run as command

    interrupts.interruptible(command)(word, json=json)


@_command(INSPECT, "monograph runs runs/")
def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="a folder of runs, or a sweep, whose members are listed; default: runs/",
            readable=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the runs of a folder, newest first, with their results, sizes and states."""
    from monograph.commands.runs import run as command

    interrupts.interruptible(command)(folder, json=json)


@_command(INSPECT, "monograph check last")
def check(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="the run or model whose files are verified; default: this machine"
        ),
    ] = None,
    laws: Annotated[
        bool, _flag("--laws", "compare fast paths with slow ones on this machine; takes minutes")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check this machine, or verify a run's files."""
    from monograph.commands.check import run as command

    interrupts.interruptible(command)(run, laws=laws, json=json)


_FOLLOW = f"""Log a run to {join_with_or(library.title for library in LIBRARIES.values())}.

It follows a run that is training until the run stops, and sends a finished run at once."""


@_command(INSPECT, "monograph follow last --to tensorboard", _FOLLOW)
def follow(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP", help="a run, `last`, or a sweep, of which all members are sent"
        ),
    ],
    to: Annotated[str, _option("TRACKER", join_with_or(LIBRARIES))],
    out: Annotated[
        Path | None,
        _path_option("DIR", "folder of the tracker's files; default: the tracker's own"),
    ] = None,
) -> None:
    """Log a run to a tracker."""
    from monograph.commands.follow import run as command

    interrupts.interruptible(command)(run, to=to, out=out)


@data_app.command(cls=_Command, epilog=f"{EXAMPLE}monograph data show my_texts/ --row 3")
def show(
    arguments: ConfigArguments = None,
    row: Annotated[
        int | None, _option("N", "the number of a packed row; default: a summary and row 0", min=0)
    ] = None,
) -> None:
    """Show a row of the data as text, and mark the tokens that are trained on."""
    from monograph.commands.data import show as command

    interrupts.interruptible(command)(_settings(arguments), row=row)


@data_app.command(cls=_Command, epilog=f"{EXAMPLE}monograph data build my_texts/")
def build(arguments: ConfigArguments = None) -> None:
    """Tokenize the text once, for all later runs."""
    from monograph.commands.data import build as command

    interrupts.interruptible(command)(_settings(arguments))


@_command(USE, 'monograph generate last "Once upon a time"')
def generate(
    run: RunArgument,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="text to continue")
    ] = None,
    file: Annotated[
        Path | None,
        _path_option("FILE", "a file of more prompts, as lines or JSON lines", "--prompts"),
    ] = None,
    chat: Annotated[
        bool, _flag("--chat", "answer each prompt, through the model's chat template")
    ] = False,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    sampler: SamplerOption = None,
    seed: SeedOption = 0,
    n: Annotated[int, _option("N", "continuations of each prompt", "-n", "--n", min=1)] = 1,
    max_tokens: Annotated[int, _option("N", "longest continuation, in tokens", min=1)] = 128,
    stop: StopOption = None,
    choice: ChoiceOption = None,
    regex: RegexOption = None,
    json_schema: JsonSchemaOption = None,
    grammar: GrammarOption = None,
    adapter: AdapterOption = None,
    use: UseOption = None,
    tools: Annotated[
        Path | None,
        _path_option("FILE", "tools that an answer may call, a JSON array", "--tools"),
    ] = None,
    tool_choice: Annotated[
        str | None,
        _option("CHOICE", "auto, required, or the name of the tool to call; default: auto"),
    ] = None,
    draft: DraftOption = None,
    json: JsonOption = False,
) -> None:
    """Continue a text, or answer a prompt, with a trained model."""
    from monograph.commands.generate import GenerateOptions
    from monograph.commands.generate import run as command

    options = GenerateOptions(
        flag_values={
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        },
        pairs=sampler or [],
        n=n,
        max_tokens=max_tokens,
        stop=stop or [],
        constraints={
            "choices": choice,
            "regex": regex,
            "json_schema": json_schema,
            "grammar": grammar,
        },
        chat=chat,
        json=json,
        adapters=adapter or [],
        use=use,
        tools=tools,
        tool_choice=tool_choice,
        draft=draft,
    )
    if chat and not prompts and file is None:
        if json or n > 1:
            raise UsageError(
                "--chat without a prompt is `monograph chat`, which takes neither --json nor --n"
            )
        from monograph.commands.chat import run as converse

        interrupts.interruptible(converse)(run, system=None, options=options)
        return
    interrupts.interruptible(command)(run, prompts or [], file=file, options=options)


@_command(USE, "monograph chat last")
def chat(
    run: RunArgument,
    system: Annotated[
        str | None, _option("TEXT", "the system prompt, as /system in the chat sets it")
    ] = None,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    sampler: SamplerOption = None,
    seed: SeedOption = 0,
    max_tokens: Annotated[int, _option("N", "longest answer, in tokens", min=1)] = 512,
    stop: StopOption = None,
    choice: ChoiceOption = None,
    regex: RegexOption = None,
    json_schema: JsonSchemaOption = None,
    grammar: GrammarOption = None,
    adapter: AdapterOption = None,
    use: UseOption = None,
    draft: DraftOption = None,
) -> None:
    """Talk to a model in the terminal; /help there lists what you can type.

    From a pipe it answers each line as a message of one chat.
    """
    from monograph.commands.chat import run as command
    from monograph.commands.generate import GenerateOptions

    options = GenerateOptions(
        flag_values={
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        },
        pairs=sampler or [],
        n=1,
        max_tokens=max_tokens,
        stop=stop or [],
        constraints={
            "choices": choice,
            "regex": regex,
            "json_schema": json_schema,
            "grammar": grammar,
        },
        chat=True,
        json=False,
        adapters=adapter or [],
        use=use,
        draft=draft,
    )
    interrupts.interruptible(command)(run, system=system, options=options)


@_command(USE, "monograph serve last")
def serve(
    run: RunArgument,
    host: Annotated[
        str,
        _option(
            "ADDRESS", "where to listen; an address other than the default needs --api-key-file"
        ),
    ] = "127.0.0.1",
    port: Annotated[int, _option("N", "the port; 0: any free one", min=0, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None,
        _path_option("FILE", "a file of keys, one on each line; a request needs one of them"),
    ] = None,
    rows: Annotated[
        int | None,
        _option("N", "texts generated at once; default: 8, on a GPU 64", min=1, max=1024),
    ] = None,
    served_name: Annotated[
        list[str] | None,
        _option("NAME", "another name for the model, such as gpt-4o; may be repeated"),
    ] = None,
    any_name: Annotated[
        bool, _flag("--any-name", "answer requests whatever model they name")
    ] = False,
    adapter: AdapterOption = None,
    adapter_dir: Annotated[
        Path | None,
        _path_option("DIR", "a folder of adapters that clients with a key may add and remove"),
    ] = None,
    adapter_slots: Annotated[
        int | None,
        _option(
            "N",
            "adapters at once; default: those given, and 8 more with --adapter-dir",
            min=1,
            max=1024,
        ),
    ] = None,
    adapter_rank: Annotated[
        int | None,
        _option("N", "the largest rank of an adapter; default: as those given, at least 16", min=1),
    ] = None,
    draft: DraftOption = None,
) -> None:
    """Serve a model through OpenAI's and Anthropic's APIs, with a chat page."""
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        from monograph.extras import install_command

        libraries = install_command(["starlette>=1.0", "uvicorn>=0.50"])
        raise UsageError(f"monograph serve needs starlette and uvicorn: {libraries}")
    from monograph.serve.command import run as command

    interrupts.interruptible(command)(
        run,
        host=host,
        port=port,
        api_key_file=api_key_file,
        rows=rows,
        served_names=served_name or [],
        any_name=any_name,
        adapters=adapter or [],
        adapter_dir=adapter_dir,
        adapter_slots=adapter_slots,
        adapter_rank=adapter_rank,
        draft=draft,
    )


_EXPORT_TOOLS = [tool for export in EXPORTS.values() for tool in export.tools]
# The formats that let a person choose the data type of the weights, and these data types, each once.
_EXPORTS_WITH_DTYPES = [export for export in EXPORTS.values() if export.dtypes]
_EXPORT_DTYPES = dict.fromkeys(dtype for export in _EXPORTS_WITH_DTYPES for dtype in export.dtypes)


@_command(
    USE,
    "monograph export last --to out --format gguf",
    f"Write a model for {join_with_or(_EXPORT_TOOLS)}.",
)
def export(
    run: RunArgument,
    to: Annotated[
        str, _option("DIR", "the folder to write; hf://OWNER/NAME: push to the Hugging Face Hub")
    ],
    format: Annotated[
        str,
        _option(
            "|".join(EXPORTS),
            "; ".join(f"{name}: for {' and '.join(each.tools)}" for name, each in EXPORTS.items()),
        ),
    ] = next(iter(EXPORTS)),
    dtype: Annotated[
        str | None,
        _option(
            "|".join(_EXPORT_DTYPES),
            f"data type of the weights in {join_with_or(export.noun_phrase for export in _EXPORTS_WITH_DTYPES)}; "
            "default: their own",
        ),
    ] = None,
    original: Annotated[
        str | None,
        _option(
            "FOLDER",
            "the folder of a model that sees pictures: write a copy of it with the trained text model",
        ),
    ] = None,
) -> None:
    """Write a model for transformers, llama.cpp or Ollama."""
    from monograph.commands.export import run as command

    interrupts.interruptible(command)(run, to=to, format=format, dtype=dtype, original=original)


@_command(UNDERSTAND, "monograph profile my_texts/")
def profile(
    arguments: ConfigArguments = None,
    out: Annotated[
        Path | None, _path_option("DIR", "the folder of the report; default: profiles/DATE-TIME")
    ] = None,
    ladder: Annotated[
        bool, _flag("--ladder", "measure what compiling, bf16, packing and so on gain, one by one")
    ] = False,
    trust_code: TrustCodeOption = False,
    json: JsonOption = False,
) -> None:
    """Show where the time of an update goes, what limits it, and the one change that helps most."""
    if ladder:
        from monograph.commands.profile import run_ladder as run
    else:
        from monograph.commands.profile import run

    _trust_code_if(trust_code)
    interrupts.interruptible(run)(_settings(arguments, runs_code=True), out=out, json=json)


@_command(UNDERSTAND, "monograph evaluate last")
def evaluate(
    run: RunArgument,
    data: Annotated[
        list[str] | None,
        _option(
            "PATH", "text, or a file of questions; may be repeated; default: what the run held out"
        ),
    ] = None,
    chat: Annotated[
        bool, _flag("--chat", "ask each question through the model's chat template")
    ] = False,
    trust_code: TrustCodeOption = False,
    json: JsonOption = False,
) -> None:
    """Measure a model on held-out text or on multiple-choice questions."""
    from monograph.commands.evaluate import run as command

    _trust_code_if(trust_code)
    interrupts.interruptible(command)(run, data=data or [], chat=chat, json=json)


@_command(UNDERSTAND, "monograph compare RUN other/RUN")
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|FOLDER",
            help="runs, sweeps or models; each is compared with the first",
            callback=_download,
        ),
    ],
    data: Annotated[
        list[str] | None,
        _option(
            "PATH",
            "text, or a file of questions; may be repeated; default: what the first held out",
        ),
    ] = None,
    chat: Annotated[
        bool, _flag("--chat", "ask each question through the models' chat templates")
    ] = False,
    report: Annotated[
        Path | None,
        _path_option(
            "FILE.html", "write a page with the curves of all runs and the settings that differ"
        ),
    ] = None,
    trust_code: TrustCodeOption = False,
    json: JsonOption = False,
) -> None:
    """Say whether one model is better than another, and how certain that is."""
    from monograph.commands.compare import run as command

    _trust_code_if(trust_code)
    interrupts.interruptible(command)(runs, data=data or [], chat=chat, report=report, json=json)


def _with_recipe(recipe: str | None, arguments: list[str] | None) -> list[str]:
    """Return the arguments after the file of a recipe, if there is one.

    A key among the arguments replaces the recipe's value.
    """
    if recipe is None:
        return arguments or []
    from monograph.config.recipes import recipe_named

    return [str(recipe_named(recipe).path), *(arguments or [])]


def _run_folder(out: Path | None, name: str | None) -> Path | None:
    """Return the folder that --out or --name names; None without either option."""
    if name is None:
        return out
    if out is not None:
        raise UsageError(
            f"--name {name} and --out {out} both name the run's folder; give one of them"
        )
    if name in ("", ".", "..", "last") or "/" in name:
        raise UsageError(
            f"--name {name}: expected the name of a folder in runs/, but not last; --out takes a path"
        )
    return Path("runs", name)


def _trust_code_if(is_given: bool) -> None:
    """If --trust-code is given, let this process run the Python file of any run."""
    if is_given:
        from monograph.run.trust import trust_code

        trust_code()


def _settings(
    arguments: list[str] | None,
    short_options: Mapping[str, float | None] | None = None,
    runs_code: bool = False,
    needs_shape_alone: bool = False,
) -> Settings:
    """Return the settings that the command line gives.

    Args:
        arguments: a TOML file, KEY=VALUE pairs and text, in any order.
        short_options: by key, the values of options that are short for a key, such as --minutes;
            None for an option that is not given.
        runs_code: whether the command may run the Python file that the settings name.
        needs_shape_alone: whether the command needs only the shape of a model on the Hugging Face
            Hub, so that its weights are not downloaded.

    Raises:
        UsageError: an argument is wrong, or a run is named as a text to train on.
        InputRefused: a file that the arguments name cannot be used.
    """
    from monograph.config import classify

    toml, overrides, faults = classify(arguments or [])
    for key, value in (short_options or {}).items():
        if value is None:
            continue
        if key in overrides:
            faults.append(
                UsageError(
                    f"command line: {key} is given twice, as {overrides[key]} and as {value:g}"
                )
            )
        overrides[key] = value
    # Imported only now, because these imports take longer, and `classify` may have refused an argument.
    from monograph.run.repository import FILES, SHAPE_FILES
    from monograph.session.recorded import command_line_settings, refuse_model_as_text

    files = SHAPE_FILES if needs_shape_alone else FILES
    settings = command_line_settings(
        toml, overrides, runs_code=runs_code, files=files, faults=faults
    )
    refuse_model_as_text(settings)
    return settings
