"""Write the tables and the picture of docs/rewards.md and docs/preferences.md from what benchmarks
have measured.

Usage: python docs/make_rewards.py (tests/rl/test_rewards_page.py compares)
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph.report import figures
from monograph.report.figures import themed

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "rewards.md", DOCS / "figures" / "rewards.svg"
PICTURE_OF_EPISODES = DOCS / "figures" / "episodes.svg"
RESULTS = DOCS.parent / "benchmarks" / "results"
STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)))  # of the lines of objectives
BEGIN = "<!-- made by docs/make_rewards.py -->"
Case = dict[str, Any]
TASKS = {
    "makes": '"57=" -> two numbers that add up to it',
    "sums": '"37+58=" -> the sum, backwards',
    "sorts": "six digits -> in order",
}
ENVIRONMENTS = {
    "guess": "guess a number of 16 in four turns",
    "calculator": "add three numbers by a tool that adds two",
    "shell": "find a word in one of three folders by commands",
}
PLAIN = {name: name for name in ("before", "chosen texts", "teacher")}  # others are values of a key
WINDOW = 9  # updates whose mean is drawn


def cases(name: str) -> list[Case]:
    """Return the cases of a result file."""
    found: list[Case] = json.loads((RESULTS / f"{name}.json").read_text())["cases"]
    return found


def tasks() -> str:
    """Return what each task was before and after."""
    lines = [
        "| task | right answers before | after | to prompts never trained on | updates | seconds | drawn - scored |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases("rewards"):
        apart = "0" if case["apart"] == 0 else f"{case['apart']:.0e}"
        lines.append(
            f"| {TASKS[case['task']]} | {case['before']:.2f} | {case['after']:.2f} | {case['unseen']:.2f} | "
            f"{case['updates']} | {case['training_s']:.0f} | {apart} |"
        )
    return "\n".join(lines)


def objectives() -> dict[str, list[Case]]:
    """Return the runs of each objective, in the order in which they were measured."""
    found: dict[str, list[Case]] = {}
    for case in cases("rewards_ladder"):
        found.setdefault(case["objective"], []).append(case)
    return found


def ladder() -> str:
    """Return the first task by objective, over seeds."""
    lines = [
        "| `rl.advantage` | right answers, before | after | dead groups at the end |",
        "|---|---|---|---|",
    ]
    for name, runs in objectives().items():
        cells = (spread([run[key] for run in runs]) for key in ("before", "after", "dead"))
        advantage, _, draws = name.partition("+")
        lines.append(
            f"| `{advantage}`{f', `rl.draws={draws}`' if draws else ''} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def beside() -> str:
    """Return what TRL does in the same time."""
    lines = [
        "| trainer | answers drawn a second | updates a second | right answers, same time | same updates "
        "| gradient's error |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases("reward_peers"):
        values = [case[key]["median"] for key in ("pass_at_1", "pass_at_1_same_updates")]
        ratios = [
            f"{1 / case[f'{key}_per_s_ratio']['median']:.2f} ×" for key in ("rollouts", "updates")
        ]
        right = " | ".join(f"{value:.2f}" for value in values)
        lines.append(
            f"| {case['way']} | {' | '.join(ratios)} | {right} | {case['gradient_error']['median']:.1e} |"
        )
    return "\n".join(lines)


def beside_episodes() -> str:
    """Return what TRL does with the same environment."""
    lines = [
        "| trainer | episodes sampled a second | updates a second | solved episodes, same time | same updates |",
        "|---|---|---|---|---|",
    ]
    for case in cases("episode_peers"):
        ratios = [
            f"{1 / case[f'{key}_per_s_ratio']['median']:.2f} ×" for key in ("rollouts", "updates")
        ]
        shares = [f"{case[key]['median']:.2f}" for key in ("pass_at_1", "pass_at_1_same_updates")]
        lines.append(f"| {case['way']} | {' | '.join([*ratios, *shares])} |")
    return "\n".join(lines)


def episodes_by_task() -> dict[str, list[Case]]:
    """Return the runs of each environment, in the order in which they were measured."""
    found: dict[str, list[Case]] = {}
    for case in cases("episodes"):
        found.setdefault(case["task"], []).append(case)
    return found


def episodes() -> str:
    """Return how many episodes of each environment were solved before and after, over seeds."""
    lines = [
        "| environment | seeds | solved episodes, before | after | of held-out records | answers of an episode, before "
        "| after | updates | drawn - scored |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in episodes_by_task().items():
        cells = [spread([run[key] for run in runs]) for key in ("before", "after", "unseen")]
        turns = [
            f"{statistics.fmean(run[f'turns_{when}'] for run in runs):.1f}"
            for when in ("before", "after")
        ]
        apart = max(run["apart"] for run in runs)
        lines.append(
            f"| {ENVIRONMENTS[name]} | {len(runs)} | {' | '.join([*cells, *turns])} | {runs[0]['updates']} | "
            f"{'0' if apart == 0 else f'{apart:.0e}'} |"
        )
    return "\n".join(lines)


def preferences() -> str:
    """Return what pairs of its own answers, and a teacher, made of a model, over seeds."""
    lines = [
        "| learned from | right answers | to prompts in no pair | held-out pairs, chosen ahead |", "|---|---|---|---|",
    ]  # fmt: skip
    ways: dict[str, list[Case]] = {}
    for case in cases("preferences"):
        ways.setdefault(case["way"], []).append(case)
    for way, runs in ways.items():
        cells = [spread([run[key] for run in runs]) for key in ("right", "unseen")]
        ahead = [run["ahead"] for run in runs if run["ahead"] is not None]
        lines.append(
            f"| {PLAIN.get(way, f'`{way}`')} | {' | '.join(cells)} | {spread(ahead) if ahead else ''} |"
        )
    return "\n".join(lines)


def beside_dpo() -> str:
    """Return what TRL does with the same pairs."""
    lines = [
        "| trainer | pairs learned a second | by CPU time | training pairs, chosen ahead | pairs to other prompts "
        "| first loss - ln 2 | gradient's error |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases("preference_peers"):
        ratio = "1.00 ×" if case["way"] == "monograph" else inverse(case["ratio_cpu"])
        ahead = [spread(case[key]["values"]) for key in ("ahead", "ahead_unseen")]
        apart = case["first_loss_less_ln_2"]["median"]
        lines.append(
            f"| {case['way']} | {case['pairs_per_wall_s']['median']:.0f} | {ratio} | {' | '.join(ahead)} | "
            f"{'0' if apart == 0 else f'{apart:.0e}'} | {case['gradient_error']['median']:.1e} |"
        )
    return "\n".join(lines)


def planned() -> str:
    """Return the bytes that plans say and that runs took."""
    heads = "planned, MiB | measured | off by | drawing, planned s | measured | off by"
    lines = [f"| run | {heads} |", "|---|---|---|---|---|---|---|"]
    for case in cases("plan_rewards"):
        cells = []
        for unit, divisor, form in (("bytes", 2**20, ".1f"), ("s", 1, ".2f")):
            planned, measured = case[f"planned_{unit}"], case[f"measured_{unit}"]
            off = f"{planned / measured - 1:+.1%}".replace("-", "−")
            cells += [format(planned / divisor, form), format(measured / divisor, form), off]
        lines.append(f"| {case['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def inverse(ratio: dict[str, Any]) -> str:
    """Return 1 / ratio as `0.58 × (0.49-0.68)`; the ratio is Monograph's rate over another rate."""
    return f"{1 / ratio['median']:.2f} × ({1 / ratio['high']:.2f}-{1 / ratio['low']:.2f})"


def spread(values: list[float]) -> str:
    """Return `0.91 (0.88-0.95)`."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def smooth(values: list[float]) -> list[float]:
    """Return the mean of up to WINDOW values around each."""
    half = WINDOW // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def drawn() -> str:
    """Draw right answers over seconds for the tasks, and over updates for the objectives."""
    from matplotlib.figure import Figure

    colours = (figures.ACCENT, figures.WARN, figures.MUTED)
    with figures.style():
        figure = Figure(figsize=(7.3, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for case, colour in zip(cases("rewards"), colours, strict=True):
            seconds, passed, _, _ = zip(*case["curve"], strict=True)
            left.plot(
                seconds, smooth(list(passed)), color=colour, linewidth=1.8, label=case["task"]
            )
        for (name, runs), style in zip(objectives().items(), STYLES, strict=True):
            columns = zip(*(smooth([row[1] for row in run["curve"]]) for run in runs), strict=True)
            right.plot(
                [statistics.fmean(each) for each in columns],
                color=figures.ACCENT,
                linestyle=style,
                label=name,
            )
        left.set_title("Right answers, by task")
        right.set_title("The first task, mean of three seeds")
        left.set_xlabel("seconds of training", fontsize=8, loc="right")
        right.set_xlabel("updates", fontsize=8, loc="right")
        left.set_ylim(0, 1)
        for axes in (left, right):
            axes.legend(frameon=False, fontsize=8, loc="lower right")
        return themed(figures.svg(figure))


def drawn_episodes() -> str:
    """Draw the solved episodes of each environment over updates: each seed, and their mean."""
    from matplotlib.figure import Figure

    colours = (figures.ACCENT, figures.WARN, figures.MUTED)
    with figures.style():
        figure = Figure(figsize=(5.2, 3.1), layout="constrained")
        axes = figure.subplots()
        for (name, runs), colour in zip(episodes_by_task().items(), colours, strict=False):
            curves = [smooth([row[2] for row in run["curve"]]) for run in runs]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.7, alpha=0.45)
            mean = [statistics.fmean(each) for each in zip(*curves, strict=True)]
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=1.8, label=name)
        axes.set_title("Solved episodes")
        axes.set_xlabel("updates", fontsize=8, loc="right")
        axes.set_ylim(0, 1)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        return themed(figures.svg(figure))


TABLES = {
    PAGE: (episodes, tasks, ladder, planned, beside, beside_episodes),
    DOCS / "preferences.md": (preferences, beside_dpo),
}


def main() -> None:
    """Rewrite the text between the markers, and the picture."""
    for page, tables in TABLES.items():
        made = [table() for table in tables]
        text = with_made_parts(page.read_text(encoding="utf-8"), BEGIN, made)
        page.write_text(text, encoding="utf-8")
    PICTURE.write_text(drawn(), encoding="utf-8")
    PICTURE_OF_EPISODES.write_text(drawn_episodes(), encoding="utf-8")


if __name__ == "__main__":
    main()
