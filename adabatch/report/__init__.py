"""What is drawn after a run, or during it: the HTML report of a run folder and the numbers in it."""

from adabatch.report.page import write_report as write_report
from adabatch.report.summary import summary as summary
