"""Run: pytest tests/commands/test_rewards.py (`train` with rl.reward: what it shows, refuses and
keeps).
"""

from __future__ import annotations

import json
import re
import signal
import statistics
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import newest, over
from commands.test_new_tokens import with_tokens
from laws.resumed import write_inputs
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

RUN = [
    "prompts.jsonl", "model.init=base", "rl.reward=letters.py:score", "data.sequence_length=32", "rl.prompts=2",
    "rl.group=3", "rl.max_new_tokens=6", "train.updates=4", "train.compile=none", "train.precision=fp32",
    "train.save_every=2", "data.held_out=0.5",
]  # fmt: skip
SCORES = {
    "fails.py": "calls = []\ndef score(p, c, r):\n    calls.append(1)\n    return 1 if len(calls) < 17 else 1 / 0\n",
    "nan.py": "def score(p, c, r):\n    print('printed')\n    return float('nan')\n",
    "text.py": "def score(p, c, r):\n    return '1'\n",
    "large.py": "def score(p, c, r):\n    return 1e300\n",
    "dies.py": "import os\ndef score(p, c, r):\n    os._exit(7)\n",
}
# What was typed, the exit code, and a part of the line.
CASES: list[tuple[list[str], int, str]] = [
    (
        ["train", *[each for each in RUN if "init" not in each]],
        2,
        "rl.reward: a new model answers nothing: name one",
    ),
    (["train", *over(RUN, "rl.reward=exat")], 2, "rl.reward = 'exat': expected number, exact"),
    (
        ["train", *over(RUN, "rl.reward=exact")],
        3,
        "prompts.jsonl:1: rl.reward needs a text or a list of texts under",
    ),
    (["train", *over(RUN, "rl.reward=nothere.py:score")], 3, "nothere.py"),
    (
        ["train", *over(RUN, "rl.reward=environment")],
        2,
        "rl.reward = environment needs rl.environment: give it, too",
    ),
    (
        ["train", *over(RUN, "rl.reward=environment", "rl.environment=game.py")],
        2,
        "rl.environment = 'game.py': expected FILE.py:CLASS",
    ),
    (
        ["train", *over(RUN[:2], "rl.turns=3")],
        2,
        "rl.turns is of answers that are rewarded: give rl.reward=environment, too",
    ),
    (
        ["train", *over(RUN, "rl.reward=environment", "rl.environment=letters.py:Game")],
        3,
        "rl.environment: letters.py:Game raised NameError: the file has no class 'Game'",
    ),
    (
        [
            "train",
            *over(RUN, "rl.reward=environment", "rl.environment=echo.py:Echo", "rl.answer_regex=a"),
        ],
        2,
        "rl.answer_regex: answers to an environment can have no form: leave it out",
    ),
    (["train", *over(RUN, "rl.reward=letters.py:other")], 3, "the file has no function 'other'"),
    (
        ["train", *over(RUN, "rl.reward=letters.py:scroe")],
        3,
        "no function 'scroe'; did you mean score?",
    ),
    (
        ["train", *over(RUN, "rl.reward=regex", "rl.reward_regex=(")],
        3,
        "the regular expression '(': a '(' that is not closed",
    ),
    (["train", *over(RUN, "rl.group=1")], 2, 'rl.group = "1": expected a whole number from 2'),
    (
        ["train", *over(RUN, "rl.reward=regex")],
        2,
        "rl.reward = regex needs rl.reward_regex: give it, too",
    ),
    (
        ["train", *RUN, "rl.reward_regex=a"],
        2,
        "rl.reward_regex = a is of rl.reward = regex, not letters.py:score",
    ),
    (
        [
            "train",
            *over(RUN, "rl.reward=json-schema", "rl.teacher=base", "rl.reward_schema=schema.json"),
        ],
        2,
        "rl.teacher = base is of rl.reward = teacher, not json-schema: leave it out",
    ),
    (
        ["train", *RUN, "rl.kl=k1", "rl.kl_coef=0.1", "rl.advantage=dapo"],
        2,
        "rl.kl = k1 is a part of the reward, which rl.advantage = dapo divides",
    ),
    (["train", *RUN, "rl.kl=k2"], 2, "rl.kl = k2: say how strong it is, such as rl.kl_coef = 0.05"),
    (["train", *RUN, "rl.kl_coef=0.1"], 2, "rl.kl_coef is the strength of rl.kl: say k1, k2 or k3"),
    (
        ["train", *RUN, "rl.kl=k2", "rl.kl_coef=0.1", "rl.entropy_coef=0.1"],
        2,
        "rl.entropy_coef does not go with rl.kl = k2: leave one of them out",
    ),
    (["train", *RUN, "rl.kl=k4:0.1"], 2, 'rl.kl = "k4:0.1": expected none, k1, k2 or k3'),
    (
        ["train", "texts", "rl.answer_regex=a"],
        2,
        "rl.answer_regex is of answers that are rewarded: give rl.reward, too",
    ),
    (
        ["train", *RUN, "rl.answer_regex=("],
        3,
        "the regular expression '(': a '(' that is not closed",
    ),
    (["train", *RUN, "rl.answer_schema=nothere.json"], 3, "nothere.json"),
    (
        ["train", *RUN, "rl.answer_regex=a", "rl.answer_schema=nothere.json"],
        2,
        "rl.answer_regex and rl.answer_schema exclude each other; give one",
    ),
    (["train", *RUN, "data.answers=all"], 2, 'data.answers = "all": expected every or last'),
    (
        ["train", *over(RUN, "rl.max_new_tokens=6:half")],
        2,
        'rl.max_new_tokens = "6:half": expected a whole number',
    ),
    (
        ["train", *RUN, "rl.truncated=mask", "rl.truncation_penalty=0.5"],
        2,
        "rl.truncation_penalty lowers the reward of answers that rl.truncated = mask leaves out",
    ),
    (
        ["train", *over(RUN, "rl.reward=teacher", "rl.teacher=base", "rl.truncation_penalty=0.5")],
        2,
        "rl.truncation_penalty: a teacher says what each",
    ),
    (
        ["train", *over(RUN[1:], "rl.reward=teacher", "rl.teacher=base"), "told.jsonl"],
        3,
        "told.jsonl:1: the teacher_prompt has 31",
    ),
    (
        ["train", *over(RUN, "rl.reward=teacher", "rl.teacher=base", "rl.kl=k2", "rl.kl_coef=1")],
        2,
        "rl.kl: a teacher says what each token is",
    ),
    (
        ["train", *over(RUN, "rl.reward=teacher", "rl.teacher=base", "rl.advantage=grpo")],
        2,
        "rl.advantage: a teacher says what each",
    ),
    (
        ["train", *over(RUN, "rl.reward=teacher", "rl.teacher=short")],
        3,
        "it has 16 positions, fewer than data.sequence_length = 32",
    ),
    (
        ["train", *over(RUN, "rl.reward=teacher", "rl.teacher=other")],
        3,
        "its tokenizer is not the model's",
    ),
    (["train", *over(RUN, "rl.reward=teacher", "rl.teacher=nowhere")], 3, "nowhere"),
    (["train", *over(RUN, "rl.advantage=ppo")], 2, 'rl.advantage = "ppo": expected dr_grpo, rloo'),
    (["train", *over(RUN, "rl.temperature=0")], 2, "rl.temperature"),
    (["train", *over(RUN, "rl.max_new_tokens=32")], 2, "leaves no room for a prompt"),
    (
        ["train", *over(RUN, "rl.max_new_tokens=28")],
        3,
        "prompts.jsonl:1: the prompt has 6 tokens, more than 4",
    ),
    (
        ["train", *RUN, "train.tokens_per_update=64"],
        2,
        "with rl.reward an update has rl.prompts x rl.group answers",
    ),
    (["train", *RUN, "train.memory=stream"], 2, "rl.reward does not go with train.memory = stream"),
    (["train", *RUN, "optim.ema=0.9"], 2, "rl.reward does not go with optim.ema = 0.9"),
    (
        ["train", *over(RUN, "model.init=own.py:build")],
        2,
        "rl.reward does not go with model.init = own.py:build",
    ),
    (
        ["train", *over(RUN[1:], "data.source=texts")],
        3,
        "rl.reward needs records with a prompt each",
    ),
    (
        ["train", *over(RUN[1:], "data.source=records.jsonl")],
        3,
        "records.jsonl:1: has no key 'prompt'; its keys are",
    ),
    (
        ["train", *over(RUN[1:], "data.source=odd.jsonl")],
        3,
        "odd.jsonl:2: 'prompt' is a number, not a text or a list",
    ),
    (
        ["train", *RUN, "data.tokenizer=bpe", "data.vocab_size=300"],
        2,
        "rl.reward needs a model's tokenizer",
    ),
    (
        ["train", "texts", "rl.group=4"],
        2,
        "rl.group is of answers that are rewarded: give rl.reward, too",
    ),
    (["sweep", *over(RUN, "rl.group=2,4")], 2, "rl.group cannot be an axis"),
    (["profile", *RUN], 2, "`monograph profile` knows texts alone"),
    (["data", "show", *RUN], 2, "`monograph data` knows texts alone"),
    (
        ["train", *over(RUN[:7], "train.tokens=99")],
        2,
        "rl.reward does not go with train.tokens = 99",
    ),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    write_inputs(folder)
    (folder / "told.jsonl").write_text(json.dumps({"prompt": "a", "teacher_prompt": "a" * 30}))
    (folder / "odd.jsonl").write_text('{"prompt": "a", "good": "e"}\n{"prompt": 3, "good": "e"}\n')
    plain = Tokenizer.bytes()
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    for name, positions, tokenizer in (
        ("short", 16, plain),
        ("other", 32, with_tokens(plain, "<|im_start|>")),
    ):
        config = LlamaConfig(
            vocab_size=tokenizer.vocab_size, max_position_embeddings=positions, **shape
        )
        save_model(Llama(config), folder / name, tokenizer)
    for name, text in SCORES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def monograph(server: CommandServer) -> CommandServer:
    return server


@pytest.mark.parametrize(("typed", "code", "part"), CASES, ids=lambda value: None)
def test_what_is_refused(
    typed: list[str], code: int, part: str, here: Path, monograph: CommandServer
) -> None:
    done = (
        monograph.run(here, *typed, "--out", "refused")
        if typed[0] == "train"
        else monograph.run(here, *typed)
    )
    [line] = [each for each in done.err.splitlines() if each.startswith(("error", "bug"))]
    assert done.code == code and part in line, done.err
    assert not list((here / "refused").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("nan.py", "nan"),
        ("text.py", "'1'"),
        ("dies.py", "exit code 7"),
        pytest.param("large.py", "1e+300", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_is_no_number_names_its_record(
    file: str, fault: str, here: Path, monograph: CommandServer
) -> None:
    done = monograph.run(here, "train", *over(RUN, f"rl.reward={file}:score"), "--out", "unscored")
    assert done.code == 3 and f"{file}:score" in done.err and fault in done.err
    assert "prompts.jsonl:" in done.err.splitlines()[-1] and not done.out


def test_a_reward_that_fails_in_the_middle_loses_nothing(
    here: Path, monograph: CommandServer
) -> None:
    typed = [
        "train",
        *over(RUN, "rl.reward=fails.py:score", "train.save_every=100"),
        "--out",
        "failed",
    ]
    done = monograph.run(
        here,
        *[each for each in typed if not each.startswith("data.held_out")],
        "data.held_out=0",
        figures=0,
    )
    assert done.code == 3 and "ZeroDivisionError: division by zero" in done.err
    update = int(newest(here / "failed").name[5:])
    rows = [
        json.loads(line) for line in (here / "failed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert update >= 1 and update == max(row["update"] for row in rows if "reward" in row)
    (here / "fails.py").write_text("def score(p, c, r):\n    return 1\n")
    changed = monograph.run(here, "train", "--resume", "failed", "--trust-code")
    assert changed.code == 3 and "start a new run from this one with --from" in changed.err
    typed = ["--from", "failed", "rl.reward=fails.py:score", "train.updates=2", "--out", "mended"]
    assert monograph.run(here, "train", *typed, figures=0).code == 0


def test_what_a_run_leaves(here: Path, monograph: CommandServer) -> None:
    done = monograph.run(here, "train", *RUN, "--out", "run", "--json", figures=1)
    assert done.code == 0, done.err
    summary = json.loads(done.out.splitlines()[-1])
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    drawn = [row for row in rows if "reward" in row]
    assert len(drawn) == 4 and summary["update"] == 4
    assert {
        "pass_at_1",
        "pass_at_k",
        "dead",
        "entropy",
        "length",
        "cut",
        "drawn_s",
        "scored_s",
    } <= drawn[0].keys()
    assert all(abs(row["reward.odd"] + row["reward.good"] - row["reward"]) < 1e-12 for row in drawn)
    assert (
        summary["reward.good"] == drawn[-1]["reward.good"]
        and "eval_reward.good" in rows[-1] | rows[-2] | rows[-3]
    )
    assert (
        summary["reward"] == drawn[-1]["reward"] and summary["reward_first"] == drawn[0]["reward"]
    )
    assert summary["tokens"] == drawn[-1]["tokens"] == sum(row["drawn_tokens"] for row in drawn)
    assert all(0 <= row["reward"] <= 1.5 and 1 <= row["length"] <= 6 for row in drawn)
    apart = summary["drawn_minus_scored_max"]
    assert apart < 1e-5 and (f"up to {apart:.1g} nats from how they were drawn" in done.err) == (
        apart > 0
    )
    assert any("eval_reward" in row for row in rows) and "prompts" in done.err
    page = (here / "run" / "report.html").read_text()
    assert "Mean reward" in page and (here / "run" / "figures" / "reward.png").exists()
    assert monograph.run(here, "generate", "run", "alpha", "--max-tokens", "3", "--json").code == 0
    for command in (["evaluate", "run"], ["compare", "run", "run"]):
        refused = monograph.run(here, *command)
        assert refused.code == 2 and "learned from answers, not from text" in refused.err
    assert monograph.run(here, "evaluate", "run", "--data", "texts").code == 0
    assert monograph.run(here, "export", "run", "--to", "out").code == 0
    assert monograph.run(here, "check", "run").code == 0
    plan = monograph.run(here, "plan", *RUN, "--json")
    planned = json.loads(plan.out.splitlines()[-1])
    took = statistics.median(row["drawn_s"] for row in drawn if row["longest"] == 6)
    assert planned["drawing_calibrated"] and "as earlier runs took it" in plan.out
    assert 1 / 3 < planned["drawing_s"] / took < 3


def test_a_run_of_episodes_is_like_any_other(here: Path, monograph: CommandServer) -> None:
    typed = over(
        [*RUN[:2], *RUN[3:]],
        "rl.environment=echo.py:Echo",
        "rl.turns=3",
        "rl.max_new_tokens=4",
    )
    done = monograph.run(here, "train", *typed, "--out", "played", "--json", figures=0)
    assert done.code == 0, done.err
    assert "2 prompts, 3 episodes each of up to 3 answers" in done.err
    rows = [
        json.loads(line) for line in (here / "played" / "metrics.jsonl").read_text().splitlines()
    ]
    drawn = [row for row in rows if "reward" in row]
    assert len(drawn) == 4 and all(1 <= row["turns"] <= 3 for row in drawn)
    assert all(abs(row["reward.low"] + row["reward.more"] - row["reward"]) < 1e-9 for row in drawn)
    assert any("eval_reward.low" in row for row in rows)
    assert json.loads(done.out.splitlines()[-1])["drawn_minus_scored_max"] < 1e-5
    assert monograph.run(here, "plan", *typed, "--json").code == 0


@pytest.mark.slow
def test_a_stranger_s_function_is_not_run_unasked(here: Path, monograph: CommandServer) -> None:
    assert monograph.run(here, "train", *RUN, "--out", "theirs", figures=0).code == 0
    config = here / "theirs" / "config.toml"
    config.write_text(
        "\n".join(line for line in config.read_text().splitlines() if not line.startswith("# mark"))
        + "\n"
    )
    for typed in (["--from", "theirs"], ["theirs/config.toml"]):
        refused = monograph.run(here, "train", *typed, "--out", "ours")
        assert refused.code == 3 and "--trust-code" in refused.err, typed
    done = monograph.run(
        here,
        "train",
        "--from",
        "theirs",
        "train.updates=1",
        "--out",
        "ours",
        "--trust-code",
        figures=0,
    )
    assert done.code == 0, done.err


@pytest.mark.slow
def test_answers_of_a_form_are_all_of_it_and_the_run_is_one_like_others(
    here: Path, monograph: CommandServer
) -> None:
    done = monograph.run(
        here, "train", *RUN, "rl.answer_regex=[a-f]+[0-9]", "--out", "of-a-form", figures=0
    )
    assert done.code == 0, done.err
    rows = [
        json.loads(line) for line in (here / "of-a-form" / "metrics.jsonl").read_text().splitlines()
    ]
    samples = [row["sample"] for row in rows if "sample" in row]
    assert samples and all(re.search(r"[a-f]+[0-9]? \(reward", sample) for sample in samples)
    assert max(row["drawn_minus_scored_max"] for row in rows if "reward" in row) < 1e-5
    assert monograph.run(here, "evaluate", "of-a-form", "--data", "texts").code == 0
    typed = [
        "pairs.jsonl",
        "--from",
        "of-a-form",
        "train.updates=2",
        "data.held_out=0",
        "--out",
        "after-a-form",
    ]
    assert monograph.run(here, "train", *typed, figures=0).code == 0


def test_another_schema_is_another_run(here: Path, monograph: CommandServer) -> None:
    (here / "schema.json").write_text('{"enum": ["a", "b"]}')
    formed = over(RUN, "rl.reward=json-schema", "rl.reward_schema=schema.json", "train.updates=60")
    command = monograph.start(here, "train", *formed, "--out", "formed", figures=0)
    command.until(lambda: any((here / "formed").glob("checkpoints/step-*")))
    command.signal(signal.SIGINT)
    command.wait()
    (here / "schema.json").write_text('{"enum": ["a", "c"]}')
    refused = monograph.run(here, "train", "--resume", "formed")
    assert refused.code == 3 and "a file that a key of [rl] names changed" in refused.err
