"""Train models that are larger than the device's memory, in full precision, by streaming their
weights to the device.
"""

from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement

__all__ = ["Placement", "Streamed"]
