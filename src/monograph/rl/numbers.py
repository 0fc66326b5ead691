r"""Read numbers from texts, as people, LaTeX and programs write them.

The same grammar reads the answers of a model and the right answers of records:

    number    = [sign] [currency] [sign] value [magnitude]         at most one sign
    value     = decimal [exponent] | power | decimal "/" [sign] decimal | whole " " whole "/" whole
    decimal   = whole ["." digits] | "." digits
    whole     = digits | digits in groups of three with the same separator between all groups
    exponent  = ("e" | "E") [sign] digits | times power
    power     = "10" ("^" | "**") [sign] digits
    magnitude = hundred, thousand, million, billion or trillion

- A separator of groups is a comma, an apostrophe or a similar character, an underscore, a thin,
  narrow or no-break space, or LaTeX's `{,}`, `,\!`, `\,`, `\;`, `\:`, `~` or "\ ". Commas may also
  separate the Indian groups of two digits. An ordinary space is not a separator, since it also
  stands between two numbers.
- A sign is a hyphen, a minus sign, an en dash or a plus sign. Between two numbers, as in 10-12, it
  is not a sign.
- The sign "times" is `\times`, `\cdot`, ×, · or *. A fraction may also be `\frac` or a variant of it,
  or one character such as ½.
- The digits of all scripts are digits, and so are superscript digits in exponents.
- Units are ignored: "%", words, `\text{...}` and degrees. If a unit follows without a space, it must
  be one of UNITS, so that 3x is not a number.

Digits that are joined in another way are not a number, and no part of them is read as one: 3,5 (a
decimal in one country, a list in another), 1.234,56, 1.2.3, 10:30, 2^{10}, 3\sqrt{2}, 6*7.

A text is read in two steps. `_plain` turns it into a *plain* text, which has one character for each sign
and separator, and no LaTeX. `_tokens` finds its *tokens*: sequences of joined digits, each of which is a
number or not.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

# The maximum number of a number's digits, and the maximum value of its exponent. Larger ones would
# take too much memory.
MAX_DIGITS = 4000
UNITS = frozenset(
    "m g s h L l W V A N J C F Hz km cm mm nm kg mg lb lbs oz ft in yd mi mph ml mL kW MW mAh st nd rd th am pm AM PM "
    "hr hrs min mins sec secs ms h day days week weeks hour hours minute minutes second seconds USD EUR GBP".split()
)

# Characters that have a meaning of their own in a plain text. _GAP replaces every space that may
# separate groups of digits. _BLOCKER replaces a part that keeps its neighbours from being numbers,
# such as a root. _FRACTION is the line of a fraction.
_GAP = "\u00a0"
_BLOCKER = "\ufffc"
_FRACTION = "\u2044"
# Accents and modifier letters, some of which look like separators.
_ACCENTS = "\u02b0-\u02ff\u0300-\u036f"
_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
# What a plain text has instead of each of these characters. Invisible characters are removed.
_CHARACTERS = str.maketrans(
    dict.fromkeys(_MINUS, "-")
    | dict.fromkeys("\u00a0\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f", _GAP)
    | dict.fromkeys("\u3000\u2000\u2001\u2002\u2003\t", " ")
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")
    | dict.fromkeys("√∛∜π∞", _BLOCKER)
    | dict(zip("＋，．／：＾＊％＄（）＝＿｛｝＼", "+,./:^*%$()=_{}\\", strict=True))
    | {"·": "×", "⋅": "×", "∙": "×", "∗": "*", "∕": "/", "\u066b": ".", "\u066c": ","}
    | dict.fromkeys("’‘‛´`′＇\u02b9\u02bb\u02bc\u02bd\u02c8", "'")
)
# A decimal digit that is not one of 0 to 9 in ASCII.
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_SUPERSCRIPT = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPT_TO_ASCII = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_FRACTION_CHARACTER = re.compile(rf"(?P<whole>[0-9]?)[ {_GAP}]?(?P<part>[¼½¾⅐-⅞])")

# ── LaTeX ─────────────────────────────────────────────────────────────────────────────────────────

# The maximum depth of braces in braces.
_MAX_DEPTH = 12
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
# The argument of a command: braces that have no braces in them, or a single digit. The name of its group is
# filled in.
_ARGUMENT = r"\s*(?:\{{(?P<{0}>[^{{}}]*)\}}|(?P<{0}_digit>[0-9]))"
# Innermost braces with what stands before them: a fraction, another command with its argument, a superscript
# or subscript, or the braces alone.
_INNERMOST = re.compile(
    rf"\\[dtc]?frac{_ARGUMENT.format('over')}{_ARGUMENT.format('under')}(?![0-9])"
    r"|\\(?![dtc]?frac)(?P<name>[a-zA-Z]+)\*?\s*(?:\[[^\[\]{}]*\])?\s*\{(?P<argument>[^{}]*)\}"
    r"|(?P<shift>[\^_])\s*\{(?P<shifted>[^{}]*)\}"
    r"|(?<!\\)\{(?P<inner>[^{}]*)\}"
)
# Commands whose argument is read as if the command were not there.
_SHOWS_ARGUMENT = frozenset(
    "text textbf textit textrm textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mbox hbox operatorname emph "
    "underline bm boldsymbol boxed fbox".split()
)
# Commands that become a space, since they only change the layout or stand between words.
_LAYOUT = frozenset(
    "begin end label tag color hspace vspace phantom left right big Big bigg Bigg bigl bigr Bigl Bigr quad qquad "
    "displaystyle textstyle scriptstyle limits newline hline therefore because implies iff Rightarrow rightarrow "
    "Longrightarrow longrightarrow to approx simeq sim equiv square blacksquare checkmark boxed fbox rm bf it "
    "thinspace enspace medspace".split()
)
# Commands that stand for one character.
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
_THIN_SPACE = re.compile(r"\\[,;: ]|\\thinspace(?![a-zA-Z])|\\>")

# ── numbers ───────────────────────────────────────────────────────────────────────────────────────

# The power of ten that each word stands for.
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CURRENCY = "$€£¥₹₩"
# A token: `lead` is its signs and currency, `core` its digits with all characters that join them, and
# `magnitude` its words such as "million".
_TOKEN = re.compile(
    rf"""
    (?P<lead>
        # A sign directly before the digits. With spaces, only at the beginning or after =, :, ( or $.
        (?: (?: (?<![\w)\]{_BLOCKER}-])[-+](?=[^ ]) | (?:\A|(?<=[=(:$])|(?<=[=:][ ]))[ ]*[-+][ ]+ ) )?
        (?: [{_CURRENCY}][ ]?[-+]? )?
    )
    (?P<core>
        (?: (?<![A-Za-z0-9)])\. )? [0-9]
        (?: [0-9]
          | [.,'_:{_GAP}{_ACCENTS}](?=[0-9])
          | [eE][-+]?(?=[0-9])
          | [ ]?(?:[×÷/^{_FRACTION}+]|\*\*?)[ ]?-?[ ]?(?=\.?[0-9])
          | [ ](?=[0-9]+[ ]?[/{_FRACTION}][ ]?[0-9])  # one and a half: 1 1/2
          | (?<![0-9]{{4}})[ ](?=[0-9]{{3}}(?![0-9]))  # 10 000, or two numbers
        )*
    )
    (?P<magnitude> (?: [ {_GAP}]?(?:{"|".join(_MAGNITUDES)})s?\b )* )
    """,
    re.VERBOSE,
)


def _decimal_of(separator: str) -> str:
    """Return the regular expression of a decimal; `separator` names the group of its separator."""
    grouped = (
        rf"[1-9][0-9]{{0,2}}(?P<{separator}>[,'_{_GAP}])[0-9]{{3}}(?:(?P={separator})[0-9]{{3}})*"
    )
    indian = "[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}"
    return rf"(?:(?:{grouped}|{indian}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"


_POWER = r"10(?:\^|\*\*)[-+]?[0-9]+"
# A value of the grammar, without spaces around its operators: a decimal with or without an exponent, a power
# of ten alone, a fraction, or a whole number and a fraction.
_VALUE = re.compile(
    rf"(?P<decimal>{_decimal_of('separator')})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]+)|[×*](?P<power>{_POWER}))?"
    rf"|(?P<power_alone>{_POWER})"
    rf"|(?P<over>{_decimal_of('separator_over')})[/{_FRACTION}]"
    rf"(?P<under>-?{_decimal_of('separator_under')})"
    rf"|(?P<whole>[0-9]+)[ ](?P<mixed_over>[0-9]+)[/{_FRACTION}](?P<mixed_under>[0-9]+)"
)
# A decimal with or without a sign, as the numerator or denominator of LaTeX's fractions.
_SIGNED_DECIMAL = re.compile(rf"[-+]?{_decimal_of('separator')}")
# An operator with the spaces around it.
_SPACED_OPERATOR = re.compile(rf"[ ]*([×÷*/^{_FRACTION}+])[ ]*")
_SPACES = re.compile(" {2,}")
# LaTeX's no-break space.
_TIE = re.compile("(?<=[0-9])~(?=[0-9])")
# The letter x as "times", before a power of ten.
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?[xX] ?(?=10 ?(?:\^|\*\*))")
# The power of a unit, as in "5 m^2".
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z]) ?\^ ?[23](?![0-9])")

# What keeps the digits after it from being a number.
_JOINED_BEFORE = re.compile(
    rf"""
    (?: [A-Za-z0-9_^/×÷±\\-]      # a letter, a digit or an operator
      | [A-Za-z)\]]\.             # a dot after a letter or a bracket
      | [0-9]\(                   # a factor of what is in brackets
      | [A-Za-z0-9)][ ]?\*+[ ]?   # a factor or a base
      | [×÷±][ ]
      | {_BLOCKER}[ {_GAP}]?
    )\Z
    """,
    re.VERBOSE,
)
# A currency before a number.
_MONEY_BEFORE = re.compile(r"(?:(?<![A-Za-z])(?:Rs\.?|USD|US|EUR|GBP))\Z")
_SIGN_IN_WORDS = re.compile(r"(?:minus|negative)[ ]\Z", re.IGNORECASE)
# The first number of a range, and its hyphen.
_RANGE_BEFORE = re.compile(r"[\w)\]]-\Z")
# What keeps the digits before it from being a number, unless it is a letter or a word that is a unit.
_JOINED_AFTER = re.compile(
    rf"""
      \.?[ {_GAP}]?{_BLOCKER}
    | [_^(]                                         # an index, an exponent or a factor in brackets
    | [ ]?[×÷^±{_FRACTION}]
    | [ ]?(?:\+|\*)[ ]?[A-Za-z0-9(\\{_BLOCKER}]     # a sum or a product that goes on
    | /[ ]?[^A-Za-z] | /[A-Za-z](?![A-Za-z])        # a divisor, not a word such as "/day"
    | -[ ]?[A-Za-z](?![A-Za-z])                     # minus a variable
    | [ {_GAP}](?![aAI](?![A-Za-z]))(?P<letter>[A-Za-z])(?![A-Za-z'.])  # but not the words "a" and "I"
    | (?P<word>[A-Za-z]+)
    | [ ](?:and[ ](?:a|one)[ ])?(?:half|halves|quarters?|thirds?|dozens?)\b
    """,
    re.VERBOSE,
)
# The dots that follow a decimal with digits without end, such as 0.333...
_ELLIPSIS = re.compile(r"\.\.|…")
# What may stand around the number of a right answer: words, punctuation and signs of layout. A hyphen or a
# slash may only join two words, or the number and a word after it.
_WORDS = re.compile(
    rf"(?:[-/](?=[^\W\d_]))?(?:[^\W\d_]|[\s.,;:?()\[\]\"'%°#=≈*|~{_CURRENCY}]|(?<=[^\W\d_])[-/](?=[^\W\d_]))*"
)
# Words that are numbers or change one. With such a word, the text does not have the number of its digits.
_NUMBER_WORDS = re.compile(
    r"\b(?:half|halves|quarters?|thirds?|dozens?|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundreds?|thousands?|millions?|billions?|trillions?|"
    r"minus|negative|plus|times|squared|cubed)\b",
    re.IGNORECASE,
)


class _Token(NamedTuple):
    """A token of a plain text.

    Attributes:
        begin: the index of its first character.
        end: the index after its last character.
        value: its value; None if it is not a number.
    """

    begin: int
    end: int
    value: Fraction | None


def answer_number(answer: object) -> Fraction | None:
    """Return the number that is a record's right answer.

    Args:
        answer: a number or a text. Only the part of a text after the last "####" is read. If this part
            has a box, only the content of the last box is read. What is read must have one number, and
            otherwise only words.

    Returns:
        the number; None if the answer is not such a number or text.
    """
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Fraction(repr(answer)) if math.isfinite(answer) else None
    if not isinstance(answer, str):
        return None
    after_mark = answer.rpartition("####")[2]
    _, box = _boxed(after_mark)
    answer_text = after_mark if box is None else box
    return _only_number(answer_text)


def last_number(completion: str) -> Fraction | None:
    """Return the number that an answer of the model ends with; None if there is no number.

    If the answer has a closed box, this is the number in the last closed box. Otherwise it is the last
    number before any box that was left open.
    """
    text_before_open_box, box = _boxed(completion)
    if box is not None:
        return _only_number(box)
    tokens = _tokens(_plain(text_before_open_box))
    values = [token.value for token in tokens if token.value is not None]
    return values[-1] if values else None


def _boxed(text: str) -> tuple[str, str | None]:
    """Return (what precedes the first open box of a text, the content of its last closed box).

    The content is None if there is no closed box. If there is one, the first value has no meaning.
    """
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text, text[box.end() : brace.start()]
        # The answer was cut inside this box, so the last number in the box may lack digits.
        text = text[: box.start()]
    return text, None


def _only_number(text: str) -> Fraction | None:
    """Return the number of a text that has one number and otherwise only words, else None."""
    plain = _plain(text).strip().removesuffix(".")
    tokens = list(_tokens(plain))
    if len(tokens) != 1:
        return None
    [(begin, end, value)] = tokens
    before = plain[:begin]
    after = plain[end:]
    # "(1,234" may begin a list or a pair.
    if "," in plain[begin:end] and before.endswith(("[", "(")):
        return None
    for rest in (before, after):
        if not _WORDS.fullmatch(rest) or _NUMBER_WORDS.search(rest):
            return None
    return value


def _plain(text: str) -> str:
    """Return a text as a plain text; see the module."""
    text = text.translate(_CHARACTERS)
    text = _OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{match[0].translate(_SUPERSCRIPT_TO_ASCII)}", text)
    text = _FRACTION_CHARACTER.sub(_fraction_of_character, text)
    text = _TIE.sub(_GAP, text)
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    text = _SPACES.sub(" ", text)
    text = _TIMES_TEN.sub("×", text)
    return _POWER_OF_UNIT.sub("", text)


def _fraction_of_character(match: re.Match[str]) -> str:
    """Return the fraction of a match of _FRACTION_CHARACTER, such as "1 1/2" of "1½"."""
    part = unicodedata.normalize("NFKC", match["part"])
    return f"{match['whole']} {part}" if match["whole"] else part


def _without_latex(text: str) -> str:
    """Return a text without LaTeX's commands and braces."""
    # LaTeX ignores spaces after a command.
    text = re.sub(r"\\!\s*", "", text.replace("\\\\", "\n"))
    text = _THIN_SPACE.sub(_GAP, text)
    for _ in range(_MAX_DEPTH):
        shorter = _INNERMOST.sub(_without_braces, text)
        if shorter == text:
            break
        text = shorter
    # The numerator and denominator of a remaining fraction could not be read.
    text = re.sub(r"\\[dtc]?frac[^\n]*", _BLOCKER, text)
    text = _COMMAND.sub(_command, text)
    return re.sub(r"\^ ?°", "°", text)


def _without_braces(match: re.Match[str]) -> str:
    """Return the plain text of a match of _INNERMOST: innermost braces and the command before them."""
    if match["name"] is not None:
        if match["name"] in _SHOWS_ARGUMENT:
            return _argument_text(match, "argument")
        return " " if match["name"] in _LAYOUT else _BLOCKER
    if match["shift"] is not None:
        shifted = match["shifted"].strip()
        if match["shift"] == "^" and re.fullmatch(r"[-+]?[0-9]+|°|\\circ|\\degree", shifted):
            return f"^{shifted}"
        return f"{match['shift']}{_BLOCKER}"
    if match["inner"] is not None:
        return _argument_text(match, "inner")
    over = (match["over"] or match["over_digit"] or "").strip()
    under = (match["under"] or match["under_digit"] or "").strip()
    if not (_SIGNED_DECIMAL.fullmatch(over) and _SIGNED_DECIMAL.fullmatch(under)):
        return _BLOCKER
    return f"{_space_before_fraction(match)}{over}{_FRACTION}{under}"


def _space_before_fraction(match: re.Match[str]) -> str:
    """Return a space if a digit precedes the fraction, since the two are a mixed number; else ""."""
    follows_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return " " if follows_digit else ""


def _argument_text(match: re.Match[str], group: str) -> str:
    """Return the plain text of braces in a match of _INNERMOST whose content is kept."""
    text = match[group]
    if _FRACTION in text:
        return _space_before_fraction(match) + text
    # Words are separated by spaces from the digits next to them. Anything else may belong to these digits.
    has_letters = any(letter.isalpha() for letter in text)
    return f" {text} " if has_letters else text


def _command(match: re.Match[str]) -> str:
    """Return the plain text of a match of _COMMAND: a command that has no argument in braces."""
    name = match["name"]
    sign = match["sign"]
    if name is None:
        return " " if sign in "()[]\n" else sign
    if name in _SIGNS:
        return _SIGNS[name]
    return " " if name in _LAYOUT or name in _SHOWS_ARGUMENT else _BLOCKER


def _tokens(plain: str) -> Iterator[_Token]:
    """Yield the tokens of a plain text."""
    for match in _TOKEN.finditer(plain):
        begin, end = match.span()
        value = None
        if _stands_alone(plain, begin, end, match["core"]):
            value = _value(match)
        yield _Token(begin, end, value)


def _stands_alone(plain: str, begin: int, end: int, core: str) -> bool:
    """Return whether the text before and after a token leaves it a number."""
    # None of the expressions below looks at more than 12 characters before a token.
    before = plain[max(0, begin - 12) : begin]
    # The letters of a currency and the hyphen of a range may be joined to a number.
    may_be_joined = _MONEY_BEFORE.search(before) or _RANGE_BEFORE.search(before)
    if _JOINED_BEFORE.search(before) and not may_be_joined:
        return False
    if _SIGN_IN_WORDS.search(before):
        return False
    if "." in core and _ELLIPSIS.match(plain, end):
        return False
    after = _JOINED_AFTER.match(plain, end)
    if after is None:
        return True
    unit = after["letter"] or after["word"]
    return unit is not None and unit in UNITS


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a token by the grammar of the module; None if it is not a number."""
    signs = [sign for sign in match["lead"] if sign in "+-"]
    value = _VALUE.fullmatch(_SPACED_OPERATOR.sub(r"\1", match["core"]))
    if value is None or len(signs) > 1:
        return None
    digits = sum(map(str.isdigit, match["core"]))
    if digits > MAX_DIGITS:
        return None
    unsigned = _unsigned(value)
    # The exponent of all words of magnitude together: "2 hundred thousand" has 2 + 3.
    exponent = sum(
        power * len(re.findall(name, match["magnitude"])) for name, power in _MAGNITUDES.items()
    )
    if unsigned is None or exponent > MAX_DIGITS:
        return None
    sign = -1 if signs == ["-"] else 1
    scale: int = 10**exponent
    return sign * unsigned * scale


def _unsigned(value: re.Match[str]) -> Fraction | None:
    """Return the number of a match of _VALUE; None if its exponent or denominator is invalid."""
    if value["power_alone"]:
        return _power(value["power_alone"])
    if value["decimal"]:
        power_text = value["power"] or f"10^{value['exponent'] or 0}"
        power = _power(power_text)
        return None if power is None else _decimal(value["decimal"]) * power
    over = value["over"]
    under = value["under"]
    whole = Fraction(0)
    if value["whole"]:
        over = value["mixed_over"]
        under = value["mixed_under"]
        whole = _decimal(value["whole"])
    divisor = _decimal(under)
    if divisor == 0:
        return None
    # The fraction of a mixed number is below 1.
    if value["whole"] and _decimal(over) >= divisor:
        return None
    return whole + _decimal(over) / divisor


def _decimal(text: str) -> Fraction:
    """Return the value of a decimal, which may have separators of groups."""
    return Fraction(re.sub(rf"[,'_{_GAP}]", "", text))


def _power(text: str) -> Fraction | None:
    """Return the value of a power of ten; None if the exponent is too large."""
    exponent = int(re.split(r"\^|\*\*", text)[1])
    return Fraction(10) ** exponent if abs(exponent) <= MAX_DIGITS else None
