"""Show runs in TensorBoard, Weights & Biases, trackio or MLflow, whose libraries only that needs.

What opens a run in a tracker puts it in the place of an earlier one of the same run, so no number
is there twice. It uses no network unless the tracker's own settings say so.
"""

import importlib.util
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from monograph.errors import DiskFull, InputRefused, UsageError
from monograph.storage.reading import entries
from monograph.terminal import shell_words

PROJECT = "monograph"
Point = tuple[int, dict[str, float]]  # an update, and the numbers of a row by name
Settings = Mapping[str, Any]  # by key, such as "optim.lr"
_BATCH = 1000  # numbers that MLflow takes at once


class Tracker(NamedTuple):
    """A run that is open in a tracker.

    Attributes:
        write: adds points.
        close: finishes the run.
        seen: how to look at it.
    """

    write: Callable[[list[Point]], None]
    close: Callable[[], object]
    seen: str


def _tensorboard(name: str, key: str, settings: Settings, out: Path | None) -> Tracker:
    """Write event files to OUT/NAME, by default to tensorboard/NAME."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    out = out or Path("tensorboard")
    suffix = f".{key}"
    earlier = entries(out / name, "events.")
    if others := [file for file in earlier if file.suffix != suffix]:
        raise InputRefused(f"{others[0]}: is not of this run; name another folder with --out")
    for file in earlier[:-1]:
        file.unlink()
    (out / name).mkdir(parents=True, exist_ok=True)
    began_s = time.time()
    # TensorBoard's own EventFileWriter writes in a thread, whose errors it prints, and forgets in
    # the last rows.
    process = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
    named = f"events.out.tfevents.{int(began_s):010d}.{process}{suffix}"
    writer = RecordWriter(open(out / name / named, "xb"))

    def add(update: int, **what: object) -> None:
        writer.write(Event(step=update, wall_time=time.time(), **what).SerializeToString())

    def write(points: list[Point]) -> None:
        for update, numbers in points:
            add(
                update,
                summary={
                    "value": [
                        {"tag": tag, "simple_value": number} for tag, number in numbers.items()
                    ]
                },
            )
        writer.flush()

    writer.write(Event(wall_time=began_s, file_version="brain.Event:2").SerializeToString())

    # This voids the earlier file, which stays since a TensorBoard that reads it would not find the
    # next one without it.
    add(0, session_log=SessionLog(status=SessionLog.START))
    plain = {
        each: str(value) if isinstance(value, list) else value for each, value in settings.items()
    }
    add(0, summary=hparams_pb(plain, trial_id=key))
    return Tracker(write, writer.close, f"tensorboard --logdir {shell_words(out)}")


def _wandb(name: str, key: str, settings: Settings, out: Path | None) -> Tracker:
    """Begin a run of wandb, offline unless WANDB_MODE says otherwise."""
    # It would report its own errors even if offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    place = out or Path(os.environ.get("WANDB_DIR", "."))
    for folder in entries(place / "wandb", "offline-run-"):
        if folder.name.endswith(f"-{key}"):
            shutil.rmtree(folder)
    how = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
    mode = os.environ.get("WANDB_MODE", "offline")
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    where = {"dir": place, "mode": mode, "project": project, "id": key, "name": name}
    run = wandb.init(**where, config=dict(settings), reinit="create_new", settings=how)
    seen = f"wandb sync {shell_words(Path(run.dir).parent)}" if mode == "offline" else str(run.url)

    def look() -> None:
        # On a full disk it drops rows. Without the folder it writes nothing to this machine.
        with suppress(FileNotFoundError), tempfile.TemporaryFile(dir=run.dir) as file:
            file.write(bytes(1 << 20))

    return _watched(run, look, seen)


def _trackio(name: str, key: str, settings: Settings, out: Path | None) -> Tracker:
    """Begin a run of trackio, on this machine unless its variables name another."""
    if out:
        os.environ["TRACKIO_DIR"] = str(out.absolute())  # is read by the import
    import trackio

    with suppress(ValueError):  # there is no such project yet
        for earlier in trackio.Api().runs(PROJECT):
            if (earlier.config or {}).get("key") == key:
                earlier.delete()
    how = {
        "config": {**settings, "key": key},
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    # In a context of its own, since `init` finishes the open run of this one, and a sweep's runs
    # are open together.
    run = Context().run(trackio.init, PROJECT, name, **how)
    place = f"TRACKIO_DIR={shell_words(out.absolute())} " if out else ""

    def look() -> None:
        if any("logs" in failed for failed in getattr(run, "_warned_failures", ())):
            raise DiskFull("trackio: it dropped rows; see the disk, then follow again")

    return _watched(run, look, f"{place}trackio show --project {PROJECT}")


class _Open(Protocol):
    """A run that is open in a library."""

    def log(self, metrics: dict[str, float], *, step: int) -> object: ...

    def finish(self) -> object: ...


def _watched(run: _Open, look: Callable[[], None], seen: str) -> Tracker:
    """Have a look after a library has written, which raises no error where it cannot."""

    def write(points: list[Point]) -> None:
        for update, numbers in points:
            run.log(numbers, step=update)
        look()

    def close() -> None:
        run.finish()
        look()

    return Tracker(write, close, seen)


def _mlflow(name: str, key: str, settings: Settings, out: Path | None) -> Tracker:
    """Begin a run of MLflow, in OUT/mlflow.db unless MLFLOW_TRACKING_URI names another place."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell of its use
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    # It tells of each table of a new file, and errors twice.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    uri = (
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out or Path()).absolute()}/mlflow.db"
    )
    client = MlflowClient(uri)
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(project)
    into = experiment.experiment_id if experiment else client.create_experiment(project)
    for earlier in client.search_runs([into], f"tags.monograph = '{key}'"):
        client.delete_run(earlier.info.run_id)
    run = client.create_run(into, tags={"monograph": key}, run_name=name).info.run_id
    client.log_batch(run, params=[Param(each, str(value)) for each, value in settings.items()])

    def write(points: list[Point]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [
            Metric(*named, now_ms, update)
            for update, numbers in points
            for named in numbers.items()
        ]
        for begin in range(0, len(metrics), _BATCH):
            client.log_batch(run, metrics=metrics[begin : begin + _BATCH])

    return Tracker(
        write,
        lambda: client.set_terminated(run),
        f"mlflow ui --backend-store-uri {shell_words(uri)}",
    )


Opener = Callable[[str, str, Settings, Path | None], Tracker]


class Library(NamedTuple):
    """The library of a tracker.

    Attributes:
        title: what the tracker is called.
        open: opens a run there; see `tracker_named`.
    """

    title: str
    open: Opener


# By the name that is imported, and typed.
LIBRARIES = {
    "tensorboard": Library("TensorBoard", _tensorboard),
    "wandb": Library("W&B", _wandb),
    "trackio": Library("trackio", _trackio),
    "mlflow": Library("MLflow", _mlflow),
}


def tracker_named(name: str) -> Opener:
    """Return what opens a run in the tracker of a name.

    Its arguments are the run's name; a key, which tells it from runs of that name in other folders;
    its settings; and the folder for the tracker's files, where None means the tracker's own.

    Raises:
        UsageError: there is no such tracker, or its library is not installed.
    """
    if name not in LIBRARIES:
        raise UsageError(f"--to {name}: expected one of {', '.join(LIBRARIES)}")
    if importlib.util.find_spec(name) is None:
        # Its imports take a while, and the command line imports this module for its help.
        from monograph.extras import install_command

        raise UsageError(f"--to {name} needs its library: {install_command([name])}")
    return LIBRARIES[name].open
