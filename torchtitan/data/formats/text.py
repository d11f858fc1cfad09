"""Plain text: one file is one document."""

from pathlib import Path

from torchtitan.data.formats.rows import BOM, FileOptions
from torchtitan.data.source import BadRow


class TextFile:
    """The one row of a text file."""

    def __init__(self, path: Path, shown: Path) -> None:
        self.path = path
        self.shown = shown

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> str:
        """The whole text, line ends as they are."""
        del index
        try:
            return self.path.read_bytes().removeprefix(BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(
                "invalid_utf8", str(self.shown), f"byte {error.start} is not UTF-8"
            ) from error


def open_text(path: Path, shown: Path, options: FileOptions) -> TextFile:
    """A text file has no fields, so no option concerns it."""
    del options
    return TextFile(path, shown)
