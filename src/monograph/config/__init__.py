"""Turn a TOML file, the environment and `key=value` pairs into checked, frozen `Settings`."""

from monograph.config.keys import DEFAULT_MINUTES, KEYS
from monograph.config.settings import EXCLUSIVE, Settings, build, checked_value
from monograph.config.sources import Arguments, classify, load

__all__ = [
    "DEFAULT_MINUTES",
    "EXCLUSIVE",
    "KEYS",
    "Arguments",
    "Settings",
    "build",
    "checked_value",
    "classify",
    "load",
]
