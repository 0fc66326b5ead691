"""Write the tables of the keys that a training record may have, from the declarations of the
readers.

Usage: python docs/make_records.py (rewrites data.md, finetune.md, preferences.md and rewards.md;
tests/rl/test_kinds.py compares)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from made_parts import with_made_parts

from monograph.data.forms import (
    COMPLETED_FORM,
    FORMS,
    LABELLED_FORM,
    MESSAGES_FORM,
    METADATA,
    PAIR_FORM,
    PROMPT_FORM,
    SHAREGPT_FORM,
    RecordForm,
    RecordKind,
)

DOCS = Path(__file__).resolve().parent
BEGIN = "<!-- made by docs/make_records.py -->"
LEARNED_ON = {
    RecordKind.CONVERSATIONS: "[conversations](finetune.md)",
    RecordKind.PAIRS: "[pairs of answers](preferences.md)",
    RecordKind.LABELLED: "[labelled answers](preferences.md)",
    RecordKind.PROMPTS: "[prompts to reward](rewards.md)",
}


def keys_of(forms: Sequence[RecordForm]) -> str:
    """Return one row per key that a record of these forms may have."""
    lines = ["| key | needed | what stands there, and what it does |", "|---|---|---|"]
    for form in forms:
        lines += [f"| `{key}` | yes | {meaning} |" for key, meaning in form.needs.items()]
    once = dict.fromkeys(item for form in forms for item in form.optional.items())
    lines += [f"| `{key}` | no | {meaning} |" for key, meaning in once]
    return "\n".join(lines)


def kinds() -> str:
    """Return one row per form of record: what it is by its keys, and the setting that asks for it."""
    lines = ["| a record has | it is one of | a setting that asks for it |", "|---|---|---|"]
    lines.append("| `text`, or the key that `data.text_key` names | texts | `data.text_key=text` |")
    for form in (*FORMS, PROMPT_FORM):
        names = ", ".join(f"`{key}`" for key in form.needs)
        lines.append(f"| {names} | {LEARNED_ON[form.kind]} | `{form.setting}` |")
    return "\n".join(lines)


def metadata() -> str:
    """Return the keys that change nothing."""
    return ", ".join(f"`{name}`" for name in sorted(METADATA))


def tables() -> dict[Path, list[str]]:
    """Return what stands between the markers of each page, in order."""
    conversations = [MESSAGES_FORM, SHAREGPT_FORM]
    return {
        DOCS / "data.md": [kinds(), metadata()],
        DOCS / "finetune.md": [keys_of(conversations), keys_of([COMPLETED_FORM])],
        DOCS / "preferences.md": [keys_of([PAIR_FORM]), keys_of([LABELLED_FORM])],
        DOCS / "rewards.md": [keys_of([PROMPT_FORM])],
    }


def main() -> None:
    """Write the tables to their pages."""
    for path, made in tables().items():
        text = with_made_parts(path.read_text(encoding="utf-8"), BEGIN, made)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
