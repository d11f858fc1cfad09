"""A model of ours as lm-eval sees it: https://github.com/EleutherAI/lm-evaluation-harness."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.config.suggest import did_you_mean
from torchtitan.data.chat.sandbox import TemplateError
from torchtitan.errors import ConfigError, DataError
from torchtitan.evaluation.scorer import Scorer, Window, windows
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import Source
from torchtitan.optional import require

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the same limit, the first one that is there counts."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a model is asked.

    Attributes:
        seq_len: tokens that it gets at once.
        batch_rows: requests at a time.
        chat: prompts go through the chat template.
        add_bos: begin each prompt with the tokenizer's first token; None does what the tokenizer's own file says.
    """

    seq_len: int
    batch_rows: int = 8
    chat: bool = False
    add_bos: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """What is asked; see ``lm_eval.simple_evaluate``.

    Attributes:
        names: tasks, groups or tags.
        include_path: folder with tasks of one's own.
        n_fewshot: solved examples before each question; None for the task's number.
        limit: questions of each task; None for all.
        system: what a chat model is told first.
        multiturn: solved examples are earlier turns of the conversation.
    """

    names: Sequence[str]
    include_path: str | None = None
    n_fewshot: int | None = None
    limit: int | None = None
    system: str | None = None
    multiturn: bool = True


def evaluate(source: Source, settings: Settings, tasks: Tasks) -> dict[str, Any]:
    """The results of lm-eval: ``results`` by task, with ``versions``, ``n-samples`` and more.

    Raises:
        ConfigError: if lm-eval is not installed, a task is not known, or there is no chat template.
        DataError: if a task's data cannot be had.
    """
    harness = require("lm_eval", extra="eval", purpose="torchtitan evaluate")
    manager = _manager(tasks)
    if settings.chat and source.tokenizer.chat_template is None:
        raise ConfigError(
            "--chat: the tokenizer has no chat template; name one with --chat-template"
        )
    try:
        return harness.simple_evaluate(
            model=model_class()(source, settings),
            tasks=list(tasks.names),
            task_manager=manager,
            num_fewshot=tasks.n_fewshot,
            limit=tasks.limit,
            system_instruction=tasks.system,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat and tasks.multiturn,
            log_samples=False,
        )
    except OSError as error:  # a data set that is not there, no network
        raise DataError(f"the data of {', '.join(tasks.names)} cannot be had: {error}") from error


def _manager(tasks: Tasks) -> Any:
    """What finds the tasks: in one's own folder alone if they are all there, as lm-eval's own thousands take seconds to list."""
    maker: Any = require("lm_eval.tasks", extra="eval", purpose="torchtitan evaluate").TaskManager
    if tasks.include_path:
        own = maker(include_path=tasks.include_path, include_defaults=False)
        if all(own.match_tasks([name]) for name in tasks.names):
            return own
    every = maker(include_path=tasks.include_path)
    for name in tasks.names:
        if not every.match_tasks([name]):
            hint = did_you_mean(name, every.all_tasks, kind="tasks")
            raise ConfigError(f"--tasks {name}: there is no such task; {hint}")
    return every


class Prompts:
    """Text to token ids and back, as ``transformers`` does it for lm-eval.

    Without a chat template text stays text, whatever it looks like; in a rendered conversation the template's special tokens
    are tokens.

    Args:
        source: of the model.
        settings: how it is asked.
    """

    def __init__(self, source: Source, settings: Settings) -> None:
        tokenizer = source.tokenizer
        named = tokenizer.named_tokens.get("bos_token")
        self._source, self._chat = source, settings.chat
        self._template = source.template() if settings.chat else None
        self.first_id = tokenizer.vocab.get(named, tokenizer.eos_id) if named else tokenizer.eos_id
        """What stands before a text that has nothing before it."""
        self._prefix = [self.first_id] if settings.add_bos else []
        if settings.add_bos is None:
            self._prefix = tokenizer.own_prefix
        self._special = {tokenizer.vocab[name] for name in tokenizer.special_tokens}

    def encode(self, text: str, *, prefix: bool = True) -> list[int]:
        """Token ids; with ``prefix`` after the tokens that begin every text, unless it has them."""
        if self._template is None:
            ids = self._source.tokenizer.encode(text)
        else:
            ids, _ = self._source.tokenizer.encode_pieces(self._template.split(text))
        has_them = self._template is not None and ids[: len(self._prefix)] == self._prefix
        return ids if has_them or not prefix else [*self._prefix, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._source.tokenizer.decode([i for i in ids if i not in self._special])

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        """A conversation as text.

        Args:
            messages: with ``role`` and ``content``.
            answer: end where the assistant speaks; else the last message is its, and is gone on with.

        Raises:
            ConfigError: if the template refuses it.
        """
        if self._template is None:
            raise ConfigError("the task renders conversations; ask with --chat")
        rendered = [dict(message) for message in messages]
        try:
            if answer:
                return self._template.render(rendered, add_generation_prompt=True)
            *before, last = rendered
            text = self._template.render(before, add_generation_prompt=True)
            return text + self._template.escaped(last["content"])
        except TemplateError as error:
            raise ConfigError(
                f"the chat template refuses the task's conversation: {error}; ask without --chat, or set --chat-template"
            ) from error


def sampling_of(wanted: Mapping[str, Any]) -> tuple[Sampling.Config, int, list[str]]:
    """How a task wants texts: sampling, most new tokens, and the texts before which they end.

    Raises:
        ConfigError: if it wants something that is not known here.
    """
    rest = dict(wanted)
    limits = [rest.pop(name, None) for name in _LIMITS]
    limit = next((int(n) for n in limits if n is not None), _DEFAULT_NEW_TOKENS)
    until = rest.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    sample = rest.pop("do_sample", None)
    values = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
    greedy = sample is False or (sample is None and not values.get("temperature"))
    if greedy:
        values = {"repetition_penalty": values.get("repetition_penalty", 1.0), "temperature": 0.0}
    unknown = {name: value for name, value in rest.items() if value is not None}
    config = Sampling.Config(**values)
    problems = [str(problem) for problem in config.check()]
    problems += [f"{name}={value!r} is not known" for name, value in unknown.items()]
    if problems:
        raise ConfigError(
            f"the task's generation_kwargs: {'; '.join(problems)}; choose among until, do_sample, {', '.join((_LIMITS[0], *_SAMPLING))}"
        )
    return config, limit, stops


class Answers:
    """All that lm-eval asks of a model, but for the base class: see ``lm_eval.api.model.TemplateLM`` for what each method is asked.

    Args:
        source: the model.
        settings: how it is asked.
    """

    cache_hook: Any
    """lm-eval's, told of each answer."""

    def __init__(self, source: Source, settings: Settings) -> None:
        super().__init__()
        self._source, self._settings = source, settings
        self._prompts = Prompts(source, settings)
        self._scorer = Scorer(source.model, batch_rows=settings.batch_rows)
        self._generator = Generator(source.model, source.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self._source.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self._prompts.first_id

    @property
    def max_length(self) -> int:
        """Tokens that the model gets at once."""
        return self._settings.seq_len

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say."""
        return _DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Equal for equal tokens."""
        return self._source.tokenizer.fingerprint()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids."""
        del kwargs
        return self._prompts.encode(string, prefix=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text."""
        return self._source.tokenizer.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text."""
        return self._prompts.render(chat_history, answer=add_generation_prompt)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, answer): log-likelihood of the answer, and whether it is the likeliest."""
        del disable_tqdm, kwargs
        asked = [self._window(context, answer) for _, context, answer in requests]
        found: list[tuple[float, bool]] = []
        for (texts, _, _), scores in zip(requests, self._scorer.score(asked), strict=True):
            found.append((float(scores.log_probs.sum()), bool(scores.greedy.all())))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts."""
        del disable_tqdm
        texts = [request.args[0] for request in requests]
        cut = [self._rolling(text) for text in texts]
        scores = self._scorer.score(itertools.chain.from_iterable(cut))
        found: list[float] = []
        for text, parts in zip(texts, cut, strict=True):
            taken = itertools.islice(scores, len(parts))
            found.append(float(sum(part.log_probs.sum() for part in taken)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on from contexts; those that are wished for alike share batches."""
        del disable_tqdm
        found = [""] * len(requests)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        wishes = [repr(sorted(request.args[1].items())) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (wishes[i], -len(prompts[i])))
        for _, same in itertools.groupby(order, key=wishes.__getitem__):
            numbers = list(same)
            for first in range(0, len(numbers), self._settings.batch_rows):
                rows = numbers[first : first + self._settings.batch_rows]
                texts = self._written([prompts[i] for i in rows], requests[rows[0]].args[1])
                for i, text in zip(rows, texts, strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _window(self, context: list[int], answer: list[int]) -> Window:
        """The answer, after as much of the context as there is room for."""
        tokens = np.array([*context, *answer][-(self.max_length + 1) :], dtype=np.int64)
        if not 0 < len(answer) < len(tokens):
            raise ConfigError(
                f"an answer of {len(answer)} tokens leaves no room for a context in {self.max_length}; set a longer --seq-len"
            )
        return Window(tokens, np.arange(len(tokens)) >= len(tokens) - len(answer))

    def _rolling(self, text: str) -> list[Window]:
        """All tokens of a text, the first after the prefix token; each window has one token of the one before."""
        tokens = np.array([self.prefix_token_id, *self.tok_encode(text)], dtype=np.int64)
        asked = np.arange(len(tokens)) > 0
        return list(windows(tokens, asked, seq_len=self.max_length, stride=self.max_length))

    def _written(self, prompts: list[list[int]], wish: Mapping[str, Any]) -> list[str]:
        sampling, limit, stops = sampling_of(wish)
        room = self.max_length - limit
        if room < 1:
            raise ConfigError(
                f"the task wants up to {limit} new tokens of {self.max_length}; set a longer --seq-len"
            )
        completions = self._generator.generate(
            [prompt[-room:] for prompt in prompts],
            sampling,
            max_new_tokens=limit,
            stop_ids=self._source.stop_ids,
            stop_strings=stops,
        )
        texts = [self._prompts.decode(completion.ids) for completion in completions]
        for stop in filter(None, stops):
            texts = [text.partition(stop)[0] for text in texts]
        return texts


@functools.cache
def model_class() -> Callable[[Source, Settings], Any]:
    """`Answers` as an ``lm_eval.api.model.LM``; made on first use, since the base is of that package."""
    api: Any = require("lm_eval.api.model", extra="eval", purpose="torchtitan evaluate")
    return type("TorchtitanLM", (Answers, api.TemplateLM), {})
