"""How the tests compare numbers: as the laws do."""

from monograph.laws.comparisons import error_within, relative_error

__all__ = ["error_within", "relative_error"]
