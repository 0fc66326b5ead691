"""`monograph generate`: continue text with a trained model."""

from __future__ import annotations

import json as jsonlib
import sys

from monograph.decode import Completion, Sampling, prompt_ids
from monograph.decode import generate as decode
from monograph.device import clock
from monograph.errors import UsageError
from monograph.measure.quantities import counted
from monograph.run.models import load


def run(
    run: str,
    prompts: list[str],
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    n: int,
    max_tokens: int,
    stop: list[str],
    json: bool,
) -> int:
    """Print each prompt with its continuation as it is written; see the command line's help."""
    if "" in stop:
        raise UsageError("--stop '': an empty string would stop every text at once; give the text to stop at")
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: expected 1 or more")
    model, tokenizer = load(run, lambda line: print(f"warning: {line}", file=sys.stderr))
    sampling = Sampling(temperature, top_k, seed)
    began, completions = clock(), list[Completion]()
    for prompt in prompts or [""]:
        shown = not json and n == 1
        if shown:
            prompt_ids(model, tokenizer, prompt)  # refuses before anything is printed
            _write(prompt)
        live = _write if shown else None
        done = list(decode(model, tokenizer, [prompt], sampling, max_tokens=max_tokens, stop=stop, n=n, on_text=live))
        completions += done
        if shown:
            print()
        elif not json:
            print("\n\n".join(f"{prompt}{completion.text}" for completion in done), flush=True)
    seconds = clock() - began
    tokens = sum(len(completion.token_ids) for completion in completions)
    print(
        f"{counted(tokens, 'token')}, {tokens / seconds:.0f} tok/s; same seed, same text (--seed {seed})",
        file=sys.stderr,
    )
    if json:
        rows = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in completions]
        print(jsonlib.dumps({"schema": "monograph.generate/1", "completions": rows, "tokens_per_s": tokens / seconds}))
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)
