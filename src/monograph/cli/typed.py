"""Declare each command with its arguments, options and help. A command's code is imported when it is called."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monograph import __version__, interrupts
from monograph.errors import UsageError

if TYPE_CHECKING:
    from monograph.config import Settings

# Options of paths have `readable=False`, so that the command reads them. By default typer would refuse a file that
# the system fails to look at as if its name were wrong.
app = typer.Typer(
    name="monograph",
    help="Train and sample language models on the one GPU you have (or on none).",
    epilog="An argument of a command is a CONFIG.toml, a section.key=value pair, or text; `last` is the newest run.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
data_app = typer.Typer(help="Show or prepare the data.", rich_markup_mode=None)
app.add_typer(data_app, name="data")

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.toml | KEY=VALUE | PATH", help="settings and text, in any order", show_default=False
    ),
]
AxisArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.toml | KEY=AXIS | PATH",
        help="settings and text; an axis is 1e-3,1e-2 or log:1e-4..1e-2:8 or lin:0..0.2:3 or 0..3",
        show_default=False,
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER", help="a run, `last`, a checkpoint's folder, a Hugging Face folder or a .pth file"
    ),
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="run the Python file that a run names, also one from elsewhere")
]
Json = Annotated[bool, typer.Option("--json", help="end stdout with one JSON object")]
SHARED = (None, "train", "sweep")  # commands that several processes run together; None is `monograph` alone


@app.callback(invoke_without_command=True)
def _monograph(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        print(f"monograph {__version__}")
        raise typer.Exit
    if (command := context.invoked_subcommand) not in SHARED and launched() > 1:
        raise UsageError(f"{launched()} processes were started: `monograph {command}` is one; leave the launcher out")
    _help_if_bare(context)


def launched() -> int:
    """Return how many processes of this command a launcher such as torchrun has started."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "MASTER_ADDR" in os.environ else 1


@data_app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    _help_if_bare(context)


def _help_if_bare(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def train(
    arguments: ConfigArguments = None,
    out: Annotated[
        Path | None, typer.Option(readable=False, metavar="DIR", help="the run's folder; default: runs/DATE-TIME")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[RUN]", help="go on where a run stopped; default: last")
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", metavar="RUN[@UPDATE]", help="start from its weights")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="how long; short for train.minutes=M")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print every value and its origin, and stop")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Train a model on text. With no arguments: three minutes on Python's own sources."""
    if resume and from_:
        raise UsageError("--resume continues a run and --from starts a new one; give one of them")
    _trust(trust_code)
    settings = _settings(arguments, minutes, runs_code=not print_config)
    if print_config:
        print(settings.to_toml(origins=True), end="")
        return
    from monograph.commands.train import run

    interrupts.working(run)(settings, out=out, resume=resume, from_=from_, json=json)


@app.command()
def sweep(
    arguments: AxisArguments = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="N settings at random from the axes, instead of all")
    ] = None,
    verify: Annotated[
        int | None, typer.Option(metavar="I", help="train member I once more, alone, and compare; of the newest sweep")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="DIR", help="the sweep's folder, new or to go on with; default: runs/DATE-TIME"
        ),
    ] = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> int:
    """Train many runs that differ in a few settings, as many at once as pays, and compare them."""
    from monograph.commands.sweep import run

    _trust(trust_code)
    return interrupts.working(run)(arguments or [], samples=samples, verify=verify, out=out, json=json)


@app.command()
def plan(
    arguments: ConfigArguments = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="a card, such as H200; default: this machine")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="24GiB", help="plan for so much memory; default: what is free")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="512GiB", help="that a streamed model may lie in; default: what is free here")
    ] = None,
    json: Json = False,
) -> None:
    """Say what fits a device and how fast it would go, before anything is trained."""
    from monograph.commands.plan import run

    settings = _settings(arguments)
    return run(settings, device=device, device_memory=device_memory, host_memory=host_memory, json=json)


@app.command()
def profile(
    arguments: ConfigArguments = None,
    out: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="DIR", help="for the page and its data; default: profiles/DATE-TIME"),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="measure what compiling, bf16, packing and so on are worth, one by one")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Say where the time of an update goes, what binds it and the one change that helps most."""
    if ladder:
        from monograph.commands.ladder import run
    else:
        from monograph.commands.profile import run

    _trust(trust_code)
    interrupts.working(run)(_settings(arguments, runs_code=True), out=out, json=json)


@app.command()
def generate(
    run: Run,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="text to go on from")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", readable=False, metavar="FILE", help="more prompts: lines, or JSON lines"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="answer each prompt by the model's chat template")] = False,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(metavar="K", min=0, help="draw from the K likeliest tokens; 0: off")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="draw from the likeliest, up to this probability")] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="P", help="no token less likely than P times the likeliest")] = 0.0,
    sampler: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="another option (docs/generate.md); may be repeated")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="same seed, same text")] = 0,
    n: Annotated[int, typer.Option("-n", "--n", metavar="N", min=1, help="continuations of each prompt")] = 1,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="longest continuation, in tokens")] = 128,
    stop: Annotated[list[str] | None, typer.Option(metavar="S", help="end before this text; may be repeated")] = None,
    choice: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="write one of these; repeat it")] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="write what matches as a whole")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="write JSON that it validates")
    ] = None,
    json: Json = False,
) -> None:
    """Continue text, or answer, with a trained model."""
    from monograph.commands.generate import run as command

    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    constraints = {"choices": choice, "regex": regex, "json_schema": json_schema}
    how = {"numbers": numbers, "pairs": sampler or [], "constraints": constraints, "chat": chat, "json": json}
    interrupts.working(command)(run, prompts or [], file=file, n=n, max_tokens=max_tokens, stop=stop or [], **how)


@app.command()
def serve(
    run: Run,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="where to listen; others' need --api-key-file")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: any that is free")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="keys, one a line; who asks has to have one")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="texts at once; default: 8, on a GPU 64")
    ] = None,
) -> None:
    """Answer OpenAI's protocol with a model, for chat windows and programs."""
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise UsageError("monograph serve needs starlette and uvicorn: pip install 'monograph[serve]'")
    from monograph.serve.command import run as command

    interrupts.working(command)(run, host=host, port=port, api_key_file=api_key_file, rows=rows)


@app.command()
def evaluate(
    run: Run,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="text, or a file of questions; default: what the run held out"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask each question by the model's chat template")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Measure bits per byte on text that was held out, or answer multiple choice."""
    from monograph.commands.evaluate import run as command

    _trust(trust_code)
    interrupts.working(command)(run, data=data or [], chat=chat, json=json)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN|FOLDER", help="a run, a sweep or a model's folder; the others against the first"),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="text, or a file of questions; default: what the first held out"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask each question by the models' chat templates")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Say whether one model is better than another on the same text or questions, and how sure that is."""
    from monograph.commands.compare import run as command

    _trust(trust_code)
    interrupts.working(command)(runs, data=data or [], chat=chat, json=json)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option(readable=False, metavar="DIR", help="the folder to write")],
    format: Annotated[
        str, typer.Option(metavar="hf|gguf", help="hf: for transformers; gguf: for llama.cpp and Ollama")
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option(metavar="f32|f16|bf16|q8_0", help="of the weights in a GGUF file; default: their own")
    ] = None,
) -> None:
    """Write a run's model for other tools."""
    from monograph.commands.export import run as command

    interrupts.working(command)(run, to=to, format=format, dtype=dtype)


@data_app.command()
def show(
    arguments: ConfigArguments = None,
    row: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="which packed row; default: a few numbers and row 0")
    ] = None,
) -> None:
    """Decode one packed row and mark its trained tokens."""
    from monograph.commands.data import show as command

    interrupts.working(command)(_settings(arguments), row=row)


@data_app.command()
def build(arguments: ConfigArguments = None) -> None:
    """Tokenise the text once, for all later runs."""
    from monograph.commands.data import build as command

    interrupts.working(command)(_settings(arguments))


@app.command()
def check(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="verify this run's or model's files; default: this machine")
    ] = None,
    laws: Annotated[bool, typer.Option("--laws", help="compare fast paths with slow ones here, in minutes")] = False,
    json: Json = False,
) -> None:
    """Say whether this machine or a run is in order."""
    from monograph.commands.check import run as command

    interrupts.working(command)(run, laws=laws, json=json)


def _trust(said: bool) -> None:
    if said:
        from monograph.run.trust import trust_code

        trust_code()


def _settings(arguments: list[str] | None, minutes: float | None = None, runs_code: bool = False) -> Settings:
    """Return the settings that the command line gives.

    Args:
        arguments: a TOML file, KEY=VALUE pairs and text, in any order.
        minutes: the value of --minutes, if it is given.
        runs_code: whether the command may run the Python file that the settings name.
    """
    from monograph.config import classify, load

    toml, overrides = classify(arguments or [])
    if minutes is not None:
        if "train.minutes" in overrides:
            given = overrides["train.minutes"]
            raise UsageError(f"command line: train.minutes is given twice, as {given} and as {minutes:g}")
        overrides["train.minutes"] = minutes
    from monograph.session.recorded import hold_to_its_run, require_text

    hold_to_its_run(toml, runs_code=runs_code and "model.init" not in overrides)
    settings = load(toml, overrides)
    require_text(settings)
    return settings
