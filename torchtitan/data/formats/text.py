"""Plain text: one file is one document."""

from pathlib import Path
from typing import Any

from torchtitan.data.formats.rows import BOM, FileOptions
from torchtitan.data.source import BadRow


class TextFile:
    """The one row of a text file."""

    def __init__(self, path: Path, shown: Path, *, whole: bool = False) -> None:
        self.path = path
        self.shown = shown
        self.whole = whole

    def __len__(self) -> int:
        return 1

    def place(self, index: int) -> str:
        """The file."""
        del index
        return str(self.shown)

    def read(self, index: int) -> Any:
        """The whole text, line ends as they are; as a row, its only field is ``text``."""
        del index
        try:
            text = self.path.read_bytes().removeprefix(BOM).decode("utf-8")
            return {"text": text} if self.whole else text
        except UnicodeDecodeError as error:
            raise BadRow(
                "invalid_utf8", str(self.shown), f"byte {error.start} is not UTF-8"
            ) from error


def open_text(path: Path, shown: Path, options: FileOptions) -> TextFile:
    """Open a text file, which has no fields."""
    return TextFile(path, shown, whole=options.text_field is None)
