"""One report of each kind, as a page, with numbers shaped like those of a real run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from monograph.profiling.bottleneck import Machine, Situation, verdict
from monograph.profiling.intervals import Kernel, Timeline, time_by_part
from monograph.profiling.profiler import Profile
from monograph.report.compare_report import Compared, compare_page
from monograph.report.profile_report import ladder_page, profile_page
from monograph.report.run_report import About, run_page
from monograph.report.sweep_charts import MemberCurve, SweepScore, sweep_drawings
from monograph.report.sweep_report import sweep_page

HOSTILE = "<script>alert(1)</script> & \x1b[31m"
YARDSTICKS = {"trigram": 2.71, "gzip -9": 1.97, "order 6": 1.95, "xz -9": 1.74}
SUMMARY = {
    "update": 710, "tokens": 1_454_080, "params": 2_361_024, "wall_s": 477.5, "training_s": 457.3, "promised_s": 558.2,
    "tokens_per_s": 4328.7,
    "peak_memory_bytes": 159_747_088, "compile_s": 10.7, "graph_breaks": 0, "recompiles": 0, "device": "<b>& co",
    "dtype": "fp32", "eval_weights": "last", "passed_over": {"empty": 2},
}  # fmt: skip
MEMORY = {
    "planned": {
        "weights": 9.4e6,
        "gradients": 9.4e6,
        "moments": 11e6,
        "activations": 92e6,
        "loss head": 21e6,
    },
    "measured": {
        "weights": 9.4e6,
        "gradients": 9.4e6,
        "moments": 11e6,
        "activations, loss head, workspace": 130e6,
    },
}
ORIGIN = [
    ("command", "monograph train my_texts/ --minutes 9 --out 'runs/first try'"),
    ("version", "monograph 0.2.0, torch 2.13.0, Python 3.11.2"),
    ("seed", "0"),
    ("data", "Python's standard library: 612 files, 10.1 MB, 2.29 M tokens"),
    ("git commit of your folder", "3f2a91c04be7"),
]
MOMENTS = [(70, "length set"), (75, "warm-up ends"), (600, "cool-down begins early")]
UPDATES, SIZE = 710, 2048


def _rows(**columns: Callable[[float, float], float]) -> list[dict[str, Any]]:
    """Rows of updates; each column is a function of the share of the run and of a random number."""
    random, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for update in range(1, UPDATES + 1):
        share, noise = update / UPDATES, random.normal(size=len(columns))
        values = {
            key: float(value(share, n))
            for (key, value), n in zip(columns.items(), noise, strict=True)
        }
        rows.append({"update": update, "tokens": SIZE * update, "wall_s": 0.64 * update, **values})
    return rows


def _rate(share: float, _: float) -> float:
    if share < 0.1:
        return 0.05 * share
    return (
        6e-3
        * (0.55 + 0.45 * math.cos(math.pi * min(share, 0.845)))
        * min(1.0, (1 - share) / 0.155 + 0.1)
    )


def _with(rows: list[dict[str, Any]], *more: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted([*rows, *more], key=lambda row: row["update"])


def _scores(every: int = 60, **columns: Callable[[float], float]) -> list[dict[str, Any]]:
    at = [*range(every, UPDATES, every), UPDATES]
    return [
        {
            "update": update,
            "tokens": SIZE * update,
            **{key: value(update / UPDATES) for key, value in columns.items()},
        }
        for update in at
    ]


def _write(folder: Path) -> None:
    (folder / "config.toml").write_text(
        '[data]\nsource = "stdlib"  # <&>\n\n[optim]\nlr = 0.006\nwarmup_updates = 75\n'
    )


def rows_of_text() -> list[dict[str, Any]]:
    rows = _rows(
        train_loss=lambda share, n: 3.4 + 5 * math.exp(-9 * share) + 0.12 * n, lr=_rate,
        grad_norm=lambda share, n: abs(0.6 + 3 * math.exp(-12 * share) + 0.1 * n),
        tokens_per_s=lambda share, n: 4300 + 150 * n - (900 if share > 0.8 else 0),
    )  # fmt: skip
    rows[300]["skipped"] = rows[301]["skipped"] = True
    rows[300]["grad_norm"] = 60.0
    scores = _scores(
        eval_loss=lambda s: 3.9 + 4.5 * math.exp(-9 * s),
        eval_bits_per_byte=lambda s: 1.66 + 2.4 * math.exp(-8 * s),
    )
    slower = {
        "update": 580,
        "tokens": SIZE * 580,
        "slower": {"tokens_per_s": 3400.0, "before": 4300.0, "why": "load 5"},
    }
    return _with(
        rows,
        *[{**score, "eval_rows": 64} for score in scores],
        slower,
        {"update": 2, "memory": MEMORY},
    )


def of_run(folder: Path) -> str:
    _write(folder)
    said = 'def read(self, size=-1):\n    """Read up to size bytes."""\n    if self.closed:\n        raise ValueError('
    summary = SUMMARY | {"train_loss": 3.4, "eval_loss": 3.9, "eval_bits_per_byte": 1.6611}
    samples = [(0.15, HOSTILE), (0.5, "def read(self, size):\n    return self.name"), (1.0, said)]
    about = About(YARDSTICKS, samples, MOMENTS, ORIGIN)
    return run_page(folder, summary, rows_of_text(), about)


def of_chats(folder: Path) -> str:
    _write(folder)
    rows = _rows(
        train_loss=lambda share, n: 0.4 + 2 * math.exp(-6 * share) + 0.05 * n, lr=_rate,
        grad_norm=lambda share, n: abs(1 + 0.2 * n), tokens_per_s=lambda _, n: 9300 + 250 * n,
    )  # fmt: skip
    scores = _scores(eval_loss=lambda s: 0.5 + 1.9 * math.exp(-6 * s))
    gauges = {
        "gpu_utilization_percent": 93,
        "gpu_memory_bytes": 3e9,
        "gpu_power_w": 312.5,
        "gpu_temperature_c": 71,
        "gpu_clock_hz": 1.98e9,
    }
    rows = [row | gauges if row["update"] % 2 else row for row in rows]
    summary = SUMMARY | {"train_loss": 0.41, "eval_loss": 0.5}
    samples = [
        (share, f"user\nWhat is {n} + 1?\nassistant\n{n + 1}")
        for n, share in enumerate((0.15, 0.5, 1.0))
    ]
    return run_page(folder, summary, _with(rows, *scores), About({}, samples, MOMENTS[1:2], ORIGIN))


def of_rewards(folder: Path) -> str:
    _write(folder)
    rows = _rows(
        reward=lambda share, n: min(1.0, max(0.0, 0.95 - 0.8 * math.exp(-5 * share) + 0.05 * n)),
        train_loss=lambda _, n: 0.01 * n,
        entropy=lambda share, n: 0.1 + 1.4 * math.exp(-4 * share) + 0.02 * abs(n), lr=_rate,
        grad_norm=lambda _, n: abs(0.3 + 0.1 * n), tokens_per_s=lambda _, n: 1100 + 40 * n,
    )  # fmt: skip
    scores = _scores(
        eval_reward=lambda s: 0.93 - 0.75 * math.exp(-5 * s),
        eval_pass_at_1=lambda s: 0.93 - 0.75 * math.exp(-5 * s),
    )
    summary = SUMMARY | {"train_loss": 0.0, "reward": 0.95, "reward_first": 0.2, "eval_reward": 0.93,
                         "eval_pass_at_1": 0.93, "drawn_minus_scored_max": 0.0, "promised_s": None}  # fmt: skip
    samples = [
        (share, f"{n}7 + 25 =\n{n}2 (reward {share:g})") for n, share in enumerate((0.15, 0.5, 1.0))
    ]
    return run_page(folder, summary, _with(rows, *scores), About({}, samples, MOMENTS[1:2], ORIGIN))


def of_preferences(folder: Path) -> str:
    _write(folder)
    rows = _rows(
        accuracy=lambda share, n: min(1.0, max(0.0, 0.9 - 0.4 * math.exp(-6 * share) + 0.06 * n)),
        train_loss=lambda _, n: 0.5 + 0.01 * n,
        margin=lambda share, n: 3 * share + 0.3 * n, lr=_rate, grad_norm=lambda _, n: abs(2 + 0.3 * n),
        tokens_per_s=lambda _, n: 4100 + 90 * n,
    )  # fmt: skip
    scores = _scores(
        eval_loss=lambda s: 0.69 - 0.3 * s,
        eval_accuracy=lambda s: 0.86 - 0.35 * math.exp(-6 * s),
        eval_margin=lambda s: 2.4 * s,
    )
    scored = {"accuracy": 0.9, "margin": 2.9, "eval_accuracy": 0.86}
    summary = SUMMARY | scored | {"train_loss": 0.4, "eval_loss": 0.39}
    return run_page(folder, summary, _with(rows, *scores), About({}, [], MOMENTS[1:2], ORIGIN))


def of_comparison(_: Path) -> str:
    first = rows_of_text()
    second = [
        {
            **row,
            **{
                key: 0.97 * row[key]
                for key in ("train_loss", "eval_bits_per_byte", "lr")
                if key in row
            },
        }
        for row in first
    ]
    configs = [
        f"[optim]\nlr = {rate}\nname = 'muon'\n\n[data]\nsource = {['<b>', 'a'][:1]}\n"
        for rate in (0.006, 0.0058)
    ]
    sides = [
        Compared("runs/baseline", 2_361_024, 1.6611, 4328.7, [first], configs[0]),
        Compared("runs/with-idea", 2_361_024, 1.6113, 4200.0, [second], configs[1], -0.0498, 0.0041, "31 documents",
                 "runs/with-idea is better"),
        Compared("out/folder", 4_722_048, 1.7, None, difference=0.0389, standard_error=0.05,
                 averaged_over="31 documents", verdict="the difference may be chance"),
    ]  # fmt: skip
    return compare_page(
        "runs/baseline, runs/with-idea and out/folder", "bits/byte", sides, ["one", HOSTILE]
    )


def of_sweep(folder: Path) -> str:
    _write(folder)
    settings, members, curves, random = [], [], [], np.random.default_rng(1)
    for place, lr in enumerate([3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 0.3]):
        mean = None if lr == 0.3 else 2.55 + 0.09 * (math.log2(lr / 4e-3)) ** 2
        values = [None if mean is None else mean + 0.02 * float(n) for n in random.normal(size=2)]
        standing = {4: "best", 5: "tied"}.get(place, "")
        settings.append({"knobs": {"lr": lr}, "mean": mean, "standard_error": None if mean is None else 0.02,
                         "values": values, "standing": standing})  # fmt: skip
        for seed, score in enumerate(values):
            losses = {"eval_loss": None if score is None else 1.9 * score, "train_loss": 4.2}
            ended = {
                "diverged": 31 if score is None else None,
                "run": f"runs/a/members/{2 * place + seed:03}",
            }
            knobs = {"optim.lr": lr, "train.seed": seed}
            members.append({"knobs": knobs, "eval_bits_per_byte": score, **losses, **ended})
            rows = [{"update": 20 * i, "tokens": 40_960 * i, "eval_bits_per_byte": score + 6 / i**2, "eval_rows": 64}
                    for i in range(1, 11) if score is not None]  # fmt: skip
            curves.append(MemberCurve({"lr": lr, "seed": seed}, rows))
    best = {"knobs": {"optim.lr": 4e-3}, "mean": 2.55, "unit": "bits/byte"}
    score = SweepScore("eval_bits_per_byte", "bits/byte")
    found = {
        "best": best,
        "members": members,
        "tokens_per_s": 12_000.0,
        "wall_s": 80.0,
        "measure": score._asdict(),
    }
    found["advice"] = [
        {"text": "0.004 is better than 0.002.", "command": f"monograph sweep '{HOSTILE}'"}
    ]
    drawings = sweep_drawings(settings, curves, score)
    return sweep_page(folder, found, settings, drawings, ORIGIN)


def ladder() -> dict[str, Any]:
    keys = ("tokens_per_s", "tokens_per_cpu_s", "update_s", "peak_memory_bytes", "train_loss",
            "compile_s", "micro_batch", "micro_steps", "over", "times", "memory_times", "eval_loss",
            "eval_bits_per_byte")  # fmt: skip
    numbers = {
        "eager": (900.0, 900.0, 0.9, 90e6, 5.8, 0.0, 2, 4, None, None, None, 6.0, 2.5),
        "compiled": (1800.0, 1800.0, 0.45, 70e6, 5.8, 40.0, 2, 4, "eager", 2.0, 0.78, 6.0, 2.5),
        "recompute": (
            1200.0,
            1200.0,
            0.675,
            2e9,
            5.8,
            30.0,
            8,
            1,
            "compiled",
            0.667,
            28.6,
            None,
            None,
        ),
        "fp8": (None,) * 13,
    }
    rungs = [
        {"rung": name, "change": f"how of {name}", "obstacle": None if values[0] else HOSTILE,
         "notes": ["micro_batch is now 1"] if name == "recompute" else []} | dict(zip(keys, values, strict=True))
        for name, values in numbers.items()
    ]  # fmt: skip
    return {"device": "a CPU", "params": 2_361_024, "updates": 40, "tokens_per_update": 2048, "tokens": 81_920,
            "ratios_of": "cpu", "wall_s": 300.0, "rungs": rungs}  # fmt: skip


def of_ladder(_: Path) -> str:
    return ladder_page("2026-11-20-1403", ladder(), "[train]\nseed = 1\n")


def of_profile(_: Path) -> str:
    parts = ("matmul", "optimizer", "elementwise")
    kernels = [
        Kernel(part, 0.02 * i, 0.02 * i + 0.01, 1e6, 1e6, 0.0) for i, part in enumerate(parts)
    ]
    machine = Machine(1e12, 1e11)
    judged = verdict(
        time_by_part(Timeline(0.0, 0.1, kernels, [])), kernels, machine, Situation(captured=False)
    )
    found = Profile(0.1, 0.12, 3, 4, machine, judged, Path("trace.json"))
    return profile_page("2026-11-20-1404", found, 1234.0, "[train]\n")


KINDS: dict[str, Callable[[Path], str]] = {
    "run": of_run, "chats": of_chats, "rewards": of_rewards, "preferences": of_preferences, "sweep": of_sweep,
    "comparison": of_comparison, "ladder": of_ladder, "profile": of_profile,
}  # fmt: skip
CHARTED = (
    "run",
    "chats",
    "rewards",
    "preferences",
    "sweep",
    "comparison",
)  # the kinds that have charts, which uPlot draws
