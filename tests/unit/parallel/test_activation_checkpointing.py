import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import rows, tiny, tiny_model
from torchtitan.config import check_tree, differences
from torchtitan.models.decoder import DecoderBlock
from torchtitan.models.layers.init import init_weights
from torchtitan.parallel.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
)

B, S, D = 4, 32, 16
FULL = ActivationCheckpointing.Config(mode="full")
SELECTIVE = ActivationCheckpointing.Config(mode="selective")


def make(config, **model):
    with torch.device("meta"):
        made = tiny_model(**model).build()
    made.to_empty(device="cpu")
    init_weights(made, 0)
    apply_activation_checkpointing(made, config)
    return made


class Live(TorchDispatchMode):
    """Bytes of the tensors made while it was entered that are still there, views of weights aside."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.weights:
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def bytes(self):
        return sum(size for storage, size in self.storages.values() if storage() is not None)


def hidden_states(model):
    batch = rows(B, S, 4096)
    return model(batch["tokens"], batch["positions"], batch["document_ids"])


def saved_bytes(config, n_layers):
    model = make(config, n_layers=n_layers)
    with Live(model) as live:
        out = hidden_states(model)
    assert out.requires_grad
    return live.bytes()


def saved_by_a_block(config):
    return saved_bytes(config, 6) - saved_bytes(config, 5)


def test_full_keeps_a_blocks_input_and_nothing_else():
    assert saved_by_a_block(FULL) == 4 * B * S * D


def test_selective_lies_between_and_its_policy_is_a_dial():
    nothing = saved_by_a_block(ActivationCheckpointing.Config())
    dial = [
        saved_by_a_block(ActivationCheckpointing.Config(mode="selective", save_every_n_matmuls=n))
        for n in (1, 2, 0)
    ]
    sizes = [nothing, *dial, saved_by_a_block(FULL)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5


def test_every_nth_block():
    config = ActivationCheckpointing.Config(mode="full", every_n_blocks=2)
    model = make(config, n_layers=3)
    changed = [type(block) is not DecoderBlock for block in model.blocks()]
    assert changed == [True, False, True]
    assert (
        saved_bytes(FULL, 4)
        < saved_bytes(config, 4)
        < saved_bytes(ActivationCheckpointing.Config(), 4)
    )


def loss_and_gradients(config, **model):
    made = make(config, **model)
    loss = made.head(hidden_states(made), rows(B, S, 4096)["labels"])
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        SELECTIVE,
        ActivationCheckpointing.Config(mode="selective", save_every_n_matmuls=0),
        ActivationCheckpointing.Config(mode="full", every_n_blocks=2),
    ],
    ids=lambda c: f"{c.mode}-{c.every_n_blocks}-{c.save_every_n_matmuls}",
)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_the_same_bits_and_names_stay(config, tied):
    want_loss, want = loss_and_gradients(ActivationCheckpointing.Config(), n_layers=3, tied=tied)
    loss, found = loss_and_gradients(config, n_layers=3, tied=tied)
    assert torch.equal(loss, want_loss)
    assert list(found) == list(want)
    for name, grad in found.items():
        assert torch.equal(grad, want[name]), name


class Dropping(nn.Module):
    """A model of one block that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def blocks(self):
        return [self.block]


@pytest.mark.parametrize("config", [FULL, SELECTIVE], ids=["full", "selective"])
def test_random_numbers_are_drawn_alike_in_the_recomputation(config):
    torch.manual_seed(0)
    model = Dropping()
    x = torch.randn(16, 8)

    def run():
        torch.manual_seed(1)
        out = model.block(x)
        torch.rand(5)  # moves the generator between forward and backward
        grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        return [out, *grads, torch.rand(1)]  # what is drawn afterwards is the same too

    want = run()
    apply_activation_checkpointing(model, config)  # pyright: ignore[reportArgumentType] - has what it needs
    assert isinstance(model.block, nn.Sequential)
    assert type(model.block) is not nn.Sequential
    for one, other in zip(run(), want, strict=True):
        assert torch.equal(one, other)


def test_it_is_no_change_of_the_mathematics():
    before, after = tiny("x"), tiny("x")
    after.activation_checkpointing = FULL
    assert [d.changes_mathematics for d in differences(before, after)] == [False]


def test_settings_that_are_none():
    config = tiny("x")
    config.activation_checkpointing = ActivationCheckpointing.Config(
        mode="selective", every_n_blocks=0, save_every_n_matmuls=-1
    )
    assert [str(problem) for problem in check_tree(config, 1)] == [
        "activation_checkpointing.every_n_blocks=0: is not positive; "
        "set 1 for every block, or mode none for no block",
        "activation_checkpointing.save_every_n_matmuls=-1: is negative; "
        "set 1 to keep all, 2 for every second one, 0 for none",
    ]


def test_selective_does_not_go_with_a_backward_in_two_parts():
    config = tiny("x", micro_batch_rows=2)
    config.parallelism.pp = 2
    config.model = tiny_model(n_layers=4)
    config.parallelism.pipeline.schedule = "ZBVZeroBubble"
    config.activation_checkpointing = SELECTIVE
    assert [str(problem) for problem in check_tree(config, 2)] == [
        "activation_checkpointing.mode=selective: recomputes a block once, but "
        "parallelism.pipeline.schedule=ZBVZeroBubble goes back through it twice, for its inputs and for its weights; "
        "set mode full or none, or a schedule with whole backwards such as 1F1B or Interleaved1F1B"
    ]
    config.activation_checkpointing = FULL
    assert check_tree(config, 2) == []


def test_leaving_blocks_out_is_refused_where_the_compiler_chooses():
    config = ActivationCheckpointing.Config(mode="budget", every_n_blocks=2)
    assert [str(problem) for problem in config.check()] == [
        "every_n_blocks=2: leaves blocks out, but mode=budget is for all of them: they share one compiled graph; "
        "set 1 and a higher memory_budget, or mode full or selective"
    ]
    config.every_n_blocks = 1
    assert not list(config.check())
