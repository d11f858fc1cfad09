"""How the tokens of `torchtitan generate` and `torchtitan chat` are chosen."""

import argparse
from typing import Any, cast

import pytest

from torchtitan.cli.sampling_arguments import sampling_of
from torchtitan.errors import ConfigError
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import Source

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def chosen(generation: dict[str, Any], **asked: Any) -> Sampling.Config:
    arguments = argparse.Namespace(seed=3, **dict.fromkeys(NAMES) | asked)
    return sampling_of(arguments, Source(cast(Any, None), cast(Any, None), generation))


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"do_sample": True, "min_p": 0.1, "top_k": None}, {"min_p": 0.1}),
        ({"do_sample": True, "top_k": 0}, {}),
        ({"do_sample": True, "top_k": -1}, {}),
        ({"temperature": 0.6, "top_k": 20}, {}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_what_is_not_asked_for_is_what_the_folder_recommends(
    generation: dict[str, Any], wanted: dict[str, Any]
):
    """As in transformers: 0 is no limit of top-k, and the penalty acts without drawing, too."""
    assert chosen(generation) == Sampling.Config(seed=3, **wanted)


def test_what_is_asked_for_wins_and_must_be_possible():
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert chosen(recommended, temperature=0.0, top_k=1) == Sampling.Config(
        seed=3, temperature=0.0, top_k=1
    )
    with pytest.raises(ConfigError, match="top_k=0: is not positive"):
        chosen({}, top_k=0)
