"""Run: pytest tests/run/test_trust.py (whose mark a config.toml carries, and what it covers)"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monograph.config.keys import SECTIONS
from monograph.config.settings import CODE_KEYS
from monograph.errors import InputRefused
from monograph.run import trust
from monograph.run.trust import is_ours, require_trusted, with_mark
from monograph.storage.code import MAX_CODE_BYTES, code_named, digests, folder_named

TEXT = "[train]\nupdates = 3\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the secret, and one with a program and a config.toml that names it."""
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("own")
    (tmp_path / "config.toml").write_text(with_mark(TEXT, digests(["own.py:build"])))
    return tmp_path / "home"


def vouched(*named: str) -> bool:
    return is_ours(Path("config.toml"), named or ["own.py:build"])


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
    ids=[
        "program replaced",
        "program elsewhere",
        "other settings",
        "before there were marks",
        "no digest",
    ],
)
def test_a_mark_is_of_one_run_with_one_program(change: Callable[[], object], home: Path) -> None:
    change()
    assert not vouched()
    with pytest.raises(
        InputRefused, match=r"would run the program .*(own|real)\.py, .*--trust-code"
    ):
        require_trusted(Path("config.toml"), ["own.py:build"], ["own.py:build"])


def test_a_mark_without_a_program_says_nothing_of_one(home: Path) -> None:
    Path("config.toml").write_text(with_mark(TEXT, {}))
    assert vouched("folder") and vouched("hf://a/own.py:build") and not vouched()
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
    Path("config.toml").write_text(with_mark(TEXT, digests(["own.py:build"])))
    assert vouched(), "to this process"
    trust._process_secret.cache_clear()
    assert not vouched(), "and to no other"


@pytest.mark.parametrize("size", [None, MAX_CODE_BYTES + 1])
def test_what_is_no_program_is_not_read(size: int | None, home: Path) -> None:
    Path("own.py").unlink()
    os.mkfifo("own.py") if size is None else os.truncate(
        os.open("own.py", os.O_CREAT | os.O_WRONLY), size
    )
    with pytest.raises(InputRefused, match="not a regular file|larger than 16 MiB"):
        require_trusted(Path("config.toml"), ["own.py:build"], ["own.py:build"])


@pytest.mark.parametrize(
    ("value", "file", "function"),
    [
        ("own.py:build", "own.py", "build"),
        ("a:b/own.py:build", "a:b/own.py", "build"),
        ("x.py:y/own.py:build", "x.py:y/own.py", "build"),
        ("own.py:a.py:build", "own.py:a.py", "build"),
        ("../é.py:größe", "../é.py", "größe"),
    ],
)
def test_what_is_code_depends_on_the_value_alone(
    value: str, file: str, function: str, home: Path
) -> None:
    code = code_named(value)
    assert code and (code.path, code.function) == (Path(file), function)
    Path(value).parent.mkdir(parents=True, exist_ok=True)
    Path(value).symlink_to("nowhere")
    assert code_named(value) == code
    assert code_named(folder_named(Path(value))) is None, (
        "a folder that is called so has another name"
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "folder",
        "own.py",
        "own.py:",
        "own.py:a b",
        "own.py:build/",
        "own.pyc:x",
        "a:b",
        "hf://a/own.py:build",
    ],
)
def test_what_is_no_code(value: str | None) -> None:
    assert code_named(value) is None


def test_every_key_that_may_name_code_is_asked_about() -> None:
    """What a key takes says so."""
    named = {f"{name}.{key}" for name, section in SECTIONS.items() for key, field in section.model_fields.items()
             if ".py:" in str(field.json_schema_extra).lower()}  # fmt: skip
    assert named == {*CODE_KEYS}


def test_only_the_bytes_that_were_vouched_for_run(home: Path) -> None:
    code = code_named("own.py:build")
    assert code
    [sha256] = require_trusted(Path("config.toml"), [code.value], [code.value]).values()
    assert code.vouched_source(sha256) == b"own"
    Path("own.py").write_text("other")
    for digest in (sha256, None):
        with pytest.raises(InputRefused, match=r"own.py (changed after it was read|may run)"):
            code.vouched_source(digest)


def test_a_mark_over_some_programs_is_none_over_others(home: Path) -> None:
    Path("other.py").write_text("other")
    Path("config.toml").write_text(with_mark(TEXT, digests(["own.py:build", "other.py:score"])))
    both = ["other.py:score", "own.py:build"]
    assert vouched(*both) and not vouched() and not vouched("other.py:score")
    assert {*require_trusted(Path("config.toml"), both, ["other.py:score"])} == {"other.py:score"}
    changed = {"own.py:build": "0" * 64}  # by the records, which say nothing of other.py
    Path("config.toml").write_text(TEXT)
    with pytest.raises(InputRefused, match=r"^own\.py: not the file that"):
        require_trusted(Path("config.toml"), both, both, changed)
    with pytest.raises(InputRefused, match="would run the program .*other"):
        require_trusted(Path("config.toml"), both, both[:1], changed)
    Path("config.toml").write_text(with_mark(TEXT, digests(["own.py:build", "other.py:score"])))
    for named, runs in ((both[:1], both[:1]), (both, ["third.py:build"])):
        Path("third.py").write_text("third")
        with pytest.raises(InputRefused, match="--trust-code"):
            require_trusted(Path("config.toml"), named, runs)
