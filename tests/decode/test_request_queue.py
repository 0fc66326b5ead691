"""Run: pytest tests/decode/test_request_queue.py (which request gets the next row)."""

from __future__ import annotations

import random

from monograph.decode.knobs import Chain
from monograph.decode.request import Request
from monograph.decode.request_queue import RequestQueue, WaitingRequest
from monograph.decode.sampling import Sampling


def queue(owners: str) -> RequestQueue:
    """Requests 0, 1, ... of these owners, a letter each."""
    waiting = RequestQueue()
    for number, owner in enumerate(owners):
        waiting.add(entry(number, owner))
    return waiting


def entry(number: int, owner: str) -> WaitingRequest:
    return WaitingRequest(number, Request((1,), Sampling(), 1, owner=owner), Chain(), {})


def numbers(waiting: RequestQueue) -> list[int]:
    return [each.number for each in waiting]


def test_owners_have_their_turns_and_one_owners_requests_their_order() -> None:
    assert numbers(queue("aaaa")) == [0, 1, 2, 3]
    assert numbers(queue("aaaabbc")) == [0, 4, 6, 1, 5, 2, 3]
    waiting = queue("aaa")
    waiting.take()
    waiting.add(entry(3, "b"))
    assert numbers(waiting) == [1, 3, 2]


def test_they_are_taken_in_the_order_in_which_they_are_listed() -> None:
    draw = random.Random(0)
    for _ in range(50):
        waiting = queue("".join(draw.choices("abcd", k=12)))
        for number in draw.sample(range(12), 3):
            waiting.remove(number)
        waiting.remove(99)
        waiting.move_to_front(draw.choice([*waiting]))
        listed = numbers(waiting)
        assert len(waiting) == len(listed) == 9 and waiting.first.number == listed[0]
        assert [waiting.take().number for _ in listed] == listed and not waiting and not [*waiting]


def test_one_that_is_preferred_is_next_and_the_others_stay_in_order() -> None:
    waiting = queue("aabb")
    waiting.move_to_front([*waiting][3])
    assert numbers(waiting) == [3, 0, 2, 1]
