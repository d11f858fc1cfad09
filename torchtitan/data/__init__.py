"""Data: sources of documents, the tokenizer, and the loader that packs them into batches."""

from torchtitan.data.embedded import Embedded
from torchtitan.data.files import Files
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.loader import Loader, LoaderStep
from torchtitan.data.source import MapSource, SequentialSource, Source
from torchtitan.data.tokenizer import Tokenizer

__all__ = [
    "Embedded",
    "Files",
    "HuggingFace",
    "Loader",
    "LoaderStep",
    "MapSource",
    "SequentialSource",
    "Source",
    "Tokenizer",
]
