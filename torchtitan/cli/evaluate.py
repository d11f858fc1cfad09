"""``torchtitan evaluate``: the tasks of lm-eval."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.model_arguments import add_arguments, open_model
from torchtitan.cli.options import refuse
from torchtitan.cli.output import say
from torchtitan.config.configurable import Problem
from torchtitan.evaluation.harness import Settings, Tasks, evaluate
from torchtitan.optional import require

_DEFAULT_SEQ_LEN = 2048
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan evaluate ...`` and return its exit code."""
    parser = Arguments(
        "evaluate",
        "Scores of a model in the tasks of lm-eval (extra eval). Its public tasks come from the Hugging Face Hub; those of one's "
        "own are a folder of YAML files, whose Python functions are run.",
    )
    add_arguments(parser)
    parser.add_argument("--tasks", required=True, help="names of tasks, groups or tags, with commas between them")  # fmt: skip
    parser.add_argument("--include-path", metavar="DIR", help="folder with tasks of one's own")
    parser.add_argument("--num-fewshot", type=int, help="solved examples before each question (the task's number)")  # fmt: skip
    parser.add_argument("--limit", type=int, help="questions of each task (all)")
    parser.add_argument("--chat", action="store_true", help="questions go through the chat template")  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="what a chat model is told first")
    parser.add_argument("--bos", choices=("yes", "no"), help="begin prompts with the tokenizer's first token (as its own file does)")  # fmt: skip
    parser.add_argument("--seq-len", type=int, help=f"tokens that the model gets at once (its context, or {_DEFAULT_SEQ_LEN})")  # fmt: skip
    parser.add_argument("--batch-rows", type=int, default=8, help="requests at a time (8)")
    parser.add_argument("--json", action="store_true", help="write the results as JSON")
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    refuse(_problems(arguments))
    require("lm_eval", extra="eval", purpose="torchtitan evaluate")  # before the model is read
    source = open_model(arguments)
    settings = Settings(
        seq_len=arguments.seq_len or source.model.config.context_length or _DEFAULT_SEQ_LEN,
        batch_rows=arguments.batch_rows,
        chat=arguments.chat,
        add_bos=None if arguments.bos is None else arguments.bos == "yes",
    )
    tasks = Tasks(
        names=[name.strip() for name in arguments.tasks.split(",") if name.strip()],
        include_path=arguments.include_path,
        n_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        system=arguments.system,
    )
    say(_shown(evaluate(source, settings, tasks), as_json=arguments.json))
    return 0


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found: list[Problem] = []
    for name, least in (("seq_len", 1), ("batch_rows", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            found.append(Problem(option, value, "is too small", f"write {least} or more"))
    return found


def _shown(results: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        kept = {name: results[name] for name in _KEPT if name in results}
        return json.dumps(kept, indent=2, default=str)
    tables: Any = require("lm_eval.utils", extra="eval", purpose="torchtitan evaluate")
    return tables.make_table(results)
