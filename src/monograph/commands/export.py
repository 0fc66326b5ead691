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
    """Write the newest sound checkpoint's model; see the command line's help.

    Args:
        run: the run, or a model's folder.
        to: the new folder, or a repository of the Hub to push the model to.
        format: the format's name in `EXPORTS`.
        dtype: the dtype of the weights; None: the format's usual one.
    """
    export = find_export(format, dtype)
    if str(to).startswith(HUB):
        _export_to_hub(run, str(to), format)
        return
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


def _export_to_hub(run: str, name: str, format: str) -> None:
    """Export into a temporary folder, and push that to a repository of the Hub.

    Adapters are merged but not pushed alone, since they name their base's folder on this disk.
    """
    if not EXPORTS[format].can_be_pushed:
        pushable = join_with_or([word for word, export in EXPORTS.items() if export.can_be_pushed])
        raise UsageError(
            f"--to {name}: --format {format} is written to a folder; only {pushable} is pushed"
        )
    require_account(name)
    with temporary_folder() as folder:
        model, tokenizer, _ = load_to_export(run, warn)
        save(model, folder / "model", tokenizer, format, warn=warn)
        address = push(folder / "model", name)
    print(f"{address}: one commit with the whole model; model.init={name} begins from it")
