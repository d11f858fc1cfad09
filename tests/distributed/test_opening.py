"""A Trainer that cannot be built closes what it opened, in whatever order it failed."""

import logging
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.tiny import tiny
from torchtitan import torch_api
from torchtitan.checkpoint import Checkpointer
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError
from torchtitan.metrics import Metrics
from torchtitan.metrics.sinks.base import Sink
from torchtitan.optim.optimizer import AdamW
from torchtitan.parallel import mesh
from torchtitan.training.guard import Guard


def fail(*args, **kwargs):
    raise ConfigError("this part cannot be built")


PARTS = {
    "the axes": (torch_api.DeviceMesh, "from_group"),
    "the tokenizer": (Tokenizer, "__init__"),
    "the data": (Loader, "__init__"),
    "the optimizer": (AdamW, "__init__"),
    "the checkpoints": (Checkpointer, "__init__"),
    "the weights": (Checkpointer, "load_initial"),
    "the metrics": (Metrics, "__init__"),
    "the last part": (Guard, "__init__"),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_was_opened_is_closed(tmp_path, monkeypatch, part):
    closed = []
    for cls in (Metrics, Checkpointer, Loader):
        close = cls.close
        monkeypatch.setattr(
            cls, "close", lambda self, c=close, n=cls.__name__: (closed.append(n), c(self))
        )
    monkeypatch.setattr(*PARTS[part], fail)
    with pytest.raises(ConfigError, match="this part cannot be built"):
        tiny(tmp_path).build()
    assert not dist.is_initialized()
    order = ["Loader", "Checkpointer", "Metrics"]
    opened = {"the optimizer": 1, "the checkpoints": 1, "the weights": 2, "the metrics": 2}
    expected = order[: {**opened, "the last part": 3}.get(part, 0)]
    assert closed[-len(expected) :] == expected[::-1] if expected else closed in ([], ["Loader"])


class Refusing(Sink):
    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        def build(self, *, folder, run):
            raise ConfigError("this sink refuses its settings")


def test_a_sink_that_refuses_its_settings_closes_those_before_it(tmp_path):
    config = tiny(tmp_path)
    config.metrics.sinks = [Refusing.Config()]
    handlers = [*logging.getLogger().handlers]
    with pytest.raises(ConfigError, match="this sink refuses"):
        config.build()
    assert logging.getLogger().handlers == handlers
    assert not dist.is_initialized()


def build_twice(folder):
    """On ranks whose group is the Trainer's own: what is left of it after a failure, and whether the next one works."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    names = iter(range(9))

    def init(device, timeout_s):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store-{next(names)}", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "_init_process_group", init)
        with patch.context() as broken:
            broken.setattr(AdamW, "__init__", fail)
            with pytest.raises(ConfigError, match="this part cannot be built"):
                tiny(f"{folder}/run").build()
        left = dist.is_initialized()
        trainer = tiny(f"{folder}/run").build()
        trainer.train()
        trainer.close()
        closed = not dist.is_initialized()
    init(None, 0)  # the test's own, which it ends with
    return left, closed, trainer.step


def test_ranks_that_fail_alike_leave_their_group(ranks, tmp_path):
    assert ranks(build_twice, 2, tmp_path) == [(False, True, 4)] * 2
