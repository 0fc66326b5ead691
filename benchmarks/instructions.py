"""Make a small world of instructions that a small model can learn: lists of words copied, reversed,
or written as code.

A base model is trained on sentences. It is then taught by chats about the same three tasks in other
words, with control tokens that no sentence has. So a model that answers has learned to answer, not
the tasks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from monograph.text.tokenizer import Tokenizer

WORDS = [
    first + second
    for first in ("ba", "de", "fi", "go", "ku", "la", "me", "no")
    for second in ("ra", "si", "tu", "vo")
]
CODE = {word: WORDS[(5 * place + 3) % len(WORDS)] for place, word in enumerate(WORDS)}
Task = Callable[[list[str]], list[str]]
TASKS: dict[str, tuple[str, Task]] = {  # by the chats' word: the sentences' word, and the function
    "Please repeat": ("Copy", list),
    "Say it backwards": ("Mirror", lambda words: words[::-1]),
    "Write in code": ("Code", lambda words: [CODE[word] for word in words]),
}
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LENGTHS = (2, 3, 4)
VOCABULARY = 400


def sentences(count: int, seed: int) -> Iterator[str]:
    """Yield sentences to train a base model on: "Mirror of bara desi is desi bara."."""
    chance = random.Random(seed)
    for _ in range(count):
        name, task = chance.choice(list(TASKS.values()))
        words = chance.choices(WORDS, k=chance.choice(LENGTHS))
        yield f"{name} of {' '.join(words)} is {' '.join(task(words))}."


def conversations(
    count: int, seed: int, unlike: set[str] | None = None
) -> list[list[dict[str, str]]]:
    """Return chats of one question and its answer, without repeated questions or questions of
    `unlike`.
    """
    chance, asked, found = random.Random(seed), set(unlike or ()), list[list[dict[str, str]]]()
    while len(found) < count:
        order, (_, task) = chance.choice(list(TASKS.items()))
        words = chance.choices(WORDS, k=chance.choice(LENGTHS))
        question = f"{order}: {' '.join(words)}"
        if question not in asked:
            asked.add(question)
            answer = {"role": "assistant", "content": " ".join(task(words))}
            found.append([{"role": "user", "content": question}, answer])
    return found


def write_records(path: Path, key: str, values: list[object]) -> Path:
    """Write a .jsonl file with one value per record."""
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values), encoding="utf-8")
    return path


def tokenizer_folder(folder: Path) -> Path:
    """Write a tokenizer whose words are one token each, with the control tokens and the chat
    template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chats = [message["content"] for chat in conversations(2000, seed=1) for message in chat]
    content = json.loads(
        Tokenizer.train_bpe(
            [*sentences(4000, seed=0), *chats, *SPECIAL_TEXTS], VOCABULARY
        ).to_json()
    )
    for text in SPECIAL:
        index = 1 + max(
            [
                *content["model"]["vocab"].values(),
                *(token["id"] for token in content["added_tokens"]),
            ]
        )
        content["added_tokens"].append(
            {"id": index, "content": text, "special": True, "normalized": False}
        )
    Tokenizer(content, str(folder)).save(folder / "tokenizer.json")
    begin, end = (token["content"] for token in content["added_tokens"][:2])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [
        token["id"] for token in content["added_tokens"] if token["content"] in (end, SPECIAL[1])
    ]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "tokenizer.json"


SPECIAL_TEXTS = ("user\n", "assistant\n") * 500  # so that roles become tokens, too
