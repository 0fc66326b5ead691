"""Runs inside the process that carries the shim: imports a scenario's module once, then forks for
each case.

Reads one case per line of stdin (JSON: file, function, folder, mode, at), answers one JSON line on
stdout.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from clocks import HANG_S


def load(file: str, function: str) -> Callable[[Path], object]:
    name = "scenario_" + Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], function)


def carry_out(
    case: dict[str, Any], shim: ctypes.CDLL, scenario: Callable[[Path], object]
) -> dict[str, Any]:
    signal.alarm(HANG_S)  # a hang ends the case with SIGALRM, which no test expects
    error, known = None, len(sys.modules)
    shim.faults_arm(case["folder"].encode(), case["mode"], case["at"])
    try:
        scenario(Path(case["folder"]))
    except BaseException as raised:
        error = [type(raised).__name__, str(raised)]
    shim.faults_disarm()
    journal = shim.faults_journal().decode()
    # To look at all copies pages.
    imported = [*islice(reversed(sys.modules), len(sys.modules) - known)][::-1]
    return {
        "error": error,
        "struck": shim.faults_struck(),
        "journal": journal,
        "imported": imported,
    }


def in_a_fork(case: dict[str, Any], shim: ctypes.CDLL) -> dict[str, Any]:
    scenario = load(case["file"], case["function"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as report:
            json.dump(carry_out(case, shim, scenario), report)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as report:
        text = report.read()
    _, status = os.waitpid(child, 0)
    answer = (
        json.loads(text) if text else {"error": None, "struck": 1, "journal": "", "imported": []}
    )
    for name in answer.pop("imported"):  # once here, and not again in each fork to come
        with suppress(Exception):
            importlib.import_module(name)
    return {**answer, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a scenario prints must not be taken for an answer
    shim = ctypes.CDLL(sys.argv[1])
    shim.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
    shim.faults_struck.restype = ctypes.c_long
    shim.faults_journal.restype = ctypes.c_char_p
    for line in sys.stdin:
        print(json.dumps(in_a_fork(json.loads(line), shim)), file=answers, flush=True)


if __name__ == "__main__":
    main()
