"""Print what was predicted without a GPU next to what one measured.

    python benchmarks/first_contact.py [FOLDER]

FOLDER has the files of `benchmarks/gpu.sh all` (default benchmarks/results/gpu). Predictions are
those of `benchmarks/launches.py` and of `benchmarks/plan.py` on a pretended card, in
benchmarks/results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import harness

RESULTS = Path(__file__).parent / "results"
# The H100's arithmetic is the H200's.
CARDS = {"H200": "H200", "H100": "H200", "A100": "A100-80", "4090": "4090"}
SHAPES = {"124m": "124m", "1.2b": "1b"}  # train.py's models, as launches.py calls them


def read(path: Path) -> dict[str, Any]:
    """Return a result, or {} if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def laws(found: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the laws: all of them are predicted to hold."""
    rows = []
    for name in ("gpu", "laws"):
        if (run := found.get(name)) is None:
            continue
        passed = run.get("tests", 0) - sum(
            run.get(key, 0) for key in ("failures", "errors", "skipped")
        )
        failed = [each.rpartition(".")[2] for each in run.get("failed", [])]
        wrong = f"{len(failed)} failed: {failed[0]}, ..." if failed else "none failed"
        wrong = "out of time" if run["exit"] == 124 else wrong
        rows.append([f"laws, {name}", "all hold", f"{passed} passed, {wrong}"])
    return rows


def train(found: dict[str, Any], launches: dict[str, Any]) -> list[list[str]]:
    """Return the lines of model FLOPs utilisation by the roofline of what a step launches."""
    name = str(found.get("machine", {}).get("device", ""))
    card = next((known for part, known in CARDS.items() if part in name), None)
    cases = launches.get("cases", [])
    predicted = {case["case"]: case["roofline"] for case in cases if "roofline" in case}
    rows = []
    for case in found.get("cases", []):
        # Of packed rows, which cost a little more.
        if case["model"] in SHAPES and case["system"] == "monograph":
            most = predicted.get(SHAPES[case["model"]], {}).get(card, {}).get("mfu")
            measured = f"{case['mfu']:.1%}" if case.get("mfu") else case.get("error", "-")
            rows.append([f"MFU, {case['model']}", f"{most:.1%} at most" if most else "-", measured])
    return rows


def kernels(found: dict[str, Any], launches: dict[str, Any]) -> list[list[str]]:
    """Return the lines of where a step's time goes, for as many tokens as were measured."""
    counted = {case["case"]: case for case in launches.get("cases", [])}
    rows = []
    for case in found.get("cases", []):
        if (of := counted.get(case["case"])) is None or "error" in case:
            continue
        share, roof = (
            case["rows"] * case["length"] / (of["rows"] * of["length"]),
            of["roofline"]["H200"],
        )
        for kind, part in (
            ("products", "products"),
            ("attention", "attention"),
            ("others", "triton"),
        ):
            least = share * roof[part] + (roof["update"] if kind == "others" else 0)
            rows.append(
                [
                    f"{case['case']}, {kind}",
                    f"{least:.1f} ms",
                    f"{case['milliseconds'][kind]:.1f} ms",
                ]
            )
    return rows


def memory(found: dict[str, Any], pretended: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the plan's worst error, by kind of step."""
    rows = []
    for kind, of in found.get("summary", {}).items():
        if isinstance(of, dict):
            before = pretended["summary"].get(kind, {}).get("worst")
            shown = "-" if before is None else f"{before:.1%} on a pretended card"
            rows.append([f"plan's worst error, {kind}", shown, f"{of['worst']:.1%}"])
    return rows


def main() -> None:
    """Print the table, and what is missing or failed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "gpu"
    found = {
        name: read(folder / f"{name}.json")
        for name in ("laws", "train", "kernels", "memory", "generate", "stream", "ensemble")
    }
    launches, pretended = read(RESULTS / "launches.json"), read(RESULTS / "plan_pretended.json")
    rows = [*(laws(found["laws"]) if found["laws"] else [])]
    rows += [*train(found["train"], launches), *kernels(found["kernels"], launches)]
    rows += memory(found["memory"], pretended)
    harness.print_table(["", "predicted", "measured"], rows)
    for name, result in found.items():
        if not result:
            print(f"{name}: not measured yet")
        elif result.get("schema") == "monograph-failed-1":
            print(f"{name}: failed, exit code {result['exit']}")


if __name__ == "__main__":
    main()
