"""Load a tokenizer for the first time where it can do no harm: in a process of its own, with limits
of memory and time.

The library aborts, panics or loops on some files, which Python cannot catch. Files that the
allow-list of `tokenizer_file` accepts are tried here against dangers that nobody thought of, and
files that it refuses to find an example of a text that they would lose. This program imports
nothing of the package.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys

MEMORY_BYTES = 4 << 30  # of address space, enough for any vocabulary that is accepted
SECONDS = 10  # of processor time; a vocabulary of 150,000 entries takes about one second
_PROBE = "The cat's  naïve 数据\r\n\n\t12345 🙂 don't "
# Texts that common tokenizers lose: spaces, capitals, tabs, accents, forms of letters, line ends,
# names of bytes.
_EASILY_LOST = (
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


# Digests of contents that this process has already tried without a fault.
_harmless: set[bytes] = set()


def fault(content: str) -> str | None:
    """Return the fault of a process that loads a tokenizer.json and encodes with it, or None."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    if digest in _harmless:
        return None
    if (done := _run(content, SECONDS)) is None:
        return "it does not come to an end"
    if not done.returncode:
        _harmless.add(digest)
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    messages = [line for line in lines if not line.startswith("note: ")]
    return messages[-1][:200] if messages else f"it ends its process (signal {-done.returncode})"


def loss(content: str) -> tuple[str, str] | None:
    """Return a text that a tokenizer.json would lose and the text that would come back; None if
    none shows in 3 s.
    """
    done = _run(content, SECONDS // 3)
    answer = json.loads(done.stdout) if done and not done.returncode else None
    return (answer[0], answer[1]) if answer else None


def _run(content: str, seconds: int) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(
            [sys.executable, "-P", __file__, str(seconds)],
            input=content.encode("utf-8", "surrogatepass"),
            capture_output=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            timeout=10 * seconds,
            start_new_session=True,  # Ctrl-C does not end it, only this process
        )
    except subprocess.TimeoutExpired:
        return None


def main(seconds: int) -> None:
    """Load the tokenizer on standard input, encode with it, and print [lost text, text that comes
    back] or null.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import tokenizers

    engine = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    engine.decode(engine.encode(_PROBE * 20).ids)
    texts = (
        (text, engine.decode(engine.encode(text, add_special_tokens=False).ids))
        for text in _EASILY_LOST
    )
    # One space before a text is no reason to refuse.
    lost = (
        pair for pair in texts if pair[1] not in (pair[0], f" {pair[0]}", pair[0].removeprefix(" "))
    )
    print(json.dumps(next(lost, None)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
