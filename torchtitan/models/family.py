"""What a family of models must say to exchange weights and configs with Hugging Face folders, and where it is found."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.suggest import did_you_mean
from torchtitan.errors import ConfigError
from torchtitan.models.mapping import Drop, Layout, Own, Rule, lay_out
from torchtitan.models.model import Model


class Family(ABC):
    """Models that share a ``model_type`` in Hugging Face's ``config.json``."""

    model_type: str
    """Name of the family there."""

    @abstractmethod
    def rules(self) -> Sequence[Rule | Drop | Own]:
        """How parameters correspond to tensors; each parameter that a config can ask for is named by one rule."""

    @abstractmethod
    def to_hf(self, config: Model.Config) -> dict[str, Any]:
        """``config.json`` of a model, without the type of the weights.

        Raises:
            ConfigError: if the format has no words for the model; names each setting.
        """

    @abstractmethod
    def from_hf(self, hf: Mapping[str, Any]) -> Model.Config:
        """The model that a ``config.json`` describes.

        Raises:
            ConfigError: lists everything that is missing, unknown to us, or not supported.
        """

    def layout(self, config: Model.Config) -> Layout:
        """The rules, laid out for the whole model of ``config``."""
        with torch.device("meta"):
            model = config.build()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        return lay_out(self.rules(), shapes, model.shared_parameters())


@cache
def families() -> dict[str, Family]:
    """All families by model_type: each folder of ``torchtitan/models`` that has a ``family.py`` with `FAMILIES`."""
    found: dict[str, Family] = {}
    here = Path(__file__).parent
    for entry in pkgutil.iter_modules([str(here)]):
        if entry.ispkg and (here / entry.name / "family.py").is_file():
            module = importlib.import_module(f"torchtitan.models.{entry.name}.family")
            found.update({family.model_type: family for family in module.FAMILIES})
    return found


def find_family(model_type: str) -> Family:
    """The family of that name.

    Raises:
        ConfigError: if there is none.
    """
    known = families()
    if model_type not in known:
        raise ConfigError(
            f"model_type={model_type!r} is no family that is known here; "
            f"{did_you_mean(model_type, known, kind='families')}"
        )
    return known[model_type]
