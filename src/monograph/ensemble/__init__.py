"""Many modules of one structure that run and train as one."""

from monograph.ensemble.engine import Ensemble

__all__ = ["Ensemble"]
