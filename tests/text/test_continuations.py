"""Run: pytest tests/text/test_continuations.py (a text that follows another is encoded as inside
it).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import pre_tokenizers

from daily import nightly
from monograph.data.conversations import Conversation
from monograph.data.loss_mask import AnswerOptions, ConversationConverter
from monograph.data.options import ReadingOptions
from monograph.evaluation.choices import encode_pair
from monograph.rl.pairs import PairRows, read_pairs
from monograph.text.tokenizer import Tokenizer
from probes import probes
from reference import pieces

WORDS = [
    "The cat sat on the mat; the dog ran.\n  naïve 数据 the end",
    "  def read(self):\n\treturn self.the_cat",
] * 20
OPENINGS = ["The cat", "x=", "1 + 1 =\n", "the ", "a<", "naïve 数据", "\n", "🙂"]
ANSWERS = ["the dog", " the dog", "  x", "\n\tend", "0", "_mat", *probes(60)]


def _metaspace(**options: Any) -> Engine:
    made = pieces.engine("always")
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=pieces.MARK, split=False, **options)
    return made


def _legacy() -> dict[str, Any]:
    """The form of a file of 2021: a Metaspace says only whether it puts a space first."""
    content = json.loads(_metaspace(prepend_scheme="always").to_str())
    content["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": pieces.MARK,
        "add_prefix_space": True,
    }
    return content


def _prefixed() -> dict[str, Any]:
    """Byte-level, with a space before a text, as RoBERTa's and BLOOM's relatives have it."""
    content = json.loads(Tokenizer.train_bpe(WORDS, 300).to_json())
    content["pre_tokenizer"]["add_prefix_space"] = True
    return content


KINDS = {
    "bytes": Tokenizer.bytes,
    "bpe": lambda: Tokenizer.train_bpe(WORDS, 300),
    "bpe, space first": lambda: Tokenizer(_prefixed(), "x"),
    "metaspace, never": lambda: Tokenizer(
        json.loads(_metaspace(prepend_scheme="never").to_str()), "x"
    ),
    "metaspace, legacy": lambda: Tokenizer(_legacy(), "x"),
} | {
    shape: functools.partial(
        lambda name: Tokenizer(json.loads(pieces.engine(name).to_str()), name), shape
    )
    for shape in pieces.SHAPES
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def written(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of a document's ids, without the tokens at its ends and without the space that some
    put before it.
    """
    text = b"".join(tokenizer.pieces[each] for each in ids).decode()
    return text.removeprefix(" ") if tokenizer.inserts_space else text


# The others are asked for choices, which are encoded alike.
DAY = {"bpe", "bpe, space first", "metaspace, never"}
CASES = [
    (prompt, answer) for prompt in OPENINGS for answer in ANSWERS if "▁" not in prompt + answer
]


@pytest.mark.parametrize("kind", nightly(KINDS, DAY))
def test_an_answer_of_a_pair_or_a_label_follows_its_prompt_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    text_of = {index: text for text, index in tokenizer.special.items()}
    config = {name: text_of[index] for name, index in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    usual: dict[str, Any] = {
        "tokenizer": str(tmp_path),
        "sequence_length": 256,
        "held_out": 0.0,
        "bad_records": "refuse",
    }
    both = [{"prompt": prompt, "chosen": answer, "rejected": "no"} for prompt, answer in CASES]
    labels = [{"prompt": prompt, "completion": answer, "label": True} for prompt, answer in CASES]
    for name, records, labelled in (("pairs.jsonl", both, False), ("labels.jsonl", labels, True)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = read_pairs(ReadingOptions(str(tmp_path / name), **usual), labelled=labelled).train
        assert isinstance(rows, PairRows)
        tokens, starts, edges = rows._side.tokens, rows._side.starts, rows._side.answers
        assert edges is not None and len(starts) - 1 == len(CASES) == len(edges) / 4
        for number, (prompt, answer) in enumerate(CASES):
            # Without the token that ends it.
            begin, end = edges[4 * number], edges[4 * number + 1] - 1
            assert b"".join(tokenizer.pieces[each] for each in tokens[begin:end]).decode() == answer
            assert written(tokenizer, tokens[starts[number] : end]) == prompt + answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_follows_its_question_as_it_is(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for prompt, answer in CASES:
        pair = encode_pair(tokenizer, prompt, answer)
        assert written(tokenizer, [*pair.context, *pair.ids]) == prompt + answer


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_prompt_begins_its_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    pair = encode_pair(tokenizer, "", "the dog")
    assert pair.ids == tokenizer.encode("the dog")


TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + ' ' + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("kind", nightly(KINDS, DAY))
def test_an_answer_of_a_chat_follows_its_prompt_as_it_is(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    text_of = {index: text for text, index in tokenizer.special.items()}
    config = {
        "bos_token": text_of[tokenizer.bos_id],
        "eos_token": text_of[tokenizer.eos_id],
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    answers = ConversationConverter(
        Tokenizer.from_file(tmp_path), AnswerOptions(every=True, truncate=True, max_inputs=10_000)
    )
    for answer in [answer for _, answer in CASES if answer.strip()][: len(ANSWERS)]:
        chat = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": answer}]
        [row] = answers.rows(Conversation(chat, None, 0))
        [(begin, end)] = row.spans
        said = b"".join(tokenizer.pieces[each] for each in row.ids[begin:end]).decode()
        assert said.removesuffix(" ") == answer
