"""A model of lm-evaluation-harness, with which it evaluates runs (the extra `lm-eval`).

No other room of the package imports it.
"""
