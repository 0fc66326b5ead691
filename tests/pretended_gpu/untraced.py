"""Leave out of coverage what has no lines of the package, where tracing would double the time.

Python 3.11 traces all code or none: each instruction of a function takes three times as long, whoever
asks for its lines.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, in whose calls nothing is traced."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        if tracer is None:
            return function(*args, **kwargs)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return call
