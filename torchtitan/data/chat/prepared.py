"""Conversations encoded and packed once, kept on disk, and read from there by index.

Shapes: T tokens of all samples, N samples, P packs.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.bad_rows import DOCUMENTS, BadRowPolicy, bad_kinds
from torchtitan.data.cache import DEFAULT_FOLDER
from torchtitan.data.chat.encoding import Encoded, encode_all
from torchtitan.data.chat.packing import pack_all
from torchtitan.data.chat.sample import Pack, Sample, pack
from torchtitan.data.chat.source import Chat
from torchtitan.data.processes import told_of_deaths
from torchtitan.data.source import BadRow, MapSource
from torchtitan.errors import DataError

log = logging.getLogger(__name__)

_REPORT = "report.json"


class Prepared(MapSource):
    """Packs of samples that were encoded before.

    Args:
        folder: made by `prepare`.
        told: name of the data, for messages.
    """

    divisible = False

    def __init__(self, folder: Path, told: str) -> None:
        self.folder = folder
        self.report: dict[str, Any] = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
        """Counts of rows, samples and tokens, and ``utilisation``, the share of the rows' tokens that samples fill."""
        self._told = told
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")  # (T,)
        self._learned = np.load(folder / "learned.npy", mmap_mode="r")  # (T,)
        self._starts = np.load(folder / "starts.npy")  # (N + 1,) of the samples' tokens
        self._packed = np.load(folder / "packed.npy")  # (N,) samples, pack after pack
        self._pack_starts = np.load(folder / "pack_starts.npy")  # (P + 1,) in `_packed`

    def __len__(self) -> int:
        return len(self._pack_starts) - 1

    def read(self, index: int) -> Pack:
        """The samples of pack ``index``."""
        start, end = self._pack_starts[index : index + 2]
        return pack([self._sample(int(number)) for number in self._packed[start:end]])

    def describe(self) -> str:
        """Name and size for messages."""
        return f"{self._told}, {len(self)} packs"

    def _sample(self, number: int) -> Sample:
        here = slice(*self._starts[number : number + 2])
        return Sample(np.array(self._tokens[here]), np.array(self._learned[here]))


def prepare(
    source: Chat,
    *,
    seq_len: int,
    shared: bool,
    policy: BadRowPolicy,
    cache_folder: str | None,
    n_workers: int,
) -> Prepared:
    """Encode and pack all rows, or find what an earlier run made of the same data in the same way.

    Several processes may ask at once: one does the work, the others wait for it.

    Args:
        source: the conversations.
        seq_len: tokens of a row.
        shared: whether conversations share rows; else a pack is one.
        policy: what to do with bad rows.
        cache_folder: where the result is kept; None is ~/.cache/torchtitan.
        n_workers: processes that encode; 0 is this one.

    Raises:
        DataError: if a row cannot be used and the policy is to stop, if there are too many of them or nothing
            is left, or if the folder cannot be written.
    """
    home = Path(cache_folder or DEFAULT_FOLDER).expanduser()
    folder = home / f"chat-{_key(source, seq_len, shared, policy)}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if not folder.exists():
                    temporary = home / f"{folder.name}.{uuid.uuid4().hex}.tmp"
                    with (
                        told_of_deaths("set data.n_workers=0, which encodes in this process alone"),
                        closing(encode_all(source, n_workers)) as items,
                    ):
                        _write(source.describe(), items, seq_len, shared, policy, temporary)
                    os.replace(temporary, folder)
            finally:
                for left in home.glob(f"{folder.name}.*.tmp"):  # of a killed process, too
                    shutil.rmtree(left, ignore_errors=True)
                fcntl.flock(lock, fcntl.LOCK_UN)  # also for processes that were forked with it
    except OSError as error:
        raise DataError(
            f"{source.describe()}: cannot keep the prepared rows in {home} ({error}); free some space there, or "
            "set cache_folder"
        ) from error
    prepared = Prepared(folder, source.describe())
    report = prepared.report
    log.info(
        "%s: %d conversations of %d tokens in %d rows of %d, %.1f %% filled; dropped: %s; bad: %s (%s)",
        source.describe(),
        report["samples"],
        report["tokens"],
        len(prepared),
        seq_len,
        100 * report["utilisation"],
        bad_kinds(Counter(report["counts"]), "dropped_"),
        bad_kinds(Counter(report["counts"])),
        folder,
    )
    return prepared


def _write(
    told: str,
    items: Iterable[Encoded],
    seq_len: int,
    shared: bool,
    policy: BadRowPolicy,
    folder: Path,
) -> None:
    tokens, learned, starts = array("i"), bytearray(), array("q", [0])
    counts: Counter[str] = Counter()
    for item in items:
        if isinstance(item, BadRow):
            policy.meet(item, counts)
            policy.judge(counts)
            if item.fault and counts[f"bad_{item.kind}"] <= 3:
                log.warning("skipped a bad row: %s", item)
            continue
        counts[DOCUMENTS] += 1
        tokens.frombytes(item.tokens.tobytes())
        learned += item.learned.tobytes()
        starts.append(len(tokens))
    if not counts[DOCUMENTS]:
        raise DataError(
            f"{told}: nothing is left to learn from; dropped: {bad_kinds(counts, 'dropped_')}; bad: "
            f"{bad_kinds(counts)}; set a longer training.seq_len, another `format` or `columns`, or mend the data"
        )
    lengths = np.diff(np.array(starts))
    packs = pack_all(lengths.tolist(), seq_len) if shared else [[i] for i in range(len(lengths))]
    folder.mkdir()
    np.save(folder / "tokens.npy", np.array(tokens, dtype=np.int32))
    np.save(folder / "learned.npy", np.frombuffer(learned, dtype=np.bool_))
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    np.save(folder / "packed.npy", np.array([n for group in packs for n in group], dtype=np.int64))
    np.save(folder / "pack_starts.npy", np.cumsum([0, *map(len, packs)]))
    report = {
        "samples": len(lengths),
        "tokens": len(tokens),
        "learned_tokens": learned.count(1),
        "utilisation": len(tokens) / (len(packs) * seq_len),
        "counts": dict(counts),
    }
    (folder / _REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _key(source: Chat, seq_len: int, shared: bool, policy: BadRowPolicy) -> str:
    """Everything that decides what is prepared: data, tokenizer, template, options, and the code."""
    encoder = source.reader.encoder
    template = encoder.template
    parts = (
        source.fingerprint(),
        encoder.tokenizer.fingerprint(),
        template and (template.text, template.today.isoformat()),
        (seq_len, shared, encoder.learn, encoder.too_long, repr(policy)),
        _code_version(),
    )
    return hashlib.sha256(repr(parts).encode("utf-8")).hexdigest()[:20]


def _code_version() -> str:
    """Of the files that make samples, and of the packages that they use."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "tokenizer.py"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"{digest} tokenizers {version('tokenizers')} jinja2 {version('jinja2')}"
