"""Train models that are larger than the device, in full precision: their weights are streamed to
it.
"""

from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement

__all__ = ["Placement", "Streamed"]
