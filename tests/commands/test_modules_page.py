"""Run: pytest -m slow tests/commands/test_modules_page.py (docs/modules.md: files and commands as
they stand there).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from commands.forked import CommandServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "modules.md").read_text()
FILES = {
    body.split("\n")[0].removeprefix("# "): body
    for body in re.findall(r"```python\n(.*?)```", PAGE, re.S)
}
COMMANDS = re.findall(r"^    monograph (.*)$", PAGE, re.M)


@pytest.mark.slow(reason="two models of transformers, by the command line")
@pytest.mark.parametrize("command", COMMANDS, ids=["t5", "vit"])
def test_a_module_of_the_page_learns(server: CommandServer, here: Path, command: str) -> None:
    for name, body in FILES.items():
        (here / name).write_text(body)
    made = subprocess.run(
        [sys.executable, "pictures.py"], cwd=here, capture_output=True, check=True
    )
    (here / "pictures.jsonl").write_bytes(made.stdout)
    words = shlex.split(command.replace("my_texts/", "texts"))
    words += [
        "train.updates=100",
        "train.compile=none",
        "train.tokens_per_update=2048",
        "optim.lr=3e-3",
    ]
    done = server.run(here, *words, "data.held_out=0", "--out", "run", "--json")
    assert done.code == 0, done.err
    rows = map(json.loads, (here / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    assert len(losses) == 100 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
