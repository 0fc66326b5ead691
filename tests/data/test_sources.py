"""Finding files: `pytest tests/data/test_sources.py`."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import shutil
import signal
import sys
import tempfile
from types import SimpleNamespace

import pytest

from modes import binding_modes
from monograph.data import sources
from monograph.data.corpus import corpus
from monograph.data.sources import find_sources
from monograph.errors import InputRefused, Unreadable, UsageError
from monograph.storage import writing


def names(found):
    return [file.name for file in found.files]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my texts"
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c", "deep/er/ä d.txt"):
        (folder / name).write_text(f"text of {name}\n", encoding="utf-8")
    return folder


def test_a_folder_is_searched_in_a_fixed_order(folder, tmp_path):
    assert names(find_sources(folder, tmp_path)) == [
        f"my texts/{name}" for name in ("a.md", "b.txt", "deep/c", "deep/er/ä d.txt")
    ]


def test_what_cannot_be_text_is_passed_over_and_counted(folder, tmp_path):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "empty.txt").touch()
    (folder / "gone").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    os.link(folder / "a.md", folder / "hard link.md")
    (folder / "same.md").symlink_to(folder / "a.md")
    found = find_sources(folder, tmp_path)
    assert names(found) == [
        f"my texts/{name}"
        for name in ("a.md", "b.txt", "deep/c", "deep/er/ä d.txt", "hard link.md")
    ]
    assert {os.path.basename(path): reason for path, reason in found.skipped} == {
        ".git": "hidden",
        "image.png": "binary",
        "empty.txt": "empty",
        "gone": "not a regular file",
        "pipe": "not a regular file",
        "same.md": "the same file as another",
    }
    by_name = dict(zip(names(found), found.files, strict=True))
    assert by_name["my texts/a.md"].group == by_name["my texts/hard link.md"].group


def test_links_in_a_circle_end(folder, tmp_path):
    before = names(find_sources(folder, tmp_path))
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "deep" / "er" / "loop").symlink_to(folder / "deep")
    (folder / "self").symlink_to(folder / "self")
    found = find_sources(folder, tmp_path)
    assert names(found) == before and found.skipped == (
        (str(folder / "self"), "not a regular file"),
    )


def test_patterns_lists_and_files(folder, tmp_path):
    assert names(find_sources(f"{folder}/*.txt", tmp_path)) == ["b.txt"]
    assert names(find_sources(f"{folder}/**/*.txt", tmp_path)) == ["b.txt", "deep/er/ä d.txt"]
    assert names(find_sources(f"{folder}/d*", tmp_path)) == ["deep/c", "deep/er/ä d.txt"]
    assert names(find_sources([folder / "b.txt", folder / "deep", folder / "b.txt"], tmp_path)) == [
        "b.txt", "deep/c", "deep/er/ä d.txt"
    ]  # fmt: skip


def test_the_hash_follows_the_text_and_not_the_place(folder, tmp_path):
    first = find_sources(folder, tmp_path).sha256
    moved = tmp_path / "elsewhere" / "my texts"
    shutil.copytree(folder, moved)
    assert find_sources(moved, tmp_path).sha256 == first
    (moved / "b.txt").write_text("other text")
    second = find_sources(moved, tmp_path).sha256
    (moved / "b.txt").rename(moved / "z.txt")
    assert len({first, second, find_sources(moved, tmp_path).sha256}) == 3


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (None, "missing.txt", "missing.txt: no such file or folder"),
        (None, "*.nothing", r"\*.nothing: no file matches"),
        ("", "empty.txt", "empty.txt: empty file"),
        ("a\0b", "nul.txt", "nul.txt: has NUL bytes"),
        (
            "ARROW1\0\0",
            "polars.feather",
            "polars.feather: an Arrow or a Parquet file: name it .arrow or .parquet",
        ),
        ("PAR1\0", "table", "table: an Arrow or a Parquet file: name it .arrow or .parquet"),
        ("", "records.jsonl", "records.jsonl: empty file"),
        ("x", "backup.tar.gz", "backup.tar.gz: .tar files are not read"),
        ("x", "table.parquet.GZ", "table.parquet.GZ: .parquet files are not read; convert it"),
        ("x", "a.zip", "a.zip: .zip files are not read"),
    ],
)
def test_a_bad_source_is_refused_by_name(tmp_path, make, source, message):
    if make is not None:
        (tmp_path / source).write_text(make)
    with pytest.raises(InputRefused, match=message):
        find_sources(str(tmp_path / source), tmp_path)


def test_a_folder_without_text_or_with_archives_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(InputRefused, match="no text in it"):
        find_sources(tmp_path / "data", tmp_path)
    (tmp_path / "data" / "b.bin").write_bytes(b"\0")
    with pytest.raises(InputRefused, match="b.bin: .bin files are not read"):
        find_sources(tmp_path / "data", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputRefused, match="pipe: not a regular file"):
        find_sources(tmp_path / "pipe", tmp_path)
    with pytest.raises(UsageError, match="empty list"):
        find_sources([], tmp_path)


def test_an_unreadable_file_is_refused_by_name(folder, tmp_path):
    (folder / "b.txt").chmod(0)
    with (
        binding_modes(),
        pytest.raises(Unreadable, match="b.txt: cannot be read: Permission denied; check its perm"),
    ):
        find_sources(folder, tmp_path)


def test_standard_input(tmp_path, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO("from a pipe ü".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    found = find_sources("-", tmp_path)
    assert (
        names(found) == ["stdin"]
        and found.files[0].path.read_text(encoding="utf-8") == "from a pipe ü"
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(InputRefused, match="standard input: empty"):
        find_sources("-", tmp_path)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UsageError, match="terminal"):
        find_sources("-", tmp_path)


def test_the_standard_library_is_its_modules_without_tests_and_tables(tmp_path):
    found = find_sources("stdlib", tmp_path)
    assert {"os.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names(found))
    assert 5e6 < found.bytes < 2e7 and all(name.endswith(".py") for name in names(found))
    unwanted = {
        "test",
        "tests",
        "encodings",
        "pydoc_data",
        "idlelib",
        "turtledemo",
        "lib2to3",
        "site-packages",
    }
    assert not any(unwanted & set(name.split("/")) for name in names(found))
    groups = {file.name: file.group for file in found.files}
    assert (
        groups["json/decoder.py"] == groups["json/__init__.py"] == "json"
        and groups["os.py"] == "os"
    )


def endless(monkeypatch, block, then=None):
    """A standard input that gives this block again and again; and what happens at the third."""
    blocks = itertools.chain([block] * 3, iter(then, None) if then else itertools.repeat(block))
    stdin = SimpleNamespace(
        isatty=lambda: False, buffer=SimpleNamespace(read=lambda _: next(blocks))
    )
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_pipe_without_an_end_is_refused_at_a_bound_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_STDIN_BYTES", 1 << 16)
    endless(
        monkeypatch, b"again and again\n" * 4096, then=lambda: pytest.fail("read beyond the bound")
    )
    with pytest.raises(
        InputRefused,
        match=r"standard input: has more than 6.1e-05 GiB .* write it to a file and give",
    ):
        find_sources("-", tmp_path)
    endless(monkeypatch, bytes(1 << 20), then=lambda: pytest.fail("what is no text was kept"))
    with pytest.raises(InputRefused, match="standard input: has NUL bytes"):
        find_sources("-", tmp_path)
    assert (tmp_path / "stdin").stat().st_size <= 1 << 16


def test_half_of_the_disk_is_the_most_that_a_pipe_may_fill(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 17))
    endless(
        monkeypatch, b"again and again\n" * 4096, then=lambda: pytest.fail("read beyond the bound")
    )
    with pytest.raises(InputRefused, match="half of what is free in"):
        find_sources("-", tmp_path)


def test_what_a_killed_process_left_is_gone_after_the_next_and_a_living_ones_stays(
    tmp_path, monkeypatch
):
    """A child that is killed while it copies standard input; and beside it folders of others, which
    stay.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("", "monograph-of-a-friend", "other"):
        (tmp_path / "temporary" / name).mkdir()
    (tmp_path / "temporary" / "monograph-of-a-friend" / "text").write_text("not ours")
    child = os.fork()
    if not child:
        endless(monkeypatch, b"text\n", then=lambda: os.kill(os.getpid(), signal.SIGKILL))
        corpus("-", tokenizer="bytes", cache=tmp_path / "cache")
    os.waitpid(child, 0)
    assert len(list((tmp_path / "temporary").iterdir())) == 3
    # Which is none of ours to look into.
    (tmp_path / "temporary" / "monograph-of-a-friend").chmod(0)
    (tmp_path / "book.txt").write_text("some words, " * 2000)
    with binding_modes(), writing.temporary_folder() as living:
        corpus(
            tmp_path / "book.txt", tokenizer="bytes", sequence_length=8, cache=tmp_path / "cache"
        )
        found = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert found == {"monograph-of-a-friend", "other", living.name}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("chats.json", '[\n  {"messages": []}]', "an array of records"),
        ("alpaca.JSON", '\ufeff[{"instruction": "a", "output": "b"}]', "an array of records"),
        ("rows.csv", "text,label\na,1\n", "a table as text"),
        ("rows.tsv.gz", "text\tlabel\na\t1\n", "a table as text"),
    ],
)
def test_records_in_other_forms_are_not_learned_as_text(folder, tmp_path, name, text, reason):
    other = tmp_path / "records"
    other.mkdir()
    data = text.encode()
    (other / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(InputRefused, match=r"call it \.txt if its text is meant") as raised:
        find_sources(other / name, tmp_path)
    assert str(raised.value).startswith(f"{other / name}: a ") and ".jsonl" in str(raised.value)
    for source in (other, f"{other}/*"):
        with pytest.raises(InputRefused, match=rf"no text in it \({reason}\)"):
            find_sources(source, tmp_path)
    shutil.copy(other / name, folder)
    assert [reason for _, reason in find_sources(folder, tmp_path).skipped] == [reason]
    (other / "same.txt").write_bytes(data)
    assert names(find_sources(other, tmp_path)) == ["records/same.txt"]


def test_json_that_is_no_array_of_records_is_text(tmp_path):
    for name, text in {
        "package.json": '{"a": [{"b": 1}]}',
        "numbers.json": "[1, 2]",
        "names.json": '["a"]',
    }.items():
        (tmp_path / name).write_text(text)
        assert names(find_sources(tmp_path / name, tmp_path)) == [name]
