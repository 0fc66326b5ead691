"""Run: pytest tests/text/test_template.py (chat templates: equal to transformers', and harmless)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chats import CHATS, TEMPLATES, speaking
from monograph.errors import InputRefused
from monograph.text import sandbox
from monograph.text.template import MAX_BATCH, ChatTemplate, read_sources

SAID = [{"role": "user", "content": "h"}]
HOSTILE = {
    "endless loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "2 s",
    ),
    "a long string": ("{{ 'x' * 10**10 }}", "MiB of memory"),
    "a wide format": ("{{ '%900000000d' % 1 }}", "MiB of memory"),
    "a replacement that grows": (
        "{{ ('a' * 500000) | replace('a', 'b' * 50000) }}",
        "MiB of memory",
    ),
    "endless text": ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "writes more than"),
    "a class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a function's globals": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "a name with an underscore": ("{% set n = namespace(_x=1) %}", "underscore"),
    "a change of its input": ("{{ messages.append(1) }}", "unsafe"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "a huge range": ("{{ range(10**9) }}", "Range too big"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "no template": ("{% if", "TemplateSyntaxError"),
    "deep brackets": ("{{" + "(" * 9000 + ")" * 9000 + "}}", "calls itself"),
    "a refusal": ("{{ raise_exception('no roles') }}", "no roles"),
}


# Each in a fork of its own, whose children are the template's alone.
RENDERS = """
import json, os, resource, sys
from monograph.text.template import ChatTemplate
from monograph.errors import InputRefused

def rendered(source):
    template = ChatTemplate(source, "model/chat_template.jinja")
    try:
        said = template.render([{"role": "user", "content": "h"}])
    except InputRefused as error:
        said = str(error)
    del template  # its process is waited for, and counted
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps([said, used.ru_utime + used.ru_stime, used.ru_maxrss]), flush=True)

for source in json.load(sys.stdin):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        rendered(source)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def rendered() -> dict[str, tuple[str, float, int]]:
    """What each says, and its CPU seconds and KiB: all in forks of one process, whose imports take
    most of the time.
    """
    command, environment = (
        [sys.executable, "-c", RENDERS],
        os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    sources = json.dumps([source for source, _ in HOSTILE.values()])
    done = subprocess.run(
        command, input=sources, env=environment, capture_output=True, text=True, check=True
    )
    return dict(zip(HOSTILE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused_in_three_seconds_and_a_gigabyte(
    kind: str, rendered: dict[str, tuple[str, float, int]]
) -> None:
    why, (said, seconds, peak_kib) = HOSTILE[kind][1], rendered[kind]
    assert re.match(f"model/chat_template.jinja: the chat template does not render: .*{why}", said)
    assert seconds < 3 and peak_kib < 1 << 20


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ends what computes without end after one second; the two of the program are tested above."""
    program = Path(sandbox.__file__).read_text()
    assert f"\nCPU_LIMIT_S = {sandbox.CPU_LIMIT_S} " in program
    copied = tmp_path / "sandbox.py"
    copied.write_text(
        program.replace(f"\nCPU_LIMIT_S = {sandbox.CPU_LIMIT_S} ", "\nCPU_LIMIT_S = 1 ")
    )
    monkeypatch.setattr(sandbox, "__file__", str(copied))


@pytest.mark.usefixtures("one_second")
def test_after_a_refusal_it_renders_again() -> None:
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ 'x' * 10**10 }}{% endif %}{{ messages[0].content }}", "x"
    )
    assert template.render(SAID) == "h"
    with pytest.raises(InputRefused, match="memory"):
        template.render(SAID * 2)
    assert template.render(SAID) == "h"
    endless = ChatTemplate(
        "{% if not messages %}" + HOSTILE["endless loops"][0] + "{% endif %}ok", "x"
    )
    with pytest.raises(InputRefused, match="2 s"):
        endless.render([])
    assert endless.render(SAID) == "ok"


def test_what_was_expected_is_what_is_rendered_alone() -> None:
    source = (
        "{{ tools }}{% for m in messages %}{{ m.content }}|{% endfor %}{{ add_generation_prompt }}"
    )
    alone, together = ChatTemplate(source, "t"), ChatTemplate(source, "t")
    chats = [
        ([{"role": "user", "content": f"{n}\n'\"é"}] * n, bool(n % 2))
        for n in range(2 * MAX_BATCH + 3)
    ]
    together.render_ahead(chats, tools=[{"name": "f"}])
    answers, together._replies = together._replies, None  # type: ignore[method-assign, assignment]
    for messages, prompt in chats:
        assert together.render(messages, prompt, tools=[{"name": "f"}]) == alone.render(
            messages, prompt, tools=[{"name": "f"}]
        )
    together._replies = answers  # type: ignore[method-assign]
    assert together.render(SAID, True) == alone.render(SAID, True) == "Noneh|True", (
        "other variables are another chat"
    )
    together.render_ahead(chats)
    together.render_ahead([])
    assert not together._rendered_ahead


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
def test_one_that_ends_the_process_takes_no_other_with_it() -> None:
    source = (
        "{% for m in messages %}{% if m.content == 'loop' %}"
        + HOSTILE["endless loops"][0]
        + (
            "{% elif m.content == 'no' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
        )
    )
    template = ChatTemplate(source, "t")
    words = ("a", "no", "loop", "b")
    template.render_ahead([([{"role": "user", "content": word}], False) for word in words])
    for word in words:
        if word in ("a", "b"):
            assert template.render([{"role": "user", "content": word}]) == word
        else:
            with pytest.raises(InputRefused, match="no" if word == "no" else "more than 2 s"):
                template.render([{"role": "user", "content": word}])


def test_it_equals_transformers(tmp_path: Path) -> None:
    """Every template and chat, with and without what begins an answer; what transformers refuses is
    refused.
    """
    from transformers import AutoTokenizer

    for name in TEMPLATES:
        ours = speaking(tmp_path / name, name).config.template
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert ours and ours.source == theirs.chat_template
        for chat in CHATS:
            for options in (
                {},
                {"add_generation_prompt": True},
                {"add_generation_prompt": True, "enable_thinking": False},
            ):
                try:
                    expected = theirs.apply_chat_template(chat, tokenize=False, **options)
                except Exception as error:
                    with pytest.raises(InputRefused, match=str(error)):
                        ours.render(chat, **options)
                else:
                    assert ours.render(chat, **options) == expected


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert read_sources(tmp_path, {}) == read_sources(tmp_path, {"chat_template": []}) == {}
    assert read_sources(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read_sources(tmp_path, {"chat_template": named}) == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_bytes(b"f\xc3\xbcr\n")
    assert read_sources(tmp_path, {"chat_template": named}) == {"default": "für\n"}, (
        "files come before the list"
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("u")
    (tmp_path / "additional_chat_templates" / "README.md").write_text("no template")
    assert read_sources(tmp_path, {"chat_template": named}) == {"default": "für\n", "tool_use": "u"}


def snapshot(folder: Path) -> Path:
    """A model in the Hub's cache, where each file is a link to a blob."""
    blobs, model = folder / "models--o--n" / "blobs", folder / "models--o--n" / "snapshots" / "abc"
    for name, text in (("chat_template.jinja", "d"), ("additional_chat_templates/rag.jinja", "r")):
        for place in (blobs, (model / name).parent):
            place.mkdir(parents=True, exist_ok=True)
        (blobs / text).write_text(text)
        (model / name).symlink_to(blobs / text)
    return model


def test_templates_in_the_hubs_cache_are_read_and_other_links_are_refused(tmp_path: Path) -> None:
    model = snapshot(tmp_path)
    assert read_sources(model, {}) == {"default": "d", "rag": "r"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.jinja").write_text("x")
    (model / "additional_chat_templates" / "x.jinja").symlink_to(tmp_path / "other" / "x.jinja")
    with pytest.raises(InputRefused, match="x.jinja: is a link out of its folder"):
        read_sources(model, {})
    (tmp_path / "additional_chat_templates").symlink_to(tmp_path / "other")
    with pytest.raises(InputRefused, match="additional_chat_templates: is a link; put the folder"):
        read_sources(tmp_path, {})


@pytest.mark.parametrize(
    ("content", "config", "why"),
    [
        (b"\xff", {}, "cannot be read as UTF-8"),
        (b"x" * (1 << 16) + b"y", {}, "larger than 64 KiB"),
        (None, {"chat_template": 5}, "chat_template is '5': expected a text, or texts by name"),
        (
            None,
            {"chat_template": [{"name": "rag", "template": "t"}]},
            "named rag, and none for chats without tools",
        ),
        (None, {"chat_template": [{"name": "default", "template": 5}]}, "expected a text"),
        (
            None,
            {"chat_template": [{"name": "../x", "template": "t"}]},
            "the name '../x': give it a name of letters",
        ),
    ],
)
def test_a_template_that_is_none_is_refused(
    tmp_path: Path, content: bytes | None, config: dict, why: str
) -> None:
    if content is not None:
        (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(InputRefused, match=why):
        read_sources(tmp_path, config)


def test_a_source_in_the_configuration_is_limited_too() -> None:
    with pytest.raises(InputRefused, match="larger than 64 KiB"):
        ChatTemplate("x" * (1 << 17), "x")


@pytest.mark.parametrize("message", ["text", 5, {"role": "user", "content": {1, 2}}])
def test_messages_of_another_kind_are_refused(message: object) -> None:
    with pytest.raises(InputRefused, match="a chat's message"):
        ChatTemplate("{{ messages }}", "x").render([message])  # type: ignore[list-item]


def test_the_process_is_started_without_this_package() -> None:
    """It must start quickly: a package that imports torch would cost seconds at the first word of a
    chat.
    """
    source = Path(sandbox.__file__).read_text()
    assert "monograph" not in source.replace("of this package", "") and "import torch" not in source
    assert json.loads(json.dumps(ChatTemplate("{{ 'ü' }}", "x").render([]))) == "ü"
