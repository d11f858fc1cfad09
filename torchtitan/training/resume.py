"""Whether a run may go on from a checkpoint under the config it has now."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torchtitan.config import differences, from_dict
from torchtitan.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


def check_same_mathematics(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str]
) -> None:
    """Log what differs between the config of a checkpoint and the present one, and refuse what changes the result.

    Args:
        saved: the checkpoint's config, from ``to_dict``.
        now: the present one, likewise.
        allowed: dotted paths that may differ; a path allows everything below it.

    Raises:
        CheckpointError: listing each difference that changes the mathematics and is not allowed.
    """
    try:
        before = from_dict(dict(saved))
    except ConfigError as error:
        raise CheckpointError(
            f"the checkpoint's config cannot be read by this version of the code: {error}; "
            "start afresh with another folder, or set checkpoint.resume to never"
        ) from error
    refused = []
    for difference in differences(before, from_dict(dict(now))):
        line = f"{difference.path}: {difference.old!r} -> {difference.new!r}"
        permitted = any(
            difference.path == path or difference.path.startswith(f"{path}.") for path in allowed
        )
        if difference.changes_mathematics and not permitted:
            refused.append((difference.path, line))
        else:
            log.info("resuming with another %s", line)
    if refused:
        paths = " ".join(path for path, _ in refused)
        raise CheckpointError(
            "the checkpoint was made with settings that compute something else:\n  "
            + "\n  ".join(line for _, line in refused)
            + f"\nput them back, or go on deliberately with --checkpoint.allow-changes {paths}, "
            "or start afresh in another --folder"
        )
