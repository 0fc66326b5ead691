"""Render a chat template where it can do no harm: in a process of its own, under limits of memory
and time.

A template comes with a model from anywhere. Jinja's sandbox keeps it away from Python's internals,
but not from endless loops and strings of gigabytes, which only the end of a process stops. This
program imports nothing of the package, so that it starts in a tenth of a second.

The first line of standard input is, in JSON, [the template's source, the date that it sees or null
for today]. Each further line is a list of requests, each a text in JSON again: [the template's
variables, null or two texts to put around what is tagged as an answer]. The reply to a line is a
list of one {"text": ...} or {"error": ...} per request.

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

MEMORY_BYTES = 1 << 29  # of address space, of which Python and jinja take a tenth
SECONDS = 2  # of processor time for one rendering
OLDEST = (3, 1, 6)  # older releases of jinja2 have known ways out of the sandbox


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}` around an assistant's text, which renders to that text between two
    requested marks.
    """

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(generation_marks=("", ""))

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.generation_marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class _Dict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *pairs: object, **values: object) -> dict[Any, Any]:
        return dict(*pairs, **values)

    def fromkeys(self, keys: Iterable[object], value: object = None, /) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    # No `self`, as a template may use this name.
    def __init__(*pairs: object, **values: object) -> None:
        own = pairs[0]
        given = dict(*pairs[1:], **values)
        for name in given:
            _public(name)
        Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: object) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: object) -> None:
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
    # Jinja's own filter escapes < and > for web pages.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def compiled(source: str, day: str | None) -> jinja2.Template:
    """Return the compiled template; raise jinja's errors."""

    def strftime_now(form: str) -> str:
        return (datetime.fromisoformat(day) if day else datetime.now()).strftime(form)

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < OLDEST:
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


def _pieces(template: jinja2.Template, variables: dict[str, Any], longest: int) -> Iterator[str]:
    length = 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > longest:
            raise jinja2.exceptions.SecurityError(f"it writes more than {longest} characters")
        yield piece


class _Renderer:
    """A renderer of one template, compiled at the first request, so that its faults are in the
    reply.
    """

    def __init__(self, source: str, day: str | None) -> None:
        self._source, self._day = source, day
        self._template: jinja2.Template | None = None

    def __call__(self, asked: str) -> dict[str, str]:
        # The limit counts whole seconds of processor time since the process began. At the limit the
        # kernel ends it.
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU,
            (int(used.ru_utime + used.ru_stime) + SECONDS, resource.RLIM_INFINITY),
        )
        try:
            template = self._template = self._template or compiled(self._source, self._day)
            variables, marks = json.loads(asked)
            template.environment.generation_marks = marks or ("", "")  # type: ignore[attr-defined]
            return {"text": "".join(_pieces(template, variables, 64 * len(asked) + (1 << 20)))}
        except MemoryError:
            return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except RecursionError:
            return {"error": "it calls itself without end"}
        except Exception as error:  # a template can make Python raise anything
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    render = _Renderer(*json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        sys.stdout.write(json.dumps([render(asked) for asked in json.loads(line)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
