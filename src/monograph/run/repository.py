"""Fetch a model from the Hugging Face Hub, and push one there; only a name that begins with hf://
asks the network.
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
from monograph.storage.writing import FULL

# The files of a model that are read here, and no others: neither code nor pickles are fetched.
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
# Of these a plan needs what says a shape: the model's, or the adapters' and their base's name.
SHAPE_FILES = (
    "config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "monograph_base.json",
)
_NAME = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_UNREACHED = "the Hub cannot be reached; is HF_HUB_OFFLINE set?"
_REASONS = {  # by the classes of huggingface_hub's errors, and of the errors of what it asks with
    "LocalTokenNotFoundError": "there is no token: log in with `hf auth login`, or set HF_TOKEN",
    "GatedRepoError": "is gated: accept its terms on its page, and log in with `hf auth login`",
    "RepositoryNotFoundError": "there is no such model, or only others may see it: check the name, or `hf auth login`",
    "RevisionNotFoundError": "there is no such revision of it",
    **dict.fromkeys(("LocalEntryNotFoundError", "ConnectionError", "TransportError"), _UNREACHED),
}


def fetched(name: str | Path, files: tuple[str, ...] = FILES) -> str | Path:
    """Return the folder of a model hf://OWNER/NAME[@REVISION] in the Hub's own cache, and any other
    name as it is.

    Args:
        name: the name.
        files: the files that are fetched, as patterns.

    Raises:
        UsageError: no such form of name, or the library `huggingface_hub` is not installed.
        InputRefused: the Hub has no such model, refuses it, or cannot be reached while the cache
            lacks it.
        DiskFull: there is no room in the cache; what has arrived is used by the next attempt.
    """
    if not str(name).startswith(HUB):
        return name
    with _asking(str(name)) as (library, repository, revision):
        folder = library.snapshot_download(repository, revision=revision, allow_patterns=[*files])
    if not any(is_file(Path(folder, file)) for file in ("config.json", "adapter_config.json")):
        raise InputRefused(
            f"{name}: has no config.json, so it is no model in the form of transformers"
        )
    return str(folder)


def require_account(name: str) -> None:
    """Require that the Hub can be reached and knows whose token is sent, before anything is
    exported.

    Raises:
        UsageError, InputRefused: see `fetched`.
    """
    with _asking(name) as (library, *_):
        library.HfApi().whoami()


def push(folder: Path, name: str) -> str:
    """Make a folder's files the model of hf://OWNER/NAME[@REVISION], by one commit, and return its
    address.

    The same commit removes files of the model that was there before, which would be read with the
    new ones. A repository that does not exist is made, and is private.

    Raises:
        UsageError, InputRefused: see `fetched`.
    """
    new = {
        path.relative_to(folder).as_posix(): path
        for path in matching(folder / "**" / "*")
        if is_file(path)
    }
    with _asking(name) as (library, repository, revision):
        api = library.HfApi()
        address = api.create_repo(repository, private=True, exist_ok=True)
        there = [
            file for file in api.list_repo_files(repository, revision=revision) if file not in new
        ]
        stale = [file for file in there if any(_matches(file, pattern) for pattern in FILES)]
        changes = [library.CommitOperationAdd(file, str(path)) for file, path in new.items()]
        changes += map(library.CommitOperationDelete, stale)
        api.create_commit(repository, changes, commit_message="Upload a model", revision=revision)
    return str(address)


def _matches(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) and file.count("/") == pattern.count("/")


@contextmanager
def _asking(name: str) -> Iterator[tuple[Any, str, str | None]]:
    """Yield the library, a repository's name and its revision, and turn the library's errors into
    lines.
    """
    if not (match := _NAME.fullmatch(name)):
        raise UsageError(f"{name}: expected {HUB}OWNER/NAME, or {HUB}OWNER/NAME@REVISION")
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        command = command_for("hub", "huggingface_hub")
        raise UsageError(f"{name}: this needs huggingface_hub: {command}") from None
    try:
        yield library, match[1], match[2]
    except Exception as error:  # the library and the network may raise anything
        if error_number(error) in FULL:
            raise DiskFull(
                f"{name}: there is no room in the Hub's cache; free some, or set HF_HOME"
            ) from None
        kinds = [kind.__name__ for kind in type(error).__mro__]
        said = " ".join(str(getattr(error, "server_message", None) or error).split())[:160]
        if "HfHubHTTPError" in kinds:
            said = f"the Hub answers {error.response.status_code}: {said}"  # type: ignore[attr-defined]
        reason = next((_REASONS[kind] for kind in kinds if kind in _REASONS), said or kinds[0])
        raise InputRefused(f"{name}: {reason}") from None
