"""Which rank's end is the cause, when several have ended."""

import signal
from collections.abc import Sequence

from torchtitan.cli.ending import Ending
from torchtitan.cli.ranks import RankProcess
from torchtitan.errors import EXIT_CODES, DistributedError, Preempted

_AFTER = "run the same command again to resume from the last checkpoint"


def verdict(ranks: Sequence[RankProcess], *, stopped: bool) -> Ending:
    """The ending of the whole launch.

    The earliest rank that failed by itself with an error of its own decides; then a rank that died without a word
    (a signal); then a rank whose collective failed, because that is how the others notice.

    Args:
        ranks: all of this machine, all ended.
        stopped: whether the launcher was asked to stop.
    """
    failed = [rank for rank in ranks if rank.failed and not rank.ended_by_us]
    own = [rank for rank in failed if rank.has_own_error()]
    if own:
        return _told(min(own, key=lambda rank: rank.report.stat().st_mtime_ns))
    if stopped and (ending := _preempted(ranks)):
        return ending
    silent = [rank for rank in failed if rank.ending() is None]
    if silent:
        return _silent(silent[0])
    if failed:
        return _collective(min(failed, key=lambda rank: rank.report.stat().st_mtime_ns), ranks)
    late = [rank for rank in ranks if rank.ended_by_us]
    if late:
        return Ending(
            DistributedError.exit_code,
            f"rank {_names(late)} did not stop in time after SIGTERM and was killed; allow more time to save with "
            f"TORCHTITAN_GRACE_S, or {_AFTER}",
        )
    return _preempted(ranks) or Ending(0, "")


def _preempted(ranks: Sequence[RankProcess]) -> Ending | None:
    """The ending of ranks that were asked to stop, if they stopped; the rest only lost their partners."""
    if any(rank.ended_by_us for rank in ranks):
        return None
    for rank in ranks:
        ending = rank.ending()
        if ending and ending.code == Preempted.exit_code:
            return ending
    if all(rank.process.returncode in (-signal.SIGTERM, -signal.SIGINT) for rank in ranks):
        return Ending(Preempted.exit_code, f"stopped at once; {_AFTER}")
    return None


def _told(rank: RankProcess) -> Ending:
    ending = rank.ending()
    if ending is None:
        return _silent(rank)
    return Ending(ending.code, f"rank {rank.rank}: {ending.text}")


def _silent(rank: RankProcess) -> Ending:
    code = rank.process.returncode
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        hint = " (the system's out-of-memory killer sends it)" if -code == signal.SIGKILL else ""
    else:
        how, hint = f"ended with exit code {code} and no message", ""
    text = f"rank {rank.rank} {how}{hint}; {_AFTER}{rank.last_words()}"
    return Ending(code if code in EXIT_CODES else DistributedError.exit_code, text)


def _collective(rank: RankProcess, ranks: Sequence[RankProcess]) -> Ending:
    ending = _told(rank)
    hung = [other for other in ranks if other.ended_by_us]
    if not hung:
        return ending
    words = "".join(other.last_words() for other in hung)
    text = f"{ending.text}\nrank {_names(hung)} did not answer and was ended{words}"
    return Ending(ending.code, text)


def _names(ranks: Sequence[RankProcess]) -> str:
    return ", ".join(str(rank.rank) for rank in ranks)
