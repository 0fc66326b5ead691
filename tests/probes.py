"""Strings that tell ways of splitting text apart: scripts, cases, digits, spaces, contractions,
marks, broken order.
"""

from __future__ import annotations

import random

_PARTS = [
    "the", "The", "THE", "camelCase", "HTTPServer", "snake_case", "don't", "DON'T", "I'll", "we'Ve",
    "x's", "'s", "'S", "'", "0", "7", "42", "123", "1234", "3.14", "1,000,000", "²", "½", "Ⅷ", "٣٤",
    "१२३", "0x1F", "v2beta3", "_", "__init__", " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n",
    "\r", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\x0b", "\x0c", ".", "...", "!?", "//", "/",
    "=>", "->", "(", ")", "[]", "{", "}", "#", "@x", "$5", "%", "&&", "<br/>", "<|x|>", "\\", "`", "é",
    "É", "naïve", "ÄÖÜ", "straße", "ﬁ", "Ω", "ωμέγα", "ЁЖ", "привет", "שלום", "مرحبا", "हिन्दी", "ไทย",
    "中文", "数据", "日本語", "ひらがな", "カタカナ", "한국어", "ǅ", "ʰ", "ª", "𝒳", "𐍈", "e\u0301",
    "\u0301", "a\u0308b",
    "🙂", "👩‍👩‍👧", "🇩🇪", "✓", "→", "“q”", "—", "…", "\u200b", "\u200d", "\ufeff", "\ufffd", "\x01",
    "\x7f", "def f(x):", "return", "self.x", "==", "import os", "<|bos|>", "<|eos|>",
]  # fmt: skip


def probes(count: int, seed: int = 0) -> list[str]:
    """Each part alone, then one to twelve of them in random order, half of them without spaces
    between.
    """
    draws = random.Random(seed)
    made = list(_PARTS)
    while len(made) < count:
        joint = draws.choice(["", "", " "])
        made.append(joint.join(draws.choice(_PARTS) for _ in range(draws.randint(1, 12))))
    return made[:count]
