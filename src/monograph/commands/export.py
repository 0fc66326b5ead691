"""`monograph export`: write a run's model as a folder that other tools load."""

from contextlib import suppress
from pathlib import Path

from monograph.errors import (
    InputRefused,
    NoValidCheckpoint,
    Unreadable,
    UsageError,
    join_with_or,
)
from monograph.model.adapter import PeftAdapters
from monograph.model.config import LlamaConfig
from monograph.model.exports import EXPORTS, Export, find_export
from monograph.model.hub import sees_pictures
from monograph.model.mtp import MTP_PREFIX
from monograph.model.whole_folder import save_whole
from monograph.run.models import (
    load_to_export,
    origin_of,
    original_folder,
    save,
    trained_dtype,
)
from monograph.run.recipe import find_run
from monograph.run.repository import push, require_account
from monograph.storage.code import HUB
from monograph.storage.reading import without_links
from monograph.storage.writing import temporary_folder
from monograph.terminal import shell_words, warn

WHOLE_FORMAT = "hf"  # the format in which a model that sees pictures is written whole
ADAPTER = "adapter"  # the folder of the adapters alone, inside the merged model's folder


def run(
    run: str, *, to: str | Path, format: str, dtype: str | None, original: str | None = None
) -> None:
    """Write the newest sound checkpoint's model; see the command line's help.

    Args:
        run: the run, or a model's folder.
        to: the new folder, or a repository of the Hub to push the model to.
        format: the format's name in `EXPORTS`.
        dtype: the dtype of the weights; None: for GGUF that to which training has rounded them, else the
            format's usual one.
        original: the folder of the whole model, to write a copy of it with the trained text model; None:
            the text model is written alone.
    """
    export = find_export(format, dtype)
    if original is not None and format != WHOLE_FORMAT:
        raise UsageError(
            f"--original {original}: --format {format} holds a text model alone; use --format {WHOLE_FORMAT}"
        )
    if str(to).startswith(HUB):
        _export_to_hub(run, str(to), format, original)
        return
    if original is not None:
        _write_whole(run, original, Path(to), str(to))
        print(_how_to_load(Path(to), export))
        return
    _warn_of_layers_left_out(run, format)
    _warn_of_few_bits(run)
    model, tokenizer, trained_adapters = load_to_export(run, warn)
    to = Path(to)
    adapters = _adapters_to_write(trained_adapters, export, model.config)

    def write_adapters(new_folder: Path) -> None:
        """Write the adapters alone, inside the model's folder.

        That folder still has a temporary name, so model and adapters appear together.
        """
        if adapters is not None:
            (new_folder / ADAPTER).mkdir()
            export.write_adapters(adapters, model.config, new_folder / ADAPTER)

    if dtype is None and export.dtypes:
        dtype = trained_dtype(run)
    save(model, to, tokenizer, format, dtype, warn, write_adapters)
    if adapters is not None:
        print(export.describe_adapters(to / ADAPTER))
    print(export.describe(to))


def _adapters_to_write(
    adapters: PeftAdapters | None, export: Export, config: LlamaConfig
) -> PeftAdapters | None:
    """Return the adapters if the export can also write them alone; else None.

    If there are adapters that the format has no form for, a warning says so.
    """
    if adapters is None:
        return None
    try:
        export.check_adapters(adapters, config)
    except InputRefused as error:
        warn(f"{error}: the model is written merged, without a file of its adapters")
        return None
    return adapters


def _warn_of_few_bits(run: str) -> None:
    """Say that an export has all weights in full, although those from which a run's training began are in
    4 or 8 bits.
    """
    with suppress(InputRefused, Unreadable, NoValidCheckpoint):
        origin = origin_of(run)
        if origin is not None and origin.few_bits and find_run(run) is not None:
            label = origin.few_bits.label
            warn(
                f"{run}: all weights are written in full, though {origin.base} has them as {label}"
            )


def _warn_of_layers_left_out(run: str, format: str) -> None:
    """Say which layers of the model from which a run's training began are not written, and how they would be
    if they can.
    """
    # That model may be gone. If `run` itself cannot be read, loading it raises the error.
    with suppress(InputRefused, Unreadable, NoValidCheckpoint):
        origin = origin_of(run)
        if origin is None or not origin.left_out:
            return
        line = f"{run}: only the text model is written: {origin.left_out} are left out"
        # A copy of the whole model has its weights in its own dtypes, to few bits of which nothing is rounded.
        if find_run(run) is not None and format == WHOLE_FORMAT and origin.few_bits is None:
            line += f"; {shell_words('--original', origin.base)} writes the whole model"
        warn(line)


def _warn_of_other_origin(run: str, original: str, source: str) -> None:
    """Say that a run's training began from another model than the original.

    Args:
        run: the run, or a folder of a text model, which does not record where it is from.
        original: the name of the whole model.
        source: its folder.
    """
    with suppress(InputRefused, Unreadable, NoValidCheckpoint):
        origin = origin_of(run) if find_run(run) is not None else None
        if origin is None or origin.base == original:
            return
        if without_links(origin.base) != without_links(source):
            warn(f"{run} was trained from {origin.base}, not from {original}")


def _write_whole(run: str, original: str, folder: Path, shown: str) -> None:
    """Write a copy of a whole model's folder with the trained text model, and say what is where.

    Adapters are merged, and not written alone: their names are those of the text model's layers.

    Args:
        run: the run, or a folder of a text model.
        original: the name of the whole model.
        folder: the new folder.
        shown: the new folder's name in messages.
    """
    source = original_folder(original)
    _warn_of_other_origin(run, original, source)
    model, tokenizer, _ = load_to_export(run, warn)
    written = save_whole(model, source, folder, tokenizer)
    rounded = f", rounded to {', '.join(written.rounded_to).lower()}" if written.rounded_to else ""
    others = ", ".join(f"{prefix}*" for prefix in written.prefixes)
    print(
        f"{shown}: {original} with the trained text model ({written.trained} tensors{rounded}); "
        f"{written.others} other tensors are unchanged{others and f' ({others})'}"
    )
    if MTP_PREFIX in written.prefixes:
        warn(f"{MTP_PREFIX}* (multi-token prediction) was not trained, and may predict worse")
    if written.not_copied:
        warn(f"not copied from {original}: {', '.join(written.not_copied)}")


def _how_to_load(folder: Path, export: Export) -> str:
    """Return the line that says how a whole model's folder is loaded."""
    if not sees_pictures(folder):
        return export.describe(folder)
    call = f"AutoModelForImageTextToText.from_pretrained({str(folder)!r})"
    return f"{folder}: a Hugging Face folder; transformers loads it with {call}"


def _export_to_hub(run: str, name: str, format: str, original: str | None) -> None:
    """Export into a temporary folder, and push that to a repository of the Hub.

    Adapters are merged but not pushed alone, since they name their base's folder on this disk.
    """
    if not EXPORTS[format].can_be_pushed:
        pushable = join_with_or([word for word, export in EXPORTS.items() if export.can_be_pushed])
        raise UsageError(
            f"--to {name}: --format {format} is written to a folder; only {pushable} is pushed"
        )
    require_account(name)
    if original is None:
        _warn_of_layers_left_out(run, format)
        _warn_of_few_bits(run)
    with temporary_folder() as folder:
        if original is not None:
            _write_whole(run, original, folder / "model", name)
        else:
            model, tokenizer, _ = load_to_export(run, warn)
            save(model, folder / "model", tokenizer, format, warn=warn)
        address = push(folder / "model", name)
    print(f"{address}: one commit with the whole model; model.init={name} begins from it")
