import random

import numpy as np
import torch

from torchtitan.training.rng import rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")


def draw():
    return (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.standard_normal(),
    )


def test_restored_generators_repeat():
    seed_everything(3, 0)
    draw()  # leaves half of a Gaussian pair behind in Python's and NumPy's generators
    state = rng_state(CPU)
    first = draw()
    set_rng_state(state, CPU)
    assert draw() == first


def test_ranks_differ():
    seed_everything(3, 0)
    first = draw()
    seed_everything(3, 1)
    assert draw() != first
