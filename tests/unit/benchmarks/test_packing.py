"""The packing benchmark's own parts: what all contestants get, and that lost tokens are noticed."""

import importlib

import numpy as np
import pytest

from benchmarks.peers import ROOT, WORKERS

SHORT = "short, as instructions are"


@pytest.fixture
def packing(monkeypatch):
    """The script as it is when it runs: its folder and the workers' are on the path."""
    monkeypatch.syspath_prepend(WORKERS)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("packing")


def test_samples_have_their_lengths_and_half_of_each_is_learned(packing, tmp_path):
    samples = packing.made_up(SHORT, 500, 2048)
    assert len(samples) == 500
    assert 90 < np.diff(samples.starts).mean() < 125
    assert samples.tokens.min() >= packing.FIRST_ID
    for tokens, learned in samples:
        assert not learned[0]
        assert learned.sum() == len(tokens) - len(tokens) // 2
    samples.save(tmp_path / "samples.npz")
    again = packing.Samples.read(str(tmp_path / "samples.npz"))
    assert np.array_equal(again.tokens, samples.tokens)


def test_lost_tokens_are_noticed(packing):
    samples = packing.made_up(SHORT, 20, 2048)
    rows = importlib.import_module("samples").Rows()
    rows.add(samples.tokens[None], np.where(samples.learned, samples.tokens, -100)[None])
    counts = {name: getattr(rows, name) for name in type(rows).__slots__}
    packing.check_same(samples, {"all": counts})
    with pytest.raises(SystemExit, match=r"lossy: filled is .*; nothing is compared"):
        packing.check_same(samples, {"lossy": counts | {"filled": counts["filled"] - 1}})
