"""Find recipes: configurations for common jobs, which come with the package."""

from pathlib import Path
from typing import NamedTuple

from monograph.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parents[1] / "recipes"


class Recipe(NamedTuple):
    """A recipe.

    Attributes:
        name: its name.
        path: its TOML file.
        meaning: what it is for, in one sentence.
        command: a command line that uses it.
    """

    name: str
    path: Path
    meaning: str
    command: str


def recipes() -> list[Recipe]:
    """Return all recipes, sorted by name."""
    return [recipe_named(name) for name in _names()]


def recipe_named(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        UsageError: there is no recipe of this name.
    """
    if name not in _names():
        suggestion = did_you_mean(name, _names()) or f"; there are {', '.join(_names())}"
        raise UsageError(f"there is no recipe {name}{suggestion}")
    return _read(FOLDER / f"{name}.toml")


def _names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def _read(path: Path) -> Recipe:
    """Read a recipe, whose first two lines say what it is for and show a command."""
    meaning, command, *_ = path.read_text(encoding="utf-8").splitlines()
    return Recipe(path.stem, path, meaning.removeprefix("# "), command.removeprefix("# "))
