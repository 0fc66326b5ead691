"""Run: pytest tests/storage/test_reading.py (what could not be read is not taken for what is not
there).
"""

from __future__ import annotations

import ast
import errno
import glob
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.errors import InputRefused, MonographError, Unreadable
from monograph.storage.reading import (
    contents,
    entries,
    error_number,
    exists,
    is_file,
    is_folder,
    matching,
    read_input,
    unreadable,
    without_links,
)

SOURCE = Path(__file__).resolve().parents[2] / "src" / "monograph"
# Methods and functions that answer "nothing there" where the system says that it could not look.
SILENT = {"exists", "lexists", "is_file", "isfile", "is_dir", "isdir", "glob", "rglob"}
# What they look at is no person's file: headers of the compiler, and compiled code, of which
# nothing unread is removed. The package's own recipes, and sizes on disk that are shown and decide
# nothing.
NOBODYS = {
    "device.py",
    "compat/inductor.py",
    "storage/cache_dir.py",
    "config/recipes.py",
    "run/listing.py",
}


def is_walk(node: ast.Attribute) -> bool:
    return node.attr == "walk" and ast.unparse(node) == "os.walk"


def test_only_the_room_storage_looks_whether_a_file_is_there() -> None:
    found = []
    words = re.compile("|".join([*SILENT, "walk"]))
    for path in sorted(SOURCE.rglob("*.py")):
        if not words.search(text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and (node.attr in SILENT or is_walk(node)):
                found.append((path.relative_to(SOURCE).as_posix(), node.lineno))
    assert {file for file, _ in found} <= NOBODYS, f"use monograph.storage.reading instead: {found}"


def test_links_are_followed_in_one_place_which_refuses_a_circle_and_a_nul(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop" / "x", tmp_path / "a\0b"):
        try:
            assert without_links(path).is_absolute()  # from Python 3.13 on a circle is no error
        except InputRefused as refused:
            assert str(path) in str(refused)
        with pytest.raises(OSError):
            read_input(path)
    for source in sorted(SOURCE.rglob("*.py")):
        if ".resolve()" not in (text := source.read_text()):
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        bare = [call for call in calls if ast.unparse(call).endswith(".resolve()")]
        assert not bare or source.name == "reading.py", f"{source}: use without_links"


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR, errno.EACCES]
)
def test_what_cannot_be_looked_at_is_neither_there_nor_not(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: object, **_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "stat", fails)
    monkeypatch.setattr(os, "listdir", fails)
    for look in (exists, is_file, is_folder, contents, entries, lambda path: matching(path / "*")):
        with pytest.raises(
            Unreadable, match=f"{tmp_path}.*: cannot be read: {os.strerror(number)}; "
        ) as refused:
            look(tmp_path)
        assert refused.value.exit_code == 3 and not isinstance(refused.value, InputRefused)


def test_what_is_not_there_is_known(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("nothing", "file/in a file", "loop", "n" * 300, "nul\0"):
        path = tmp_path / name
        assert (
            not exists(path)
            and not is_file(path)
            and not is_folder(path)
            and contents(path) is None
        )
        assert entries(path) == []
    assert contents(tmp_path / "file") == b"a" and contents(tmp_path) is None
    assert entries(tmp_path, "f") == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)", errno.ENOMEM),
        ("I/O error: Input/output error (os error 5)", errno.EIO),
        ("expected a tensor of size (12)", None),
    ],
)
def test_the_number_of_an_error_is_read_from_its_text(text: str, number: int | None) -> None:
    assert error_number(RuntimeError(text)) == number


def test_a_missing_file_is_refused_as_such() -> None:
    missing: MonographError = unreadable(
        "a/file", FileNotFoundError(errno.ENOENT, "No such file or directory")
    )
    assert isinstance(missing, InputRefused) and "a/file: cannot be read: No such file" in str(
        missing
    )


names = st.sampled_from(["a", "b.txt", ".hidden", "c", "d[1].txt"])
patterns = st.lists(
    st.sampled_from(["*", "**", "a", "*.txt", ".*", "?", "[ab]*", "c"]), min_size=1, max_size=4
)


@given(st.sets(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=8), patterns)
def test_a_pattern_finds_what_glob_finds(tmp_path_factory, files, pattern) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for file in sorted(files, key=len, reverse=True):
        path = folder.joinpath(*file)
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    asked = str(folder.joinpath(*pattern))
    assert matching(asked) == sorted(
        {Path(hit) for hit in glob.glob(asked, recursive=True)}, key=str
    )
