"""README.md and docs/*.md as the tests read them: their blocks, the commands in them, and what
these commands name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LOG = ROOT / "dev" / "log.md"  # what was tried: findings, not instructions
# What begins a line that somebody would type.
PROGRAMS = set(
    "monograph torchrun python python3 make pip lm_eval benchmarks/gpu.sh srun sbatch scontrol export curl wget git "
    "docker ollama uv conda cd bash sh sudo apt apt-get pytest tensorboard wandb trackio mlflow hf tune "
    "huggingface-cli litgpt accelerate trl unsloth mkdir cp mv llama-cli llama-server llama-quantize nvidia-smi".split()
)


@dataclass(frozen=True)
class Block:
    """Lines that a page sets apart: after a fence of a language, or indented (no language)."""

    page: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    inside = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^ {4}[^\n]*\n)+)", re.S | re.M)
    for found in inside.finditer(page.read_text() + "\n"):
        text = found[2] if found[3] is None else re.sub("^ {4}", "", found[3], flags=re.M)
        yield Block(page.stem, found[1] or "", text)


def typed(text: str) -> Iterator[str]:
    """The command lines of a block, without what is said of them after two spaces or a hash."""
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if line.partition(" ")[0] in PROGRAMS or line.startswith("head=$"):
            yield " ".join(re.split(r" {2,}+(?!-)| +# ", line)[0].split())


def commands(page: Path) -> list[str]:
    """Each command of a page once: of its blocks, and of its sentences, unless something is left
    out of it (...).

    A file that its output goes to is no part of it, as the program would be given that as an
    argument.
    """
    found = [
        command
        for block in blocks(page)
        if block.language != "python"
        for command in typed(block.text)
    ]
    prose = re.sub(r"^```.*?^```$|^ {4}[^\n]*$", "", page.read_text(), flags=re.S | re.M)
    said = (" ".join(each.split()) for each in re.findall(r"`([^`]+)`", prose))
    found += [
        each for each in said if re.match(r"(monograph|torchrun|python|make|pip|pytest) \S", each)
    ]
    found = [re.sub(r"^(monograph [^|]*) > \S+$", r"\1", each) for each in found]
    return [command for command in dict.fromkeys(found) if "..." not in command]


def files(folder: Path) -> None:
    """What the commands read, besides models: texts, records, questions, settings, modules, keys."""
    for name in ("my_texts", "other_texts"):
        (folder / name).mkdir()
        for part in range(8):
            (folder / name / f"{part}.txt").write_text(
                f"{name} {part}: the quick brown fox jumps.\n" * 40
            )
    records = {
        "chats": '{"prompt": "What does NUMBER do?", "completion": "It jumps."}',
        "prompts": '{"prompt": "NUMBER + 0 =", "answer": "NUMBER"}',
        "records": '{"level": NUMBER}',
        "pairs": '{"prompt": "NUMBER + 0 =", "chosen": "NUMBER", "rejected": "no"}',
        "pictures": '{"text": "1' + "0123456789" * 6 + '123NUMBER"}',
        "quiz": '{"query": "What does NUMBER do?", "choices": ["It jumps.", "It sleeps."], "gold": 0}',
    }
    for name, record in records.items():
        lines = (record.replace("NUMBER", str(number % 10)) for number in range(20))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "prompts.txt").write_text("the quick\nbrown\n")
    (folder / "keys.txt").write_text("a key of more than 16 characters\n")
    size = {
        "type": "object",
        "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    (folder / "cat.json").write_text(json.dumps(size | {"required": ["legs"]}))
    (folder / "run.toml").write_text("[train]\nupdates = 2\n")
    for page in PAGES:
        for block in blocks(page):
            if named := re.match(r"# (\w+\.py)\n", block.text):
                (folder / named[1]).write_text(block.text)
