"""Fetch a model from the Hugging Face Hub, and push one to it.

The network is used only for a name that begins with hf://.
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull, InputRefused, UsageError
from monograph.extras import command_for
from monograph.storage.code import HUB
from monograph.storage.reading import error_number, is_file, matching
from monograph.storage.writing import DISK_FULL_ERRORS

# The files of a model that this package reads. Nothing else is fetched, and so no code and no pickles.
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "adapter_config.json",
    "adapter_model.safetensors",
    "monograph_base.json",
)
# The files from which a plan takes a model's shape. An adapter's folder names the adapter's base.
SHAPE_FILES = (
    "config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "monograph_base.json",
)
_NAME = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_UNREACHED = "the Hub cannot be reached; is HF_HUB_OFFLINE set?"
# What an error means, by the name of its class in huggingface_hub or in its network library.
_REASONS = {
    "LocalTokenNotFoundError": "there is no token: log in with `hf auth login`, or set HF_TOKEN",
    "GatedRepoError": "is gated: accept its terms on its page, and log in with `hf auth login`",
    "RepositoryNotFoundError": "there is no such model, or only others may see it: check the name, or `hf auth login`",
    "RevisionNotFoundError": "there is no such revision of it",
    **dict.fromkeys(("LocalEntryNotFoundError", "ConnectionError", "TransportError"), _UNREACHED),
}


def fetch_if_on_hub(name: str | Path, files: tuple[str, ...] = FILES) -> str | Path:
    """Fetch a model into the Hub's own cache, if its name is that of a model on the Hub.

    Args:
        name: hf://OWNER/NAME or hf://OWNER/NAME@REVISION.
        files: patterns of the files to fetch.

    Returns:
        The model's folder in the cache; a name that does not begin with hf:// is returned as it is.

    Raises:
        UsageError: the name has another form, or the library `huggingface_hub` is not installed.
        InputRefused: the Hub has no such model or refuses it; or the Hub cannot be reached, and the
            model is not in the cache.
        DiskFull: there is no room in the cache. The next attempt uses what has arrived.
    """
    if not str(name).startswith(HUB):
        return name
    with _hub_access(str(name)) as (library, repository, revision):
        folder = library.snapshot_download(repository, revision=revision, allow_patterns=[*files])
    if not any(is_file(Path(folder, file)) for file in ("config.json", "adapter_config.json")):
        raise InputRefused(
            f"{name}: has no config.json, so it is no model in the form of transformers"
        )
    return str(folder)


def require_account(name: str) -> None:
    """Require that the Hub can be reached and accepts the user's token. Call it before an export.

    Raises:
        UsageError, InputRefused: see `fetch_if_on_hub`.
    """
    with _hub_access(name) as (library, *_):
        library.HfApi().whoami()


def push(folder: Path, name: str) -> str:
    """Upload a model to hf://OWNER/NAME[@REVISION] in one commit, and return its address.

    The commit also removes files of an earlier model, which would be read together with the new ones.
    If the repository does not exist, a private one is made.

    Raises:
        UsageError, InputRefused: see `fetch_if_on_hub`.
    """
    new_files = {
        path.relative_to(folder).as_posix(): path
        for path in matching(folder / "**" / "*")
        if is_file(path)
    }
    with _hub_access(name) as (library, repository, revision):
        api = library.HfApi()
        address = api.create_repo(repository, private=True, exist_ok=True)
        changes = [library.CommitOperationAdd(file, str(path)) for file, path in new_files.items()]
        stale = list[str]()
        for file in api.list_repo_files(repository, revision=revision):
            is_of_model = any(_matches_pattern(file, pattern) for pattern in FILES)
            if is_of_model and file not in new_files:
                stale.append(file)
        changes += map(library.CommitOperationDelete, stale)
        api.create_commit(repository, changes, commit_message="Upload a model", revision=revision)
    return str(address)


def _matches_pattern(file: str, pattern: str) -> bool:
    """Return whether a path matches a pattern, in which * does not match a slash."""
    return fnmatchcase(file, pattern) and file.count("/") == pattern.count("/")


@contextmanager
def _hub_access(name: str) -> Iterator[tuple[Any, str, str | None]]:
    """Yield (library, repository, revision), and turn errors of the `with` block into one line.

    Raises:
        UsageError, InputRefused, DiskFull: see `fetch_if_on_hub`.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(f"{name}: expected {HUB}OWNER/NAME, or {HUB}OWNER/NAME@REVISION")
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        command = command_for("hub", "huggingface_hub")
        raise UsageError(f"{name}: this needs huggingface_hub: {command}") from None
    try:
        yield library, match[1], match[2]
    except Exception as error:  # the library and the network may raise anything
        if error_number(error) in DISK_FULL_ERRORS:
            raise DiskFull(
                f"{name}: there is no room in the Hub's cache; free some, or set HF_HOME"
            ) from None
        class_names = [error_class.__name__ for error_class in type(error).__mro__]
        message = str(getattr(error, "server_message", None) or error)
        message = " ".join(message.split())[:160]
        if "HfHubHTTPError" in class_names:
            status = error.response.status_code  # type: ignore[attr-defined]
            message = f"the Hub answers {status}: {message}"
        reason = message or class_names[0]
        for class_name in reversed(class_names):  # the error's own class last, so that it decides
            reason = _REASONS.get(class_name, reason)
        raise InputRefused(f"{name}: {reason}") from None
