"""Measure how long capturing an ensemble's step takes, by the number of members N: it is one graph
for any N.

CPU seconds of the first update, with torch's caches off.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import harness
import torch
import torch._inductor.config
from ensemble_peers import cases

from monograph import compat
from monograph.ensemble import Ensemble
from monograph.optim import AdamW


def captured(name: str, members: int) -> dict[str, Any]:
    """Return the CPU seconds of one capture."""
    case = cases(smoke=False)[name]
    torch.compiler.reset()
    engine = Ensemble([case.build() for _ in range(members)], loss=case.loss, optim=AdamW)
    graphs, breaks = compat.captured_graphs(), compat.graph_breaks()
    began = time.process_time()
    if obstacle := engine.capture(case.batch):
        raise SystemExit(f"ensemble_compile.py: the step cannot be captured: {obstacle}")
    spent = time.process_time() - began
    return {
        "name": name,
        "members": members,
        "compile_s": spent,
        "graphs": compat.captured_graphs() - graphs,
        "graph_breaks": compat.graph_breaks() - breaks,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = harness.arguments(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (2, 3) if args.smoke else (4, 32, 256)
    names = [name for name in cases(smoke=True) if not name.startswith("ResBlock")]
    found = harness.result("ensemble-compile", {"sizes": sizes})
    harness.print_machine(found)
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in names[: 1 if args.smoke else None]:
            captured(name, 2)  # warm up: the first capture of a process takes longer
            for members in sizes:
                found["cases"].append(captured(name, members))
                gc.collect()
                harness.write(args.out, found)
    rows = [
        [
            f"{c['name']}, N = {c['members']}",
            f"{c['compile_s']:.1f}",
            str(c["graphs"]),
            str(c["graph_breaks"]),
        ]
        for c in found["cases"]
    ]
    harness.print_table(["", "compile, CPU s", "graphs", "graph breaks"], rows)


if __name__ == "__main__":
    main()
