# Run: pytest tests/decode/automata/test_tables.py
"""The tables say on the device what the automata say on the host, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from automata_vocabularies import END, PAD, allowed_ids, state_after, vocabulary
from monograph.decode.automata import (
    DEAD,
    FREE,
    Automaton,
    Tables,
    advance,
    allowed,
    constraint,
    stop_strings,
    stopped,
)
from monograph.errors import InputRefused

PIECES = vocabulary("abé", longer=6)
AUTOMATA = [
    constraint("regex", "(ab)*", PIECES, [END]),
    stop_strings(["ab", "bb"], PIECES),
    constraint("choices", ["a", "bé"], PIECES, [END]),
]


def tables(automata: int = 4, states: int = 60, cells: int = 2000) -> Tables:
    return Tables(len(PIECES), torch.device("cpu"), automata=automata, states=states, cells=cells)


def agrees(there: Tables, automaton: Automaton, start: int) -> None:
    """Every state's mask, stop and successors are the automaton's own."""
    states = len(automaton.stops_S)
    state_B = torch.arange(start, start + states, dtype=torch.int32)
    mask_BV = allowed(there, state_B)
    assert [set(row.nonzero().flatten().tolist()) for row in mask_BV] == [
        allowed_ids(automaton, state) for state in range(states)
    ]
    assert stopped(there, state_B).tolist() == automaton.stops_S.tolist()
    for token in range(len(PIECES)):
        after = [state_after(automaton, [token], state) for state in range(states)]
        expected = [DEAD if state < 0 else state + start for state in after]
        found = advance(there, state_B, torch.full((states,), token))
        assert found.dtype == torch.int32 and found.tolist() == expected


def test_the_tables_say_what_the_automata_say() -> None:
    there = tables()
    starts = [there.place(automaton) for automaton in AUTOMATA]
    for automaton, start in zip(AUTOMATA, starts, strict=True):
        agrees(there, automaton, start)


def test_rows_without_an_automaton() -> None:
    there = tables()
    there.place(AUTOMATA[0])
    state_B, token_B = torch.tensor([FREE, DEAD], dtype=torch.int32), torch.tensor([PAD, 3])
    assert allowed(there, state_B).all(1).tolist() == [True, False] and not allowed(there, state_B)[1].any()
    assert advance(there, state_B, token_B).tolist() == [FREE, DEAD]
    assert not stopped(there, state_B).any()


def test_freed_room_is_used_again_and_nothing_moves() -> None:
    there = tables()
    tensors = [there.next_N, there.row_S, there.slot_S, there.stops_S, there.class_AV]
    addresses = [tensor.data_ptr() for tensor in tensors]
    first, second = there.place(AUTOMATA[0]), there.place(AUTOMATA[1])
    there.free(first)
    third = there.place(AUTOMATA[2])
    agrees(there, AUTOMATA[1], second)
    agrees(there, AUTOMATA[2], third)
    there.free(third)
    assert there.place(AUTOMATA[0]) == first
    agrees(there, AUTOMATA[0], first)
    agrees(there, AUTOMATA[1], second)
    now = [there.next_N, there.row_S, there.slot_S, there.stops_S, there.class_AV]
    assert [tensor.data_ptr() for tensor in now] == addresses


def test_an_automaton_is_there_once_for_all_its_users() -> None:
    there = tables(automata=1)
    start = there.place(AUTOMATA[0])
    assert there.place(AUTOMATA[0]) == start
    there.free(start)
    with pytest.raises(InputRefused, match="automata"):
        there.place(AUTOMATA[1])
    there.free(start)
    agrees(there, AUTOMATA[1], there.place(AUTOMATA[1]))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"states": 2}, "needs room for 5 states, and the tables have 2, of which at most 2 in one piece are free"),
        ({"cells": 5}, "needs room for .* cells, and the tables have 5"),
        ({"automata": 0}, "needs room for 1 automata, and the tables have 0"),
    ],
)
def test_no_room(sizes: dict[str, int], words: str) -> None:
    there = tables(**sizes)
    with pytest.raises(InputRefused, match=words):
        there.place(AUTOMATA[1])
    assert not there.stops_S.any()


def test_no_room_in_one_piece() -> None:
    sizes = [len(automaton.stops_S) for automaton in AUTOMATA]
    there = tables(states=sum(sizes))
    starts = [there.place(automaton) for automaton in AUTOMATA]
    there.free(starts[0])
    there.free(starts[2])
    larger = constraint("regex", "a{9}", PIECES, [END])
    with pytest.raises(InputRefused, match=f"at most {max(sizes[0], sizes[2])} in one piece are free"):
        there.place(larger)
    agrees(there, AUTOMATA[1], starts[1])


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputRefused, match="was made for .* tokens"):
        tables().place(stop_strings(["a"], PIECES[:-1]))


def test_compiled_is_eager_without_a_graph_break_or_a_recompile() -> None:
    """One graph, also when another automaton comes and goes."""
    there = tables()

    def step(state_B: torch.Tensor, token_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return allowed(there, state_B), advance(there, state_B, token_B), stopped(there, state_B)

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    captured = torch.compile(step, backend=graphs, fullgraph=True)
    for automaton in AUTOMATA:
        start = there.place(automaton)
        for token in range(2, len(PIECES), 3):
            state_B = torch.tensor([FREE, start, start + 1, DEAD], dtype=torch.int32)
            token_B = torch.full((4,), token)
            for ours, eager in zip(captured(state_B, token_B), step(state_B, token_B), strict=True):
                assert torch.equal(ours, eager)
    assert graphs.frame_count == 1


@pytest.mark.gpu
def test_replayed_on_a_gpu() -> None:
    """A captured CUDA graph follows automata that were placed after its capture."""
    device = torch.device("cuda")
    there = Tables(len(PIECES), device, automata=4, states=60, cells=2000)
    state_B = torch.zeros(3, dtype=torch.int32, device=device)
    token_B = torch.full((3,), 2, device=device)
    outputs = allowed(there, state_B), advance(there, state_B, token_B), stopped(there, state_B)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = allowed(there, state_B), advance(there, state_B, token_B), stopped(there, state_B)
    for automaton in AUTOMATA:
        start = there.place(automaton)
        state_B.copy_(torch.tensor([FREE, start, start + 1]))
        graph.replay()
        eager = allowed(there, state_B), advance(there, state_B, token_B), stopped(there, state_B)
        assert all(torch.equal(ours, expected) for ours, expected in zip(outputs, eager, strict=True))
