"""Run: pytest tests/test_story.py

Data, sweep, train, kill, stream, two ranks, resume, follow, compare, generate, serve, export, and
a model that proposes its own tokens; at night also weights rounded in training, a sweep of
adapters, finetune, reinforce on two ranks, prefer, and sweep over what is rewarded and preferred.
"""

from __future__ import annotations

import json
import math
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from clocks import HANG_S
from commands.forked import Command, CommandServer
from commands.inputs import TINY, over, with_texts
from commands.test_new_tokens import with_tokens
from dialogues import TEMPLATES, said, write_chats
from distributed.launched import started
from llama_cpp import LlamaCpp
from monograph import Sampling, checkpointing, generate, load
from monograph.run.folder import Run
from monograph.text.tokenizer import Tokenizer

SETTINGS = over(
    TINY,
    "data.tokenizer=bpe",
    "data.vocab_size=300",
    "train.updates=60",
    "train.save_every=5",
    "optim.lr=1e-2",
)
SETTINGS += [
    "model.family=gemma3_text",
    "model.preset=nano",
    "optim.name=muon",
    "optim.schedule=wsd",
    "optim.ema=0.9",
]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
}
SCHEMA |= {"required": ["size"]}


@pytest.mark.parametrize(
    "taught", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pretrained", "taught"]
)
def test_the_story(taught: bool, server: CommandServer, tmp_path: Path) -> None:
    monograph = server
    with_texts(tmp_path)
    # data
    built = monograph.run(tmp_path, "data", "build", *SETTINGS)
    assert built.code == 0 and "fingerprint" in built.out
    assert "rows of 32" in monograph.run(tmp_path, "data", "show", *SETTINGS).out

    # sweep: the rate of the run below, with an error bar
    short = over(SETTINGS, "train.updates=12", "train.save_every=6")
    swept = monograph.run(tmp_path, "sweep", *[s for s in short if "lr=" not in s], "optim.lr=1e-3,1e-2",
                          "train.seed=0,1", "--out", "swept", "--json", figures=0)  # fmt: skip
    best = scored_together(monograph, tmp_path, json.loads(swept.out.splitlines()[-1]))
    assert best["knobs"] == {"optim.lr": 1e-2} and best["standard_error"] > 0
    assert (
        monograph.run(
            tmp_path,
            "train",
            "--from",
            "swept/best",
            "train.updates=5",
            "--out",
            "branch",
            figures=0,
        ).code
        == 0
    )

    # train, killed
    killed(
        monograph.start(tmp_path, "train", *SETTINGS, figures=0),
        tmp_path,
        "runs/*/checkpoints/step-0000001*",
    )
    [run] = (tmp_path / "runs").iterdir()

    # stream: it goes on with its weights on the host, and is killed again
    killed(
        monograph.start(tmp_path, "train", "--resume", "train.memory=stream", figures=0),
        run,
        "checkpoints/step-0000003*",
    )

    # two ranks: it goes on by two processes, which are killed too
    by_two(monograph, tmp_path, run)

    # resume
    done = monograph.run(tmp_path, "train", "--resume", "--json", figures=1)
    assert done.code == 0 and "resume" in done.err, done.err
    trained = json.loads(done.out.splitlines()[-1])
    assert trained["update"] == 60 and trained["run"] == str(run.relative_to(tmp_path))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "train_loss" in row] == list(range(1, 61))
    assert trained["eval_bits_per_byte"] < 4, "it learned something"
    assert (
        "<svg" in (run / "report.html").read_text()
        and (run / "figures" / "sheet.png").stat().st_size > 1000
    )

    # follow the run in a tracker, and compare it with where the sweep's best member stopped
    compared = followed(monograph, tmp_path).run(
        tmp_path, "compare", "swept/best", str(run), "--json"
    )
    [found] = json.loads(compared.out.splitlines()[-1])["differences"]
    assert found["paired_by"] == "document" and found["difference"] < 0, (
        "five times as many updates"
    )

    # evaluate
    scores = json.loads(monograph.run(tmp_path, "evaluate", "last", "--json").out.splitlines()[-1])
    assert scores["bits_per_byte"] == pytest.approx(trained["eval_bits_per_byte"], rel=1e-6)
    assert scores["weights"] == trained["eval_weights"] == "averaged"

    # generate, alone and with drafts
    typed = ("generate", "last", "alpha ", "--seed", "1", "--max-tokens", "8", "--json")
    alone, drafted = (
        json.loads(monograph.run(tmp_path, *typed, *draft).out)
        for draft in ((), ("--draft", "last"))
    )
    first = alone["completions"]
    assert drafted["completions"] == first and len(first[0]["token_ids"]) <= 8
    assert drafted["drafted_tokens"] > drafted["drafted_passes"] > alone["drafted_passes"] == 0
    assert (
        served(monograph, tmp_path) == first[0]["text"]
        and monograph.run(tmp_path, "check", "last").code == 0
    )
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    typed = (
        "generate",
        "last",
        "alpha ",
        "beta ",
        "-n",
        "3",
        "--top-p",
        "0.9",
        "--stop",
        "qq",
        "--json",
    )
    typed = (*typed, "--json-schema", "schema.json", "--sampler", "repetition_penalty=1.2")
    for each in json.loads(monograph.run(tmp_path, *typed).out)["completions"]:
        assert 0 <= json.loads(each["text"])["size"] <= 99 and each["finish_reason"] == "stop"

    # export
    assert monograph.run(tmp_path, "export", "last", "--to", "out").code == 0
    gguf = monograph.run(tmp_path, "export", "last", "--to", "gguf", "--format", "gguf")
    assert gguf.code == 0 and list((tmp_path / "gguf").glob("*.gguf")), gguf.err

    # a model that predicts the token after the next one, and proposes it when it writes
    ahead(monograph, tmp_path)

    if taught:
        # train for a file of 4 bits
        rounded(monograph, tmp_path)

        # adapters on what was exported
        adapted(monograph, tmp_path)

        # finetune what was exported: chat tokens that it never saw, killed once
        finetune(monograph, tmp_path)

        # reinforce what was exported, by a reward that it gets now and then, by two processes until
        # they are killed, answered by llama.cpp; then prefer another word by pairs
        prefer(monograph, tmp_path, reinforced=reinforce(monograph, tmp_path))

        # talk to an environment for several turns
        play(monograph, tmp_path)

    model, tokenizer = load(run)
    exported, _ = load(tmp_path / "out")
    assert all(
        torch.equal(exported.state_dict()[name], tensor)
        for name, tensor in model.state_dict().items()
    )
    newest = checkpointing.load_newest(run / "checkpoints", print)
    assert all(
        torch.equal(newest.optimizer[f"ema.{name}"], exported.get_parameter(name))
        for name in newest.model
    )
    assert not torch.equal(newest.model["model.norm.weight"], exported.model.norm.weight)
    [text] = generate(exported, tokenizer, ["alpha "], Sampling(seed=1), max_tokens=8)
    assert text.token_ids == first[0]["token_ids"]
    same_in_transformers(tmp_path / "out", model, tokenizer.encode("alpha beta gamma delta"))


def followed(monograph: CommandServer, here: Path) -> CommandServer:
    """Give TensorBoard what the log of the newest run has."""
    assert monograph.run(here, "follow", "last", "--to", "tensorboard").code == 0
    assert list((here / "tensorboard").rglob("events.out.*"))
    return monograph


def served(monograph: CommandServer, here: Path) -> str:
    """What OpenAI's protocol says for the prompt, options and seed that `generate` had; then it is
    asked to end.
    """
    command = monograph.start(here, "serve", "last", "--port", "0", "--rows", "2")
    try:
        command.until(lambda: "ready " in command.out)
        [url] = re.findall(r"ready +(http://127.0.0.1:\d+)", command.out)
        asked = {
            "model": "last",
            "prompt": "alpha ",
            "seed": 1,
            "max_tokens": 8,
            "temperature": 0.8,
        }
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        # Anthropic's protocol says the same. The model has no chat template, so it goes on with the message.
        message = {"role": "user", "content": asked.pop("prompt")}
        request = urllib.request.Request(
            f"{url}/v1/messages", json.dumps(asked | {"messages": [message]}).encode()
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            assert json.load(answer)["content"] == [{"type": "text", "text": text}]
    finally:
        command.signal(signal.SIGTERM)
    done = command.wait()
    assert done.code == 0 and "2 requests answered, 16 tokens written" in done.out, done
    return text


def by_two(monograph: CommandServer, here: Path, run: Path) -> None:
    """Go on with the newest run by two processes until it has a checkpoint more."""
    first, second = started(monograph, here, 2, "train", "--resume", "last", "train.parallel=ddp")
    killed(first, run, "checkpoints/step-0000004*")
    second.signal(signal.SIGKILL)
    second.wait()


def ahead(monograph: CommandServer, here: Path) -> None:
    """Train a model with a head for the token after the next one, and let the head propose tokens."""
    typed = over(TINY, "model.mtp_num_hidden_layers=1", "train.updates=30", "optim.lr=1e-2")
    done = monograph.run(here, "train", *typed, "--out", "ahead", figures=0)
    assert done.code == 0, done.err
    losses = [row["mtp_loss"] for row in Run(here / "ahead").rows() if "mtp_loss" in row]
    assert losses[-1] < losses[0] - 1
    typed = ["generate", "ahead", "alpha ", "--seed", "1", "--max-tokens", "12", "--json"]
    alone, drafted = (
        json.loads(monograph.run(here, *typed, *draft).out) for draft in ((), ("--draft", "mtp"))
    )
    assert drafted["completions"] == alone["completions"]
    assert drafted["drafted_tokens"] > 0


def rounded(monograph: CommandServer, here: Path) -> None:
    """Train a model with weights of 4 bits, and let llama.cpp write with their file."""
    widths = ("model.hidden_size=32", "model.intermediate_size=32")
    typed = over(TINY, "data.tokenizer=bpe", "data.vocab_size=300", "train.quantize=int4", *widths)
    done = monograph.run(here, "train", *typed, "--out", "rounded", figures=0)
    assert done.code == 0, done.err
    done = monograph.run(here, "export", "rounded", "--to", "rounded.gguf", "--format", "gguf")
    assert done.code == 0, done.err
    model, tokenizer = load(here / "rounded")
    ids = [tokenizer.bos_id, *tokenizer.encode("alpha ")]
    [ours] = generate(model, tokenizer, [ids], Sampling(temperature=0), max_tokens=6)
    theirs = LlamaCpp(next((here / "rounded.gguf").glob("*.gguf"))).greedy(ids, 6)["tokens"]
    assert theirs == ours.token_ids[: len(theirs)]


def adapted(monograph: CommandServer, here: Path) -> None:
    """Sweep adapters of two ranks on one copy of the folder `out`, stop those that cannot win, score
    the others together, and write with the best.
    """
    typed = [
        "texts/", "model.init=out", "lora.rank=2,4", "lora.base=nf4", "optim.lr=1e-2", "data.sequence_length=16",
        "data.held_out=0.3", "train.updates=8", "train.tokens_per_update=128", "train.compile=none",
        "train.seed=0,1",
    ]  # fmt: skip
    swept = monograph.run(
        here, "sweep", *typed, "--prune", "0.05", "--out", "adapters", "--json", figures=0
    )
    assert swept.code == 0, swept.err
    [group] = json.loads((here / "adapters" / "sweep.json").read_text())["groups"]
    assert group["deciding_looks"] == [2, 4]
    result = json.loads(swept.out.splitlines()[-1])
    assert len(result["members"]) == 4 and result["best"]["standard_error"] is not None
    together = monograph.run(here, "evaluate", "adapters/mixture", "--json")
    assert together.code == 0 and "members together" in together.out, together.err
    best = ["--adapter", f"best={result['best']['adapter']}"]
    written = monograph.run(here, "generate", "out", "alpha ", *best, "--max-tokens", "4")
    assert written.code == 0, written.err
    done = monograph.run(here, "export", "adapters/best", "--to", "adapted")
    assert done.code == 0, done.err
    assert json.loads((here / "adapted/adapter/adapter_config.json").read_text())["r"] in (2, 4)


def finetune(monograph: CommandServer, here: Path) -> None:
    """Teach the folder `out` to answer chats, and take that away."""
    longer = with_tokens(
        Tokenizer.from_file(here / "out" / "tokenizer.json"), "<|im_start|>", "<|im_end|>"
    )
    (here / "chatty").mkdir()
    longer.save(here / "chatty" / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (here / "chatty" / "tokenizer_config.json").write_text(json.dumps(named))
    (here / "chatty" / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    words = ("alpha", "beta")
    write_chats(
        here / "chats.jsonl",
        [said(f"{word} {number}", word) for number in range(20) for word in words],
    )
    quiz = [
        {"query": f"{word} {n}", "choices": words, "gold": words.index(word)}
        for n in range(9)
        for word in words
    ]
    (here / "quiz.jsonl").write_text("".join(json.dumps(record) + "\n" for record in quiz))

    chats = [
        "chats.jsonl", "model.init=out", "data.tokenizer=chatty", "data.sequence_length=32", "data.held_out=0.2",
        "optim.lr=1e-2", "train.updates=120", "train.tokens_per_update=256", "train.save_every=10",
        "train.compile=none",
    ]  # fmt: skip
    assert "<|im_end|>" in monograph.run(here, "data", "show", *chats).out
    killed(
        monograph.start(here, "train", *chats, "--out", "taught", figures=0),
        here,
        "taught/checkpoints/step-0000001*",
    )
    done = monograph.run(here, "train", "--resume", "taught", "--json", figures=0)
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["update"] == 120, done.err
    scores = [row["eval_loss"] for row in Run(here / "taught").rows() if "eval_loss" in row]
    assert scores[-1] < scores[0] / 40, "it learned to answer, and to stop"
    assert monograph.run(here, "export", "taught", "--to", "merged").code == 0
    asked = monograph.run(
        here, "compare", "taught", "merged", "--data", "quiz.jsonl", "--chat", "--json"
    )
    assert asked.code == 0, asked.err
    [difference] = json.loads(asked.out.splitlines()[-1])["differences"]
    assert (difference["difference"], difference["paired_by"], difference["pairs"]) == (
        0,
        "question",
        18,
    )
    assert [side["acc"] for side in json.loads(asked.out.splitlines()[-1])["runs"]] == [1.0, 1.0]
    answer = monograph.run(
        here, "generate", "merged", "beta 7", "--chat", "--temperature", "0", "--json"
    )
    [found] = json.loads(answer.out.splitlines()[-1])["completions"]
    assert (found["text"], found["finish_reason"]) == ("beta", "stop")


ECHO = """
class Echo:
    def reset(self, record):
        return record["prompt"]

    def step(self, answer):
        return " alpha ", float("beta" in answer), "beta" in answer
"""


def play(monograph: CommandServer, here: Path) -> None:
    """Let the run `better` say beta in up to three turns."""
    (here / "echo.py").write_text(ECHO)
    typed = [
        "prompts.jsonl", "model.init=better", "rl.environment=echo.py:Echo", "rl.turns=3",
        "rl.prompts=3", "rl.max_new_tokens=6", "data.held_out=0", "data.sequence_length=31", "train.updates=2",
        "train.compile=none", "train.precision=fp32",
    ]  # fmt: skip
    done = monograph.run(here, "train", *typed, "--out", "played", "--json", figures=0)
    found = json.loads(done.out.splitlines()[-1])
    assert done.code == 0 and found["drawn_minus_scored_max"] < 1e-5, done.err
    rows = [json.loads(line) for line in (here / "played/metrics.jsonl").read_text().splitlines()]
    assert all(1 <= row["turns"] <= 3 for row in rows if "reward" in row)


def reinforce(monograph: CommandServer, here: Path) -> str:
    """Teach the folder `out` to say beta, let llama.cpp say it, and return the run."""
    (here / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{word} "}}\n' for word in ("alpha", "gamma", "delta"))
    )
    typed = [
        "prompts.jsonl", "model.init=out", "rl.reward=regex", "rl.reward_regex=.*beta.*", "rl.prompts=3",
        "rl.max_new_tokens=6", "data.held_out=0", "data.sequence_length=16", "optim.lr=3e-3",
        "train.updates=40", "train.save_every=10",
        "train.compile=none", "train.precision=fp32",
    ]  # fmt: skip
    first, second = started(
        monograph, here, 2, "train", *typed, "train.parallel=ddp", "--out", "better"
    )
    killed(first, here, "better/checkpoints/step-0000001*")
    second.signal(signal.SIGKILL)
    second.wait()
    done = monograph.run(
        here, "train", "--resume", "better", "train.parallel=none", "--json", figures=0
    )
    found = json.loads(done.out.splitlines()[-1])
    assert found["update"] == 40 and found["reward"] > found["reward_first"] + 0.3, done.err
    assert found["drawn_minus_scored_max"] < 1e-5
    # Adapters on the same folder, two rates at once, are compared by how often they say beta.
    rewarded = over(
        typed, "data.held_out=0.5", "train.updates=4", "optim.lr=1e-3,3e-3", "rl.group=4"
    )
    done = monograph.run(
        here, "sweep", *rewarded, "lora.rank=2", "--out", "rewarded", "--json", figures=0, at_once=1
    )
    found = json.loads(done.out.splitlines()[-1])
    assert found["measure"]["unit"] == "reward" and found["best"]["adapter"], done.err
    assert (
        monograph.run(here, "export", "better", "--to", "better.gguf", "--format", "gguf").code == 0
    )
    model, tokenizer = load(here / "better")
    ids = [tokenizer.bos_id, *tokenizer.encode("alpha ")]
    [ours] = generate(model, tokenizer, [ids], Sampling(temperature=0), max_tokens=6)
    theirs = LlamaCpp(next((here / "better.gguf").glob("*.gguf"))).greedy(ids, 6)["tokens"]
    assert theirs == ours.token_ids[: len(theirs)] and "beta" in ours.text
    return "better"


def prefer(monograph: CommandServer, here: Path, reinforced: str) -> None:
    """Teach what says beta by now to say gamma, by pairs of both."""
    words = ("alpha", "epsilon", "delta")
    pairs = [
        json.dumps({"prompt": f"{word} ", "chosen": "gamma", "rejected": "beta"}) for word in words
    ]
    (here / "pairs.jsonl").write_text("\n".join(pairs * 4))
    typed = [
        "pairs.jsonl", f"model.init={reinforced}", "prefer.loss=dpo", "prefer.beta=0.5", "data.held_out=0",
        "data.sequence_length=32", "optim.lr=3e-3", "train.updates=40", "train.tokens_per_update=64",
        "train.save_every=10", "train.compile=none", "train.precision=fp32",
    ]  # fmt: skip
    killed(
        monograph.start(here, "train", *typed, "--out", "preferring", figures=0),
        here,
        "preferring/checkpoints/step-0000001*",
    )
    done = monograph.run(here, "train", "--resume", "preferring", "--json", figures=0)
    found = json.loads(done.out.splitlines()[-1])
    assert found["update"] == 40 and found["accuracy"] == 1 and found["margin"] > 3, done.err
    first = next(row for row in Run(here / "preferring").rows() if "train_loss" in row)
    assert first["train_loss"] == pytest.approx(math.log(2), rel=1e-15), (
        "the reference is what it begins from"
    )
    # which rate prefers best, of adapters on one copy of the model
    more = [
        json.dumps({"prompt": f"{word} {number} ", "chosen": "gamma", "rejected": "beta"})
        for word in words
        for number in range(6)
    ]
    (here / "more.jsonl").write_text("\n".join(more))
    typed = [
        "more.jsonl", f"model.init={reinforced}", "prefer.beta=0.5", "data.held_out=0.3", "data.sequence_length=32",
        "lora.rank=2", "optim.lr=1e-3,1e-2", "train.updates=4", "train.tokens_per_update=64", "train.compile=none",
    ]  # fmt: skip
    swept = monograph.run(here, "sweep", *typed, "--out", "rates", "--json", figures=0)
    assert swept.code == 0, swept.err
    found = json.loads(swept.out.splitlines()[-1])
    assert found["best"]["unit"] == "nats" and len(found["members"]) == 2


def killed(command: Command, folder: Path, when: str) -> None:
    """Kill a training as soon as such a checkpoint is there."""
    command.until(lambda: any(folder.glob(when)))
    command.signal(signal.SIGKILL)
    assert command.wait().signal == signal.SIGKILL


def same_in_transformers(folder: Path, model: torch.nn.Module, ids: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens_BT = torch.tensor([ids])
    with torch.no_grad():
        ours_BTV, theirs_BTV = model.eval().logits(model(tokens_BT)), theirs(tokens_BT).logits
    torch.testing.assert_close(theirs_BTV, ours_BTV, rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("alpha beta gamma delta", add_special_tokens=False) == ids


def scored_together(
    monograph: CommandServer, folder: Path, swept: dict[str, Any]
) -> dict[str, Any]:
    """The best of a sweep, whose members' averaged probabilities are better than the average
    member.
    """
    done = monograph.run(folder, "evaluate", "swept/mixture", "--json")
    scores = [member["eval_bits_per_byte"] for member in swept["members"]]
    assert (
        min(scores) / 2
        < json.loads(done.out.splitlines()[-1])["bits_per_byte"]
        < sum(scores) / len(scores)
    )
    best: dict[str, Any] = swept["best"]
    return best
