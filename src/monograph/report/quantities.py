"""Write quantities for people: short, rounded, and with their units."""

import math

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float, unit: str = "") -> str:
    """Return three significant digits with an SI prefix.

    For example 1466 -> "1.47 k", 3_000_000 -> "3 M", and (15_800, "tok/s") -> "15.8 k tok/s".
    """
    ending = f" {unit}" if unit else ""
    for scale, prefix in _PREFIXES:
        # From 0.9995 on, three digits round up to 1 of this prefix: 999_600 is "1 M", not "1000 k".
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)} {prefix}{ending}"
    return f"{_three_digits(value)}{ending}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: (1, "file") -> "1 file", (1024, "file") -> "1,024 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def binary(number: int) -> str:
    """Return a number as a key of the configuration takes it: 524_288 -> "512Ki", 4096 -> "4096".

    A number of five or more digits is written in Mi or Ki if it is a multiple.
    """
    for scale, suffix in ((2**20, "Mi"), (2**10, "Ki")):
        if number >= 10_000 and number % scale == 0:
            return f"{number // scale}{suffix}"
    return str(number)


def gibibytes(value_bytes: float) -> str:
    """Return bytes as GiB, the unit of device memory: 225_485_783 -> "0.21 GiB"."""
    size = value_bytes / 2**30
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def memory(value_bytes: float) -> str:
    """Return bytes as GiB, or as MiB below one GiB: 22_020_096 -> "21.0 MiB"."""
    return gibibytes(value_bytes) if value_bytes >= 2**30 else f"{value_bytes / 2**20:.1f} MiB"


def megabytes(value_bytes: float) -> str:
    """Return bytes as MB (10^6), the unit of files: 10_100_000 -> "10.1 MB".

    A smaller number is in kB or bytes.
    """
    if value_bytes < 1e3:
        return f"{value_bytes:.0f} bytes"
    if value_bytes < 1e6:
        return f"{value_bytes / 1e3:.1f} kB"
    return f"{value_bytes / 1e6:.1f} MB"


def clock_time(seconds: float) -> str:
    """Return a countdown: 161 -> "2:41", 4000 -> "1:06:40"."""
    minutes, seconds_left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds_left:02d}"
    return f"{minutes}:{seconds_left:02d}"


def duration(seconds: float) -> str:
    """Return a length of time, such as "0.4 s", "19 s", "3 min 06 s" or "2 h 13 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left:02d} min"
    if minutes:
        return f"{minutes} min {seconds_left:02d} s"
    return f"{seconds_left} s"


def _three_digits(value: float) -> str:
    """Return three significant digits, without an exponent and without zeros at the end."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    decimals = max(0, 2 - magnitude)
    if decimals == 0:
        return f"{value:.0f}"
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")
