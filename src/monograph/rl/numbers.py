r"""Read a number from a text, as people, LaTeX and programs write it. One grammar serves answers
and what they must be.

    number    = [sign] [currency] [sign] value [magnitude]         at most one sign
    value     = decimal [exponent] | power | decimal "/" [sign] decimal | whole " " whole "/" whole
    decimal   = whole ["." digits] | "." digits
    whole     = digits | digits in groups of three, parted by one and the same separator
    exponent  = ("e" | "E") [sign] digits | times power
    power     = "10" ("^" | "**") [sign] digits
    magnitude = hundred, thousand, million, billion or trillion

- A separator of groups is a comma, an apostrophe or what looks like one, an underscore, a thin,
  narrow or no-break space, or LaTeX's `{,}`, `,\!`, `\,`, `\;`, `\:`, `~` and "\ ". Commas also
  part the groups of two of India. A space of the keyboard parts nothing, as it also stands between
  two numbers.
- A sign is a hyphen, a minus sign, an en dash or a plus sign. Between two numbers, as in 10-12, it
  is none.
- Times is `\times`, `\cdot`, ×, · or *; a fraction may be `\frac` and its like, or one character
  such as ½.
- Digits of every script are digits, also raised ones in exponents.
- Units count for nothing: "%" as well as words, `\text{...}` and degrees. A unit that follows
  without a space is one of UNITS, so that 3x is no number.

What joins digits otherwise makes no number: 3,5 (a decimal in one country, a list in another),
1.234,56, 1.2.3, 10:30, 2^{10}, 3\sqrt{2}, 6*7. Such a text is not understood, and no part of it is
taken for a number.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

# Of a number, and of its exponent's value: more would take memory out of proportion.
MOST_DIGITS = 4000
UNITS = frozenset(
    "m g s h L l W V A N J C F Hz km cm mm nm kg mg lb lbs oz ft in yd mi mph ml mL kW MW mAh st nd rd th am pm AM PM "
    "hr hrs min mins sec secs ms h day days week weeks hour hours minute minutes second seconds USD EUR GBP".split()
)

_GAP = "\u00a0"  # stands for every space that may part groups of digits
_NONE = "\ufffc"  # stands for what makes its neighbour no number, such as a root
_FRACTION = "\u2044"
_MARKS = "\u02b0-\u02ff\u0300-\u036f"  # signs that look like separators, and accents
_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_CHARACTERS = str.maketrans(
    dict.fromkeys(_MINUS, "-")
    | dict.fromkeys("\u00a0\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f", _GAP)
    | dict.fromkeys("\u3000\u2000\u2001\u2002\u2003\t", " ")
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")
    | dict.fromkeys("√∛∜π∞", _NONE)
    | dict(zip("＋，．／：＾＊％＄（）＝＿｛｝＼", "+,./:^*%$()=_{}\\", strict=True))
    | {"·": "×", "⋅": "×", "∙": "×", "∗": "*", "∕": "/", "\u066b": ".", "\u066c": ","}
    | dict.fromkeys("’‘‛´`′＇\u02b9\u02bb\u02bc\u02bd\u02c8", "'")
)
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_RAISED = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_VULGAR = re.compile(rf"(?P<whole>[0-9]?)[ {_GAP}]?(?P<part>[¼½¾⅐-⅞])")

# ── LaTeX ─────────────────────────────────────────────────────────────────────────────────────────

_DEEPEST = 12  # braces in braces
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_ARGUMENT = r"\s*(?:\{{(?P<{0}>[^{{}}]*)\}}|(?P<{0}_digit>[0-9]))"
_INNERMOST = re.compile(
    rf"\\[dtc]?frac{_ARGUMENT.format('over')}{_ARGUMENT.format('under')}(?![0-9])"
    r"|\\(?![dtc]?frac)(?P<name>[a-zA-Z]+)\*?\s*(?:\[[^\[\]{}]*\])?\s*\{(?P<argument>[^{}]*)\}"
    r"|(?P<shift>[\^_])\s*\{(?P<shifted>[^{}]*)\}"
    r"|(?<!\\)\{(?P<inner>[^{}]*)\}"
)
_SHOWN_AS_IT_IS = frozenset(
    "text textbf textit textrm textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mbox hbox operatorname emph "
    "underline bm boldsymbol boxed fbox".split()
)
_OF_LAYOUT = frozenset(
    "begin end label tag color hspace vspace phantom left right big Big bigg Bigg bigl bigr Bigl Bigr quad qquad "
    "displaystyle textstyle scriptstyle limits newline hline therefore because implies iff Rightarrow rightarrow "
    "Longrightarrow longrightarrow to approx simeq sim equiv square blacksquare checkmark boxed fbox rm bf it "
    "thinspace enspace medspace".split()
)
_SIGNS = {
    "times": "×",
    "cdot": "×",
    "ast": "*",
    "div": "÷",
    "pm": "±",
    "mp": "±",
    "circ": "°",
    "degree": "°",
    "ldots": "…",
    "dots": "…",
    "cdots": "…",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
    "lt": "<",
    "gt": ">",
    "ne": "≠",
    "neq": "≠",
    "percent": "%",
    "euro": "€",
    "pounds": "£",
}
_COMMAND = re.compile(r"\\(?:(?P<name>[a-zA-Z]+)|(?P<sign>[^a-zA-Z]))")
_PARTS = re.compile(r"\\[,;: ]|\\thinspace(?![a-zA-Z])|\\>")

# ── numbers ───────────────────────────────────────────────────────────────────────────────────────

_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CURRENCY = "$€£¥₹₩"
# Digits with all that may join them to one thing, a number or not.
_JOINED = re.compile(
    rf"""
    (?P<lead>
        (?: (?: (?<![\w)\]{_NONE}-])[-+](?=[^ ]) | (?:\A|(?<=[=(:$])|(?<=[=:][ ]))[ ]*[-+][ ]+ ) )?
        (?: [{_CURRENCY}][ ]?[-+]? )?
    )
    (?P<core>
        (?: (?<![A-Za-z0-9)])\. )? [0-9]
        (?: [0-9]
          | [.,'_:{_GAP}{_MARKS}](?=[0-9])
          | [eE][-+]?(?=[0-9])
          | [ ]?(?:[×÷/^{_FRACTION}+]|\*\*?)[ ]?-?[ ]?(?=\.?[0-9])
          | [ ](?=[0-9]+[ ]?[/{_FRACTION}][ ]?[0-9])  # one and a half: 1 1/2
          | (?<![0-9]{{4}})[ ](?=[0-9]{{3}}(?![0-9]))  # 10 000, or two numbers
        )*+
    )
    (?P<magnitude> (?: [ {_GAP}]?(?:{"|".join(_MAGNITUDES)})s?\b )* )
    """,
    re.VERBOSE,
)


def _decimal_of(separator: str) -> str:
    """Return the expression of a decimal; `separator` is the name of the group that holds its first
    separator.
    """
    grouped = (
        rf"[1-9][0-9]{{0,2}}(?P<{separator}>[,'_{_GAP}])[0-9]{{3}}(?:(?P={separator})[0-9]{{3}})*"
    )
    indian = "[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}"
    return rf"(?:(?:{grouped}|{indian}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"


_POWER = r"10(?:\^|\*\*)[-+]?[0-9]+"
_VALUE = re.compile(
    rf"(?P<decimal>{_decimal_of('by')})(?:[eE](?P<exponent>[-+]?[0-9]+)|[×*](?P<power>{_POWER}))?"
    rf"|(?P<alone>{_POWER})"
    rf"|(?P<over>{_decimal_of('by_over')})[/{_FRACTION}](?P<under>-?{_decimal_of('by_under')})"
    rf"|(?P<whole>[0-9]+)[ ](?P<share>[0-9]+)[/{_FRACTION}](?P<of>[0-9]+)"
)
_SIMPLE = re.compile(rf"[-+]?{_decimal_of('by')}")
_SPACED = re.compile(rf"[ ]*([×÷*/^{_FRACTION}+])[ ]*")
_SPACES = re.compile(" {2,}")
_TIE = re.compile("(?<=[0-9])~(?=[0-9])")  # LaTeX's no-break space
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?[xX] ?(?=10 ?(?:\^|\*\*))")
_RAISED_UNIT = re.compile(r"(?<=[A-Za-z]) ?\^ ?[23](?![0-9])")

_BEFORE = re.compile(
    rf"(?:[A-Za-z0-9_^/×÷±\\-]|[A-Za-z)\]]\.|[0-9]\(|[A-Za-z0-9)][ ]?\*+[ ]?|[×÷±][ ]|{_NONE}[ {_GAP}]?)\Z"
)
_MONEY_BEFORE = re.compile(r"(?:(?<![A-Za-z])(?:Rs\.?|USD|US|EUR|GBP))\Z")
_SIGN_IN_WORDS = re.compile(r"(?:minus|negative)[ ]\Z", re.IGNORECASE)
_RANGE_BEFORE = re.compile(r"[\w)\]]-\Z")
_AFTER = re.compile(
    rf"""
      \.?[ {_GAP}]?{_NONE}
    | [_^(]
    | [ ]?[×÷^±{_FRACTION}]
    | [ ]?(?:\+|\*)[ ]?[A-Za-z0-9(\\{_NONE}]
    | /[ ]?[^A-Za-z] | /[A-Za-z](?![A-Za-z])
    | -[ ]?[A-Za-z](?![A-Za-z])
    | [ {_GAP}](?![aAI](?![A-Za-z]))(?P<letter>[A-Za-z])(?![A-Za-z'.])
    | (?P<word>[A-Za-z]+)
    | [ ](?:and[ ](?:a|one)[ ])?(?:half|halves|quarters?|thirds?|dozens?)\b
    """,
    re.VERBOSE,
)
_WITHOUT_END = re.compile(r"\.\.|…")
# What may stand around the number that an answer is: words, their signs, and signs of layout.
_WORDS = re.compile(
    rf"(?:[-/](?=[^\W\d_]))?(?:[^\W\d_]|[\s.,;:?()\[\]\"'%°#=≈*|~{_CURRENCY}]|(?<=[^\W\d_])[-/](?=[^\W\d_]))*"
)
_NUMBER_WORDS = re.compile(
    r"\b(?:half|halves|quarters?|thirds?|dozens?|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundreds?|thousands?|millions?|billions?|trillions?|"
    r"minus|negative|plus|times|squared|cubed)\b",
    re.IGNORECASE,
)


class _Found(NamedTuple):
    """A thing of digits in a text: its place, and its value if it is a number."""

    begin: int
    end: int
    value: Fraction | None


def whole_number(answer: object) -> Fraction | None:
    """Return the number that a record's answer is, or None if it is not one, or not understood
    whole.

    Args:
        answer: a number; or a text in which what follows the last "####", or else what is in the
            last box, or else all of it, has one number and otherwise only words.
    """
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Fraction(repr(answer)) if math.isfinite(answer) else None
    if not isinstance(answer, str):
        return None
    told = answer.rpartition("####")[2]
    box = _boxed(told)[1]
    return _only(told if box is None else box)


def last_number(completion: str) -> Fraction | None:
    """Return the number that an answer of the model ends with, or None if there is none.

    It is the one in the last box, if there is a box that is closed, or else the last that is
    understood.
    """
    told, box = _boxed(completion)
    if box is not None:
        return _only(box)
    values = [found.value for found in _things(_plain(told)) if found.value is not None]
    return values[-1] if values else None


def _boxed(text: str) -> tuple[str, str | None]:
    """Return the text as far as its boxes are closed, and what is in the last one; None without
    any.
    """
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text, text[box.end() : brace.start()]
        text = text[: box.start()]  # a cut has left it open, and may have left out digits
    return text, None


def _only(text: str) -> Fraction | None:
    """Return the number of a text that has one, and otherwise only words."""
    plain = _plain(text).strip().removesuffix(".")
    things = list(_things(plain))
    if len(things) != 1:
        return None
    [(begin, end, value)] = things
    before, after = plain[:begin], plain[end:]
    # A list or a pair, or a number in brackets.
    if "," in plain[begin:end] and before.endswith(("[", "(")):
        return None
    fine = all(
        _WORDS.fullmatch(rest) and not _NUMBER_WORDS.search(rest) for rest in (before, after)
    )
    return value if fine else None


def _plain(text: str) -> str:
    """Return the text with one character for each sign and separator, and without LaTeX."""
    text = _OTHER_DIGIT.sub(
        lambda found: str(unicodedata.decimal(found[0])), text.translate(_CHARACTERS)
    )
    text = _RAISED.sub(lambda found: f"^{found[0].translate(_LOWERED)}", text)
    text = _TIE.sub(_GAP, _VULGAR.sub(_vulgar, text))
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    return _RAISED_UNIT.sub("", _TIMES_TEN.sub("×", _SPACES.sub(" ", text)))


def _vulgar(found: re.Match[str]) -> str:
    part = unicodedata.normalize("NFKC", found["part"])
    return f"{found['whole']} {part}" if found["whole"] else part


def _without_latex(text: str) -> str:
    # LaTeX skips spaces, so those after a command part nothing.
    text = re.sub(r"\\!\s*", "", text.replace("\\\\", "\n"))
    text = _PARTS.sub(_GAP, text)
    for _ in range(_DEEPEST):
        shorter = _INNERMOST.sub(_opened, text)
        if shorter == text:
            break
        text = shorter
    text = re.sub(r"\\[dtc]?frac[^\n]*", _NONE, text)  # what its parts are was not understood
    text = _COMMAND.sub(_command, text)
    return re.sub(r"\^ ?°", "°", text)


def _opened(found: re.Match[str]) -> str:
    """Return what innermost braces hold, with the command before them."""
    if found["name"] is not None:
        if found["name"] in _SHOWN_AS_IT_IS:
            return _shown(found, "argument")
        return " " if found["name"] in _OF_LAYOUT else _NONE
    if found["shift"] is not None:
        shifted = found["shifted"].strip()
        if found["shift"] == "^" and re.fullmatch(r"[-+]?[0-9]+|°|\\circ|\\degree", shifted):
            return f"^{shifted}"
        return f"{found['shift']}{_NONE}"
    if found["inner"] is not None:
        return _shown(found, "inner")
    over, under = (
        (found[part] or found[f"{part}_digit"] or "").strip() for part in ("over", "under")
    )
    if not (_SIMPLE.fullmatch(over) and _SIMPLE.fullmatch(under)):
        return _NONE
    return f"{_before_a_fraction(found)}{over}{_FRACTION}{under}"


def _before_a_fraction(found: re.Match[str]) -> str:
    """Return what parts a fraction from a digit before it, with which it makes a mixed number."""
    return " " if found.start() > 0 and found.string[found.start() - 1].isdigit() else ""


def _shown(found: re.Match[str], part: str) -> str:
    text = found[part]
    if _FRACTION in text:
        return _before_a_fraction(found) + text
    # Words are no part of a digit's neighbour, as other signs may be.
    return f" {text} " if any(letter.isalpha() for letter in text) else text


def _command(found: re.Match[str]) -> str:
    name, sign = found["name"], found["sign"]
    if name is None:
        return " " if sign in "()[]\n" else sign
    if name in _SIGNS:
        return _SIGNS[name]
    return " " if name in _OF_LAYOUT or name in _SHOWN_AS_IT_IS else _NONE


def _things(plain: str) -> Iterator[_Found]:
    """Find the things of digits in a plain text, numbers or not."""
    for found in _JOINED.finditer(plain):
        begin, end = found.span()
        value = _value(found) if _stands_alone(plain, begin, end, found["core"]) else None
        yield _Found(begin, end, value)


def _stands_alone(plain: str, begin: int, end: int, core: str) -> bool:
    """Return whether nothing before or after a thing of digits makes it another thing."""
    before = plain[max(0, begin - 12) : begin]
    joined = (
        _BEFORE.search(before)
        and not _MONEY_BEFORE.search(before)
        and not _RANGE_BEFORE.search(before)
    )
    if joined or _SIGN_IN_WORDS.search(before) or ("." in core and _WITHOUT_END.match(plain, end)):
        return False
    after = _AFTER.match(plain, end)
    if after is None:
        return True
    unit = after["letter"] or after["word"]
    return unit is not None and unit in UNITS


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the number that a thing of digits is by the grammar; None if it is none."""
    signs = [sign for sign in found["lead"] if sign in "+-"]
    value = _VALUE.fullmatch(_SPACED.sub(r"\1", found["core"]))
    if value is None or len(signs) > 1 or sum(map(str.isdigit, found["core"])) > MOST_DIGITS:
        return None
    number = _of_parts(value)
    magnitudes = sum(
        power for name, power in _MAGNITUDES.items() for _ in re.findall(name, found["magnitude"])
    )
    if number is None or magnitudes > MOST_DIGITS:
        return None
    sign = -1 if signs == ["-"] else 1
    scale: int = 10**magnitudes
    return sign * number * scale


def _of_parts(value: re.Match[str]) -> Fraction | None:
    if value["alone"]:
        return _power(value["alone"])
    if value["decimal"]:
        more = _power(value["power"] or f"10^{value['exponent'] or 0}")
        return None if more is None else _decimal(value["decimal"]) * more
    over = value["over"]
    under = value["under"]
    whole = Fraction(0)
    if value["whole"]:
        over = value["share"]
        under = value["of"]
        whole = _decimal(value["whole"])
    divisor = _decimal(under)
    if divisor == 0 or (value["whole"] and _decimal(over) >= divisor):
        return None
    return whole + _decimal(over) / divisor


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(rf"[,'_{_GAP}]", "", text))


def _power(text: str) -> Fraction | None:
    exponent = int(re.split(r"\^|\*\*", text)[1])
    return Fraction(10) ** exponent if abs(exponent) <= MOST_DIGITS else None
