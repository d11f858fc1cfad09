"""Cases that are measured on GPUs, each in processes of its own, beside what the planner says of them.

A suite (``benchmarks/one_gpu``, a script of ``benchmarks/h100x8``) is a list of cases and a call of `main`. Without the GPUs
that it needs it shows the plan and says that this is all; ``--device cpu --smoke`` runs the same code on a tiny shape.

Rows have random tokens, one document each. Planned tensors are compared with the most that the allocator had given out in
a step (on a CPU: with tensors counted as they come and go).
"""

import argparse
import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import PeerError, Spread, machine, spread, table, write_json
from benchmarks.runs import Ranks, setup_of, without_files
from torchtitan.metrics.peak_flops import peak_tflops
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.head import Head
from torchtitan.planner.devices import GIB, Device, find_device
from torchtitan.planner.memory import plan_memory
from torchtitan.planner.work import bounds_of, work_of
from torchtitan.trainer import Trainer

ALL_TOKENS = 1 << 30
"""``chunk_tokens`` of a head that has all logits at once, as a dense loss has."""
START_S = 20.0
"""Guess of what a process takes besides its steps, before one was seen; and what compiling adds."""
COMPILE_S = 60.0
REACHED = 0.3
"""Guess of the part of the GEMM rate that steps reach, for the time that a case will take."""


@dataclass(frozen=True, slots=True)
class Public:
    """What others have published of a case.

    Attributes:
        tokens_per_s: of a GPU.
        gib: peak memory.
        where: source and hardware.
    """

    tokens_per_s: float
    gib: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        group: what it is compared within: a shape, a table.
        name: within its group.
        config: of the run; see `without_files`.
        ranks: GPUs.
        bare: a loop written by hand instead of the Trainer (`BareLoop`), with the model, rows and types of ``config``.
        public: published numbers.
        later: measured after those with a smaller number, so that a short budget still tells of every group.
    """

    group: str
    name: str
    config: Trainer.Config
    ranks: int = 1
    bare: bool = False
    public: Public | None = None
    later: int = 0

    @property
    def tokens(self) -> int:
        """Of a step on a rank."""
        training = self.config.training
        return training.global_batch_rows * training.seq_len // self.ranks


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner says of a case.

    Attributes:
        tensors: bytes at the peak.
        total: with the overhead of a GPU.
        flops: of a step on a rank, without what is computed again.
        at_most: tokens a second and rank; None for a device whose rates are not known.
    """

    tensors: int
    total: int
    flops: float
    at_most: float | None

    @classmethod
    def of(cls, case: Case, device: Device, *, gpu: bool = True) -> "Planned":
        """The closed form, for rows of one document each."""
        memory = plan_memory(case.config, case.ranks, gpu=gpu, packed=False)
        work = work_of(case.config, case.ranks)
        bounds = bounds_of(work, device)
        at_most = case.tokens / bounds.step_s if bounds else None
        return cls(memory.peak.total, memory.total, work.flops, at_most)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a case did.

    Attributes:
        step_s: seconds of a step.
        first_loss: of the first step.
        peak: most bytes of tensors, of the rank that had most; None for a compiled run on a CPU, where none are seen.
        reserved: most bytes that the allocator held; 0 on a CPU.
    """

    step_s: Spread
    first_loss: float
    peak: int | None
    reserved: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case with what was planned and measured, or why it was not."""

    case: Case
    planned: Planned
    measured: Measured | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at best, in the same minutes.

    Attributes:
        name: of the device.
        memory: bytes that are free on it.
        gemm_tflops: of the best square matrix product in bfloat16.
        copy_gb_per_s: read and written, by a copy on the device.
        details: each size that was tried.
    """

    name: str
    memory: int
    gemm_tflops: float
    copy_gb_per_s: float
    details: dict[str, float]

    @classmethod
    def measure(cls, *, small: bool) -> "Ceilings":
        """In a process of its own, so that nothing of it stays on the device."""
        with Ranks("ceilings.py", {"small": small}) as probe:
            return cls(**probe.ask("measure")[0])


CHANGES: dict[str, Callable[[Trainer.Config], None]] = {}
"""What makes a run faster or smaller, by name; see `ladder`."""


def _change(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def keep(function: Callable[[Any], None]) -> Callable[[Any], None]:
        CHANGES[name] = function
        return function

    return keep


@_change("torch.compile")
def _compile(config: Any) -> None:
    config.compile.enabled = True


@_change("activation checkpointing")
def _recompute(config: Any) -> None:
    config.activation_checkpointing.mode = "full"


@_change("linear cross-entropy")
def _chunks(config: Any) -> None:
    config.model.head.chunk_tokens = Head.Config().chunk_tokens


@_change("optimizer in backward")
def _in_backward(config: Any) -> None:
    config.optimizer.in_backward, config.training.clip_by = True, "parameter"


@_change("activation offload")
def _offload(config: Any) -> None:
    config.activation_checkpointing.offload = True


@_change("8-bit states")
def _int8(config: Any) -> None:
    config.optimizer.state_dtype = "int8"


def with_all_logits(config: Trainer.Config) -> Trainer.Config:
    """A copy whose loss has the logits of all tokens at once."""
    changed: Any = copy.deepcopy(config)
    changed.model.head.chunk_tokens = ALL_TOKENS
    return changed


def ladder(config: Trainer.Config, changes: Sequence[str]) -> Iterator[tuple[str, Trainer.Config]]:
    """Each of `CHANGES` on top of those before it."""
    for name in changes:
        config = copy.deepcopy(config)
        CHANGES[name](config)
        yield f"+ {name}", config


def smoke(case: Case) -> Case:
    """The same case with a tiny model on the CPU, on two ranks at most; compiled without code generation, nothing published."""
    config: Any = copy.deepcopy(case.config)
    ranks, all_logits = min(case.ranks, 2), config.model.head.chunk_tokens == ALL_TOKENS
    config.model = Decoder.Config(
        vocab_size=4096,
        dim=128,
        n_layers=3,
        attention=GQA.Config(n_heads=4, n_kv_heads=2),
        feed_forward=SwiGLU.Config(ffn_dim=384),
        head=Head.Config(chunk_tokens=ALL_TOKENS if all_logits else 128),
        tied=config.model.tied,
    )
    config.training.seq_len, config.training.global_batch_rows = 256, 2 * ranks
    config.training.device, config.training.compute_dtype = "cpu", "bfloat16"
    config.compile.backend = "aot_eager"
    return dataclasses.replace(case, config=config, ranks=ranks, public=None)


def measure(case: Case, *, samples: int, steps: int, timeout_s: float) -> Measured:
    """Run a case in processes of its own: three steps that do not count, then ``samples`` times ``steps`` steps.

    Raises:
        PeerError: if a rank failed.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(
            "training.py",
            setup_of(case.config, folder, bare=case.bare),
            ranks=case.ranks,
            timeout_s=timeout_s,
        ) as run,
    ):
        answers = run.ask("measure", warmup=3, samples=samples, steps=steps)
    peaks = [answer["peak_bytes"] for answer in answers]
    return Measured(
        step_s=spread(answers[0]["seconds"]),
        first_loss=answers[0]["first_loss"],
        peak=None if None in peaks else max(peaks),
        reserved=max(answer["reserved_bytes"] for answer in answers),
    )


class Budget:
    """Seconds that are left, and how long a case is going to take.

    Args:
        minutes: in all; None for no limit.
        rate: FLOP/s that steps are guessed to reach.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        minutes: float | None,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._end = clock() + 60 * (1e6 if minutes is None else minutes)
        self._rate = rate
        self._start_s = {False: START_S, True: START_S + COMPILE_S}

    def left_s(self) -> float:
        """Until the end."""
        return self._end - self._clock()

    def needs_s(self, case: Case, planned: Planned, steps: int) -> float:
        """Guess of a case of ``steps`` steps."""
        return self._start_s[case.config.compile.enabled] + steps * planned.flops / self._rate

    def learn(self, case: Case, wall_s: float, step_s: float, steps: int) -> None:
        """How long it took: the next guess is the longest start seen so far."""
        kind, start_s = case.config.compile.enabled, wall_s - steps * step_s
        guessed = self._start_s[kind] in (START_S, START_S + COMPILE_S)
        self._start_s[kind] = start_s if guessed else max(start_s, self._start_s[kind])


def outcomes(
    cases: Sequence[Case], device: Device, budget: Budget, *, gpu: bool, quick: bool
) -> list[Outcome]:
    """Every case, in the order given: measured, or why not."""
    samples, steps = (2, 1) if quick else (5, 2)
    done: dict[int, Outcome] = {}
    losses: dict[str, float] = {}
    for place, case in sorted(enumerate(cases), key=lambda item: item[1].later):
        planned = Planned.of(case, device, gpu=gpu)
        count = 3 + samples * steps
        needs_s, left_s = budget.needs_s(case, planned, count), budget.left_s()
        measured, note = None, ""
        if gpu and planned.total > device.memory:
            note = f"does not fit: {planned.total / GIB:.1f} GiB planned, {device.memory / GIB:.1f} free"
        elif needs_s > left_s:
            note = f"cut: about {needs_s:.0f} s, {max(0, left_s):.0f} s of --minutes are left"
        else:
            print(f"{case.group}, {case.name} ...", flush=True)
            try:
                measured = measure(case, samples=samples, steps=steps, timeout_s=left_s + 5)
            except PeerError as error:
                note = "cut: --minutes are over" if budget.left_s() < 0 else _reason(error)
            else:
                budget.learn(case, left_s - budget.left_s(), measured.step_s.median, count)
                note = _other_loss(measured, losses.setdefault(case.group, measured.first_loss))
        done[place] = Outcome(case, planned, measured, note)
    return [done[place] for place in range(len(cases))]


def _reason(error: PeerError) -> str:
    """Why a case failed, in a few words."""
    lines = str(error).strip().splitlines()
    if any("OutOfMemoryError" in line for line in lines):
        return "out of memory, which the plan did not see"
    told = lines[0] if "ended with code" in lines[0] else lines[-1]  # killed, or an exception
    return f"failed: {told.strip()[:200]}"


def _other_loss(measured: Measured, loss: float) -> str:
    """A note if a case does not compute what the first of its group does: all begin with the same weights and rows."""
    close = abs(measured.first_loss - loss) <= 1e-2 * abs(loss)  # bfloat16; not if it is NaN
    return "" if close else f"first loss {measured.first_loss:.4f}, not {loss:.4f}"


def plan_table(cases: Sequence[Case], plans: Sequence[Planned], device: Device) -> str:
    """What the planner says of each case on a device: predictions."""
    rows = []
    for case, planned in zip(cases, plans, strict=True):
        spare = (device.memory - planned.total) / GIB
        rows.append(
            (
                case.group,
                case.name,
                case.ranks,
                f"{planned.tensors / GIB:.1f}",
                f"{planned.total / GIB:.1f}",
                f"fits, {spare:.1f} to spare" if spare >= 0 else f"{-spare:.1f} too much",
                f"{planned.at_most:,.0f}" if planned.at_most else "-",
                *_public(case),
            )
        )
    header = (
        "",
        "case",
        "GPUs",
        "tensors, GiB",
        "with overhead",
        f"on {device.name}",
        "tokens/s a GPU at most",
        *_public_header(cases),
    )
    width = len(header)
    return table([row[:width] for row in rows], header=header)


def result_table(found: Sequence[Outcome], peak: float | None, ceilings: Ceilings) -> str:
    """What was measured beside what was planned.

    Args:
        found: all cases.
        peak: TFLOP/s of the device for MFU; None leaves it out.
        ceilings: measured in the same run.
    """
    bare = {o.case.group: o.measured for o in found if o.case.bare and o.measured}
    rows = []
    for outcome in found:
        case, planned, measured = outcome.case, outcome.planned, outcome.measured
        cells = ["-"] * 9
        if not case.bare:
            cells[7] = f"{planned.tensors / GIB:.2f}"
        if measured:
            tflops = planned.flops / measured.step_s.median / 1e12
            cells[0] = _rates(case, measured.step_s)
            if case.group in bare:
                cells[1] = f"{bare[case.group].step_s.median / measured.step_s.median:.2f}x"
            cells[2] = f"{tflops:.3g}"
            cells[3] = f"{tflops / peak:.1%}" if peak else "-"
            cells[4] = f"{tflops / ceilings.gemm_tflops:.1%}"
            cells[5] = f"{measured.reserved / GIB:.2f}" if measured.reserved else "-"
            cells[6] = f"{measured.peak / GIB:.2f}" if measured.peak else "-"
            if measured.peak and not case.bare:
                cells[8] = f"{100 * (planned.tensors / measured.peak - 1):+.1f} %"
        rows.append((case.group, case.name, *cells, *_public(case), outcome.note))
    header = (
        "",
        "case",
        "tokens/s a GPU (quartiles)",
        "over the bare loop",
        "TFLOP/s",
        "MFU",
        "of GEMM",
        "reserved, GiB",
        "tensors, GiB",
        "planned",
        "difference",
        *_public_header([o.case for o in found]),
        "note",
    )
    with_public = any(o.case.public for o in found)
    return table([row if with_public else (*row[:11], row[-1]) for row in rows], header=header)


def _rates(case: Case, step_s: Spread) -> str:
    low, high = case.tokens / step_s.upper, case.tokens / step_s.lower
    return f"{case.tokens / step_s.median:,.0f} ({low:,.0f}-{high:,.0f})"


def _public(case: Case) -> tuple[str, str]:
    if case.public is None:
        return "-", "-"
    return f"{case.public.tokens_per_s:,.0f}", f"{case.public.gib:.1f}"


def _public_header(cases: Sequence[Case]) -> tuple[str, ...]:
    """Two columns if some case has published numbers."""
    return ("published tokens/s", "published GiB") if any(c.public for c in cases) else ()


def parse(argv: Sequence[str] | None, *, minutes: float | None, description: str) -> Any:
    """The arguments of every suite."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--minutes", type=float, default=minutes, help=f"budget ({minutes})")
    parser.add_argument("--only", nargs="+", help="parts of names of groups or cases")
    parser.add_argument("--plan-for", default="H100-80GB", help="device of the plan without GPUs")
    parser.add_argument("--peak-tflops", type=float, help="of the device, if it is not known")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args(argv)
    if (args.device == "cpu") != args.smoke:
        parser.error("a CPU runs the smoke test alone: write --device cpu --smoke")
    return args


def main(
    title: str,
    cases: Sequence[Case],
    argv: Sequence[str] | None = None,
    *,
    minutes: float | None = None,
    notes: str = "",
) -> None:
    """Measure the cases of a suite, or show their plan where there are not enough GPUs.

    Args:
        title: what the suite is about.
        cases: in the order of the table.
        argv: arguments; None for the command line's.
        minutes: default budget; None for no limit.
        notes: printed below the table: sources, and what differs from them.
    """
    args = parse(argv, minutes=minutes, description=title)
    cases = [dataclasses.replace(case, config=without_files(case.config)) for case in cases]
    wanted = args.only or [""]
    cases = [c for c in cases if any(w in f"{c.group}, {c.name}" for w in wanted)]
    if args.smoke:
        cases = [smoke(case) for case in cases]
    here, needed = torch.cuda.device_count(), max((case.ranks for case in cases), default=1)
    print(f"{title}\n")
    if not args.smoke and here < needed:
        device = find_device(args.plan_for)
        has = f"has {here} GPU{'s' * (here != 1)}" if here else "has no GPU"
        print(
            f"This machine {has}, and this needs {needed}: nothing is measured. What follows is the planner's "
            f"prediction for {device.name} ({device.memory / GIB:.1f} GiB); the bound of the speed is at peak rates, and "
            "real steps reach 40 to 50 % of it.\n"
        )
        cases = [case for case in cases if not case.bare]  # which the planner does not know
        plans = [Planned.of(case, device) for case in cases]
        print(plan_table(cases, plans, device))
        if notes:
            print(f"\n{notes}")
        named = {f"{c.group}, {c.name}": plan for c, plan in zip(cases, plans, strict=True)}
        write_json(args.json, {"date": machine()["date"], "device": device, "planned": named})
        return
    _measure_all(args, cases, notes)


def _measure_all(args: Any, cases: Sequence[Case], notes: str) -> None:
    begin = time.monotonic()
    ceilings = Ceilings.measure(small=args.smoke)
    peak = args.peak_tflops or peak_tflops(ceilings.name, "bfloat16")
    print(
        f"{ceilings.name}, {ceilings.memory / GIB:.1f} GiB free, torch {torch.__version__}; GEMM {ceilings.gemm_tflops:.3g} "
        f"TFLOP/s ({f'{ceilings.gemm_tflops / peak:.0%} of {peak:g}' if peak else 'peak not known: give --peak-tflops'}), "
        f"copy {ceilings.copy_gb_per_s:.3g} GB/s"
    )
    device = Device(ceilings.name, ceilings.memory)
    minutes = args.minutes and args.minutes - (time.monotonic() - begin) / 60
    budget = Budget(minutes, REACHED * ceilings.gemm_tflops * 1e12)
    found = outcomes(cases, device, budget, gpu=not args.smoke, quick=args.smoke)
    print(f"\n{result_table(found, peak, ceilings)}\n")
    if args.smoke:
        print("tiny shapes on the CPU: a test of the code, no result")
    elif notes:
        print(notes)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    results = [
        {
            "group": o.case.group,
            "case": o.case.name,
            "ranks": o.case.ranks,
            "tokens": o.case.tokens,
            "planned": o.planned,
            "measured": o.measured,
            "public": o.case.public,
            "note": o.note,
        }
        for o in found
    ]
    head = {**machine(), "torch": torch.__version__, "peak_tflops": peak}
    write_json(args.json, {**head, "ceilings": ceilings, "cases": results})
