"""What a draft model must be: a small model that proposes the tokens of another one.

`monograph.decode.draft` uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from monograph.errors import InputRefused, MonographError
from monograph.run.folder import no_folder
from monograph.text.tokenizer import Tokenizer


@contextmanager
def naming_draft(name: str, otherwise: str = "") -> Iterator[None]:
    """Let the errors of the block, in which a draft model is loaded, name the option --draft.

    Args:
        name: the option's value.
        otherwise: what the option takes beside a folder, which is said if there is no folder of this name.

    Raises:
        MonographError: with the exit code of the error in the block.
    """
    try:
        yield
    except MonographError as error:
        message = str(error)
        # Most messages begin with the name of the run or folder already.
        named = message if message.startswith(name) else f"{name}: {message}"
        if otherwise and message == no_folder(name):
            named += f"; {otherwise}"
        # A subclass that is defined elsewhere may take other arguments than a message.
        kind = next(
            kind for kind in type(error).mro() if kind.__module__ == MonographError.__module__
        )
        raise kind(f"--draft {named}") from None


def require_same_tokens(name: str, draft: Tokenizer, model: Tokenizer) -> None:
    """Require that a draft model has the tokens of the model.

    Args:
        name: the value of --draft.
        draft: the tokenizer of the draft model.
        model: that of the model.

    Raises:
        InputRefused: it has others.
    """
    if draft.pieces != model.pieces:
        raise InputRefused(
            f"--draft {name}: its tokens are not the model's: expected a model with the same tokenizer.json"
        )
