# Run: pytest tests/commands/test_generate_draft.py
"""The draft model of `generate` and `chat`: what it must have in common with the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batches import tiny_llama
from monograph.commands import generate
from monograph.commands.generate import GenerateOptions, open_model
from monograph.errors import InputRefused
from monograph.run.drafts import naming_draft
from monograph.run.folder import no_folder
from monograph.text.tokenizer import Tokenizer


def test_a_draft_with_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = {
        "model": Tokenizer.bytes(),
        "same": Tokenizer.bytes(),
        "own": Tokenizer.bytes(),
        "other": Tokenizer.train_bpe(["ab ab ab"], 260),
    }

    def load(name: str, warn: Callable[[str], None], mtp: bool = False) -> object:
        assert mtp == (name == "own")
        tokenizer = tokenizers[name]
        return tiny_llama(vocab_size=tokenizer.vocab_size), tokenizer

    monkeypatch.setattr(generate, "load_with_tokenizer", load)
    options = GenerateOptions({}, [], 1, 8, [], {}, chat=False, json=False)
    assert open_model("model", options).draft is None
    assert open_model("model", options._replace(draft="same")).draft is not None
    assert open_model("own", options._replace(draft="mtp")).draft == "mtp"
    with pytest.raises(
        InputRefused, match="^--draft other: its tokens are not the model's: expected"
    ):
        open_model("model", options._replace(draft="other"))


def test_a_draft_that_is_not_there_is_refused_with_what_may_be_given() -> None:
    said = "--draft mpt: no such folder; expected a run .*; mtp is the model's own head$"
    with (
        pytest.raises(InputRefused, match=f"^{said}"),
        naming_draft("mpt", "mtp is the model's own head"),
    ):
        raise InputRefused(no_folder("mpt"))
    # Where only a model may be given, nothing is added.
    with pytest.raises(InputRefused, match="or hf://OWNER/NAME$"), naming_draft("mpt"):
        raise InputRefused(no_folder("mpt"))
