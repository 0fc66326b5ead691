"""Many models of one shape: what each of them is given."""

from __future__ import annotations

from monograph.ensemble.knobs import Knobs as Knobs
from monograph.ensemble.knobs import grid as grid
from monograph.ensemble.knobs import log_range as log_range


class Ensemble:  # PLACEHOLDER
    def __init__(self, *a, **k):
        from monograph.errors import UsageError

        raise UsageError("no ensemble yet")
