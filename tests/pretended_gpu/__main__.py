"""Run a program on a pretended card whose kernels compute.

    python tests/pretended_gpu/environment.py run 90 python -m pretended_gpu -m monograph train
    texts/ train.updates=4 PRETENDED_NUMBERS=0 python tests/pretended_gpu/environment.py run 90
    python -m pretended_gpu benchmarks/plan.py

With PRETENDED_NUMBERS=0 nothing is computed, but everything is allocated: models of any size, as
long as nothing depends on a number.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np

import pretended_gpu.numbers

if __name__ == "__main__":
    assert pretended_gpu.numbers
    # The interpreter computes with numpy: logarithms of 0, and numbers that masks take away.
    np.seterr(all="ignore")
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
