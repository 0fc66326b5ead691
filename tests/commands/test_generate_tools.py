# Run: pytest tests/commands/test_generate_tools.py
"""`generate --tools`: no call is malformed, whatever the weights are, and each is in the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batches import tiny_llama
from calling import speaking
from monograph.commands.generate import GenerateOptions, run
from monograph.errors import InputRefused, UsageError
from monograph.run.models import save
from monograph.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "up": {"type": "boolean"},
    },
    "required": ["a", "up"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(params=["tags", "keys"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = speaking(folder / "tokenizer", request.param)
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    save(model, folder / "model", tokenizer)
    (folder / "tools.json").write_text(json.dumps(TOOLS))
    return folder


def options(folder: Path, **others: Any) -> GenerateOptions:
    flags = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    base = GenerateOptions(
        flags, [], n=4, max_tokens=200, stop=[], constraints={}, chat=True, json=True,
        tools=folder / "tools.json",
    )  # fmt: skip
    return base._replace(**others)


def answers(
    folder: Path, capsys: pytest.CaptureFixture[str], choice: str
) -> list[list[dict[str, Any]]]:
    run(
        str(folder / "model"), ["What is 1 + 2?"], file=None, options=options(folder, tool_choice=choice)
    )  # fmt: skip
    completions = json.loads(capsys.readouterr().out)["completions"]
    return [each["tool_calls"] for each in completions if each["finish_reason"] == "stop"]


def test_a_required_call_follows_the_schema_of_the_named_tool(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answers(folder, capsys, "add")
    assert found
    for [call] in found:
        assert call["name"] == "add"
        assert set(call["arguments"]) == {"a", "up"}
        assert call["arguments"]["a"] in range(100) and isinstance(call["arguments"]["up"], bool)


@pytest.mark.parametrize(
    ("content", "others", "error", "message"),
    [
        ("[", {}, InputRefused, "not JSON"),
        ("[]", {}, InputRefused, "expected a JSON array of tools"),
        ('[{"name": "add"}]', {}, InputRefused, r"\[0\]: expected"),
        ('[{"type": "function", "function": {"name": "a b"}}]', {}, InputRefused, "function.name = 'a b'"),
        (None, {"tool_choice": "ad"}, UsageError, "--tool-choice ad: there is no such tool"),
        (None, {"chat": False}, UsageError, "give --chat, too"),
        (None, {"tools": None, "tool_choice": "add"}, UsageError, "give --tools, too"),
        (None, {"constraints": {"regex": "a"}}, UsageError, "one of them at a time"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_in_a_line(
    folder: Path,
    tmp_path: Path,
    content: str | None,
    others: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    given = options(folder)
    if content is not None:
        (tmp_path / "tools.json").write_text(content)
        given = given._replace(tools=tmp_path / "tools.json")
    with pytest.raises(error, match=message):
        run(str(folder / "model"), ["x"], file=None, options=given._replace(**others))


def test_a_template_that_writes_no_calls_is_refused_by_its_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.bytes()
    model = tiny_llama(vocab_size=tokenizer.vocab_size)
    save(model, tmp_path / "model", tokenizer)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    with pytest.raises(InputRefused, match="chat template"):
        run(str(tmp_path / "model"), ["x"], file=None, options=options(tmp_path))
