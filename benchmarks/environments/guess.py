"""Guess a number from 0 to 15 in four turns: after each guess the environment says "more" or "less"."""

import random
from collections.abc import Mapping
from typing import Any

NUMBERS = 16


class Guess:
    """The number is chosen when the episode begins."""

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Choose the number."""
        self.number = random.randrange(NUMBERS)
        return [{"role": "user", "content": "0 to 15"}]

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Return whether the number is more or less than the guess; 1 point if it is right."""
        guess = answer.strip()
        if not guess.isdigit() or int(guess) >= NUMBERS:
            return "a number", 0.0, False
        if int(guess) == self.number:
            return "right", 1.0, True
        return ("more" if int(guess) < self.number else "less"), 0.0, False
