"""Write a run's report: figures as PNG files, and one HTML page that loads no other file."""

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull
from monograph.report import quantities
from monograph.report.charts import MetricsRow, Yardsticks
from monograph.report.figures import Picture
from monograph.report.in_progress import refresh_s
from monograph.report.markup import escaped
from monograph.report.metrics import LOSS, held_out_metrics, shown_metrics
from monograph.report.page import TableCell, column, config_of, number, page, pairs, section, table
from monograph.report.run_charts import run_drawings
from monograph.report.run_figures import draw

Summary = Mapping[str, Any]
TextSample = tuple[float, str]  # (share of the run, 0 to 1; text that the model generated then)

# The keys of a summary that a person reads first: (key, name, function that formats the value).
_KEY_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
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
_IN_SUBTITLE = 4  # the line below a title has this many of them, the first ones
# The names of other keys, where the key itself would not be understood.
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
    """What a report shows that is not in the run's rows or summary.

    Attributes:
        yardsticks: names and values in bits per byte to compare the run with, such as "gzip -9".
        samples: generated texts, which are shown side by side.
        moments: (update, what happened then) pairs at which the learning rate's curve has a kink,
            such as the end of the warm-up.
        origin: (name, text) pairs that say how the run was started: command, version, data.
        doubt: a warning if the rows show that the model has learned nothing so far, with what would help;
            otherwise "".
    """

    yardsticks: Yardsticks = field(default_factory=dict)
    samples: Sequence[TextSample] = ()
    moments: Sequence[tuple[int, str]] = ()
    origin: Sequence[tuple[str, str]] = ()
    doubt: str = ""


def write_report(
    run_folder: Path, summary: Summary, rows: Sequence[MetricsRow], about: About
) -> None:
    """Write `run_folder`/figures/*.png and `run_folder`/report.html.

    Each file is written completely or not at all. sheet.png shows the most important figures
    together.

    Args:
        run_folder: the run's folder.
        summary: the object that `monograph train --json` prints. Missing keys are left out, and
            unknown keys are in a table.
        rows: rows as `monograph.report.run_figures` describes them.
        about: what the report shows that is in neither.

    Raises:
        DiskFull: the disk has no space for a file.
    """
    title = _headline(summary)
    subtitle = _subtitle(run_folder, summary)
    sheet, pictures = draw(rows, about.yardsticks, title, subtitle)
    html_page = run_page(run_folder, summary, rows, about)
    write_pages(run_folder, html_page, [Picture("sheet", sheet), *pictures])


def write_run_page(
    folder: Path, summary: Summary, rows: Sequence[MetricsRow], about: About, state: str
) -> None:
    """Write the page of a run that has not ended, without figures.

    The arguments are those of `write_report`, and `state`, which the page shows, such as
    "in progress".

    Raises:
        DiskFull: the disk has no space for the page.
    """
    write_pages(folder, run_page(folder, summary, rows, about, state), pictures=[])


def run_page(
    run_folder: Path, summary: Summary, rows: Sequence[MetricsRow], about: About, state: str = ""
) -> str:
    """Return a run's page as HTML; see `write_report` and `write_run_page`."""
    shown_keys = {key for key, value in summary.items() if value is not None}
    samples_heading = "Samples, from the same prompt"
    if "reward" in shown_keys:
        samples_heading = "Samples"  # each answers a prompt of its own
    if LOSS not in shown_metrics(shown_keys):  # a score replaces the loss, as in the charts
        shown_keys -= {*LOSS.keys}
    warning = ""
    if about.doubt:
        warning = f"{'So far' if state else 'In all updates'}, {about.doubt}."
    return page(
        kind=f"Training run, {state}" if state else "Training run",
        title=run_folder.name,
        headline=_headline(summary),
        assessment=_yardsticks_sentence(summary, about.yardsticks),
        warning=warning,
        key_figures=[
            (name, format_value(summary[key]))
            for key, name, format_value in _KEY_FIGURES
            if key in shown_keys
        ],
        drawings=run_drawings(rows, about.yardsticks, about.moments),
        sections=[
            section(samples_heading, _samples_markup(about.samples), full_width=True),
            column(
                section("Held-out scores", _scores_table(rows)),
                section("Slowdowns", _slowdowns_table(rows)),
            ),
            column(
                section("Summary", pairs(_other_values(summary))),
                section("How it was run", pairs(about.origin), config_of(run_folder)),
            ),
        ],
        refresh_s=refresh_s(state),
    )


def _headline(summary: Summary) -> str:
    """Return the run's most telling score in a few words."""
    if summary.get("reward") is not None:
        return f"Mean reward {summary['reward']:.2f}, {summary['reward_first']:.2f} at the start"
    if summary.get("accuracy") is not None:
        held_out_share = summary["eval_accuracy"]
        share = summary["accuracy"] if held_out_share is None else held_out_share
        if summary.get("labelled"):  # records have single answers, each labelled good or bad
            return f"{share:.0%} of the answers are scored as they are labelled"
        return f"The chosen answer scores higher in {share:.0%} of the pairs"
    if summary.get("eval_bits_per_byte") is not None:
        return f"{summary['eval_bits_per_byte']:.2f} bits per byte on held-out text"
    if summary.get("eval_loss") is not None:
        return f"Held-out loss {summary['eval_loss']:.2f} nats per token"
    if summary.get("train_loss") is not None:
        return f"Training loss {summary['train_loss']:.2f} nats per token"
    return "No results yet"


def _yardsticks_sentence(summary: Summary, yardsticks: Yardsticks) -> str:
    """Return a sentence that names first the yardsticks that the run has beaten, and then the others."""
    bits = summary.get("eval_bits_per_byte")
    if bits is None or not math.isfinite(bits) or not yardsticks:
        return ""
    worst_first = sorted(yardsticks.items(), key=lambda item: -item[1])
    beaten = [f"{name} ({value:.2f})" for name, value in worst_first if bits < value]
    not_beaten = [f"{name} ({value:.2f})" for name, value in worst_first if bits >= value]
    clauses = []
    if beaten:
        clauses.append(f"below {_join_with_and(beaten)}")
    if not_beaten:
        clauses.append(f"not yet below {_join_with_and(not_beaten)}")
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}, all on the same text."


def _join_with_and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subtitle(run_folder: Path, summary: Summary) -> str:
    """Return a line with the folder, the device, the precision, and the first `_IN_SUBTITLE` key figures."""
    parts = [run_folder.name]
    parts += [str(summary[key]) for key in ("device", "dtype") if summary.get(key)]
    for key, name, format_value in _KEY_FIGURES[:_IN_SUBTITLE]:
        if summary.get(key) is not None:
            # A duration needs no name.
            parts.append(f"{format_value(summary[key])} {name}".removesuffix(" total time"))
    return "  ·  ".join(parts)


def _other_values(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, value) pairs of the summary's keys that the page shows nowhere else."""
    left_out = {key for key, _, _ in _KEY_FIGURES}
    left_out.add("schema")  # is for programs
    left_out.add("run")  # is the page's title
    if not summary.get("compile_s"):
        left_out.add("compile_s")  # nothing was compiled
    return [
        _name_and_text(key, value)
        for key, value in summary.items()
        if key not in left_out and value is not None
    ]


def _name_and_text(key: str, value: object) -> tuple[str, str]:
    """Return a key's name and its value for people.

    The key's ending says the unit: `_s` is seconds, `_bytes` is bytes.
    """
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


def _score_columns() -> dict[str, tuple[str, str]]:
    """Return the columns of the table of held-out scores: (head, format) by key."""
    return {
        "update": ("update", "{:,}"),
        "tokens": ("tokens", "{:,}"),
        **{metric.held_out: (metric.head or metric.key, "{:.4f}") for metric in held_out_metrics()},
        "eval_pass_at_1": ("correct answers", "{:.4f}"),
        "eval_rows": ("rows", "{:,}"),
        "eval_prompts": ("prompts", "{:,}"),
    }


def _scores_table(rows: Sequence[MetricsRow]) -> str:
    """Return a table of the held-out curve's points, for readers who want the numbers."""
    score_keys = [metric.held_out for metric in held_out_metrics()]
    scored = [row for row in rows if any(row.get(key) is not None for key in score_keys)]
    heads = list[str]()
    cells: list[list[TableCell]] = [[] for _ in scored]
    for key, (head, number_format) in _score_columns().items():
        values = [row.get(key) for row in scored]
        if all(value is None for value in values):
            continue  # a column without values is left out
        heads.append(head)
        for row_cells, value in zip(cells, values, strict=True):
            row_cells.append(number(value, number_format))
    return table("Scores on held-out text", heads, cells)


def _slowdowns_table(rows: Sequence[MetricsRow]) -> str:
    """Return a table of the updates at which the run became slower."""
    heads = ["update", "tokens/s", "before", "likely cause"]
    cells = []
    for row in rows:
        if "slower" not in row:
            continue
        slowdown = row["slower"]
        cells.append(
            [
                number(row["update"], "{:,}"),
                number(slowdown["tokens_per_s"], "{:,.0f}"),
                number(slowdown["before"], "{:,.0f}"),
                slowdown["why"] or "unknown",
            ]
        )
    return table("Moments at which the run became slower", heads, cells)


def _samples_markup(samples: Sequence[TextSample]) -> str:
    blocks = "\n".join(
        f"<figure><figcaption>at {100 * share:.0f} % of training</figcaption>"
        f'<pre tabindex="0">{escaped(text)}</pre></figure>'
        for share, text in samples
    )
    return f'<div class="samples">{blocks}</div>' if blocks else ""


def write_pages(folder: Path, text: str, pictures: Sequence[Picture]) -> None:
    """Write the pictures as figures/NAME.png and the HTML page `text` as report.html.

    Each file is written completely or not at all.

    Raises:
        DiskFull: the disk has no space for a file.
    """
    if pictures:
        (folder / "figures").mkdir(exist_ok=True)
    for picture in pictures:
        _write_atomically(folder / "figures" / f"{picture.name}.png", picture.png)
    _write_atomically(folder / "report.html", text.encode())


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all.

    Raises:
        DiskFull: the disk has no space for the file, or cannot write it.
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
