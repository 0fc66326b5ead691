"""Turn a TOML file, the environment and `key=value` pairs into one checked and frozen `Settings`."""

from monograph.config.settings import KEYS, Settings
from monograph.config.sources import Arguments, classify, load

__all__ = ["KEYS", "Arguments", "Settings", "classify", "load"]
