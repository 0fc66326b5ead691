"""A model of lm-evaluation-harness (the extra `lm-eval`) that evaluates runs; no other room imports
it.
"""
