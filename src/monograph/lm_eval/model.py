"""The model "monograph" of lm-evaluation-harness.

It is a run, a Hugging Face folder or a weight file. A run need not be exported for it.

A *continuation* is a text that the model scores as what follows a context. A *chat* here is a context
that `apply_chat_template` has rendered.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

# This registers lm_eval's own models. It must come first: once another model is registered, lm_eval
# does not register its own.
import lm_eval.models  # noqa: F401
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from monograph.decode import Sampling, generate
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.choices import BATCH_TOKENS, TextContinuation, score
from monograph.graph.precision import Precision
from monograph.run.models import load_with_tokenizer
from monograph.terminal import one_line
from monograph.text.chat import stop_ids, template_of
from monograph.text.messages import for_template
from monograph.text.template import DEFAULT, ChatTemplate

# The maximum number of generated tokens if a task gives none, as in lm-evaluation-harness.
MAX_TOKENS = 256
# The names of that number in tasks, in the order in which lm-evaluation-harness looks for them.
_MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _warn(line: str) -> None:
    print("warning:", one_line(line), file=sys.stderr)


@register_model("monograph")
class Monograph(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A language model that answers the requests of lm-evaluation-harness.

    A context begins with the token that begins a document (BOS), as in training. A chat begins as
    its template says. A context that is too long loses its first tokens, including BOS. So
    log-likelihoods and texts equal those of lm_eval's model `hf` on the exported folder.

    In two cases `hf` needs `add_bos_token=False` for equal results: for whole texts
    (`loglikelihood_rolling`), where it would score BOS as well, and for chats whose template does not
    write BOS.
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
            batch_tokens: the maximum number of ids in a forward pass, including padding.
            others: batch_size, max_batch_size and device, which lm_eval gives to every model. They are
                ignored: batches are sized in tokens, and the device is the machine's. Results would
                depend on them only by rounding.

        Raises:
            UsageError: an argument is not known.
            InputRefused: `run` cannot be loaded.
        """
        super().__init__()
        unknown = sorted(others.keys() - {"batch_size", "max_batch_size", "device"})
        if unknown:
            raise UsageError(
                f"--model_args {unknown[0]}: the model 'monograph' takes run, precision and batch_tokens"
            )
        model, self._tokenizer = load_with_tokenizer(run, _warn)
        self._model = model.to(default_device()).eval()
        self._precision = Precision(precision)
        self._batch_tokens = int(batch_tokens)
        # The texts that `apply_chat_template` has returned. A request does not say whether its context is a
        # chat, which must be encoded with special tokens. It is one if its text is in this set.
        self._chats: set[str] = set()
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
        """Return the ids of a text.

        They begin with the id that begins a document, unless `add_special_tokens` is False.
        """
        ids = self._tokenizer.encode(string)
        if add_special_tokens is False:  # None stands for the default
            return ids
        return [self._tokenizer.bos_id, *ids]

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm_eval stores rendered contexts on disk, if the user asks for it.

        It differs between processes, since a process recognises only the chats that it has rendered itself.
        """
        return f"{self._tokenizer.hash[:16]}-{os.getpid()}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Choose the template of chats, and return its source.

        Args:
            chat_template: the template's name; True: the default template; False: there are no
                chats, and the result is None.

        Raises:
            UsageError: there is no template of this name.
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
        """Return a chat as text, up to where the model's answer begins.

        Args:
            chat_history: the messages.
            add_generation_prompt: whether the template asks for an answer. Otherwise the answer
                continues the last message, and the text ends with that message's content.

        Raises:
            UsageError, InputRefused: as in `chat_template`; or the template cannot be rendered, or
                it does not copy the content that the answer continues.
        """
        template = self._template()
        text = template.render(for_template(template, chat_history), add_generation_prompt)
        if not add_generation_prompt:
            answer_begin = chat_history[-1]["content"]
            # Some templates strip the content of messages.
            copied = answer_begin if answer_begin in text else answer_begin.strip()
            before, found, _ = text.rpartition(copied)
            if not found:
                raise InputRefused(
                    f"the chat template does not copy {answer_begin[:40]!r}, which the answer has to go on with"
                )
            text = before + found
        self._chats.add(text)
        return text

    def _template(self) -> ChatTemplate:
        default = template_of(self._tokenizer)
        templates = {DEFAULT: default, **self._tokenizer.config.named_templates}
        if self._template_name not in templates:
            names = ", ".join(sorted(templates))
            raise UsageError(
                f"--apply_chat_template {self._template_name}: the model has the templates {names}"
            )
        return templates[self._template_name]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of a continuation. This overrides lm_eval's method."""
        if context not in self._chats:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            return pair
        # White space at the end of the context belongs to the continuation, as in lm_eval's method.
        context_ids = self._tokenizer.encode_rendered(context.rstrip())
        whole_ids = self._tokenizer.encode_rendered(context + continuation)
        return context_ids, whole_ids[len(context_ids) :]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: object
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is what greedy decoding gives) of each continuation.

        A request is (its two texts, ids of the context, ids of the continuation).
        """
        scores = self._score([TextContinuation(context, ids) for _, context, ids in requests])
        for (texts, _, _), result in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts.

        Each token is predicted once, after as many tokens as fit into the model's positions.
        """
        windows = list[TextContinuation]()
        request_indices = list[int]()  # for each window, the index of its request
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            pairs = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for pair in pairs:
                context, ids_to_score = make_disjoint_window(pair)
                windows.append(TextContinuation(context, ids_to_score))
                request_indices.append(index)
        sums = [0.0] * len(requests)
        for index, (log_probability, _) in zip(request_indices, self._score(windows), strict=True):
            sums[index] += log_probability
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a generated text for each context.

        Requests with the same options and the same seed are generated together.
        """
        groups: dict[str, list[int]] = defaultdict(list)  # indices by options and seed, as JSON
        repetitions: Counter[str] = Counter()
        for index, request in enumerate(requests):
            options = request.args[1]
            key = json.dumps(request.args, sort_keys=True)
            # A repeated request asks for another sample. So the seed is the number of times that the same
            # request came before.
            seed = repetitions[key]
            groups[json.dumps([options, seed], sort_keys=True)].append(index)
            repetitions[key] += 1
        texts: dict[int, str] = {}
        for group, indices in groups.items():
            options, seed = json.loads(group)
            contexts = [requests[index].args[0] for index in indices]
            texts.update(zip(indices, self._generate_texts(contexts, options, seed), strict=True))
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _score(self, continuations: Sequence[TextContinuation]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether it is what greedy decoding gives) of each
        continuation.
        """
        scores = score(self._model, continuations, self._precision, batch_tokens=self._batch_tokens)
        return [(one.log_probability, one.greedy) for one in scores]

    def _generate_texts(
        self, contexts: Sequence[str], options: Mapping[str, Any], seed: int
    ) -> Iterable[str]:
        """Return a generated text for each context, with the same options for all."""
        sampling, max_tokens, stop = read_generation_options(options, seed)
        room = self.max_length - max_tokens
        if room < 1:
            raise InputRefused(
                f"max_gen_toks = {max_tokens} leaves no room for a context in the model's {self.max_length} positions: "
                "give the task a smaller one (--gen_kwargs max_gen_toks=N)"
            )
        # As in `hf`, a prompt that is too long loses its first tokens.
        prompts = [self._context_ids(context)[-room:] for context in contexts]
        # If one context is a chat, all are: lm_eval renders all contexts of a run or none.
        are_chats = not self._chats.isdisjoint(contexts)
        chat_stops = (
            stop_ids(self._tokenizer, self._model.config.eos_token_ids) if are_chats else ()
        )
        completions = generate(
            self._model,
            self._tokenizer,
            prompts,
            sampling,
            max_tokens=max_tokens,
            stop=[*stop, *chat_stops],
        )
        return [completion.text for completion in completions]

    def _context_ids(self, context: str) -> list[int]:
        if context in self._chats:
            return self._tokenizer.encode_rendered(context)
        return self.tok_encode(context)


def read_generation_options(
    options: Mapping[str, Any], seed: int
) -> tuple[Sampling, int, list[str]]:
    """Return what a task's generation arguments stand for.

    As in lm-evaluation-harness, tokens are sampled only if `do_sample` or a temperature asks for
    it. Otherwise the most probable token is taken.

    Args:
        options: the arguments by their names; None stands for an argument that was not given.
        seed: the seed of the sampler.

    Returns:
        How to sample, the maximum number of tokens, and the stop strings.

    Raises:
        UsageError: an argument is not known.
    """
    unread = {name: value for name, value in options.items() if value is not None}
    limits = [unread.pop(key) for key in _MAX_TOKENS_KEYS if key in unread]
    until = unread.pop("until", [])
    do_sample = unread.pop("do_sample", None)
    temperature = unread.pop("temperature", None)
    sampler_options = {
        field.name: unread.pop(field.name) for field in fields(Sampling) if field.name in unread
    }
    if unread:
        raise UsageError(
            f"generation argument {min(unread)!r} is not known to the model 'monograph'; leave it out"
        )
    if do_sample is None:
        do_sample = bool(temperature)
    if not do_sample:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0
    sampling = Sampling(**(sampler_options | {"temperature": float(temperature), "seed": seed}))
    max_tokens = int(limits[0]) if limits else MAX_TOKENS
    stop = [until] if isinstance(until, str) else list(until)
    return sampling, max_tokens, [text for text in stop if text]
