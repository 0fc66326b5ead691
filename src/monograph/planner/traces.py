"""Keep traces of steps in the cache folder, since plans and runs plan the same step many times.

A trace is the predicted memory of a step (`predict.footprint`), or of a streamed model's passes
(`predict.stage_footprint`). It depends on the step, on torch and on this package's code, whose
files are recognized by their sizes and times.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import monograph
from monograph.errors import InputRefused, Unreadable
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Work, footprint
from monograph.predict.stage_footprint import StageFootprint, stage_footprint
from monograph.storage.cache_dir import cache_root, key_digest
from monograph.storage.reading import contents, parse_json

MAX_TRACES = 512  # the newest ones are kept, of about 150 bytes each
# The bytes of each of ORIGINS, or of each part of a StageFootprint; then a seal.
Trace = list[Any]


def traced_bytes(work: Work) -> Mapping[str, int]:
    """Return the peak memory of a step's update in bytes by origin, from the cache folder or by a
    new trace, which is then kept there.
    """
    sizes = _kept_sizes(work, lambda: list(footprint(work).by_origin.values()))
    return dict(zip(ORIGINS, sizes, strict=True))


def traced_stage(work: Work, blocks_per_stage: int) -> StageFootprint:
    """Return the same of a streamed model's passes, which are those of stages."""
    subject = work, blocks_per_stage
    return StageFootprint(
        *_kept_sizes(subject, lambda: list(stage_footprint(work, blocks_per_stage)))
    )


def _kept_sizes(subject: object, trace_anew: Callable[[], list[int]]) -> Sequence[int]:
    """Return the bytes of a trace without its seal.

    Args:
        subject: what is traced; its text is a part of the key.
        trace_anew: returns the bytes if the cache folder does not have them.
    """
    path = cache_root()[0] / "traces.json"
    key = key_digest(repr((subject, torch.__version__, _code_state())))
    known_trace = _read_traces(path).get(key)
    if known_trace:
        return known_trace[:-1]
    sizes = trace_anew()
    trace = [*sizes, _seal(key, sizes)]
    # The file is read again, as another process may have added traces during this one.
    traces = {**_read_traces(path), key: trace}
    newest = dict(list(traces.items())[-MAX_TRACES:])
    # If the file cannot be written, the next plan traces again.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{key[:16]}")
        partial.write_text(json.dumps(newest))
        partial.replace(path)
    return sizes


def _seal(key: str, sizes: list[int]) -> str:
    """Return a checksum, which tells a damaged trace."""
    return key_digest(f"{key} {sizes}")[:16]


def _read_traces(path: Path) -> dict[str, Trace]:
    """Return the undamaged traces of a file by key; none if the file cannot be read."""
    with suppress(OSError, ValueError, RecursionError, InputRefused, Unreadable):
        traces = parse_json(contents(path) or b"")
        if isinstance(traces, dict):
            return {key: trace for key, trace in traces.items() if _is_sound(key, trace)}
    return {}


def _is_sound(key: str, trace: object) -> bool:
    if not isinstance(trace, list) or len(trace) - 1 not in (
        len(ORIGINS),
        len(StageFootprint._fields),
    ):
        return False
    *sizes, seal = trace
    return all(type(size) is int for size in sizes) and seal == _seal(key, sizes)


@cache
def _code_state() -> str:
    """Return a text that changes when any file of this package changes."""
    folder = Path(monograph.__file__).parent
    state = []
    for path in sorted(folder.rglob("*.py")):
        status = path.stat()
        state.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return repr(state)
