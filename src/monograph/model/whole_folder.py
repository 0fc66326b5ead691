"""Put a trained text model back into the folder of the whole model that it is a part of.

The whole model may also see pictures, whose layers are not trained here. It may have a head for
multi-token prediction, which belongs to the text model only if it was asked for. Here "the original" is
the folder of the whole model from before the training. The new folder is a copy of it, in which the
tensors of the text model have new numbers.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora_merge import plain_parameters
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.model.files import (
    StoredTensor,
    copy_file,
    index_file,
    new_folder,
    overwrite_tensor,
    read_headers,
    tensor_entries,
)
from monograph.model.llama import Llama
from monograph.storage.reading import entries, file_inside, is_file, is_folder, matching
from monograph.text.template import NAMED_FOLDER
from monograph.text.tokenizer import Tokenizer

# The files of the original that are copied, besides those of its weights. Neither code nor weights in
# other formats are among them.
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*")
# Indexes of weights and files of adapters. Of the indexes only that of the weights is copied.
_OTHER_FILES = ("*.index.json", "adapter_*.json", "*.py")
# Keys of config.json that training and exports may set, and that are no part of the shape.
_NOT_SHAPE = {"bos_token_id", "eos_token_id", "pad_token_id"}
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class WholeFolder(NamedTuple):
    """What was written by `save_whole`.

    Attributes:
        trained: number of tensors of the original that have new numbers.
        others: number of tensors that are copied.
        prefixes: the prefixes of the names of the copied tensors, sorted.
        rounded_to: the dtypes of the original to which trained weights were rounded, as safetensors names
            them, sorted.
        not_copied: the names of entries of the original that the new folder does not have, sorted.
    """

    trained: int
    others: int
    prefixes: list[str]
    rounded_to: list[str]
    not_copied: list[str]


class _Place(NamedTuple):
    """A tensor of the original that has the numbers of a parameter, or of one expert of it.

    Attributes:
        file: the name of the file.
        header: the description of the tensor, or of the slice of it that is the parameter's.
        expert: the number of the expert; None: the place has the whole parameter.
    """

    file: str
    header: StoredTensor
    expert: int | None


def save_whole(
    model: Llama, original: str | Path, folder: str | Path, tokenizer: Tokenizer | None
) -> WholeFolder:
    """Write a copy of the original in which the text model is `model`.

    Adapters are merged. The trained tensors get the names, the dtypes and the shards that the
    original's have, and a tied head is stored as often as there. All other tensors keep their bits,
    and config.json and the other files of `FILES` are the original's. The folder appears whole or not
    at all. Besides the model, two tensors at a time are in memory.

    Args:
        model: the text model. Its weights may be on any device or in a mapped file.
        original: the folder of the whole model.
        folder: the folder to create. An empty folder may exist.
        tokenizer: the tokenizer with which the model was trained. The original's must be the same if
            there is one. None: the tokenizers are not compared.

    Raises:
        InputRefused: the original is damaged, its text model has another shape or tokenizer, its
            weights are in 4 or 8 bits, or a weight that must be rounded is NaN, infinite or too large for the
            original's dtype.
            Or `folder` is not empty, or cannot be written.
        DiskFull: there is no space left. Nothing of this export remains.
    """
    original = Path(original)
    mtp = bool(model.config.mtp_num_hidden_layers)
    config, stored = hub.read_checked_headers(original, mtp=mtp)
    _require_shape(model.config, config, original)
    _require_tokenizer(tokenizer, original)
    places = {name: [*_places(name, header)] for name, header in stored.items()}
    if config.tie_word_embeddings:
        # A file of a tied model may have the head, too.
        places[_EMBEDDING] += places.pop(_HEAD, [])
    headers = read_headers(original)
    weight_files = sorted({header.path.name for header in headers.values()})
    rounded_to = set[str]()
    trained = set[str]()
    with new_folder(Path(folder)) as new:
        copied = _copy_files(original, new, weight_files)
        entries_by_file = {file: tensor_entries(new / file) for file in weight_files}
        for parameter in plain_parameters(model):
            value = parameter.read()
            for place in places[parameter.name]:
                entry = entries_by_file[place.file][place.header.name_in_file]
                part = value if place.expert is None else value[place.expert]
                written = overwrite_tensor(new / place.file, entry, place.header, part)
                trained.add(entry.name)
                if torch.promote_types(value.dtype, entry.dtype) != entry.dtype:
                    rounded_to.add(place.header.dtype)
                    _require_in_range(written, entry.name, place.header)
    return WholeFolder(
        trained=len(trained),
        others=len(headers) - len(trained),
        prefixes=hub.prefixes_left_out(original, mtp),
        rounded_to=sorted(rounded_to),
        not_copied=_names_not_copied(original, copied),
    )


def _require_shape(config: LlamaConfig, expected: LlamaConfig, original: Path) -> None:
    """Require that a model has the shape of the original's text model."""
    values, expected_values = config.to_hf(), expected.to_hf()
    for key in sorted(values.keys() | expected_values.keys()):
        value, expected_value = values.get(key), expected_values.get(key)
        if key not in _NOT_SHAPE and value != expected_value:
            raise InputRefused(
                f"{original}: its text model has {key} = {expected_value!r}, and the model that is exported "
                f"{value!r}: name the folder from which that model was trained, without new tokens"
            )


def _require_tokenizer(tokenizer: Tokenizer | None, original: Path) -> None:
    """Require that the original's tokenizer and chat templates are those of the model's tokenizer."""
    if tokenizer is None or hub.tokenizer_file(original) is None:
        return
    theirs = Tokenizer.from_file(original)
    fault = ""
    if theirs.digest != tokenizer.digest:
        fault = "its tokenizer.json is"
    elif _template_sources(theirs) != _template_sources(tokenizer):
        fault = "its chat templates are"
    if fault:
        raise InputRefused(
            f"{original}: {fault} not the model's: name the folder from which the model was trained"
        )


def _template_sources(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the sources of a tokenizer's chat templates, by name; "" is the default's name."""
    sources = tokenizer.config.named_template_files()
    template = tokenizer.config.template
    return sources if template is None else {"": template.source, **sources}


def _places(name: str, header: StoredTensor) -> Iterator[_Place]:
    """Yield the places of a parameter, of which a mixture whose experts are stored one by one has many.

    Args:
        name: the parameter's name.
        header: the description of the parameter.
    """
    if _is_quantised(header):
        raise InputRefused(
            f"{header.path}: {name} is stored in 4 or 8 bits, to which trained weights are not rounded: "
            "export the model without --original"
        )
    if not header.pieces:
        yield _Place(header.path.name, header, None)
    for expert, (piece_name, piece) in enumerate(header.pieces.items()):
        piece = piece._replace(name_in_file=piece.name_in_file or piece_name)
        yield _Place(piece.path.name, piece, expert)


def _is_quantised(header: StoredTensor) -> bool:
    """Return whether a tensor, or one of its pieces, is dequantised when it is read."""
    is_made = bool(header.pieces) and header.join is not torch.stack
    return is_made or any(_is_quantised(piece) for piece in header.pieces.values())


def _require_in_range(written: Tensor, name: str, header: StoredTensor) -> None:
    """Require that no weight has become infinite when it was rounded."""
    least, greatest = written.aminmax()
    if not (bool(least.isfinite()) and bool(greatest.isfinite())):
        raise InputRefused(
            f"{name}: a trained weight is too large for {header.dtype}, in which {header.path} has it"
        )


def _copy_files(original: Path, new: Path, weight_files: list[str]) -> list[str]:
    """Copy the original's weights and other files, and return the names of the copied entries."""
    names = [*weight_files, *_other_files(original)]
    index = index_file(original)
    if index is not None:
        names.append(index.name)
    for name in names:
        copy_file(file_inside(original, name), new / name)
    templates = matching(original / NAMED_FOLDER / "*.jinja")
    if templates:
        (new / NAMED_FOLDER).mkdir()
        names.append(NAMED_FOLDER)
    for template in templates:
        copy_file(file_inside(template.parent, template.name), new / NAMED_FOLDER / template.name)
    return names


def _other_files(original: Path) -> Iterator[str]:
    """Yield the names of the files that are copied besides the weights and their index."""
    for path in entries(original):
        is_copied = any(fnmatchcase(path.name, pattern) for pattern in FILES)
        is_other = any(fnmatchcase(path.name, pattern) for pattern in _OTHER_FILES)
        if is_copied and not is_other and is_file(path):
            yield path.name


def _names_not_copied(original: Path, copied: list[str]) -> list[str]:
    """Return the names of the original's entries that were not copied, without hidden ones."""
    names = list[str]()
    for path in entries(original):
        if path.name not in copied and not path.name.startswith("."):
            names.append(f"{path.name}/" if is_folder(path) else path.name)
    return names
