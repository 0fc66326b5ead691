"""Many models of one shape as one program: inference and training of N members at once, each as it would be alone."""

from __future__ import annotations

from monograph.ensemble.engine import Ensemble as Ensemble
from monograph.ensemble.knobs import Knobs as Knobs
from monograph.ensemble.knobs import grid as grid
from monograph.ensemble.knobs import log_range as log_range
