import pytest
import torch
from torch import nn

from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.state import StateDtype, make_state

KEPT, SKIPPED, ALL = torch.zeros(()), torch.ones(()), slice(None)
DTYPES = ["float32", "bfloat16", "int8", "int4", "float8"]


def state(dtype: StateDtype, shape=(64, 128), *, signed=True, block_size=None, offload=False):
    return make_state(
        dtype,
        torch.zeros(shape),
        "w.exp_avg",
        torch.ones(()),
        signed=signed,
        block_size=block_size,
        offload=offload,
    )


def values(shape=(64, 128)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3


# Error of what is loaded relative to the largest of its block: half the widest gap between numbers of the codec, and
# all of it where the rounding is stochastic.
@pytest.mark.parametrize(
    ("dtype", "gap"), [("bfloat16", 2**-7), ("int8", 0.0071), ("int4", 0.12), ("float8", 2**-4)]
)
def test_what_is_stored_comes_back_as_near_as_the_codes_are(dtype, gap):
    stored = state(dtype)
    assert not stored.load(ALL).any()
    stored.store(ALL, values(), KEPT)
    error = (stored.load(ALL) - values()).unflatten(-1, (-1, 128)).abs()
    assert (error <= gap * values().unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True)).all()
    assert error.max() > 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_store_keeps_every_bit(dtype, offload):
    stored = state(dtype, offload=offload)
    stored.store(ALL, values(), KEPT)
    before = {name: tensor.clone() for name, tensor in stored.tensors().items()}
    stored.store(ALL, torch.full((64, 128), float("nan")), SKIPPED)
    assert before.keys() == stored.tensors().keys()
    for name, tensor in stored.tensors().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rows_are_stored_alone(dtype):
    stored, whole = state(dtype), state(dtype)
    whole.store(ALL, values(), KEPT)
    for rows in (slice(0, 10), slice(10, 64)):
        stored.store(rows, values()[rows], KEPT)
    assert torch.equal(stored.load(ALL), whole.load(ALL))
    assert torch.equal(stored.load(slice(5, 20)), whole.load(ALL)[5:20])


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8"])
def test_a_block_of_zeros_stays_zero(dtype):
    stored = state(dtype, signed=False)
    stored.store(ALL, torch.zeros(64, 128), KEPT)
    assert not stored.load(ALL).any()


# bytes per element: codes, and 4 bytes of scale for each block
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1 + 4 / 256), ("float8", 1 + 4 / 256), ("int4", 0.5 + 4 / 128)],
)  # fmt: skip
def test_bytes_of_a_parameter(dtype, expected):
    tensors = state(dtype, (64, 512)).tensors().values()
    assert sum(t.nbytes for t in tensors) / (64 * 512) == expected


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((4096,), {""}),  # a vector
        ((15, 256), {""}),  # less than 4096 elements
        ((1000, 100), {""}),  # rows of an odd length: the greatest common divisor with 256 is 4
        ((100, 48), {".codes", ".scales"}),  # blocks of 16
        ((4, 32, 64), {".codes", ".scales"}),  # a stack of matrices
    ],
)
def test_which_parameters_have_codes(shape, names):
    assert set(state("int8", shape).tensors()) == names


def test_block_size_is_the_users():
    scales = state("int8", (64, 512), block_size=32).tensors()[".scales"]
    assert scales.shape == (64, 16)
    problems = [p for size in (8, 33) for p in AdamW.Config(block_size=size).check()]
    assert [str(p) for p in problems] == [
        "block_size=8: is not even and at least 16; set 64 or 256",
        "block_size=33: is not even and at least 16; set 64 or 256",
    ]


def test_offloaded_state_is_a_copy_and_comes_to_the_same():
    grads = [torch.randn(64, 128, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    results = []
    for offload in (False, True):
        parameter = nn.Parameter(torch.ones(64, 128))
        optimizer = AdamW.Config(state_dtype="int8", offload=offload).build([("w", parameter)])
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step(KEPT)
        results.append(parameter.detach())
    assert torch.equal(*results)
