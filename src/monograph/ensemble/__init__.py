"""Run and train many models of one structure as one program: N members at once, each as it would be alone."""

from __future__ import annotations

from monograph.ensemble.engine import Ensemble as Ensemble
from monograph.ensemble.knobs import Knobs as Knobs
from monograph.ensemble.knobs import grid as grid
from monograph.ensemble.knobs import log_range as log_range
