"""Make a training run from settings or a checkpoint, report its progress, and sum it up at its end."""
