"""Hold what config.toml says of a run while its open values are decided, one after another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monograph.config import Settings

ORIGIN = "plan"  # the origin of a value that is decided here


@dataclass(frozen=True)
class Record:
    """What a run's config.toml says: decided values are noted in it, and nobody reads one from it.

    Attributes:
        settings: the settings as they are written.
    """

    settings: Settings

    def noted(self, values: Mapping[str, Any]) -> "Record":
        """Return the record with decided values, by dotted key."""
        return Record(self.settings.resolve(values, ORIGIN))

    @property
    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the values; see `Settings.fingerprint`."""
        return self.settings.fingerprint

    @property
    def toml(self) -> str:
        """Return the text of config.toml, without a mark."""
        return self.settings.to_toml()
