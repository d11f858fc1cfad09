import pytest
import torch

from tests.tiny import rows, tiny, tiny_model, train
from torchtitan.config import check_tree
from torchtitan.models.layers.init import init_weights
from torchtitan.parallel.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
)
from torchtitan.parallel.compile import Compile, apply_compile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # dynamo looks at .grad of all

B, S, D = 4, 32, 16


def make(config, device="cpu", compile=None, **model):
    with torch.device("meta"):
        made = tiny_model(**model).build()
    made.to_empty(device=device)
    init_weights(made, 0)
    apply_activation_checkpointing(made, config)
    if compile:
        apply_compile(made, compile, memory_budget=config.compiled_budget)
    return made


def forward(model):
    batch = {key: value.to(model.head.weight.device) for key, value in rows(B, S, 4096).items()}
    states = model(batch["tokens"], batch["positions"], batch["document_ids"])
    return model.head(states, batch["labels"])


def host_bytes_by_block(model):
    """Of the blocks of the forward before, last first; while its graph is alive."""
    last = model.layers[0]._offload_order.last
    sizes, call = [], last and last()
    while call is not None:
        sizes.append(sum(away.host.nbytes for away in call._away.values()))
        call = call._before() if call._before is not None else None
    return sizes


def config_of(mode, **changes):
    return ActivationCheckpointing.Config(mode=mode, offload=True, **changes)


@pytest.mark.parametrize("packed_twice", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_loss_and_gradients_are_the_same_bits_and_names_stay(mode, packed_twice):
    plain = make(ActivationCheckpointing.Config(mode=mode), n_layers=3)
    offloaded = make(config_of(mode), n_layers=3)
    assert list(offloaded.state_dict()) == list(plain.state_dict())
    for _ in range(1 + packed_twice):  # two micro-batches that are alive together
        losses = [forward(model) for model in (plain, offloaded)]
        others = [forward(model) for model in (plain, offloaded)] if packed_twice else losses
        assert torch.equal(*losses)
        for loss, other in zip(losses, others, strict=True):
            (loss + other if packed_twice else loss).backward()
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_every_block_but_the_last_waits_in_host_memory_with_what_its_policy_keeps():
    sizes = {}
    for mode in ("none", "selective", "full"):
        model = make(config_of(mode), n_layers=4)
        loss = forward(model)
        sizes[mode] = host_bytes_by_block(model)
        loss.backward()
        del loss
        assert host_bytes_by_block(model) == []  # all is freed with the graph
    assert sizes["full"] == [4 * B * S * D] * 3
    assert len(set(sizes["selective"])) == len(set(sizes["none"])) == 1
    assert sizes["none"][0] > sizes["selective"][0] > sizes["full"][0]


def test_weights_and_tables_that_all_blocks_share_stay():
    model = make(config_of("none"), dim=64)
    loss = forward(model)
    call = model.layers[0]._offload_order.last()
    shapes = {tuple(away.host.shape) for away in call._away.values()}
    assert shapes
    assert not shapes & {tuple(p.shape) for p in model.parameters()}
    assert not shapes & {(B, S, 1, 32)}  # RoPE's
    del loss


def test_nothing_is_copied_without_gradients():
    model = make(config_of("none"))
    with torch.no_grad():
        forward(model)
    assert host_bytes_by_block(model) == []


def test_a_backward_can_run_again():
    model = make(config_of("full"))
    loss = forward(model)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "budget"])
def test_with_compiled_blocks(mode):
    compile = Compile.Config(enabled=True, backend="aot_eager")
    plain, compiled = make(ActivationCheckpointing.Config()), make(config_of(mode), compile=compile)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for model in (plain, compiled):
        loss = forward(model)
        if model is compiled:
            assert all(host_bytes_by_block(model))
        loss.backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def saved_with_budget(budget):
    torch.compiler.reset()
    compile = Compile.Config(enabled=True, backend="aot_eager")
    config = ActivationCheckpointing.Config(mode="budget", memory_budget=budget, offload=True)
    model = make(config, compile=compile, dim=64)
    loss = forward(model)
    (size,) = host_bytes_by_block(model)
    del loss
    return size


@pytest.mark.slow
def test_a_smaller_budget_keeps_less():
    sizes = [saved_with_budget(budget) for budget in (1.0, 0.5, 0.0)]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.slow
def test_a_run_with_it_is_the_same_run(tmp_path):
    losses = []
    for offload in (False, True):
        config = tiny(tmp_path / str(offload), micro_batch_rows=4)
        config.activation_checkpointing.offload = offload
        losses.append(train(config)[0])
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_on_a_gpu_the_copies_run_beside_the_computation_and_change_nothing(mode):
    plain = make(ActivationCheckpointing.Config(mode=mode), "cuda", n_layers=4)
    offloaded = make(config_of(mode), "cuda", n_layers=4)
    for _ in range(3):
        losses = [forward(model) for model in (plain, offloaded)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_settings_that_do_not_go():
    config = tiny("x")
    config.activation_checkpointing = ActivationCheckpointing.Config(
        mode="budget", memory_budget=1.5
    )
    config.compile.loss = True
    config.objective.label_smoothing = 1.0
    config.objective.z_loss = -1.0
    config.model.head.softcap = 0.0
    found = [str(problem) for problem in check_tree(config, 1)]
    assert sorted(found) == sorted(
        [
            "activation_checkpointing.memory_budget=1.5: is not a part of a whole; set 0 to 1",
            "activation_checkpointing.mode=budget: is the compiler's choice, but compile.enabled=False and "
            "compile.backend=inductor; set compile.enabled=True and backend inductor or aot_eager, or mode full or "
            "selective",
            "compile.loss=True: is for compiled runs, but enabled=False and backend=inductor; "
            "set enabled=True and backend inductor, or loss=False",
            "objective.label_smoothing=1.0: is not at least 0 and below 1; set 0 for none",
            "objective.z_loss=-1.0: is negative; set 0 for none",
            "model.head.softcap=0.0: is not positive; set None for no bound",
        ]
    )


def test_selective_recomputation_goes_back_once():
    model = make(config_of("selective", every_n_blocks=2))  # torch itself refuses for the last one
    loss = forward(model)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back through a block once"):
        loss.backward()


def losses_of_a_rank(folder, offload, mode, axis):
    config = tiny(f"{folder}/{offload}", micro_batch_rows=2)
    config.activation_checkpointing = ActivationCheckpointing.Config(mode=mode, offload=offload)
    setattr(config.parallelism, axis, 2)
    return train(config)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "axis"), [("none", "dp_shard"), ("selective", "tp")])
def test_a_run_on_ranks_with_it_is_the_same_run(ranks, tmp_path, mode, axis):
    want, got = (
        ranks(losses_of_a_rank, 2, str(tmp_path), offload, mode, axis) for offload in (False, True)
    )
    assert got == want
