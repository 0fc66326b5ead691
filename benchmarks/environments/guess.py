"""Guess a number from 0 to 15 in four turns: after each guess the environment says "more" or "less".

The reward has two parts: 1 point if the guess is right, and -0.5 for a guess that is wasted, since what the
environment has said rules it out. The wasted guesses are what a weak player learns from first.
"""

import random
from collections.abc import Mapping
from typing import Any

NUMBERS = 16


class Guess:
    """The number is chosen when the episode begins, and is between `lowest` and `highest` as far as was said."""

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Choose the number."""
        self.number = random.randrange(NUMBERS)
        self.lowest = 0
        self.highest = NUMBERS - 1
        return [{"role": "user", "content": "0 to 15"}]

    def step(self, answer: str) -> tuple[str, dict[str, float], bool]:
        """Return whether the number is more or less than the guess."""
        said = answer.strip()
        guess = int(said) if said.isdecimal() else -1
        is_wasted = not self.lowest <= guess <= self.highest
        reward = {"right": float(guess == self.number), "wasted": -0.5 * is_wasted}
        if not 0 <= guess < NUMBERS:
            return "a number", reward, False
        if guess == self.number:
            return "right", reward, True
        if guess < self.number:
            self.lowest = max(self.lowest, guess + 1)
            return "more", reward, False
        self.highest = min(self.highest, guess - 1)
        return "less", reward, False
