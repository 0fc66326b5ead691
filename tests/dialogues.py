"""Chat templates of our own in the manner of the common families, each also tagged by hand, and
chats for them.

`TAGGED[name]` has {% generation %} placed by hand around what an assistant writes, its end token
included; the template itself is the same without the tags, so that the two cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monograph.text.tokenizer import Tokenizer

_EACH, _END = "{% for m in messages %}", "{% endfor %}"
_G, _E = "{% generation %}", "{% endgeneration %}"
_CALLS = (
    "{% if m.tool_calls %}{% for call in m.tool_calls %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}{% endif %}"
)
_THINKING = (
    "{% set ns = namespace(last=0) %}" + _EACH
    + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}" + _END + _EACH
    + "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + _G
    + "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n"
    + "</think>\n\n{% endif %}{{ m.content or '' }}" + _CALLS + "<|im_end|>" + _E + "\n"
    + "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    + "{{ m.content }}\n</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_LLAMA = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n"
    + "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>" + _EACH
    + "{% if m.role == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n" + _G
    + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|eom_id|>"
    + "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}" + _E
    + "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    + "{% elif m.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    + "{% endif %}" + _END
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
_NO_SYSTEM = (
    "{% if m.role == 'system' %}{{ raise_exception('system is not supported') }}{% endif %}"
)
TAGGED = {
    "chatml": _EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + _G + "{{ m.content or '' }}" + _CALLS
    + "<|im_end|>" + _E + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + _EACH
    + "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + _G + "{{ m.content or '' }}" + _CALLS + "<|im_end|>"
    + _E + "\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    + "<|im_end|>\n"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + "{% if tools and loop.first %}\n# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    + "<|im_end|>\n{% endif %}" + _END + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "qwen3": _THINKING,
    "llama-3": _LLAMA,
    "mistral-v1": "{{ bos_token }}" + "{% set ns = namespace(system='') %}" + _EACH
    + "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
    + "{% elif m.role == 'user' %}[INST] {{ ns.system + m.content }} [/INST]{% set ns.system = '' %}"
    + "{% elif m.role == 'assistant' %}" + _G + " {{ m.content | trim }}{{ eos_token }}" + _E
    + "{% else %}{{ raise_exception('only user and assistant speak here') }}{% endif %}" + _END,
    "mistral-v3": "{{ bos_token }}{% set ns = namespace(last=0, system='') %}" + _EACH
    + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    + "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}" + _END + _EACH
    + "{% if m.role == 'user' %}"
    + "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + "[INST]{% if loop.last %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]"
    + "{% elif m.role == 'assistant' %}" + _G
    + "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}"
    + "{% else %}{{ m.content }}{% endif %}{{ eos_token }}" + _E
    + "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | tojson }}[/TOOL_RESULTS]{% endif %}" + _END,
    "gemma": "{{ bos_token }}" + _EACH + _NO_SYSTEM
    + "{% if m.role == 'tool' %}{{ raise_exception('tools are not supported') }}{% endif %}"
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    + "{% if m.role == 'assistant' %}" + _G + "{{ m.content | trim }}<end_of_turn>" + _E
    + "{% else %}{{ m.content | trim }}<end_of_turn>{% endif %}{{ '\\n' }}" + _END
    + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    # Its prompt ends before the line feed, so that inference must write it: it is inside of the
    # tag.
    "zephyr": _EACH + "<|{{ m.role }}|>{% if m.role == 'assistant' %}" + _G + "{{ '\\n' + (m.content or '') }}" + _CALLS
    + "{{ eos_token }}" + _E + "{% else %}{{ '\\n' + m.content + eos_token }}{% endif %}{{ '\\n' }}" + _END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # The next role ends a turn, and there is none after the last.
    "glm": "[gMASK]" + _EACH + "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" + _G + "{{ m.content or '' }}"
    + _CALLS + _E + "{% else %}{{ m.content }}{% endif %}" + _END
    + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}  # fmt: skip
TEMPLATES = {name: text.replace(_G, "").replace(_E, "") for name, text in TAGGED.items()}
CONTROLS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "[gMASK]",
    "<start_of_turn>", "<end_of_turn>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
# What generation_config.json lists; nothing: the end of text alone.
STOPS = {
    "chatml": ["<|im_end|>"], "qwen2.5": ["<|im_end|>"], "qwen3": ["<|im_end|>"], "gemma": ["<end_of_turn>"],
    "llama-3": ["<|eot_id|>", "<|eom_id|>"],
}  # fmt: skip


def said(*parts: str) -> list[dict[str, Any]]:
    """A chat in which user and assistant take turns."""
    return [
        {"role": ("user", "assistant")[turn % 2], "content": part}
        for turn, part in enumerate(parts)
    ]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]


def call(**arguments: Any) -> dict[str, Any]:
    """An assistant's call of a tool."""
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": said("hello", "the answer"),
    "three turns": said("What is it?", "It is\nan answer.", "And then?", "nothing", "Why?\n", "so ü🙂 it is"),
    "a system's": [{"role": "system", "content": "Be brief."}, *said("why", "so", "and", "thus")],
    "spaces outside": said(" what\n", "\n the user said \n", "  more?", " yes  "),
    "thoughts": [
        *said("1", "one"), {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
    ],
    "two rounds of tools": [
        {"role": "user", "content": "1 + 2 + 3?"}, call(a=1, b=2), {"role": "tool", "content": "3"}, call(a=3, b=3),
        {"role": "tool", "content": "6"}, {"role": "assistant", "content": "It is 6."}, *said("thanks", "the end"),
    ],
}  # fmt: skip


def speaking(
    folder: Path, name: str, tagged: bool = False, stops: Sequence[str] | None = None
) -> Tokenizer:
    """Write and read the tokenizer files of a folder whose model has that template."""
    folder.mkdir(parents=True, exist_ok=True)
    # Line feeds and marks that merge, so that tokens may reach over the border of prompt and
    # answer.
    text = "the answer is\n\nwhat the user said\n\n: and |>\n[/INST] the\n " * 9
    content = json.loads(Tokenizer.train_bpe([text], 320).to_json())
    for token in CONTROLS:
        index = len(content["model"]["vocab"]) + len(content["added_tokens"]) - 3
        content["added_tokens"].append(
            {"id": index, "content": token, "special": True, "normalized": False}
        )
    tokenizer = Tokenizer(content, "x")
    tokenizer.save(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TAGGED if tagged else TEMPLATES)[name])
    ends = [tokenizer.special[stop] for stop in (STOPS.get(name, []) if stops is None else stops)]
    if ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer.from_file(folder)


def write_chats(path: Path, chats: Sequence[Sequence[dict[str, Any]]]) -> Path:
    """A file of conversations, one a line."""
    path.write_text("".join(json.dumps({"messages": list(chat)}) + "\n" for chat in chats))
    return path
