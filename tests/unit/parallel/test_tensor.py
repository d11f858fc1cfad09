"""Plans that fit no model, and degrees that fit no plan, are refused in words."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.tiny import tiny, tiny_model
from torchtitan import torch_api
from torchtitan.config import check_tree
from torchtitan.debug.dry_run import fake_ranks
from torchtitan.errors import ConfigError
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.plan import COLWISE, ROWWISE, SEQUENCE, VOCABULARY_IN, WHOLE_INPUT
from torchtitan.models.layers.router import Router
from torchtitan.parallel.tensor import apply_tensor_parallel, enable_async_tp, module_cuts


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
    assert problems(4, **changes)[1:] == [  # the first is the tokenizer's
        "model.vocab_size=5: leaves some of the parallelism.tp=4 ranks without an entry; set parallelism.tp to one of [1, 2]"
    ]


def test_a_sequence_that_cannot_be_dealt_to_the_ranks_is_refused():
    changes = {"dim": 32, "attention": GQA.Config(n_heads=4)}
    assert problems(4, seq_len=30, **changes) == [
        "training.seq_len=30: cannot be cut into parallelism.cp=1 * tp=4 equal parts, as sequence_parallel does; set a "
        "multiple of 4, tp to one of [1, 2, 3, 5, 6, 10, 15, 30], or parallelism.sequence_parallel to False"
    ]
    config = tiny("unused", seq_len=30)
    config.model = tiny_model(**changes)
    config.parallelism.tp, config.parallelism.sequence_parallel = 4, False
    assert check_tree(config, 4) == []


def test_experts_need_sequence_parallel():
    moe = MoE.Config(n_experts=4, ffn_dim=16, router=Router.Config(top_k=2))
    config = tiny("unused")
    config.model = tiny_model(attention=GQA.Config(n_heads=2), feed_forward=moe)
    config.parallelism.tp = 2
    assert check_tree(config, 2) == []
    config.parallelism.sequence_parallel = False
    assert [str(p) for p in check_tree(config, 2)] == [
        "model.feed_forward=MoE.Config: routes each token on one rank, but parallelism.sequence_parallel=False gives all "
        "tp=2 ranks the same tokens; set parallelism.sequence_parallel to True, or tp to 1"
    ]


def test_async_tp_needs_a_compiler_and_something_to_overlap():
    config = tiny("unused")
    config.model = tiny_model(attention=GQA.Config(n_heads=2))
    config.parallelism.async_tp = True
    assert [str(p) for p in check_tree(config, 1)] == [
        "parallelism.async_tp=True: is the compiler's work, but compile.enabled=False; set compile.enabled=True, or "
        "async_tp=False",
        "parallelism.async_tp=True: overlaps gathers and scatters, which tp=1 with sequence_parallel=True does not have; "
        "set tp above 1 and sequence_parallel=True, or async_tp=False",
    ]
    config.parallelism.tp = 2
    config.compile.enabled = True
    assert check_tree(config, 2) == []
    with (
        fake_tp_axis() as mesh,
        pytest.raises(ConfigError, match="needs GPUs, and this run is on cpu"),
    ):
        enable_async_tp(mesh)


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


@contextmanager
def fake_tp_axis():
    """Two ranks of which this process plays one; what is refused is refused before any collective."""
    with fake_ranks(2, 0):
        yield torch_api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def cut(model):
    with fake_tp_axis() as mesh:
        apply_tensor_parallel(model, mesh, sequence_parallel=True)


def test_a_shared_parameter_with_two_cuts_is_named():
    with torch.device("meta"):
        model = Planned({"a": COLWISE, "b": ROWWISE}, a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    model.b.weight = model.a.weight
    with pytest.raises(
        TypeError,
        match=r"b\.weight is shared with a module whose parallel plan places it as S\(0\), not S\(1\)",
    ):
        cut(model)


def test_a_vocabulary_cut_of_a_module_that_knows_none_is_refused():
    with torch.device("meta"):
        model = Planned({"table": VOCABULARY_IN}, table=nn.Embedding(4, 2))
    with pytest.raises(TypeError, match="but Embedding has no attribute `vocabulary`"):
        cut(model)
