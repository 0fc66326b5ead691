"""Make a training run from settings or a checkpoint, report on it while it trains, and summarise it
at its end.
"""
