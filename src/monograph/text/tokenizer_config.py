"""Read the files next to a tokenizer.json: the special tokens by role, the chat template, and the
ids that end a text.

These files of a Hugging Face folder are tokenizer_config.json, chat_template.jinja, and
generation_config.json or else config.json. All are optional.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from monograph.errors import InputRefused
from monograph.storage.reading import file_inside, read_json, status
from monograph.text.template import DEFAULT, FILE, NAMED_FOLDER, ChatTemplate, read_sources

CONFIG = "tokenizer_config.json"
_GENERATION = "generation_config.json"
NAMES = (CONFIG, _GENERATION, FILE)
MAX_STOPS = 64
# The keys under which tokenizer_config.json has special tokens.
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerConfig(NamedTuple):
    """The settings in these files that are used here.

    Attributes:
        tokens: the special tokens by role, e.g. {"eos_token": "<|im_end|>"}; any role may be
            missing.
        template: the chat template for chats without tools; None: there is no chat template.
        stops: the ids that end a text, from generation_config.json, or from config.json if
            generation_config.json has none.
        named_templates: further chat templates by name. The one for chats with tools is "tool_use".
    """

    tokens: dict[str, str] = {}  # noqa: RUF012 (never written to)
    template: ChatTemplate | None = None
    stops: tuple[int, ...] = ()
    named_templates: Mapping[str, ChatTemplate] = {}  # noqa: RUF012 (never written to)

    @property
    def document_tokens(self) -> tuple[str | None, str | None]:
        """Return the tokens that begin and end a document; None: the files do not name one."""
        return self.tokens.get("bos_token"), self.tokens.get("eos_token")

    def with_date(self, day: str) -> Self:
        """Return a copy of the settings, whose chat templates see `day` as today's date."""
        if self.template is None:
            return self
        named_templates = {
            name: template.with_date(day) for name, template in self.named_templates.items()
        }
        return self._replace(template=self.template.with_date(day), named_templates=named_templates)

    def files(self) -> dict[str, str]:
        """Return {name: content} of the files from which transformers reads these settings.

        A file without settings is left out.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.tokens,
        }
        written = {CONFIG: _as_json(config)} if self.tokens else {}
        if self.template is not None:
            written[FILE] = self.template.source
            written |= self.named_template_files()
        if self.stops:
            written[_GENERATION] = _as_json({"eos_token_id": list(self.stops)})
        return written

    def named_template_files(self) -> dict[str, str]:
        """Return {path in the folder: content} of the named chat templates."""
        return {
            f"{NAMED_FOLDER}/{name}.jinja": template.source
            for name, template in sorted(self.named_templates.items())
        }

    @property
    def digests(self) -> dict[str, str]:
        """Return the hex sha256 of each of `files` by its name."""
        return {
            name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.files().items()
        }


def read(folder: Path) -> TokenizerConfig:
    """Read the files that exist in a folder.

    Raises:
        InputRefused: a file cannot be read, or a token, an id or a template has another type than
            expected.
    """
    config = _read_settings(folder, CONFIG)
    tokens = _special_tokens(config, folder / CONFIG)
    sources = read_sources(folder, config)
    templates = {
        name: ChatTemplate(source, str(folder), tokens) for name, source in sources.items()
    }
    template = templates.pop(DEFAULT, None)
    return TokenizerConfig(tokens, template, _read_stops(folder), templates)


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the special tokens in a tokenizer_config.json, by role."""
    tokens = {}
    for role, token in config.items():
        # Models have other roles as well, e.g. "image_token". Keys such as "add_bos_token" are not
        # roles, and have other types.
        is_other_role = role.endswith("_token") and isinstance(token, str | dict)
        if role not in _ROLES and not is_other_role:
            continue
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            continue
        if not isinstance(content, str):
            raise InputRefused(f"{path}: {role} is {str(token)[:60]!r}: expected a token's text")
        tokens[role] = content
    return tokens


def _read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing."""
    if status(folder / name, follow=False) is None:
        return {}
    return read_json(file_inside(folder, name), "; put the model's own there")


def _read_stops(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text."""
    for name in (_GENERATION, "config.json"):
        stored = _read_settings(folder, name).get("eos_token_id")
        if stored is not None:
            return _ids(stored, folder / name)
    return ()


def _ids(stored: object, path: Path) -> tuple[int, ...]:
    """Return the ids in the value of eos_token_id, an id or a list of ids."""
    values: Sequence[object] = stored if isinstance(stored, list) else [stored]
    ids = [
        value
        for value in values
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    ]
    if len(ids) < len(values) or len(ids) > MAX_STOPS:
        raise InputRefused(
            f"{path}: eos_token_id is {str(stored)[:60]}: expected a token id or a list of at most {MAX_STOPS}"
        )
    return tuple(ids)


def _as_json(values: dict[str, Any]) -> str:
    """Return the content of a settings file."""
    return json.dumps(values, ensure_ascii=False, indent=2) + "\n"
