"""Write a run's report: figures as PNG files and one HTML page that needs nothing but itself."""

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull
from monograph.report import quantities
from monograph.report.figures import Drawing, Row, Yardsticks, draw
from monograph.report.page import config_of, escaped, number, page, pairs, section, table

Summary = Mapping[str, Any]
Sample = tuple[float, str]  # when in the run, from 0 to 1, and the text that the model wrote

# The keys of a summary that a person reads first: (key, name, function that writes the value).
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("params", "parameters", quantities.count),
    ("tokens", "tokens", quantities.count),
    ("wall_s", "time", quantities.duration),
    ("tokens_per_s", "tokens/s", quantities.count),
    ("mfu", "of peak FLOP/s", lambda value: f"{100 * value:.0f} %"),
    ("peak_memory_bytes", "peak memory", quantities.memory),
    ("reward", "reward", lambda value: f"{value:.3f}"),
    ("accuracy", "chosen ahead", lambda value: f"{100 * value:.0f} %"),
    ("train_loss", "loss, nats", lambda value: f"{value:.3f}"),
    ("eval_loss", "held-out, nats", lambda value: f"{value:.3f}"),
)
_NAMES = {
    "update": "updates",
    "eval_bits_per_byte": "held-out, bits per byte",
    "compile_s": "tracing and compiling",
    "graph_breaks": "graph breaks",
    "dtype": "precision",
    "reward_first": "reward at first",
    "pass_at_1": "right answers",
    "eval_reward": "reward, held out",
    "eval_pass_at_1": "right answers, held out",
    "eval_accuracy": "answers ahead, held out",
    "drawn_minus_scored_max": "largest difference of drawn and scored log-probabilities",
}


def write_report(
    run_folder: Path, summary: Summary, metrics: Sequence[Row], yardsticks: Yardsticks, samples: Sequence[Sample]
) -> None:
    """Write `run_folder`/figures/*.png (sheet.png has them all) and `run_folder`/report.html, each whole or not at all.

    Args:
        run_folder: the run's folder.
        summary: the object that `monograph train --json` prints; missing keys are left out, unknown keys go into the
            table.
        metrics: rows as `monograph.report.figures` describes them.
        yardsticks: bits per byte by name.
        samples: (share of the run, 0 to 1; text that the model wrote then), shown side by side.

    Raises:
        DiskFull: there is no space for them.
    """
    headline, standing = _headline(summary), _standing(summary, yardsticks)
    sheet, drawings = draw(metrics, yardsticks, headline, _subtitle(run_folder, summary))
    there = {key for key, value in summary.items() if value is not None}
    said = "What it writes" if "reward" in there else "What it writes, from the same prompt"
    if {"reward", "accuracy"} & there:  # a loss is of advantages or of pairs, no nats a token
        there -= {"train_loss", "eval_loss"}
    text = page(
        title=run_folder.name,
        headline=headline,
        standing=standing,
        figures=[(name, written(summary[key])) for key, name, written in _FIGURES if key in there],
        drawings=drawings,
        sections=[
            section(said, _samples(samples)),
            section("Held out", _evaluations(metrics)),
            section("Slower than before", _slower(metrics)),
            section("The run", pairs(_rest(summary)), config_of(run_folder)),
        ],
    )
    write_pages(run_folder, text, [Drawing("sheet", "", sheet), *drawings])


def _headline(summary: Summary) -> str:
    if summary.get("reward") is not None:
        return f"A reward of {summary['reward']:.2f}, from {summary['reward_first']:.2f} at first"
    if summary.get("accuracy") is not None:
        held = summary["eval_accuracy"]
        share = summary["accuracy"] if held is None else held
        if summary.get("labelled"):
            return f"{share:.0%} of the answers are on the side of their label"
        return f"The chosen answer is ahead in {share:.0%} of the pairs"
    if (bits := summary.get("eval_bits_per_byte")) is not None:
        return f"{bits:.2f} bits per byte on text it has not seen"
    loss = summary.get("train_loss")
    return "A training run" if loss is None else f"{loss:.2f} nats per token in training"


def _standing(summary: Summary, yardsticks: Yardsticks) -> str:
    """Return one sentence on which yardsticks the run is below, and which it is not."""
    bits = summary.get("eval_bits_per_byte")
    if bits is None or not math.isfinite(bits) or not yardsticks:
        return ""
    ordered = sorted(yardsticks.items(), key=lambda item: -item[1])
    beaten = [f"{name} ({value:.2f})" for name, value in ordered if bits < value]
    ahead = [f"{name} ({value:.2f})" for name, value in ordered if bits >= value]
    words = [f"below {_listed(beaten)}" if beaten else "", f"not yet below {_listed(ahead)}" if ahead else ""]
    sentence = "; ".join(filter(None, words))
    return f"{sentence[0].upper()}{sentence[1:]}, all on the same text."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subtitle(run_folder: Path, summary: Summary) -> str:
    parts = [
        f"{written(summary[key])} {name}".removesuffix(" time")
        for key, name, written in _FIGURES[:4]
        if summary.get(key) is not None
    ]
    computed_on = map(str, filter(None, [summary.get("device"), summary.get("dtype")]))
    return "  ·  ".join([run_folder.name, *computed_on, *parts])


def _rest(summary: Summary) -> list[tuple[str, str]]:
    shown = {key for key, _, _ in _FIGURES} | {"schema", "run"}  # the schema is for programs, the run is the title
    if not summary.get("compile_s"):
        shown.add("compile_s")
    return [_named(key, value) for key, value in summary.items() if key not in shown and value is not None]


def _named(key: str, value: Any) -> tuple[str, str]:
    """Return a key's name and its value for people; the key's ending tells the unit."""
    if isinstance(value, Mapping):
        name, text = key, ", ".join(f"{count:,} {what}" for what, count in value.items()) or "none"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        name, text = key, str(value)
    elif key.endswith("_s"):
        name, text = key.removesuffix("_s"), quantities.duration(value)
    elif key.endswith("_bytes"):
        name, text = key.removesuffix("_bytes"), quantities.gibibytes(value)
    else:
        name, text = key, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return _NAMES.get(key, name.replace("_", " ")), text


# The columns of a table of scores on held-out text: head and form by key.
_SCORES = {
    "update": ("update", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "eval_loss": ("loss, nats", "{:.4f}"),
    "eval_bits_per_byte": ("bits per byte", "{:.4f}"),
    "eval_accuracy": ("chosen ahead", "{:.4f}"),
    "eval_margin": ("margin", "{:.4f}"),
    "eval_reward": ("reward", "{:.4f}"),
    "eval_pass_at_1": ("right answers", "{:.4f}"),
    "eval_rows": ("rows", "{:,}"),
    "eval_prompts": ("prompts", "{:,}"),
}


def _evaluations(metrics: Sequence[Row]) -> str:
    """Return a table of the held-out curve's points, for readers who want the numbers."""
    scored = [row for row in metrics if row.get("eval_loss") is not None or "eval_reward" in row]
    columns = {key: column for key, column in _SCORES.items() if any(row.get(key) is not None for row in scored)}
    rows = [[number(row.get(key), form) for key, (_, form) in columns.items()] for row in scored]
    return table("Scores on held-out text", [head for head, _ in columns.values()], rows)


def _slower(metrics: Sequence[Row]) -> str:
    """Return a table of the moments at which the run had become slower."""
    heads, keys = ["update", "tokens/s", "before", "likely reason"], ("tokens_per_s", "before")
    events = [(row["update"], row["slower"]) for row in metrics if "slower" in row]
    rows = [
        [number(update, "{:,}"), *(number(event[key], "{:,.0f}") for key in keys), event["why"] or "unknown"]
        for update, event in events
    ]
    return table("Moments at which the run had become slower", heads, rows)


def _samples(samples: Sequence[Sample]) -> str:
    blocks = "\n".join(
        f'<figure><figcaption>after {100 * share:.0f} %</figcaption><pre tabindex="0">{escaped(text)}</pre></figure>'
        for share, text in samples
    )
    return f'<div class="samples">{blocks}</div>' if blocks else ""


def write_pages(folder: Path, text: str, drawings: Sequence[Drawing]) -> None:
    """Write the drawings as figures/NAME.png and the text as report.html, each whole or not at all."""
    (folder / "figures").mkdir(exist_ok=True)
    for drawing in drawings:
        _write_whole(folder / "figures" / f"{drawing.name}.png", drawing.png)
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
            raise DiskFull(f"cannot write {path}: {error.strerror}; the run itself is complete and saved") from error
        raise
