"""Packages that only some runs need: imported on first use, and asked for by the name of their extra."""

import importlib
import importlib.util
from types import ModuleType

from torchtitan.errors import ConfigError


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return ``package``.

    Args:
        package: importable name, also dotted (``pyarrow.parquet``).
        extra: the extra of torchtitan that installs it.
        purpose: what needs it, as the subject of a sentence ("reading Parquet files").

    Raises:
        ConfigError: if the package is not installed; the text names the extra.
    """
    if not is_installed(package.partition(".")[0]):
        raise ConfigError(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"run: pip install 'torchtitan[{extra}]'"
        )
    return importlib.import_module(package)
