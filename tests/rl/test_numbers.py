"""Run: pytest tests/rl/test_numbers.py (a number is read whole, however it is written, or not at
all).
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from monograph.errors import InputRefused
from monograph.rl.numbers import answer_number, last_number
from monograph.rl.rewards import Answer, reward_of

THIN, NO_BREAK, NARROW = "\u2009", "\u00a0", "\u202f"

READ = {
    "42": 42, "-5": -5, "+5": 5, "- 5": -5, "\u22125": -5, "\u20135": -5, "007": 7, ".5": "0.5", "-.5": "-0.5",
    "1.234": "1.234", "1,234": 1234, "1,234,567.50": "1234567.5", "1,00,000": 100_000, "1_000": 1000, "1'000": 1000,
    f"1{THIN}000": 1000, f"1{NO_BREAK}000": 1000, f"1{NARROW}000{NARROW}000": 1_000_000, "1\u2005000": 1000,
    r"\boxed{9{,}500}": 9500, r"1,\!000": 1000, r"1\,000": 1000, r"1\;000": 1000, r"1\ 000": 1000,
    r"1{,}000{,}000.5": "1000000.5", r"2{,}000\text{ m}": 2000,
    r"3\times 10^{4}": 30_000, r"3\cdot10^{-2}": "0.03", "3e4": 30_000, "2.5E-3": "0.0025", "3 x 10^4": 30_000,
    "3·10⁻²": "0.03", "10^4": 10_000, "10⁴": 10_000, "2 * 10**3": 2000,
    "４２": 42, "１，２３４．５": "1234.5", "－５": -5, "٤٢": 42, "४२": 42,
    r"\$5": 5, "$-5$": -5, "-$5": -5, r"-\$5": -5, "€ 5": 5, "Rs.500": 500, "$$42$$": 42, r"\(42\)": 42, r"\[42\]": 42,
    "50%": 50, r"50\%": 50, "90°": 90, r"90^\circ": 90, r"90^{\circ}": 90, "5km": 5, "60 km/h": 60, "$5/hour": 5,
    r"12\text{ cm}^2": 12, r"12 \mathrm{~cm}^{3}": 12, "12 cm²": 12, r"42\text{ dollars}": 42, "42 square feet": 42,
    r"\frac{1}{2}": "1/2", r"-\frac{1}{2}": "-1/2", r"\frac{-1}{2}": "-1/2", r"\dfrac12": "1/2", r"-\tfrac1{2}": "-1/2",
    r"\frac{1{,}000}{3}": "1000/3", "1/2": "1/2", "-1 / 2": "-1/2", "1 1/2": "3/2", r"1\frac{1}{2}": "3/2",
    "½": "1/2", "1½": "3/2", "-½": "-1/2",
    r"1{\frac{1}{2}}": "3/2", r"1\text{\frac{1}{2}}": "3/2", r"-1{\dfrac12}": "-3/2", r"{\frac{1}{2}}": "1/2",
    "9ʼ500": 9500, "9ʻ500": 9500, "9‘500": 9500, "9´500": 9500, "9`500": 9500, "`500`": 500, "9~500": 9500,
    r"9~500\text{ m}": 9500, "~7": 7,
    "5 million": 5_000_000, "$1.5 billion": 1_500_000_000, r"3\text{ hundred thousand}": 300_000,
    r"\text{42}": 42, r"\mathbf{42}": 42, "**42**": 42, r"\left(5\right)": 5, "x = 42": 42, "The answer is 42.": 42,
    "#### 1,234": 1234, "6 * 7 = 42\n#### 42": 42, r"So it is $\boxed{\frac{3}{4}}$ of 5, not 7.": "3/4",
    r"\boxed{42\text{ km}}": 42, r"\fbox{7}": 7, r"\boxed{1} and \boxed{2}": 2, r"#### \boxed{8}": 8,
}  # fmt: skip

# What people write in more than one sense, and what is no number.
NOT_UNDERSTOOD = [
    "3,5", "1,2345", "1.234,56", "1.234.567", "10 000", "1,000,00", f"1,000{THIN}000", "0,500", "1_2", "1,0000",
    "10:30", "1:2", "1/2/3", "5'10", "5′10", "5ˈ10", "9\u0301500", "5~6", "9ˌ500",
    "1e2e3", "1e5000", "1e999999999999", "9" * 5000, "1/0", r"\frac{1}{0}",
    "6*7", "6 * 7", "3+4", "3 + 4", r"6\times7", "2^{10}", "2^10", "2(3+4)", "x^2", "x_2", "H2O", "3x", "5 x", r"5\,x",
    r"2\pi", "2π", "√2", r"\sqrt{2}", r"3\sqrt{2}", r"\sqrt[3]{5}", r"\frac{x+1}{2}", r"\frac{1}{\sqrt{2}}",
    r"\frac{1}{2", r"0.\overline{3}", "0.333...", r"0.333\ldots", r"\pm 5", "±5", "--5", "minus 5", "negative 5",
    "5 and a half", "2 dozen", "5 thirds", "none", "", "-", r"\boxed{", r"\boxed{9", r"\boxed{}", r"\boxed{x}",
]  # fmt: skip

TWO = [
    "5 6",
    "5 or 6",
    r"\boxed{5\text{ or }6}",
    "so 6 and 7: 42",
    "5-6",
    "x > 5",
    r"x \le 5",
    "5!",
]


@pytest.mark.parametrize("text", READ)
def test_a_number_is_read_alike_as_the_answer_wanted_and_as_the_model_s(text: str) -> None:
    assert answer_number(text) == last_number(text) == Fraction(READ[text])


@pytest.mark.parametrize("text", NOT_UNDERSTOOD)
def test_no_part_of_what_is_not_understood_is_taken_for_a_number(text: str) -> None:
    assert answer_number(text) is None and last_number(text) is None


def test_an_answer_wanted_that_is_not_understood_whole_is_refused_by_file_and_line() -> None:
    for text in (*NOT_UNDERSTOOD, *TWO):
        with pytest.raises(
            InputRefused,
            match=r"^p.jsonl:3: rl.reward needs one number .* under 'answer', which is ",
        ):
            reward_of("number").require({"answer": text}, "p.jsonl:3")


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("so 6 * 7 = 42.", 42), ("42 and then 7", 7), ("It is 42!", 42), ("10-12", 12), ("10–12", 12), ("7\n", 7),
        ("答案是42。", 42), ("It is 7, not 3,5", 7), (r"\boxed{5}, since 2 + 3 = 5 and 4 is less", 5),
        (r"first 6, then \boxed{3x}", None), (r"first \boxed{6}, then \boxed{7", 6), ("Answer:42", 42),
        ('{"answer": 42}', 42), ("2023: 500 people", 500), ("1, 2, 3", 3), ("12\n345", 345),
    ],
)  # fmt: skip
def test_a_model_s_answer_is_the_last_number_that_is_understood_or_that_in_the_last_box(
    completion: str, number: int | None
) -> None:
    assert last_number(completion) == number


def test_right_answers_are_worth_1_and_their_last_digits_0() -> None:
    reward = reward_of("number")
    texts = ["9500", "500", "9,500", r"\boxed{9{,}500}"]
    answers = [Answer("", text, {"answer": r"\boxed{9{,}500}"}, "p.jsonl:1") for text in texts]
    assert reward.score(answers) == [1, 0, 1, 1]


def rendered(draws: random.Random, number: Fraction, places: int) -> str:
    """A number with so many places after the point, as one of many people or programs would write
    it.
    """
    digits = f"{abs(number) * 10**places}".rjust(places + 1, "0")
    whole, rest = digits[: len(digits) - places], digits[len(digits) - places :]
    between = draws.choice(
        ["", ",", "{,}", r",\!", r"\,", r"\;", r"\:", r"\ ", THIN, NO_BREAK, NARROW, "_", "'", "，"]
    )
    first = len(whole) % 3 or 3
    text = between.join(
        [whole[:first], *(whole[at : at + 3] for at in range(first, len(whole), 3))]
    )
    text += draws.choice([".", "．"]) + rest if places else ""
    if draws.random() < 0.2:
        text = "".join(chr(ord(each) + 0xFEE0) if each.isdecimal() else each for each in text)
    text = (
        draws.choice(["-", "\u2212", "\u2013", "－"]) * (number < 0)
        + draws.choice(["", "", "$", r"\$"])
        + text
    )
    text += draws.choice(
        ["", "", "%", r"\%", r"\text{ cm}", r"\text{ cm}^2", " apples", r"^{\circ}"]
    )
    around = [
        "{}",
        "${}$",
        r"\boxed{{{}}}",
        r"\( {} \)",
        "#### {}",
        "**{}**",
        "x = {}",
        r"$\boxed{{{}}}$.",
    ]
    return draws.choice(around).format(text)


def test_every_rendering_of_a_number_is_read_as_that_number() -> None:
    draws = random.Random(5)
    for _ in range(4000):
        places = draws.choice([0, 0, 0, 1, 2, 5])
        number = Fraction(
            draws.randint(-(10 ** draws.randint(1, 12)), 10 ** draws.randint(1, 12)), 10**places
        )
        text = rendered(draws, number, places)
        assert answer_number(text) == number, text
        assert last_number(f"First 12 of 345. Then: {text}") == number, text


@pytest.mark.parametrize(
    "part",
    [
        "9",
        "1,",
        "1 ",
        "1 1/",
        "a1",
        "- ",
        "{",
        "\\",
        r"\frac{",
        r"\boxed{",
        r"\a[",
        "^{2}",
        " ",
        "$ ",
        "=",
        r"\text{",
    ],
)
def test_a_text_made_to_be_slow_is_read(part: str) -> None:
    # Backtracking over so many would take minutes.
    last_number(part * 4_000)
    answer_number(part * 4_000)
