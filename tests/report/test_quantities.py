"""Run: pytest tests/report/test_quantities.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.report import quantities


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.214, "0.214"),
        (999, "999"),
        (999.7, "1 k"),
        (15_800, "15.8 k"),
        (3e6, "3 M"),
        (1.13e9, "1.13 G"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert quantities.count(value) == text


def test_one_thing_is_singular() -> None:
    assert [quantities.counted(n, "file") for n in (0, 1, 2, 1024)] == [
        "0 files",
        "1 file",
        "2 files",
        "1,024 files",
    ]


def test_a_unit_follows_the_prefix() -> None:
    assert quantities.count(15_800, "tok/s") == "15.8 k tok/s"
    assert quantities.count(12, "tok/s") == "12 tok/s"


@given(st.floats(1e-3, 9.99e14))
def test_a_count_reads_back_within_its_three_digits(value: float) -> None:
    number, _, prefix = quantities.count(value).partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix]
    assert float(number) * scale == pytest.approx(value, rel=5.01e-3)
    assert len(number.replace(".", "").lstrip("0")) <= 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (186, "3 min 06 s"),
        (8000, "2 h 13 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (161, "2:41"), (4000, "1:06:40")])
def test_clock_times(seconds: float, text: str) -> None:
    assert quantities.clock_time(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 bytes"), (90_500, "90.5 kB"), (999_960, "1000.0 kB"), (10_100_000, "10.1 MB")],
)
def test_file_sizes(size: int, text: str) -> None:
    assert quantities.megabytes(size) == text


def test_memory_sizes() -> None:
    assert quantities.gibibytes(225_485_783) == "0.21 GiB"
    assert quantities.gibibytes(24 * 2**30) == "24.0 GiB"
