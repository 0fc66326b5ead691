"""Teach a new, tiny model to call a tool, and let an agent of openai-agents solve questions with it.

First the agent works with a teacher, a server that knows every answer. What the agent sends it and what
the teacher says are the chats to learn from. `monograph train` teaches a new model with them, which
`monograph serve` then serves to the same agent. Nothing forces a call (`tool_choice` is auto): the model must
decide on one, copy both numbers, and say what the tool has returned. Needs `pip install openai-agents`.

    called right  of the questions about held-out pairs of numbers, those for which the tool was called once,
                  with both numbers
    right         of these, those whose answer is then what the teacher would say
    small talk    remarks that get the teacher's answer, without a call
    CPU           seconds of all threads: the agent with its teacher and the tokenizer, and `monograph train`
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch

from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

Message = dict[str, Any]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
SPOKEN = ("<tool_call>", "</tool_call>")
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VOCABULARY = 640
NUMBERS = 50
CHATS, UPDATES, ASKED = 1000, 500, 20
SMALL_TALK = {
    "Hello!": "Hello. What shall I add?",
    "What can you do?": "I can add two numbers.",
    "Thank you.": "You are welcome.",
    "Good night.": "Good night.",
}
# Equal chats are held out together, so a remark might not be taught at all.
SETTINGS = [
    "optim.name=muon", "optim.lr=1e-2", "train.precision=fp32", "train.compile=none",
    "data.sequence_length=512", "data.held_out=0", "train.tokens_per_update=2048",
]  # fmt: skip


def question(a: int, b: int) -> str:
    """Return what is asked about two numbers."""
    return f"What is {a} plus {b}?"


def taught_answer(messages: list[Message]) -> Message:
    """Return the teacher's answer to the messages of a chat."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"It is {last['content'].split()[-1]}."}
    if last["content"] in SMALL_TALK:
        return {"role": "assistant", "content": SMALL_TALK[last["content"]]}
    a, b = (int(word) for word in last["content"].strip("?").split() if word.isdigit())
    function = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@contextmanager
def teacher(chats: list[dict[str, Any]]) -> Iterator[str]:
    """Serve the teacher's answers at an address, and add each chat that has ended to a list."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = taught_answer(asked["messages"])
            calls = answer.get("tool_calls")
            if not calls:
                chats.append({"messages": [*asked["messages"], answer], "tools": asked["tools"]})
            choice = {
                "index": 0,
                "message": answer,
                "finish_reason": "tool_calls" if calls else "stop",
            }
            said = {"id": "1", "object": "chat.completion", "created": 0, "model": "teacher"}
            body = json.dumps(said | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


class Reply(NamedTuple):
    """What the agent did with a question.

    Attributes:
        called: the numbers of each call of the tool.
        said: the agent's last answer, or what stopped it.
    """

    called: list[tuple[int, int]]
    said: str


async def _asked(url: str, questions: list[str]) -> list[Reply]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    called: list[tuple[int, int]] = []

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        called.append((a, b))
        return f"{a} + {b} = {a + b}"

    replies = []
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        agent = agents.Agent(
            name="adder",
            instructions="Use the tool.",
            model=agents.OpenAIChatCompletionsModel(model="last", openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=40),
            tools=[agents.function_tool(add)],
        )
        for text in questions:
            called.clear()
            try:
                said = str((await agents.Runner.run(agent, text, max_turns=3)).final_output)
            except agents.AgentsException as error:
                said = repr(error)
            replies.append(Reply([*called], said))
    return replies


def asked(url: str, questions: list[str]) -> list[Reply]:
    """Return what an agent does with each question when the model at an address answers it."""
    return asyncio.run(_asked(url, questions))


def new_model(folder: Path, chats: list[dict[str, Any]], seed: int) -> None:
    """Write the folder of a new model, whose tokenizer knows the words of these chats."""
    # A number has one token wherever it stands, so to repeat it is to copy a token.
    numbers = "".join(f" {number}" for number in range(2 * NUMBERS)) * 50
    text = "\n".join(map(json.dumps, chats)) + numbers
    content = json.loads(Tokenizer.train_bpe([text], VOCABULARY).to_json())
    count = len(content["model"]["vocab"]) + len(content["added_tokens"]) - 3
    for number, token in enumerate((*SPECIAL, *SPOKEN)):
        entry = {"id": count + number, "content": token, "special": token in SPECIAL}
        content["added_tokens"].append(entry | {"normalized": False})
    tokenizer = Tokenizer(content, "x")
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=512, **SHAPE)
    save_model(Llama(config, seed=seed), folder, tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stops = {"eos_token_id": tokenizer.special["<|im_end|>"]}
    (folder / "generation_config.json").write_text(json.dumps(stops))


@contextmanager
def served(home: Path, run: Path) -> Iterator[str]:
    """Serve a run at an address, by the command."""
    environment = os.environ | {"HOME": str(home), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(harness.ROOT / "src")
    process = subprocess.Popen(
        [sys.executable, "-m", "monograph", "serve", str(run), "--port", "0", "--rows", "1"],
        cwd=home, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ready = next(line for line in process.stdout if line.startswith("ready"))
        yield f"{ready.split()[1]}/v1"
    finally:
        process.terminate()
        process.communicate()


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(home: Path, seed: int, chat_count: int, updates: int, asked_count: int) -> Message:
    """Teach a model, ask it, and return the figures."""
    began, children_before = time.process_time(), _children_cpu_s()
    draws = random.Random(seed)
    pairs = [(a, b) for a in range(NUMBERS) for b in range(NUMBERS)]
    draws.shuffle(pairs)
    unseen, seen = pairs[:asked_count], pairs[asked_count:]
    chats: list[dict[str, Any]] = []
    sums = [question(*pair) for pair in draws.choices(seen, k=chat_count - chat_count // 5)]
    remarks = draws.choices([*SMALL_TALK], k=chat_count // 5)
    with teacher(chats) as url:
        asked(url, sums + remarks)
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    new_model(home / "new", chats, seed)
    recorded_s = time.process_time() - began
    _, wall_s = harness.command(
        home, "train", "chats.jsonl", "model.init=new", *SETTINGS,
        f"train.updates={updates}", f"train.seed={seed}", "--out", "run",
    )  # fmt: skip
    trained_s = _children_cpu_s() - children_before
    with served(home, home / "run") as url:
        replies = asked(url, [question(*pair) for pair in unseen])
        talk = asked(url, [*SMALL_TALK])
    expected = [Reply([(a, b)], f"It is {a + b}.") for a, b in unseen]
    return {
        "seed": seed, "chats": len(chats), "updates": updates, "asked": asked_count,
        "right": sum(map(Reply.__eq__, replies, expected)),
        "called_right": sum(reply.called == [pair] for reply, pair in zip(replies, unseen, strict=True)),
        "remarks": len(SMALL_TALK),
        "remarks_right": sum(map(Reply.__eq__, talk, (Reply([], said) for said in SMALL_TALK.values()))),
        "recorded_cpu_s": recorded_s, "trained_cpu_s": trained_s, "trained_wall_s": wall_s,
        "replies": [*map(list, replies + talk)],
    }  # fmt: skip


def table(cases: list[dict[str, Any]]) -> str:
    """Return the page's table."""
    lines = [
        "| seed | called with both numbers | answered right | small talk | CPU s for the chats | CPU s for `train` |",
        "|---" * 6 + "|",
    ]
    for case in cases:
        cells = [
            str(case["seed"]),
            f"{case['called_right']} of {case['asked']}",
            f"{case['right']} of {case['asked']}",
            f"{case['remarks_right']} of {case['remarks']}",
            f"{case['recorded_cpu_s']:.0f}",
            f"{case['trained_cpu_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Teach and ask a model for each seed, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    options = parser.parse_args()
    asked_count = ASKED
    if options.smoke:
        options.seeds, options.chats, options.updates, asked_count = 1, 40, 2, 2
    torch.set_num_threads(1)  # also in the runs
    settings = {key: getattr(options, key) for key in ("seeds", "chats", "updates")}
    found = harness.result("taught-agent", settings)
    harness.print_machine(found)
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as home:
            case = measured(Path(home), seed, options.chats, options.updates, asked_count)
        found["cases"].append(case)
        harness.write(options.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
