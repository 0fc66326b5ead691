"""Run: pytest tests/data/test_completions.py (prompts with completions, trained on without a chat
template).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dialogues import speaking
from monograph.data.completions import completed_row
from monograph.data.corpus import Corpus, corpus, render_row
from monograph.errors import InputRefused, UsageError
from monograph.text.tokenizer import Tokenizer

RECORDS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(40)]


def written(folder: Path, records: list[Any]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def opened(folder: Path, records: list[Any], **options: Any) -> Corpus:
    options = {
        "tokenizer": "bytes",
        "sequence_length": 64,
        "held_out": 0.0,
        "cache": folder,
    } | options
    return corpus(written(folder, records), **options)


def test_the_completion_and_the_end_are_trained_on(tmp_path: Path) -> None:
    text = opened(tmp_path, RECORDS, packing="padded")
    assert text.stats.conversations == 40
    assert text.stats.tokens == sum(len(record["completion"]) + 1 for record in RECORDS)
    assert "[<|bos|>0 + 1 =] 1<|eos|>" in render_row(text, 0, colour=False)


def test_a_prompt_has_the_tokens_that_it_has_when_the_model_is_asked() -> None:
    """Even where the tokenizer would join its end with the completion's beginning."""
    tokenizer = Tokenizer.train_bpe(["in the beginning"] * 50, 300)
    row = completed_row(tokenizer, "in the begi", "nning")
    [(begin, end)] = row.spans
    assert row.ids[:begin] == [tokenizer.bos_id, *tokenizer.encode("in the begi")]
    assert end == len(row.ids) and row.ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(row.ids[begin : end - 1]) == "nning"
    assert row.ids[1:-1] != tokenizer.encode("in the beginning")


def test_a_new_tokenizer_is_trained_on_the_texts_and_not_on_their_json(tmp_path: Path) -> None:
    records = [{"prompt": "alpha", "completion": "beta"}] * 50
    text = opened(tmp_path, records, tokenizer="bpe", vocab_size=300)
    learned = {piece.decode("utf-8", "replace") for piece in text.tokenizer.pieces}
    assert {"alpha", "beta"} <= learned and not any(
        "role" in piece or "content" in piece for piece in learned
    )


def test_a_template_renders_the_same_records_as_chats(tmp_path: Path) -> None:
    chats = opened(
        tmp_path,
        [{"prompt": "why", "completion": "so"}] * 3,
        tokenizer=speaking(tmp_path / "w", "chatml"),
    )
    assert "<|im_start|>" in render_row(chats, 0, colour=False)


def test_equal_texts_are_held_out_with_a_template_or_without(tmp_path: Path) -> None:
    records = [{"prompt": f"why {number}", "completion": "so"} for number in range(40)]
    plain = opened(tmp_path, records, held_out=0.2)
    chats = opened(
        tmp_path,
        records,
        held_out=0.2,
        tokenizer=speaking(tmp_path / "w", "chatml"),
        sequence_length=96,
    )
    assert 0 < plain.held_out.conversations == chats.held_out.conversations


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, "is no text under"),
        (
            {"prompt": "q", "completion": "a", "system": "be brief"},
            "'system' needs a chat template",
        ),
        (
            {"prompt": "q", "completion": "a" * 70},
            "prompt and completion take 72 tokens, more than",
        ),
    ],
)
def test_a_record_that_is_no_such_text_is_bad(
    tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    # After those that are sampled.
    with pytest.raises(InputRefused, match=re.escape(f"records.jsonl:121: {said}")):
        opened(tmp_path, RECORDS * 3 + [record])
    kept = opened(tmp_path, RECORDS * 3 + [record], bad_records="skip")
    assert kept.stats.conversations == 120 and kept.skipped


def test_chats_still_need_a_template(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    ] * 3
    with pytest.raises(InputRefused, match="the model has no chat template"):
        opened(tmp_path, chats)
    with pytest.raises(UsageError, match="records with a 'prompt' and a 'completion' that are"):
        opened(tmp_path, chats, tokenizer="bpe")
