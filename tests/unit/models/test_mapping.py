import itertools

import pytest
import torch

from torchtitan.models.mapping import Drop, Own, Permute, Rename, Rule, Split, Stack, lay_out

RULES = (
    Rename("head.weight", "lm_head.weight"),
    Rename("embedding.weight", "embed.weight"),
    Permute("layers.{layer}.q.weight", "blocks.{layer}.q.weight", head_dim=4),
    Stack("layers.{layer}.experts.weight", "blocks.{layer}.experts.{entry}.w"),
    Split(("layers.{layer}.gate.weight", "layers.{layer}.up.weight"), "blocks.{layer}.gate_up", dim=1),
    Drop("blocks.{layer}.table"),
    Own("layers.{layer}.bias"),
)  # fmt: skip
SHAPES = {
    "embedding.weight": (6, 4),
    "layers.0.q.weight": (8, 3),
    "layers.0.experts.weight": (3, 4, 2),
    "layers.0.gate.weight": (2, 5),
    "layers.0.up.weight": (2, 3),
    "layers.0.bias": (3,),
}


def layout():
    return lay_out(RULES, SHAPES, {"head.weight": "embedding.weight"})


def ours():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def as_theirs(tensors):
    found = {}
    for name, pieces in layout().by_theirs.items():
        found[name] = torch.full(pieces[0].their_shape, torch.nan)
        for piece in pieces:
            found[name][piece.their_box] = piece.to_theirs(tensors[piece.ours])
    return found


def test_their_tensors_are_what_the_rules_say():
    tensors = ours()
    theirs = as_theirs(tensors)
    assert {name: tuple(t.shape) for name, t in theirs.items()} == {
        "embed.weight": (6, 4),
        "blocks.0.q.weight": (8, 3),
        **{f"blocks.0.experts.{i}.w": (4, 2) for i in range(3)},
        "blocks.0.gate_up": (2, 8),
    }
    q = tensors["layers.0.q.weight"]
    assert torch.equal(theirs["blocks.0.q.weight"], q[[0, 2, 1, 3, 4, 6, 5, 7]])
    assert torch.equal(theirs["blocks.0.experts.2.w"], tensors["layers.0.experts.weight"][2])
    gate, up = tensors["layers.0.gate.weight"], tensors["layers.0.up.weight"]
    assert torch.equal(theirs["blocks.0.gate_up"], torch.cat((gate, up), 1))


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "layers.0.bias"])
def test_any_part_of_a_parameter_is_found_in_them(name):
    tensors, plan = ours(), layout()
    theirs = as_theirs(tensors)
    whole = tensors[name]
    ranges = [
        [slice(a, b) for a, b in itertools.combinations(range(size + 1), 2)] for size in whole.shape
    ]
    for box in itertools.product(*ranges):
        out = torch.full_like(whole, torch.nan)
        for piece in plan.by_ours[name]:
            source = piece.source(box)
            if source is None:
                continue
            rest = box if piece.entry is None else box[1:]
            value = piece.to_ours(theirs[piece.theirs][source], rest)
            (out if piece.entry is None else out[piece.entry])[rest] = value
        assert torch.equal(out[box], whole[box])


def test_a_stack_reads_the_entries_that_it_needs():
    pieces = layout().by_ours["layers.0.experts.weight"]
    box = (slice(1, 2), slice(0, 4), slice(0, 1))
    assert [piece.source(box) for piece in pieces] == [None, (slice(0, 4), slice(0, 1)), None]


def test_what_has_no_counterpart_and_what_is_tied():
    plan = layout()
    assert plan.own == {"layers.0.bias"}
    assert plan.aliases == {"lm_head.weight": "embed.weight"}
    assert plan.is_dropped("blocks.11.table")
    assert not plan.is_dropped("blocks.11.tables")


def test_every_parameter_is_named_by_one_rule():
    with pytest.raises(KeyError, match=r"no rule names the parameter layers\.0\.k\.weight"):
        lay_out(RULES, {"layers.0.k.weight": (2, 2)}, {})
    with pytest.raises(ValueError, match=r"2 rules name the parameter head\.weight"):
        lay_out((*RULES, RULES[0]), {"head.weight": (2, 2)}, {})


def test_all_kinds_of_rules_are_here():
    assert {type(rule) for rule in RULES if isinstance(rule, Rule)} == set(Rule.__subclasses__())
