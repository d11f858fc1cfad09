"""How fast is data tokenised beside ``datasets.map``, how long does a step wait for it, and how long does a resumed loader seek?

Tokenising: the same rows of JSON lines, the same tokenizer file and chat template; the ids, and which of them are learned, must be
equal before anything is timed. Ours goes on to what training gets: text to batches with labels and positions, conversations to
packed rows on disk. ``datasets.map`` is batched, its rows are converted to its own table before the time begins, and the result is
that table with ids. Waiting: what a run of the debug recipe says of its own steps. Seeking: from `Loader.load_state` to the first
batch, in the middle of a million rows; the files were opened and conversations prepared before, and no worker runs yet.

    python -m benchmarks.data_loading [--only tokenise wait seek] [--rounds 5] [--rows 1000000] [--keep FOLDER] [--json FILE]

At the first use the peer is installed, into an environment of its own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import (
    ROOT,
    Worker,
    environment,
    in_turn,
    machine,
    ratios,
    spread,
    table,
    write_json,
)
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.data.embedded import Embedded
from torchtitan.data.files import Files
from torchtitan.data.loader import Loader
from torchtitan.data.processes import usable_cores
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.metrics import read_rows

PEER = "trl", ["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"]
"""The environment of ``packing.py``."""
TEXT_CHARACTERS = 4000
"""Of a row of text, about."""
SEEK_BATCH = {"global_batch_rows": 8, "seq_len": 2048}
MAX_WAIT, MAX_SEEK_S = 0.01, 0.05
"""Aims: of the step; and for the first batch."""
Contestant = tuple[str, bool, int, bool]
"""Name, whether it is ours, processes, and whether the tokenizer uses threads."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables and optionally write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = {"tokenise": tokenising, "wait": waiting, "seek": seeking}
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--texts", type=int, default=1500, help="rows of text (default 1500)")
    parser.add_argument("--chats", type=int, default=5000, help="conversations (default 5000)")
    parser.add_argument("--without-peer", action="store_true", help="no datasets.map")
    parser.add_argument("--steps", type=int, default=60, help="of a run (default 60)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="to seek in (default 1000000)")
    parser.add_argument("--keep", type=Path, help="keep what is sought in there, for the next time")
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = machine()
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = parts[name](args, Path(folder))
    write_json(args.json, result)


def texts(n: int) -> list[str]:
    """Rows of text of about `TEXT_CHARACTERS`, cut from the embedded documents at lines."""
    source, found = Embedded.Config().build(), []
    for index in range(len(source)):
        text: list[str] = []
        for line in source.read(index).splitlines(keepends=True):
            text.append(line)
            if sum(map(len, text)) >= TEXT_CHARACTERS:
                found.append("".join(text))
                text = []
        if len(found) >= n:
            break
    return found[:n]


def chats(n: int, of: Sequence[str]) -> list[list[dict[str, str]]]:
    """Conversations of one or two questions and answers, made of lines of ``of``."""
    draw = random.Random(0)
    lines = [line for text in of for line in text.splitlines() if line.strip()]

    def said(least: int, most: int) -> str:
        return "\n".join(draw.choices(lines, k=draw.randint(least, most))).strip()

    return [
        [
            {"role": role, "content": said(1, 8 if role == "user" else 25)}
            for _ in range(draw.randint(1, 2))
            for role in ("user", "assistant")
        ]
        for _ in range(n)
    ]


def contestants(cores: int) -> list[Contestant]:
    """Who tokenises, with one core and with all; the first of each is ours."""
    return [
        ("torchtitan, 1 process", True, 1, False),
        ("datasets.map, 1 process", False, 1, False),
        (f"torchtitan, {cores} processes", True, cores, False),
        (f"datasets.map, {cores} processes", False, cores, False),
        (f"datasets.map, 1 process, {cores} threads", False, 1, True),
    ]


def tokenising(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens a second of text and of conversations; print them."""
    cores, result = usable_cores(), {}
    of = texts(args.texts)
    rows = {
        "text": [{"text": text} for text in of],
        "chat": [{"messages": chat} for chat in chats(args.chats, of)],
    }
    template = BUNDLED.with_name("chatml.jinja").read_text(encoding="utf-8")
    with ExitStack() as stack:
        workers = {True: stack.enter_context(Worker("torchtitan", "map_torchtitan.py"))}
        if not args.without_peer:
            python = environment(*PEER)
            peer = Worker("datasets.map", "map_datasets.py", python=python)
            workers[False] = stack.enter_context(peer)
        for kind, of_kind in rows.items():
            file = folder / f"{kind}.jsonl"
            write_lines(file, of_kind)
            for worker in workers.values():
                worker.ask("load", rows=str(file), tokenizer=str(BUNDLED), template=template)
            alone = {"kind": kind, "n_processes": 1, "threads": False, "tell": True}
            told = {worker.name: worker.ask("tokenise", **alone) for worker in workers.values()}
            check_same(told)
            n_tokens = next(iter(told.values()))["tokens"]
            measures = {
                name: partial(workers[ours].ask, "tokenise", kind=kind, n_processes=n, threads=threads)
                for name, ours, n, threads in contestants(cores)
                if ours in workers
            }  # fmt: skip
            answers = in_turn(measures, rounds=args.rounds, warmup=1)
            result[kind] = tell_speed(kind, len(of_kind), n_tokens, answers)
        result["versions"] = {worker.name: worker.ask("versions") for worker in workers.values()}
    return result


def check_same(told: dict[str, dict[str, Any]]) -> None:
    """Refuse to compare contestants whose ids, or what is learned of them, differ.

    Raises:
        SystemExit: naming what each has.
    """
    if len({answer["hash"] for answer in told.values()}) > 1:
        text = ", ".join(f"{n} {a['tokens']} tokens {a['hash'][:8]}" for n, a in told.items())
        raise SystemExit(f"token ids differ ({text}); nothing is compared")


def tell_speed(
    kind: str, n_rows: int, n_tokens: int, answers: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Rates and CPU times for each contestant, and both over ours of as many cores; print them."""

    def of_rounds(how: Callable[[float, float, int], float]) -> dict[str, list[float]]:
        return {
            name: [how(a["all_s"], a["all_cpu_s"], a.get("tokens", n_tokens)) for a in found]
            for name, found in answers.items()
        }

    rates = of_rounds(lambda seconds, _, tokens: tokens / seconds / 1e6)
    cpu = of_rounds(lambda _, cpu_seconds, tokens: cpu_seconds / tokens * 1e6)
    rows, result = [], {}
    ours = ""
    for name in answers:
        ours = name if name.startswith("torchtitan") else ours
        result[name] = {
            "million_tokens_per_s": spread(rates[name]),
            "cpu_us_per_token": spread(cpu[name]),
            "rate_of_ours_over_it": spread(ratios(rates[ours], rates[name])),
            "cpu_time_over_ours": spread(ratios(cpu[name], cpu[ours])),
        }
        rows.append([name, *result[name].values()])
    print(
        f"\n{kind}: {n_rows} rows, {n_tokens} tokens, the same ids; load {os.getloadavg()[0]:.1f}"
    )
    header = ["contestant", "million tokens/s", "CPU us a token", "times ours is as fast", "CPU time over ours"]  # fmt: skip
    print(table(rows, header=header))
    return result


def waiting(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Share of the steps of a run of the debug recipe that it waits for its batches; print it."""
    modules = {
        "text": ("torchtitan_recipes.models.llama3", "llama3_debugmodel"),
        "chat": ("torchtitan_recipes.sft", "llama3_debugmodel_sft"),
    }
    result, rows = {}, []
    cases = [("text", 0, ""), ("text", 1, ""), ("chat", 0, "best_fit"), ("chat", 1, "best_fit"), ("chat", 0, "streaming"), ("chat", 1, "streaming")]  # fmt: skip
    for kind, n_workers, packing in cases:
        module, config = modules[kind]
        name = f"{kind}{', ' + packing if packing else ''}, n_workers={n_workers}"
        home = folder / name.replace(" ", "")
        settings = {
            "training.steps": args.steps,
            "data.n_workers": n_workers,
            "metrics.every_n_steps": 1,
            "metrics.plots.enabled": False,
            "validation": None,
            "folder": home,
            **(
                {
                    "training.epochs": None,
                    "data.packing": packing,
                    "data.cache_folder": folder,
                    "samples": None,
                }
                if packing
                else {}
            ),
        }
        found = wait_of(run_of(module, config, settings, home))
        result[name] = found
        rows.append([name, *(f"{100 * value:.2f} %" for value in (found["share"], found["worst_quarter"])), spread(found["steps_s"]), f"{1e3 * found['first_wait_s']:.0f} ms"])  # fmt: skip
    print(
        f"\nwaiting for data, {args.steps} steps; load {os.getloadavg()[0]:.1f}; the aim is {100 * MAX_WAIT:.0f} %"
    )
    print(table(rows, header=["data", "of all steps' time", "a quarter of steps wait more than", "step, s", "first step waits"]))  # fmt: skip
    return result


def run_of(module: str, config: str, settings: dict[str, Any], home: Path) -> list[dict[str, Any]]:
    """The metrics of a run, step by step.

    Raises:
        SystemExit: if it fails, with what it printed.
    """
    overrides = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    start = "import sys; from torchtitan.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "train", "--module", module, "--config", config]
    done = subprocess.run(
        [*command, "--ngpu", "1", *overrides], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"{config} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    (file,) = home.rglob("metrics.jsonl")
    return [row for row in read_rows(file) if "data_wait_s" in row]


def wait_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of a run say of waiting, without the first step, which starts what makes the batches."""
    first, *later = rows
    waits, steps = ([row[name] for row in later] for name in ("data_wait_s", "seconds_per_step"))
    shares = [wait / step for wait, step in zip(waits, steps, strict=True)]
    return {
        "share": sum(waits) / sum(steps),
        "worst_quarter": spread(shares).upper,
        "first_wait_s": first["data_wait_s"],
        "steps_s": steps,
    }


def seeking(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time from the state in the middle of many rows to the first batch; print it."""
    home = args.keep or folder
    home.mkdir(parents=True, exist_ok=True)
    file = home / f"rows-{args.rows}.jsonl"
    if not file.exists():
        draw, words = random.Random(0), [f"w{i}" for i in range(2000)]
        write_lines(
            file,
            (
                {
                    "prompt": f"Question {i}: {' '.join(draw.choices(words, k=8))}",
                    "completion": " ".join(draw.choices(words, k=12)),
                }
                for i in range(args.rows)
            ),
        )
    kinds: dict[str, Loader.Config] = {
        "text": Loader.Config(sources=[Files.Config(path=str(file), text_field="completion")]),
        **{
            f"chat, {packing}": ChatLoader.Config(
                sources=[Chat.Config(rows=Files.Config(path=str(file)))],
                packing=packing,
                cache_folder=str(home),
            )
            for packing in ("best_fit", "streaming")
        },
    }
    tokenizer, result, rows = Tokenizer.Config().build(), {}, []
    for kind, config in kinds.items():
        loader = config.build(tokenizer=tokenizer, dp_rank=0, dp_world_size=1, seed=0, **SEEK_BATCH)
        state, following = in_the_middle(loader)
        measures = {
            f"{kind}, n_workers={n}": partial(seek, loader, state, following, n) for n in (0, 1)
        }
        answers = in_turn(measures, rounds=3 * args.rounds, warmup=1)
        loader.close()
        for name, found in answers.items():
            result[name] = {
                key: spread([1e3 * answer[key] for answer in found]) for key in found[0]
            }
            rows.append([name, *result[name].values()])
    print(f"\nfrom a state to the first batch of {SEEK_BATCH}, {args.rows} rows, ms; load {os.getloadavg()[0]:.1f}; the aim is {1e3 * MAX_SEEK_S:.0f}")  # fmt: skip
    print(table(rows, header=["data", "first batch", "CPU time of it", "another batch, made when asked for"]))  # fmt: skip
    return result


def in_the_middle(loader: Loader) -> tuple[str, list[Any]]:
    """A state, as JSON, in the middle of a source, and the tokens of the batch that follows."""
    loader.n_workers = 0
    (n_rows,) = loader.plan.rows_per_epoch
    state = Loader.merge_states([loader.next().state])
    for stream in state["streams"].values():  # nothing is open there, nothing waits
        stream.update(taken=[(n_rows or 0) // 2 // loader.plan.n_streams], open=None, pending=[])
    loader.load_state(state)
    loader.next()
    state = json.dumps(Loader.merge_states([loader.next().state]))
    return state, loader.next().batch["tokens"].tolist()


def seek(loader: Loader, state: str, following: list[Any], n_workers: int) -> dict[str, float]:
    """Seconds of one seek, of its CPU time in this process, and of making one more batch here.

    Raises:
        SystemExit: if the batch is not the one that followed.
    """
    loader.close()
    merged = json.loads(state)
    loader.n_workers = n_workers
    started, cpu = time.perf_counter(), time.process_time()
    loader.load_state(merged)
    batch = loader.next().batch
    found = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    if batch["tokens"].tolist() != following:
        raise SystemExit("the batch after a seek is not the one that followed; nothing is told")
    loader.close()
    loader.n_workers = 0
    loader.load_state(merged)
    loader.next()
    started = time.perf_counter()
    loader.next()
    return {**found, "another_s": time.perf_counter() - started}


def write_lines(file: Path, rows: Any) -> None:
    """Write rows as JSON lines."""
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
