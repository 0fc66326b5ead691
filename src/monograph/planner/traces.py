"""Keep traces of steps in the cache folder, because the same step is planned many times.

A trace is the predicted memory of a step (`predict.footprint`), or of a streamed model's passes and
updates (`predict.stage_footprint`). It depends on the step, on torch and on this package's code. A
change of the code is recognised by the digest of its files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from monograph.errors import InputRefused, Unreadable
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Work, footprint
from monograph.predict.stage_footprint import StageFootprint, stage_footprint
from monograph.storage.cache_dir import cache_root, key_digest
from monograph.storage.package_code import code_digest
from monograph.storage.reading import contents, parse_json

MAX_TRACES = 512  # the newest ones are kept, of about 150 bytes each
# A trace in the file: the bytes of each of ORIGINS, or each field of a StageFootprint; then a checksum.
Trace = list[Any]


def traced_bytes(work: Work) -> Mapping[str, int]:
    """Return the peak memory of a step's update in bytes by origin, from the cache folder or by a
    new trace, which is then kept there.
    """
    sizes = _kept_sizes(work, lambda: list(footprint(work).by_origin.values()))
    return dict(zip(ORIGINS, sizes, strict=True))


def traced_stage(work: Work, blocks_per_stage: int) -> StageFootprint:
    """Return the bytes that the passes and updates of a streamed model take, from the cache folder or
    by a new trace, which is then kept there.
    """
    subject = work, blocks_per_stage
    sizes = _kept_sizes(subject, lambda: list(stage_footprint(work, blocks_per_stage)))
    return StageFootprint(*sizes)


def _kept_sizes(subject: object, trace_anew: Callable[[], list[int]]) -> Sequence[int]:
    """Return the bytes of a trace, without its checksum.

    Args:
        subject: what is traced; its `repr` is a part of the key.
        trace_anew: traces and returns the bytes; it is called if the cache folder does not have them.
    """
    cache_folder, _ = cache_root()
    path = cache_folder / "traces.json"
    key = key_digest(repr((subject, torch.__version__, code_digest())))
    known_trace = _read_traces(path).get(key)
    if known_trace:
        return known_trace[:-1]
    sizes = trace_anew()
    trace = [*sizes, _checksum(key, sizes)]
    # The file is read again, because another process may have added traces in the meantime.
    traces = {**_read_traces(path), key: trace}
    newest = dict(list(traces.items())[-MAX_TRACES:])
    # If the file cannot be written, the next plan traces again.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{key[:16]}")
        partial.write_text(json.dumps(newest))
        partial.replace(path)
    return sizes


def _checksum(key: str, sizes: list[int]) -> str:
    """Return a checksum, by which a damaged trace is recognised."""
    return key_digest(f"{key} {sizes}")[:16]


def _read_traces(path: Path) -> dict[str, Trace]:
    """Return the undamaged traces of a file by key; none if the file cannot be read."""
    with suppress(OSError, ValueError, RecursionError, InputRefused, Unreadable):
        traces = parse_json(contents(path) or b"")
        if isinstance(traces, dict):
            return {key: trace for key, trace in traces.items() if _is_undamaged(key, trace)}
    return {}


def _is_undamaged(key: str, trace: object) -> bool:
    lengths = (len(ORIGINS), len(StageFootprint._fields))
    if not isinstance(trace, list) or len(trace) - 1 not in lengths:
        return False
    *sizes, checksum = trace
    return all(type(size) is int for size in sizes) and checksum == _checksum(key, sizes)
