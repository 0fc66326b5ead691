"""Declare each command with its arguments, options and help. A command's code is imported when it is called."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monograph import __version__, interrupts
from monograph.errors import UsageError

if TYPE_CHECKING:
    from monograph.config import Settings

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


def _fetched(names: Any) -> Any:
    if isinstance(names, list):
        return [_fetched(name) for name in names]
    if not names.startswith("hf://"):
        return names
    from monograph.run.repository import fetched

    return fetched(names)


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER",
        callback=_fetched,
        help="a run, `last`, a checkpoint's folder, a Hugging Face folder, hf://OWNER/NAME or a .pth file",
    ),
]


def _option(metavar: str, said: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=said, **more)


def _flag(name: str, said: str) -> Any:
    return typer.Option(name, help=said)


def _place(metavar: str, said: str, *names: str) -> Any:
    """Return an option of a path, which the command reads: typer would refuse one that cannot be as a wrong name."""
    return _option(metavar, said, *names, readable=False)


TrustCode = Annotated[bool, _flag("--trust-code", "run the Python file that a run names, also one from elsewhere")]
Json = Annotated[bool, _flag("--json", "end stdout with one JSON object")]
SHARED = (None, "train", "sweep")  # commands that several processes run together; None is `monograph` alone


@app.callback(invoke_without_command=True)
def _monograph(
    context: typer.Context, version: Annotated[bool, _flag("--version", "print the version")] = False
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
    out: Annotated[Path | None, _place("DIR", "the run's folder; default: runs/DATE-TIME")] = None,
    resume: Annotated[str | None, _option("[RUN]", "go on where a run stopped; default: last")] = None,
    from_: Annotated[str | None, _option("RUN[@UPDATE]", "start from its weights", "--from")] = None,
    minutes: Annotated[float | None, _option("M", "how long; short for train.minutes=M")] = None,
    print_config: Annotated[bool, _flag("--print-config", "print every value and its origin, and stop")] = False,
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
    samples: Annotated[int | None, _option("N", "N settings at random from the axes, instead of all")] = None,
    verify: Annotated[
        int | None, _option("I", "train member I once more, alone, and compare; of the newest sweep")
    ] = None,
    out: Annotated[
        Path | None, _place("DIR", "the sweep's folder, new or to go on with; default: runs/DATE-TIME")
    ] = None,
    distill: Annotated[
        bool, _flag("--distill", "at the end train one more model on the members' averaged probabilities")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> int:
    """Train many runs that differ in a few settings, as many at once as pays, and compare them."""
    from monograph.commands.sweep import run

    _trust(trust_code)
    return interrupts.working(run)(arguments or [], samples=samples, verify=verify, out=out, distill=distill, json=json)


@app.command()
def plan(
    arguments: ConfigArguments = None,
    device: Annotated[str | None, _option("NAME", "a card, such as H200; default: this machine")] = None,
    device_memory: Annotated[str | None, _option("24GiB", "plan for so much memory; default: what is free")] = None,
    host_memory: Annotated[
        str | None, _option("512GiB", "that a streamed model may lie in; default: what is free here")
    ] = None,
    json: Json = False,
) -> None:
    """Say what fits a device and how fast it would go, before anything is trained."""
    from monograph.commands.plan import run

    return run(_settings(arguments), device=device, device_memory=device_memory, host_memory=host_memory, json=json)


@app.command()
def profile(
    arguments: ConfigArguments = None,
    out: Annotated[Path | None, _place("DIR", "for the page and its data; default: profiles/DATE-TIME")] = None,
    ladder: Annotated[
        bool, _flag("--ladder", "measure what compiling, bf16, packing and so on are worth, one by one")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Say where the time of an update goes, what binds it and the one change that helps most."""
    if ladder:
        from monograph.commands.profile import run_ladder as run
    else:
        from monograph.commands.profile import run

    _trust(trust_code)
    interrupts.working(run)(_settings(arguments, runs_code=True), out=out, json=json)


@app.command()
def generate(
    run: Run,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="text to go on from")] = None,
    file: Annotated[Path | None, _place("FILE", "more prompts: lines, or JSON lines", "--prompts")] = None,
    chat: Annotated[bool, _flag("--chat", "answer each prompt by the model's chat template")] = False,
    temperature: Annotated[float, _option("T", "0: always the likeliest token", min=0.0)] = 0.8,
    top_k: Annotated[int, _option("K", "draw from the K likeliest tokens; 0: off", min=0)] = 0,
    top_p: Annotated[float, _option("P", "draw from the likeliest, up to this probability")] = 1.0,
    min_p: Annotated[float, _option("P", "no token less likely than P times the likeliest")] = 0.0,
    sampler: Annotated[
        list[str] | None, _option("KEY=VALUE", "another option (docs/generate.md); may be repeated")
    ] = None,
    seed: Annotated[int, _option("S", "same seed, same text", min=0)] = 0,
    n: Annotated[int, _option("N", "continuations of each prompt", "-n", "--n", min=1)] = 1,
    max_tokens: Annotated[int, _option("N", "longest continuation, in tokens", min=1)] = 128,
    stop: Annotated[list[str] | None, _option("S", "end before this text; may be repeated")] = None,
    choice: Annotated[list[str] | None, _option("TEXT", "write one of these; repeat it")] = None,
    regex: Annotated[str | None, _option("PATTERN", "write what matches as a whole")] = None,
    json_schema: Annotated[Path | None, _place("FILE", "write JSON that it validates")] = None,
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
    host: Annotated[str, _option("ADDRESS", "where to listen; others' need --api-key-file")] = "127.0.0.1",
    port: Annotated[int, _option("N", "0: any that is free", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, _place("FILE", "keys, one a line; who asks has to have one")] = None,
    rows: Annotated[int | None, _option("N", "texts at once; default: 8, on a GPU 64", min=1, max=1024)] = None,
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
        list[str] | None, _option("PATH", "text, or a file of questions; default: what the run held out")
    ] = None,
    chat: Annotated[bool, _flag("--chat", "ask each question by the model's chat template")] = False,
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
        typer.Argument(metavar="RUN|FOLDER", help="runs, sweeps, models; all against the first", callback=_fetched),
    ],
    data: Annotated[
        list[str] | None, _option("PATH", "text, or a file of questions; default: what the first held out")
    ] = None,
    chat: Annotated[bool, _flag("--chat", "ask each question by the models' chat templates")] = False,
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
    to: Annotated[str, _option("DIR", "the folder to write; hf://OWNER/NAME: push it to the Hugging Face Hub")],
    format: Annotated[str, _option("hf|gguf", "hf: for transformers; gguf: for llama.cpp and Ollama")] = "hf",
    dtype: Annotated[
        str | None, _option("f32|f16|bf16|q8_0|q4_k_m|q5_k_m|q6_k", "of the weights in a GGUF file; default: their own")
    ] = None,
) -> None:
    """Write a run's model for other tools."""
    from monograph.commands.export import run as command

    interrupts.working(command)(run, to=to, format=format, dtype=dtype)


@app.command()
def follow(
    run: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="a run, `last`, or a sweep: each of its members")],
    to: Annotated[str, _option("TRACKER", "tensorboard, wandb, trackio or mlflow")],
    out: Annotated[Path | None, _place("DIR", "for the tracker's files; default: the tracker's own place")] = None,
) -> None:
    """Send a run's metrics to a tracker, until the run stops; training knows nothing of it."""
    from monograph.commands.follow import run as command

    interrupts.working(command)(run, to=to, out=out)


@data_app.command()
def show(
    arguments: ConfigArguments = None,
    row: Annotated[int | None, _option("N", "which packed row; default: a few numbers and row 0", min=0)] = None,
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
    laws: Annotated[bool, _flag("--laws", "compare fast paths with slow ones here, in minutes")] = False,
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
    from monograph.config import classify

    toml, overrides = classify(arguments or [])
    if minutes is not None:
        if "train.minutes" in overrides:
            given = overrides["train.minutes"]
            raise UsageError(f"command line: train.minutes is given twice, as {given} and as {minutes:g}")
        overrides["train.minutes"] = minutes
    from monograph.session.recorded import require_text, settings_given

    settings = settings_given(toml, overrides, runs_code=runs_code)
    require_text(settings)
    return settings
