"""Which format a file has, and opening it; a new format is one more entry in `FORMATS`."""

import gzip
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan.data.cache import cached_copy
from torchtitan.data.formats.csv_rows import open_csv
from torchtitan.data.formats.json_rows import open_json, open_json_lines
from torchtitan.data.formats.parquet import open_parquet
from torchtitan.data.formats.rows import FileOptions, Rows
from torchtitan.data.formats.text import open_text
from torchtitan.errors import DataError
from torchtitan.optional import require
