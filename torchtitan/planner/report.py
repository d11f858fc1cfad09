"""The plan of a run in words and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.debug.dry_run import table
from torchtitan.planner.advice import Change
from torchtitan.planner.devices import GIB, Device
from torchtitan.planner.memory import KINDS, Memory
from torchtitan.planner.verify import Verification
from torchtitan.planner.work import Bounds, Work


@dataclass(frozen=True, slots=True)
class Report:
    """All that `torchtitan plan` says of a run.

    Attributes:
        title: recipe, ranks and mesh.
        device: that it is to fit.
        memory: of the rank that needs most.
        work: of a step.
        bounds: of the step's time; None for a device whose rates are not known.
        changes: what to do if it does not fit.
        verification: by tracking; None if not asked for.
    """

    title: str
    device: Device
    memory: Memory
    work: Work
    bounds: Bounds | None
    changes: Sequence[Change]
    verification: Verification | None

    def __str__(self) -> str:
        return "\n\n".join(part for part in self._parts() if part)

    def _parts(self) -> Iterator[str]:
        yield self.title
        yield _moments(self.memory)
        yield self._verdict()
        if self.changes:
            yield _changes(self.changes, self.device)
        yield _work(self.work, self.bounds)
        if self.verification:
            yield str(self.verification)

    def _verdict(self) -> str:
        peak, total, have = self.memory.peak, self.memory.total, self.device.memory
        spare = have - total
        fits = (
            f"fits, {gib(spare)} to spare"
            if spare >= 0
            else f"does not fit, {gib(-spare)} too much"
        )
        return (
            f"peak: {peak.name}, {peak.when}; {gib(peak.total)} and {gib(self.memory.overhead)} of overhead "
            f"(fragments, context)\n{gib(total)} of {gib(have)} ({self.device.name}): {fits}"
        )


def gib(size: float) -> str:
    """Bytes as GiB with two digits."""
    return f"{size / GIB:.2f} GiB"


def _moments(memory: Memory) -> str:
    rows = [
        (
            moment.name,
            *(f"{moment.held[kind] / GIB:.2f}" for kind in KINDS),
            f"{moment.total / GIB:.2f}",
            moment.when,
        )
        for moment in memory.moments
    ]
    header = ("GiB at", *KINDS, "total", "worst at")
    return (
        "memory of the rank that needs most, at the three moments that can be its peak:\n"
        + table(header, rows, right={*KINDS, "total"})
    )


def _changes(changes: Sequence[Change], device: Device) -> str:
    rows = [
        (
            change.flags or f"{change.ranks} ranks",
            gib(change.total),
            "fits" if change.fits else "",
            change.costs,
        )
        for change in changes
    ]
    text = "what to change, each on top of those before:\n" + table(
        ("change", "then", "", "at the cost of"), rows, right={"then"}
    )
    if not changes[-1].fits:
        text += f"\nnot even all of these fit {gib(device.memory)}"
    return text


def _work(work: Work, bounds: Bounds | None) -> str:
    counts, sent = work.counts, sum(row.sent_bytes for row in work.traffic)
    lines = [
        f"step: {work.tokens_global:,} tokens; {counts.total:,} parameters, of which a token uses {counts.active:,}",
        f"  a rank computes {work.flops / 1e12:,.1f} TFLOP and {work.recomputed_flops / 1e12:,.1f} more by recomputing; "
        f"its update moves {work.update_bytes / 1e9:,.1f} GB of memory; it sends {sent / 1e9:,.1f} GB",
        *(f"    {what}: {size / 1e9:,.2f} GB" for what, size in work.sent_bytes.items()),
        *([f"    not counted: what goes over {', '.join(work.uncounted)}"] * bool(work.uncounted)),
    ]
    if bounds is not None:
        lines.append(
            f"  at the device's peak rates: compute {bounds.compute_s:.3g} s, communication "
            f"{bounds.link_s:.3g} s in the machine and {bounds.network_s:.3g} s between machines, update {bounds.update_s:.3g} s; no step is shorter than {bounds.step_s:.3g} s "
            f"({bounds.step_exposed_s:.3g} s if nothing overlaps)"
        )
    return "\n".join(lines)
