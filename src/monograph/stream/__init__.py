"""Streaming: full-precision training of models larger than the device."""

from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement

__all__ = ["Placement", "Streamed"]
