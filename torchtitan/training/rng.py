"""The state of every random generator of a rank, as tensors."""

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Copy the state of torch's, Python's and NumPy's global generators, and the GPU's if ``device`` is one.

    Returns:
        Name -> CPU tensor, of the same shapes every time.
    """
    version, words, gauss = random.getstate()
    numpy_state = cast("dict[str, Any]", np.random.get_state(legacy=False))
    inner = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor(
            [*inner["key"].tolist(), inner["pos"], numpy_state["has_gauss"]], dtype=torch.int64
        ),
        "numpy_gauss": torch.tensor(numpy_state["gauss"], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    keys = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, rank: int) -> None:
    """Seed the global generators, each rank differently (they serve dropout and the like, not data or weights)."""
    mixed = (seed * 1_000_003 + rank) % (1 << 32)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
