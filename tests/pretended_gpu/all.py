"""`make gpu-less`: everything that runs on a pretended card, as a table; with --quick what holds
three minutes.

    python tests/pretended_gpu/all.py [--quick | --nightly] [--out FILE] [--lines FOLDER]
                                         [PYTEST ARGUMENT ...]

With arguments for pytest only these tests run, on sm_90. --lines keeps what they execute of the
package, for reached.py, beside what is there already. --quick runs nothing, and says so, where
the environment was not made (environment.py), as it downloads 5 GB. --nightly also compiles every
way to train and decode for every card, which takes more than an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import environment
import reached

HERE = "tests/pretended_gpu"
DRIVER = [
    f"{HERE}/test_{name}.py"
    for name in ("driver", "capture", "cards", "hook", "launches", "waits", "environment")
]
NUMBERS = [
    f"{HERE}/test_{name}.py"
    for name in ("operators", "graphs", "memory", "narrow", "programs", "libdevice", "interpreted")
]
# Their kernels are compiled, and compute nothing.
WITHOUT_NUMBERS = (
    *DRIVER,
    *(f"{HERE}/test_{name}.py" for name in ("machine_code", "planned", "counts")),
)
# Tests marked `gpu` that a pretended card cannot pass, with the reason; docs/gpu.md lists them.
CANNOT = {
    "tests/benchmarks/test_numbers.py::test_a_read_value_is_a_wait_and_a_kernel_is_none":
        "torch's profiler asks CUPTI, NVIDIA's own, for what the card did",
    "tests/decode/test_on_a_gpu.py::test_a_thousand_steps_copy_four_bytes_a_row_and_step":
        "the same",
    "tests/test_device.py::test_a_gpu_is_described_and_measured":
        "the version of the driver is read from the kernel's NVIDIA module, and speed is not that of a card",
}  # fmt: skip


# Tests of a CPU that put something in the place of a card or its driver: a card that is older than
# torch, a driver that refuses memory, a recorder of graphs. They reach lines of a GPU, too.
STAND_INS = [
    "tests/test_cards.py",
    "tests/test_device.py",
    "tests/ensemble/test_replayed.py::test_a_call_whose_gradient_is_wanted_is_not_replayed",
    "tests/ensemble/test_replayed.py::test_a_member_that_writes_to_its_input_is_called",
    "tests/ensemble/test_replayed.py::test_inputs_and_settings_that_cannot_be_replayed",
    "tests/ensemble/test_replayed.py::test_only_a_layout_that_a_buffer_can_have_has_a_name",
    "tests/graph/test_precision.py::test_what_the_device_has_no_arithmetic_for_is_refused_by_name",
    "tests/graph/test_replay.py",
    "tests/graph/test_wide_rows.py::test_rows_up_to_a_width_are_held",
    "tests/ops/test_attention.py::test_only_tiles_known_to_be_worse_than_others_are_replaced_in_flex",
    "tests/ops/test_attention_kernels.py",
    "tests/ops/test_fused_gradients.py::test_forms_for_a_gpu_equal_those_for_a_cpu",
    "tests/session/test_attention_kernel.py",
    "tests/session/test_gauges.py::test_the_card_is_the_one_that_torch_computes_on",
    "tests/session/test_ladder.py",
    "tests/session/test_measured_memory.py",
    "tests/stream/test_cuda.py",
    "tests/stream/test_pinned.py",
]


def marked(folder: str) -> list[str]:
    """Return the files of a folder that mark tests `gpu`; most mark none, and take seconds to collect.

    None of this folder's does, and to collect them would put benchmarks/ before other modules.
    """
    files = sorted((environment.ROOT / folder).rglob("test_*.py"))
    names = [
        str(path.relative_to(environment.ROOT)) for path in files if "mark.gpu" in path.read_text()
    ]
    return [name for name in names if not name.startswith(HERE)]


# Tests whose kernels have other tiles, or other ways to compute, on another card.
BY_CARD = [
    *marked("tests/graph"),
    *(f"tests/ops/test_{name}.py" for name in ("attention", "decode_kernels", "layer_kernels")),
]
MARKED, DECODING = marked("tests"), marked("tests/decode")
FAST = ["-m", "gpu and not slow"]


class Part(NamedTuple):
    """Some tests on one card; `numbers` says whether kernels compute."""

    name: str
    sm: str
    numbers: bool
    tests: list[str]


QUICK = [
    Part("driver", "90", False, DRIVER),
    Part("numbers", "90", True, NUMBERS[:4]),
    Part(
        "order",
        "90",
        True,
        [
            f"{HERE}/test_order.py",
            "-k",
            "missing_wait or event or memory or (backward and offloaded and fp32)",
        ],
    ),
    Part("launches", "90", False, [f"{HERE}/test_counts.py"]),
    Part(
        "gpu tests",
        "90",
        True,
        ["-m", "gpu", "tests/laws/test_accumulated_is_large_batch.py", "tests/graph"],
    ),
]
ALL = [
    Part("gpu tests", "90", True, [*FAST, *(name for name in MARKED if name not in DECODING)]),
    Part("decoding", "90", True, [*FAST, *DECODING]),
    Part("order", "90", True, [f"{HERE}/test_order.py"]),
    Part("commands", "90", True, [f"{HERE}/test_commands.py"]),
    Part("machine code", "90", False, [f"{HERE}/test_machine_code.py", "-m", "not slow"]),
    Part("two cards", "90", True, [f"{HERE}/test_ranks.py"]),
    Part("launches", "90", False, [f"{HERE}/test_counts.py"]),
    *(Part("gpu tests", sm, True, [*FAST, *BY_CARD]) for sm in ("89", "80")),
    Part("driver", "90", False, DRIVER),
    Part("numbers", "90", True, NUMBERS),
    Part("planned memory", "90", False, [f"{HERE}/test_planned.py", "-m", "not slow"]),
    Part("stand-ins", "90", True, ["-m", "not gpu and not slow", *STAND_INS]),
]
NIGHTLY = [
    Part("slow tests", "90", True, ["-m", "gpu and slow", *MARKED]),
    *(Part("gpu tests", sm, True, ["-m", "gpu", *MARKED]) for sm in ("89", "80")),
    *(
        Part("machine code", sm, False, [f"{HERE}/test_machine_code.py"])
        for sm in environment.CARDS
    ),
    Part("planned memory", "90", False, [f"{HERE}/test_planned.py"]),
]


def part_of(arguments: list[str]) -> Part:
    """Return the part that arguments of pytest ask for: of folders and files of other tests, those
    marked `gpu`.
    """
    numbers = not any(argument.startswith(WITHOUT_NUMBERS) for argument in arguments)
    marked = "-m" in arguments or any(argument.startswith(HERE) for argument in arguments)
    return Part("asked", "90", numbers, [] if marked else ["-m", "gpu"])


def run(part: Part, more: list[str], covered: Path | None = None) -> dict[str, object]:
    """Run a part; return how many tests passed, failed and were skipped, and how long it took.

    On a busy machine the processors' seconds say more than the clock's.

    With `covered`, the lines that it executes are written into that folder.
    """
    left_out = [argument for test in CANNOT for argument in ("--deselect", test)]
    plugin = ["-p", "pretended_gpu.plugin"] if part.numbers else []
    python = [
        "python",
        *(["-m", "coverage", "run", f"--rcfile={covered}/settings"] if covered else []),
    ]
    command = [sys.executable, f"{HERE}/environment.py", "run", part.sm, *python, "-m", "pytest", "-q", "-p",
               "no:cacheprovider", *plugin, *left_out, *part.tests, *more]  # fmt: skip
    began, last = time.monotonic(), ""
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=environment.ROOT, env=settings, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(f"{part.name}, sm_{part.sm}: {line}", end="", flush=True)
            last = line.strip() or last
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)
    }
    seconds = round(time.monotonic() - began, 1)
    return {
        "part": part.name,
        "sm": part.sm,
        "code": process.returncode,
        **counts,
        "wall_s": seconds,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }


def main() -> int:
    """Run the parts, print the table, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nightly", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument(
        "--lines", type=Path, metavar="FOLDER", help="keep which lines were executed"
    )
    asked, more = parser.parse_known_args()
    if asked.quick and not environment.python().exists():
        print(
            "gpu-less: not run, as torch's CUDA build is not installed here (make gpu-less installs it, 5 GB)"
        )
        return 0
    parts = [part_of(more)] if more else QUICK if asked.quick else ALL + NIGHTLY * asked.nightly
    with tempfile.TemporaryDirectory() as folder:
        covered = asked.lines or (None if asked.quick or more else Path(folder))
        if covered:
            covered = covered.resolve()
            covered.mkdir(parents=True, exist_ok=True)
            (covered / "settings").write_text(reached.settings(covered))
        # As many at once as there are cores, the longest first.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rows = list(
                pool.map(
                    lambda part: run(part, more, covered if part.sm == "90" else None),
                    parts,
                )
            )
        lines = of_lines(covered) if covered and not more else None
    print(
        f"\n{'part':12} {'card':7} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8} {'CPU s':>8}"
    )
    for row in rows:
        failed = row.get("failed", 0) or row.get("error", 0) or ("?" if row["code"] else 0)
        print(f"{row['part']:12} sm_{row['sm']:4} {row.get('passed', 0):>7} {failed:>7} {row.get('skipped', 0):>8} "
              f"{row['wall_s']:>8} {row['cpu_s']:>8}")  # fmt: skip
    if lines:
        print(lines["said"])
    for test, reason in CANNOT.items():
        print(f"not run: {test.rpartition('::')[2]}: {reason}")
    if asked.out:
        found = {"schema": "monograph-gpu-less-1", "parts": rows, "lines": lines, "not_run": CANNOT}
        asked.out.write_text(json.dumps(found, indent=1))
    return int(any(row["code"] for row in rows) or bool(lines and lines["code"]))


def of_lines(folder: Path) -> dict[str, object]:
    """Return which of the lines that only a GPU reaches were reached."""
    # From the folder above: beside it, numbers.py would stand for the standard library's.
    command = [environment.python(), "-m", "pretended_gpu.reached", folder]
    done = subprocess.run(command, cwd=environment.ROOT / "tests", capture_output=True, text=True)
    print(f"\n{done.stdout}{done.stderr}", flush=True)
    return {"code": done.returncode, "said": (done.stdout.splitlines() or ["no lines"])[-1]}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except environment.Stopped as stopped:
        environment.say(str(stopped))
        sys.exit(2)
