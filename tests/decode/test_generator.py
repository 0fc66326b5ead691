"""Run: pytest tests/decode/test_generator.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from batches import tiny_llama
from monograph.automata import constraint, stop_strings
from monograph.automata.on_host import (
    HostConstraint,
    HostVocabulary,
    has_llguidance,
    lark_of,
)
from monograph.decode.automaton_tables import AutomatonTables
from monograph.decode.cache import CacheSizes
from monograph.decode.chain import UNDECIDED, SampledTokens
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.prompt_reader import PromptToRead, ReuseKey
from monograph.decode.request import Finish, Pace, Request
from monograph.decode.sampling import Sampling
from monograph.errors import InputRefused, UsageError
from monograph.model.llama import Llama

VOCABULARY = 61
GREEDY = Sampling(0)


def generator(model: Llama | None = None, **options: Any) -> Generator:
    """Two rows of 24 slots."""
    chain = chain_of([GREEDY, Sampling(1.0)])
    return Generator(
        model or tiny_llama(),
        chain,
        **({"rows": 2, "slots": 24, "vocabulary": VOCABULARY, "pace": 4} | options),
    )


def outcome(machine: Generator, *requests: Request) -> list[tuple[list[int], Finish | None]]:
    """Every request's ids and how it ended."""
    found: dict[int, tuple[list[int], Finish | None]] = {
        machine.submit(each): ([], None) for each in requests
    }
    for event in machine.run():
        ids, finish = found[event.number]
        assert finish is None, "nothing comes after the end"
        found[event.number] = ids + event.token_ids, event.finish
    return list(found.values())


def counting(model: Llama) -> Llama:
    """A model that continues with the next number, whatever came before: 5 after 4."""

    def logits(hidden_BD: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot((read[0] + 1) % VOCABULARY, VOCABULARY).float()

    def remember(module: Any, arguments: tuple[torch.Tensor, ...], *_: Any) -> None:
        read[0] = arguments[0][:, -1]

    read: list[Any] = [None]
    model.register_forward_pre_hook(remember)
    model.logits = logits  # type: ignore[method-assign]
    return model


def request(*prompt: int, **options: Any) -> Request:
    """A greedy request of five tokens."""
    return Request(prompt, **({"sampling": GREEDY, "max_tokens": 5} | options))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block", [1, 2, 5, 16])
def test_limits_stops_and_the_end_of_the_cache(block: int, ahead: bool) -> None:
    machine = generator(counting(tiny_llama()), pace=block)
    machine.reads_behind = ahead
    found = outcome(
        machine,
        request(7),
        request(1, 2, 3, max_tokens=9, stop_ids=(6, 40)),
        request(*range(22), max_tokens=9),
        request(30, max_tokens=1),
        request(11, max_tokens=3, stop_ids=(14,)),
    )
    assert found == [
        ([8, 9, 10, 11, 12], "length"),
        ([4, 5, 6], "stop"),
        ([22, 23], "length"),
        ([31], "length"),
        ([12, 13, 14], "stop"),
    ]


def test_four_bytes_leave_the_device_per_row_and_step() -> None:
    machine = generator(counting(tiny_llama()))
    outcome(machine, request(1, max_tokens=10), request(2, max_tokens=8))
    assert machine.outbox.bytes_out == 4 * 2 * 10 and machine.blocks_read == 3


def test_a_prompt_is_read_once_for_all_its_continuations() -> None:
    machine, passes = generator(), []
    machine.reader.model.register_forward_pre_hook(
        lambda _, arguments: passes.append(arguments[0].shape[1])
    )
    outcome(
        machine,
        *[
            request(*range(20), sampling=Sampling(1.0, seed=seed), max_tokens=2)
            for seed in range(4)
        ],
    )
    assert passes.count(machine.reader.chunk) == -(-19 // machine.reader.chunk)


@pytest.mark.parametrize("prompt", [(3, 4, 5), (3,)])
@pytest.mark.parametrize("ahead", [False, True])
def test_numbers_that_are_not_finite_end_their_row_and_no_other(
    ahead: bool, prompt: tuple[int, ...]
) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = torch.nan
    machine = generator(model, rows=1)
    machine.reads_behind = ahead
    sound, healthy = request(*prompt), outcome(generator(model, rows=1), request(*prompt))
    ill = outcome(machine, request(17), sound, request(2, 17, 4, 17), sound, request(3, 17), sound)
    assert [finish for _, finish in ill[::2]] == ["not_finite"] * 3 and not any(
        ids for ids, _ in ill[::2]
    )
    assert ill[1::2] == healthy * 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_was_long_and_rests_does_not_keep_its_neighbour_from_a_short_look(
    ahead: bool,
) -> None:
    model = tiny_llama(max_position_embeddings=512)
    machine = generator(model, slots=300)
    machine.reads_behind = ahead
    long, short = (
        request(*range(20, 55), *range(50), *range(60), max_tokens=4),
        request(3, max_tokens=30),
    )
    assert outcome(machine, long, short) == [
        *outcome(generator(model, slots=300), long),
        *outcome(generator(model, slots=300), short),
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_where_the_fast_truncation_cannot_decide_the_exact_one_does(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monograph.decode import step

    requests = [
        request(3, max_tokens=11),
        request(4, 5, max_tokens=14),
        request(6, max_tokens=7, stop_ids=(9,)),
    ]
    expected, asked = outcome(generator(counting(tiny_llama())), *requests), []
    decide: Callable[..., SampledTokens] = step.sample

    def undecided(
        logits: Any, rows: Any, allowed: Any, chain: Any, truncation: str
    ) -> SampledTokens:
        asked.append(truncation)
        drawn = decide(logits, rows, allowed, chain, truncation)
        stuck = (rows.position_B % 4 == 2) & (truncation == "window")
        return drawn._replace(status_B=torch.where(stuck, UNDECIDED, drawn.status_B))

    monkeypatch.setattr(step, "sample", undecided)
    for block in (1, 3, 8):
        machine = generator(counting(tiny_llama()), pace=block)
        machine.reads_behind = ahead
        assert outcome(machine, *requests) == expected
    assert set(asked) == {"window", "search"}


def test_what_does_not_fit_is_refused() -> None:
    machine = generator()
    with pytest.raises(InputRefused, match="the prompt has 24 tokens, but a row has 24 positions"):
        machine.submit(request(*range(24)))
    with pytest.raises(UsageError, match="17 stop ids: at most 16"):
        machine.submit(request(1, stop_ids=tuple(range(17))))
    stop = stop_strings(["ab"], [b""] * VOCABULARY)
    with pytest.raises(InputRefused, match="the stop strings: .* more than there is room for"):
        machine.submit(request(1, stop_automaton=stop))
    with pytest.raises(UsageError, match="does not serve"):
        machine.submit(request(1, sampling=Sampling(1.0, top_p=0.5)))
    assert outcome(machine, request(*range(23))) == [
        ([outcome(generator(), request(*range(23)))[0][0][0]], "length")
    ]


def keys_of(machine: Generator, row: int, slots: int) -> list[torch.Tensor]:
    """The keys and values of a row's first slots, and its recurrences."""
    tensors = (*machine.cache.keys, *machine.cache.values)
    keys = [tensor[:, row].transpose(1, 2).flatten(0, 1)[:slots].clone() for tensor in tensors]
    return [*keys, *(tensor[row].clone() for tensor in machine.cache.recurrence_tensors())]


def test_the_prompts_of_all_owners_are_read_ahead_each_for_its_own() -> None:
    sizes = CacheSizes(24, longest_prompt=8, prompts_at_once=2)
    machine = generator(rows=1, slots=sizes)
    machine.submit(request(1, 2, 3, owner="a"))
    machine.submit(request(4, 5, 6, owner="b"))
    machine.advance()
    held = [machine.reader.rows_of([PromptToRead((4, 5, 6), ReuseKey(owner))]) for owner in "ab"]
    assert held == [[], [1]]


@pytest.mark.parametrize(
    "shape",
    [{}, {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention")}],
)
def test_chunks_that_two_prompts_have_in_common_are_read_once_in_the_same_bits(
    shape: dict[str, Any],
) -> None:
    def fresh() -> Generator:
        return generator(tiny_llama(max_position_embeddings=256, **shape), rows=3, slots=256)

    known = tuple(range(3, 60)) * 3
    prompt = (*known[:140], *range(20, 40))
    alone, machine = fresh(), fresh()
    outcome(alone, request(*prompt))
    # The first row is free while others run, and writes where it stands.
    outcome(machine, request(*known[:150], max_tokens=2), request(7, max_tokens=30))
    before = machine.reused
    assert (
        outcome(machine, request(*prompt, owner="another"))[0][1] == "length"
        and machine.reused == before
    )
    outcome(machine, request(*prompt))
    assert machine.reused - before == 2 * machine.reader.chunk == 128
    ours, expected = (
        keys_of(machine, machine._free_rows[-1], len(prompt) - 1),
        keys_of(alone, 0, len(prompt) - 1),
    )
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


# The recurrence takes in what attention has computed before it.
HYBRID = {"model_type": "qwen3_5_text", "layer_types": ("full_attention", "linear_attention")}


def ended(machine: Generator, asked: Request) -> tuple[int, list[int]]:
    """A request's number and its ids."""
    number, ids = machine.submit(asked), list[int]()
    while machine.can_advance:
        ids += [each for event in machine.advance() for each in event.token_ids]
    return number, ids


@pytest.mark.parametrize("shape", [{}, HYBRID])
@pytest.mark.parametrize("pace", [4, 3])
def test_a_row_that_is_kept_goes_on_whatever_ran_beside_it(
    pace: int, shape: dict[str, Any]
) -> None:
    """The steps of a short neighbour read one block, and the kept row stands in the third.

    With blocks of four steps nothing has read its last token yet when its request ends.
    """
    model = tiny_llama(max_position_embeddings=256, **shape)
    model.use_attention("cached")
    sizes = CacheSizes(64, 16, prompts_at_once=4, pads_products=True, longest_prompt=16)

    def fresh() -> Generator:
        return generator(model, rows=4, slots=sizes, pace=pace)

    prompt = tuple(range(3, 40))
    machine = fresh()
    number, ids = ended(machine, request(*prompt, max_tokens=4, keeps_row=True))
    assert (
        ended(machine, request(7, max_tokens=9))[1] == ended(fresh(), request(7, max_tokens=9))[1]
    )
    assert machine.running == 0 and len(machine._free_rows) == 3
    later = (*prompt, *ids, 5, 6)
    _, gone_on = ended(machine, request(*later, max_tokens=15, continues=number))
    assert len(machine._free_rows) == 4
    again = fresh()
    assert gone_on == ended(again, request(*later, max_tokens=15))[1]
    row = machine._free_rows[-1]
    ours, expected = keys_of(machine, row, len(later)), keys_of(again, 0, len(later))
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_a_row_that_is_kept_is_free_once_nothing_will_continue_it() -> None:
    machine = generator(pace=2)
    kept = [ended(machine, request(3, seed=seed, keeps_row=True))[0] for seed in range(2)]
    waiting = machine.submit(request(4))
    assert machine.busy and not machine.can_advance and not machine.advance()
    with pytest.raises(UsageError, match=f"request {waiting} has no row that is kept"):
        machine.submit(request(3, 4, 5, 6, 7, 8, 9, continues=waiting))
    with pytest.raises(UsageError, match="the prompt or the adapter is not that of request 0"):
        machine.submit(request(3, 4, continues=kept[0]))
    machine.cancel(kept[0])
    assert machine.can_advance and len(list(machine.run())) == 3
    going_on = machine.submit(request(*range(3, 12), continues=kept[1], keeps_row=True))
    machine.cancel(going_on)
    assert sorted(machine._free_rows) == [0, 1] and not machine.busy
    number, _ = ended(machine, request(3, keeps_row=True))
    machine.forget()
    assert sorted(machine._free_rows) == [0, 1]
    with pytest.raises(UsageError, match="has no row"):
        machine.submit(request(*range(3, 12), continues=number))


def test_a_pass_over_a_prompt_that_was_interrupted_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers' recurrences have taken the chunk by then, others have not."""
    shape = {"model_type": "qwen3_5_text", "layer_types": ("linear_attention",) * 2}
    model, prompt = tiny_llama(max_position_embeddings=256, **shape), [*range(3, 60)] * 3
    (sound, machine), passes = [generator(model, slots=256, rows=1) for _ in range(2)], [0]

    def interrupted(*_: Any) -> None:
        passes[0] += 1
        if passes[0] == 2:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupted)
    machine.submit(request(*prompt))
    with pytest.raises(KeyboardInterrupt):
        machine.advance()
    hook.remove()
    machine.cancel(0)
    assert outcome(machine, request(*prompt)) == outcome(sound, request(*prompt))
    assert all(
        torch.equal(*pair)
        for pair in zip(
            machine.cache.recurrence_tensors(), sound.cache.recurrence_tensors(), strict=True
        )
    )


def test_a_cancelled_request_frees_its_row_before_the_next_block() -> None:
    machine = generator(counting(tiny_llama()), rows=1)
    first, second = (
        machine.submit(request(7, max_tokens=20)),
        machine.submit(request(30, max_tokens=2)),
    )
    third = machine.submit(request(40))
    assert [event.number for event in machine.advance()] == [first]
    machine.cancel(first)
    machine.cancel(third)
    events = list(machine.run())
    assert {event.number for event in events} == {second} and events[-1].finish == "length"
    assert sum((event.token_ids for event in events), []) == [31, 32]


def test_a_long_prompt_is_read_between_the_blocks_of_others() -> None:
    model = tiny_llama(max_position_embeddings=512)
    machine = generator(model, slots=512, pace=Pace(4, 2, 1))
    machine.submit(request(7, max_tokens=40))
    machine.advance()
    machine.submit(request(*[5] * 400))
    seen, drawn = [], 0
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[1]))
    while machine._queue:
        drawn += sum(len(event.token_ids) for event in machine.advance())
    # A chunk and then two steps, until the seven chunks of the prompt are read and it has its first
    # tokens; then four.
    machine.advance()
    assert seen == [64, 1, 1] * 7 + [1, 1, 1, 1] and drawn == 2 * 6 + 2 * 2


def test_an_automaton_in_the_middle_of_the_arena_is_in_nobodys_way() -> None:
    """What came before lies first, so the next one lies where neither side has room for the third."""
    pieces = [bytes([97 + index % 26]) * (1 + index // 26) for index in range(VOCABULARY)]
    first, middle, last = (stop_strings([text], pieces) for text in ("x" * 6, "y" * 20, "z" * 9))
    states = len(middle.next_SC) + len(last.next_SC) + 2
    machine = generator(automata=AutomatonTables(VOCABULARY, torch.device("cpu"), states=states))
    outcome(machine, request(1, stop_automaton=first))
    outcome(machine, request(1, constraint=middle))
    number = machine.submit(request(1, constraint=middle, stop_automaton=last))
    for _ in range(20):
        if any(event.number == number and event.finish for event in machine.advance()):
            break
    assert not machine.busy


def test_a_request_whose_automaton_finds_no_room_holds_up_none_without_any() -> None:
    pieces = [bytes([97 + index % 26]) * (1 + index // 26) for index in range(VOCABULARY)]
    first, second = (stop_strings([text], pieces) for text in ("x" * 20, "y" * 20))
    machine = generator(
        automata=AutomatonTables(VOCABULARY, torch.device("cpu"), states=len(first.next_SC) + 2)
    )
    stops, started = [first, second, first, None], list[int]()
    numbers = [
        machine.submit(request(index, stop_automaton=stop, max_tokens=9))
        for index, stop in enumerate(stops, 1)
    ]
    for event in machine.run():
        started += [event.number] * (event.number not in started)
    # Nobody keeps the room from the second.
    assert started == [numbers[index] for index in (0, 3, 1, 2)]


@pytest.mark.skipif(not has_llguidance(), reason="llguidance is missing")
@pytest.mark.parametrize("behind", [False, True])
def test_what_the_host_follows_is_of_the_grammar_whatever_runs_beside(behind: bool) -> None:
    pieces = [b"", b"(", b")", b"()", *(b"%d" % token for token in range(4, VOCABULARY))]
    lark = lark_of("grammar", 'root ::= "(" root ")" root | ""')
    nested = HostConstraint(lark, HostVocabulary(pieces, [0]), InputRefused("no automaton"))
    drawn = Sampling(1.0)
    formed = [
        Request((1, 2), drawn, 12, (0,), host_constraint=nested, seed=seed) for seed in range(12)
    ]
    free = [Request((1, 2), drawn, 12, (0,), seed=seed) for seed in range(4)]

    def machine() -> Generator:
        found = generator(rows=3, automata=AutomatonTables(VOCABULARY, torch.device("cpu")))
        found.reads_behind = behind
        return found

    alone = [outcome(machine(), each)[0] for each in (*formed, *free)]
    order = [*range(6), 12, 13, *range(6, 12), 14, 15]
    mixed = machine()
    together = outcome(mixed, *([*formed, *free][index] for index in order))
    assert together == [alone[index] for index in order]
    finishes = set()
    for ids, finish in alone[:12]:
        text = b"".join(pieces[token] for token in ids).decode()
        assert set(text) <= set("()")
        depths = [text[:end].count("(") - text[:end].count(")") for end in range(len(text) + 1)]
        assert min(depths) >= 0 and (finish == "length" or depths[-1] == 0)
        finishes.add(finish)
    assert finishes == {"stop", "length"} and mixed.masks > 0


def test_a_step_without_an_automaton_that_allows_all_changes_no_token() -> None:
    """The host follows an automaton by itself while it allows every token, and the steps do without it."""
    pieces = [b"", *(bytes([64 + token]) for token in range(1, VOCABULARY - 1)), b"ABC"]
    # After an A, of which there is one in a while, BC must follow, and after two of them the text ends.
    calls = constraint("regex", "[^A]*(ABC[^A]*)?|[^A]*ABC[^A]*ABC", pieces, [0])
    assert calls.allows_all_S[0] and not calls.allows_all_S.all()
    asked = [
        Request((1, 2), Sampling(1.0), 20, (0,), constraint=calls, seed=seed) for seed in range(30)
    ]
    free = [Request((1, 2), Sampling(1.0), 20, (0,), seed=seed) for seed in range(4)]

    def found(tracks: bool) -> tuple[list[tuple[list[int], Finish | None]], set[bool]]:
        machine = generator(rows=3, pace=1, automata=[calls], model=sharp())
        followed = set[bool]()
        run = machine.replays.run

        def watched(*arguments: Any) -> None:
            followed.add(arguments[-1])
            run(*arguments)

        machine.replays.run = watched  # type: ignore[method-assign]
        machine.reads_behind = not tracks
        return outcome(machine, *asked, *free), followed

    outcomes, followed = found(True)
    expected, always = found(False)
    assert outcomes == expected and followed == {False, True} and always >= {True}
    texts = [b"".join(pieces[token] for token in ids) for ids, _ in outcomes[: len(asked)]]
    assert any(b"ABC" in text for text in texts)
    assert any(text.endswith(b"ABC") and text.count(b"ABC") == 2 for text in texts)


def sharp() -> Llama:
    """A model that likes A, and ABC."""
    model = tiny_llama()
    model.lm_head.weight.data[[1, VOCABULARY - 1]] *= 3
    return model
