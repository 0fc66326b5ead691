"""Run: pytest tests/run/test_trust.py (whose mark a config.toml carries, and what it covers)"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monograph.errors import InputRefused
from monograph.run import trust
from monograph.run.trust import is_ours, marked, require_trusted

TEXT = "[train]\nupdates = 3\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the secret, and one with a program and a config.toml that names it."""
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("own")
    (tmp_path / "config.toml").write_text(marked(TEXT, ["own.py:build"]))
    return tmp_path / "home"


def vouched(init: str | None = "own.py:build") -> bool:
    return is_ours(Path("config.toml"), [init])


def test_the_secret_is_for_its_owner_alone(home: Path) -> None:
    [secret] = home.iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    assert secret.read_bytes().hex() not in Path("config.toml").read_text()
    assert vouched()


@pytest.mark.parametrize(
    "change",
    [
        lambda: Path("own.py").write_text("other"),
        lambda: (Path("own.py").rename("real.py"), Path("own.py").symlink_to("real.py")),
        lambda: Path("config.toml").write_text(Path("config.toml").read_text().replace("3", "4")),
        lambda: Path("config.toml").write_text(TEXT),
        lambda: Path("config.toml").write_text(TEXT + "# mark ü\n"),
    ],
    ids=["program replaced", "program elsewhere", "other settings", "before there were marks", "no digest"],
)
def test_a_mark_is_of_one_run_with_one_program(change: Callable[[], object], home: Path) -> None:
    change()
    assert not vouched()
    with pytest.raises(InputRefused, match=r"would run the program .*(own|real)\.py, .*--trust-code"):
        require_trusted(Path("config.toml"), ["own.py:build"])


def test_a_mark_without_a_program_says_nothing_of_one(home: Path) -> None:
    Path("config.toml").write_text(marked(TEXT, [None]))
    assert vouched(None) and vouched("folder") and not vouched()
    assert not is_ours(Path("config.toml"), ["own.py:build", "own.py:other"])


@pytest.mark.parametrize("spoilt", ["readable", "short", "link", "pipe"])
def test_a_secret_that_others_may_know_is_none(spoilt: str, home: Path) -> None:
    [secret] = home.iterdir()
    if spoilt == "readable":
        secret.chmod(0o644)
    elif spoilt == "short":
        secret.write_bytes(b"x")
    else:
        secret.rename(home / "other")
        secret.symlink_to("other") if spoilt == "link" else os.mkfifo(secret, 0o600)
    assert not vouched()
    Path("config.toml").write_text(marked(TEXT, ["own.py:build"]))
    assert vouched(), "to this process"
    trust._of_this_process.cache_clear()
    assert not vouched(), "and to no other"


@pytest.mark.parametrize("size", [None, trust.MOST_CODE_BYTES + 1])
def test_what_is_no_program_is_not_read(size: int | None, home: Path) -> None:
    Path("own.py").unlink()
    os.mkfifo("own.py") if size is None else os.truncate(os.open("own.py", os.O_CREAT | os.O_WRONLY), size)
    with pytest.raises(InputRefused, match="not a regular file|larger than 16 MiB"):
        require_trusted(Path("config.toml"), ["own.py:build"])
