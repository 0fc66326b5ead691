"""Trains many runs that differ in a few settings: which runs, how many at once, and their results."""
