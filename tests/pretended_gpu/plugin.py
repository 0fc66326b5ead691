"""pytest -p pretended_gpu.plugin: tests run on a pretended card whose kernels compute."""

from __future__ import annotations

import pytest

import pretended_gpu.numbers
from pretended_gpu import reached

assert pretended_gpu.numbers


def pytest_configure(config: pytest.Config) -> None:
    """Let numpy warn, which the interpreter computes with, of logarithms of 0 and of numbers that
    masks take away.
    """
    reached.trace_backward()
    config.addinivalue_line("filterwarnings", "ignore")
