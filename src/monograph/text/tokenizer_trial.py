"""Load a tokenizer for the first time in a separate process, with limits of memory and time, where
it can do no harm.

The tokenizers library aborts, panics or loops on some files, which Python cannot catch. If the allow-list of
`tokenizer_file` accepts a file, it is tried here, in case the list has missed a danger (`load_fault`). If the
list refuses it, it is tried here to find a text that the tokenizer would change, as an example for the
message (`find_changed_text`). This program imports nothing of the package.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys

MEMORY_BYTES = 4 << 30  # of address space, enough for the largest accepted vocabulary
CPU_LIMIT_S = 10  # of processor time; a vocabulary of 150,000 entries takes about one second
_PROBE = "The cat's  naïve 数据\r\n\n\t12345 🙂 don't "  # it has characters of many kinds
# Texts that some tokenizers change: they lose spaces, capitals, tabs, accents, forms of letters or
# line ends, or read the name of a byte as the byte.
_EASILY_CHANGED = (
    "a  b",
    "   a",
    "a ",
    "Ab",
    "a\tb",
    "e\u0301",
    "²",
    "a\nb",
    "🙂",
    "☃",
    "<0x0A>",
    "don 't",
)
# Digests of contents that were tried in this process and loaded without a fault.
_harmless: set[bytes] = set()


def load_fault(content: str) -> str | None:
    """Load a tokenizer in a separate process, encode with it, and return what went wrong, or None.

    Args:
        content: the content of a tokenizer.json.
    """
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    if digest in _harmless:
        return None
    completed = _try(content, CPU_LIMIT_S)
    if completed is None:
        return "it does not come to an end"
    if not completed.returncode:
        _harmless.add(digest)
        return None
    lines = completed.stderr.decode("utf-8", "replace").strip().splitlines()
    # After a panic, Rust prints notes on how to debug it.
    messages = [line for line in lines if not line.startswith("note: ")]
    if messages:
        return messages[-1][:200]
    return f"it ends its process (signal {-completed.returncode})"


def find_changed_text(content: str) -> tuple[str, str] | None:
    """Return (a text that a tokenizer changes, the text after encoding and decoding).

    The result is None if no such text was found in 3 s.

    Args:
        content: the content of a tokenizer.json.
    """
    completed = _try(content, CPU_LIMIT_S // 3)
    if completed is None or completed.returncode:
        return None
    answer = json.loads(completed.stdout)
    return (answer[0], answer[1]) if answer else None


def _try(content: str, seconds: int) -> subprocess.CompletedProcess[bytes] | None:
    """Run this program on a tokenizer.json; None: it did not end in time."""
    try:
        return subprocess.run(
            [sys.executable, "-P", __file__, str(seconds)],
            input=content.encode("utf-8", "surrogatepass"),
            capture_output=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            timeout=10 * seconds,
            start_new_session=True,  # so that Ctrl-C ends only the calling process
        )
    except subprocess.TimeoutExpired:
        return None


def main(seconds: int) -> None:
    """Load the tokenizer on standard input, and encode with it.

    The program prints [text, changed text], for a text that encoding and decoding change, or null.

    Args:
        seconds: the limit of processor time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import tokenizers

    engine = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    engine.decode(engine.encode(_PROBE * 20).ids)
    changed = None
    for text in _EASILY_CHANGED:
        decoded = engine.decode(engine.encode(text, add_special_tokens=False).ids)
        # A tokenizer may add or remove one space before a text.
        if decoded not in (text, f" {text}", text.removeprefix(" ")):
            changed = (text, decoded)
            break
    print(json.dumps(changed))


if __name__ == "__main__":
    main(int(sys.argv[1]))
