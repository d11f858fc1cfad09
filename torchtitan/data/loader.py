"""From sources to batches: a loader whose batches do not depend on the number of ranks or workers.

Letters: G rows in a global batch, D data ranks, S tokens in a row. Each of the G rows is fed by a
stream of its own, and each data rank owns G / D neighbouring streams.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.bad_rows import MIN_BAD_ROWS, BadRowPolicy
from torchtitan.data.chat.stream import SamplePacking
from torchtitan.data.document import opening
from torchtitan.data.enough import check_enough
from torchtitan.data.processes import stop, told_of_deaths
from torchtitan.data.source import MapSource, SequentialSource, Source, documents
from torchtitan.data.stream import FIELDS, StreamState, new_state
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.worker import Piece, Plan, make_pieces, start_workers
from torchtitan.errors import ConfigError, DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoaderStep:
    """What one step gets.

    Attributes:
        batch: G / D rows of this data rank, on the CPU.
        state: this rank's position after the batch, JSON-able; see `Loader.merge_states`.
        wait_s: seconds spent waiting for it.
        counts: documents, empty, dropped and bad rows so far, of this rank's streams and since the
            beginning of training.
        utilisation: share of the tokens of this rank's rows so far that samples fill, 0..1; None where
            documents go on from row to row and nothing stays empty.
    """

    batch: Batch
    state: dict[str, Any]
    wait_s: float
    counts: dict[str, int]
    utilisation: float | None = None


class Loader(Configurable):
    """Encodes, packs and batches the documents of its sources, for one data rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Sources, their order, and how they are read."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset({"n_workers", "prefetch"})

        sources: list[Source.Config]
        """What to read; several are mixed by their weights."""
        shuffle: bool = True
        """Read the documents of each epoch in a new random order; a streamed data set shuffles a buffer."""
        n_workers: int = 1
        """Background processes that prepare batches, at most one a row of the rank; 0 prepares them in the training
        process. Unless it is 0, conversations that are encoded first are so by as many processes as there are cores."""
        prefetch: int = 2
        """Steps that each background process prepares ahead."""
        bad_rows: Literal["skip", "error"] = "skip"
        """What to do with a row that holds no usable text: skip and count it, or stop."""
        max_bad_fraction: float = 0.01
        """Largest share of bad rows that is skipped, 0..1; judged from the tenth bad row on."""
        seed: int | None = None
        """Decides the order; None takes the seed of the run."""

        def check(self) -> Iterator[Problem]:
            """Ranges; the sources check themselves."""
            if not self.sources:
                yield Problem("sources", [], "is empty", "list at least one source")
            if self.n_workers < 0:
                yield Problem("n_workers", self.n_workers, "is negative", "set 0 or more")
            if self.prefetch < 1:
                yield Problem("prefetch", self.prefetch, "is less than 1", "set 1 or more")
            if not 0 <= self.max_bad_fraction <= 1:
                yield Problem(
                    "max_bad_fraction",
                    self.max_bad_fraction,
                    "is not in 0..1",
                    "set a fraction, such as 0.01",
                )

        def check_epochs(self, epochs: float) -> Iterator[Problem]:
            """Yield a problem if the rows of an epoch are not known before they are read; paths are from the root."""
            yield Problem(
                "training.epochs",
                epochs,
                f"cannot be counted: {type(self).__qualname__.removesuffix('.Config')} packs documents while it reads them, "
                "so how many rows they fill is not known beforehand",
                "set training.steps, and training.epochs=None",
            )

        def build(
            self,
            *,
            tokenizer: Tokenizer,
            seq_len: int,
            global_batch_rows: int,
            dp_rank: int,
            dp_world_size: int,
            seed: int,
        ) -> "Loader":
            """Open the sources and make sure that they fill one global batch.

            Args:
                tokenizer: encodes the documents.
                seq_len: S.
                global_batch_rows: G, a multiple of D.
                dp_rank: this data rank, from 0.
                dp_world_size: D.
                seed: seed of the run, used where the config has none.

            Raises:
                ConfigError: if D does not divide G.
                DataError: if a source cannot be read, or there is too little data; on every rank
                    alike.
            """
            if global_batch_rows % dp_world_size:
                raise ConfigError(
                    f"training.global_batch_rows={global_batch_rows} is not a multiple of the {dp_world_size} data ranks; "
                    f"set a multiple of {dp_world_size}"
                )
            policy = BadRowPolicy(self.bad_rows, self.max_bad_fraction)
            sources = self.open_sources(tokenizer, seq_len, policy)
            packing = self.sample_packing()
            check_enough(
                sources,
                tokenizer=tokenizer,
                global_batch_rows=global_batch_rows,
                seq_len=seq_len,
                policy=policy,
                one_per_row=packing is not None and packing.one_per_row,
            )
            per_rank = global_batch_rows // dp_world_size
            plan = Plan(
                sources=sources,
                weights=[source.weight for source in self.sources],
                tokenizer=tokenizer,
                seq_len=seq_len,
                n_streams=global_batch_rows,
                shuffle_seed=(seed if self.seed is None else self.seed) if self.shuffle else None,
                policy=policy,
                states={dp_rank * per_rank + i: new_state(len(sources)) for i in range(per_rank)},
                rows_per_epoch=[
                    len(source) if isinstance(source, MapSource) else None for source in sources
                ],
                packing=packing,
            )
            return Loader(
                plan,
                n_workers=min(self.n_workers, per_rank),
                prefetch=self.prefetch,
                packed_rows=self.packed_rows(sources),
            )

        def open_sources(
            self, tokenizer: Tokenizer, seq_len: int, policy: BadRowPolicy
        ) -> list[MapSource | SequentialSource]:
            """Open the sources of text.

            Args:
                tokenizer: of the run.
                seq_len: S.
                policy: what to do with bad rows.

            Raises:
                DataError: if one cannot be read.
            """
            del tokenizer, seq_len, policy
            return [source.build() for source in self.sources]

        def packed_rows(self, sources: Sequence[MapSource | SequentialSource]) -> int | None:
            """Rows of S tokens that all of ``sources`` fill, read once; None where that is not known beforehand."""
            del sources
            return None

        def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
            """Token ids of ``text`` for a model to go on with, in the form that this data has."""
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            return [*bos, *tokenizer.encode(text)]

        def first_prompts(self, tokenizer: Tokenizer, seq_len: int, n: int) -> list[list[int]]:
            """What the first documents begin with, as token ids for a model to go on with.

            Args:
                tokenizer: of the run.
                seq_len: most tokens of a prompt; longer ones are left out.
                n: how many, if there are so many; the sources take turns.

            Raises:
                DataError: if the data cannot be read.
            """
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

            def prompts(source: MapSource | SequentialSource) -> Iterator[list[int]]:
                for _, text in documents(source):
                    if isinstance(text, str) and text.strip():
                        start = text[: tokenizer.cuts(text)[1]]
                        yield [*bos, *opening(tokenizer.encode(start))]

            return take_turns(map(prompts, [s.build() for s in self.sources]), seq_len, n)

        def sample_packing(self) -> SamplePacking | None:
            """How rows are filled with whole samples; None where documents go on from row to row."""
            return None

    def __init__(
        self, plan: Plan, *, n_workers: int, prefetch: int, packed_rows: int | None
    ) -> None:
        self.plan = plan
        self.packed_rows = packed_rows
        """Rows of an epoch; None where they are not known beforehand."""
        self.n_workers = n_workers
        self.prefetch = prefetch
        self._n_shown = 0
        self._pieces: Iterator[Piece] | None = None
        self._states: dict[int, StreamState] = {}
        self._rows_per_epoch: list[int | None] = []
        self.rewind()

    def next(self) -> LoaderStep:
        """The next batch of this rank.

        Raises:
            DataError: if the data cannot be read, has too many bad rows, or a worker died.
        """
        started = time.monotonic()
        pieces = self._draw()
        for piece in pieces:
            self._show(piece.bad_rows)
        for piece in pieces:
            if piece.error is not None:
                self.close()
                raise DataError(piece.error)
        for piece in pieces:
            self._states.update(piece.states)
            self._rows_per_epoch = [
                new if new is not None else old
                for new, old in zip(piece.rows_per_epoch, self._rows_per_epoch, strict=True)
            ]
        counts = sum((Counter(state["counts"]) for state in self._states.values()), Counter[str]())
        self.plan.policy.judge(counts)
        rows = torch.from_numpy(
            np.concatenate([piece.rows for piece in pieces]).astype(np.int64)
        )  # (G/D, 4, S)
        return LoaderStep(
            batch={name: rows[:, i].contiguous() for i, name in enumerate(FIELDS)},
            state=self._state(),
            wait_s=time.monotonic() - started,
            counts=dict(counts),
            utilisation=self._utilisation(),
        )

    def load_state(self, merged: dict[str, Any]) -> None:
        """Go on from a state that `merge_states` made, with any number of data ranks.

        Raises:
            DataError: if the streams or the sources are not those of the state.
        """
        if merged["global_batch_rows"] != self.plan.n_streams:
            raise DataError(
                f"the checkpoint's data position is for global_batch_rows={merged['global_batch_rows']}, now it is "
                f"{self.plan.n_streams}; the streams of one cannot go on as the other: set the old number, or start anew"
            )
        old, new = merged["rows_per_epoch"], list(self.plan.rows_per_epoch)
        if len(old) != len(new) or any(
            a != b for a, b in zip(old, new, strict=True) if a is not None and b is not None
        ):
            raise DataError(
                f"the checkpoint's data position is for sources with {old} rows, now they have {new} "
                f"({'; '.join(source.describe() for source in self.plan.sources)}); restore the data, or start anew"
            )
        self.close()
        self._states = {number: merged["streams"][str(number)] for number in self.plan.states}
        self._rows_per_epoch = old

    def rewind(self) -> None:
        """Go back to the beginning, as for another validation over the same batches."""
        self.close()
        self._states = dict(self.plan.states)
        self._rows_per_epoch = list(self.plan.rows_per_epoch)

    @staticmethod
    def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
        """One JSON-able state from those of all data ranks; it does not depend on their number."""
        streams: dict[str, StreamState] = {}
        for state in states:
            streams |= state["streams"]
        rows = [
            next((n for n in known if n is not None), None)
            for known in zip(*(s["rows_per_epoch"] for s in states), strict=True)
        ]
        return {
            "global_batch_rows": states[0]["global_batch_rows"],
            "rows_per_epoch": rows,
            "streams": dict(sorted(streams.items(), key=lambda item: int(item[0]))),
        }

    def close(self) -> None:
        """Stop the workers; the next `next` starts them again from the last batch delivered."""
        if self._pieces is not None:
            stop(self._pieces)
        self._pieces = None

    def _draw(self) -> list[Piece]:
        """The pieces of the next batch, one of each worker; starts them if they are not there."""
        if self._pieces is None:
            plan = replace(
                self.plan, states=dict(self._states), rows_per_epoch=list(self._rows_per_epoch)
            )
            any_order = all(isinstance(source, MapSource) for source in plan.sources)
            if self.n_workers == 1 and any_order:
                # The first batch is made here, which takes less than to start a worker; it does so during the first step.
                first = next(make_pieces(plan))
                if first.error is None:
                    plan = replace(plan, states=first.states, rows_per_epoch=first.rows_per_epoch)
                    self._pieces = start_workers(plan, self.n_workers, self.prefetch)
                return [first]
            self._pieces = (
                start_workers(plan, self.n_workers, self.prefetch)
                if self.n_workers
                else make_pieces(plan)
            )
        with told_of_deaths(
            "lower data.n_workers; n_workers=0 reads the data in the training process"
        ):
            return list(islice(self._pieces, max(1, self.n_workers)))

    def _utilisation(self) -> float | None:
        rows = sum(state.get("rows", 0) for state in self._states.values())
        filled = sum(state.get("filled", 0) for state in self._states.values())
        return filled / (rows * self.plan.seq_len) if rows else None

    def _show(self, bad_rows: list[str]) -> None:
        for text in bad_rows:
            self._n_shown += 1
            if self._n_shown <= MIN_BAD_ROWS:
                log.warning("skipped a bad row: %s", text)
            if self._n_shown == MIN_BAD_ROWS:
                log.warning("further bad rows are counted, not shown")

    def _state(self) -> dict[str, Any]:
        return {
            "global_batch_rows": self.plan.n_streams,
            "rows_per_epoch": list(self._rows_per_epoch),
            "streams": {str(number): state for number, state in self._states.items()},
        }


def take_turns(sources: Iterable[Iterator[list[int]]], seq_len: int, n: int) -> list[list[int]]:
    """The first ``n`` prompts of at most ``seq_len`` tokens, from the sources in turn, until one is at its end."""
    fitting = [(ids for ids in prompts if len(ids) <= seq_len) for prompts in sources]
    return list(islice((ids for group in zip(*fitting, strict=False) for ids in group), n))
