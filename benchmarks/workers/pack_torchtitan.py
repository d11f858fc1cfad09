"""Contestant: this library, offline and streaming; through its whole loader, in one process."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samples import Samples, run
from serving import serve, versions

from torchtitan.data.bad_rows import BadRowPolicy
from torchtitan.data.chat import prepared
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.sample import Pack, Sample, pack
from torchtitan.data.chat.stream import SamplePacking
from torchtitan.data.loader import Loader
from torchtitan.data.source import MapSource
from torchtitan.data.stream import new_state
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.worker import Plan


class Encoded(MapSource):
    """Conversations that are encoded already."""

    divisible = False

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> Sample:
        """Sample ``index``."""
        return self.samples[index]

    def read(self, index: int) -> Pack:
        """The same as a pack."""
        return pack([self.samples[index]])

    def describe(self) -> str:
        """For messages."""
        return "encoded"


def main() -> None:
    """Pack when asked."""
    samples, setup = Samples.read()
    seq_len, n_rows = setup["seq_len"], setup["rows"]
    encoded = Encoded([Sample(tokens, learned) for tokens, learned in samples])
    policy = BadRowPolicy("error", 0.0)
    tokenizer = Tokenizer.Config().build()

    def loader(source: MapSource, packing: SamplePacking) -> Loader:
        states = {number: new_state(1) for number in range(n_rows)}
        plan = Plan(
            [source], [1.0], tokenizer, seq_len, n_rows, 0, policy, states, [len(source)], packing
        )
        return Loader(plan, n_workers=0, prefetch=1, packed_rows=None)

    def offline() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as home:

            def packed() -> prepared.Prepared:
                folder = Path(home) / "packed"
                prepared._write(encoded, seq_len, True, policy, folder)  # pyright: ignore[reportArgumentType]
                return prepared.Prepared(folder, "packed")

            def batches(packs: prepared.Prepared) -> Iterator[dict[str, Any]]:
                steps = loader(packs, SamplePacking(look_ahead=1, one_per_row=True))
                for first in range(0, len(packs), n_rows):
                    batch = steps.next().batch
                    yield {name: rows[: len(packs) - first] for name, rows in batch.items()}

            return run(packed, batches)

    def streaming() -> dict[str, Any]:
        look_ahead = ChatLoader.Config(sources=[]).look_ahead
        steps = loader(encoded, SamplePacking(look_ahead=look_ahead, one_per_row=False))
        # Those in view at the end are in no row; so many steps that few come twice.
        n_steps = int(samples.starts[-1]) // (seq_len * n_rows)
        packs = range(n_steps * n_rows)
        return run(lambda: packs, lambda _: (steps.next().batch for _ in range(n_steps)))

    serve({"offline": offline, "streaming": streaming, "versions": lambda: versions("torch")})


if __name__ == "__main__":
    main()
