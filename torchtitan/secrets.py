"""Secrets do not leave the machine with a run's config."""

import re
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[_-])((api|access|private|secret|auth)[_-]?key|password|passwd|secret|credentials?"
    r"|(hf|hub|api|auth|access|bearer|refresh|wandb)[_-]token)$|^token$|^key$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


def masked(tree: Any) -> Any:
    """A copy of JSON-able data with secrets replaced by ``***``.

    A secret is the value under a name that says so (``api_key``, ``hf_token``, ``password``; not ``eos_token`` or
    ``tokens_per_step``), and the user part of a URL (``https://user:password@host``).
    """
    if isinstance(tree, dict):
        return {
            name: MASK if value is not None and _SECRET_NAME.search(str(name)) else masked(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    return _URL_PASSWORD.sub(f"{MASK}@", tree) if isinstance(tree, str) else tree
