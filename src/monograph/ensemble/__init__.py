"""Run and train many models of one structure as one program: N members at once, each as it would be
alone.
"""

from monograph.ensemble.engine import Ensemble
from monograph.ensemble.knobs import Knobs, grid, log_range

__all__ = ["Ensemble", "Knobs", "grid", "log_range"]
