"""The content of a run's config.toml, to which values are added as they are decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monograph.config import Settings
from monograph.run.folder import Run
from monograph.run.trust import with_mark
from monograph.run.writing import write_atomically

ORIGIN = "plan"  # the origin of a value that was decided, not given


@dataclass(frozen=True)
class ConfigRecord:
    """The content of a run's config.toml.

    Decided values are only written to it. Code that needs such a value reads it from the `RunPlan`.

    Attributes:
        settings: the settings as they will be written.
    """

    settings: Settings

    def with_decided_values(self, values: Mapping[str, Any]) -> "ConfigRecord":
        """Return the record with more decided values.

        Args:
            values: the values by their dotted keys, such as "train.precision".
        """
        return ConfigRecord(self.settings.resolve(values, ORIGIN))

    @property
    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the values; see `Settings.fingerprint`."""
        return self.settings.fingerprint

    @property
    def toml(self) -> str:
        """Return the text of config.toml, without the mark of `run.trust`."""
        return self.settings.to_toml()

    def write(self, run: Run) -> None:
        """Write config.toml into a run's folder; see `write_config`."""
        write_config(run, self.settings)


def write_config(run: Run, settings: Settings, sweep_programs: Sequence[str] = ()) -> None:
    """Write config.toml atomically.

    If all code that the settings name may run, the file gets this user's mark, by which a later
    command trusts that code (`run.trust`).

    Args:
        run: the folder of the run or sweep.
        settings: the settings of the run or sweep.
        sweep_programs: the values that name code in a sweep's points.
    """
    programs = [*settings.programs, *sweep_programs]
    text = settings.to_toml()
    if all(value in settings.vouched for value in programs):
        text = with_mark(text, {value: settings.vouched[value] for value in programs})
    write_atomically(run.config, text)
