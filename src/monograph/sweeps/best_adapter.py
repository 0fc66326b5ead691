"""Write the adapters of a sweep's best member as a folder that PEFT loads."""

import shutil
from pathlib import Path

from monograph.errors import InputRefused, Warn
from monograph.model.adapter import save_adapter
from monograph.run.folder import Run
from monograph.run.models import load_to_export
from monograph.run.recorded_state import newest_state

ADAPTER = "adapter"  # the folder's name in the sweep's


def has_adapters(run: Run) -> bool:
    """Return whether a run trains adapters."""
    return bool(newest_state(run).get("recipe", {}).get("lora"))


def write_best_adapter(sweep_folder: Path, best: Run, warn: Warn) -> Path | None:
    """Write SWEEP/adapter anew, and return its path.

    If PEFT has no form for the adapters, or their base cannot be read, the result is None, and
    there is a warning.

    Args:
        sweep_folder: the sweep's folder.
        best: the run of the best member.
        warn: called with each line that the user should read.

    Raises:
        DiskFull: there is no space left. Nothing of the adapters remains.
    """
    try:
        _, _, adapters = load_to_export(best.folder, warn)
    except InputRefused as error:
        warn(f"{error}: no folder of the adapters is written")
        return None
    if adapters is None:
        return None
    folder = sweep_folder / ADAPTER
    shutil.rmtree(folder, ignore_errors=True)
    save_adapter(adapters, folder)
    return folder
