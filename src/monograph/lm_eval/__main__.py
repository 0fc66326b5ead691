"""The command `python -m monograph.lm_eval ...`: `lm_eval ...` with the model "monograph"."""

import importlib.util
import sys

from monograph.errors import MonographError, UsageError
from monograph.extras import command_for
from monograph.terminal import one_line


def main() -> int:
    """Run lm-evaluation-harness, and return the exit code.

    An error of this package is shown as one line.
    """
    try:
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError(
                f"lm-evaluation-harness is not installed: {command_for('lm-eval', 'lm-eval')}"
            )
        from lm_eval.__main__ import cli_evaluate

        import monograph.lm_eval.model  # noqa: F401  # the import registers the model

        cli_evaluate()
    except MonographError as error:
        print("error:", one_line(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
