"""Run: pytest tests/rl/test_prompts.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dialogues import said, speaking
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused, UsageError
from monograph.rl.environments import OwnEnvironments
from monograph.rl.prompts import Prompts, prompts_of, read_prompts
from monograph.rl.rewards import EnvironmentReward, Reward, reward_of
from monograph.text.tokenizer import Tokenizer


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def read(source: Path | str, reward: Reward | None = None, room: int = 30, **more: Any) -> Prompts:
    usual: dict[str, Any] = {
        "tokenizer": "bytes",
        "held_out": 0.0,
        "text_key": "text",
        "bad_records": "refuse",
    }
    return read_prompts(
        ReadingOptions(str(source), **{**usual, **more}), room=room, reward=reward or Reward()
    )


def test_a_text_is_continued_as_it_is_and_keeps_its_record(tmp_path: Path) -> None:
    prompts = read(write(tmp_path / "p.jsonl", {"prompt": "1+1=", "answer": 2}, {"prompt": "ä"}))
    [first, second] = prompts.train
    tokenizer = Tokenizer.bytes()
    assert (
        first.ids == (tokenizer.bos_id, *tokenizer.encode("1+1="))
        and first.record["answer"] == 2
        and first.text == "1+1="
    )
    assert second.where.endswith("p.jsonl:2") and prompts.longest == 5 and not prompts.has_chats


def test_messages_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    asked = said("What is it?")
    prompts = read(write(tmp_path / "p.jsonl", {"prompt": asked}), tokenizer=str(tmp_path), room=99)
    assert prompts.has_chats and tokenizer.decode(prompts.train[0].ids).endswith("?\nassistant\n")
    assert json.loads(prompts.train[0].text) == asked


def test_the_same_prompt_is_on_one_side_and_the_share_is_held_out(tmp_path: Path) -> None:
    source = write(
        tmp_path / "p.jsonl", *({"prompt": f"{number % 200}", "n": number} for number in range(400))
    )
    prompts = read(source, held_out=0.2)
    held, trained = {p.text for p in prompts.held_out}, {p.text for p in prompts.train}
    assert not held & trained and 20 <= len(held) <= 60
    assert (
        read(source, held_out=0.2).fingerprint
        == prompts.fingerprint
        != read(source, held_out=0.1).fingerprint
    )


def test_tables_and_other_keys_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"question": ["a", "b"], "answer": ["1", "2"]}), tmp_path / "p.parquet"
    )
    prompts = read(tmp_path / "p.parquet", text_key="question")
    assert [(p.text, p.record["answer"]) for p in prompts.train] == [("a", "1"), ("b", "2")]


def test_bad_records_are_refused_or_counted(tmp_path: Path) -> None:
    source = write(
        tmp_path / "p.jsonl", {"prompt": "x"}, {"text": "x"}, {"prompt": None}, {"prompt": []}, {"prompt": "y" * 30},
        {"prompt": [{"role": "user"}]}, {"prompt": "a\0"},
    )  # fmt: skip
    prompts = read(source, bad_records="skip")
    assert len(prompts.train) == 1 and sum(prompts.skipped.values()) == 6
    with pytest.raises(
        InputRefused,
        match=r"p.jsonl:2: has no key 'prompt'; its keys are 'text'; or set data.bad_rec",
    ):
        read(source)


def test_what_cannot_hold_prompts_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"prompt": "x"})
    with pytest.raises(UsageError, match="rl.reward needs a model's tokenizer"):
        read(source, tokenizer="bpe", vocab_size=300)
    with pytest.raises(UsageError, match="has a weight"):
        read(source, weights=[2])
    with pytest.raises(InputRefused, match="no record is left to train on"):
        read(source, held_out=1.0)
    (tmp_path / "p.txt").write_text("text")
    with pytest.raises(InputRefused, match="needs records with a prompt each"):
        read(tmp_path / "p.txt")


def test_records_without_what_the_reward_reads_are_bad_records(tmp_path: Path) -> None:
    source = write(
        tmp_path / "p.jsonl",
        {"prompt": "x", "answer": "1"},
        {"prompt": "y"},
        {"prompt": "z", "answer": []},
    )
    prompts = read(source, reward_of("exact"), bad_records="skip")
    assert [prompt.text for prompt in prompts.train] == ["x"] and prompts.skipped == {
        "no answer": 2
    }
    with pytest.raises(
        InputRefused, match=r"p.jsonl:2: rl.reward needs a text or a list of texts under 'answer'"
    ):
        read(source, reward_of("exact"))


def test_the_date_that_a_template_reads_is_the_same_on_every_day(tmp_path: Path) -> None:
    """Or a run that is resumed on the next day would learn from other prompts."""
    tokenizer = speaking(tmp_path, "llama-3")
    source = write(tmp_path / "p.jsonl", {"prompt": said("why")})
    asked = read(source, tokenizer=str(tmp_path), room=200)
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(asked.train[0].ids)
    assert asked.notes == (
        "the chat template reads the date; in all of these prompts it is 2024-07-26",
    )
    own = prompts_of([{"prompt": said("why")}], tokenizer, Reward(), room=200)
    assert own.train[0].ids == asked.train[0].ids
    assert tokenizer.config.template is not None and tokenizer.config.template.day is None, (
        "inference has the real date"
    )


class Opened:
    """Opens an episode with what the record says."""

    def reset(self, record: dict[str, Any]) -> Any:
        return record.pop("opening")

    def step(self, answer: str) -> tuple[str, float, bool]:
        raise NotImplementedError


def opened_by(environment: type) -> Reward:
    return EnvironmentReward(OwnEnvironments(environment), turns=2, discount=1.0)


def test_an_environment_gets_the_whole_record_and_keeps_it(tmp_path: Path) -> None:
    class Whole(Opened):
        def reset(self, record: dict[str, Any]) -> str:
            assert record["hint"] is None and record["documents"] == ["x"]
            return str(super().reset(record))

    record = {"opening": "a", "hint": None, "documents": ["x"]}
    source = write(tmp_path / "p.jsonl", record)
    prompts = read(source, opened_by(Whole), ignore_keys=("documents",))
    assert prompts.train[0].record == record
    assert prompts.train[0].chat_keys == {}
    keyed = read(write(source, {"opening": said("b"), "system": "Be brief."}), opened_by(Opened),
        tokenizer=speaking_folder(tmp_path), room=99)  # fmt: skip
    assert keyed.train[0].chat_keys == {"system": "Be brief."}


def speaking_folder(folder: Path) -> str:
    speaking(folder / "model", "chatml")
    return str(folder / "model")


def test_records_are_held_out_apart_although_all_have_the_same_opening(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", *({"opening": "a", "n": number} for number in range(400)))
    prompts = read(source, opened_by(Opened), held_out=0.2)
    assert 40 < len(prompts.held_out) < 120
    assert {prompt.text for prompt in prompts.held_out} == {"a"}


def test_what_an_environment_opens_wrongly_is_refused_with_the_place_once(tmp_path: Path) -> None:
    class WithTools(Opened):
        tools = ({"type": "function", "function": {"name": "add"}},)

    source = write(tmp_path / "p.jsonl", {"opening": "a"}, {"opening": None})
    with pytest.raises(InputRefused, match=rf"^{source}:2: Opened returned None from reset"):
        read(source, opened_by(Opened))
    with pytest.raises(InputRefused, match=rf"^{source}:1: rl.environment has tools, which need a"):
        read(source, opened_by(WithTools))
