"""Three environments that a small model learns to use on a CPU, over several turns, each after a little
supervised training on games of a poor player.

    guess         a number from 0 to 15 in four guesses, after each of which it is told what is left
    calculator    the sum of three numbers, by calls of a tool that adds two
    shell         the word in a file, by commands in a tiny file system

The installed command line does all of it, as a person would: `train` on the poor player's chats, then
`train` with `rl.environment` from that run. The environments are in benchmarks/environments/. Figures
are shares of solved episodes, at temperature 1, and the seconds of training that `train` counts.

    before, after    of the first update's episodes, and of the last ten updates'
    unseen           at the end, of episodes of held-out records
    turns            of an episode, in the first update and in the last ten
    apart            the largest difference of drawn and scored log-probabilities, over all updates
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch

from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "environments"
sys.path.insert(0, str(FOLDER))

from calculator import Calculator  # noqa: E402
from guess import NUMBERS, Guess  # noqa: E402
from shell import FOLDERS, WORDS, Shell  # noqa: E402

Message = dict[str, Any]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
SPOKEN = ("<tool_call>", "</tool_call>")
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _call(name: str, **arguments: Any) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _guesses(draws: random.Random, record: Message, seen: list[Message]) -> Message:
    """Guess one of the numbers that are left in half of the turns, and anything in the others."""
    lowest, highest = "0", str(NUMBERS - 1)
    if draws.random() < 0.5:
        lowest, _, highest = seen[-1]["content"].split()
    return _said(str(draws.randint(int(lowest), int(highest))))


def _calculates(draws: random.Random, record: Message, seen: list[Message]) -> Message:
    """Add the right numbers in half of the turns, and any two of those around in the others."""
    numbers = record["numbers"]
    told = [int(each["content"].split()[-1]) for each in seen if each["role"] == "tool"]
    right = [(numbers[0], numbers[1]), *((each, numbers[2]) for each in told)]
    if len(told) >= 2 or (told and draws.random() < 0.3):
        said = told[-1] if draws.random() < 0.7 else draws.choice(numbers)
        return _said(f"It is {said}")
    one, other = right[len(told)]
    if draws.random() < 0.5:
        one, other = draws.choice([*numbers, *told]), draws.choice([*numbers, *told])
    return _call("add", a=one, b=other)


def _types(draws: random.Random, record: Message, seen: list[Message]) -> Message:
    """Look for the note in half of the turns, type any command in the others, and say what it says, or at
    times another word.
    """
    told = [each["content"] for each in seen if each["role"] == "tool"]
    found = [each for each in told if each.startswith("note: ")]
    if found or draws.random() < 0.04:
        return _said(
            found[-1] if found and draws.random() < 0.8 else f"note: {draws.choice(WORDS)}"
        )
    commands = [f"cat {name}/note" for name in FOLDERS]
    if draws.random() < 0.5:
        commands += ["ls", "cat note", *(f"cd {name}" for name in FOLDERS)]
    return _call("shell", command=draws.choice(commands))


class Task(NamedTuple):
    """A task.

    Attributes:
        environment: the class.
        record: draws a record.
        player: returns the poor player's answer to the messages of a chat.
        turns: the maximum number of answers.
        tokens: the maximum number of tokens of an answer.
        length: the tokens of a row.
        updates: supervised updates.
        supervised_rate: their learning rate.
        rate: the learning rate with rewards.
        played_updates: updates with rewards.
    """

    environment: Callable[[], Any]
    record: Callable[[random.Random], dict[str, Any]]
    player: Callable[[random.Random, Message, list[Message]], Message]
    turns: int
    tokens: int
    length: int
    updates: int
    supervised_rate: float
    rate: float
    played_updates: int


def _three_numbers(draws: random.Random) -> dict[str, Any]:
    return {"numbers": [draws.randrange(10) for _ in range(3)]}


def _numbered(draws: random.Random) -> dict[str, Any]:
    """Return a record that the environment does not read. Equal ones would be held out together."""
    return {"game": draws.randrange(10**9)}


TASKS = {
    "guess": Task(Guess, _numbered, _guesses, 4, 4, 63, 600, 2e-3, 1e-3, 180),
    "calculator": Task(Calculator, _three_numbers, _calculates, 4, 24, 119, 600, 2e-3, 1e-3, 45),
    # The model repeats the word that it has found only after 400 to 600 supervised updates. Before, rewards
    # have nothing to begin with. At 2e-3 spikes may end so long a training; after one at 1e-3, rewards need a
    # lower rate, too.
    "shell": Task(Shell, _numbered, _types, 5, 24, 191, 600, 1e-3, 4e-4, 60),
}


def chat(task: Task, draws: random.Random) -> dict[str, Any]:
    """Return the record of a chat in which the poor player plays one episode."""
    record = task.record(draws)
    environment = task.environment()
    random.seed(draws.randrange(1 << 30))
    messages = environment.reset(record)
    tools = list(getattr(environment, "tools", ()))
    for _ in range(task.turns):
        answer = task.player(draws, record, messages)
        messages = [*messages, answer]
        read: Any = answer["content"]
        if tools:
            calls = [call["function"] for call in answer.get("tool_calls", ())]
            read = {**answer, "tool_calls": calls}
        observation, _, done = environment.step(read)
        if done:
            break
        messages.append({"role": "tool" if tools else "user", "content": observation})
    if messages[-1]["role"] != "assistant":
        messages.pop()
    return {"messages": messages, **({"tools": tools} if tools else {})}


def base(folder: Path, chats: list[dict[str, Any]]) -> None:
    """Write the folder of a new model, whose tokenizer knows the words of these chats."""
    text = json.dumps([each["messages"] for each in chats[:500]])
    content = json.loads(Tokenizer.train_bpe([text], 400).to_json())
    count = len(content["model"]["vocab"]) + len(content["added_tokens"]) - 3
    for number, token in enumerate((*SPECIAL, *SPOKEN)):
        entry = {"id": count + number, "content": token, "special": token in SPECIAL}
        content["added_tokens"].append(entry | {"normalized": False})
    tokenizer = Tokenizer(content, "x")
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=512, intermediate_size=176, **SHAPE
    )
    torch.manual_seed(0)
    save_model(Llama(config), folder, tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stops = {"eos_token_id": tokenizer.special["<|im_end|>"]}
    (folder / "generation_config.json").write_text(json.dumps(stops))


COMMON = [
    "train.precision=fp32",
    "train.compile=none",
    "optim.name=adamw",
    "optim.schedule=constant",
]


def prepared(home: Path, name: str, seed: int) -> Path:
    """Write a new model, the poor player's chats and the records to a folder, and return it."""
    task, folder = TASKS[name], home / f"{name}-{seed}"
    folder.mkdir()
    draws = random.Random(seed)
    chats = [chat(task, draws) for _ in range(5000)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    records = [task.record(draws) for _ in range(600)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    base(folder / "new", chats)
    return folder


def supervise(home: Path, folder: Path, name: str, seed: int, updates: int) -> None:
    """Train the new model on the poor player's chats."""
    task = TASKS[name]
    harness.command(
        home, "train", str(folder / "chats.jsonl"), *COMMON, f"model.init={folder / 'new'}",
        f"data.sequence_length={task.length}", f"optim.lr={task.supervised_rate}", "train.tokens_per_update=4096",
        f"train.updates={updates}", f"train.seed={seed}", "--out", str(folder / "base"),
    )  # fmt: skip


def measured(home: Path, folder: Path, name: str, seed: int, updates: int) -> dict[str, Any]:
    """Train with the environment, and return the figures."""
    task = TASKS[name]
    code = f"{FOLDER / name}.py:{task.environment.__name__}"  # type: ignore[attr-defined]
    found, _ = harness.command(
        home, "train", str(folder / "records.jsonl"), *COMMON, f"model.init={folder / 'base'}",
        f"rl.environment={code}", f"rl.turns={task.turns}", "rl.prompts=16", "rl.group=8",
        f"rl.max_new_tokens={task.tokens}", f"data.sequence_length={task.length}", "data.held_out=0.1",
        f"optim.lr={task.rate}", "optim.weight_decay=0", f"train.updates={updates}", f"train.seed={seed}",
        "--out", str(folder / "played"),
    )  # fmt: skip
    rows = [
        json.loads(line) for line in (folder / "played" / "metrics.jsonl").read_text().splitlines()
    ]
    drawn = [row for row in rows if "reward" in row]
    held = [row["eval_pass_at_1"] for row in rows if "eval_pass_at_1" in row]
    last = drawn[-10:]
    return {
        "task": name, "seed": seed, "before": drawn[0]["pass_at_1"],
        "after": statistics.fmean(row["pass_at_1"] for row in last), "unseen": held[-1],
        "turns_before": drawn[0]["turns"], "turns_after": statistics.fmean(row["turns"] for row in last),
        "updates": found["update"], "training_s": found["training_s"], "apart": found["drawn_minus_scored_max"],
        "curve": [(row["update"], row["wall_s"], row["pass_at_1"], row["turns"]) for row in drawn],
    }  # fmt: skip


def main() -> None:
    """Train the chosen tasks, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--at-once", type=int, default=2, help="runs at a time, each on one core; default: 2"
    )
    parser.add_argument("--updates", type=int, help="with rewards; default: the task's own number")
    options = parser.parse_args()
    if options.smoke:
        options.tasks, options.updates, options.seeds = "guess", 2, 1
    settings = {key: getattr(options, key) for key in ("tasks", "seeds", "at_once", "updates")}
    torch.set_num_threads(1)  # also in the runs
    found = harness.result("episodes", settings)
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        runs = list(itertools.product(options.tasks.split(","), range(options.seeds)))
        # One after another, since Python's chance and torch's are those of the process.
        folders = [prepared(Path(home), name, seed) for name, seed in runs]

        def figures(name: str, seed: int, folder: Path) -> dict[str, Any]:
            updates = 2 if options.smoke else TASKS[name].updates
            supervise(Path(home), folder, name, seed, updates)
            played_updates = options.updates or TASKS[name].played_updates
            return measured(Path(home), folder, name, seed, played_updates)

        with ThreadPoolExecutor(options.at_once) as pool:
            names, seeds = zip(*runs, strict=True)
            for case in pool.map(figures, names, seeds, folders):
                found["cases"].append(case)
                harness.write(options.out, found)
    harness.print_table(
        ["task", "seed", "before", "after", "unseen", "turns before", "after", "updates", "seconds", "apart"],
        [
            [
                case["task"], str(case["seed"]), f"{case['before']:.2f}", f"{case['after']:.2f}",
                f"{case['unseen']:.2f}",
                f"{case['turns_before']:.1f}", f"{case['turns_after']:.1f}", str(case["updates"]),
                f"{case['training_s']:.0f}", f"{case['apart']:.0e}",
            ]
            for case in found["cases"]
        ],
    )  # fmt: skip
    harness.write(options.out, found)


if __name__ == "__main__":
    main()
