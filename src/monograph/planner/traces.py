"""Keep the traces of steps in the cache folder, since the same step is planned again and again: by plans and by runs.

A trace depends on the step, on torch and on this package's code, whose files are known by their sizes and times.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

import monograph
from monograph.errors import InputRefused, Unreadable
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Work, footprint
from monograph.storage.cache_dir import cache_root, digest
from monograph.storage.reading import contents, parse_json

MOST = 512  # traces that are kept, of about 200 bytes each; the ones added last


def traced_bytes(work: Work) -> Mapping[str, int]:
    """Return the peak of a step's update by origin, from the cache folder or by a trace."""
    path, key = cache_root()[0] / "traces.json", digest(repr((work, torch.__version__, _code())))
    kept = _read(path)
    if (found := kept.get(key)) is not None:
        return found
    found = dict(footprint(work).by_origin)
    kept = dict([*_read(path).items(), (key, found)][-MOST:])  # another process may have added some meanwhile
    with suppress(OSError):  # without it, the next plan traces again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{key[:16]}")
        partial.write_text(json.dumps(kept))
        partial.replace(path)
    return found


def _read(path: Path) -> dict[str, dict[str, int]]:
    """Return the traces in a file; none if it is missing, damaged or of another form."""
    with suppress(OSError, ValueError, RecursionError, InputRefused, Unreadable):
        kept = parse_json(contents(path) or b"")
        if isinstance(kept, dict) and all(map(_is_trace, kept.values())):
            return kept
    return {}


def _is_trace(value: object) -> bool:
    return isinstance(value, dict) and tuple(value) == ORIGINS and all(type(size) is int for size in value.values())


@cache
def _code() -> str:
    """Return a text that differs wherever a file of this package was changed."""
    folder = Path(monograph.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return repr([(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files])
