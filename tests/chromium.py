"""Opens pages in a headless Chromium (that of Qt's WebEngine) and prints what it saw as JSON; a
process of its own.

    python tests/chromium.py light|dark FOLDER PAGE.html...

FOLDER gets a picture of each page, whole, at the width of a desk and at that of a phone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PyQt6.QtCore import QEventLoop, Qt, QTimer, QUrl
from PyQt6.QtGui import QColor, QPixmap
from PyQt6.QtTest import QTest
from PyQt6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineScript,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

SCHEMES = {"dark": 0, "light": 1}  # blink's preferredColorScheme
WIDE, NARROW, HIGH, TALLEST = 1280, 400, 900, 8000
PATIENCE_MS = 60_000
# The table whose first column is sorted by the keyboard alone.
TABLE = "document.querySelector('table.sortable')"
ORDER = f"[...{TABLE}.tBodies[0].rows].map((row) => row.textContent)"
PRESSES = ("Return", "Space", "Return")
BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number)"
MARK = "#ff00ff"
MARKED = f"""(() => {{
  const mark = Object.assign(document.createElement('div'), {{ id: 'mark' }});
  mark.style = 'position: fixed; z-index: 9; left: 0; right: 0; bottom: 0; height: 2px; background: {MARK}';
  return document.body.append(mark) || 1;
}})()"""
UNMARKED = "document.getElementById('mark').remove() || 1"
WATCHED = (Path(__file__).parent / "watched.js").read_text()


class Page(QWebEnginePage):
    """A page that keeps what is said on its console."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
        self.said.append(f"{source}:{line}: {message}")


class Listener(QWebEngineUrlRequestInterceptor):
    """Keeps what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def interceptRequest(self, info: Any) -> None:
        self.asked.append(info.requestUrl().toString())


def wait(begin: Callable[[Callable[[Any], None]], None]) -> Any:
    """What `begin` is answered with, later."""
    loop, answers = QEventLoop(), list[Any]()

    def answer(value: Any) -> None:
        answers.append(value)
        loop.quit()

    QTimer.singleShot(PATIENCE_MS, loop.quit)
    begin(answer)
    if not answers:
        loop.exec()
    if not answers:
        raise TimeoutError("Chromium does not answer")
    return answers[0]


def rest(milliseconds: int = 150) -> None:
    wait(lambda answer: QTimer.singleShot(milliseconds, lambda: answer(None)))


class View:
    """One page in a window."""

    def __init__(self, url: QUrl) -> None:
        self.url, self.profile, self.listener = url, QWebEngineProfile(), Listener()
        self.profile.setUrlRequestInterceptor(self.listener)
        self.page, self.window = Page(self.profile), QWebEngineView()
        script = QWebEngineScript()
        script.setSourceCode(WATCHED)
        script.setInjectionPoint(QWebEngineScript.InjectionPoint.DocumentCreation)
        script.setWorldId(QWebEngineScript.ScriptWorldId.MainWorld.value)
        self.page.scripts().insert(script)
        self.window.setPage(self.page)
        self.window.resize(WIDE, HIGH)
        self.window.show()
        assert wait(self._load), f"{url.toString()}: not loaded"
        rest()

    def _load(self, answer: Callable[[Any], None]) -> None:
        self.page.loadFinished.connect(answer)
        self.page.load(self.url)

    def evaluate(self, code: str) -> Any:
        return json.loads(
            wait(lambda answer: self.page.runJavaScript(f"JSON.stringify({code})", answer))
            or "null"
        )

    def press(self, key: str) -> None:
        QTest.keyClick(self.window.focusProxy(), getattr(Qt.Key, f"Key_{key}"))
        rest(40)

    def looked_at(self, width: int, picture: Path) -> dict[str, Any]:
        """What tests/watched.js finds wrong with the page at a width; the whole page is drawn as a
        picture.
        """
        self.window.resize(width, HIGH)
        rest(300)
        high = min(TALLEST, int(self.evaluate("document.documentElement.scrollHeight")))
        self.window.resize(width, high)
        while self.evaluate("innerHeight") != high:
            rest(30)
        self._painted().save(str(picture))
        found: dict[str, Any] = self.evaluate("watched.faults()")
        return found

    def _painted(self) -> QPixmap:
        """The window's picture, once the lowest of the page is in it: a mark of one pixel, which is
        then taken away.
        """
        self.evaluate(MARKED)
        for _ in range(60):
            image = self.window.grab().toImage()
            if image.pixelColor(image.width() // 2, image.height() - 1) == QColor(MARK):
                break
            rest(50)
        self.evaluate(UNMARKED)
        for _ in range(60):
            picture = self.window.grab()
            image = picture.toImage()
            if image.pixelColor(image.width() // 2, image.height() - 1) != QColor(MARK):
                break
            rest(50)
        return picture

    def sorted_by_keyboard(self) -> dict[str, Any] | None:
        """What pressing the first column's name does, reached by the tabulator alone; None: it is
        never reached.
        """
        self.window.resize(WIDE, HIGH)
        self.window.setFocus()
        for _ in range(200):
            self.press("Tab")
            if self.evaluate(f"document.activeElement === {TABLE}.querySelector('button')"):
                break
        else:
            return None
        outline = self.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        given, steps = self.evaluate(ORDER), []
        for key in PRESSES:
            self.press(key)
            steps.append(
                [
                    self.evaluate(f"{TABLE}.querySelector('th').getAttribute('aria-sort')"),
                    self.evaluate(ORDER),
                ]
            )
        return {"outline": outline, "given": given, "steps": steps}


def seen(path: Path, scheme: str, folder: Path) -> dict[str, Any]:
    view = View(QUrl.fromLocalFile(str(path)))
    pictures = {width: folder / f"{path.stem}-{scheme}-{width}.png" for width in (NARROW, WIDE)}
    return {
        "agent": view.evaluate("navigator.userAgent"),
        "background": view.evaluate(BACKGROUND),
        "looked_at": {width: view.looked_at(width, picture) for width, picture in pictures.items()},
        "keyboard": view.sorted_by_keyboard(),
        "said": view.page.said,
        "asked": view.listener.asked,
    }


def started(scheme: str) -> QApplication:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    flags = f"--disable-gpu --no-sandbox --blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = flags
    return QApplication([sys.argv[0]])


def main(scheme: str, folder: Path, pages: list[Path]) -> None:
    application = started(scheme)
    print(json.dumps({path.stem: seen(path, scheme, folder) for path in pages}))
    sys.stdout.flush()
    del application
    os._exit(0)  # Chromium's own end waits for a display server


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(name).resolve() for name in sys.argv[3:]])
