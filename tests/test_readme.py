"""Run: pytest tests/test_readme.py (what README.md and docs/ say: commands, examples, links, tables
and numbers)
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from made_parts import made_parts

import monograph as mono
from monograph import cli
from monograph.config.keys import DEFAULT_MINUTES, KEYS
from monograph.model.families import FAMILIES
from monograph.predict.roofline import EFFICIENCIES
from monograph.step import Step, Update
from monograph.text.tokenizer import Tokenizer
from pages import LOG, PAGES, README, blocks, commands, files
from scripts import ROOT, script
from served import Served, small

RESULTS = ROOT / "benchmarks" / "results"
LAWS, MEASURED = ROOT / "docs" / "laws.md", ROOT / "docs" / "measured.md"


# ---- GPUs ----------------------------------------------------------------------------------------


def test_every_page_says_the_same_of_what_was_measured_on_a_gpu() -> None:
    """The two pages that tell it agree with the planner's rates, and with the machines of what was
    measured.
    """
    said = "no part of monograph has been measured on a gpu yet"
    found = [json.loads(path.read_text()) for path in RESULTS.rglob("*.json")]
    machines = [each["machine"]["type"] for each in found if "machine" in each]
    known = EFFICIENCIES["NVIDIA H200"]
    for page in (MEASURED, ROOT / "docs" / "plan.md"):
        text = " ".join(page.read_text().split())
        assert (said in text.lower()) == (set(machines) == {"cpu", "pretended"}), page.name
        products, peak = re.search(r"products at (\d+) of (\d+) TFLOP/s", text).groups()  # type: ignore[union-attr]
        copies, bandwidth = re.search(r"copies at ([\d.]+) of ([\d.]+) TB/s", text).groups()  # type: ignore[union-attr]
        assert abs(float(products) / float(peak) - known.products) < 1e-3, page.name
        assert abs(float(copies) / float(bandwidth) - known.traffic) < 1e-3, page.name


# ---- commands ------------------------------------------------------------------------------------


def of_monograph() -> list[tuple[str, str]]:
    """Every command of the pages, and what torchrun, alone or by SLURM, starts."""
    found = ((page.name, re.sub(r"^.*-m monograph (?!\S*lm_eval)", "monograph ", each)) for page in PAGES
             for each in commands(page))  # fmt: skip
    return sorted({(page, command) for page, command in found if command.startswith("monograph ")})


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name, and a run's settings."""
    folder = tmp_path_factory.mktemp("named")
    files(folder)
    (folder / "RUN").mkdir()
    (folder / "RUN" / "config.toml").write_text("[train]\nupdates = 2\n")
    return folder


@pytest.mark.parametrize(("page", "command"), of_monograph())
def test_commands_are_ones_that_the_program_takes(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, named: Path, tmp_path: Path
) -> None:
    calls: list[Any] = []

    def record(*arguments: Any, **options: Any) -> int:
        calls.append((arguments, options))
        return 0

    for name in (
        "train",
        "sweep",
        "plan",
        "profile",
        "recipes",
        "keys",
        "runs",
        "generate",
        "chat",
        "evaluate",
        "compare",
        "export",
        "follow",
        "data",
        "check",
    ):
        module = types.ModuleType(f"monograph.commands.{name}")
        module.GenerateOptions = dict  # type: ignore[attr-defined]  # of `generate`
        module.run = module.run_ladder = module.show = module.build = record  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "monograph.serve.command", module)
    monkeypatch.chdir(named)
    # What completes writes into the home folder, for the shell that it finds above it.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(shlex.split(command)[1:])
    assert not exit_.value.code and (calls or re.search("--print-config|-completion$", command)), (
        command
    )


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        command.split()[1]
        for page in PAGES
        for command in commands(page)
        if command.startswith("make ")
    }
    assert named and named <= targets


def test_what_other_commands_name_is_there() -> None:
    """Scripts and their options, files of tests, extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    scripts = (ROOT / "benchmarks/harness.py").read_text()
    seen = set()
    for command in {each for page in PAGES for each in commands(page)}:
        program, *words = shlex.split(command)
        if found := re.search(r"^pip .*(?:\.|monograph)\[([\w-]+)\]", command):
            assert found[1] in extras, command
        files_named = [word for word in words if re.match(r"(tests|benchmarks)/", word)]
        assert all((ROOT / name).exists() for name in files_named), command
        if program == "python" and words[0].startswith("benchmarks/"):
            text = scripts + (ROOT / words[0]).read_text()
            assert all(f'"{word}"' in text for word in words if word.startswith("--")), command
        seen.add(program)
    assert {"pip", "python", "make", "pytest", "torchrun", "srun"} <= seen


# ---- examples ------------------------------------------------------------------------------------


DEAR = {"serve-0", "modules-1"}  # which run at night: others serve and capture, too


def examples() -> Iterator[Any]:
    for page in PAGES:
        python = [block.text for block in blocks(page) if block.language == "python"]
        for number, code in enumerate(python):
            name = f"{page.stem}-{number}"
            yield pytest.param(code, id=name, marks=pytest.mark.slow if name in DEAR else ())


def test_examples_stand_between_fences() -> None:
    """An indented one would not be run."""
    code = re.compile(r"^(import|from|def|with) \w", re.M)
    assert not [
        block
        for page in PAGES
        for block in blocks(page)
        if not block.language and code.search(block.text)
    ]


@pytest.mark.parametrize("code", [*examples()])
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Traced as it is for everybody; machine code of a module of one's own is made by
    # tests/profiling/test_trace.py, and its backward pass traced by tests/test_own_modules.py.
    monkeypatch.setattr(mono, "capture", functools.partial(mono.capture, backend="eager"))
    if "lm_eval" in code:
        pytest.skip("its data come from the network; tests/test_lm_eval.py has a task of its own")
    if 'load("out/")' in code:
        data = mono.corpus("my_texts", tokenizer="bytes", sequence_length=64, held_out=0.1)
        model = mono.Llama(mono.LlamaConfig.preset("nano", vocab_size=data.vocab_size))
        mono.save(model, "out", data.tokenizer)
    with ExitStack() as stack:
        if "127.0.0.1:8000" in code:
            tokenizer = Tokenizer.bytes()
            code = code.replace(
                "http://127.0.0.1:8000",
                stack.enter_context(Served(small(tokenizer), tokenizer)).url,
            )
        module = types.ModuleType("example")  # by its name the compiler finds the classes of a file
        monkeypatch.setitem(sys.modules, "example", module)
        exec(compile(code, "example", "exec"), module.__dict__)
        if "OpenAI(" in code:
            # Left open, its connection would warn in some later test.
            module.__dict__["client"].close()
    namespace = vars(module)
    if "mono.Step(" in code and "result" in namespace:
        assert float(namespace["result"].skipped) == 0


def test_the_default_takes_as_long_as_the_pages_say() -> None:
    for page in (README, ROOT / "docs" / "first_run.md"):
        assert (
            DEFAULT_MINUTES == 3.0
            and "three minutes, or up to seven on two busy cores"
            in " ".join(page.read_text().split())
        ), page


# ---- links and the tree --------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def anchors(page: Path) -> set[str]:
    """Of the headings of a page as GitHub makes them, and those that are written out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    plain = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each)
        for each in re.findall(r"^#+ (.*)$", text, re.M)
    )
    made = {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}
    return made | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", page.read_text())
    assert not [
        link
        for link in links
        if link[1] not in anchors((page.parent / link[0]) if link[0] else page)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_marks_of_a_merge(page: Path) -> None:
    assert not re.findall(r"^(?:<<<<<<<|>>>>>>>) .*$", page.read_text(), re.M)


def test_every_page_is_in_the_overview() -> None:
    overview = (ROOT / "docs" / "README.md").read_text()
    assert not [
        page.name
        for page in PAGES[1:]
        if page.name != "README.md" and f"({page.name})" not in overview
    ]


@pytest.mark.parametrize("name", script("docs/site_hook.py").navigation()[1]["Start"][1:])
def test_a_page_to_start_with_is_one_screen_and_begins_with_a_command(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    before_the_command = text.partition("\n```bash\n")[0]
    assert len(text.split()) <= 280 and len(before_the_command.split()) <= 50
    assert "\n```text\n" in text, "it shows what is printed"
    assert len(re.findall(r"\]\(\w+\.md", text)) >= 3, "it leads on"


def test_the_layers_of_the_design_are_those_that_are_checked() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    [checked] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    shown = page.partition("\n## Layers\n")[2].split("```\n")[1].splitlines()
    assert shown == [re.sub("[()]", "", layer) for layer in checked]


def tour() -> dict[str, str]:
    """What docs/reading_the_code.md says of each file of its tour."""
    page = (ROOT / "docs" / "reading_the_code.md").read_text()
    row = r"^\| \d+ \| \[(\S+)\]\(\.\./src/monograph/\1\) \| (.*) \|$"
    return dict(re.findall(row, page, re.M))


def test_the_tour_has_twelve_files_and_names_what_is_in_them() -> None:
    source = ROOT / "src" / "monograph"
    assert len(tour()) == 12
    for name, said in tour().items():
        file = source / name
        mentioned = re.findall(r"`([^`]+)`", said)
        files = [file, *(source / each for each in mentioned if each.endswith(".py"))]
        text = "".join(each.read_text() for each in files)
        names = [each.rpartition(".")[2] for each in mentioned if not each.endswith(".py")]
        missing = [each for each in names if not re.search(rf"\b(?:def|class) {each}\b", text)]
        assert not missing, name


def test_the_first_change_of_the_tour_is_still_to_be_made() -> None:
    page = (ROOT / "docs" / "reading_the_code.md").read_text()
    [row] = re.findall(r'the row "([^"]+)" of \[CONTRIBUTING.md\]', page)
    assert f"\n| {row} |" in (ROOT / "CONTRIBUTING.md").read_text()
    [counter] = re.findall(r"counts them already \(`Step\.(\w+)`\)", page)
    assert counter in Step.__doc__
    made = "the change is made: to keep it, let the tour end with another"
    assert counter not in {each.name for each in fields(Update)}, made


def test_the_tree_is_the_house() -> None:
    page = (ROOT / "docs" / "reading_the_code.md").read_text()
    tree = page.split("src/monograph/ ")[1].split("tests/ ")[0]
    named = set(re.findall(r"[├└─│ ](\w+)(?:/|\.py)(?=\s)", tree))
    there = {
        path.stem
        for path in (ROOT / "src" / "monograph").iterdir()
        if not path.name.startswith("__")
    }
    assert named == there - {"py", "cards"}  # py.typed, and the data of device.py


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_column_of_a_table_has_a_name(page: Path) -> None:
    """A screen reader says it before each cell."""
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", page.read_text(), re.M)
    assert not [head for head in heads if re.search(r"\|\s*\|", head)]


def laws() -> list[list[str]]:
    rows = re.findall(r"^\| \d.*$", LAWS.read_text(), re.M)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_law_names_its_test_or_is_not_built() -> None:
    assert [row[0] for row in laws()] == [str(number) for number in range(1, 21)]
    for number, _, bound, held_by in laws():
        files = [ROOT / path for path in re.findall(r"\(\.\./(tests/[^)]+)\)", held_by)]
        assert files or "not built yet" in held_by, number
        assert all("def test_" in path.read_text() for path in files), number
        # A bound stands in the test that is said to hold it, or where the test gets it from.
        texts = [path.read_text() for path in files]
        if any("from monograph.laws.comparisons import" in text for text in texts):
            texts.append((ROOT / "src/monograph/laws/comparisons.py").read_text())
        for stated in re.findall(r"\d+e-\d+", bound):
            assert any(stated in text for text in texts), number


def test_laws_that_have_a_file_are_in_the_table() -> None:
    linked = {path for row in laws() for path in re.findall(r"\(\.\./(tests/[^)]+)\)", row[3])}
    there = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "laws").glob("test_*.py")
    }
    assert there <= linked


def test_the_readme_names_each_law_in_the_order_of_its_number() -> None:
    said = " ".join(README.read_text().split()).partition("## The laws")[2]
    names = [name.strip() for name in said.partition("): ")[2].partition(". ")[0].split("·")]
    assert len(names) == len(laws())
    for name, (number, law, *_) in zip(names, laws(), strict=True):
        own = set(re.findall(r"[\w-]+", name)) - {"the", "of"}
        assert own <= set(re.findall(r"[\w-]+", law)), f"law {number}: {name}"


def test_the_readme_is_read_in_minutes() -> None:
    text = README.read_text()
    assert len(text) <= 10_500 and max(map(len, text.splitlines())) <= 160
    assert sum(block.language in ("bash", "python") for block in blocks(README)) >= 3


def test_the_tables_of_keys_and_of_what_works_are_made_from_the_code() -> None:
    tables = script("docs/make_tables.py")
    for page, made in tables.pages().items():
        shown = made_parts(page.read_text(encoding="utf-8"), tables.BEGIN)
        assert shown == made, "run: python docs/make_tables.py"


def test_the_configurations_page_has_each_key_with_its_meaning_values_and_default() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (\S.*) \| (\S.*) \| (\S.*) \|$", page, re.M)
    assert [key for key, *_ in rows] == list(KEYS)


def test_the_commands_page_is_made_from_the_program_and_has_each_option() -> None:
    made = script("docs/make_commands.py")
    page = made.PAGE.read_text()
    assert page == made.page(page), "run: python docs/make_commands.py"
    parts = re.split(r"^### monograph (.*)$", page, flags=re.M)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    tree = cli.command_tree().commands
    inner = {f"data {name}": command for name, command in tree["data"].commands.items()}
    wanted = {name: command for name, command in tree.items() if name != "data"} | inner
    assert named.keys() == wanted.keys()
    for name, command in wanted.items():
        options = [
            option for each in command.params for option in each.opts if option.startswith("-")
        ]
        assert all(f"`{option}`" in named[name] for option in options), name
        assert f"```bash\nmonograph {name} " in named[name]


def test_the_table_of_what_was_measured_is_made_from_the_results() -> None:
    numbers = script("docs/make_numbers.py")
    for page, tables in numbers.pages().items():
        shown = made_parts(page.read_text(), numbers.BEGIN)
        assert shown == tables, "run: python docs/make_numbers.py"
    made = {page for page in PAGES if f"\n{numbers.BEGIN}\n" in page.read_text()}
    assert made == numbers.pages().keys(), "each page is made"
    scripts = [name.rpartition("/")[2] for name in numbers.tables.ROWS]
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in scripts)


# Files that read settings: one more is a decision of its own.
READ_SETTINGS = {
    "commands/profile.py",
    "session/adapting.py",
    "session/door.py",
    "session/evaluated_model.py",
    "session/locked_run.py",
    "session/new_tokens.py",
    "session/recorded.py",
    "session/requirements.py",
    "session/supposed.py",
    "sweeps/advice.py",
    "sweeps/results.py",
    "sweeps/spec.py",
}


def test_each_key_is_decided_in_one_function_and_settings_are_read_where_it_is_said() -> None:
    tables = script("docs/make_tables.py")
    assert not {
        key: functions for key, functions in tables.deciding().items() if len(functions) != 1
    }
    files = {
        path.relative_to(tables.PACKAGE).as_posix()
        for path in tables.PACKAGE.rglob("*.py")
        if "settings" in path.read_text()  # or there is nothing of them to read
        and path.parent.name != "objectives"  # each decides the keys of its own section
        for function in tables.functions(path)
        if tables.keys_read(function, refusals=True)
    }
    assert files == READ_SETTINGS, (
        "what the settings say is passed on from there, so that it has one address"
    )


def test_no_cell_is_silence() -> None:
    tables = script("docs/make_tables.py")
    choices = {key for key in KEYS if tables.values(key)}
    assert choices == tables.behind().keys()
    for key, behind in tables.behind().items():
        assert all("def test_" in (ROOT / path).read_text() for path in behind.values())
        assert behind.keys() == {*tables.values(key)}, key


# ---- numbers -------------------------------------------------------------------------------------

UNITS = r"%|ms|s|min|×|[kMG]i?B|tok/s|k tok/s|tokens/s|bits per byte"
CLAIM = re.compile(
    rf"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)(?= (?:{UNITS})(?!\w))|(?<![\w.-])(\d(?:\.\d+)?e-?\d+)"
)
SCALES = (1, 100, 1e-3, 1e-6, 1e3, 1 / 60, 2**-20, 2**-30)


def paragraphs(page: Path) -> Iterator[str]:
    """Prose of a page, without code, the laws and the tables that a script makes."""
    text = re.sub(
        r"^```.*?^```|^ {4}.*?$|<!-- (?:made|printed) by.*?<!-- end -->",
        "",
        page.read_text(),
        flags=re.S | re.M,
    )
    for paragraph in re.split(r"\n\n|\n(?=\||- )", text):
        yield " ".join(paragraph.split())


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def is_among(number: str, values: list[float]) -> bool:
    """Whether a value, in some unit, rounds to the number as it is written."""
    plain = number.replace(",", "")
    if "e" in plain:
        digits = len(plain.partition("e")[0].partition(".")[2])
        return any(float(f"{value:.{digits}e}") == float(plain) for value in values)
    digits = len(plain.partition(".")[2])
    return any(f"{value * scale:.{digits}f}" == plain for value in values for scale in SCALES)


def test_every_measured_number_was_printed_by_a_script() -> None:
    found = 0
    for paragraph in [*paragraphs(README), *paragraphs(MEASURED)]:
        claims = [plain or power for plain, power in CLAIM.findall(paragraph)]
        results = [
            ROOT / "benchmarks/results" / f"{name}.json"
            for name in re.findall(r"benchmarks/(\w+)\.py", paragraph)
        ]
        values = [
            value
            for path in results
            if path.exists()
            for value in leaves(json.loads(path.read_text()))
        ]
        assert not [claim for claim in claims if not is_among(claim, values)], paragraph
        found += len(claims)
    assert found


def test_a_number_that_nobody_measured_is_noticed() -> None:
    assert CLAIM.findall("it is 74 % away, 5e-07 at best") == [("74", ""), ("", "5e-07")]
    assert is_among("74", [0.7412]) and is_among("5e-07", [4.9e-07]) and is_among("1.73", [1.7312])
    assert not is_among("75", [0.7412]) and not is_among("1.74", [1.7312])


def printed(page: str, benchmark: str, arguments: str = "") -> list[str]:
    """The parts of a page of docs/ that a benchmark printed."""
    begin = f"<!-- printed by benchmarks/{benchmark}.py{arguments} -->"
    return made_parts((ROOT / "docs" / f"{page}.md").read_text(), begin)


def test_the_accumulation_table_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # scripts share harness.py
    accumulation = script("benchmarks/accumulation.py")
    kept = json.loads((ROOT / "benchmarks/results/accumulation.json").read_text())
    assert printed("training", "accumulation") == [accumulation.table(kept["cases"])]
    again = accumulation.measured(4)
    assert again["fp32"] < 1e-6 and again["fp64"] < 1e-12
    assert again["mean_of_means"] == pytest.approx(kept["cases"][2]["mean_of_means"], rel=1e-6)


def test_the_table_of_mixtures_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/mixture_peers.json").read_text())
    table = script("benchmarks/mixture_peers.py").table(kept["cases"])
    assert printed("model", "mixture_peers") == [table]


def test_the_table_of_constrained_steps_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/constrained_steps.json").read_text())
    table = script("benchmarks/constrained_steps.py").table(kept["cases"])
    assert printed("constraints", "constrained_steps") == [table]


def test_the_table_of_taught_agents_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/taught_agent.json").read_text())
    table = script("benchmarks/taught_agent.py").table(kept["cases"])
    assert printed("serve", "taught_agent") == [table]


def test_the_table_of_drafts_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/drafts.json").read_text())
    assert printed("generate", "drafts") == [script("benchmarks/drafts.py").table(kept["cases"])]


def test_the_table_of_trained_drafts_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/trained_drafts.json").read_text())
    table = script("benchmarks/trained_drafts.py").table(kept["cases"])
    assert printed("generate", "trained_drafts") == [table]


def test_the_tables_of_recipes_are_those_of_their_results() -> None:
    recipe = script("benchmarks/recipe.py")
    tables = [
        recipe.table(json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["cases"])
        for name in ("recipe", "decay")
    ]
    assert printed("training", "recipe") == tables


def test_the_table_of_few_texts_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/few_texts.json").read_text())
    table = script("benchmarks/few_texts.py").table(kept["cases"])
    assert printed("training", "few_texts") == [table]


def test_the_table_of_rounded_weights_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/quantize.json").read_text())
    table = script("benchmarks/quantize.py").table(kept["cases"])
    assert printed("precision", "quantize") == [table]


def test_the_table_of_balance_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / "benchmarks/results/balance.json").read_text())
    table = script("benchmarks/balance.py").table(kept["cases"])
    assert printed("model", "balance") == [table]


def test_the_table_of_runs_of_earlier_versions_is_the_scripts() -> None:
    kept = json.loads((ROOT / "benchmarks/results/old_runs.json").read_text())
    table = script("benchmarks/old_runs.py").table(kept["runs"])
    assert printed("runs", "old_runs") == [table]
    assert all(
        result in ("ok", "the same bits")
        for uses in kept["runs"].values()
        for result in uses.values()
    )


@pytest.mark.parametrize(
    ("result", "arguments"), [("hybrid_peers", ""), ("hybrid_mamba", " --family granitemoehybrid")]
)
def test_the_tables_of_hybrids_are_the_scripts(
    monkeypatch: pytest.MonkeyPatch, result: str, arguments: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = json.loads((ROOT / f"benchmarks/results/{result}.json").read_text())
    table = script("benchmarks/hybrid_peers.py").table(kept["cases"])
    assert printed("model", "hybrid_peers", arguments) == [table]


def test_the_table_of_laws_and_families_is_what_the_tests_have() -> None:
    made = script("docs/make_families.py")
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), (
        "run: python docs/make_families.py"
    )


def test_the_table_of_models_has_each_type_that_loads() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    made = script("docs/make_models.py")
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), (
        "run: python docs/make_models.py"
    )
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert {each for each in known if made.loads(each)} == {*made.NAMES}


def test_the_table_of_families_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    families = script("benchmarks/families.py")
    kept = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    page = (ROOT / "docs" / "model.md").read_text()
    assert printed("model", "families") == [families.table(kept["cases"])]
    assert (
        re.findall(r"^\| `(\w+)` \|", page, re.M)
        == [case["family"] for case in kept["cases"]]
        == list(FAMILIES)
    )
    assert sum(case["configs"] for case in kept["cases"]) >= 30 and all(
        case["round_trip"] for case in kept["cases"]
    )
    assert (
        max(case[error] for case in kept["cases"] for error in families.ERRORS[:2])
        < kept["settings"]["goal"]
    )


def test_the_table_of_loading_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    loading = script("benchmarks/loading.py")
    kept = json.loads((ROOT / "benchmarks/results/loading.json").read_text())
    assert printed("model", "loading") == [loading.table(kept["cases"])]


RECORDED = {"page.png"}  # of a browser


def test_whatever_is_generated_is_compared_with_what_it_is_made_of() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    makers = {
        maker
        for page in PAGES
        for maker in re.findall(r"^<!-- .*(?:made|printed) by (\S+) -->$", page.read_text(), re.M)
    }
    assert len(makers) >= 10 and not [
        maker for maker in makers if f'script("{maker}")' not in tests
    ]
    scripts = "".join(path.read_text() for path in (ROOT / "docs").glob("make_*.py"))
    pictures = {path.name for path in (ROOT / "docs" / "figures").iterdir()} - RECORDED
    assert pictures and not [name for name in pictures if f'"{name}"' not in scripts]
