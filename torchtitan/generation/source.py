"""What can be asked for text: a training checkpoint, a Hugging Face folder, or a model of the hub."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.component import generation_of
from torchtitan.checkpoint.hugging_face.folder import find_folder, read_model
from torchtitan.checkpoint.initial import checkpoint_in, load_initial
from torchtitan.checkpoint.manifest import STATE
from torchtitan.config.serialize import from_dict
from torchtitan.data.chat.sandbox import TemplateError
from torchtitan.data.chat.template import ChatTemplate, Message
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.generation.stops import stop_ids
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Source:
    """A model that is ready to be asked.

    Attributes:
        model: with its weights.
        tokenizer: its vocabulary.
        generation: what ``generation_config.json`` recommends; empty for a training checkpoint.
    """

    model: Decoder
    tokenizer: Tokenizer
    generation: dict[str, Any]

    @property
    def stop_ids(self) -> set[int]:
        """Tokens after which nothing comes: the end of a document, of a turn, and those that the folder names."""
        named = self.generation.get("eos_token_id")
        listed = named if isinstance(named, list) else [] if named is None else [named]
        return {*stop_ids(self.tokenizer), *listed}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the model shall go on with."""
        bos = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        return [*bos, *self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the model shall answer.

        Raises:
            ConfigError: if there is no chat template, or it refuses the conversation.
        """
        try:
            template = self.template()
            text = template.render(messages, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(
                f"the chat template cannot write this conversation: {error}; name another one with --chat-template"
            ) from error
        return self.tokenizer.encode_pieces(template.split(text))[0]

    def template(self) -> ChatTemplate:
        """The tokenizer's chat template, as of today.

        Raises:
            ConfigError: if there is none.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template; name one with --chat-template (a file, chatml or llama3), or use "
                "torchtitan generate"
            )
        return ChatTemplate(
            self.tokenizer.chat_template,
            special_tokens=self.tokenizer.special_tokens,
            variables=self.tokenizer.named_tokens,
            today=datetime.date.today(),
        )


def open_source(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    tokenizer: Tokenizer.Config | None = None,
) -> Source:
    """Build and fill the model of ``name``.

    Args:
        name: a run's folder (its newest checkpoint), a ``step-...`` folder, a Hugging Face folder, or a name on the hub.
        device: where it computes.
        dtype: of its weights.
        tokenizer: instead of the one that the run or folder has.

    Raises:
        CheckpointError: if there is no such model, or it cannot be read.
        ConfigError: if its kind is not known.
    """
    checkpoint = checkpoint_in(Path(name).expanduser())
    if checkpoint is not None:
        saved = json.loads((checkpoint / STATE).read_bytes())["config"]
        config, generation = from_dict(saved["model"]), {}
        tokens = from_dict(saved["tokenizer"])
    else:
        folder = find_folder(name)
        name, config, generation = str(folder), read_model(folder)[1], generation_of(str(folder))
        tokens = Tokenizer.Config(path=str(folder))
        if tokenizer is None and not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; name a folder that has one with --tokenizer"
            )
    tokens = tokenizer or tokens
    if not isinstance(config, Decoder.Config) or not isinstance(tokens, Tokenizer.Config):
        raise CheckpointError(
            f"{name} has a {type(config).__qualname__}, which does not generate text; name a decoder"
        )
    built = tokens.build()  # first: it may not be there
    with torch.device(device):
        model = config.build()
    if checkpoint is None:
        model = model.to(dtype)  # the files of a checkpoint are compared with the run's type
    load_initial(name, config, model, Agreement())
    model = model.to(dtype).eval().requires_grad_(False)
    if device.type == "cpu" and dtype == torch.float32:
        lay_out_for_few_rows(model)
    return Source(model, built, generation)


def lay_out_for_few_rows(model: Decoder) -> None:
    """Store matrices column by column, in place; nothing but their strides changes.

    A CPU multiplies 4 to 64 rows with a float32 matrix in 0.55 to 0.9 of the time then, and one row in the same. A table that is the
    embedding too stays, as its rows are looked up.
    """
    matrices = [module.weight for module in model.modules() if isinstance(module, Linear)]
    for weight in matrices if model.config.tied else [*matrices, model.head.weight]:
        weight.data = weight.data.t().contiguous().t()
