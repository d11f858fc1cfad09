"""Tensor, sequence and loss parallel compute what one process computes."""

import copy
import random
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.tiny import full, rows, running, tiny, tiny_model, train, weights
from tests.traffic import TrafficRecorder, stated
from torchtitan import torch_api
from torchtitan.batch import IGNORE_INDEX
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.plan import COLWISE, HEADS, ROWWISE, SEQUENCE, WHOLE_INPUT
from torchtitan.ops import collectives
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy
from torchtitan.ops.vocabulary import VocabularyShard
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel import tensor
from torchtitan.parallel.fsdp_traffic import fsdp_traffic
from torchtitan.parallel.tensor import apply_tensor_parallel
from torchtitan.parallel.tensor_traffic import tensor_traffic
from torchtitan.parallel.traffic import Step
from torchtitan.training.feed import to_microbatches


def model_of(**changes):
    """Heads for up to 4 tp ranks; a vocabulary that neither 2 nor 4 divide."""
    heads = GQA.Config(n_heads=8, n_kv_heads=4)
    return tiny_model(**{"dim": 32, "attention": heads, "vocab_size": 4099, **changes})


def gradients(folder, tp, shard, sequence_parallel, micro_batch_rows, model, compiled=False):
    """Loss, gradient norm, gradients and weights of one step over 8 uneven rows."""
    config = tiny(folder, micro_batch_rows=micro_batch_rows)
    config.model = model
    config.parallelism.tp, config.parallelism.dp_shard = tp, shard
    config.parallelism.sequence_parallel = sequence_parallel
    config.compile.enabled = compiled
    trainer = config.build()
    mesh, policy = trainer.mesh, trainer.models["policy"]
    batch = rows(8, 32, config.model.vocab_size)
    local = 8 // mesh.dp_world_size
    own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
    size = trainer.micro_batch_rows
    microbatches = [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]
    totals = policy.engine.totals(microbatches)
    loss = policy.engine.forward_backward(microbatches, totals)
    norm = global_grad_norm(policy.model.parameters())
    grads = {name: full(p.grad) for name, p in policy.model.named_parameters()}
    return loss.total.item(), norm.item(), grads, weights(trainer)


def assert_same(result, expected):
    loss, norm, grads, initial = result
    want_loss, want_norm, want_grads, want_initial = expected
    assert initial.keys() == want_initial.keys()
    assert all(torch.equal(initial[name], want_initial[name]) for name in initial)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    for name, grad in grads.items():
        want = want_grads[name]
        assert want.norm() > 0, name
        assert (grad - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=["untied", "tied"])
def alone(request, rank_pool, tmp_path_factory):
    model = model_of(tied=request.param == "tied")
    folder = tmp_path_factory.mktemp("alone")
    return model, rank_pool.run(gradients, 1, folder, 1, 1, True, None, model)[0]


@pytest.mark.parametrize(("tp", "shard"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("micro_batch_rows", [None, 2])
def test_mesh_gives_the_same_gradients(
    ranks, tmp_path, alone, tp, shard, sequence_parallel, micro_batch_rows
):
    model, expected = alone
    for result in ranks(
        gradients, tp * shard, tmp_path, tp, shard, sequence_parallel, micro_batch_rows, model
    ):
        assert_same(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
def test_compiled_blocks_give_the_same_gradients(ranks, tmp_path, alone, sequence_parallel):
    """Blocks share one graph, so what a graph knows of a module must not be that of another block's."""
    model, expected = alone
    for result in ranks(
        gradients, 4, tmp_path, 2, 2, sequence_parallel, 2, model, True, timeout_s=600
    ):
        assert_same(result, expected)


FAULTS = {
    "gradients of norms are not added up": (
        True,
        tensor,
        "gradients_are_summands",
        lambda cut, sequence_parallel: False,
    ),
    "gradients of gathered inputs are not added up": (
        True,
        collectives,
        "reduce_scatter",
        lambda x, dim, group: x.chunk(group.size(), dim)[group.rank()],
    ),
    "gradients of whole inputs are not added up": (
        False,
        collectives._CopyToAll,
        "backward",
        staticmethod(lambda ctx, grad: (grad, None)),
    ),
    "softmax over own entries": (True, VocabularyShard, "reduce", lambda self, *parts: parts),
    "whole gradients of norms are added up": (
        False,
        tensor,
        "gradients_are_summands",
        lambda cut, sequence_parallel: True,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_fault(ranks, tmp_path, alone, fault):
    model, expected = alone
    for result in ranks(gradients_with_a_fault, 2, tmp_path, fault, model):
        with pytest.raises(AssertionError):
            assert_same(result, expected)


def gradients_with_a_fault(folder, fault, model):
    sequence_parallel, owner, name, broken = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        return gradients(folder, 2, 1, sequence_parallel, None, model)


def losses_of_a_run(folder, steps, tp, shard, sequence_parallel=True):
    config = tiny(folder, steps=steps, micro_batch_rows=2)
    config.model = model_of(tied=True)
    config.parallelism.tp, config.parallelism.dp_shard = tp, shard
    config.parallelism.sequence_parallel = sequence_parallel
    return train(config)[0]


@pytest.fixture(scope="module")
def losses_alone(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    return rank_pool.run(losses_of_a_run, 1, folder, 6, 1, 1)[0]


@pytest.mark.parametrize(
    ("tp", "shard", "sequence_parallel"), [(2, 1, False), (4, 1, True), (2, 2, True)]
)
def test_whole_runs_have_the_same_losses(
    ranks, tmp_path, losses_alone, tp, shard, sequence_parallel
):
    for losses in ranks(losses_of_a_run, tp * shard, tmp_path, 6, tp, shard, sequence_parallel):
        assert losses == pytest.approx(losses_alone, rel=1e-5)


def test_a_checkpoint_moves_between_tensor_parallel_and_other_meshes(ranks, tmp_path, losses_alone):
    ranks(losses_of_a_run, 2, tmp_path / "saved", 3, 2, 1)
    next_losses = []
    for i, (tp, shard) in enumerate([(1, 2), (1, 1), (2, 2)]):
        shutil.copytree(tmp_path / "saved", tmp_path / f"{i}")
        after = ranks(losses_of_a_run, tp * shard, tmp_path / f"{i}", 6, tp, shard)
        for losses in after:
            assert losses == pytest.approx(losses_alone[3:], rel=1e-5)
        next_losses.append(after[0][0])
    assert next_losses == pytest.approx([next_losses[0]] * 3, rel=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that this rank held in one tensor, and its shape."""

    def __init__(self):
        super().__init__()
        self.numel, self.shape = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                held = leaf._local_tensor if isinstance(leaf, torch_api.DTensor) else leaf
                if held.numel() > self.numel:
                    self.numel, self.shape = held.numel(), tuple(held.shape)
        return out


CHUNK = 64


def largest_tensor(folder, tp):
    config = tiny(folder)
    config.model = model_of()
    config.model.head.chunk_tokens = CHUNK
    config.parallelism.tp = tp
    trainer = config.build()
    engine = trainer.models["policy"].engine
    batch = rows(2, 256, config.model.vocab_size)
    totals = engine.totals([batch])
    with LargestTensor() as largest:
        engine.forward_backward([batch], totals)
    return largest.numel, largest.shape


def test_no_rank_ever_holds_logits_of_the_whole_vocabulary(ranks, tmp_path):
    (alone,) = ranks(largest_tensor, 1, tmp_path, 1)
    assert alone == (CHUNK * 4099, (CHUNK, 4099))  # the measure sees the logits
    first, second = ranks(largest_tensor, 2, tmp_path, 2)
    assert first == (CHUNK * 2050, (CHUNK, 2050))
    assert second[0] <= CHUNK * 2050


def traffic(folder, degrees, sequence_parallel, recompute, micro_batches):
    """What a rank was seen to send in a step, what is stated, and the formula of the page."""
    config = tiny(folder, micro_batch_rows=2)
    config.model = model_of()
    config.activation_checkpointing.mode = recompute
    config.parallelism.tp, config.parallelism.dp_shard = degrees
    config.parallelism.sequence_parallel = sequence_parallel
    with running(config) as trainer:
        model, engine, mesh = (
            trainer.models["policy"].model,
            trainer.models["policy"].engine,
            trainer.mesh,
        )
        batch = rows(2 * micro_batches, 32, config.model.vocab_size)
        batch["labels"] = batch["tokens"]  # all count
        microbatches = to_microbatches(batch, 2, mesh)
        totals = engine.totals(microbatches)
        with TrafficRecorder() as recorder:
            engine.forward_backward(microbatches, totals)
        step = Step(micro_batches, micro_batch_rows=2, seq_len=32, compute_itemsize=4)
        tensor_rows = list(tensor_traffic(model, mesh, step))
        seen = {key: list(value) for key, value in recorder.seen.items()}
        said = stated([*tensor_rows, *fsdp_traffic(model, mesh, step)])
        return (
            seen,
            said,
            {row.what: row.sent_bytes for row in tensor_rows if row.operation == "all_reduce"},
            sum(row.sent_bytes for row in tensor_rows),
        )


@pytest.mark.parametrize(
    ("degrees", "sequence_parallel", "recompute", "micro_batches"),
    [
        ((2, 1), True, "none", 1),
        ((4, 1), False, "none", 1),
        ((2, 2), True, "full", 2),
        ((2, 1), False, "full", 1),
        ((2, 1), True, "selective", 2),
    ],
)
def test_traffic_is_what_is_stated_and_what_the_formula_says(
    ranks, tmp_path, degrees, sequence_parallel, recompute, micro_batches
):
    tp, shard = degrees
    unit = 2 * 32 * 32 * 4 * (tp - 1) / tp  # T D b (tp-1)/tp
    again = {"none": 0, "full": 3, "selective": 2}[recompute] if sequence_parallel else 0
    if recompute == "full" and not sequence_parallel:
        again = 2
    layers = 2
    stream = ((8 + again) * layers + 4) * unit * micro_batches
    loss = 6 * 2 * 32 * 4 * (tp - 1) / tp * micro_batches
    norms = 2 * (2 * layers + 1) * 32 * 4 * (tp - 1) / tp if sequence_parallel else 0
    for seen, said, sums, total in ranks(
        traffic, tp * shard, tmp_path, degrees, sequence_parallel, recompute, micro_batches
    ):
        assert seen == said
        assert sums["softmax of the loss"] == loss
        assert total == stream + loss + norms


def cross_entropies(cases, seed):
    """Compare ``cases`` random problems on this rank's part of the vocabulary with the dense computation."""
    draw, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    for case in range(cases):
        tokens, dim, chunk = draw.randint(0, 30), draw.randint(1, 9), draw.randint(1, 40)
        vocab, masked = draw.randint(world, 23), draw.choice([0.0, 0.3, 1.0])
        scale = draw.choice(
            [1.0, 30.0]
        )  # at 30 some exponentials overflow if the maximum is left in
        g = torch.Generator().manual_seed(case)
        hidden = (scale * torch.randn(tokens, dim, generator=g)).requires_grad_()
        weight = torch.randn(vocab, dim, generator=g).requires_grad_()
        labels = torch.randint(vocab, (tokens,), generator=g)
        labels[torch.rand(tokens, generator=g) < masked] = IGNORE_INDEX
        bounds = sorted([0, vocab, *draw.sample(range(1, vocab), world - 1)])  # uneven at will
        start, size = bounds[rank], bounds[rank + 1] - bounds[rank]
        mine = weight.detach()[start : start + size].clone().requires_grad_()
        shard = VocabularyShard(dist.group.WORLD, start, size, vocab)
        loss = linear_cross_entropy(hidden, mine, labels, chunk_tokens=chunk, vocabulary=shard)
        dense = F.cross_entropy(
            hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        torch.testing.assert_close(loss, dense, rtol=1e-5, atol=1e-5)
        grad_hidden, grad_mine = torch.autograd.grad(0.5 * loss, (hidden, mine))
        dist.all_reduce(grad_hidden)
        want_hidden, want_weight = torch.autograd.grad(0.5 * dense, (hidden, weight))
        want_mine = want_weight[start : start + size]
        # Logits of 300 carry 2e-5 in float32, and so do their exponentials, in the dense computation too.
        limit = 1e-5 if scale == 1 else 1e-3
        for got, want in ((grad_hidden, want_hidden), (grad_mine, want_mine)):
            assert (got - want).norm() <= limit * want.norm() + 1e-6
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_cross_entropy_of_a_divided_vocabulary_equals_the_dense_one(ranks, world_size):
    assert all(ranks(cross_entropies, world_size, 40, 1))


class Layer(nn.Module):
    """One of each cut, with biases: what no model here has yet must be right too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.inner = Inner()
        self.last = nn.RMSNorm(8)

    def forward(self, hidden_states):
        return self.last(hidden_states + self.inner(self.norm(hidden_states)))

    def parallel_plan(self):
        return {"norm": SEQUENCE, "last": SEQUENCE}


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.RMSNorm(4)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden_states):
        heads = self.up(hidden_states).unflatten(-1, (-1, 4))
        return self.down(self.norm(heads).flatten(2).tanh())

    def parallel_plan(self):
        return {"": WHOLE_INPUT, "up": COLWISE, "norm": HEADS, "down": ROWWISE}


def layer_gradients(how, sequence_parallel):
    """Relative difference of each gradient of a cut `Layer` from that of a whole one; and of the output."""
    torch.manual_seed(0)
    whole = Layer()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    cut = copy.deepcopy(whole)
    mesh = torch_api.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tensor_parallel(cut, mesh, sequence_parallel=sequence_parallel)
    stream = torch.randn(2, 6, 8)
    weight = torch.randn(2, 6, 8)
    part = [
        t.chunk(mesh.size(), 1)[mesh.get_rank()] if sequence_parallel else t
        for t in (stream, weight)
    ]
    wanted = whole(stream.requires_grad_())
    (wanted * weight).sum().backward()
    if how == "compiled":
        cut.compile(fullgraph=True)
    mine = part[0].detach().requires_grad_()
    out = checkpoint(cut, mine, use_reentrant=False) if how == "recomputed" else cut(mine)
    (out * part[1]).sum().backward()
    pairs = {
        name: (full(p.grad), want.grad)
        for (name, p), want in zip(cut.named_parameters(), whole.parameters(), strict=True)
    }
    pairs["input"] = (mine.grad, stream.grad)
    pairs["output"] = (out, wanted)
    if sequence_parallel:
        for name in ("input", "output"):
            shard = pairs[name][1].chunk(mesh.size(), 1)[mesh.get_rank()]
            pairs[name] = (pairs[name][0], shard)
    assert all(isinstance(p, torch_api.DTensor) for p in cut.parameters())
    return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize(
    "how", ["plain", "recomputed", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_every_cut_is_exact(ranks, how, sequence_parallel):
    for differences in ranks(layer_gradients, 2, how, sequence_parallel, timeout_s=300):
        assert len(differences) == 9
        assert max(differences.values()) < 1e-5, differences
