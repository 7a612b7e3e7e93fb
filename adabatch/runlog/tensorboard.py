"""TensorBoard events over samples, so that runs of different batches lie on one axis. Needs no torch."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from adabatch.runlog.lines import decided
from adabatch.runlog.records import AppendFile
from adabatch.runlog.settings import LogSettings
from adabatch.runlog.text import held_out_metrics

_TAGS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "global_batch": "batch/global_batch",
    "micro_batches": "batch/micro_batches",
    "efficiency": "batch/data_efficiency",
    "scale": "noise/scale",
    "scale_low": "noise/scale_low",
    "scale_high": "noise/scale_high",
    "signal": "noise/signal",
    "noise": "noise/noise",
    "samples_per_second": "speed/samples_per_second",
    "seconds": "progress/seconds",
    "tokens": "progress/tokens",
    "step": "progress/steps",
    "skipped": "progress/skipped_windows",
}
_files_made = 0


class TensorBoardLogger:
    """Writes scalars with samples as the step, and the reason of every change of the batch as text.

    A resumed run begins its file with a marker that hides the events which the resume undid.
    """

    def __init__(self, settings: LogSettings) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._settings = settings
        self._events, self._summaries, self._record_writer = event_pb2, summary_pb2, RecordWriter
        self._file: AppendFile | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        values = self._values(record)
        if not values:
            return
        if self._file is None:
            self._file = self._open()
        event = self._events.Event(wall_time=record.get("time") or time.time(), step=record["samples"])
        event.summary.value.extend(values)
        self._append(self._file, event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> AppendFile:
        """A new event file. The viewer reads files in the order of their names, and only after a version event."""
        global _files_made
        _files_made += 1
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{_files_made:04d}"
        file = AppendFile(self._settings.folder / f"events.out.tfevents.{stamp}")
        resumed_at = self._settings.resumed_at
        first = 0 if resumed_at is None else resumed_at + 1
        self._append(file, self._events.Event(wall_time=time.time(), step=first, file_version="brain.Event:2"))
        if resumed_at is not None:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._append(file, self._events.Event(wall_time=time.time(), step=first, session_log=started))
        return file

    def _append(self, file: AppendFile, event: Any) -> None:
        entry = io.BytesIO()
        self._record_writer(entry).write(event.SerializeToString())
        file.append(entry.getvalue())

    def _values(self, record: Mapping[str, Any]) -> list[Any]:
        if record["kind"] == "step":
            return [self._scalar(tag, record[key]) for key, tag in _TAGS.items() if record.get(key) is not None]
        if record["kind"] == "eval":
            metrics = held_out_metrics(record).items()
            return [self._scalar(f"held_out/{name}", value) for name, value in metrics if value is not None]
        if record["kind"] == "decision" and record.get("changed"):
            return [self._text("batch/decision", decided(record))]
        return []

    def _scalar(self, tag: str, value: float) -> Any:
        return self._summaries.Summary.Value(tag=tag, simple_value=float(value))

    def _text(self, tag: str, words: str) -> Any:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[words.encode(errors="replace")], tensor_shape=shape
        )
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=tag + "/text_summary", metadata=metadata, tensor=tensor)
