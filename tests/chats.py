"""Chat templates of our own in the manner of the common families, and a folder whose model speaks
one of them.
"""

from __future__ import annotations

import json
from pathlib import Path

from monograph.text.tokenizer import Tokenizer

_LOOP, _END = "{% for m in messages %}", "{% endfor %}"
TEMPLATES = {
    "chatml": _LOOP + "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}" + _END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "headers": "{{ bos_token }}" + _LOOP
    + "<|start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|eot|>" + _END
    + "{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}",
    "plain": _LOOP + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n" + _END
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "inst": "{{ bos_token }}" + _LOOP
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    + "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    + "{% else %}{{ raise_exception('only user and assistant speak here') }}{% endif %}" + _END,
    "thinking": "{% set ns = namespace(last=0) %}" + _LOOP
    + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}" + _END + _LOOP
    + "<|im_start|>{{ m.role }}\n{% set said = m.content %}"
    + "{% if m.role == 'assistant' %}{% if '</think>' in said %}"
    + "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if loop.index0 > ns.last %}"
    + "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{% endif %}"
    + "{{ said }}<|im_end|>\n" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "json": "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ messages[0].get('x', dict(a=1)).a }}"
    + "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ eos_token }}",
}  # fmt: skip
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|header|>", "<|eot|>")
SPOKEN = ["<think>", "</think>"]  # added tokens that are text
CHATS = [
    [{"role": "user", "content": "Hello?"}],
    [
        {"role": "user", "content": " a\nb\n "},
        {"role": "assistant", "content": "c <d> & 'e'"},
        {"role": "user", "content": "ü🙂"},
    ],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "reasoning": "hm", "content": "two"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
]  # fmt: skip


def speaking(folder: Path, name: str, stops: object = None) -> Tokenizer:
    """Write and read the tokenizer files of a folder whose model has that template."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(
        Tokenizer.train_bpe(["the answer is what the user said, and " * 9], 300).to_json()
    )
    for text in (*SPECIAL, *SPOKEN):
        index = len(content["model"]["vocab"]) + len(content["added_tokens"]) - 3
        content["added_tokens"].append(
            {"id": index, "content": text, "special": text in SPECIAL, "normalized": False}
        )
    Tokenizer(content, "x").save(folder / "tokenizer.json")
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
    }
    config["eos_token"] = {"__type": "AddedToken", "content": "<|eos|>", **plain}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    if stops is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Tokenizer.from_file(folder)
