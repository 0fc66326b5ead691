"""Hold what config.toml says of a run while its open values are decided, one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monograph.config import Settings
from monograph.run.folder import Run
from monograph.run.trust import marked
from monograph.run.writing import write_whole

ORIGIN = "plan"  # the origin of a value that is decided here


@dataclass(frozen=True)
class ConfigRecord:
    """What a run's config.toml says: decided values are noted in it, and nobody reads one from it.

    Attributes:
        settings: the settings as they are written.
    """

    settings: Settings

    def noted(self, values: Mapping[str, Any]) -> "ConfigRecord":
        """Return the record with decided values, by dotted key."""
        return ConfigRecord(self.settings.resolve(values, ORIGIN))

    @property
    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the values; see `Settings.fingerprint`."""
        return self.settings.fingerprint

    @property
    def toml(self) -> str:
        """Return the text of config.toml, without a mark."""
        return self.settings.to_toml()


def write_config(run: Run, settings: Settings, programs: Sequence[str] = ()) -> None:
    """Write config.toml, whole or not at all, with this user's mark if the settings vouch for all
    code that they name.

    Args:
        run: the run or the sweep's folder.
        settings: the settings of the run or of the sweep.
        programs: values that name code in a sweep's points.
    """
    named = [*settings.programs, *programs]
    text = settings.to_toml()
    if all(value in settings.vouched for value in named):
        text = marked(text, {value: settings.vouched[value] for value in named})
    write_whole(run.config, text)
