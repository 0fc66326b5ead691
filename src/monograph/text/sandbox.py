"""Render a chat template in a separate process, with limits of memory and time, where it can do no
harm.

A template comes with a model, from anywhere. Jinja's sandbox keeps it away from Python's internals,
but does not stop endless loops and strings of gigabytes. Only the end of the process stops these.
This program imports nothing of this package, so that it starts in a tenth of a second.

The program reads and writes lines of JSON:

- The first line of standard input is [source of the template, date]. The template sees the date as
  today's; null: the real date.
- Each further line is a list of requests. A request is a string, which itself contains JSON:
  [variables of the template, marks]. The marks are two texts that are put before and after text
  that the template tags as an answer, or null.
- The reply to a line is a list with one {"text": ...} or {"error": ...} for each request.

A template has the filters, functions and extensions that transformers gives it
(`apply_chat_template`, release 5).
"""

import json
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 1 << 29  # of address space; Python and jinja take a tenth of it
CPU_LIMIT_S = 2  # of processor time for one rendering
# The oldest safe release of jinja2. Earlier ones have ways out of the sandbox.
OLDEST_JINJA2 = (3, 1, 6)


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which renders to the text inside it, between the two marks."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(generation_marks=("", ""))

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return a node that calls `_inside` with the text between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.generation_marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class _Dict:
    """`dict` for templates: it can be called like the type, but does not have its attributes."""

    def __call__(self, *pairs: object, **values: object) -> dict[Any, Any]:
        return dict(*pairs, **values)

    def fromkeys(self, keys: Iterable[object], value: object = None, /) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    # There is no parameter named `self`, because a template may use `self` as the name of a value.
    def __init__(*self_and_pairs: object, **values: object) -> None:
        self, *pairs = self_and_pairs
        all_values = dict(*pairs, **values)
        for name in all_values:
            _require_public(name)
        Namespace.__init__(self, all_values)

    def __setitem__(self, name: str, value: object) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    """Refuse a name in a namespace that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"the name {name!r} in a namespace begins with an underscore"
        )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON; jinja's own filter would also escape < and > for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    """Refuse the chat; templates call this as `raise_exception`."""
    raise jinja2.exceptions.TemplateError(str(message))


def compiled(source: str, day: str | None) -> jinja2.Template:
    """Compile a template.

    Args:
        source: its source.
        day: the date that it sees as today's, e.g. "2024-07-26"; None: the real date.

    Raises:
        jinja2.exceptions.TemplateError: the source is not valid, or this release of jinja2 is not
            safe.
    """

    def strftime_now(form: str) -> str:
        now = datetime.fromisoformat(day) if day else datetime.now()
        return now.strftime(form)

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < OLDEST_JINJA2:
        raise jinja2.exceptions.SecurityError(
            f"jinja2 {jinja2.__version__} is not safe; install 3.1.6 or newer"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def _pieces(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> Iterator[str]:
    """Yield the pieces of the rendered text.

    Raises:
        jinja2.exceptions.SecurityError: they have more than `max_chars` characters.
    """
    chars = 0
    for piece in template.generate(**variables):
        chars += len(piece)
        if chars > max_chars:
            raise jinja2.exceptions.SecurityError(f"it writes more than {max_chars} characters")
        yield piece


class _Renderer:
    """Renders one template.

    The template is compiled at the first request, so that its errors are in the reply.
    """

    def __init__(self, source: str, day: str | None) -> None:
        self._source = source
        self._day = day
        self._template: jinja2.Template | None = None

    def render(self, request: str) -> dict[str, str]:
        """Return {"text": ...} or {"error": ...} for a request."""
        # RLIMIT_CPU is in whole seconds of processor time since the process began. When it is
        # reached, the kernel ends the process.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used.ru_utime + used.ru_stime) + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        try:
            if self._template is None:
                self._template = compiled(self._source, self._day)
            variables, marks = json.loads(request)
            environment = self._template.environment
            environment.generation_marks = marks or ("", "")  # type: ignore[attr-defined]
            max_chars = 64 * len(request) + (1 << 20)
            return {"text": "".join(_pieces(self._template, variables, max_chars))}
        except MemoryError:
            return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except RecursionError:
            return {"error": "it calls itself without end"}
        except Exception as error:  # a template can make Python raise any error
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, day = json.loads(sys.stdin.readline())
    renderer = _Renderer(source, day)
    for line in sys.stdin:
        replies = [renderer.render(request) for request in json.loads(line)]
        sys.stdout.write(json.dumps(replies) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
