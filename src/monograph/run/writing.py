"""Write files of a run's folder, and folders of results.

A crash during a write leaves either the old content or the new content.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from monograph.errors import DiskFull, InputRefused
from monograph.interrupts import raise_on_sigterm
from monograph.run.folder import Run, claim_new_folder, write_errors_explained
from monograph.run.run_index import SWEEP
from monograph.storage.reading import contents, entries, exists, is_file, parse_json, without_links
from monograph.storage.writing import write_durably
from monograph.text import tokenizer_config
from monograph.text.template import NAMED_FOLDER
from monograph.text.tokenizer import Tokenizer


def write_atomically(
    path: Path, content: str | bytes, kept: str = "what was there before is untouched"
) -> None:
    """Write a file. After a crash it has either the old content or the new one.

    Args:
        path: the file.
        content: its new content.
        kept: what the error message says about the old content.

    Raises:
        DiskFull: the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        write_durably(partial, content, new=False)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DiskFull(f"{path}: cannot be written: {error.strerror}; {kept}") from error


def write_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and the files that belong to it; see `write_atomically`.

    tokenizer.json is written last, since `repair_tokenizer` looks at this file alone.
    """
    for name, text in tokenizer.config.files().items():
        (run.folder / name).parent.mkdir(exist_ok=True)
        write_atomically(run.folder / name, text)
    write_atomically(run.tokenizer, tokenizer.to_json() + "\n")


def repair_tokenizer(run: Run, tokenizer: Tokenizer) -> bool:
    """Write a run's tokenizer again if the run's file is damaged or differs; return whether it did.

    Args:
        run: the run.
        tokenizer: the tokenizer of the run's text.
    """
    with suppress(InputRefused):
        if Tokenizer.from_file(run.tokenizer).digest == tokenizer.digest:
            return False
    write_tokenizer(run, tokenizer)
    return True


class Parent(NamedTuple):
    """The run that another run branches from.

    Attributes:
        run: the parent.
        at_update: the update of the parent's checkpoint; None for its newest checkpoint.
    """

    run: Run
    at_update: int | None


def record_parent(run: Run, parent: Run, at_update: int | None) -> None:
    """Record where a run branches from, for a process that resumes it before its first checkpoint."""
    write_atomically(
        run.parent_file, json.dumps({"run": str(without_links(parent.folder)), "update": at_update})
    )


def recorded_parent(run: Run) -> Parent | None:
    """Return the parent that `record_parent` wrote; None if there is none.

    Raises:
        InputRefused: the file is damaged.
    """
    content = contents(run.parent_file)
    if content is None:
        return None
    try:
        record = parse_json(content)
        if record["update"] is not None and type(record["update"]) is not int:
            raise ValueError
        return Parent(Run(Path(record["run"])), record["update"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise InputRefused(
            f"{run.parent_file}: damaged; put it back, or start the run anew with --from"
        ) from None


def discard(run: Run) -> None:
    """Remove the files of a new run that never began, and its folder if nothing else is in it."""
    # config.toml first: without it the run counts as one that has not begun.
    files = [run.config, run.starts, run.parent_file, run.tokenizer]
    files += [run.folder / name for name in (*tokenizer_config.NAMES, "stdin", SWEEP)]
    named_templates = run.folder / NAMED_FOLDER
    files += entries(named_templates)
    files.append(run.lock_file)
    files += [entry for entry in entries(run.folder) if entry.suffix == ".partial"]
    for path in files:
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        named_templates.rmdir()
    if not entries(run.folder):
        run.folder.rmdir()


@contextmanager
def results_folder(out: Path | None, root: Path) -> Iterator[Path]:
    """Yield a folder for results. If the `with` block fails, remove the folder.

    Args:
        out: the folder, which must be new or empty; None for a new folder in `root`, named by the
            time.
        root: the folder of such folders.

    Raises:
        InputRefused: `out` is a file, holds something, or cannot be made.
        DiskFull: there is no space to make it.
    """
    if out is not None and (is_file(out) or entries(out)):
        raise InputRefused(f"--out {out}: holds something already; name a new folder")
    target = root if out is None else out
    new_folders = [path for path in (target, *target.parents) if not exists(path)]
    with write_errors_explained(target):
        folder = claim_new_folder(root) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
    try:
        # SIGTERM raises an exception, so that the folder is removed then, too.
        with raise_on_sigterm():
            yield folder
    except BaseException:
        with suppress(OSError):  # another program may have put something there in the meantime
            for file in folder.iterdir():
                file.unlink()
            if out is None:
                folder.rmdir()
            for new_folder in new_folders:  # the innermost first
                new_folder.rmdir()
        raise
