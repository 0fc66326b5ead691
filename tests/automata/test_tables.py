# Run: pytest tests/automata/test_tables.py
"""The tables say on the device what the automata say on the host, whatever lies beside them."""

from __future__ import annotations

import random

import pytest
import torch
import torch._dynamo.testing

from automata_vocabularies import END, PAD, allowed_ids, state_after, vocabulary
from monograph.automata import Automaton, constraint, stop_strings
from monograph.decode import automaton_tables
from monograph.decode.automaton_tables import (
    DEAD,
    NO_AUTOMATON,
    AutomatonTables,
    allowed_tokens,
    is_over,
    next_states,
)
from monograph.errors import InputRefused

PIECES = vocabulary("abé", longer=6)
AUTOMATA = [
    constraint("regex", "(ab)*", PIECES, [END]),
    stop_strings(["ab", "bb"], PIECES),
    constraint("choices", ["a", "bé"], PIECES, [END]),
]


def tables(device: str = "cpu") -> tuple[AutomatonTables, list[int]]:
    """All automata, and where each begins."""
    there = AutomatonTables.with_room_for(AUTOMATA, len(PIECES), torch.device(device))
    starts = [start for automaton in AUTOMATA if (start := there.acquire(automaton)) is not None]
    assert len(starts) == len(AUTOMATA)
    return there, starts


def agrees(there: AutomatonTables, automaton: Automaton, start: int) -> None:
    """Every state's mask, stop and successors are the automaton's own."""
    states = len(automaton.stops_S)
    state_B = torch.arange(start, start + states, dtype=torch.int64)
    mask_BV = allowed_tokens(there, state_B)
    assert [set(row.nonzero().flatten().tolist()) for row in mask_BV] == [
        allowed_ids(automaton, state) for state in range(states)
    ]
    assert is_over(there, state_B).tolist() == automaton.stops_S.tolist()
    for token in range(len(PIECES)):
        after = [state_after(automaton, [token], state) for state in range(states)]
        expected = [DEAD if state < 0 else state + start for state in after]
        found = next_states(there, state_B, torch.full((states,), token))
        assert found.dtype == torch.int64 and found.tolist() == expected


def test_the_tables_say_what_the_automata_say() -> None:
    there, starts = tables()
    for automaton, start in zip(AUTOMATA, starts, strict=True):
        agrees(there, automaton, start)


@pytest.mark.slow
def test_the_tables_count_as_the_automata_do() -> None:
    """Two automata with counters beside others, followed through random texts, one of them with
    lists in lists.
    """
    pieces = [
        b"",
        b"",
        *(bytes([byte]) for byte in range(256)),
        b'["',
        b'","',
        b'"],["',
        b"ab",
        "éé".encode(),
        b'"]',
    ]
    rows = {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 5},
        "minItems": 2,
        "maxItems": 4,
    }
    made = [
        constraint("json_schema", schema, pieces, [END])
        for schema in (
            rows,
            {"type": "array", "items": rows, "maxItems": 3},
            {"type": "string", "maxLength": 900},
        )
    ]
    there = AutomatonTables.with_room_for(
        [*made, stop_strings(["ab"], pieces)], len(pieces), torch.device("cpu")
    )
    draw, compared = random.Random(0), 0
    for automaton in made:
        start = there.acquire(automaton)
        assert start is not None and automaton.has_counters
        for _ in range(12):
            state, state_1 = 0, torch.tensor([start])
            while not is_over(there, state_1):
                mine = allowed_ids(automaton, state)
                assert set(allowed_tokens(there, state_1)[0].nonzero().flatten().tolist()) == mine
                for token in (
                    draw.randrange(len(pieces)),
                    draw.choice(sorted(mine - {END}) or [END]),
                ):
                    after = automaton.after(state, token)
                    found = next_states(there, state_1, torch.tensor([token]))
                    assert found.tolist() == [DEAD if after < 0 else after + start]
                state, state_1 = after, found
                compared += 1
    assert compared > 300


def test_rows_without_an_automaton() -> None:
    for there in (tables()[0], AutomatonTables.with_room_for([], len(PIECES), torch.device("cpu"))):
        state_B, token_B = (
            torch.tensor([NO_AUTOMATON, DEAD], dtype=torch.int64),
            torch.tensor([PAD, 3]),
        )
        assert (
            allowed_tokens(there, state_B).all(1).tolist() == [True, False]
            and not allowed_tokens(there, state_B)[1].any()
        )
        assert next_states(there, state_B, token_B).tolist() == [NO_AUTOMATON, DEAD]
        assert not is_over(there, state_B).any()


def test_no_mask_is_computed_while_running_rows_may_have_any_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, (repeated, stops, _) = tables()
    computed: list[int] = []
    original = automaton_tables._computed_allowed_tokens

    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        computed.append(1)
        return original(*inputs)

    monkeypatch.setattr(automaton_tables, "_computed_allowed_tokens", compute)
    for states, running, is_computed in (
        ([NO_AUTOMATON, stops], [True, True], False),  # stop strings forbid nothing
        ([NO_AUTOMATON, DEAD, repeated], [True, False, False], False),
        ([NO_AUTOMATON, DEAD, repeated], [True, True, True], True),
        ([repeated, stops], [True, False], True),
    ):
        computed.clear()
        state_B = torch.tensor(states)
        running_B = torch.tensor(running)
        mask_BV = allowed_tokens(there, state_B, running_B)
        assert bool(computed) == is_computed
        assert torch.equal(mask_BV[running_B], allowed_tokens(there, state_B)[running_B])


def test_an_automaton_that_is_not_there() -> None:
    with pytest.raises(InputRefused, match="more than there is room for"):
        tables()[0].require(constraint("regex", "a{99}", PIECES, [END]))
    with pytest.raises(InputRefused, match="was made for .* tokens"):
        AutomatonTables.with_room_for(
            [stop_strings(["a"], PIECES[:-1])], len(PIECES), torch.device("cpu")
        )


def test_compiled_is_eager_in_one_graph() -> None:
    there, starts = tables()

    def step(state_B: torch.Tensor, token_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            allowed_tokens(there, state_B),
            next_states(there, state_B, token_B),
            is_over(there, state_B),
        )

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    captured = torch.compile(step, backend=graphs, fullgraph=True)
    for start in starts:
        for token in range(2, len(PIECES), 3):
            state_B = torch.tensor([NO_AUTOMATON, start, start + 1, DEAD], dtype=torch.int64)
            token_B = torch.full((4,), token)
            for ours, eager in zip(captured(state_B, token_B), step(state_B, token_B), strict=True):
                assert torch.equal(ours, eager)
    assert graphs.frame_count == 1


@pytest.mark.gpu
def test_replayed_on_a_gpu() -> None:
    there, starts = tables("cuda")
    state_B = torch.zeros(3, dtype=torch.int64, device="cuda")
    token_B = torch.full((3,), 2, device="cuda")
    outputs = (
        allowed_tokens(there, state_B),
        next_states(there, state_B, token_B),
        is_over(there, state_B),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = (
            allowed_tokens(there, state_B),
            next_states(there, state_B, token_B),
            is_over(there, state_B),
        )
    for start in starts:
        state_B.copy_(torch.tensor([NO_AUTOMATON, start, start + 1]))
        graph.replay()
        eager = (
            allowed_tokens(there, state_B),
            next_states(there, state_B, token_B),
            is_over(there, state_B),
        )
        assert all(
            torch.equal(ours, expected) for ours, expected in zip(outputs, eager, strict=True)
        )
