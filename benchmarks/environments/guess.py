"""Guess a number from 0 to 15 in four turns: after each guess the environment says what is left."""

import random
from collections.abc import Mapping
from typing import Any

NUMBERS = 16


class Guess:
    """The number is chosen when the episode begins."""

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Choose the number."""
        self.number = random.randrange(NUMBERS)
        self.lowest = 0
        self.highest = NUMBERS - 1
        return [{"role": "user", "content": self._left()}]

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Return which numbers the guess has left; 1 point if it is right."""
        said = answer.strip()
        guess = int(said) if said.isdecimal() else -1
        if guess == self.number:
            return "right", 1.0, True
        if self.lowest <= guess < self.number:
            self.lowest = guess + 1
        elif self.number < guess <= self.highest:
            self.highest = guess - 1
        return self._left(), 0.0, False

    def _left(self) -> str:
        return f"{self.lowest} to {self.highest}"
