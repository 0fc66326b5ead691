"""Run: pytest tests/test_lm_eval_rules.py (what is asked of the model of lm-evaluation-harness,
which is not needed).

A stand-in has what the model uses of lm_eval, by the rules of its release 0.4.13: a context and its
continuation lose their first tokens until they fit, in log-likelihoods and in texts alike. What
transformers computes by these rules on the exported folder is what the model says.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from batches import tiny_llama
from dialogues import said, speaking
from monograph.errors import InputRefused, UsageError
from monograph.run.models import save
from monograph.text.tokenizer import Tokenizer

POSITIONS, MOST = 48, 12


class TemplateLM:
    """What `lm_eval.api.model.TemplateLM` does with requests."""

    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *args: None)

    def _encode_pair(self: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
        words = context.rstrip()
        whole, before = self.tok_encode(context + continuation), self.tok_encode(words)
        return before, whole[len(before) :]

    def loglikelihood(self: Any, requests: list[Any]) -> list[tuple[float, bool]]:
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs)


class Request(NamedTuple):
    """A request, as lm_eval makes them."""

    args: tuple[Any, ...]


@pytest.fixture
def monograph_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the model, on the stand-in."""
    parts = {
        "lm_eval": {}, "lm_eval.models": {}, "lm_eval.api": {}, "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda model: model},
        "lm_eval.utils": {"get_rolling_token_windows": None, "make_disjoint_window": None},
    }  # fmt: skip
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "monograph.lm_eval.model", raising=False)
    yield importlib.import_module("monograph.lm_eval.model").Monograph
    sys.modules.pop("monograph.lm_eval.model", None)


class Both(NamedTuple):
    """The model, and transformers' of the same folder."""

    ours: Any
    theirs: Any
    tokenizer: Any


@pytest.fixture
def both(monograph_of: Any, tmp_path: Path) -> Both:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = speaking(tmp_path / "words", "chatml")
    model = tiny_llama(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=POSITIONS, initializer_range=0.3
    )
    save(model, tmp_path / "out", tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    return Both(
        monograph_of(str(tmp_path / "out")), theirs, AutoTokenizer.from_pretrained(tmp_path / "out")
    )


def continued(both: Both, ids: list[int], most: int) -> str:
    """The greedy text after the last ids that leave room for it."""
    kept = torch.tensor([ids[-(POSITIONS - most) :]])
    found = both.theirs.generate(
        kept, attention_mask=torch.ones_like(kept), do_sample=False, max_new_tokens=most
    )
    return str(both.tokenizer.decode(found[0, kept.shape[1] :], skip_special_tokens=True))


def log_likelihood(both: Both, context: list[int], continuation: list[int]) -> float:
    """The sum over the continuation, after the last ids that fit."""
    ids = torch.tensor([[*context, *continuation][-(POSITIONS + 1) :]])
    with torch.no_grad():
        logs = both.theirs(ids[:, :-1]).logits.log_softmax(-1)
    picked = logs.gather(2, ids[:, 1:, None])[0, :, 0]
    return float(picked[-len(continuation) :].sum())


def texts(count: int) -> list[str]:
    draws = random.Random(0)
    return [
        " ".join(draws.choices("the answer is what user said".split(), k=draws.randint(1, 40)))
        for _ in range(count)
    ]


def test_a_context_loses_its_first_tokens_until_it_fits(both: Both) -> None:
    """Just as long as fits, one token less and more, and much more."""
    asked = texts(12)
    bos = both.tokenizer.bos_token_id
    words = " the answer" * 30
    letters = both.tokenizer.encode(words, add_special_tokens=False)
    for length in range(POSITIONS - MOST - 3, POSITIONS - MOST + 3):
        asked.append(both.tokenizer.decode(letters[:length]))
    found = both.ours.generate_until([Request((text, {"max_gen_toks": MOST})) for text in asked])
    plain = [[bos, *both.tokenizer.encode(text, add_special_tokens=False)] for text in asked]
    assert (
        sum(len(ids) > POSITIONS - MOST for ids in plain)
        > 5
        < sum(len(ids) < POSITIONS - MOST for ids in plain)
    )
    wanted = [continued(both, ids, MOST) for ids in plain]
    assert [text.rstrip("\ufffd") for text in found] == [text.rstrip("\ufffd") for text in wanted]
    pairs = [(text, " the answer is") for text in asked]
    ends = [both.tokenizer.encode(end, add_special_tokens=False) for _, end in pairs]
    scores = [score for score, _ in both.ours.loglikelihood([Request(pair) for pair in pairs])]
    expected = [log_likelihood(both, ids, end) for ids, end in zip(plain, ends, strict=True)]
    assert scores == pytest.approx(expected, rel=1e-4)


def test_a_chat_has_the_ids_of_transformers(both: Both) -> None:
    chats = [said(text, "so", "and?") for text in texts(6)]
    asked = [both.ours.apply_chat_template(chat) for chat in chats]
    wanted = [
        both.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    assert asked == wanted
    ids = [
        both.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    found = both.ours.generate_until([Request((text, {"max_gen_toks": MOST})) for text in asked])
    assert [text.rstrip("\ufffd") for text in found] == [
        continued(both, each, MOST).rstrip("\ufffd") for each in ids
    ]
    scores = [
        score for score, _ in both.ours.loglikelihood([Request((text, "said")) for text in asked])
    ]
    # The line feed goes to the continuation.
    ends = both.tokenizer.encode("\nsaid", add_special_tokens=False)
    firsts = [both.tokenizer.encode(text.rstrip(), add_special_tokens=False) for text in asked]
    assert scores == pytest.approx(
        [log_likelihood(both, first, ends) for first in firsts], rel=1e-4
    )


def test_an_answer_that_has_begun_goes_on(both: Both) -> None:
    chat = said("the user", " The answer is")
    wanted = both.tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert both.ours.apply_chat_template(chat, add_generation_prompt=False) == wanted
    assert wanted.endswith("assistant\n The answer is")


def test_the_template_is_named_and_chosen_by_its_name(monograph_of: Any, tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path / "words", "chatml")
    source = (tmp_path / "words" / "chat_template.jinja").read_text()
    (tmp_path / "words" / "additional_chat_templates").mkdir()
    (tmp_path / "words" / "additional_chat_templates" / "short.jinja").write_text(
        "{{ messages[-1].content }}"
    )
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=POSITIONS)
    save(model, tmp_path / "out", Tokenizer.from_file(tmp_path / "words"))
    ours = monograph_of(str(tmp_path / "out"))
    assert ours.chat_template(False) is None and ours.chat_template(True) == source
    assert ours.tokenizer_name == ours.tokenizer_name and "/" not in ours.tokenizer_name
    assert (
        ours.chat_template("short") == "{{ messages[-1].content }}"
        and ours.apply_chat_template(said("q")) == "q"
    )
    with pytest.raises(
        UsageError, match="--apply_chat_template long: the model has the templates default, short"
    ):
        ours.chat_template("long")
    save(model, tmp_path / "bare", Tokenizer.train_bpe(["the answer"], 300))
    with pytest.raises(InputRefused, match="the model has no chat template"):
        monograph_of(str(tmp_path / "bare")).chat_template(True)


def test_what_leaves_no_room_for_a_context_is_refused(both: Both) -> None:
    with pytest.raises(
        InputRefused, match=f"max_gen_toks = {POSITIONS} leaves no room for a context"
    ):
        both.ours.generate_until([Request(("the", {"max_gen_toks": POSITIONS}))])
    [text] = both.ours.generate_until([Request(("the answer", {"max_gen_toks": POSITIONS - 1}))])
    assert isinstance(text, str), "one token of the context is left"
