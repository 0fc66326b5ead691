"""Run: pytest tests/serve/test_schemathesis.py -m slow (with schemathesis: pip install
schemathesis==4.32.5)

Thousands of requests that the document of the endpoint allows and forbids: no 5xx, no hang, answers
as documented.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from calling import speaking
from clocks import HANG_S
from monograph.text.tokenizer import Tokenizer
from served import Served, small

pytestmark = pytest.mark.slow


DIALOGUES = "^/v1/(chat|responses|messages)"  # the addresses that read a chat template


@pytest.fixture(autouse=True)
def _schemathesis() -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")


def require_documented_answers(served: Served, folder: Path, *more: str) -> None:
    """Send requests of all kinds to a server, and require that its document describes the answers."""
    # A document does not know the vocabulary; and a POST that is no JSON is refused before its
    # method is looked at.
    without = "positive_data_acceptance,unsupported_method"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
            *("--max-examples", "25", "--phases", "examples,coverage,fuzzing", "--exclude-checks", without),
            *("--request-timeout", "300"),  # its own 10 s are too few where the machine is busy
            *("--continue-on-failure", "--generation-deterministic", "--seed", "1", "--no-color", *more),
        ],
        cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert served.idle()


def test_what_the_document_allows_is_answered_and_all_else_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        require_documented_answers(served, tmp_path)
        assert served.service.request_counts.by_status[200] > 100


@pytest.mark.parametrize("template", ["tags", "thoughts"])
def test_dialogues_with_tools_and_thoughts_are_answered_as_documented(
    template: str, tmp_path: Path
) -> None:
    """A model without a template refuses tools, so most of the fields about them are not reached."""
    tokenizer = speaking(tmp_path, template)
    with Served(small(tokenizer), tokenizer) as served:
        require_documented_answers(served, tmp_path, "--include-path-regex", DIALOGUES)
        assert served.service.request_counts.by_status[200] > 100
