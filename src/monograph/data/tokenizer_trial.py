"""Loads a tokenizer for the first time where it can do no harm: run as a program, under limits of memory and time.

The library aborts, panics or loops on some files, none of which Python can catch. What comes here has passed the
allow-list of `tokenizer_file`; this is for what nobody has thought of. It imports nothing of this package.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

MEMORY_BYTES = 4 << 30  # of address space, for any vocabulary that is let through
SECONDS = 10  # of computation; a vocabulary of 150,000 entries takes about one
_PROBE = "The cat's  naïve 数据\r\n\n\t12345 🙂 don't "


def fault(content: str) -> str | None:
    """What happens to a process that loads a tokenizer.json and encodes with it; None where all is well."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=content.encode("utf-8", "surrogatepass"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            timeout=10 * SECONDS,
            start_new_session=True,  # Ctrl-C is for the program that asks
        )
    except subprocess.TimeoutExpired:
        return "it does not come to an end"
    if not done.returncode:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    said = [line for line in lines if not line.startswith("note: ")]
    return said[-1][:200] if said else f"it ends its process (signal {-done.returncode})"


def main() -> None:
    """Load and encode, or end in whatever way."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import tokenizers

    engine = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    engine.decode(engine.encode(_PROBE * 20).ids)


if __name__ == "__main__":
    main()
