"""Decide whether the Python file that a run names may run.

It may run if this user wrote the run on this machine, or allows it now with --trust-code. A mark at the
end of a run's config.toml shows who wrote the run. The mark is an HMAC of the text of config.toml and of
the code that it names, under a secret that only this user can read:

    mark = HMAC-SHA256(secret, text, [(value, path of its file, SHA-256 of the file), ...])

Here a value is what config.toml has for a key that names code, such as FILE.py:FUNCTION
(`monograph.storage.code`). A file gets into a mark only if the user named it, or if it is in the valid
mark of a run that is continued. A mark becomes invalid if it is copied to a config.toml with another text,
or if the Python file is changed, replaced or moved. The run's own folder may be moved. If no secret can be
stored, this process makes a temporary one. Training then works, but a later command asks the user.
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
from types import MappingProxyType

from monograph.errors import InputRefused, Unreadable
from monograph.storage.cache_dir import state_root
from monograph.storage.code import code_named, digests
from monograph.storage.reading import contents, exists, read_input, readable, without_links

OPTION = "--trust-code"
_SECRET_BYTES = 32
_MARK = "# mark "
_given_options: set[str] = set()  # contains OPTION once the user has given it to this process


def trust_code() -> None:
    """Allow this process to run the code that any run names, since the user gave --trust-code."""
    _given_options.add(OPTION)


def is_all_trusted() -> bool:
    """Return whether the user gave --trust-code."""
    return OPTION in _given_options


def carries_mark(toml: Path) -> bool:
    """Return whether a TOML file has a mark, valid or not, which shows that a run wrote the file."""
    return f"\n{_MARK}".encode() in (contents(toml) or b"")


def with_mark(text: str, code_digests: Mapping[str, str]) -> str:
    """Return a text for config.toml with this user's mark at its end.

    Args:
        text: the settings as TOML.
        code_digests: {value that names code: digest of its Python file}, for files that may run.
    """
    return f"{text}{_MARK}{_mark(text, code_digests, create=True)}\n"


def is_ours(config: Path, code_values: Collection[str]) -> bool:
    """Return whether config.toml has a valid mark of this user.

    Args:
        config: the run's config.toml.
        code_values: every value of its settings that may name code.
    """
    try:
        return _has_mark(config, digests(code_values))
    except InputRefused:
        return False


def require_trusted(
    config: Path,
    code_values: Collection[str],
    values_to_run: Collection[str | None],
    recorded_digests: Mapping[str | None, object] = MappingProxyType({}),
) -> Mapping[str, str]:
    """Require that the code of a run may run: it is this user's, or --trust-code was given.

    Args:
        config: the run's config.toml.
        code_values: every value of its settings that may name code; the mark covers these.
        values_to_run: the values whose code would run now; those that name no code are ignored.
        recorded_digests: {value that names code: digest of its Python file}, as a checkpoint of the run
            records them; a digest is None if it was not recorded.

    Returns:
        {value that names code: digest of its Python file}. Only bytes with this digest may run.

    Raises:
        InputRefused: the code may not run, or cannot be read. The message names the file.
    """
    codes = [code for code in map(code_named, values_to_run) if code is not None]
    if not codes:
        return {}
    digests_to_run = digests(code.value for code in codes)
    if is_all_trusted():
        return digests_to_run
    covered = digests(code_values)
    if _has_mark(config, covered):
        # The files were read twice, and may have changed between the two reads.
        if all(covered.get(value) == digest for value, digest in digests_to_run.items()):
            return digests_to_run
    for code in codes:
        if recorded_digests.get(code.value) not in (None, digests_to_run[code.value]):
            raise InputRefused(
                f"{code.path}: not the file that {config.parent} was trained with: put it back, or read it, and then "
                f"add {OPTION}"
            )
    first = min(codes, key=lambda code: code.value)
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
    """Return the mark of a text and of the Python files with these digests.

    Args:
        text: the text of config.toml before the mark.
        covered: {value that names code: digest of its Python file}.
        create: whether to make a secret if this user has none.
    """
    codes = [code for code in map(code_named, covered) if code is not None]
    programs = sorted(
        (code.value, str(without_links(code.path)), covered[code.value]) for code in codes
    )
    message = json.dumps([text, programs]).encode()
    return hmac.new(_user_secret(state_root(), create), message, "sha256").hexdigest()


def _user_secret(folder: Path, create: bool) -> bytes:
    """Return this user's secret; a temporary secret of this process if none can be stored."""
    try:
        # The name has the user's id, since several users may share the folder.
        return _stored_secret(folder / f"secret-{os.geteuid()}", create)
    except Unreadable as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return _process_secret()
        # A failing disk, for example, may hide a secret that is there. Without it valid marks would look
        # invalid.
        raise


def _stored_secret(path: Path, create: bool) -> bytes:
    """Return the secret in a file that only this user can read; the process's secret if there is no such
    file and none can be made.

    Args:
        path: the file.
        create: whether to make the file if there is none.

    Raises:
        Unreadable: the system failed to read the file.
    """
    folder = path.parent
    # Here an OSError says that there is no file, that it is a link, or that it cannot be made. When the
    # system fails to read, `readable` raises Unreadable, which is no OSError.
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
            secret = file.read(_SECRET_BYTES + 1)  # one more, by which a longer file is noticed
        is_private = entry.st_uid == os.geteuid() and entry.st_mode & 0o077 == 0
        if is_private and len(secret) == _SECRET_BYTES:
            return secret
    return _process_secret()


@functools.cache
def _process_secret() -> bytes:
    """Return a random secret, the same at each call in this process."""
    return os.urandom(_SECRET_BYTES)
