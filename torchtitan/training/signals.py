"""SIGTERM and Ctrl-C end a run at a step boundary."""

import logging
import signal
from types import FrameType

log = logging.getLogger(__name__)


class StopRequest:
    """While entered, the first SIGTERM or SIGINT sets ``received``; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType] - what signal() returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = name
        log.warning("%s: finishing the step, then saving; once more ends at once", name)
