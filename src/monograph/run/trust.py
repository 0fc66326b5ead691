"""Decide whether the Python file that a run names may run: this user wrote the run here, or allows
it now.

A run's config.toml ends with a mark, which is an HMAC of its text and of the code that it names,
under a secret that only this user can read:

    mark = HMAC-SHA256(secret, text, [(value, path of its file, SHA-256 of the file), ...])

Here a value is that of a key that may name code, such as FILE.py:FUNCTION
(`monograph.storage.code`). A mark is only made over files that the user named, or whose run has a
valid mark. So a mark is invalid if it is copied to another run, or if the Python file was replaced
or moved alone. A run that is moved as a whole keeps a valid mark. If no secret can be stored, this
process makes a temporary one: training goes on, and a later command asks the user.
"""

import errno
import functools
import hmac
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from monograph.errors import InputRefused, Unreadable
from monograph.storage.cache_dir import state_root
from monograph.storage.code import code_named, digests
from monograph.storage.reading import contents, exists, read_input, readable, without_links

OPTION = "--trust-code"
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


def marked(text: str, digests: Mapping[str, str]) -> str:
    """Return the text of a config.toml with this user's mark.

    Args:
        text: the settings as TOML.
        digests: the digest of each Python file that the settings name and this user vouches for, by
            the value that names it.
    """
    return f"{text}{_MARK}{_mark(text, digests, create=True)}\n"


def is_ours(config: Path, named: Collection[str]) -> bool:
    """Return whether this user wrote that config.toml on this machine and the code is unchanged;
    see `marked`.

    Args:
        config: the run's config.toml.
        named: every value of its settings that may name code.
    """
    try:
        return _has_mark(config, digests(named))
    except InputRefused:
        return False


def require_trusted(
    config: Path, named: Collection[str], runs: Collection[str | None], sha256: object = None
) -> Mapping[str, str]:
    """Refuse to run the code that a run names, unless this user wrote the run here or said
    --trust-code.

    Args:
        config: the run's config.toml.
        named: every value of its settings that may name code; the mark covers these.
        runs: the values whose code would run.
        sha256: the digest of the Python file that the run records; None if it records none.

    Returns:
        The digest of each Python file that may run, by the value that names it: only bytes of that
        digest may run.

    Raises:
        InputRefused: the code is not trusted, and the message names the file that would run; or it
            cannot be read.
    """
    running = [code for code in map(code_named, runs) if code is not None]
    if not running:
        return {}
    vouched = digests(code.value for code in running)
    if _by_word:
        return vouched
    covered = digests(named)
    if _has_mark(config, covered) and all(
        covered.get(value) == digest for value, digest in vouched.items()
    ):
        return vouched
    first = min(running, key=lambda code: code.value)
    if sha256 not in (None, vouched[first.value]):
        raise InputRefused(
            f"{first.path}: not the file that {config.parent} was trained with: put it back, or read it, and then "
            f"add {OPTION}"
        )
    raise InputRefused(
        f"{config.parent} would run the program {without_links(first.path)}, and nothing on this machine says that you "
        f"trained this run with that file as it is: read it first, then add {OPTION}"
    )


def _has_mark(config: Path, covered: Mapping[str, str]) -> bool:
    """Return whether config.toml ends with this user's mark over its text and these digests."""
    try:
        text, _, mark = read_input(config).decode().rpartition(_MARK)
        return hmac.compare_digest(mark.strip().encode(), _mark(text, covered).encode())
    except (OSError, ValueError):
        return False


def _mark(text: str, covered: Mapping[str, str], create: bool = False) -> str:
    codes = filter(None, map(code_named, covered))
    programs = sorted(
        (code.value, str(without_links(code.path)), covered[code.value]) for code in codes
    )
    return hmac.new(
        _secret(state_root(), create), json.dumps([text, programs]).encode(), "sha256"
    ).hexdigest()


def _secret(folder: Path, create: bool) -> bytes:
    """Return this user's secret in the folder, or one for this process if it cannot be stored or
    kept private.
    """
    try:
        # People may share the folder.
        return _kept_secret(folder / f"secret-{os.geteuid()}", create)
    except Unreadable as error:
        # A secret may be there, which a new one would replace.
        if error.errno not in (errno.EACCES, errno.EPERM):
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
            entry = os.fstat(file.fileno())
            secret = file.read(_SECRET_BYTES + 1)
        if (entry.st_uid, entry.st_mode & 0o077, len(secret)) == (os.geteuid(), 0, _SECRET_BYTES):
            return secret
    return _of_this_process()


@functools.cache
def _of_this_process() -> bytes:
    return os.urandom(_SECRET_BYTES)
