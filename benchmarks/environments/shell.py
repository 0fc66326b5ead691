"""Find a file in a tiny file system by commands like those of a shell. Nothing of it is a real file."""

import random
from collections.abc import Mapping
from typing import Any

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "ls, cd FOLDER, cat FILE; a FILE may be FOLDER/NAME",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
WORDS = ("sun", "rain", "snow", "wind", "fog", "hail", "storm", "cloud")
FOLDERS = ("a", "b", "c")


class Shell:
    """One of three folders has a file, whose word is asked for."""

    tools = (SHELL,)

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Put the file into a folder."""
        self.folder = random.choice(FOLDERS)
        self.word = random.choice(WORDS)
        self.here = ""
        return [{"role": "user", "content": "What does the note say?"}]

    def step(self, answer: Mapping[str, Any]) -> tuple[str | None, float, bool]:
        """Return the output of a call; 1 point for the word, which ends the episode."""
        calls = answer["tool_calls"]
        if not calls:
            return None, float(answer["content"].strip() == self.word), True
        arguments = calls[0]["arguments"]
        command = arguments.get("command") if isinstance(arguments, dict) else None
        return self._output(str(command).split()), 0.0, False

    def _paths(self) -> set[str]:
        """Return what the file can be called from the present folder."""
        if self.here:
            return {"note"} if self.here == self.folder else set()
        return {f"{self.folder}/note"}

    def _output(self, words: list[str]) -> str:
        match words:
            case ["ls"]:
                names = FOLDERS if not self.here else ("note",) * (self.here == self.folder)
                return " ".join(names) or "nothing"
            case ["cd", ".."]:
                self.here = ""
                return "done"
            case ["cd", name] if name in FOLDERS:
                self.here = name
                return "done"
            case ["cat", path] if path in self._paths():
                return self.word
            case [("ls" | "cd" | "cat"), *_]:
                return "there is none"
        return "ls, cd or cat"
