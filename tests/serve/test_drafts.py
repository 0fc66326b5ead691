"""Run: pytest tests/serve/test_drafts.py

Law 20 with a draft model: what the endpoint sends is what it sends without one, for any requests at the
same time. In float64 no two scores are so near that rounding could change a token.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adapted import trained
from batches import tiny_llama
from clocks import HANG_S
from laws.test_served_is_generated import CALM
from laws.test_served_is_generated import KINDS as OTHER_KINDS
from monograph.automata.on_host import has_llguidance
from monograph.decode import completion, draft
from monograph.decode.generator import OWN_HEAD, Generator
from monograph.errors import InputRefused, MonographError, UsageError
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters, pack_adapters, save_adapter
from monograph.model.hub import save_model
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION
from monograph.model.llama import Llama
from monograph.serve.owner import _Decoder
from monograph.serve.versions import AdapterRoom, ServedDraft, Source, Version
from monograph.text.tokenizer import Tokenizer
from served import CONTEXT, ROWS, Served, small

TOKENIZER = Tokenizer.bytes()
TREE = 'root ::= "[" root? "]" | "{}"'
KINDS: list[dict[str, Any]] = [*OTHER_KINDS, CALM | {"n": 2, "logprobs": 1}]
if has_llguidance():
    KINDS.append(CALM | {"grammar": TREE})


def nearly(model: Llama, noise: float) -> Llama:
    """A draft model that often samples what the model does; with much noise, hardly ever."""
    other = small(TOKENIZER).double()
    other.load_state_dict(model.state_dict())
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=draw))
    return other


def generator_of(served: Served) -> Generator:
    return next(iter(served.service.owner._decoders.values())).generator


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with Served(small(TOKENIZER).double(), TOKENIZER) as served:
        yield served


@pytest.fixture(autouse=True)
def _four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MAX_ROWS", {"cpu": ROWS, "cuda": ROWS})


def crowd() -> list[dict[str, Any]]:
    """Requests of all kinds, many of which begin with the same letters."""
    shared = "these letters are the beginning of several prompts, and longer than a chunk of a prompt is. "
    prompts = ["abc ", shared + "a", shared + "bcd", "x" * 70]
    return [
        {"prompt": prompts[seed % len(prompts)], "seed": seed} | KINDS[seed % len(KINDS)]
        for seed in range(2 * len(KINDS))
    ]


def choices(served: Served, body: dict[str, Any]) -> Any:
    answer = served.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.body["choices"]


def require_equal(found: Any, expected: Any) -> None:
    """Everything but the last digits of log-probabilities, which a pass may round otherwise."""
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = dict(mine), dict(theirs)
        mine_logs, their_logs = mine.pop("logprobs"), theirs.pop("logprobs")
        assert mine == theirs
        if their_logs is not None:
            assert mine_logs["tokens"] == their_logs["tokens"]
            values = their_logs["token_logprobs"]
            assert mine_logs["token_logprobs"] == pytest.approx(values, abs=1e-5)


# With the cost of four steps, drafts are switched off and tried again while the crowd is served.
@pytest.mark.parametrize("cost", [pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_a_crowd_gets_the_texts_of_a_server_without_drafts(
    plain: Served, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "cost_of_pass", lambda *_: cost)
    monkeypatch.setattr("monograph.decode.draft_budget.FORGIVEN_BY_STEP", 0.2)
    asked = crowd()
    expected = [choices(plain, body) for body in asked]
    with Served(plain.model, TOKENIZER, draft=nearly(plain.model, 0.05)) as served:
        generator = generator_of(served)
        assert generator.drafts == "while they pay"
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda body: choices(served, body), asked))
        for mine, theirs in zip(found, expected, strict=True):
            require_equal(mine, theirs)
        # Alone, too.
        require_equal(choices(served, asked[1]), expected[1])
        counts = served.service.owner.counts
        assert counts.reused_tokens > 0
        text = served.ask("GET", "/metrics").body
    assert counts.drafted_tokens > 1.5 * counts.drafted_passes > 0
    assert f"monograph_drafted_passes_total {counts.drafted_passes}" in text
    assert f"monograph_drafted_tokens_total {counts.drafted_tokens}" in text
    # Each token but those of steps came from a pass.
    assert (counts.drafted_tokens < counts.sampled_tokens) == (cost > 1)


def test_the_models_own_head_proposes_what_a_crowd_would_have_got_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("monograph.decode.draft_head.cost_of_pass", lambda *_: 1.0)
    model = small(TOKENIZER, mtp_num_hidden_layers=1).double()
    asked = crowd()
    with Served(model, TOKENIZER) as served:
        expected = [choices(served, body) for body in asked]
    with Served(model, TOKENIZER, draft=OWN_HEAD) as served, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda body: choices(served, body), asked))
        counts = served.service.owner.counts
    for mine, theirs in zip(found, expected, strict=True):
        require_equal(mine, theirs)
    # An untrained head hardly ever proposes what is sampled, but each text had passes.
    assert counts.drafted_tokens >= counts.drafted_passes > 100 and counts.reused_tokens > 0


def test_a_folder_is_served_with_its_own_head_if_it_has_one(tmp_path: Path) -> None:
    for name, layers in (("with", 1), ("without", 0)):
        save_model(small(TOKENIZER, mtp_num_hidden_layers=layers), tmp_path / name)
        TOKENIZER.save(tmp_path / name / "tokenizer.json")
    version = Source(str(tmp_path / "with"), ROWS, print, draft_name=OWN_HEAD).load()
    assert version.draft == OWN_HEAD and version.model.mtp is not None
    with pytest.raises(InputRefused, match=r"it has no mtp\.\* tensors, so no head for multi-tok"):
        Source(str(tmp_path / "without"), ROWS, print, draft_name=OWN_HEAD).load()


def test_events_bring_the_tokens_of_passes_in_order(
    plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "cost_of_pass", lambda *_: 1.0)
    body = {"prompt": "abc ", "seed": 3, "n": 2, "stop": "e", "logprobs": 1} | CALM
    with Served(plain.model, TOKENIZER, draft=plain.model) as served:
        events = list(served.events("/v1/completions", body))
        whole = choices(served, body)
    for choice in whole:
        deltas = [c for each in events for c in each["choices"] if c["index"] == choice["index"]]
        assert "".join(each["text"] for each in deltas) == choice["text"]
        assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    require_equal(whole, choices(plain, body))


@pytest.mark.skipif(not has_llguidance(), reason="llguidance is missing")
def test_a_text_that_the_host_follows_takes_one_token_of_a_pass(
    plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first one was proposed: only the host knows which tokens may come next."""

    def propose(self: draft.Drafter, *_: Any) -> torch.Tensor:
        return torch.full((ROWS, self.tokens), TOKENIZER.encode("{")[0])

    monkeypatch.setattr(draft.Drafter, "propose", propose)
    monkeypatch.setattr(draft, "cost_of_pass", lambda *_: 1.0)
    asked = [{"prompt": "a", "grammar": TREE, "seed": seed, "max_tokens": 9} for seed in range(6)]
    expected = [choices(plain, body) for body in asked]
    assert any("{}" in choice["text"] for [choice] in expected)
    with Served(plain.model, TOKENIZER, draft=plain.model) as served:
        assert [choices(served, body) for body in asked] == expected
        counts = served.service.owner.counts
    assert counts.drafted_tokens == counts.drafted_passes > 0


def test_drafts_that_hardly_ever_agree_are_switched_off(plain: Served) -> None:
    asked = [{"prompt": "abc ", "seed": seed, "max_tokens": 60} for seed in range(12)]
    expected = [choices(plain, body) for body in asked]
    with Served(plain.model, TOKENIZER, draft=nearly(plain.model, 3.0)) as served:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda body: choices(served, body), asked))
        counts = served.service.owner.counts
        assert "drafts" not in str(served.said)
    for mine, theirs in zip(found, expected, strict=True):
        require_equal(mine, theirs)
    assert 0 < counts.drafted_tokens < counts.sampled_tokens / 5


def test_adapters_write_with_a_draft_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, a trial cannot show how passes round, so drafts are always used or never."""
    lora = Lora(rank=4, alpha=6.0)
    adapted = small(TOKENIZER)
    install_adapters(adapted, lora, seed=0)
    trained(adapted, seed=0, spread=0.2)
    save_adapter(pack_adapters(adapted, lora, ""), tmp_path / "poet")
    asked = [
        {"model": ["poet", "last"][seed % 2], "prompt": "abc ", "seed": seed // 2} | CALM
        for seed in range(8)
    ]
    answers = []
    passes = []
    for cost, proposes in ((1.0, None), (1.0, small(TOKENIZER)), (9.0, small(TOKENIZER))):
        monkeypatch.setattr(draft, "cost_of_pass", lambda *_, cost=cost: cost)
        room = AdapterRoom({"poet": str(tmp_path / "poet")})
        proposed = None if proposes is None else proposes.double()
        with (
            Served(small(TOKENIZER).double(), TOKENIZER, adapters=room, draft=proposed) as served,
            ThreadPoolExecutor(8) as pool,
        ):
            answers.append(list(pool.map(lambda body: choices(served, body), asked)))  # noqa: B023
            passes.append(served.service.owner.counts.drafted_passes)
            drafts = generator_of(served).drafts
            assert drafts == ("never" if proposes is None or cost > 5 else "always")
    assert answers[1] == answers[0] and answers[2] == answers[0]
    assert answers[0][0] != answers[0][1]
    assert passes[0] == passes[2] == 0 < passes[1]


def test_a_text_whose_client_has_gone_leaves_its_row_to_another(
    plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "cost_of_pass", lambda *_: 1.0)
    body = {"prompt": "abc ", "seed": 1, "max_tokens": 40}
    content = json.dumps({"model": "last", "prompt": "ab", "n": ROWS, "max_tokens": 200}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Served(plain.model, TOKENIZER, draft=plain.model) as served:
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        generator = generator_of(served)
        while generator.running < ROWS:
            time.sleep(0.002)
        connection.close()
        require_equal(choices(served, body), choices(plain, body))
        assert served.idle()


def test_a_server_that_ends_does_not_wait_for_its_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = Version("x", (), small(TOKENIZER), TOKENIZER, Precision("fp32"))
    version.set_draft(ServedDraft("name", version.model, TOKENIZER, ""))
    decoder = _Decoder(version, ROWS)
    monkeypatch.setattr(Generator, "_pass_rounds_as_steps", lambda _: False)
    calls = []

    def end() -> None:
        calls.append(decoder.generator.blocks_read)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.warm_up(version, end)
    assert decoder.generator.drafts == "always" and calls == [1]


def test_a_draft_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    model = small(TOKENIZER)

    def refusal(model: Llama, proposes: Llama) -> str:
        version = Version("x", (), model, TOKENIZER, Precision("fp32"))
        version.set_draft(ServedDraft("name", proposes, TOKENIZER, ""))
        with pytest.raises(MonographError) as refused:
            _Decoder(version, ROWS)
        return str(refused.value)

    short = tiny_llama(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=40)
    assert refusal(model, short) == (
        "--draft: it has 40 positions, and a row of the model 256: expected a model with as many"
    )
    recurrent = tiny_llama(
        vocab_size=TOKENIZER.vocab_size,
        max_position_embeddings=CONTEXT,
        model_type="qwen3_5_text",
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    assert "the draft model has recurrent layers" in refusal(model, recurrent)
    headless = Version("x@3", (), model, TOKENIZER, Precision("fp32"))
    with pytest.raises(UsageError, match="^--draft mtp: x@3 has no head for multi-token predict"):
        headless.draft_by_own_head()
    missing = tmp_path / "missing"
    with pytest.raises(InputRefused, match=f"^--draft {missing}: "):
        ServedDraft.load(str(missing), print)
    other = Tokenizer.train_bpe(["ab ab ab"], 260)
    with pytest.raises(
        InputRefused, match="^--draft name: its tokens are not the model's: expected"
    ):
        Version("x", (), model, TOKENIZER, Precision("fp32")).set_draft(
            ServedDraft("name", model, other, "")
        )
