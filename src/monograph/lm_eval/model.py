"""The model "monograph" of lm-evaluation-harness: a run, a Hugging Face folder or a weight file,
without an export.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import lm_eval.models  # noqa: F401  # registers lm_eval's own models; it skips that once another model is registered
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from monograph.decode import Sampling, generate
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import BATCH_TOKENS, Continuation, score
from monograph.graph.precision import Precision
from monograph.run.models import load_with_tokenizer
from monograph.terminal import one_line
from monograph.text.chat import stop_ids, template_of
from monograph.text.messages import for_template
from monograph.text.template import DEFAULT, ChatTemplate

MAX_TOKENS = 256  # the default if a task gives no limit, as in lm-evaluation-harness
# The names that tasks give the limit, in the order in which lm-evaluation-harness looks for them.
_MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _warn(line: str) -> None:
    print("warning:", one_line(line), file=sys.stderr)


@register_model("monograph")
class Monograph(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A language model that answers the requests of lm-evaluation-harness.

    A context begins with the token that begins a document, as in training, and a chat as its
    template says. What is too long loses its first tokens, this one with them. So log-likelihoods
    and texts equal those of lm_eval's `hf` model on the exported folder. `hf` needs
    `add_bos_token=False` for whole texts (`loglikelihood_rolling`), of which it would score that
    first token as well, and for chats whose template does not write it.
    """

    def __init__(
        self,
        run: str,
        precision: str = "fp32",
        batch_tokens: int = BATCH_TOKENS,
        **others: int | str | None,
    ):
        """Load a model.

        Args:
            run: a run ("last", or a run's folder), a Hugging Face folder, or a weight file.
            precision: "fp32" or "bf16".
            batch_tokens: most ids of a forward pass, padding included.
            others: batch_size, max_batch_size and device, which lm_eval gives every model and which
                are ignored: batches are sized in tokens, and the device is the machine's. Neither
                    changes a result beyond rounding.

        Raises:
            UsageError: the model does not have an argument.
            InputRefused: `run` is nothing that can be loaded.
        """
        super().__init__()
        if unknown := sorted(others.keys() - {"batch_size", "max_batch_size", "device"}):
            raise UsageError(
                f"--model_args {unknown[0]}: the model 'monograph' takes run, precision and batch_tokens"
            )
        model, self._tokenizer = load_with_tokenizer(run, _warn)
        self._model = model.to(default_device()).eval()
        self._precision = Precision(precision)
        self._batch_tokens = int(batch_tokens)
        self._chats: set[str] = set()  # the contexts that `apply_chat_template` returned
        self._template_name = DEFAULT

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id that begins a document."""
        return self._tokenizer.bos_id

    @property
    def max_length(self) -> int:
        """The number of the model's positions."""
        return self._model.config.max_position_embeddings

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: object
    ) -> list[int]:
        """Return a text's ids, after the id that begins a document unless `add_special_tokens` is
        False.
        """
        ids = self._tokenizer.encode(string)
        return ids if add_special_tokens is False else [self._tokenizer.bos_id, *ids]

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm_eval keeps the contexts of chats on disk, if it is asked to.

        It is another one in each process, as a context is known to be a chat where it was rendered.
        """
        return f"{self._tokenizer.hash[:16]}-{os.getpid()}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Choose the template of chats, by its name or, if True, the default; return its source.

        Raises:
            UsageError: there is none of this name.
            InputRefused: the model has no chat template.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            self._template_name = chat_template
        return self._template().source

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as text up to where an answer begins, or goes on after the last message's
        content.

        Raises:
            UsageError, InputRefused: see `chat_template`; or the template does not render, or does
                not copy the content that is to go on.
        """
        template = self._template()
        text = template.render(for_template(template, chat_history), add_generation_prompt)
        if not add_generation_prompt:
            begun = chat_history[-1]["content"]
            before, found, _ = text.rpartition(begun if begun in text else begun.strip())
            if not found:
                raise InputRefused(
                    f"the chat template does not copy {begun[:40]!r}, which the answer has to go on with"
                )
            text = before + found
        self._chats.add(text)
        return text

    def _template(self) -> ChatTemplate:
        default = template_of(self._tokenizer)
        templates = {DEFAULT: default, **self._tokenizer.config.named}
        if self._template_name not in templates:
            names = ", ".join(sorted(templates))
            raise UsageError(
                f"--apply_chat_template {self._template_name}: the model has the templates {names}"
            )
        return templates[self._template_name]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context not in self._chats:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            return pair
        # White space at the end goes to the continuation, as in any other text.
        words = context.rstrip()
        before = self._tokenizer.encode_rendered(words)
        whole = self._tokenizer.encode_rendered(context + continuation)
        return before, whole[len(before) :]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: object
    ) -> list[tuple[float, bool]]:
        scores = self._score([Continuation(context, ids) for _, context, ids in requests])
        for (texts, _, _), answer in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts; each token is predicted once, after as many
        tokens as fit.
        """
        windows = list[Continuation]()
        owners = list[int]()
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            pairs = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            pieces = [Continuation(*make_disjoint_window(pair)) for pair in pairs]
            windows += pieces
            owners += [owner] * len(pieces)
        sums = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._score(windows), strict=True):
            sums[owner] += log_probability
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context; requests with the same settings are generated
        together.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        seen: Counter[str] = Counter()
        for index, request in enumerate(requests):
            asked = json.dumps(request.args, sort_keys=True)
            # A repeated request asks for another sample, so the number of its repetition is its
            # seed.
            groups[json.dumps([request.args[1], seen[asked]], sort_keys=True)].append(index)
            seen[asked] += 1
        texts: dict[int, str] = {}
        for settings, indices in groups.items():
            options, seed = json.loads(settings)
            texts |= zip(
                indices,
                self._continued([requests[i].args[0] for i in indices], options, seed),
                strict=True,
            )
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _score(self, asked: Sequence[Continuation]) -> list[tuple[float, bool]]:
        scores = score(self._model, asked, self._precision, batch_tokens=self._batch_tokens)
        return [(scored.log_probability, scored.greedy) for scored in scores]

    def _continued(
        self, contexts: Sequence[str], options: Mapping[str, Any], seed: int
    ) -> Iterable[str]:
        sampling, max_tokens, stop = generation(options, seed)
        room = self.max_length - max_tokens
        if room < 1:
            raise InputRefused(
                f"max_gen_toks = {max_tokens} leaves no room for a context in the model's {self.max_length} positions: "
                "give the task a smaller one (--gen_kwargs max_gen_toks=N)"
            )
        prompts = [self._ids(context)[-room:] for context in contexts]
        are_chats = not self._chats.isdisjoint(contexts)
        ends = stop_ids(self._tokenizer, self._model.config.ends) if are_chats else ()
        done = generate(
            self._model,
            self._tokenizer,
            prompts,
            sampling,
            max_tokens=max_tokens,
            stop=[*stop, *ends],
        )
        return [completion.text for completion in done]

    def _ids(self, context: str) -> list[int]:
        return (
            self._tokenizer.encode_rendered(context)
            if context in self._chats
            else self.tok_encode(context)
        )


def generation(options: Mapping[str, Any], seed: int) -> tuple[Sampling, int, list[str]]:
    """Return (sampling, most tokens, stop strings) from a task's generation arguments.

    As in lm-evaluation-harness, tokens are drawn at random only if `do_sample` or a temperature
    asks for it.

    Raises:
        UsageError: the model does not know an argument.
    """
    left = {name: value for name, value in options.items() if value is not None}
    limits = [left.pop(key) for key in _MAX_TOKENS_KEYS if key in left]
    until = left.pop("until", [])
    samples = left.pop("do_sample", None)
    temperature = left.pop("temperature", None)
    filters = {field.name: left.pop(field.name) for field in fields(Sampling) if field.name in left}
    if left:
        raise UsageError(
            f"generation argument {min(left)!r} is not known to the model 'monograph'; leave it out"
        )
    drawn = bool(temperature) if samples is None else bool(samples)
    chosen = (1.0 if temperature is None else float(temperature)) if drawn else 0.0
    stop = [until] if isinstance(until, str) else list(until)
    sampling = Sampling(**(filters | {"temperature": chosen, "seed": seed}))
    return sampling, int(limits[0]) if limits else MAX_TOKENS, [text for text in stop if text]
