"""One small report of each kind, as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from monograph.profiling.bottleneck import Machine, Situation, verdict
from monograph.profiling.intervals import Kernel, Timeline, spent
from monograph.profiling.profiler import Profile
from monograph.report.profile_report import draw_ladder, draw_profile, ladder_page, profile_page
from monograph.report.run_report import write_report
from monograph.report.sweep_report import write_sweep_report

HOSTILE = "<script>alert(1)</script> & \x1b[31m"


def of_run(folder: Path) -> str:
    metrics: list[dict[str, Any]] = []
    for update in range(1, 101):
        at = {"update": update, "tokens": 2000 * update}
        metrics.append(at | {"train_loss": 2 + 5 / update, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 15_000.0})
        if update % 20 == 0:
            scores = {"eval_loss": 2.0 + 9 / update, "eval_bits_per_byte": 1.7 + 20 / update}
            metrics.append(at | scores | {"eval_rows": 64})
    summary = {"eval_bits_per_byte": 1.9, "tokens": 200_000, "device": "<b>& co", "recompiles": 0}
    write_report(folder, summary, metrics, {"gzip -9": 1.97}, [(0.5, HOSTILE), (1.0, "def f(): pass")])
    return (folder / "report.html").read_text()


def of_sweep(folder: Path) -> str:
    settings, members = [], []
    for place, (name, lr, score) in enumerate([("muon", 1e-2, 2.4), ("adamw", 1e-3, 2.5), (HOSTILE[:25], 0.3, None)]):
        error = None if score is None else 0.01
        knobs, values = {"name": name, "lr": lr}, [score, score and score + 0.01, None]
        settings.append({"knobs": knobs, "mean": score, "standard_error": error, "values": values,
                         "standing": "best" if place == 0 else ""})  # fmt: skip
        members.append({"knobs": {f"optim.{key}": value for key, value in knobs.items()}, "eval_bits_per_byte": score,
                        "eval_loss": score, "train_loss": 2.0, "diverged": None if score else 12,
                        "run": f"runs/a/members/00{place}"})  # fmt: skip
    best = {"knobs": {"optim.lr": 1e-2}, "mean": 2.4, "unit": "bits/byte"}
    found = {"best": best, "members": members, "tokens_per_s": 1000.0, "wall_s": 60.0}
    found["advice"] = [{"text": "0.01 is the largest lr.", "command": f"monograph sweep '{HOSTILE}'"}]
    rows = [{"tokens": 100 * i, "eval_bits_per_byte": 8.0 / i, "eval_rows": 9} for i in range(1, 5)]
    write_sweep_report(folder, found, settings, [(each["knobs"], rows) for each in settings])
    return (folder / "report.html").read_text()


def ladder() -> dict[str, Any]:
    keys = ("tokens_per_s", "tokens_per_cpu_s", "update_s", "peak_memory_bytes", "train_loss",
            "compile_s", "micro_batch", "micro_steps", "over", "times", "memory_times", "eval_loss",
            "eval_bits_per_byte")  # fmt: skip
    numbers = {
        "eager": (900.0, 900.0, 0.9, 90e6, 5.8, 0.0, 2, 4, None, None, None, 6.0, 2.5),
        "compiled": (1800.0, 1800.0, 0.45, 70e6, 5.8, 40.0, 2, 4, "eager", 2.0, 0.78, 6.0, 2.5),
        "recompute": (1200.0, 1200.0, 0.675, 2e9, 5.8, 30.0, 8, 1, "compiled", 0.667, 28.6, None, None),
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
    return ladder_page("2026-11-20-1403", ladder(), draw_ladder(ladder()), "[train]\nseed = 1\n")


def of_profile(_: Path) -> str:
    parts = ("matmul", "optimizer", "elementwise")
    kernels = [Kernel(part, 0.02 * i, 0.02 * i + 0.01, 1e6, 1e6, 0.0) for i, part in enumerate(parts)]
    machine = Machine(1e12, 1e11)
    judged = verdict(spent(Timeline(0.0, 0.1, kernels, [])), kernels, machine, Situation(captured=False))
    found = Profile(0.1, 0.12, 3, 4, machine, judged, Path("trace.json"))
    return profile_page("2026-11-20-1404", found, 1234.0, draw_profile(judged, "An update"), "[train]\n")


KINDS: dict[str, Callable[[Path], str]] = {"run": of_run, "sweep": of_sweep, "ladder": of_ladder, "profile": of_profile}
