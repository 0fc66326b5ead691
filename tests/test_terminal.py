"""Run: pytest tests/test_terminal.py (no text of others commands a terminal or a shell; any stream
takes any text).
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph import terminal
from monograph.cli import main

SOURCES = sorted(Path(terminal.__file__).parent.rglob("*.py"))
OBEYED = [
    *map(
        chr,
        (
            *range(9),
            *range(11, 32),
            *range(127, 160),
            *range(0x202A, 0x202F),
            *range(0x2066, 0x206A),
        ),
    )
]
TEXTS = st.text(
    st.one_of(st.sampled_from([*OBEYED, *"\n\t\\'\"$`!; *é字\ud800\udcff"]), st.characters())
)


@given(TEXTS)
def test_nothing_that_a_terminal_obeys_is_left_and_all_else_stays(text: str) -> None:
    shown = terminal.visible(text)
    assert not set(shown) & set(OBEYED)
    shown.encode()
    plain = re.sub(r"[^ -~\n\t\u00a0-\u061b]", "", text)
    assert terminal.visible(plain) == plain


@given(TEXTS)
def test_a_message_is_one_visible_line(text: str) -> None:
    line = terminal.one_line(text)
    assert "\n" not in line and terminal.visible(line) == line


def test_a_suggested_command_is_the_same_words_to_a_shell() -> None:
    words = [
        "", "a b", "$(touch owned)", "`id`", "a;b", "it's", "~", "*", "-n", "a\nb", "\x1b]0;owned\x07", "tab\tbed",
        "\x1b[201~;id\n", "\\x41\x01", "'\x02\\'", "\u202eabc", "\udcff", "字\x9b",
    ]  # fmt: skip
    line = terminal.shell_words(*words)
    assert terminal.visible(line) == line and "\n" not in line
    given = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True
    ).stdout
    assert given.split(b"\0")[:-1] == [word.encode(errors="surrogateescape") for word in words]
    assert terminal.shell_words("plain", "it's") == shlex.join(["plain", "it's"])


class Tty(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252"])
@pytest.mark.parametrize("kind", [io.TextIOWrapper, Tty])
def test_any_text_can_be_written_to_a_stream_of_any_encoding(
    encoding: str, kind: type[io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "字 é \ud800 \udcff ── \x1b]0;owned\x07\u202e"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, kind(io.BytesIO(), encoding=encoding))
    terminal.guard()
    terminal.guard()
    for stream in (sys.stdout, sys.stderr):
        print(hostile, file=stream, flush=True)
        stream.writelines([hostile])
        terminal.write_as_is(stream, "\x1b[1m")
        stream.flush()
        written = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert written.endswith("\x1b[1m") and ("\x1b]" in written) == (kind is io.TextIOWrapper)
    assert sys.stdout.isatty() == (kind is Tty)


class Writable:
    """The least that a program may put in the place of a standard stream."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


def test_a_stream_that_only_writes_is_no_terminal_and_a_closed_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, writable = io.StringIO(), Writable()
    closed.close()
    monkeypatch.setattr(sys, "stdout", writable)
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(SystemExit) as end:
        main(["train", "train.nothing=1"])
    assert end.value.code == 2 and not terminal.takes_colour(writable)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Usage" in writable.text
    sys.stderr.close()


# What sends escape sequences of our own.
ON_ITS_OWN = {"terminal.py", "run/screen.py", "cli/__init__.py", "commands/data.py"}
HOLDS_ESCAPES = {"cli/__init__.py", "data/corpus.py", "run/signals.py"}
# To file descriptors of a process's own, or what is no text of others.
WRITES_BYTES = {"run/folder.py", "run/signals.py", "interrupts.py", "text/sandbox.py"}


def _to_standard(call: ast.Call) -> bool:
    return all(
        ast.unparse(each.value) == "sys.stderr" for each in call.keywords if each.arg == "file"
    )


ENDS = "write|buffer|^__std|echo|style|Handler$"


def ways_around(source: str) -> set[str]:
    """How a file's code would reach a terminal other than by `print`, `Progress` or `write_as_is`."""
    found = set[str]()
    told_by = ast.Name | ast.Attribute | ast.Call | ast.ImportFrom | ast.Constant
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, told_by):
            continue
        text = node.id if isinstance(node, ast.Name) else ""
        # All are too many to be written out.
        if isinstance(node, ast.Attribute) and re.search(ENDS, node.attr):
            text = ast.unparse(node)
        if re.fullmatch(
            r"os\.(write|pwrite)|sys\.(__)?std(out|err)(__)?\.(write|writelines|buffer)", text
        ):
            found.add("bytes")
        if re.fullmatch(
            r"sys\.__std\w+__|(typer|click)\.(echo|secho|style)|logging\.\w*Handler|Console", text
        ):
            found.add("stream")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and not _to_standard(node)
        ):
            found.add("stream")
        imported = (
            node.names
            if isinstance(node, ast.ImportFrom) and node.module == "monograph.terminal"
            else []
        )
        imported_names = [each.name for each in imported]
        if text == "terminal.write_as_is" or "write_as_is" in imported_names:
            found.add("own")
        value = node.value if isinstance(node, ast.Constant) else None
        if "\x1b" in (value.decode("latin-1") if isinstance(value, bytes) else str(value)):
            found.add("escapes")
    return found


def test_all_that_is_printed_passes_the_one_function() -> None:
    allowed = {
        "own": ON_ITS_OWN,
        "escapes": HOLDS_ESCAPES,
        "bytes": WRITES_BYTES,
        "stream": {"run/screen.py"},
    }
    root = Path(terminal.__file__).parent
    for path in SOURCES:
        name = path.relative_to(root).as_posix()
        around = {way for way in ways_around(path.read_text()) if name not in allowed[way]}
        assert not around, f"{name}: {around}"
    for way, source in (
        ("bytes", "os.write(2, text)"), ("bytes", "sys.stdout.buffer.write(b'')"), ("stream", "typer.echo('')"),
        ("stream", "print('', file=sys.__stderr__)"), ("escapes", r"print('\x1b[1m')"),
        ("own", "terminal.write_as_is(sys.stderr, text)"),
        ("own", "from monograph.terminal import write_as_is as w"),
    ):  # fmt: skip
        assert way in ways_around(source), source
