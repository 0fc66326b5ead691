"""Write quantities for people, each with its unit, in as few characters as carry the information."""

import math

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float, unit: str = "") -> str:
    """Return three significant digits with an SI prefix: 1466 -> "1.47 k", 3_000_000 -> "3 M";
    unit: "15.8 k tok/s".
    """
    for scale, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)} {prefix}{' ' if unit else ''}{unit}"
    return f"{_three_digits(value)}{' ' if unit else ''}{unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: (1, "file") -> "1 file", (1024, "file") -> "1,024 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def binary(number: int) -> str:
    """Return a number as the configuration takes it, in Ki or Mi if it is long: 524_288 -> "512Ki",
    4096 -> "4096".
    """
    for scale, suffix in ((2**20, "Mi"), (2**10, "Ki")):
        if number >= 10_000 and number % scale == 0:
            return f"{number // scale}{suffix}"
    return str(number)


def gibibytes(value_bytes: float) -> str:
    """Return bytes as GiB, as device memory is counted: 225_485_783 -> "0.21 GiB"."""
    size = value_bytes / 2**30
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def memory(value_bytes: float) -> str:
    """Return bytes as GiB, or as MiB below one GiB, for small models: 22_020_096 -> "21.0 MiB"."""
    return gibibytes(value_bytes) if value_bytes >= 2**30 else f"{value_bytes / 2**20:.1f} MiB"


def megabytes(value_bytes: float) -> str:
    """Return bytes as MB (10^6), as files are counted: 10_100_000 -> "10.1 MB"; small ones in kB or
    bytes.
    """
    if value_bytes < 1e3:
        return f"{value_bytes:.0f} bytes"
    return f"{value_bytes / 1e6:.1f} MB" if value_bytes >= 1e6 else f"{value_bytes / 1e3:.1f} kB"


def clock_time(seconds: float) -> str:
    """Return a countdown: 161 -> "2:41", 4000 -> "1:06:40"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Return a length of time: 0.4 -> "0.4 s", 19.2 -> "19 s", 186 -> "3 min 06 s", 8000 -> "2 h 13
    min".
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    shorter = f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{hours} h {minutes_left:02d} min" if hours else shorter


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if decimals else f"{value:.0f}"
