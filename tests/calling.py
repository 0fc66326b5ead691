"""Chat templates of our own with the frames of calls that the common families have, and random calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from monograph.text.call_reader import CallReader
from monograph.text.calls import with_tools
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.tokenizer import Tokenizer

_EACH, _END = "{% for m in messages %}", "{% endfor %}"
_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_SHOWN = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TAGGED_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)


def _chatml(answer: str) -> str:
    """A template whose assistant says this."""
    return (
        _SHOWN + _EACH + "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + answer + "<|im_end|>\n"
        + "{% else %}" + _IM + "{% endif %}" + _END + _PROMPT
    )  # fmt: skip


TEMPLATES = {
    # SmolLM3: the template writes no calls, it only says how.
    "described": "{% if xml_tools %}<|im_start|>system\n{% for tool in xml_tools %}{{ tool | string }}\n"
    + "{% endfor %}<|im_end|>\n{% endif %}" + _EACH + _IM + _END + _PROMPT,
    # Qwen 2.5, Hermes, Granite 4: tags, which are letters or added tokens.
    "tags": _chatml("{{ m.content or '' }}" + _TAGGED_CALLS),
    # Qwen 3: each answer begins with thoughts, which may be empty.
    "thoughts": _chatml(
        "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content or '' }}" + _TAGGED_CALLS
    ),
    # Arguments are a text that is copied, and JSON has no spaces.
    "copied": _chatml(
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}"
        "<|message|>{{ call.function.arguments }}<|end|>{% endfor %}"
    ),
    "compact": _chatml(
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "<|call|>{{ call.function | tojson(separators=(',', ':')) }}{% endfor %}"
    ),
    # Llama 3: one call is the whole answer, and nothing marks it.
    "bare": "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}" + _EACH
    + "<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header|>\n\n"
    + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    + "{% else %}{{ m.content }}{% endif %}<|eot|>" + _END
    + "{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}",
    # Mistral 3: a list after a special token, with ids.
    "list": "{{ bos_token }}" + _EACH + "{% if m.role == 'user' %}"
    + "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    + "{% elif m.tool_calls %}[CALLS] [{% for call in m.tool_calls %}"
    + "{% if call.id | length != 9 %}{{ raise_exception('nine letters and digits') }}{% endif %}"
    + '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}'
    + "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    + "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}, {{ m.tool_call_id }}[/RESULT]"
    + "{% else %}{{ m.content }}{{ eos_token }}{% endif %}" + _END,
    # Mistral from 11 on: special tokens alone.
    "marks": "{{ bos_token }}" + _EACH + "{% if m.role == 'user' %}"
    + "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    + "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}{{ m.content or '' }}"
    + "{% for call in m.tool_calls or [] %}[CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    + "{% endfor %}{{ eos_token }}{% endif %}" + _END,
    # Qwen 3.5, Qwen3-Coder: each argument is a field; texts and Python's words stand there as they are. The
    # prompt begins thoughts, which an answer without any does not have.
    "fields": _chatml(
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
        "<tool_call>\n<function={{ call.function.name }}>\n"
        "{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n"
        "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
        "{{ '\\n' }}</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ) + "{% if add_generation_prompt %}<think>\n"
    + "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    # GLM from 4.5 on: names and values in tags, JSON unless the value is a text.
    "keys": _chatml(
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
        "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}"
    ),
    # Gemma 4: a notation of its own, whose quotes are a special token, and sorted names. The content, if there
    # is any, comes after the calls.
    "quotes": "{% macro write(value) %}{% if value is string %}<|q|>{{ value }}<|q|>"
    + "{% elif value is boolean %}{{ 'true' if value else 'false' }}"
    + "{% elif value is mapping %}{ {%- for k, v in value | dictsort %}{{ k }}:{{ write(v) }}"
    + "{% if not loop.last %},{% endif %}{% endfor -%} }"
    + "{% elif value is sequence %}[{% for v in value %}{{ write(v) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    + "{% elif value is none %}null{% else %}{{ value }}{% endif %}{% endmacro %}"
    + _SHOWN + _EACH + "<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}"
    + "<|call|>call:{{ call.function.name }}{{ write(call.function.arguments) }}<|end|>{% endfor %}"
    + "{{ m.content or '' }}<|im_end|>\n" + _END + _PROMPT,
    # gpt-oss: the name stands in the head of a message.
    "channels": "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}" + _EACH
    + "{% if m.tool_calls %}"
    + "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    + "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    + "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    + "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    + "{{ '<|return|>' if loop.last else '<|end|>' }}"
    + "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + _END
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}  # fmt: skip
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start|>", "<|header|>", "<|eot|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", "<|constrain|>", "<|q|>",
    "[TOOLS]", "[/TOOLS]", "[INST]", "[/INST]", "[CALLS]", "[ARGS]", "[RESULT]", "[/RESULT]",
)  # fmt: skip
SPOKEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added tokens that are text
STOPS = {"channels": ["<|call|>", "<|return|>"], "bare": ["<|eot|>"]}
# Families that write one call in an answer, and those whose calls are the whole answer.
SINGLE = {"bare", "channels"}
ALONE = {"bare"}
# Families whose template writes no content beside calls.
CONTENTLESS = {"bare", "list", "quotes"}
# Families whose arguments are fields, and not JSON.
FIELDS = {"fields", "keys", "quotes"}


_HEARD = 'the answer is\n\n{"name": "what", "arguments": {"the": "user"}} said\n' * 9


def speaking(
    folder: Path,
    template: str,
    *,
    spoken: Sequence[str] = SPOKEN,
    text: str = _HEARD,
    size: int = 300,
) -> Tokenizer:
    """Write and read the tokenizer files of a folder whose model has that template.

    `template` is the name of one of TEMPLATES, or its text; `text` is what the tokenizer is trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(Tokenizer.train_bpe([text], size).to_json())
    for token in (*SPECIAL, *spoken):
        index = len(content["model"]["vocab"]) + len(content["added_tokens"]) - 3
        content["added_tokens"].append(
            {"id": index, "content": token, "special": token in SPECIAL, "normalized": False}
        )
    tokenizer = Tokenizer(content, "x")
    tokenizer.save(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES.get(template, template))
    stops = STOPS.get(template, ["<|im_end|>"])
    ends = [tokenizer.special[stop] for stop in ["<|eos|>", *stops]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer.from_file(folder)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
QUESTION = {"role": "user", "content": "What?"}
# Texts in arguments, with all that could be taken for the end of something.
_TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    st.sampled_from(['"}', "\\", "}}\n</tool_call>", "<|im_end|>", "[CALLS]", "<|eot|>", "é🙂", "\n", "{", "]"]),
)  # fmt: skip
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-999, 999), _TEXTS, st.sampled_from([0.5, -1e-7])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(_TEXTS, _VALUES, max_size=3)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
MadeCalls = Sequence[tuple[str, dict[str, Any]]]


def answer_ids(tokenizer: Tokenizer, calls: MadeCalls, content: str = "") -> list[int]:
    """The ids of an answer with these calls, as the template writes it, without the one that ends it."""
    made = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    answer: dict[str, Any] = {"role": "assistant"}
    if content:
        answer["content"] = content
    if made:
        answer["tool_calls"] = made
    chat, variables = with_tools(tokenizer, [QUESTION, answer], TOOLS)
    ids = chat_ids(tokenizer, chat, **variables)
    # The prompt may end with the beginning of thoughts, which an answer without any does not have.
    pairs = zip(ids, _prompt(tokenizer), strict=False)
    ids = ids[len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) :]
    stops = stop_ids(tokenizer)
    return ids[: next((place for place, each in enumerate(ids) if each in stops), len(ids))]


@cache
def _prompt(tokenizer: Tokenizer) -> list[int]:
    chat, variables = with_tools(tokenizer, [QUESTION], TOOLS)
    return chat_ids(tokenizer, chat, add_generation_prompt=True, **variables)


def read_answer(
    reader: CallReader, ids: Sequence[int], cuts: Sequence[int] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """What a reader makes of ids that come in pieces: the content, and the calls."""
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [reader.add(ids[begin:end]) for begin, end in zip(places, places[1:], strict=False)]
    pieces.append(reader.finish())
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        for number, name, arguments in piece.calls:
            if name is not None:
                assert number == len(calls)
                calls.append((name, ""))
            assert number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
    return "".join(piece.content for piece in pieces), calls
