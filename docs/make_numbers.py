"""Writes the README's table of what was measured, from benchmarks/results/.

Usage: python docs/make_numbers.py         (rewrites README.md between the markers; tests/test_readme.py compares)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- made by docs/make_numbers.py -->", "<!-- end -->"
Found = dict[str, Any]  # a result file


def first_run(found: Found) -> str:
    """Held-out bits per byte of the default, beside the yardsticks on the same bytes."""
    lines = [f"{name} {found['levels'][name]:.2f}" for name in ("trigram", "gzip -9", "order 6", "xz -9")]
    finals = [f"{case['final']['bits_per_byte']:.2f}" for case in found["cases"]]
    return f"{' and '.join(finals)} bits per byte; {', '.join(lines)}"


def steps(found: Found) -> str:
    """Tokens per second of the captured step over the eager one."""
    those = [case for case in found["cases"] if case["dtype"] == "bf16"]
    return ", ".join(f"{case['shape']} {case['speedup']['wall']['median']:.2f} ×" for case in those)


def start(found: Found) -> str:
    """Seconds to the first update, warm over cold."""
    return ", ".join(f"{case['shape']} {case['warm_over_cold']['median']:.2f} ×" for case in found["cases"])


def loss(found: Found) -> str:
    """Memory and time of the chunked loss over dense logits, the worst of the sizes and dtypes."""
    lines = []
    for mode in ("eager", "captured"):
        those = [case for case in found["cases"] if case["mode"] == mode]
        memory = max(case["memory_ratio"] for case in those)
        time = max(case["time_ratio"]["wall"]["median"] for case in those)
        lines.append(f"{mode}: 1/{1 / memory:.1f} of the memory in {time:.2f} × the time")
    return "; ".join(lines)


# The script, what it measures in the README's words, and the sentence that its result makes.
ROWS: dict[str, tuple[str, Callable[[Found], str]]] = {
    "first_run": ("held out, what `make train` trains, two seeds (lower is better)", first_run),
    "steps": ("tokens/s, one graph against the same step eager (bf16)", steps),
    "start": ("time to the first update, compile cache warm against cold", start),
    "loss": ("cross-entropy at a vocabulary of 128,256 against dense logits, worst case", loss),
}


def table() -> str:
    """One row per script, and the machine it ran on."""
    lines = ["| measured | figure | machine, printed by |", "|---|---|---|"]
    for name, (what, sentence) in ROWS.items():
        result = RESULTS / f"{name}.json"
        script = f"[benchmarks/{name}.py](benchmarks/{name}.py)"
        if not result.exists():
            lines.append(f"| {what} | not measured yet | {script} |")
            continue
        found = json.loads(result.read_text())
        at = found["machine"]
        lines.append(f"| {what} | {sentence(found)} | {at['device']}, {at['cores']} cores, {script} |")
    return "\n".join(lines)


def main() -> None:
    """Puts the table in its place."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
