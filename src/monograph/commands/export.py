"""`monograph export`: write a run's model as a folder that other tools load."""

from pathlib import Path

from monograph.errors import InputRefused, UsageError, join_with_or
from monograph.model.adapter import PeftAdapters
from monograph.model.config import LlamaConfig
from monograph.model.exports import EXPORTS, Export, find_export
from monograph.run.models import load_to_export, save
from monograph.run.repository import push, require_account
from monograph.storage.code import HUB
from monograph.storage.writing import temporary_folder
from monograph.terminal import warn

ADAPTER = "adapter"  # the folder of the adapters alone, inside the merged model's folder


def run(run: str, *, to: str | Path, format: str, dtype: str | None) -> None:
    """Write the newest sound checkpoint's model; see the command line's help."""
    export = find_export(format, dtype)
    if (name := str(to)).startswith(HUB):
        _pushed(run, name, format)
        return
    model, tokenizer, trained = load_to_export(run, warn)
    to = Path(to)
    adapters = _with_form(trained, export, model.config)

    def write_extras(new: Path) -> None:
        """Write the adapters alone, so that both get their names at once."""
        if adapters is not None:
            (new / ADAPTER).mkdir()
            export.write_adapters(adapters, model.config, new / ADAPTER)

    save(model, to, tokenizer, format, dtype, warn, write_extras)
    if adapters is not None:
        print(export.describe_adapters(to / ADAPTER))
    print(export.describe(to))


def _with_form(
    adapters: PeftAdapters | None, export: Export, config: LlamaConfig
) -> PeftAdapters | None:
    """Return the adapters, or None with a warning if the format has no form for them."""
    if adapters is None:
        return None
    try:
        export.check_adapters(adapters, config)
    except InputRefused as error:
        warn(f"{error}: the model is written merged, without a file of its adapters")
        return None
    return adapters


def _pushed(run: str, name: str, format: str) -> None:
    """Export into a temporary folder, and push that. Adapters stay here: they name their base's
    folder on this disk.
    """
    if not EXPORTS[format].can_be_pushed:
        pushed = join_with_or([word for word, export in EXPORTS.items() if export.can_be_pushed])
        raise UsageError(
            f"--to {name}: --format {format} is written to a folder; only {pushed} is pushed"
        )
    require_account(name)
    with temporary_folder() as place:
        model, tokenizer, _ = load_to_export(run, warn)
        save(model, place / "model", tokenizer, format, warn=warn)
        address = push(place / "model", name)
    print(f"{address}: one commit with the whole model; model.init={name} begins from it")
