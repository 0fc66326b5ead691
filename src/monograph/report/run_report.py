"""Write a run's report: figures as PNG files and one HTML page that needs nothing but itself."""

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull
from monograph.report import quantities
from monograph.report.figures import Picture, Row, Yardsticks, draw
from monograph.report.in_progress import refresh_s
from monograph.report.markup import escaped
from monograph.report.metrics import LOSS, held_out, shown
from monograph.report.page import column, config_of, number, page, pairs, section, table
from monograph.report.run_charts import drawings_of

Summary = Mapping[str, Any]
Sample = tuple[float, str]  # when in the run, from 0 to 1, and the text that the model wrote

# The keys of a summary that a person reads first: (key, name, function that writes the value).
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("params", "parameters", quantities.count),
    ("tokens", "tokens", quantities.count),
    ("wall_s", "total time", quantities.duration),
    ("tokens_per_s", "tokens/s", quantities.count),
    ("mfu", "MFU", lambda value: f"{100 * value:.0f} %"),
    ("peak_memory_bytes", "peak memory", quantities.memory),
    ("reward", "reward, training", lambda value: f"{value:.3f}"),
    ("accuracy", "accuracy, training", lambda value: f"{100 * value:.0f} %"),
    ("train_loss", "training loss, nats", lambda value: f"{value:.3f}"),
    ("eval_loss", "held-out loss, nats", lambda value: f"{value:.3f}"),
)
_NAMES = {
    "update": "updates",
    "eval_bits_per_byte": "held-out, bits per byte",
    "eval_weights": "weights evaluated",
    "training_s": "training time",
    "promised_s": "time budget",
    "compile_s": "compile time",
    "graph_breaks": "graph breaks",
    "dtype": "precision",
    "passed_over": "skipped files and records",
    "reward_first": "reward, first tenth",
    "pass_at_1": "correct answers",
    "eval_reward": "held-out reward",
    "eval_pass_at_1": "held-out correct answers",
    "eval_accuracy": "held-out accuracy",
    "drawn_minus_scored_max": "log-probability, sampled vs trained: largest gap",
}


@dataclass(frozen=True)
class About:
    """What a run's rows do not say.

    Attributes:
        yardsticks: bits per byte by name.
        samples: (share of the run, 0 to 1; text that the model wrote then), shown side by side.
        moments: (update, words) of what the learning rate's curve shows, such as the end of the
            warm-up.
        origin: (name, text) pairs on how the run was started: command, version, data.
        doubt: why what the run did is worth nothing, and what would help; empty if nothing says so.
    """

    yardsticks: Yardsticks = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    moments: Sequence[tuple[int, str]] = ()
    origin: Sequence[tuple[str, str]] = ()
    doubt: str = ""


def write_report(run_folder: Path, summary: Summary, metrics: Sequence[Row], about: About) -> None:
    """Write `run_folder`/figures/*.png (sheet.png has them all) and `run_folder`/report.html, each
    whole or not at all.

    Args:
        run_folder: the run's folder.
        summary: the object that `monograph train --json` prints; missing keys are left out, unknown
            keys go into the table.
        metrics: rows as `monograph.report.figures` describes them.
        about: what these do not say.

    Raises:
        DiskFull: there is no space for them.
    """
    sheet, drawings = draw(
        metrics, about.yardsticks, _headline(summary), _subtitle(run_folder, summary)
    )
    write_pages(
        run_folder,
        run_page(run_folder, summary, metrics, about),
        [Picture("sheet", sheet), *drawings],
    )


def write_run_page(
    folder: Path, summary: Summary, metrics: Sequence[Row], about: About, state: str
) -> None:
    """Write the page of a run that has not ended, without figures; `state` says what it is, such as
    "in progress".

    Raises:
        DiskFull: there is no space for it.
    """
    write_pages(folder, run_page(folder, summary, metrics, about, state), [])


def run_page(
    run_folder: Path, summary: Summary, metrics: Sequence[Row], about: About, state: str = ""
) -> str:
    """Return a run's page as HTML; see `write_report` and `write_run_page`."""
    there = {key for key, value in summary.items() if value is not None}
    said = "Samples" if "reward" in there else "Samples, from the same prompt"
    if LOSS not in shown(there):
        there -= {*LOSS.keys}
    return page(
        kind=f"Training run, {state}" if state else "Training run",
        title=run_folder.name,
        headline=_headline(summary),
        standing=_standing(summary, about.yardsticks),
        warning=f"{'So far' if state else 'In all updates'}, {about.doubt}." if about.doubt else "",
        figures=[(name, written(summary[key])) for key, name, written in _FIGURES if key in there],
        drawings=drawings_of(metrics, about.yardsticks, about.moments),
        sections=[
            section(said, _samples(about.samples), whole=True),
            column(
                section("Held-out scores", _evaluations(metrics)),
                section("Slowdowns", _slower(metrics)),
            ),
            column(
                section("Summary", pairs(_rest(summary))),
                section("How it was run", pairs(about.origin), config_of(run_folder)),
            ),
        ],
        refresh_s=refresh_s(state),
    )


def _headline(summary: Summary) -> str:
    if summary.get("reward") is not None:
        return f"Mean reward {summary['reward']:.2f}, {summary['reward_first']:.2f} at the start"
    if summary.get("accuracy") is not None:
        held = summary["eval_accuracy"]
        share = summary["accuracy"] if held is None else held
        if summary.get("labelled"):
            return f"{share:.0%} of the answers are scored as they are labelled"
        return f"The chosen answer scores higher in {share:.0%} of the pairs"
    if (bits := summary.get("eval_bits_per_byte")) is not None:
        return f"{bits:.2f} bits per byte on held-out text"
    if (held_out := summary.get("eval_loss")) is not None:
        return f"Held-out loss {held_out:.2f} nats per token"
    loss = summary.get("train_loss")
    return "No results yet" if loss is None else f"Training loss {loss:.2f} nats per token"


def _standing(summary: Summary, yardsticks: Yardsticks) -> str:
    """Return one sentence on which yardsticks the run is below, and which it is not."""
    bits = summary.get("eval_bits_per_byte")
    if bits is None or not math.isfinite(bits) or not yardsticks:
        return ""
    ordered = sorted(yardsticks.items(), key=lambda item: -item[1])
    beaten = [f"{name} ({value:.2f})" for name, value in ordered if bits < value]
    ahead = [f"{name} ({value:.2f})" for name, value in ordered if bits >= value]
    words = [
        f"below {_listed(beaten)}" if beaten else "",
        f"not yet below {_listed(ahead)}" if ahead else "",
    ]
    sentence = "; ".join(filter(None, words))
    return f"{sentence[0].upper()}{sentence[1:]}, all on the same text."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subtitle(run_folder: Path, summary: Summary) -> str:
    parts = [
        f"{written(summary[key])} {name}".removesuffix(" total time")
        for key, name, written in _FIGURES[:4]
        if summary.get(key) is not None
    ]
    computed_on = map(str, filter(None, [summary.get("device"), summary.get("dtype")]))
    return "  ·  ".join([run_folder.name, *computed_on, *parts])


def _rest(summary: Summary) -> list[tuple[str, str]]:
    # The schema is for programs, the run is the title.
    shown = {key for key, _, _ in _FIGURES} | {"schema", "run"}
    if not summary.get("compile_s"):
        shown.add("compile_s")
    return [
        _named(key, value)
        for key, value in summary.items()
        if key not in shown and value is not None
    ]


def _named(key: str, value: object) -> tuple[str, str]:
    """Return a key's name and its value for people; the key's ending tells the unit."""
    if key == "eval_weights":
        name = key
        text = {"last": "final", "averaged": "moving average (EMA)"}[str(value)]
    elif isinstance(value, Mapping):
        name = key
        text = ", ".join(f"{count:,} {what}" for what, count in value.items()) or "none"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        name = key
        text = str(value)
    elif key.endswith("_s"):
        name = key.removesuffix("_s")
        text = quantities.duration(value)
    elif key.endswith("_bytes"):
        name = key.removesuffix("_bytes")
        text = quantities.gibibytes(value)
    else:
        name = key
        text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return _NAMES.get(key, name.replace("_", " ")), text


def _scores() -> dict[str, tuple[str, str]]:
    """Return the columns of a table of scores on held-out text: head and form by key."""
    return {
        "update": ("update", "{:,}"),
        "tokens": ("tokens", "{:,}"),
        **{each.held_out: (each.head or each.key, "{:.4f}") for each in held_out()},
        "eval_pass_at_1": ("correct answers", "{:.4f}"),
        "eval_rows": ("rows", "{:,}"),
        "eval_prompts": ("prompts", "{:,}"),
    }


def _evaluations(rows: Sequence[Row]) -> str:
    """Return a table of the held-out curve's points, for readers who want the numbers."""
    scores = [metric.held_out for metric in held_out()]
    scored = [row for row in rows if any(row.get(key) is not None for key in scores)]
    columns = {
        key: column
        for key, column in _scores().items()
        if any(row.get(key) is not None for row in scored)
    }
    cells = [[number(row.get(key), form) for key, (_, form) in columns.items()] for row in scored]
    return table("Scores on held-out text", [head for head, _ in columns.values()], cells)


def _slower(metrics: Sequence[Row]) -> str:
    """Return a table of the moments at which the run had become slower."""
    heads = ["update", "tokens/s", "before", "likely cause"]
    keys = ("tokens_per_s", "before")
    events = [(row["update"], row["slower"]) for row in metrics if "slower" in row]
    rows = [
        [
            number(update, "{:,}"),
            *(number(event[key], "{:,.0f}") for key in keys),
            event["why"] or "unknown",
        ]
        for update, event in events
    ]
    return table("Moments at which the run became slower", heads, rows)


def _samples(samples: Sequence[Sample]) -> str:
    blocks = "\n".join(
        f"<figure><figcaption>at {100 * share:.0f} % of training</figcaption>"
        f'<pre tabindex="0">{escaped(text)}</pre></figure>'
        for share, text in samples
    )
    return f'<div class="samples">{blocks}</div>' if blocks else ""


def write_pages(folder: Path, text: str, pictures: Sequence[Picture]) -> None:
    """Write the pictures as figures/NAME.png and the text as report.html, each whole or not at all."""
    if pictures:
        (folder / "figures").mkdir(exist_ok=True)
    for picture in pictures:
        _write_whole(folder / "figures" / f"{picture.name}.png", picture.png)
    _write_whole(folder / "report.html", text.encode())


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        DiskFull: there is no space for it.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise DiskFull(
                f"cannot write {path}: {error.strerror}; the run itself is complete and saved"
            ) from error
        raise
