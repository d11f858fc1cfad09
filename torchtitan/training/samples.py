"""Texts that the model writes as it is trained, for a person to read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError, DataError
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.stops import stop_ids
from torchtitan.metrics import GeneratedText
from torchtitan.models.decoder import Decoder
from torchtitan.models.model import Model
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.fsdp import reshard
from torchtitan.parallel.mesh import Mesh


class Samples(Configurable):
    """Lets the model go on with the same prompts every so many steps.

    Training does not notice: weights, data and random numbers stay as they are.

    Args:
        config: its settings.
        generator: of the model in training.
        prompts: token ids.
        tokenizer: of the run.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When and from what texts are written; they go to the log, to `samples.jsonl` and to the trackers."""

        every_n_steps: int = 100
        """Optimizer steps between samples; there are some after the last step too. 0 means only those."""
        prompts: list[str] = field(default_factory=list)
        """What the model goes on with; where the data is conversations, questions that it answers. Empty takes the first
        held-out rows: conversations up to the first answer, texts up to some words."""
        held_out_rows: int = 2
        """How many of these, if `prompts` is empty."""
        max_new_tokens: int = 64
        """Limit of each text."""
        sampling: Sampling.Config = field(default_factory=lambda: Sampling.Config(temperature=0.0))
        """How tokens are chosen: the likeliest, so that what changes is the model."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("held_out_rows", "max_new_tokens"):
                if getattr(self, name) < 1:
                    yield Problem(name, getattr(self, name), "is not positive", "set 1 or more")
            if self.every_n_steps < 0:
                yield Problem("every_n_steps", self.every_n_steps, "is negative", "set 0 or more")
            if "" in self.prompts:
                yield Problem("prompts", self.prompts, "has an empty text", "remove it")

        def check_run(self, model: Model.Config, *, held_out: bool) -> Iterator[Problem]:
            """Yield what keeps ``model`` from writing texts.

            Args:
                model: of the run.
                held_out: whether there are held-out rows.
            """
            if not isinstance(model, Decoder.Config):
                kind = type(model).__qualname__
                yield Problem("", "set", f"a {kind} does not write texts", "set it to None")
            if not self.prompts and not held_out:
                yield Problem(
                    "prompts",
                    self.prompts,
                    "is empty, and there are no held-out rows to take some from",
                    "set some, or validation",
                )

        def check_degrees(self, degrees: Degrees) -> Iterator[Problem]:
            """Yield a problem if no rank has all blocks."""
            if degrees.pp > 1:
                yield Problem(
                    "",
                    "set",
                    f"texts are written token by token through all blocks, which parallelism.pp={degrees.pp} spreads over ranks",
                    "set it to None and sample from a checkpoint (torchtitan generate), or parallelism.pp=1",
                )

        def build(
            self,
            *,
            model: Model,
            tokenizer: Tokenizer,
            mesh: Mesh,
            data: Loader.Config,
            seq_len: int,
        ) -> "Samples":
            """Read the prompts.

            Args:
                model: in training; all ranks take part.
                tokenizer: of the run.
                mesh: of the run.
                data: gives prompts their form, and held-out rows.
                seq_len: most tokens of a held-out prompt.

            Raises:
                ConfigError: if the model writes no texts.
                DataError: if there are no prompts in the held-out rows.
            """
            if not isinstance(model, Decoder):
                raise ConfigError(
                    f"samples: a {type(model).__name__} does not write texts; set it to None"
                )
            if self.prompts:
                prompts = [data.prompt(text, tokenizer) for text in self.prompts]
            else:
                prompts = data.first_prompts(tokenizer, seq_len, self.held_out_rows)
            if not prompts:
                raise DataError(
                    f"samples: none of the held-out rows begins with a prompt of up to seq_len={seq_len} tokens; set samples.prompts"
                )
            generator = Generator(
                model,
                tokenizer,
                token_multiple=mesh.degrees.sequence_shards,
                agree=FirstRank(mesh.control) if mesh.world_size > 1 else None,
            )
            return Samples(self, generator, prompts, tokenizer)

    def __init__(
        self,
        config: Config,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self._generator = generator
        self._tokenizer = tokenizer

    def due(self, step: int, last: bool) -> bool:
        """Whether to write after optimizer step number ``step`` (counted from 1)."""
        every = self.config.every_n_steps
        return last or (every > 0 and step % every == 0)

    def run(self) -> list[GeneratedText]:
        """Go on with every prompt. All ranks take part and get the same texts."""
        found = self._generator.generate(
            self.prompts,
            self.config.sampling,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=stop_ids(self._tokenizer),
        )
        reshard(self._generator.model)
        return [
            GeneratedText(self._tokenizer.decode(prompt), completion.text, completion.ending)
            for prompt, completion in zip(self.prompts, found, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class FirstRank:
    """The first rank's tokens for all: see `Agrees`.

    Attributes:
        group: of all ranks, on the CPU.
    """

    group: dist.ProcessGroup

    def __call__(self, token_ids: list[int]) -> list[int]:
        """See `Agrees`."""
        ids = torch.tensor(token_ids)
        dist.broadcast(ids, group=self.group, group_src=0)
        return ids.tolist()
