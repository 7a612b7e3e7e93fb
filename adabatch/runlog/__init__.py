"""What a run writes while it runs (metrics, TensorBoard events, the progress line), and the reader of its metrics."""

from adabatch.runlog.calibrations import read_calibrations as read_calibrations
from adabatch.runlog.log import LOGGERS as LOGGERS
from adabatch.runlog.log import RunLog as RunLog
from adabatch.runlog.reader import Metrics as Metrics
from adabatch.runlog.reader import read_metrics as read_metrics
from adabatch.runlog.settings import Logger as Logger
from adabatch.runlog.settings import LogSettings as LogSettings
