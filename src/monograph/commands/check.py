"""`monograph check`: verify this machine, a run or a model's folder."""

import json as jsonlib
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

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
from monograph.profiling.health import (
    Disk,
    compiled_obstacle,
    disk,
    resource_limits,
    resource_limits_text,
)
from monograph.report.quantities import gibibytes, megabytes
from monograph.run import recorded_state
from monograph.run.folder import DEFAULT_ROOT, TEACHERS, Run, standard_json
from monograph.run.models import load_to_export, load_tokenizer, require_all_finite
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


class CheckResult(NamedTuple):
    """The result of a check.

    Attributes:
        facts: what --json prints.
        lines: what is printed for people: a text for each name.
        error: the first error; None if there is none.
    """

    facts: dict[str, Any]
    lines: dict[str, str]
    error: MonographError | None = None


def run(run: str | None, *, laws: bool = False, json: bool) -> None:
    """Print what is checked, one line each, and raise the first error that was found.

    Args:
        run: the run or the model's folder; None for this machine.
        laws: whether to compare fast computations with slow ones on this machine.
        json: whether to print the facts as one JSON object, too.

    Raises:
        UsageError: `laws` and a run are given.
        MonographError: the first error that was found.
    """
    if laws:
        if run is not None:
            raise UsageError(
                f"--laws compares computations of this machine, and {run} has none: leave it out"
            )
        result = _check_laws()
    elif run is None:
        result = _check_machine()
    elif not names_run(run) and is_folder(run):
        result = _verify_folder(run)
    else:
        result = _verify_run(Run.open(run, needs_checkpoint=False))
    width = max([16, *(len(name) + 2 for name in result.lines)])
    for name, text in result.lines.items():
        print(f"{name:<{width}}{text}")
    if json:
        print(jsonlib.dumps({"schema": "monograph.check/1", **result.facts}))
    if result.error:
        raise result.error


def _check_laws() -> CheckResult:
    """Compare fast computations with slow ones (`monograph.laws.check`), and print a line for
    each comparison as soon as it is made.
    """
    # Imported here, because the other checks do not need these modules, which import many others.
    from monograph.laws.check import laws
    from monograph.laws.comparisons import LawComparison

    keep_compiled()
    device = default_device()
    law_facts = list[dict[str, Any]]()
    broken = list[str]()
    began = clock()
    print(f"machine         {describe().summary}; about two minutes\n")
    print(
        f"{'began':>7}{'law':>5}  {'compared':<34}{'error':>10}{'bound':>9}{'seconds':>9}  verdict"
    )
    for number, name, compare in laws(device):
        law_began = clock()
        # This is printed before the comparison, because a crash of the process must show which law it was.
        print(f"{law_began - began:>5.0f} s{number:>5}  {name:<34}", end="", flush=True)
        try:
            comparison = compare()
        except Exception as error:  # torch and drivers may raise anything; the other laws go on
            first_line = str(error).partition("\n")[0][:200]
            comparison = LawComparison(float("inf"), 0, f"{type(error).__name__}: {first_line}")
        spent_s = clock() - law_began
        difference, bound, verdict = comparison.in_words
        print(f"{difference:>10}{bound:>9}{spent_s:>9.1f}  {verdict}")
        law = {
            "number": number,
            "name": name,
            "holds": comparison.holds,
            **comparison._asdict(),
            "seconds": spent_s,
        }
        law_facts.append(standard_json(law))
        if not comparison.holds:
            broken.append(f"{number} ({name})")
    facts = {"device": describe().name, "torch_version": torch.__version__, "laws": law_facts}
    if not broken:
        return CheckResult(facts, {})
    message = (
        f"computes wrong on this machine with torch {torch.__version__}: law {', '.join(broken)}; "
        "please report it"
    )
    return CheckResult(facts, {}, MonographError(message))


def _check_machine() -> CheckResult:
    """Measure this machine, and describe it."""
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    device = default_device()
    machine = describe()
    dtypes = {"fp32": torch.float32}
    if machine.has_bf16:
        dtypes["bf16"] = torch.bfloat16
    flops_per_s = {name: measured_matmul_flops(device, dtype) for name, dtype in dtypes.items()}
    obstacle = compiler_obstacle()
    if obstacle is None:
        obstacle = compiled_obstacle(device)  # compiles something, and compares the results
    runs_disk = disk(DEFAULT_ROOT)
    cache_disk = disk(cache_root()[0])
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled_folder()))
    process_limits = resource_limits()
    compiled_bytes = sum(size for _, size, _ in files_in(folder))
    # `keep_compiled` keeps its own folder below a size, but not one that the user chose.
    limit = f", at most {gibibytes(MOST_COMPILED_BYTES)}" if folder == compiled_folder() else ""
    versions = {
        "monograph": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    lines = {
        "machine": machine.summary,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "compiler": obstacle or "found; what it compiles agrees with what is not compiled",
        **{name: f"{flops / 1e12:.3g} TFLOP/s measured" for name, flops in flops_per_s.items()},
        "runs": _disk_text(runs_disk),
        "cache": _disk_text(cache_disk),
        "compiled": f"{megabytes(compiled_bytes)} in {folder}{limit}",
        "limits": resource_limits_text(process_limits),
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
        "measured_flops_per_s": flops_per_s,
        "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s,
        "compiler_obstacle": obstacle,
        "compiled_bytes": compiled_bytes,
        "disks": [runs_disk._asdict(), cache_disk._asdict()],
        "limits": process_limits,
        **{f"{name.lower()}_version": version for name, version in versions.items()},
    }
    return CheckResult(facts, lines)


def _disk_text(disk: Disk) -> str:
    """Return how much of a disk is free, and how fast it is written."""
    free = f"{gibibytes(disk.free_bytes)} free in {disk.folder}"
    if disk.written_bytes_per_s is None:
        return f"{free}, which cannot be written: {disk.obstacle}"
    return f"{free}, written at {megabytes(disk.written_bytes_per_s)}/s"


def _verify_run(run: Run) -> CheckResult:
    """Verify the files of a run that later commands need.

    The report is not verified, since it can be drawn again. A text is verified when it is read.
    """
    states: dict[Path, dict[str, Any]] = {}  # the state in each sound checkpoint, by its folder

    def verify_checkpoint(path: Path) -> None:
        checkpointing.verify(path)
        states[path] = recorded_state.state_in(path, run)

    folders = [path for _, path in reversed(checkpointing.list_checkpoints(run.checkpoints))]
    # This also fills `states`.
    checkpoint_faults = {path.name: _fault(partial(verify_checkpoint, path)) for path in folders}
    for name, fault in checkpoint_faults.items():
        if fault and checkpointing.is_gone(run.checkpoints / name):
            # The run still trains, and has removed this checkpoint since they were listed. So begin again.
            return _verify_run(run)
    sound_folders = [*states]  # the oldest first
    # The other files are compared with the digests in this state.
    newest_state = states[sound_folders[-1]] if sound_folders else {}

    def verify_lock() -> None:
        if serial_number(run.folder) <= 0 or lock_record(run.folder) == {}:
            raise InputRefused(f"{run.lock_file}: does not say which run this is")

    def metrics_digest() -> str | None:
        run.rows()  # called for its errors
        if "metrics_sha256" not in newest_state:
            return None
        # Later rows are not covered by the checkpoint.
        return run.metrics_digest(newest_state.get("metrics_offset"))

    file_faults = {
        "run.lock": _fault(verify_lock),
        "config.toml": _fault(lambda: run_settings(run, code_keys=())),
        "tokenizer.json": _fault(lambda: load_tokenizer(run, newest_state)),
        "metrics.jsonl": _fault(metrics_digest, newest_state.get("metrics_sha256")),
        **_faults_of_optional_files(run, newest_state),
    }
    faults = file_faults | checkpoint_faults
    lines = {name: _state_text(fault) for name, fault in faults.items()}
    facts = {
        "run": str(run.folder),
        "files": _fault_objects(file_faults),
        "checkpoints": _fault_objects(checkpoint_faults),
    }
    return CheckResult(facts, lines, _error_of_run(run, faults, checkpoint_faults))


def _error_of_run(
    run: Run,
    faults: Mapping[str, MonographError | None],
    checkpoint_faults: Mapping[str, MonographError | None],
) -> MonographError | None:
    """Return the error with which the check of a run ends; None if all of its files are sound.

    Args:
        run: the run.
        faults: the fault of each file and each checkpoint, by its name; None where it is sound.
        checkpoint_faults: the faults of the checkpoints alone, the oldest checkpoint first.
    """
    # A file that cannot be read is reported first, because it is not known whether it is damaged.
    for fault in faults.values():
        if isinstance(fault, Unreadable):
            return fault
    sound_checkpoints = [name for name, fault in checkpoint_faults.items() if fault is None]
    if not sound_checkpoints:
        newest_fault: MonographError | str = "none was saved"
        if checkpoint_faults:
            newest_fault = [fault for fault in checkpoint_faults.values() if fault][-1]
        remedy = "the run begins with --resume"
        if checkpoint_faults or run.metrics_offset:
            remedy = "put a copy of one back"
        return NoValidCheckpoint(
            f"{run.checkpoints}: no checkpoint is sound: {newest_fault}; {remedy}"
        )
    damaged = [name for name, fault in faults.items() if fault]
    if damaged:
        return InputRefused(
            f"{run.folder}: damaged: {', '.join(damaged)}; the newest sound: {sound_checkpoints[-1]}"
        )
    return None


def _sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file, or of no bytes if there is no such file."""
    return sha256(contents(path) or b"").hexdigest()


def _faults_of_optional_files(
    run: Run, newest_state: Mapping[str, Any]
) -> dict[str, MonographError | None]:
    """Return {name: fault} of the files that only some runs have.

    Args:
        run: the run.
        newest_state: the state in its newest sound checkpoint.
    """
    files = {}
    if exists(run.parent_file):
        files["from.json"] = _fault(lambda: recorded_parent(run))
    if exists(run.folder / REFERENCE):
        files[REFERENCE] = _fault(lambda: verify_reference(run))
    recorded_digests = recorded_state.recorded_file_digests(newest_state)
    for name in sorted({TEACHERS, *recorded_digests}):
        path = run.folder / name
        if exists(path) or name in recorded_digests:
            files[name] = _fault(partial(_sha256, path), recorded_digests.get(name))
    return files


def _verify_folder(folder: str) -> CheckResult:
    """Verify the files of a model's folder.

    The folder has no digests, so a weight that has changed to another finite number is not noticed.
    """
    is_model = has_weights(Path(folder)) or is_file(Path(folder, "config.json"))
    if not is_model and not is_adapter(folder):
        raise InputRefused(
            f"{folder}: neither a run nor a model: expected a run's folder or a Hugging Face folder"
        )

    def verify_weights() -> None:
        model, *_ = load_to_export(folder)
        require_all_finite(model, folder)

    files = {
        "weights": _fault(verify_weights),
        "tokenizer.json": _fault(lambda: Tokenizer.from_file(require_tokenizer(folder))),
    }
    lines = {name: _state_text(fault) for name, fault in files.items()}
    error = next((fault for fault in files.values() if fault), None)
    if error and not isinstance(error, Unreadable):
        error = InputRefused(str(error))  # so that all kinds of damage have one exit code
    facts = {"run": folder, "files": _fault_objects(files), "checkpoints": []}
    return CheckResult(facts, lines, error)


def _fault_objects(faults: Mapping[str, MonographError | None]) -> list[dict[str, str | None]]:
    """Return faults as JSON objects."""
    return [
        {"name": name, "fault": None if fault is None else str(fault)}
        for name, fault in faults.items()
    ]


def _fault(
    verify: Callable[[], object], recorded_digest: str | None = None
) -> MonographError | None:
    """Verify a file, and return its fault as an error; None if it is sound.

    Args:
        verify: a function that reads the file and raises an error if it is damaged. If
            `recorded_digest` is given, the function returns the file's digest.
        recorded_digest: the digest that the newest sound checkpoint records; None if it records none.
    """
    try:
        digest = verify()
    except MonographError as error:
        return error
    if recorded_digest in (None, digest):
        return None
    expected = f"expected sha256 {recorded_digest}, found {digest}"
    return InputRefused(f"not what it was when the newest sound checkpoint was saved: {expected}")


def _state_text(fault: MonographError | None) -> str:
    """Return whether a file is sound, damaged or unknown, and why."""
    if fault is None:
        return "sound"
    state = "unknown" if isinstance(fault, Unreadable) else "damaged"
    return f"{state}: {fault}"
