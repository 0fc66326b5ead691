"""Add three numbers with a calculator that adds two."""

from collections.abc import Mapping
from typing import Any

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Calculator:
    """A record has three "numbers". The last word of the answer without a call is what counts."""

    tools = (ADD,)

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Ask for the sum."""
        self.numbers = record["numbers"]
        one, two, three = self.numbers
        return [{"role": "user", "content": f"Add {one}, {two} and {three} ."}]

    def step(self, answer: Mapping[str, Any]) -> tuple[str | None, float, bool]:
        """Return the sum of a call; 1 point for the right sum of all numbers, which ends the episode."""
        calls = answer["tool_calls"]
        if not calls:
            said = answer["content"].split()
            return None, float(said[-1:] == [str(sum(self.numbers))]), True
        arguments = calls[0]["arguments"]
        is_call = isinstance(arguments, dict) and set(arguments) == {"a", "b"}
        if not is_call or not all(type(each) is int for each in arguments.values()):
            return "error: two numbers, a and b", 0.0, False
        return f"= {arguments['a'] + arguments['b']}", 0.0, False
