"""Watches a run and never steers it: operations per token, memory, yardsticks for a text, and the report."""

from __future__ import annotations

# The public `monograph.flops`. It stands in for the submodule's name here, whose import is already done by then.
from monograph.measure.flops import flops_per_token as flops
from monograph.measure.flops import mfu

__all__ = ["flops", "mfu"]
