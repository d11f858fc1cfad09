"""What contestants that tokenise tell of their tokens. Needs numpy alone."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def digest(rows: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Count of the tokens, and a hash of all ids and of which of them are learned.

    Args:
        rows: ids of each row in the order of the data, and for each id whether it is learned; None where all are.
    """
    n_tokens, whole = 0, hashlib.sha256()
    for ids, learned in rows:
        tokens = np.asarray(ids, dtype=np.int64)
        flags = np.ones(len(tokens), bool) if learned is None else np.asarray(learned, dtype=bool)
        n_tokens += len(tokens)
        whole.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + flags.tobytes())
    return {"tokens": n_tokens, "hash": whole.hexdigest()}
