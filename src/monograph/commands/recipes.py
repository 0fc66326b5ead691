"""`monograph recipes`: list the recipes, or print one as a file to edit."""

from monograph.config.recipes import recipe_named, recipes


def run(name: str | None) -> None:
    """Print what each recipe is for, or the text of one; see the command line's help."""
    if name is not None:
        print(recipe_named(name).path.read_text(encoding="utf-8"), end="")
        return
    listed = recipes()
    width = max(len(recipe.name) for recipe in listed) + 2
    for recipe in listed:
        print(f"{recipe.name:<{width}}{recipe.meaning}")
        print(f"{'':<{width}}{recipe.command}\n")
    print(
        "Keys after a recipe change it; `monograph recipes NAME > run.toml` makes a file of it that you can edit."
    )
