"""Send runs to a tracker: TensorBoard, Weights & Biases, trackio or MLflow.

A tracker's library is imported when a run is opened in the tracker. An opener is a function that
opens a run in one tracker. It replaces what an earlier call wrote for the same run, so no number is
in the tracker twice. It uses no network unless the tracker's own settings ask for that.
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
TrackedPoint = tuple[int, dict[str, float]]  # (update, the numbers of its row by name)
SettingsByKey = Mapping[str, Any]  # a run's settings by key, such as "optim.lr"
_MLFLOW_BATCH = 1000  # MLflow accepts at most this many numbers in one call


class Tracker(NamedTuple):
    """A run that is open in a tracker.

    Attributes:
        write: adds points.
        close: finishes the run.
        view: a command or a URL with which a person looks at the run.
    """

    write: Callable[[list[TrackedPoint]], None]
    close: Callable[[], object]
    view: str


# Opens a run in a tracker. The arguments are:
#   name: the run's name;
#   key: a text by which the tracker's earlier entries of the same run are found. A run of the same
#       name in another folder has another key;
#   settings: the run's settings;
#   out: the folder for the tracker's files, or None for the tracker's default.
Opener = Callable[[str, str, SettingsByKey, Path | None], Tracker]


def _tensorboard(name: str, key: str, settings: SettingsByKey, out: Path | None) -> Tracker:
    """Open a run in TensorBoard: write event files to OUT/NAME, by default to tensorboard/NAME."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    out = out or Path("tensorboard")
    suffix = f".{key}"
    earlier_files = entries(out / name, "events.")
    foreign_files = [file for file in earlier_files if file.suffix != suffix]
    if foreign_files:
        raise InputRefused(
            f"{foreign_files[0]} is a file of another run: name another folder with --out"
        )
    # The last of them stays: a running TensorBoard that reads it would otherwise not find the new file.
    # The START event below makes TensorBoard discard the numbers of the old one.
    for file in earlier_files[:-1]:
        file.unlink()
    (out / name).mkdir(parents=True, exist_ok=True)
    began_s = time.time()
    # The file is written here and not by TensorBoard's own EventFileWriter, which writes in a thread. That
    # thread only prints its errors, and an error in the last rows is lost.
    process = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
    file_name = f"events.out.tfevents.{int(began_s):010d}.{process}{suffix}"
    writer = RecordWriter(open(out / name / file_name, "xb"))

    def add_event(update: int, **content: object) -> None:
        writer.write(Event(step=update, wall_time=time.time(), **content).SerializeToString())

    def write(points: list[TrackedPoint]) -> None:
        for update, numbers in points:
            values = [{"tag": tag, "simple_value": number} for tag, number in numbers.items()]
            add_event(update, summary={"value": values})
        writer.flush()

    # The first event of each file has the version of the format.
    writer.write(Event(wall_time=began_s, file_version="brain.Event:2").SerializeToString())
    add_event(0, session_log=SessionLog(status=SessionLog.START))
    # A hyperparameter cannot be a list.
    hyperparameters = {
        setting: str(value) if isinstance(value, list) else value
        for setting, value in settings.items()
    }
    add_event(0, summary=hparams_pb(hyperparameters, trial_id=key))
    return Tracker(write=write, close=writer.close, view=f"tensorboard --logdir {shell_words(out)}")


def _wandb(name: str, key: str, settings: SettingsByKey, out: Path | None) -> Tracker:
    """Open a run in wandb, offline unless WANDB_MODE says otherwise."""
    # wandb sends reports of its own errors, even offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    parent_folder = out or Path(os.environ.get("WANDB_DIR", "."))
    for folder in entries(parent_folder / "wandb", "offline-run-"):
        if folder.name.endswith(f"-{key}"):
            shutil.rmtree(folder)
    mode = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        dir=parent_folder,
        mode=mode,
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=key,
        name=name,
        config=dict(settings),
        reinit="create_new",  # other runs of this process stay open
        settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
    )
    if mode == "offline":  # in which the run has no URL
        view = f"wandb sync {shell_words(Path(run.dir).parent)}"
    else:
        view = str(run.url)

    def require_disk_space() -> None:
        # wandb drops rows on a full disk without an error, so try to write 1 MiB. A mode that
        # writes nothing to this machine has no folder.
        with suppress(FileNotFoundError), tempfile.TemporaryFile(dir=run.dir) as file:
            file.write(bytes(1 << 20))

    return _checked_tracker(run, require_disk_space, view)


def _trackio(name: str, key: str, settings: SettingsByKey, out: Path | None) -> Tracker:
    """Open a run in trackio, on this machine unless trackio's own variables name another place."""
    if out:
        # trackio reads the variable when it is imported.
        os.environ["TRACKIO_DIR"] = str(out.absolute())
    import trackio

    with suppress(ValueError):  # the project does not exist yet
        for earlier_run in trackio.Api().runs(PROJECT):
            if (earlier_run.config or {}).get("key") == key:
                earlier_run.delete()
    # `init` finishes the run that is open in the current context, but the runs of a sweep are open
    # at the same time. So each run gets a context of its own.
    run = Context().run(
        trackio.init,
        PROJECT,
        name,
        config={**settings, "key": key},
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    folder_setting = f"TRACKIO_DIR={shell_words(out.absolute())} " if out else ""

    def require_no_dropped_rows() -> None:
        # trackio warns of rows that it could not write, but raises no error.
        if any("logs" in failure for failure in getattr(run, "_warned_failures", ())):
            raise DiskFull("trackio dropped rows: make space on the disk, then follow again")

    view = f"{folder_setting}trackio show --project {PROJECT}"
    return _checked_tracker(run, require_no_dropped_rows, view)


class _OpenRun(Protocol):
    """A run that is open in wandb or trackio."""

    def log(self, metrics: dict[str, float], *, step: int) -> object: ...

    def finish(self) -> object: ...


def _checked_tracker(run: _OpenRun, check: Callable[[], None], view: str) -> Tracker:
    """Return a tracker that checks after each write whether the library lost rows.

    Args:
        run: the open run. Its library raises no error if it cannot write.
        check: raises an error if the library may have lost rows.
        view: see `Tracker`.
    """

    def write(points: list[TrackedPoint]) -> None:
        for update, numbers in points:
            run.log(numbers, step=update)
        check()

    def close() -> None:
        run.finish()
        check()

    return Tracker(write=write, close=close, view=view)


def _mlflow(name: str, key: str, settings: SettingsByKey, out: Path | None) -> Tracker:
    """Open a run in MLflow, in OUT/mlflow.db unless MLFLOW_TRACKING_URI names another place."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    # Otherwise MLflow logs each table of a new database, and logs errors that it also raises.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    folder = (out or Path()).absolute()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(uri)
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(project)
    if experiment:
        experiment_id = experiment.experiment_id
    else:
        experiment_id = client.create_experiment(project)
    for earlier_run in client.search_runs([experiment_id], f"tags.monograph = '{key}'"):
        client.delete_run(earlier_run.info.run_id)
    run = client.create_run(experiment_id, tags={"monograph": key}, run_name=name)
    run_id = run.info.run_id
    params = [Param(setting, str(value)) for setting, value in settings.items()]
    client.log_batch(run_id, params=params)

    def write(points: list[TrackedPoint]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [
            Metric(metric_name, number, now_ms, update)
            for update, numbers in points
            for metric_name, number in numbers.items()
        ]
        for begin in range(0, len(metrics), _MLFLOW_BATCH):
            client.log_batch(run_id, metrics=metrics[begin : begin + _MLFLOW_BATCH])

    def close() -> None:
        client.set_terminated(run_id)

    return Tracker(
        write=write, close=close, view=f"mlflow ui --backend-store-uri {shell_words(uri)}"
    )


class Library(NamedTuple):
    """The library of a tracker.

    Attributes:
        title: the tracker's name for people.
        open: opens a run in it.
    """

    title: str
    open: Opener


# By the name that is imported, and that a person types after --to.
LIBRARIES = {
    "tensorboard": Library(title="TensorBoard", open=_tensorboard),
    "wandb": Library(title="W&B", open=_wandb),
    "trackio": Library(title="trackio", open=_trackio),
    "mlflow": Library(title="MLflow", open=_mlflow),
}


def tracker_named(name: str) -> Opener:
    """Return the function that opens a run in the tracker of this name.

    Raises:
        UsageError: there is no tracker of this name, or its library is not installed.
    """
    if name not in LIBRARIES:
        raise UsageError(f"--to {name}: expected one of {', '.join(LIBRARIES)}")
    if importlib.util.find_spec(name) is None:
        # Imported only here, since it takes a while: the command line imports this module for its help.
        from monograph.extras import install_command

        raise UsageError(f"--to {name} needs its library: {install_command([name])}")
    return LIBRARIES[name].open
