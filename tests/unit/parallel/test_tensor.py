"""Plans that fit no model, and degrees that fit no plan, are refused in words."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny import tiny, tiny_model
from torchtitan import torch_api
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.plan import COLWISE, ROWWISE, SEQUENCE, VOCABULARY_IN, WHOLE_INPUT
from torchtitan.parallel.tensor import apply_tensor_parallel, module_cuts


def problems(tp, *, seq_len=32, world=None, **changes):
    config = tiny("unused", seq_len=seq_len)
    config.model = tiny_model(**changes)
    config.parallelism.tp = tp
    return [str(p) for p in check_tree(config, world or tp)]


def test_heads_and_widths_that_do_not_divide_are_refused_with_the_valid_degrees():
    changes = {
        "dim": 32,
        "attention": GQA.Config(n_heads=8, n_kv_heads=2),
        "feed_forward": SwiGLU.Config(ffn_dim=22),
    }
    assert problems(4, **changes) == [
        "model.attention.n_kv_heads=2: does not divide by parallelism.tp=4; set parallelism.tp to one of [1, 2]",
        "model.feed_forward.ffn_dim=22: does not divide by parallelism.tp=4; set parallelism.tp to one of [1, 2]",
    ]
    assert problems(2, **changes) == []
    assert problems(2, **changes, vocab_size=4099) == []
    many = GQA.Config(n_heads=6)
    assert problems(4, dim=24, attention=many) == [
        f"model.attention.{name}=6: does not divide by parallelism.tp=4; set parallelism.tp to one of [1, 2, 3, 6]"
        for name in ("n_heads", "n_kv_heads")
    ]


def test_a_vocabulary_with_too_few_entries_is_refused():
    changes = {"dim": 32, "attention": GQA.Config(n_heads=4), "vocab_size": 5}
    assert problems(4, **changes) == [
        "model.vocab_size=5: leaves some of the parallelism.tp=4 ranks without an entry; set a smaller parallelism.tp"
    ]


def test_a_sequence_that_cannot_be_dealt_to_the_ranks_is_refused():
    changes = {"dim": 32, "attention": GQA.Config(n_heads=4)}
    assert problems(4, seq_len=30, **changes) == [
        "parallelism.tp=4: * cp=1 does not divide training.seq_len=30, whose tokens sequence_parallel deals to these "
        "ranks; set tp to one of [1, 2, 3, 5, 6, 10, 15, 30], another seq_len, or sequence_parallel=False"
    ]
    config = tiny("unused", seq_len=30)
    config.model = tiny_model(**changes)
    config.parallelism.tp, config.parallelism.sequence_parallel = 4, False
    assert check_tree(config, 4) == []


class Planned(nn.Module):
    def __init__(self, plan, **children):
        super().__init__()
        self.plan = plan
        for name, child in children.items():
            self.add_module(name, child)

    def parallel_plan(self):
        return self.plan


def test_plans_add_up_to_one_table():
    model = tiny_model().build()
    cuts = {name: cut for name, (_, cut) in module_cuts(model).items()}
    assert cuts["layers.1.attention"] is WHOLE_INPUT
    assert cuts["layers.0.feed_forward.up_proj"] is COLWISE
    assert cuts["layers.0.attention.out_proj"] is ROWWISE
    assert cuts["norm"] is SEQUENCE
    assert cuts["embedding"] is VOCABULARY_IN
    own = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    assert own <= cuts.keys()


def test_a_parameter_without_a_plan_is_named():
    model = Planned({"a": COLWISE}, a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"parameter 'b.weight' is in no parallel plan; name its module in Linear\."
    ):
        module_cuts(model)
    bare = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="parameter 'weight' is in no parallel plan"):
        module_cuts(bare)


def test_a_module_in_two_plans_is_named():
    inner = Planned({"": WHOLE_INPUT, "a": COLWISE}, a=nn.Linear(2, 2))
    outer = Planned({"inner.a": SEQUENCE}, inner=inner)
    with pytest.raises(
        TypeError, match=r"module 'inner.a' is in two parallel plans, one of them that of Planned"
    ):
        module_cuts(outer)


def cut_over_one_axis(model):
    """Over two ranks of which this process plays one; what is refused is refused before any collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch_api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_tensor_parallel(model, mesh, sequence_parallel=True)
    finally:
        dist.destroy_process_group()


def test_a_shared_parameter_with_two_cuts_is_named():
    with torch.device("meta"):
        model = Planned({"a": COLWISE, "b": ROWWISE}, a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    model.b.weight = model.a.weight
    with pytest.raises(
        TypeError,
        match=r"b\.weight is shared with a module whose parallel plan places it as S\(0\), not S\(1\)",
    ):
        cut_over_one_axis(model)


def test_a_vocabulary_cut_of_a_module_that_knows_none_is_refused():
    with torch.device("meta"):
        model = Planned({"table": VOCABULARY_IN}, table=nn.Embedding(4, 2))
    with pytest.raises(TypeError, match="but Embedding has no attribute `vocabulary`"):
        cut_over_one_axis(model)
