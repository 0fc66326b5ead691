"""Make small files in the speedrun's format from texts, with a tokenizer that is on the disk.

So the benchmark runs where FineWeb is not: each file of a text is a document, which the separator
begins. The first tokens go to the validation file, the others to files for training. A loss over
another tokenizer's tokens says nothing about the target of 3.28.

    python benchmarks/speedrun/make_shards.py my_texts/ --tokenizer tokenizer.json --to shards/
    python benchmarks/speedrun/run.py --data shards/ --smoke
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401, E402 - finds the package beside it
from shards import MOST_IDS, Vocabulary, open_shards, write_shard, write_vocabulary  # noqa: E402

from monograph.errors import InputRefused, MonographError, UsageError  # noqa: E402
from monograph.storage.reading import is_folder, read_input, refusing  # noqa: E402
from monograph.text.tokenizer import Tokenizer  # noqa: E402


def texts_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files below the paths, in the order of their names."""
    for path in paths:
        if is_folder(path):
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        else:
            yield path


def tokens_of(paths: Sequence[Path], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of all documents, each after the separator.

    Raises:
        InputRefused: a file is no text, or the tokenizer cannot say it.
    """
    tokens: list[int] = []
    for path in texts_of(paths):
        with refusing(path):
            content = read_input(path, None)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise InputRefused(f"{path}: is not a text in UTF-8") from None
        tokens += [tokenizer.eos_id, *tokenizer.encode(text)]
    return tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files; see `--help`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="+", help="files, or folders of files")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--val-tokens", type=int, default=2**14 + 1, metavar="N")
    parser.add_argument("--shard-tokens", type=int, default=2**18, metavar="N")
    args = parser.parse_args(arguments)
    try:
        make(args)
    except MonographError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def make(args: argparse.Namespace) -> None:
    """Write what the arguments say."""
    if args.val_tokens < 1 or args.shard_tokens < 2:
        raise UsageError("--val-tokens must be at least 1, and --shard-tokens at least 2")
    tokenizer = Tokenizer.from_file(args.tokenizer)
    if tokenizer.vocab_size > MOST_IDS:
        raise InputRefused(
            f"{args.tokenizer}: has {tokenizer.vocab_size:,} entries; a token of 16 bits is one of {MOST_IDS:,}"
        )
    tokens = tokens_of(args.texts, tokenizer)
    if len(tokens) < args.val_tokens + 2:
        raise InputRefused(
            f"the texts have {len(tokens):,} tokens, too few for --val-tokens {args.val_tokens:,} and for training"
        )
    try:
        args.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputRefused(f"{args.to}: cannot be made: {error.strerror}") from None
    if any(args.to.glob("*.bin")):
        raise UsageError(f"{args.to}: has files of tokens already: give a new folder")
    write_vocabulary(args.to, Vocabulary(tokenizer.vocab_size, tokenizer.eos_id))
    write_shard(args.to / "texts_val_000000.bin", tokens[: args.val_tokens])
    for number, begin in enumerate(range(args.val_tokens, len(tokens), args.shard_tokens), 1):
        part = tokens[begin : begin + args.shard_tokens]
        write_shard(args.to / f"texts_train_{number:06d}.bin", part)
    for split in ("val", "train"):
        shards = open_shards(args.to, split)
        print(
            f"{sum(len(shard.tokens) for shard in shards):,} tokens in {len(shards)} {split} files"
        )


if __name__ == "__main__":
    main()
