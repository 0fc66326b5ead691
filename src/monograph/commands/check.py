"""`monograph check`: verify this machine, a run or a model's folder."""

import json as jsonlib
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from monograph import __version__, checkpointing
from monograph.device import (
    clock,
    compiler_obstacle,
    default_device,
    describe,
    measured_matmul_flops,
)
from monograph.errors import InputRefused, MonographError, NoValidCheckpoint, Unreadable, UsageError
from monograph.model.adapter import is_adapter
from monograph.model.files import has_weights
from monograph.profiling.health import Disk, compiled_obstacle, disk, limits, limits_said
from monograph.report.quantities import gibibytes, megabytes
from monograph.run import recorded_state
from monograph.run.folder import DEFAULT_ROOT, Run, standard_json
from monograph.run.models import load_to_export, own_tokenizer, require_all_finite
from monograph.run.recipe import names_run, require_tokenizer
from monograph.run.run_index import lock_record, serial_number
from monograph.run.writing import recorded_parent
from monograph.session.recorded import run_settings
from monograph.session.reference import REFERENCE, verify_reference
from monograph.storage.cache_dir import (
    MOST_COMPILED_BYTES,
    cache_root,
    compiled_folder,
    files_in,
    keep_compiled,
)
from monograph.storage.reading import contents, exists, is_file, is_folder
from monograph.text.tokenizer import Tokenizer


def run(run: str | None, *, laws: bool = False, json: bool) -> None:
    """Print one fact a line, then raise the first fault; with `json`, also print one object with
    units in its keys.
    """
    if laws:
        if run is not None:
            raise UsageError(
                f"--laws compares computations of this machine, and {run} has none: leave it out"
            )
        facts, lines, error = _laws()
    elif run is None:
        facts, lines, error = *_machine(), None
    elif not names_run(run) and is_folder(run):
        facts, lines, error = _folder(run)
    else:
        facts, lines, error = _run(Run.open(run, saved=False))
    width = max(16, *(len(name) + 2 for name in lines)) if lines else 0
    for name, text in lines.items():
        print(f"{name:<{width}}{text}")
    if json:
        print(jsonlib.dumps({"schema": "monograph.check/1", **facts}))
    if error:
        raise error


def _laws() -> tuple[dict[str, Any], dict[str, str], MonographError | None]:
    """Compare fast paths with slow ones; a law's name is printed first, as its comparison may end
    the process.
    """
    from monograph.profiling.laws import Compared, laws

    keep_compiled()
    device = default_device()
    listed = list[dict[str, Any]]()
    broken = list[str]()
    began = clock()
    print(f"machine         {describe().summary}; about two minutes\n")
    print(
        f"{'began':>7}{'law':>5}  {'compared':<34}{'error':>10}{'bound':>9}{'seconds':>9}  verdict"
    )
    for number, name, compare in laws(device):
        start = clock()
        print(f"{start - began:>5.0f} s{number:>5}  {name:<34}", end="", flush=True)
        try:
            found = compare()
        except Exception as error:  # of torch or a driver: the other laws are compared all the same
            found = Compared(
                float("inf"), 0, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            )
        spent_s = clock() - start
        off, bound, verdict = found.said
        print(f"{off:>10}{bound:>9}{spent_s:>9.1f}  {verdict}")
        law = {
            "number": number,
            "name": name,
            "holds": found.holds,
            **found._asdict(),
            "seconds": spent_s,
        }
        listed.append(standard_json(law))
        broken += [] if found.holds else [f"{number} ({name})"]
    facts = {"device": describe().name, "torch_version": torch.__version__, "laws": listed}
    said = f"computes wrong on this machine with torch {torch.__version__}: law {', '.join(broken)}; please report it"
    return facts, {}, MonographError(said) if broken else None


def _machine() -> tuple[dict[str, Any], dict[str, str]]:
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    device = default_device()
    machine = describe()
    obstacle = compiler_obstacle()
    dtypes = {"fp32": torch.float32, **({"bf16": torch.bfloat16} if machine.has_bf16 else {})}
    rates = {name: measured_matmul_flops(device, dtype) for name, dtype in dtypes.items()}
    compiled = obstacle or compiled_obstacle(device)
    disks = [disk(folder) for folder in (DEFAULT_ROOT, cache_root()[0])]
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled_folder()))
    allowed = limits()
    kept_bytes = sum(each[1] for each in files_in(folder))
    most = f", at most {gibibytes(MOST_COMPILED_BYTES)}" if folder == compiled_folder() else ""
    versions = {
        "monograph": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    lines = {
        "machine": machine.summary,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "compiler": compiled or "found; what it compiles agrees with what is not compiled",
        **{name: f"{rate / 1e12:.3g} TFLOP/s measured" for name, rate in rates.items()},
        **{name: _disk(room) for name, room in zip(("runs", "cache"), disks, strict=True)},
        "compiled": f"{megabytes(kept_bytes)} in {folder}{most}",
        "limits": limits_said(allowed),
    }
    facts = {
        "device": machine.name,
        "device_type": machine.type,
        "driver_version": machine.driver,
        **{
            key: getattr(machine, key)
            for key in ("memory_bytes", "free_memory_bytes", "cores", "has_bf16")
        },
        "peak_flops_per_s": dict(machine.peak_flops),
        "measured_flops_per_s": rates,
        "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s,
        "compiler_obstacle": compiled,
        "compiled_bytes": kept_bytes,
        "disks": [room._asdict() for room in disks],
        "limits": allowed,
        **{f"{name.lower()}_version": version for name, version in versions.items()},
    }
    return facts, lines


def _disk(disk: Disk) -> str:
    free = f"{gibibytes(disk.free_bytes)} free in {disk.folder}"
    if disk.written_bytes_per_s is None:
        return f"{free}, which cannot be written: {disk.obstacle}"
    return f"{free}, written at {megabytes(disk.written_bytes_per_s)}/s"


def _run(folder: Run) -> tuple[dict[str, Any], dict[str, str], MonographError | None]:
    """Verify the files that later commands rely on.

    The report can be drawn again from them, and a text's hash is verified when the text is read.
    """

    def metrics() -> str | None:
        folder.rows()
        return (
            folder.metrics_digest(saved.get("metrics_offset"))
            if "metrics_sha256" in saved
            else None
        )

    def lock() -> None:
        if serial_number(folder.folder) <= 0 or lock_record(folder.folder) == {}:
            raise InputRefused(f"{folder.lock_file}: does not say which run this is")

    saved: dict[str, Any] = {}

    def verified(path: Path) -> None:
        nonlocal saved
        checkpointing.verify(path)
        saved = recorded_state.state_in(path, folder)

    folders = [path for _, path in reversed(checkpointing.candidates(folder.checkpoints))]
    checkpoints = {path.name: _fault(partial(verified, path)) for path in folders}
    if any(
        fault and checkpointing.is_gone(folder.checkpoints / name)
        for name, fault in checkpoints.items()
    ):
        # The run is still training, and has replaced a checkpoint that was listed above.
        return _run(folder)
    sound = [path for path in folders if checkpoints[path.name] is None]
    files = {
        "run.lock": _fault(lock),
        "config.toml": _fault(lambda: run_settings(folder, runs=())),
        "tokenizer.json": _fault(lambda: own_tokenizer(folder, saved)),
        "metrics.jsonl": _fault(metrics, saved.get("metrics_sha256")),
        **_of_some_runs(folder, saved),
    }
    faults = files | checkpoints
    lines = {name: _said(fault) for name, fault in faults.items()}
    # An unreadable file is reported first: while it is unread, it is unknown whether a checkpoint
    # is sound.
    error: MonographError | None = next(
        (fault for fault in faults.values() if isinstance(fault, Unreadable)), None
    )
    damaged = [name for name, line in lines.items() if line != "sound"]
    if not sound and not error:
        why = next(filter(None, reversed(checkpoints.values())), "none was saved")
        instead = (
            "put a copy of one back"
            if folders or folder.metrics_offset
            else "the run begins with --resume"
        )
        error = NoValidCheckpoint(f"{folder.checkpoints}: no checkpoint is sound: {why}; {instead}")
    elif damaged and not error:
        error = InputRefused(
            f"{folder.folder}: damaged: {', '.join(damaged)}; the newest sound: {sound[-1].name}"
        )
    return (
        {"run": str(folder.folder), "files": _listed(files), "checkpoints": _listed(checkpoints)},
        lines,
        error,
    )


def _sha256(path: Path) -> str:
    return sha256(contents(path) or b"").hexdigest()


def _of_some_runs(folder: Run, saved: Mapping[str, Any]) -> dict[str, MonographError | None]:
    """Return the faults of files that only some runs have."""
    files = {}
    if exists(folder.parent_file):
        files["from.json"] = _fault(lambda: recorded_parent(folder))
    if exists(folder.folder / REFERENCE):
        files[REFERENCE] = _fault(lambda: verify_reference(folder))
    for entry, name in recorded_state.FILES.items():
        path = folder.folder / name
        if exists(path) or entry in saved:
            files[name] = _fault(partial(_sha256, path), saved.get(entry))
    return files


def _folder(folder: str) -> tuple[dict[str, Any], dict[str, str], MonographError | None]:
    """Verify the files of a model's folder. It has no digests, so a changed finite weight goes
    unnoticed.
    """
    if not (
        has_weights(Path(folder)) or is_file(Path(folder, "config.json")) or is_adapter(folder)
    ):
        raise InputRefused(
            f"{folder}: neither a run nor a model: expected a run's folder or a Hugging Face folder"
        )
    files = {
        "weights": _fault(lambda: require_all_finite(load_to_export(folder)[0], folder)),
        "tokenizer.json": _fault(lambda: Tokenizer.from_file(require_tokenizer(folder))),
    }
    lines = {name: _said(fault) for name, fault in files.items()}
    error = next((fault for fault in files.values() if fault), None)
    error = InputRefused(str(error)) if error and not isinstance(error, Unreadable) else error
    return {"run": folder, "files": _listed(files), "checkpoints": []}, lines, error


def _listed(faults: Mapping[str, MonographError | None]) -> list[dict[str, str | None]]:
    return [
        {"name": name, "fault": None if fault is None else str(fault)}
        for name, fault in faults.items()
    ]


def _fault(read: Callable[[], object], recorded: str | None = None) -> MonographError | None:
    """Return the error of reading a file, or one that says that its digest is not the recorded one;
    None if sound.
    """
    try:
        content = read()
    except MonographError as error:
        return error
    if recorded in (None, content):
        return None
    expected = f"expected sha256 {recorded}, found {content}"
    return InputRefused(f"not what it was when the newest sound checkpoint was saved: {expected}")


def _said(fault: MonographError | None) -> str:
    return (
        "sound"
        if fault is None
        else f"{'unknown' if isinstance(fault, Unreadable) else 'damaged'}: {fault}"
    )
