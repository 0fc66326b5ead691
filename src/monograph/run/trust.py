"""Decide whether the Python file that a run names may run: this user wrote the run here, or allows it now.

A run's config.toml ends with a mark, which is an HMAC of its text and of the code that it names, under a secret that
only this user can read:

    mark = HMAC-SHA256(secret, text, [(model.init, path of its file, SHA-256 of the file), ...])

So a mark is invalid if it is copied to another run, or if the Python file was replaced or moved alone. A run that is
moved as a whole keeps a valid mark. If no secret can be stored, this process makes a temporary one: training goes on,
and a later command asks the user.
"""

import errno
import functools
import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from monograph.errors import InputRefused, Unreadable
from monograph.storage.cache_dir import state_root
from monograph.storage.reading import contents, exists, read_input, readable, status, without_links

OPTION = "--trust-code"
MOST_CODE_BYTES = 16 * 1024 * 1024  # longer than any program that a person writes; a sparse file may be huge
_SECRET_BYTES = 32
_MARK = "# mark "
_by_word: set[str] = set()  # contains OPTION once the user has given it to this process


def trust_code() -> None:
    """Allow this process to run the code that any run names, since the user gave --trust-code."""
    _by_word.add(OPTION)


def is_all_trusted() -> bool:
    """Return whether the user gave --trust-code."""
    return OPTION in _by_word


def carries_mark(toml: Path) -> bool:
    """Return whether a TOML file has any user's mark, valid or not, and so was written by a run."""
    return f"\n{_MARK}".encode() in (contents(toml) or b"")


def code_file(init: str | None) -> Path | None:
    """Return the Python file that `model.init` names; None if it names something else or nothing.

    A folder may be called x.py:y and be an adapter's base, so a name that exists as a path is not code.
    """
    file = (init or "").partition(":")[0]
    return Path(file) if file.endswith(".py") and file != init and status(init or "", follow=False) is None else None


def code_digest(init: str, key: str = "model.init") -> str:
    """Return the hex SHA-256 of the Python file that a setting, `model.init` or another `key`, names.

    Raises:
        InputRefused: the file cannot be read, or is larger than MOST_CODE_BYTES.
    """
    file, where = code_file(init) or Path(init), f"{key} = {init!r}"
    try:
        return hashlib.sha256(read_input(file, MOST_CODE_BYTES)).hexdigest()
    except OSError as error:
        raise InputRefused(
            f"{where}: {file} cannot be read ({error.strerror}); it is looked for from {Path.cwd()}"
        ) from None


def marked(text: str, inits: Collection[str | None]) -> str:
    """Return the text of a config.toml with this user's mark, or without a mark if the code cannot be read.

    Args:
        text: the settings as TOML.
        inits: every `model.init` that the settings name.
    """
    with suppress(InputRefused):
        return f"{text}{_MARK}{_mark(text, inits, create=True)}\n"
    return text


def is_ours(config: Path, inits: Collection[str | None]) -> bool:
    """Return whether this user wrote that config.toml on this machine and the code is unchanged; see `marked`."""
    try:
        text, _, mark = read_input(config).decode().rpartition(_MARK)
        return hmac.compare_digest(mark.strip().encode(), _mark(text, inits).encode())
    except (OSError, ValueError, InputRefused):
        return False


def require_trusted(config: Path, inits: Collection[str | None], sha256: object = None) -> None:
    """Refuse to run the code that a run names, unless this user wrote the run here or said --trust-code.

    Args:
        config: the run's config.toml.
        inits: every `model.init` that the run names, in any of its files.
        sha256: the digest of the Python file that the run records; None if it records none.

    Raises:
        InputRefused: the code is not trusted; the message names the file that would run.
    """
    code = _code(inits)
    if not code or _by_word or is_ours(config, inits):
        return
    init, path, digest = code[0]
    if sha256 not in (None, digest):
        raise InputRefused(
            f"{code_file(init)}: not the file that {config.parent} was trained with: put it back, or read it, and then "
            f"add {OPTION}"
        )
    raise InputRefused(
        f"{config.parent} would run the program {path}, and nothing on this machine says that you trained this run "
        f"with that file as it is: read it first, then add {OPTION}"
    )


def _code(inits: Collection[str | None]) -> list[tuple[str, str, str]]:
    """Return (model.init, path, digest) for each `model.init` that names a Python file."""
    named = {init: file for init in inits if init and (file := code_file(init))}
    return sorted((init, str(without_links(file)), code_digest(init)) for init, file in named.items())


def _mark(text: str, inits: Collection[str | None], create: bool = False) -> str:
    return hmac.new(_secret(state_root(), create), json.dumps([text, _code(inits)]).encode(), "sha256").hexdigest()


def _secret(folder: Path, create: bool) -> bytes:
    """Return this user's secret in the folder, or one for this process if it cannot be stored or kept private."""
    try:
        return _kept_secret(folder / f"secret-{os.geteuid()}", create)  # people may share the folder
    except Unreadable as error:
        if error.errno not in (errno.EACCES, errno.EPERM):  # a secret may be there, which a new one would replace
            raise
        return _of_this_process()


def _kept_secret(path: Path, create: bool) -> bytes:
    folder = path.parent
    with suppress(OSError):
        if create and not exists(path):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # only its owner may read it
                file.write(os.urandom(_SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileExistsError):  # another process was faster: its secret counts
                    os.link(file.name, path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with readable(path), open(os.open(path, flags), "rb") as file:
            entry, secret = os.fstat(file.fileno()), file.read(_SECRET_BYTES + 1)
        if (entry.st_uid, entry.st_mode & 0o077, len(secret)) == (os.geteuid(), 0, _SECRET_BYTES):
            return secret
    return _of_this_process()


@functools.cache
def _of_this_process() -> bytes:
    return os.urandom(_SECRET_BYTES)
