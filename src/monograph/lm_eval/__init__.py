"""Runs as a model of lm-evaluation-harness (the extra `lm-eval`); nothing here is imported unless it is used."""
