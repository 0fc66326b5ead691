"""Write text into HTML."""

import html


def escaped(text: str) -> str:
    """Return the text made safe inside HTML; control characters, which HTML forbids, become a dot."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "·" for c in text))
