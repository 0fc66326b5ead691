"""Run docs/notebook.ipynb from its first cell to its last, and keep what each cell printed and
drew.

Usage: python docs/make_notebook.py

The cells run in an empty folder with an empty home, in this Python; nbclient and ipykernel are in
the extra `docs`. It takes about ten minutes on two cores. The digest of the cells is kept with the
outputs, so that a test notices a notebook whose cells were changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent / "notebook.ipynb"
PATIENCE_S = 3600


def main() -> None:
    """Run the cells and write the notebook with their outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as empty:
        here = Path(empty) / "here"
        here.mkdir()
        os.environ["HOME"] = empty
        # Many printed lines become one output, as a reader sees them.
        client = nbclient.NotebookClient(
            notebook,
            timeout=PATIENCE_S,
            coalesce_streams=True,
            resources={"metadata": {"path": here}},
        )
        client.execute()
    for cell in notebook.cells:
        cell.pop("id", None)
        cell.metadata = {}
    as_json = json.loads(nbformat.writes(notebook))
    as_json["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "monograph": {"cells_sha256": digest(as_json["cells"])},
    }
    as_json["nbformat_minor"] = 4  # 5 demands a random name for each cell
    NOTEBOOK.write_text(json.dumps(as_json, indent=1, ensure_ascii=False) + "\n")


def digest(cells: list[dict[str, Any]]) -> str:
    """Return the SHA-256 of the code of all cells, in their order."""
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


if __name__ == "__main__":
    main()
