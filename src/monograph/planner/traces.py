"""Keep the traces of steps in the cache folder, since the same step is planned again and again: by
plans and by runs.

A trace depends on the step, on torch and on this package's code, whose files are known by their
sizes and times.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import monograph
from monograph.errors import InputRefused, Unreadable
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Work, footprint
from monograph.storage.cache_dir import cache_root, digest
from monograph.storage.reading import contents, parse_json

MOST = 512  # traces that are kept, of about 150 bytes each; the ones added last


def traced_bytes(work: Work) -> Mapping[str, int]:
    """Return the peak of a step's update by origin, from the cache folder or by a trace."""
    path = cache_root()[0] / "traces.json"
    key = digest(repr((work, torch.__version__, _code())))
    if known := _read(path).get(key):
        return _sizes(known)
    sizes = list(footprint(work).by_origin.values())
    # Another process may have added some meanwhile.
    kept = {**_read(path), key: [*sizes, _seal(key, sizes)]}
    with suppress(OSError):  # without it, the next plan traces again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{key[:16]}")
        partial.write_text(json.dumps(dict([*kept.items()][-MOST:])))
        partial.replace(path)
    return _sizes(kept[key])


def _sizes(trace: list[Any]) -> dict[str, int]:
    return dict(zip(ORIGINS, trace, strict=False))


def _seal(key: str, sizes: list[int]) -> str:
    return digest(f"{key} {sizes}")[:16]


def _read(path: Path) -> dict[str, list[Any]]:
    """Return the traces in a file, each the bytes of ORIGINS and a seal, without damaged ones."""
    with suppress(OSError, ValueError, RecursionError, InputRefused, Unreadable):
        kept = parse_json(contents(path) or b"")
        if isinstance(kept, dict):
            return {key: trace for key, trace in kept.items() if _is_sound(key, trace)}
    return {}


def _is_sound(key: str, trace: object) -> bool:
    if not isinstance(trace, list) or len(trace) != len(ORIGINS) + 1:
        return False
    *sizes, seal = trace
    return all(type(size) is int for size in sizes) and seal == _seal(key, sizes)


@cache
def _code() -> str:
    """Return a text that differs wherever a file of this package was changed."""
    folder = Path(monograph.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return repr(
        [
            (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
        ]
    )
