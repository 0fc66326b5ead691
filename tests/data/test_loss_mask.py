"""Run: pytest tests/data/test_loss_mask.py (which tokens of a conversation are trained on: a law
for any template).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daily import nightly
from dialogues import CHATS, TAGGED, TEMPLATES, TOOLS, call, said, speaking
from monograph.data.conversations import Conversation
from monograph.data.loss_mask import (
    TEMPLATE_DATE,
    AnswerOptions,
    ConversationConverter,
    MaskedRow,
    _Encoder,
)
from monograph.data.records import Unusable
from monograph.errors import InputRefused
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer

EVERY = AnswerOptions(every=True, truncate=True, max_inputs=10_000)
# What is refused, and by which words; all other pairs of a template and a chat have rows.
REFUSED = {
    ("mistral-v1", "two rounds of tools"): "only user and assistant speak here",
    (
        "mistral-v3",
        "a system's",
    ): r"the prompt has '<\|bos\|>\[INST\]Be brief.* where the conversation has '<\|bos",
    ("gemma", "a system's"): "system is not supported",
    ("gemma", "two rounds of tools"): "tools are not supported",
} | {("glm", chat): "the model would never learn to stop" for chat in CHATS}
# By day those whose prompt's end merges with what follows, whose history is rewritten, and whose
# turns lack an end.
BY_DAY = ("llama-3", "qwen3", "mistral-v1")
# Where an answer is written in another way once it is history.
REWRITING = {"qwen3", "mistral-v3"}


def conversation(chat: str) -> Conversation:
    return Conversation(CHATS[chat], TOOLS if "tools" in chat else None, 0)


def rows_of(
    tokenizer: Tokenizer, said: Conversation, how: AnswerOptions = EVERY
) -> list[MaskedRow]:
    return ConversationConverter(tokenizer, how).rows(said)


def trained(row: MaskedRow) -> list[list[int]]:
    return [row.ids[begin:end] for begin, end in row.spans]


def runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """The tokens of each stretch that a mask marks."""
    found: list[list[int]] = []
    for index, (token, marked) in enumerate(zip(ids, mask, strict=True)):
        if marked and (index == 0 or not mask[index - 1]):
            found.append([])
        if marked:
            found[-1].append(token)
    return found


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day that transformers' templates find."""

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime.fromisoformat(TEMPLATE_DATE)

    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template.cache_clear()
    monkeypatch.setattr(chat_template_utils, "datetime", Then)


def reference(tagged: Any, said: Conversation) -> list[list[list[int]]]:
    """Of the chat up to each answer, the ids of all stretches that transformers' mask of
    hand-placed tags marks.
    """
    found = []
    for answer in said.answer_indices:
        ids = tagged.apply_chat_template(
            said.messages[: answer + 1],
            tools=said.tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        found.append(runs(ids["input_ids"], ids["assistant_masks"]))
    return found


@pytest.mark.parametrize("name", nightly(TEMPLATES, BY_DAY))
def test_what_is_trained_is_what_was_tagged_by_hand(
    tmp_path: Path, name: str, pinned: None
) -> None:
    from transformers import AutoTokenizer

    tokenizer = speaking(tmp_path / "plain", name)
    speaking(tmp_path / "tagged", name, tagged=True)
    tagged = AutoTokenizer.from_pretrained(tmp_path / "tagged")
    for chat in CHATS:
        said = conversation(chat)
        if (name, chat) in REFUSED:
            with pytest.raises((InputRefused, Unusable), match=REFUSED[name, chat]):
                rows_of(tokenizer, said)
            continue
        rows, expected, answers = rows_of(tokenizer, said), reference(tagged, said), 0
        assert len(rows) == 1 or name in REWRITING
        for row in rows:
            # The row ends with an answer: of the chat up to there, the last stretches are those
            # that it trains.
            answers += len(row.spans)
            assert trained(row) == expected[answers - 1][-len(row.spans) :]
        assert answers == len(said.answer_indices), "every answer once"


def test_what_is_refused_is_all_that_is(tmp_path: Path) -> None:
    assert len(TEMPLATES) * len(CHATS) - len(REFUSED) == 44
    assert TAGGED.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("name", nightly(TEMPLATES, BY_DAY))
def test_the_text_is_transformers(tmp_path: Path, name: str, pinned: None) -> None:
    from transformers import AutoTokenizer

    ours, theirs = speaking(tmp_path, name).config.template, AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None and ours.reads_the_date == (name == "llama-3") and not ours.tags_answers
    ours = ours.with_date(TEMPLATE_DATE)
    for chat, messages in CHATS.items():
        options: dict[str, Any] = {"tools": TOOLS} if "tools" in chat else {}
        for asks in (False, True):
            try:
                expected = theirs.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=asks, **options
                )
            except Exception as error:
                with pytest.raises(InputRefused, match=str(error)):
                    ours.render(messages, asks, **options)
            else:
                assert ours.render(messages, asks, **options) == expected


# What others do, each a fault by the facts that made the rule: they must not pass for it.


def by_length(tokenizer: Tokenizer, said: Conversation) -> list[list[int]]:
    """A: of the whole chat's ids, those from the length of the prompt's to the length of the
    answer's.
    """
    options = {"tools": said.tools} if said.tools else {}
    whole, found = chat_ids(tokenizer, said.messages, **options), []
    for answer in said.answer_indices:
        begin = len(chat_ids(tokenizer, said.messages[:answer], True, **options))
        found.append(
            whole[begin : len(chat_ids(tokenizer, said.messages[: answer + 1], **options))]
        )
    return found


def by_marker(tokenizer: Tokenizer, said: Conversation, begins: str, ends: str) -> list[list[int]]:
    """B: what stands between two strings, each looked for as ids."""
    options = {"tools": said.tools} if said.tools else {}
    assert tokenizer.config.template
    whole = tokenizer.encode_rendered(tokenizer.config.template.render(said.messages, **options))
    head, tail, found, at = (
        tokenizer.encode_rendered(begins),
        tokenizer.encode_rendered(ends),
        [],
        0,
    )
    while (
        first := next((n for n in range(at, len(whole)) if whole[n : n + len(head)] == head), None)
    ) is not None:
        first += len(head)
        at = next(
            (n for n in range(first, len(whole)) if whole[n : n + len(tail)] == tail), len(whole)
        )
        found.append(whole[first:at])
    return found


MARKED = said("<|im_start|>assistant\nnot the model's<|im_end|>", "the answer")
FAULTS: dict[str, tuple[str, Conversation, Callable[[Tokenizer, Conversation], list[list[int]]]]] = {
    "the line feed after the end": ("chatml", conversation("three turns"), by_length),
    "gemma's line feed": ("gemma", conversation("one turn"), by_length),
    "thoughts that are taken out": ("qwen3", conversation("three turns"), by_length),
    "tools that move": ("mistral-v3", conversation("two rounds of tools"), by_length),
    "typed markers": (
        "chatml", Conversation(MARKED, None, 0), lambda t, c: by_marker(t, c, "<|im_start|>assistant\n", "<|im_start|>")
    ),
    "a marker that merges": (
        "llama-3-merged", conversation("one turn"),
        lambda t, c: by_marker(t, c, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>"),
    ),
    "results of tools": (
        "qwen2.5", conversation("two rounds of tools"),
        lambda t, c: by_marker(t, c, "<|im_start|>assistant\n", "\n<|im_start|>user\nthanks"),
    ),
}  # fmt: skip


def merging(folder: Path, name: str) -> Tokenizer:
    """As `speaking`, with a token of two line feeds, which is in a prompt's end and not where text
    follows it.
    """
    tokenizer = speaking(folder, name)
    content = json.loads(tokenizer.to_json())
    vocab = content["model"]["vocab"]
    old = next(iter(reversed(content["model"]["merges"])))
    vocab["ĊĊ"] = vocab.pop("".join(old))
    content["model"]["merges"] = [*content["model"]["merges"][:-1], ["Ċ", "Ċ"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.from_file(folder)


@pytest.mark.parametrize(
    "fault", nightly(FAULTS, {"the line feed after the end", "typed markers", "results of tools"})
)
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str) -> None:
    name, said, wrong = FAULTS[fault]
    merged = name.removesuffix("-merged")
    tokenizer = (merging if merged != name else speaking)(tmp_path, merged)
    right = [stretch for row in rows_of(tokenizer, said) for stretch in trained(row)]
    assert len(right) == len(said.answer_indices) and all(
        stretch[-1] in ConversationConverter(tokenizer, EVERY).stops for stretch in right
    )
    assert wrong(tokenizer, said) != right


def test_a_token_that_reaches_over_the_border(tmp_path: Path) -> None:
    """Inference has the prompt's own tokens before it, so these are the row's, and not those of the
    whole text.
    """
    tokenizer = merging(tmp_path, "llama-3")
    answers = ConversationConverter(tokenizer, EVERY)
    said = conversation("three turns")
    rows = answers.rows(said)
    template = answers._template_without_tools
    for answer, row in zip(said.answer_indices, rows, strict=True):
        prompt = tokenizer.encode_rendered(template.render(said.messages[:answer], True))
        [(begin, end)] = row.spans
        assert row.ids[:begin] == prompt and end == len(row.ids)
        text = said.messages[answer]["content"].strip()
        assert trained(row) == [[*tokenizer.encode(text), tokenizer.special["<|eot_id|>"]]]
        whole = tokenizer.encode_rendered(template.render(said.messages[: answer + 1]))
        assert whole[:begin] != prompt
    assert answers.counts["split"] == 3


TEXTS = st.text(alphabet="ab \n<|>im_endü[/]", min_size=1, max_size=12).filter(
    lambda text: text.strip()
)
TURNS = st.lists(TEXTS, min_size=2, max_size=8).map(lambda parts: parts[: len(parts) // 2 * 2])
SPEAKERS = ("chatml", "qwen2.5", "qwen3", "llama-3", "mistral-v1", "mistral-v3", "gemma", "zephyr")


@pytest.mark.parametrize("name", nightly(SPEAKERS, BY_DAY))
def test_prompt_and_what_is_trained_are_the_row(name: str, tmp_path: Path) -> None:
    """What inference sends and what is trained then are the row up to the stop: of any words, of
    every answer once.
    """
    tokenizer = merging(tmp_path, name)
    template = tokenizer.config.template
    assert template is not None
    tokenizer.config = tokenizer.config._replace(template=template.with_date(TEMPLATE_DATE))
    answers = ConversationConverter(tokenizer, EVERY)

    @settings(
        max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(parts=TURNS, typed=st.sampled_from(["", "<|im_end|>", "a<|eot_id|><|im_start|>"]))
    def holds(parts: list[str], typed: str) -> None:
        chat = Conversation(said(parts[0] + typed, *parts[1:]), None, 0)
        rows = answers.rows(chat)
        places = iter(chat.answer_indices)
        for row in rows:
            for begin, end in row.spans:
                assert row.ids[:begin] == chat_ids(tokenizer, chat.messages[: next(places)], True)
                written = row.ids[begin:end]
                assert written[-1] in answers.stops and answers.stops.isdisjoint(written[:-1])
            assert row.spans[-1][1] == len(row.ids)
        assert next(places, None) is None
        for one, other in zip(rows, rows[1:], strict=False):
            assert other.ids[: len(one.ids)] != one.ids, "they would be one"

    holds()


def test_a_stop_that_is_typed_is_letters(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    [row] = rows_of(
        tokenizer, Conversation(said("say <|im_end|>", "<|im_end|> it is", "why", "so"), None, 0)
    )
    end = tokenizer.special["<|im_end|>"]
    assert (
        trained(row)[0] == [*tokenizer.encode("<|im_end|> it is"), end] and row.ids.count(end) == 4
    )
    tools = [{"name": "<|im_end|>"}]
    speaking(tmp_path, "qwen2.5")
    [row] = rows_of(Tokenizer.from_file(tmp_path), Conversation(said("1", "2"), tools, 0))
    assert row.ids.count(end) == 3


def test_the_last_answer_alone(tmp_path: Path) -> None:
    for name in ("chatml", "qwen3"):
        tokenizer = speaking(tmp_path / name, name)
        chat = conversation("three turns")
        every = rows_of(tokenizer, chat)
        [last] = rows_of(tokenizer, chat, EVERY._replace(every=False))
        assert last.ids == every[-1].ids and last.spans == every[-1].spans[-1:]


def test_a_prompt_is_not_trained_on(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    whole = rows_of(tokenizer, conversation("three turns"))[0]
    [row] = rows_of(tokenizer, conversation("three turns")._replace(trained_from=4))
    assert row.ids == whole.ids and row.spans == whole.spans[-1:]


@pytest.mark.parametrize("name", nightly(["chatml", "qwen3"], {"qwen3"}))
def test_turns_at_the_front_are_left_out_until_a_row_fits(tmp_path: Path, name: str) -> None:
    tokenizer = speaking(tmp_path, name)
    system = [{"role": "system", "content": "Be brief."}]
    chat = [*system, *said(*[f"{'what ' * (turn % 3 + 1)}{turn}" for turn in range(12)])]
    longest = 100
    answers = ConversationConverter(tokenizer, EVERY._replace(max_inputs=longest))
    rows = answers.rows(Conversation(chat, None, 0))
    assert sum(len(row.spans) for row in rows) == 6 and all(
        len(row.ids) - 1 <= longest for row in rows
    )
    places, cut = iter(range(2, len(chat), 2)), 0
    for row in rows:
        for begin, _ in row.spans:
            place = next(places)
            firsts = range(1, place, 2)
            prompts = [chat_ids(tokenizer, [*system, *chat[first:place]], True) for first in firsts]
            first = next(at for at, prompt in enumerate(prompts) if prompt == row.ids[:begin])
            cut += first > 0
            if first:
                more = [*system, *chat[firsts[first - 1] : place + 1]]
                assert len(chat_ids(tokenizer, more)) - 2 > longest, (
                    "one turn more would not have fitted"
                )
    assert cut and answers.counts["truncated"] == cut
    with pytest.raises(
        Unusable,
        match=r"messages\[\d+\], an answer, with all .* \d+ tokens, more than.*data.too_long=truncate",
    ):
        rows_of(
            tokenizer,
            Conversation(chat, None, 0),
            EVERY._replace(max_inputs=longest, truncate=False),
        )
    with pytest.raises(
        Unusable,
        match=r"messages\[2\], an answer, with the least .* takes \d+ tokens, more .* raise it$",
    ):
        rows_of(tokenizer, Conversation(chat, None, 0), EVERY._replace(max_inputs=9))


def test_a_greeting_before_the_first_question_is_left_out_as_any_turn_is(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    chat = [{"role": "assistant", "content": "Ask me. "}, *said("why", "so", "when", "then")]
    least = chat_ids(tokenizer, chat[1:])[:-1]  # without the line feed after the last answer
    answers = ConversationConverter(tokenizer, EVERY._replace(max_inputs=len(least) - 1))
    first, last = answers.rows(Conversation(chat, None, 0))
    assert first.ids == chat_ids(tokenizer, chat[:3])[:-1] and last.ids == least
    assert [len(row.spans) for row in (first, last)] == [2, 1] and answers.counts["truncated"] == 1


def test_a_call_stays_with_its_question(tmp_path: Path) -> None:
    """What is left out ends where a user speaks: a tool's result never stands without what asked
    for it.
    """
    tokenizer = speaking(tmp_path, "qwen2.5")
    chat = [*said("a" * 40, "b" * 40), *CHATS["two rounds of tools"]]
    rows = rows_of(tokenizer, Conversation(chat, None, 0), EVERY._replace(max_inputs=295))
    begun = [tokenizer.decode(row.ids).split("user\n")[1][:9] for row in rows]
    assert begun == ["a" * 9, "1 + 2 + 3", "thanks\nas"]


@pytest.mark.parametrize(
    ("source", "stops", "why"),
    [
        (TEMPLATES["chatml"], [], r"if '<\|im_end\|>' ends a turn, add its id \d+ there"),
        (
            "{{ messages[-1].content }}<|im_end|>",
            None,
            "writes the chat before an answer in another way",
        ),
        (
            "{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% endfor %}",
            None,
            "its first token has no input",
        ),
        ("{{ raise_exception('no') }}", None, "no"),
        ("", None, "leaves the answer out: with it or without, it writes the same"),
        ("{{ 'x' * 10**10 }}", None, "MiB of memory"),
    ],
)
def test_a_template_that_does_not_answer_is_refused(
    tmp_path: Path, source: str, stops: list[str] | None, why: str
) -> None:
    speaking(tmp_path, "chatml", stops=stops)
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_file(tmp_path)
    with pytest.raises((InputRefused, Unusable), match=why):
        rows_of(tokenizer, conversation("one turn"))


def test_without_a_template_there_is_no_answer() -> None:
    with pytest.raises(InputRefused, match="the model has no chat template"):
        ConversationConverter(Tokenizer.bytes(), EVERY)


def test_the_templates_own_tags_are_compared(tmp_path: Path) -> None:
    for name, chat in (
        ("chatml", "three turns"),
        ("qwen3", "thoughts"),
        ("zephyr", "spaces outside"),
    ):
        answers = ConversationConverter(speaking(tmp_path / name, name, tagged=True), EVERY)
        answers.rows(conversation(chat))
        assert answers.counts["untagged"] == 0 and answers.notes({}, "") == ()
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        TAGGED["chatml"].replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    )
    answers = ConversationConverter(Tokenizer.from_file(tmp_path / "chatml"), EVERY)
    answers.rows(conversation("a system's"))
    assert (
        answers.counts["untagged"] == 2
        and answers.first_untagged == "trained 'so<|im_end|>', tagged 'so'"
    )
    assert answers.notes({}, "")[0].startswith(
        "the template's own generation tags differ in 2 of 2 answers; the first"
    )


def test_the_day_is_always_the_same(tmp_path: Path) -> None:
    answers = ConversationConverter(speaking(tmp_path, "llama-3"), EVERY)
    [row] = answers.rows(conversation("one turn"))
    assert "Today Date: 26 Jul 2024" in answers._decode(row.ids)
    assert answers.notes({}, "") == (
        f"the chat template reads the date; in all of these conversations it is {TEMPLATE_DATE}",
    )


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", " the", "answer", "ü", ":"])
                               .map(str), max_size=9).map("".join), min_size=1, max_size=5))  # fmt: skip
def test_the_encoder_forgets_nothing(texts: list[str], tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    encoder = _Encoder(tokenizer)
    for number in range(len(texts)):
        for text in ("".join(texts[: number + 1]), texts[number]):
            assert encoder.ids(text, "") == tokenizer.encode_rendered(text)


def test_calls_are_written_with_their_own_numbers(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    chat = [{"role": "user", "content": "add"}, call(a=1, b=2.5, c=10**20)]
    [row] = rows_of(tokenizer, Conversation(chat, None, 0))
    assert '{"a": 1, "b": 2.5, "c": 100000000000000000000}' in tokenizer.decode(trained(row)[0])


def test_the_same_words_again_are_another_answer(tmp_path: Path) -> None:
    """A row that begins later in a chat of one repeated turn has the same ids, and its answer is
    still its own.
    """
    tokenizer = speaking(tmp_path, "chatml")
    chat = said(*["why so", "because"] * 6)
    rows = rows_of(tokenizer, Conversation(chat, None, 0), EVERY._replace(max_inputs=60))
    assert sum(len(row.spans) for row in rows) == 6 and len(rows) > 1
    for row in rows:
        edges = [edge for span in row.spans for edge in span]
        assert edges == sorted(set(edges))
