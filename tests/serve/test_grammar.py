"""Run: pytest tests/serve/test_grammar.py

The field `grammar`, as llama.cpp's server has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from monograph.automata.on_host import has_llguidance
from monograph.text.tokenizer import Tokenizer
from served import Served, small

TREE = 'root ::= "[" root? "]" | "{}"'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = Tokenizer.train_bpe(["[[]] {} yes no [{}]" * 20], 300)
    with Served(small(tokenizer), tokenizer) as server:
        yield server


def texts(served: Served, **fields: object) -> list[str]:
    answer = served.post("/v1/completions", {"prompt": "a", "n": 3, "seed": 0, **fields})
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in answer.body["choices"]]


def test_a_grammar_without_recursion_decides_the_text(served: Served) -> None:
    found = texts(served, grammar='root ::= ("yes" | "no") [.!]')
    assert {text[:-1] for text in found} <= {"yes", "no"} and {text[-1] for text in found} <= {
        *".!"
    }


@pytest.mark.skipif(not has_llguidance(), reason="llguidance is missing")
def test_a_recursive_grammar_and_schema_decide_the_text(served: Served) -> None:
    for text in texts(served, grammar=TREE, max_tokens=100):
        json.loads(text)
        assert set(text) <= set("[]{}")
    schema = {"type": "array", "items": {"$ref": "#"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text in texts(served, response_format=form, max_tokens=100):
        assert (
            not text.replace("[", "").replace("]", "").replace(",", "")
            and json.loads(text) is not None
        )
    assert texts(served, grammar=TREE) == texts(served, grammar=TREE) and served.idle()


def test_what_is_no_grammar_is_refused_by_its_place(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(grammar: str) -> str:
        answer = served.post("/v1/completions", {"prompt": "a", "grammar": grammar})
        assert answer.status == 400 and answer.body["error"]["param"] == "grammar"
        message: str = answer.body["error"]["message"]
        return message

    assert refusal("root ::= (") == (
        "grammar: the grammar: line 1, column 11: expected ), not the end of the grammar"
    )
    monkeypatch.setattr("monograph.automata.on_host.find_spec", lambda name: None)
    assert "is recursive, and an automaton has no stack; llguidance follows more" in refusal(
        TREE + " "
    )
    assert "bytes; at most" in refusal("#" * 70_000)
