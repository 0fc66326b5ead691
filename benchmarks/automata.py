"""Measure compile times and sizes of automata for stop strings and constraints, and the cost of a
decode step.

The vocabulary has 128,256 pieces: the special ones, all bytes, the most frequent words and parts of
words of Python's own source with and without a space before them, and random ones. On a GPU the
automaton's part of a step is timed there.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch

from monograph.automata import Automaton, Calls, call_constraint, constraint, stop_strings
from monograph.automata.counting import COUNTERS
from monograph.decode.automaton_tables import AutomatonTables, allowed_tokens, is_over, next_states
from monograph.device import default_device

END = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"anyOf": [{"type": "string", "maxLength": 32}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
    },
    "required": ["name", "age"],
}
TOOL = {
    "type": "object",
    "properties": {f"text{number}": {"type": "string", "maxLength": 4000} for number in range(20)}
    | {"rows": {"type": "array", "maxItems": 100, "items": PERSON}},
}
# What stands around the calls of an answer.
FRAME = {
    "trigger": ["<tool_call>"],
    "after_trigger": ['\n{"name": "'],
    "opening": ['<tool_call>\n{"name": "'],
    "call": [{"hole": "name"}, '", "arguments": ', {"hole": "arguments"}],
    "variants": [],
    "between": ['}\n</tool_call>\n<tool_call>\n{"name": "'],
    "closing": ["}\n</tool_call>"],
    "follows_text": True,
    "separators": [", ", ": "],
    "fields": None,
}


def tools(count: int, pieces: list[bytes]) -> Automaton:
    """Return the automaton of any text that may end with calls of this many strict tools."""
    functions = [(f"tool_{number}", PERSON) for number in range(count)]
    return call_constraint(Calls(FRAME, functions, must_call=False, parallel=True), pieces, [END])


CASES: dict[str, Callable[[list[bytes]], Automaton]] = {
    "4 stop strings": lambda pieces: stop_strings(["\n\n", "###", "User:", "</s>"], pieces),
    "choices: yes, no": lambda pieces: constraint("choices", ["yes", "no"], pieces, [END]),
    "regex: a date": lambda pieces: constraint("regex", r"\d{4}-\d{2}-\d{2}", pieces, [END]),
    "regex: words": lambda pieces: constraint("regex", r"\w+( \w+){0,20}\.", pieces, [END]),
    "schema: a string of 64": lambda pieces: constraint(
        "json_schema", {"type": "string"}, pieces, [END]
    ),
    "schema: a person": lambda pieces: constraint("json_schema", PERSON, pieces, [END]),
    "schema: a tool": lambda pieces: constraint("json_schema", TOOL, pieces, [END]),
    "tools: 2 after any text": lambda pieces: tools(2, pieces),
    "tools: 20 after any text": lambda pieces: tools(20, pieces),
}


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.smoke:
        args.vocabulary, args.rows, args.rounds = 600, 2, 2
    pieces = vocabulary(args.vocabulary)
    settings = {name: getattr(args, name) for name in ("vocabulary", "rows", "rounds", "smoke")}
    found = harness.result("automata", settings)
    harness.print_machine(found)
    for name, build in CASES.items():
        found["cases"].append(measured(name, build, pieces, args.rows, args.rounds))
        harness.write(args.out, found)
    harness.print_table(HEADERS, map(row, found["cases"]))


HEADERS = [
    "",
    "states",
    "classes",
    "effects",
    "tables MiB",
    "build CPU s",
    "step CPU ms",
    "a step without ms",
]


def row(case: dict[str, Any]) -> list[str]:
    """Return a case's line of the table."""
    shown = [
        *(f"{case[key]:,}" for key in ("states", "classes", "effects")),
        f"{case['bytes'] / 2**20:.2f}",
    ]
    shown.append(f"{case['build_cpu_s']['median']:.2f}")
    return [
        case["case"],
        *shown,
        *(f"{1e3 * case[key]['median']:.2f}" for key in ("step_cpu_s", "free_step_cpu_s")),
    ]


def measured(
    name: str,
    build: Callable[[list[bytes]], Automaton],
    pieces: list[bytes],
    rows: int,
    rounds: int,
) -> dict[str, Any]:
    """Build the automaton a few times, then time compiled steps with every row in it and with no
    row in it.
    """
    device, made = default_device(), []
    times = [
        harness.timed(lambda: made.append(build(pieces)), torch.device("cpu"))
        for _ in range(min(rounds, 3))
    ]
    automaton = made[-1]
    states, classes = automaton.next_SC.shape
    tables = AutomatonTables.with_room_for([automaton], len(pieces), device)
    start = tables.acquire(automaton)
    assert start is not None
    token_B = torch.full((rows,), len(pieces) - 1, device=device)
    inside_B = torch.full((rows,), start, dtype=torch.int64, device=device)

    @torch.compile(fullgraph=True)
    def step(scores_BV: torch.Tensor, state_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masked_BV = scores_BV.masked_fill(~allowed_tokens(tables, state_B), -torch.inf)
        return masked_BV.argmax(-1), next_states(tables, state_B, token_B), is_over(tables, state_B)

    scores_BV = torch.randn(rows, len(pieces), device=device)
    calls = {
        "step": lambda: step(scores_BV, inside_B),
        "free": lambda: step(scores_BV, torch.zeros_like(inside_B)),
    }
    for call in calls.values():
        call()
    steps = harness.interleaved(calls, rounds, device)
    return {
        "case": name,
        "states": states,
        "classes": classes,
        "effects": len(automaton.effects),
        "bytes": 6 * states * classes
        + 9 * states
        + 16 * COUNTERS * len(automaton.effects)
        + 2 * len(pieces),
        "build_s": harness.spread([time.wall_s for time in times]),
        "build_cpu_s": harness.spread([time.cpu_s for time in times]),
        "step_cpu_s": harness.spread([time.cpu_s for time in steps["step"]]),
        "free_step_cpu_s": harness.spread([time.cpu_s for time in steps["free"]]),
    }


def vocabulary(size: int) -> list[bytes]:
    """Return distinct pieces like those of a byte-level BPE, without training one."""
    parts: Counter[bytes] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(parts) > 3 * size:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        for word, count in Counter(re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)).items():
            letters = word.encode()
            for length in range(2, min(len(letters), 12) + 1):
                parts[letters[:length]] += count
    pieces = dict.fromkeys(bytes([byte]) for byte in range(256))
    pieces |= dict.fromkeys(piece for piece, _ in parts.most_common(size))
    draw = random.Random(0)
    while len(pieces) < size:
        pieces[
            bytes(draw.choices(b"etaoinshrdlucm ETA0123456789\xc3\xa9", k=draw.randrange(3, 9)))
        ] = None
    return [b"", *pieces][:size]


if __name__ == "__main__":
    main()
