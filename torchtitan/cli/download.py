"""``torchtitan download``: a model of the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from torchtitan.checkpoint.hugging_face.folder import download
from torchtitan.cli.arguments import Arguments
from torchtitan.cli.output import say


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan download ...`` and return its exit code."""
    parser = Arguments(
        "download",
        "Fetch config, tokenizer and safetensors of a model; no pickles and no code. HF_TOKEN opens private models, "
        "HF_HOME is the store, HF_HUB_OFFLINE=1 looks there only.",
    )
    parser.add_argument("name", help="model of the hub: org/name")
    parser.add_argument("--revision", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--to", type=Path, help="folder for the files (default: the hub's store)")
    arguments = parser.parse(argv)
    if arguments is not None:
        say(str(download(arguments.name, revision=arguments.revision, to=arguments.to)))
    return 0
