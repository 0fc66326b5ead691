"""Write text into HTML."""

import html


def escaped(text: str) -> str:
    """Return a text that is safe inside HTML.

    HTML forbids control characters, so each one becomes a dot.
    """
    printable = (c if c.isprintable() or c in "\n\t" else "·" for c in text)
    return html.escape("".join(printable))
