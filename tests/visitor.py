"""Visits pages as a person would, in a headless Chromium (tests/chromium.py); a process of its own.

    python tests/visitor.py light|dark

Each line of its input is a step as JSON, [name, arguments...], and is answered with one line:
[true, what was found] or [false, what went wrong]. `Visitor` is the other end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

PATIENCE_S = 60


class Visitor:
    """Drives the browser; each method is a step of `Steps`, and raises `AssertionError` with what
    went wrong.
    """

    def __init__(self, scheme: str) -> None:
        command = [sys.executable, __file__, scheme]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __getattr__(self, step: str) -> Any:
        def take(*arguments: object) -> Any:
            assert self.process.stdin is not None and self.process.stdout is not None
            print(json.dumps([step, *arguments]), file=self.process.stdin, flush=True)
            done, found = json.loads(self.process.stdout.readline())
            assert done, found
            return found

        return take

    def close(self) -> None:
        self.process.communicate()


class Steps:
    def visit(self, url: str) -> None:
        """Opens the page as somebody who was never here."""
        self.leave()
        self.view = View(QUrl(url))
        self.view.window.setFocus()

    def leave(self) -> None:
        if hasattr(self, "view"):
            self.view.window.close()
            sip.delete(self.view.page)  # before its profile, which Qt demands
            del self.view

    def read(self, code: str) -> Any:
        return self.view.evaluate(code)

    def wait(self, code: str) -> Any:
        """Waits until the expression is true, and returns it."""
        until = time.monotonic() + PATIENCE_S
        while not (found := self.view.evaluate(code)):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {code}")
            rest(30)
        return found

    def type(self, text: str) -> None:
        QTest.keyClicks(self.view.window.focusProxy(), text)
        rest(40)

    def press(self, keys: str) -> None:
        """Presses a key, such as Tab or Ctrl+Return."""
        *held, key = keys.split("+")
        names = {
            "Ctrl": Qt.KeyboardModifier.ControlModifier,
            "Shift": Qt.KeyboardModifier.ShiftModifier,
        }
        modifiers = Qt.KeyboardModifier.NoModifier
        for each in held:
            modifiers |= names[each]
        QTest.keyClick(self.view.window.focusProxy(), getattr(Qt.Key, f"Key_{key}"), modifiers)
        rest(40)

    def _middle(self, code: str) -> QPoint:
        box = self.view.evaluate(
            f"(({{ x, y, width, height }}) => [x, y, width, height])(({code}).getClientRects()[0])"
        )
        return QPoint(int(box[0] + box[2] / 2), int(box[1] + box[3] / 2))

    def hover(self, code: str) -> None:
        """Moves the mouse over an element, given as an expression."""
        QTest.mouseMove(self.view.window.focusProxy(), self._middle(code))
        rest()

    def click(self, code: str) -> None:
        QTest.mouseClick(
            self.view.window.focusProxy(), Qt.MouseButton.LeftButton, pos=self._middle(code)
        )
        rest(40)

    def resize(self, width: int, height: int) -> None:
        self.view.window.resize(width, height)
        rest(300)

    def picture(self, path: str) -> None:
        rest(300)
        self.view.window.grab().save(path)

    def said(self) -> list[str]:
        return self.view.page.said

    def asked(self) -> list[str]:
        return self.view.listener.asked


def main(scheme: str) -> None:
    application, steps = started(scheme), Steps()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = [True, getattr(steps, name)(*arguments)]
        except Exception as error:
            answer = [False, f"{name}{arguments}: {type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)
    steps.leave()
    del application
    os._exit(0)  # Chromium's own end waits for a display server


if __name__ == "__main__":
    import os

    from PyQt6 import sip
    from PyQt6.QtCore import QPoint, Qt, QUrl
    from PyQt6.QtTest import QTest

    from chromium import View, rest, started

    main(sys.argv[1])
