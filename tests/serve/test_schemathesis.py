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

from clocks import HANG_S
from monograph.text.tokenizer import Tokenizer
from served import Served, small

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
def test_what_the_document_allows_is_answered_and_all_else_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.bytes()
    # A document does not know the vocabulary; and a POST that is no JSON is refused before its
    # method is looked at.
    without = "positive_data_acceptance,unsupported_method"
    with Served(small(tokenizer), tokenizer) as served:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
                *("--max-examples", "25", "--phases", "examples,coverage,fuzzing", "--exclude-checks", without),
                *("--request-timeout", "300"),  # its own 10 s are too few where the machine is busy
                *("--continue-on-failure", "--generation-deterministic", "--seed", "1", "--no-color"),
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert served.service.request_counts.by_status[200] > 100 and served.idle()
