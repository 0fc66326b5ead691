"""Run: pytest tests/serve/test_adapters.py (adapters by their names, and while they come and go)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from adapted import trained
from memory import memory_in_use
from monograph.decode import completion, generate
from monograph.decode.adapter_bank import AdapterBank, install
from monograph.decode.sampling import Sampling
from monograph.errors import UsageError
from monograph.evaluation.choices import score_tokens
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters, pack_adapters, save_adapter
from monograph.run.adapters import AdapterBase
from monograph.serve.service import Service
from monograph.serve.versions import AdapterRoom
from monograph.text.tokenizer import Tokenizer
from served import ROWS, Given, Served, small

KEY = "a key of sixteen letters"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
LORAS = [Lora(rank=4, alpha=6.0), Lora(rank=16, alpha=8.0), Lora(rank=1, alpha=30.0)]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24, "seed": 5, "logprobs": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of `small`'s model, and one of a rank that is too large."""
    place = tmp_path_factory.mktemp("adapters")
    for number, lora in enumerate([*LORAS, Lora(rank=17)]):
        model = small(Tokenizer.bytes())
        install_adapters(model, lora, seed=number)
        trained(model, seed=number, spread=0.2)
        save_adapter(pack_adapters(model, lora, ""), place / f"a{number}")
    return place


def serving(folders: Path, slots: int | None = None, keys: tuple[str, ...] = (KEY,)) -> Served:
    tokenizer = Tokenizer.bytes()
    given = {name: str(folders / name) for name in ("a0", "a1")}
    room = AdapterRoom(given, folders, slots)
    return Served(small(tokenizer), tokenizer, adapters=room, keys=keys)


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[Served]:
    with serving(folders) as served:
        yield served


@pytest.fixture(autouse=True)
def _four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MAX_ROWS", {"cpu": ROWS, "cuda": ROWS})


def ask(served: Served, name: str, prompt: Any = "abc ", **options: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": prompt, **OPTIONS, **options}
    answer = served.post("/v1/completions", body, **WITH_KEY)
    assert answer.status == 200, answer.body
    return answer.body


def change(served: Served, what: str, **fields: str) -> Any:
    return served.post(f"/v1/{what}_lora_adapter", fields, **WITH_KEY)


def written(folders: Path, name: str, prompt: str, **options: Any) -> tuple[str, list[float]]:
    """What `generate` writes with this adapter alone, in as many rows as the server has."""
    tokenizer = Tokenizer.bytes()
    model = small(tokenizer)
    names = {}
    if name.startswith("a"):
        adapter = AdapterBase(model, tokenizer).read(folders / name)
        install(model, {name: adapter})
        names = {"adapters": name}
    given = OPTIONS | options
    found = generate(
        model,
        tokenizer,
        [prompt] * ROWS,
        Sampling(given["temperature"], seed=given["seed"], logprobs=given["logprobs"]),
        max_tokens=given["max_tokens"],
        **names,
    )
    first = next(iter(found))
    assert first.logprobs is not None
    return first.text, [each.drawn for each in first.logprobs]


def own(body: dict[str, Any]) -> tuple[str, list[float]]:
    [choice] = body["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_a_text_is_that_of_generate_with_this_adapter_alone(served: Served, folders: Path) -> None:
    """Law 20, bits of text and log-probabilities, for rows of the base too, in a mixed crowd."""
    names = ["a0", "a1", "last"]
    prompts = ["abc ", "a longer prompt " * 9, "a longer prompt " * 9 + "b"]
    asked = [(name, prompt) for prompt in prompts for name in names]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: own(ask(served, *each)), asked))
    for (name, prompt), outcome in zip(asked, found, strict=True):
        assert outcome == written(folders, name, prompt), name
    assert len({text for text, _ in found}) > len(asked) / 2
    assert served.service.owner.counts.reused_tokens > 0


def test_names(served: Served) -> None:
    answer = served.ask("GET", "/v1/models", headers=WITH_KEY)
    entries = {entry["id"]: entry for entry in answer.body["data"]}
    assert list(entries) == ["given@0", "given", "last", "a0", "a1"]
    assert (entries["a1"]["root"], entries["a1"]["parent"]) == ("given@0+a1", "given@0")
    assert (entries["last"]["root"], entries["last"]["parent"]) == ("given@0", None)
    assert served.ask("GET", "/v1/models/a1", headers=WITH_KEY).body == entries["a1"]
    answers = {name: ask(served, name, max_tokens=1) for name in ("a0", "a1", "last", "given")}
    assert [each["model"] for each in answers.values()] == [
        "given@0+a0", "given@0+a1", "given@0", "given@0",
    ]  # fmt: skip
    assert len({each["system_fingerprint"] for each in answers.values()}) == 3
    unknown = served.post("/v1/completions", {"model": "a2", "prompt": "x"}, **WITH_KEY)
    assert unknown.status == 404
    error = unknown.body["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "expected given@0, given, last, a0, a1" in error["message"]


def test_scored_prompts_have_the_adapter_s_log_probabilities(served: Served, folders: Path) -> None:
    tokenizer = Tokenizer.bytes()
    ids = [tokenizer.bos_id, *tokenizer.encode("abcabc")]
    for number, name in enumerate(["a0", "a1"]):
        body = ask(served, name, ids, max_tokens=0, echo=True)
        model = small(tokenizer)
        install_adapters(model, LORAS[number], seed=number)
        trained(model, seed=number, spread=0.2)
        expected = score_tokens(model, ids, Precision("fp32"), 1)
        found = torch.tensor(own(body)[1][1:])
        assert torch.allclose(
            found, torch.tensor([each.log_probability for each in expected]), atol=1e-4
        )


def test_an_adapter_comes_and_goes(served: Served, folders: Path) -> None:
    added = change(served, "load", lora_name="new", lora_path="a2")
    assert (added.status, added.body["id"], added.body["root"]) == (200, "new", "given@0+new")
    assert own(ask(served, "new")) == written(folders, "a2", "abc ")
    assert own(ask(served, "a0")) == written(folders, "a0", "abc ")
    gone = change(served, "unload", lora_name="new")
    assert (gone.status, gone.body) == (200, {"id": "new", "object": "model", "deleted": True})
    body = {"model": "new", "prompt": "x"}
    answer = served.post("/v1/completions", body, **WITH_KEY)
    assert answer.status == 404
    assert answer.body["error"]["message"].startswith(
        "the adapter 'new' was removed: expected given@0"
    )
    assert change(served, "unload", lora_name="new").status == 404
    served.service._any_name = (
        True  # it allows names that mean nothing, and this one meant another model
    )
    assert served.post("/v1/completions", body, **WITH_KEY).status == 404
    assert ask(served, "gpt-4o", max_tokens=1)["model"] == "given@0"
    served.service._any_name = False


def test_a_full_room_is_no_fault_of_a_field(folders: Path) -> None:
    with serving(folders, slots=2) as served:
        full = change(served, "load", lora_name="new", lora_path="a2")
        assert (full.status, full.body["error"]["param"]) == (400, None)
        words = (
            "room for 2 adapters (--adapter-slots), and all of it is taken by a0, a1: remove one"
        )
        assert words in full.body["error"]["message"]


def test_what_is_refused(served: Served, folders: Path, tmp_path: Path) -> None:
    for fields, param, words in (
        ({"lora_name": "x", "lora_path": "a3"}, "lora_path", "a3: r = 17 is above 16"),
        ({"lora_name": "x", "lora_path": "nothere"}, "lora_path", "nothere: has no adapter"),
        ({"lora_name": "x", "lora_path": "../adapters"}, "lora_path", "the name of a folder in"),
        ({"lora_name": "x", "lora_path": ".."}, "lora_path", "the name of a folder in"),
        ({"lora_name": "x", "lora_path": str(folders / "a2")}, "lora_path", "the name of a folder"),
        ({"lora_name": "a0", "lora_path": "a2"}, "lora_name", "a model 'a0' already"),
        ({"lora_name": "last", "lora_path": "a2"}, "lora_name", "a model 'last' already"),
        ({"lora_name": "base", "lora_path": "a2"}, "lora_name", "base: this name means"),
        ({"lora_name": "a b", "lora_path": "a2"}, "lora_name", "a name such as poet-2"),
        ({"lora_name": "x"}, "lora_path", "lora_path is missing"),
    ):
        answer = change(served, "load", **fields)
        assert answer.status == 400, answer.body
        error = answer.body["error"]
        assert error["param"] == param and words in error["message"], error
        assert str(folders) in fields.get("lora_path", "") or str(folders) not in error["message"]
    without_key = {"lora_name": "x", "lora_path": "a2"}
    assert served.post("/v1/load_lora_adapter", without_key).status == 401


def test_a_server_without_keys_lets_no_adapter_come_or_go(folders: Path) -> None:
    with serving(folders, keys=()) as served:
        for what in ("load", "unload"):
            answer = served.post(f"/v1/{what}_lora_adapter", {"lora_name": "x", "lora_path": "a2"})
            assert answer.status == 403 and "--api-key-file" in answer.body["error"]["message"]


def test_requests_that_run_with_a_removed_adapter_are_finished_with_it(folders: Path) -> None:
    """There is one slot more than adapters at the start, so its place is needed at once."""
    with serving(folders, slots=3) as served:
        bank = served.service.newest.bank
        assert bank is not None
        expected = written(folders, "a0", "abc ", max_tokens=200)
        found: list[Any] = []
        begun = threading.Thread(
            target=lambda: found.append(own(ask(served, "a0", max_tokens=200)))
        )
        slot = bank.slots["a0"]
        begun.start()
        while not served.service._adapter_users[served.service.newest, slot]:
            pass
        assert change(served, "unload", lora_name="a0").status == 200
        assert change(served, "load", lora_name="more", lora_path="a2").status == 200
        while begun.is_alive():
            full = change(served, "load", lora_name="late", lora_path="a1")
            if full.status == 200:
                break
            assert "room for 3 adapters" in full.body["error"]["message"]
        begun.join()
        assert found == [expected]
        assert change(served, "unload", lora_name="late").status in (200, 404)
        assert own(ask(served, "more")) == written(folders, "a2", "abc ")


def test_a_newer_version_has_the_adapters_too(folders: Path) -> None:
    """As long as they fit it; those of a digest would not."""
    tokenizer = Tokenizer.bytes()
    with serving(folders) as served:
        assert change(served, "load", lora_name="new", lora_path="a2").status == 200
        served.source.give(small(tokenizer, seed=1), tokenizer)
        while served.service.newest.id != "given@1":
            pass
        assert list(served.service.served_models()) == [
            "given@1",
            "given",
            "last",
            "a0",
            "a1",
            "new",
        ]
        assert ask(served, "new")["model"] == "given@1+new"


@pytest.mark.parametrize("name", ["last", "given", "given@0", "poet"])
def test_an_adapter_may_not_have_a_name_of_the_model(folders: Path, name: str) -> None:
    tokenizer = Tokenizer.bytes()
    source = Given(small(tokenizer), tokenizer, ROWS, AdapterRoom({name: str(folders / "a0")}))

    async def begin() -> None:
        await Service(source, print, print, aliases=["poet"]).begin(lambda: None)

    with pytest.raises(UsageError, match=f"--adapter {name}: the model has this name"):
        asyncio.run(begin())


CLIENTS = 8


def requests_with_changes(served: Served, folders: Path, count: int, pool: Executor) -> int:
    """Requests of random adapters by eight clients, while another one removes and adds them; how
    many it added. The pool has a thread for each client.
    """
    names = ["a0", "a1", "a2", "last"]
    expected = {name: written(folders, name, "abc ") for name in names}
    ended = threading.Event()
    # All clients take numbers from one iterator. A future for each request would take 2 KB of each.
    numbers = iter(range(count))

    def change_adapters() -> int:
        draw = random.Random(0)
        added = 0
        while not ended.is_set():
            name = draw.choice(names[:3])
            change(served, "unload", lora_name=name)
            if change(served, "load", lora_name=name, lora_path=name).status == 200:
                added += 1
        return added

    def ask_in_turn() -> None:
        for number in numbers:
            name = names[number % len(names)]
            body = {"model": name, "prompt": "abc ", **OPTIONS}
            answer = served.post("/v1/completions", body, **WITH_KEY)
            if answer.status == 200:
                assert own(answer.body) == expected[name], name
            else:
                assert answer.status in (404, 429), answer.body
                assert name != "last" or answer.status == 429

    changing = pool.submit(change_adapters)
    clients = [pool.submit(ask_in_turn) for _ in range(CLIENTS)]
    wait(clients)
    ended.set()
    for client in clients:
        client.result()
    return changing.result()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("warm_up", "requests"), [(40, 24), (1000, 10_000)])
def test_memory_is_what_it_was_after_adapters_came_and_went(
    folders: Path, warm_up: int, requests: int
) -> None:
    """The warm-up is for what 18 threads keep for later. After 1,000 requests, 10,000 more add 1.0 MiB and no
    Python object, and each 1,000 add less than the 1,000 before.
    """
    with serving(folders, slots=4) as served, ThreadPoolExecutor(CLIENTS + 1) as pool:
        bank = served.service.newest.bank
        assert bank is not None
        requests_with_changes(served, folders, warm_up, pool)
        tensors = {tensor.data_ptr() for tensor in served.service.newest.model.buffers()}
        before = memory_in_use()
        added = requests_with_changes(served, folders, requests, pool)
        assert added > requests / 100
        served.said.clear()  # the server itself keeps no line of each adapter
        after = memory_in_use()
        # 300 bytes of each of 10,000 requests would be more, and so would one Python object of each.
        assert after.malloc_bytes - before.malloc_bytes < 2 * 2**20
        assert after.python_blocks - before.python_blocks < 2000
        assert {tensor.data_ptr() for tensor in served.service.newest.model.buffers()} == tensors
        while not served.idle():
            pass
        for name in [*bank.slots]:
            assert change(served, "unload", lora_name=name).status == 200
        assert not served.service._retired and not +served.service._adapter_users
        assert sorted(bank._free) == [1, 2, 3, 4]


def test_a_slot_that_is_freed_too_early_is_noticed(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that `test_requests_that_run...` is for: it frees a slot with its name."""
    retire = AdapterBank.retire

    def retire_and_free(self: AdapterBank, name: str) -> int:
        slot = retire(self, name)
        self._free.insert(0, slot)
        return slot

    monkeypatch.setattr(AdapterBank, "retire", retire_and_free)
    monkeypatch.setattr(AdapterBank, "free", lambda self, slot: None)
    with pytest.raises(AssertionError):
        test_requests_that_run_with_a_removed_adapter_are_finished_with_it(folders)
