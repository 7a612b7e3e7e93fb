"""The console: one live line on a terminal, a line every so often in a log file or pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from adabatch.runlog import lines
from adabatch.runlog.lines import Part, Progress
from adabatch.runlog.settings import LogSettings

_REFRESH_SECONDS = 0.1
_BAR_COLUMNS = 18
_ASCII = str.maketrans({"·": "|", "→": "->"})
_NO_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)))


class Screen(Protocol):
    """Where lines go: ``line`` stays, ``progress`` is replaced or thinned out."""

    def line(self, words: str, style: str = "") -> None: ...

    def progress(self, parts: list[Part], share: float | None, seconds_left: float | None) -> None: ...

    def close(self) -> None: ...


class ConsoleLogger:
    """Shows a run to a person. Terminals get one live line, everything else compact lines at a bounded rate."""

    def __init__(self, settings: LogSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._progress = Progress(settings.total_samples, settings.calibrated)
        self._clock = clock
        self._screen: Screen | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._screen is None:
            make = LiveScreen if _is_terminal(self._settings.stream) else PlainScreen
            self._screen = make(self._settings.stream, self._clock)
        show = _SHOW.get(record["kind"])
        if show is not None:
            show(self, self._screen, record)

    def close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def _start(self, screen: Screen, record: Mapping[str, Any]) -> None:
        folder, target = str(self._settings.folder), self._settings.target_efficiency
        for line in lines.started(record, folder, self._progress, target):
            screen.line(line, "dim")

    def _step(self, screen: Screen, record: Mapping[str, Any]) -> None:
        self._progress.pace.add(record.get("time") or self._clock(), record["samples"])
        parts, share = self._progress.parts(record), self._progress.share(record)
        screen.progress(parts, share, self._progress.seconds_left(record))

    def _evaluation(self, screen: Screen, record: Mapping[str, Any]) -> None:
        self._progress.held_out = record.get("loss")
        screen.line(lines.evaluated(record))

    def _decision(self, screen: Screen, record: Mapping[str, Any]) -> None:
        if record.get("changed", record.get("previous") != record.get("batch")):
            screen.line(lines.decided(record), "cyan")

    def _resume(self, screen: Screen, record: Mapping[str, Any]) -> None:
        for line in lines.resumed(record):
            screen.line(line, "yellow")

    def _control(self, screen: Screen, record: Mapping[str, Any]) -> None:
        self._progress.calibrated = record.get("calibrated", self._progress.calibrated)
        for line in lines.controlled(record):
            screen.line(line, "yellow")

    def _calibration(self, screen: Screen, record: Mapping[str, Any]) -> None:
        self._progress.calibrated = record.get("calibrated", self._progress.calibrated)
        for line in lines.calibrated(record):
            screen.line(line, "yellow")

    def _end(self, screen: Screen, record: Mapping[str, Any]) -> None:
        screen.close()
        for line in lines.ended(record):
            screen.line(line)


_SHOW: dict[str, Callable[[ConsoleLogger, Screen, Mapping[str, Any]], None]] = {
    "start": ConsoleLogger._start,
    "step": ConsoleLogger._step,
    "eval": ConsoleLogger._evaluation,
    "decision": ConsoleLogger._decision,
    "resume": ConsoleLogger._resume,
    "control": ConsoleLogger._control,
    "calibration": ConsoleLogger._calibration,
    "end": ConsoleLogger._end,
}


class PlainScreen:
    """Log files and pipes: plain lines; progress after 2 % of the run, but between every 5 and every 60 seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._printed: float | None = None
        self._pending: tuple[list[Part], float | None] | None = None

    def line(self, words: str, style: str = "") -> None:
        _print(self._stream, words)

    def progress(self, parts: list[Part], share: float | None, seconds_left: float | None) -> None:
        now = self._clock()
        expected = now - self._started + (seconds_left or 0.0)
        due = self._printed is None or now - self._printed >= min(max(0.02 * expected, 5.0), 60.0)
        self._pending = (parts, share)
        if due or share == 1.0:
            self._printed = now
            self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Print the newest progress unless it was printed before: a log ends with the last state of the run."""
        if self._pending is not None:
            parts, share = self._pending
            self._pending = None
            done = f"[{100 * share:3.0f} %] " if share is not None else ""
            _print(self._stream, done + " · ".join(part.words for part in parts))


class LiveScreen:
    """Terminals: the last line is redrawn in place, other lines scroll by above it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock = clock
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._drawn: float | None = None
        self._closed = False

    def line(self, words: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(words.translate(_NO_CONTROLS), style=style))

    def progress(self, parts: list[Part], share: float | None, seconds_left: float | None) -> None:
        now = self._clock()
        if self._drawn is None:
            self._live.start()
        self._live.update(self._render(parts, share))
        if self._drawn is None or now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._live.refresh()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._live.stop()

    def _render(self, parts: list[Part], share: float | None) -> Any:
        from rich.text import Text

        width = self._console.width - 1
        head = [(f"{100 * share:3.0f} % ", "bold")] if share is not None else []
        kept = lines.fit(parts, width - sum(len(words) for words, _ in head))
        body = [(word, style) for part in kept for word, style in ((" · ", "bright_black"), (part.words, part.style))][
            1:
        ]
        room = width - sum(len(words) for words, _ in head + body)
        if share is not None and room > _BAR_COLUMNS:
            head += _bar(share)
        return Text.assemble(*head, *body, no_wrap=True, overflow="ellipsis")


def _bar(share: float) -> list[tuple[str, str]]:
    filled = round(share * _BAR_COLUMNS)
    return [("━" * filled, "cyan"), ("━" * (_BAR_COLUMNS - filled) + " ", "bright_black")]


def _is_terminal(stream: TextIO) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM", "dumb") not in (
        "dumb",
        "unknown",
    )


def _print(stream: TextIO, words: str) -> None:
    """Write a line at once, in what the stream's encoding can hold."""
    words = words.translate(_NO_CONTROLS)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if not encoding.lower().replace("-", "").startswith("utf"):
        words = words.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(words + "\n")
    stream.flush()
