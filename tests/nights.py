"""Which slow tests are run on which night: `pytest -m slow --night 2026-11-28` runs that date's share.

A test's share is decided by its name alone, so that a new one moves no other, and any `NIGHTS` nights in a row run all.
"""

from __future__ import annotations

import zlib
from datetime import date

NIGHTS = 28


def is_of_night(test: str, night: date) -> bool:
    """Return whether a test, by its node id, is run on the night of a date."""
    return zlib.crc32(test.encode()) % NIGHTS == night.toordinal() % NIGHTS
