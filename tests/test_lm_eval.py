"""Run: pytest tests/test_lm_eval.py (with lm-evaluation-harness: pip install -e '.[dev,lm-eval]' -c
constraints.txt)

A run's log-likelihoods are those of lm_eval's own `hf` model on the exported folder, and all of it
works offline.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import tiny_llama
from dialogues import said, speaking
from monograph.evaluation.choices import choose, read_questions
from monograph.graph.precision import Precision
from monograph.laws.comparisons import error_within
from monograph.run.models import load, save
from monograph.text.tokenizer import Tokenizer
from served import Served

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[lm-eval]'"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what its libraries warn of is not ours to fix
]
QUIZ, PROSE = "monograph_test_quiz", "monograph_test_prose"
WORDS = "alpha beta gamma delta épsilon zeta".split()


def words(draws: random.Random, most: int) -> str:
    return " ".join(draws.choice(WORDS) for _ in range(draws.randint(1, most)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported model, a quiz, documents, some longer than the model's positions,
    and tasks of them.
    """
    folder, draws = tmp_path_factory.mktemp("lm_eval"), random.Random(0)
    tokenizer = Tokenizer.train_bpe([words(draws, 30) for _ in range(200)], 300)
    # Positions are fewer than a long document's tokens, and logits are far apart.
    model = tiny_llama(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=48, initializer_range=0.3
    )
    save(model, folder / "out", tokenizer)
    quiz = [
        {
            "query": words(draws, 12),
            "choices": [words(draws, 4) for _ in range(4)],
            "gold": draws.randrange(4),
        }
        for _ in range(30)
    ]
    prose = [{"text": words(draws, 60)} for _ in range(12)]
    (folder / "tasks").mkdir()
    for name, records, settings in (
        (
            QUIZ,
            quiz,
            {"output_type": "multiple_choice", "doc_to_text": "query", "doc_to_choice": "choices",
             "doc_to_target": "gold", "metric_list": [{"metric": m} for m in ("acc", "acc_norm", "acc_bytes")]},
        ),
        (
            PROSE,
            prose,
            {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
             "metric_list": [{"metric": "bits_per_byte"}]},
        ),
    ):  # fmt: skip
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        files = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (folder / "tasks" / f"{name}.yaml").write_text(
            json.dumps({"task": name, **files, **settings})
        )
    return folder


def instances(place: Path) -> tuple[list[Any], list[Any]]:
    """Requests as lm_eval makes them: (context, continuation), and (text,)."""
    from lm_eval.api.instance import Instance

    asked = [
        Instance("loglikelihood", {}, (each.query, f" {choice}"), 0)
        for each in read_questions([str(place / f"{QUIZ}.jsonl")])
        for choice in each.choices
    ]
    asked += [
        Instance("loglikelihood", {}, ("", "alpha"), 0),
        Instance("loglikelihood", {}, ("alpha \n", "beta"), 0),
    ]
    # Longer than the model's positions.
    asked += [Instance("loglikelihood", {}, ("alpha " * 60, "beta gamma"), 0)]
    texts = [
        json.loads(line)["text"] for line in (place / f"{PROSE}.jsonl").read_text().splitlines()
    ]
    return asked, [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]


def test_log_likelihoods_are_those_of_the_exported_folder(place: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from monograph.lm_eval.model import Monograph

    asked, texts = instances(place)
    ours = Monograph(str(place / "out"))
    theirs, without_bos = (
        HFLM(pretrained=str(place / "out"), dtype="float32", device="cpu", batch_size=8, **options)
        for options in ({}, {"add_bos_token": False})
    )
    exact = Monograph(str(place / "out"), batch_tokens=1)
    exact._model.double()

    def sums(scores: list[Any]) -> torch.Tensor:
        return torch.tensor(
            [each[0] if isinstance(each, tuple) else each for each in scores], dtype=torch.float32
        )

    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    assert error_within(sums(found), sums(expected), sums(exact.loglikelihood(asked)).double())
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    rolled = ours.loglikelihood_rolling(texts), without_bos.loglikelihood_rolling(texts)
    assert error_within(*map(sums, rolled), sums(exact.loglikelihood_rolling(texts)).double())
    # With its default `hf` predicts the token that begins a document as well, which no text has.
    with_bos = sums(theirs.loglikelihood_rolling(texts))
    assert bool((with_bos < sums(rolled[0]) - 0.1).all())


def test_both_models_give_the_same_results_offline_and_the_quiz_is_ours(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import monograph.lm_eval.model  # noqa: F401  # registers the model

    # Its standard errors of bits per byte, in this process.
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    tasks = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    found = {
        name: lm_eval.simple_evaluate(
            name,
            arguments,
            tasks=[QUIZ, PROSE],
            task_manager=tasks,
            bootstrap_iters=2,
            device="cpu",
        )["results"]
        for name, arguments in (
            ("monograph", {"run": str(place / "out")}),
            ("hf", {"pretrained": str(place / "out"), "dtype": "float32", "add_bos_token": False}),
        )
    }
    bits = [found[name][PROSE]["bits_per_byte,none"] for name in found]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
    model, tokenizer = load(place / "out")
    own = choose(model, tokenizer, read_questions([str(place / f"{QUIZ}.jsonl")]), Precision())[1]
    scores = found["monograph"][QUIZ]
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert scores[f"{name},none"] == pytest.approx(getattr(own, name), rel=1e-12)
        assert scores[f"{name}_stderr,none"] == pytest.approx(
            getattr(own, f"{name}_stderr"), rel=1e-12
        )


def test_texts_go_on_as_the_exported_folders_do(place: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from monograph.lm_eval.model import Monograph

    settings = [
        {"until": ["a"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        {"max_gen_toks": 5},
    ]
    asked = [
        Instance("generate_until", {}, (text, each), 0)
        for each in settings
        for text in ("alpha", "beta gamma", "zeta", "alpha " * 60)
    ]
    ours = Monograph(str(place / "out")).generate_until(asked)
    theirs = HFLM(
        pretrained=str(place / "out"), dtype="float32", device="cpu", batch_size=1
    ).generate_until(asked)
    # Bytes at the end that are not yet a character are shown by it and not always by ours.
    whole = [[text.rstrip("\ufffd") for text in texts] for texts in (ours, theirs)]
    assert whole[0] == whole[1] and all(whole[0])
    assert not any("a" in text for text in ours[:4])


def test_chats_are_scored_and_continued_as_the_exported_folders_are(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from monograph.lm_eval.model import Monograph

    tokenizer = speaking(tmp_path / "words", "chatml")
    model = tiny_llama(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=48, initializer_range=0.3
    )
    save(model, tmp_path / "out", tokenizer)
    ours = Monograph(str(tmp_path / "out"))
    # The template does not write the token that begins a document, which this model would put there
    # otherwise.
    theirs = HFLM(
        pretrained=str(tmp_path / "out"),
        dtype="float32",
        device="cpu",
        batch_size=1,
        add_bos_token=False,
    )
    draws = random.Random(0)
    chats = [said(words(draws, 12), words(draws, 4), words(draws, 4)) for _ in range(12)]
    texts = [ours.apply_chat_template(chat) for chat in chats]
    assert texts == [theirs.apply_chat_template(chat) for chat in chats]
    begun = said("alpha", "beta gam")
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    scored = [Instance("loglikelihood", {}, (text, "delta"), 0) for text in texts]
    found, expected = ours.loglikelihood(scored), theirs.loglikelihood(scored)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-4
    )
    asked = [
        Instance("generate_until", {}, (text, {"max_gen_toks": 8, "do_sample": False}), 0)
        for text in texts
    ]
    written = [
        [text.rstrip("\ufffd") for text in each.generate_until(asked)] for each in (ours, theirs)
    ]
    assert written[0] == written[1]


def test_what_a_task_may_not_ask_is_refused_by_name(place: Path) -> None:
    from lm_eval.api.instance import Instance

    from monograph.errors import InputRefused, UsageError
    from monograph.lm_eval.model import Monograph, read_generation_options

    model = Monograph(str(place / "out"), batch_size=4, max_batch_size=None, device="cpu")
    with pytest.raises(
        InputRefused, match="max_gen_toks = 256 leaves no room for a context in the model's 48"
    ):
        model.generate_until([Instance("generate_until", {}, ("alpha", {}), 0)])
    with pytest.raises(
        UsageError, match="generation argument 'num_beams' is not known to the model 'monograph'"
    ):
        read_generation_options({"num_beams": 4}, 0)
    with pytest.raises(
        UsageError, match="--model_args pretrained: the model 'monograph' takes run, precision and"
    ):
        Monograph(str(place / "out"), pretrained="x")
    sampling, most, stop = read_generation_options(
        {"temperature": 0.5, "until": "\n", "max_tokens": 3}, 7
    )
    assert (sampling.temperature, sampling.seed, most, stop) == (0.5, 7, 3, ["\n"])
    assert read_generation_options({"do_sample": False, "temperature": 0.5}, 0)[0].temperature == 0
    sampled = read_generation_options({"do_sample": True, "top_k": 5, "temperature": None}, 0)[0]
    assert (sampled.temperature, sampled.top_k) == (1, 5)


def test_a_sample_that_is_asked_for_again_is_another_one(place: Path) -> None:
    from lm_eval.api.instance import Instance

    from monograph.lm_eval.model import Monograph

    asked = [
        Instance("generate_until", {}, ("alpha", {"max_gen_toks": 20, "temperature": 1.0}), 0)
    ] * 3
    model = Monograph(str(place / "out"))
    texts = model.generate_until(asked)
    assert len(set(texts)) == 3 and model.generate_until(asked) == texts


def command(
    place: Path, module: str, model: str, arguments: str, *further: str
) -> subprocess.CompletedProcess[str]:
    """`lm_eval run` on the quiz, where the system can in a namespace without a network."""
    apart = ["unshare", "--map-root-user", "--net"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*apart, "true"], capture_output=True).returncode
    ):
        apart = []
    asked = [
        "run",
        "--model",
        model,
        "--model_args",
        arguments,
        "--tasks",
        QUIZ,
        "--include_path",
        "tasks",
    ]
    asked += ["--device", "cpu", "--output_path", f"results-{model}", *further]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(
        [*apart, sys.executable, "-m", module, *asked],
        capture_output=True,
        text=True,
        cwd=place,
        env=environment,
    )


def test_the_commands_work_without_a_network(place: Path) -> None:
    found = []
    for module, model, arguments in (
        ("lm_eval", "hf", "pretrained=out,dtype=float32"),
        ("monograph.lm_eval", "monograph", "run=out"),
    ):
        done = command(place, module, model, arguments)
        assert done.returncode == 0, done.stderr[-2000:]
        [results] = (place / f"results-{model}").rglob("results*.json")
        scores = json.loads(results.read_text())["results"][QUIZ]
        found.append({name: scores[f"{name},none"] for name in ("acc", "acc_norm", "acc_bytes")})
    assert found[0] == found[1]


def test_the_command_applies_a_chat_template(place: Path) -> None:
    tokenizer = speaking(place / "words", "chatml")
    save(
        tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=128),
        place / "chatty",
        tokenizer,
    )
    done = command(place, "monograph.lm_eval", "monograph", "run=chatty", "--apply_chat_template")
    assert done.returncode == 0, done.stderr[-2000:]
    results = [
        json.loads(path.read_text())
        for path in (place / "results-monograph").rglob("results*.json")
    ]
    assert any("<|im_start|>" in str(each["chat_template"]) for each in results)
    bare = command(place, "monograph.lm_eval", "monograph", "run=out", "--apply_chat_template")
    assert bare.returncode == 3 and bare.stderr.rstrip().splitlines()[-1].startswith(
        "error: the model has no chat"
    )


def test_the_command_says_in_one_line_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from monograph.lm_eval.__main__ import main
    from monograph.lm_eval.model import Monograph

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: Monograph("nothere"))
    assert main() == 3
    said = capsys.readouterr().err
    assert said.startswith("error: nothere: no such folder") and said.count("\n") == 1


def test_served_completions_are_scored_as_by_evaluate(place: Path) -> None:
    """Over HTTP: its model `local-completions`, with the exported tokenizer or that of the server."""
    pytest.importorskip(
        "tenacity", reason="its client is not installed: pip install 'lm_eval[api]'"
    )
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from monograph.lm_eval.model import Monograph

    ours = Monograph(str(place / "out"))
    model, tokenizer = load(place / "out")
    # Without the token to draw, which that client asks for, its texts have one position less.
    asked = [
        each
        for each in instances(place)[0]
        if each.args[0] and len(tokenizer.encode("".join(each.args))) < 46
    ]
    with Served(model, tokenizer) as served:
        shared = {
            "base_url": f"{served.url}/v1/completions",
            "model": "last",
            "max_length": 47,
            "num_concurrent": 2,
        }
        folder = LocalCompletionsAPI(tokenizer=str(place / "out"), add_bos_token=True, batch_size=4,
                                     tokenizer_backend="huggingface", **shared)  # fmt: skip
        found, expected = folder.loglikelihood(asked), ours.loglikelihood(asked)
        remote = LocalCompletionsAPI(**shared)
        assert (
            remote.tokenizer_backend == "remote"
            and remote.tokenizer.bos_token_id == tokenizer.bos_id
        )
        assert remote.tok_encode("alpha beta") == tokenizer.encode("alpha beta")
    assert len(found) > 60
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-6
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
