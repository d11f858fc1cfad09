"""Context parallelism of each kind computes what one process computes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.context_memory import saved_bytes
from tests.distributed.test_validation import with_validation
from tests.tiny import full, rows, running, tiny, tiny_model, train, weights
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA, SDPA
from torchtitan.models.layers.mask import Mask
from torchtitan.ops import attention_pieces, context_attention
from torchtitan.ops.all_to_all import tokens_to_heads
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel import context
from torchtitan.parallel.context import Layout, apply_context_parallel, cut
from torchtitan.training.feed import to_microbatches

KINDS = ["all_gather", "ring", "ulysses"]
SEQ = 32


def document_ids(layout, batch):
    """Layouts of documents: none, all of a row, random ones, one token each, with edges at the chunks' edges."""
    if layout == "none":
        return None
    if layout == "random":
        return rows(batch, SEQ, 50, seed=3)["document_ids"]
    length = {"whole": SEQ, "single": 1, "eighths": SEQ // 8, "odd": 7}[layout]
    return (torch.arange(SEQ) // length).expand(batch, SEQ)


CASES = [  # (documents, window, causal, query heads, kv heads)
    *((layout, None, True, 4, 2) for layout in ("none", "whole", "random", "single", "eighths", "odd")),
    *(("random", window, True, 4, 4) for window in (1, 3, 9, 100)),
    *(("none", window, True, 8, 4) for window in (1, 5, 17)),
    *((layout, window, False, 4, 1) for layout in ("random", "none") for window in (None, 5)),
    ("random", None, True, 12, 6),
    ("random", None, True, 4, 1),
]  # fmt: skip


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SDPA()


def attention_differences(kind, dtype, tile):
    """For each case the largest differences of output and input gradients from SDPA on whole rows, over tolerance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_pieces.pieces, "__kwdefaults__", {"tile": tile})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        model = OneLayer()
        apply_context_parallel(model, mesh, kind)
        return [differences(model.inner, mesh, kind, dtype, case) for case in CASES]


def differences(wrapped, mesh, kind, dtype, case):
    layout, window, causal, heads, kv_heads = case
    g = torch.Generator().manual_seed(1)
    shapes = [(2, SEQ, h, 8) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(s, generator=g).to(dtype) for s in shapes)
    ids = document_ids(layout, 2)
    whole = [t.float().clone().requires_grad_() for t in (q, k, v)]
    want = SDPA()(*whole, Mask(ids, causal=causal, window=window))
    want_grads = torch.autograd.grad(want, whole, grad.float())
    batch = {
        "tokens": torch.zeros(2, SEQ),
        "q": q,
        "k": k,
        "v": v,
        "grad": grad,
        "want": want.detach(),
    }
    batch |= dict(zip(("dq", "dk", "dv"), want_grads, strict=True)) | (
        {"ids": ids} if ids is not None else {}
    )
    local = cut(batch, mesh, kind)
    own = [local[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out = wrapped(*own, Mask(local.get("ids"), causal=causal).windowed(window))
    grads = torch.autograd.grad(out, own, local["grad"])
    assert [t.dtype for t in (out, *grads)] == [dtype] * 4
    mask = Mask(local.get("ids"), causal=causal).windowed(window)
    again = checkpoint(wrapped, *own, mask, use_reentrant=False)  # the exchange runs once more
    for first, second in zip(grads, torch.autograd.grad(again, own, local["grad"]), strict=True):
        assert torch.equal(first, second)
    pairs = zip((out, *grads), (local[n] for n in ("want", "dq", "dk", "dv")), strict=True)
    least = local["grad"].float().norm()  # with a window of 1 the gradients of q and k are 0
    return [((a - b).float().norm() / torch.maximum(b.norm(), least)).item() for a, b in pairs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "tile"), [(2, 512), (4, 3), (1, 512)])
def test_attention_and_its_gradients_equal_sdpa_on_whole_rows(ranks, kind, world_size, tile):
    for rank, found in enumerate(
        ranks(attention_differences, world_size, kind, torch.float32, tile)
    ):
        for case, values in zip(CASES, found, strict=True):
            assert max(values) < 1e-6, (rank, case, values)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_bfloat16_is_as_close_as_bfloat16(ranks, kind):
    for found in ranks(attention_differences, 2, kind, torch.bfloat16, 512):
        for case, values in zip(CASES, found, strict=True):
            assert max(values) < 2e-2, (case, values)


def compiled_differences(kind):
    """Whether one graph of the wrapped backend gives what it gives without compiling."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = OneLayer()
    apply_context_parallel(model, mesh, kind)
    ids = None if kind == "ulysses" else document_ids("random", 2)
    compiled = torch.compile(model.inner, fullgraph=True, backend="aot_eager")
    same = []
    for _ in range(2):  # with another number of pieces
        local = cut(
            {"tokens": torch.zeros(2, SEQ)} | ({} if ids is None else {"ids": ids}), mesh, kind
        )
        mask = Mask(local.get("ids"))
        model.inner.prepare(mask, SEQ // 2, torch.device("cpu"))
        qkv = [torch.randn(2, SEQ // 2, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        results = []
        for attend in (model.inner, compiled):
            out = attend(*qkv, mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
        same += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        ids = ids if ids is None else document_ids("odd", 2)
    return all(same)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_one_graph_under_compile(ranks, kind):
    assert ranks(compiled_differences, 2, kind) == [True, True]


def check_operators():
    group = dist.group.WORLD
    q, k = (torch.randn(1, 8, heads, 4, requires_grad=True) for heads in (4, 2))
    found = attention_pieces.pieces([[(0, 3), (3, 8)]], [WHOLE], [WHOLE], causal=True, window=2)
    for order in (None, torch.arange(8)):
        args = (q, k, k.detach().clone().requires_grad_(), attention_pieces.encode([found]), order)
        torch.library.opcheck(context_attention.OPERATOR, (*args, group.group_name))
    torch.library.opcheck(torch.ops.torchtitan.swap.default, (q, group.group_name))


WHOLE = attention_pieces.Span(0, 8, 0)


def test_operators_are_what_they_declare(ranks):
    ranks(check_operators, 1)


def bytes_kept(kind, seq_len):
    model = tiny_model(attention=GQA.Config(n_heads=4, n_kv_heads=4), dim=32, vocab_size=64)
    return saved_bytes(model, kind, 1, seq_len)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_falls_with_the_degree_and_lets_rows_grow(ranks, kind):
    (alone,) = ranks(bytes_kept, 1, kind, 240)
    two, four = (max(ranks(bytes_kept, cp, kind, 240)) for cp in (2, 4))
    assert two < 0.55 * alone
    assert four < 0.3 * alone
    assert max(ranks(bytes_kept, 4, kind, 4 * 240)) < 1.2 * alone


def config_of(folder, kind, cp, shard, model, **training):
    config = tiny(folder, **training)
    config.model = model
    config.parallelism.cp, config.parallelism.dp_shard = cp, shard
    config.parallelism.context.kind = kind
    return config


def gradients(folder, kind, cp, shard, micro_batch_rows, model):
    """Loss, gradient norm and gradients of one step over 8 packed rows with masked labels."""
    config = config_of(folder, kind, cp, shard, model, micro_batch_rows=micro_batch_rows)
    with running(config) as trainer:
        mesh = trainer.mesh
        local = 8 // mesh.dp_world_size
        batch = rows(8, 32, config.model.vocab_size)
        own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
        microbatches = to_microbatches(own, trainer.micro_batch_rows, mesh)
        assert microbatches[0]["tokens"].shape[1] == 32 // cp
        policy = trainer.models["policy"]
        totals = policy.engine.totals(microbatches)
        loss = policy.engine.forward_backward(microbatches, totals)
        norm = global_grad_norm(policy.model.parameters())
        grads = {name: full(p.grad) for name, p in policy.model.named_parameters()}
        return loss.total.item(), norm.item(), grads, weights(trainer), totals["next_token"].item()


def model_of(window=None):
    return tiny_model(attention=GQA.Config(n_heads=4, n_kv_heads=2, window=window), dim=32)


def assert_same(result, expected):
    loss, norm, grads, initial, total = result
    want_loss, want_norm, want_grads, want_initial, want_total = expected
    assert total == want_total
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    assert grads.keys() == want_grads.keys() == initial.keys() == want_initial.keys()
    for name, grad in grads.items():
        assert torch.equal(initial[name], want_initial[name]), name
        want = want_grads[name]
        assert want.norm() > 0, name
        assert (grad - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=[None, 5], ids=["full", "window"])
def alone(request, rank_pool, tmp_path_factory):
    model, folder = model_of(request.param), tmp_path_factory.mktemp("alone")
    return model, rank_pool.run(gradients, 1, folder, "ring", 1, 1, None, model)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("cp", "shard", "micro_batch_rows"),
    [(2, 1, None), (4, 1, 2), (2, 2, 1)],
)
def test_model_has_the_same_gradients(ranks, tmp_path, alone, kind, cp, shard, micro_batch_rows):
    model, expected = alone
    for result in ranks(gradients, cp * shard, tmp_path, kind, cp, shard, micro_batch_rows, model):
        assert_same(result, expected)


FAULTS = [
    "keys' gradients stay where they arise",
    "own documents only",
    "one piece short",
    "not merged",
]


def gradients_with_a_fault(folder, kind, model, fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault == FAULTS[0]:
            patch.setattr(context_attention.Ring, "walk_back", _stay)
        elif fault == FAULTS[1]:
            whole = context._documents
            patch.setattr(context, "_documents", lambda mask, *a: whole(Mask(), *a))
        elif fault == FAULTS[2]:
            every = context.pieces
            patch.setattr(context, "pieces", lambda *a, **k: every(*a, **k)[1:] or every(*a, **k))
        else:
            patch.setattr(
                context_attention,
                "merge",
                lambda out, lse, *part: (out.copy_(part[0]), lse.copy_(part[1])),
            )
        return gradients(folder, kind, 2, 1, None, model)


def _stay(self, kv, home):
    for source, part in self.walk(kv):
        yield source, part, home


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_fault(ranks, tmp_path, alone, fault):
    model, expected = alone
    for result in ranks(gradients_with_a_fault, 2, tmp_path, "ring", model, fault):
        with pytest.raises(AssertionError):
            assert_same(result, expected)


def run(folder, kind, cp, shard):
    """Losses of a run with validation, accumulation and packed documents, the metrics of validation, and weights."""
    config = with_validation(folder, steps=5, micro_batch_rows=2)
    config.model = model_of(window=9)
    config.parallelism.cp, config.parallelism.dp_shard = cp, shard
    config.parallelism.context.kind = kind
    losses, final = train(config)
    with running(config) as trainer:
        return losses, trainer.validation.run(), final


@pytest.fixture(scope="module")
def run_alone(rank_pool, tmp_path_factory):
    return rank_pool.run(run, 1, tmp_path_factory.mktemp("run_alone"), "ring", 1, 1)[0]


@pytest.mark.parametrize(
    ("kind", "cp", "shard"),
    [("all_gather", 2, 1), ("ulysses", 4, 1), *((kind, 2, 2) for kind in KINDS)],
)
def test_whole_runs_have_the_same_losses(ranks, tmp_path, run_alone, kind, cp, shard):
    """The second trainer resumes from what the first one saved, and validates."""
    want_losses, want_validation, want_final = run_alone
    for losses, validation, final in ranks(run, cp * shard, tmp_path, kind, cp, shard):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        assert validation == pytest.approx(want_validation, rel=1e-5)
        for name, weight in final.items():
            assert torch.dist(weight, want_final[name]) / want_final[name].norm() < 1e-4, name


def problems(world_size, **changes):
    config = tiny("unused", seq_len=changes.pop("seq_len", 32))
    config.model = changes.pop("model", config.model)
    config.parallelism.context.kind = changes.pop("kind", "ring")
    for name, value in changes.items():
        setattr(config.parallelism, name, value)
    return [str(problem) for problem in check_tree(config, world_size)]


def test_rows_that_cannot_be_cut_are_refused():
    assert problems(4, cp=4) == problems(4, cp=2) == []
    assert problems(4, cp=4, seq_len=36) == [
        "training.seq_len=36: does not divide into the 8 chunks of cp=4 with context.kind=ring; "
        "set [32, 40], or cp to one of [1, 2, 3, 6, 9, 18]"
    ]
    assert problems(4, cp=4, seq_len=36, kind="all_gather")[0].startswith("training.seq_len=36: ")
    model = model_of()
    assert problems(4, cp=4, seq_len=36, kind="ulysses", model=model) == []
    assert problems(4, cp=4, seq_len=30, kind="ulysses", model=model) == [
        "training.seq_len=30: does not divide into the 4 chunks of cp=4 with context.kind=ulysses; "
        "set [28, 32], or cp to one of [1, 2, 3, 5, 6, 10, 15, 30]"
    ]
    assert problems(1, cp=1, seq_len=7) == []


def test_heads_that_cannot_be_dealt_are_refused_with_all_else():
    assert problems(4, cp=4, kind="ulysses", seq_len=34) == [
        "training.seq_len=34: does not divide into the 4 chunks of cp=4 with context.kind=ulysses; "
        "set [32, 36], or cp to one of [1, 2, 17, 34]",
        "model.attention.n_heads=2: leaves 2 heads to a rank of tp=1, which cannot be dealt to cp=4 ranks with "
        "context.kind=ulysses; set cp to one of [1, 2], or context.kind to all_gather or ring",
    ]
    wide = tiny_model(attention=GQA.Config(n_heads=8, n_kv_heads=2))
    assert problems(8, cp=4, tp=2, kind="ulysses", model=wide) == []
    assert "leaves 4 heads to a rank of tp=2, which cannot be dealt to cp=8" in problems(
        16, cp=8, tp=2, kind="ulysses", model=wide
    )[0]  # fmt: skip
    assert problems(16, cp=8, tp=2, kind="ring", model=wide) == []


def refusals_of_calls():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    with pytest.raises(
        ValueError,
        match=r"rows of 6 tokens do not divide into the 4 chunks of cp=2 with kind=ring; pass",
    ):
        cut({"tokens": torch.zeros(1, 6)}, mesh, "ring")
    with pytest.raises(
        ValueError, match=r"3 heads do not divide among 2 ranks; pass a multiple of 2"
    ):
        tokens_to_heads(torch.zeros(1, 4, 3, 2), mesh.get_group())
    whole = {
        "tokens": torch.arange(16).view(1, 16),
        "weight": torch.ones(1),
        "ids": torch.ones(1, 3),
    }
    return {name: field.tolist() for name, field in cut(whole, mesh, "ring").items()}


def test_a_row_is_cut_head_and_tail(ranks):
    first, second = ranks(refusals_of_calls, 2)
    assert first["tokens"] == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert second["tokens"] == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert first["weight"] == [1.0]
    assert first["ids"] == [[1.0] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_hold_every_token_once_and_share_causal_work_evenly(kind):
    layout = Layout(kind, 4)
    places = [layout.places(rank, 64) for rank in range(4)]
    together = torch.cat(places)
    assert torch.equal(together[layout.order(64)], torch.arange(64))
    if kind != "ulysses":
        assert len({int(p.sum()) for p in places}) == 1
