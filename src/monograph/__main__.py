"""`python -m monograph` is the command `monograph`."""

import os
import signal
from typing import Any, NoReturn


def _stop(*_: Any) -> NoReturn:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


# Starting takes seconds of imports, in which an interrupt would be a traceback; `cli` takes over when a command runs.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)

from monograph.cli import main  # noqa: E402 - after the lines above, which are for it

if __name__ == "__main__":
    main()
