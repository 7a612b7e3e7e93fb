"""``adabatch``: what can be asked about runs, ledgers and configurations from the command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from adabatch.ledger import Ledger, LedgerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (LedgerError, OSError, ValueError) as error:
        print(f"adabatch {options.verb}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adabatch", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    report = verbs.add_parser("report", help="write the HTML report of a run")
    report.add_argument("run", type=Path, help="a run folder")
    report.add_argument("--output", type=Path, help="where to write it; by default report.html in the run folder")
    report.set_defaults(run=_report)

    ledger = verbs.add_parser("ledger", help="show a ledger, or compare two")
    ledger.add_argument("ledger", type=Path, help="a ledger file or a run folder")
    ledger.add_argument("other", type=Path, nargs="?", help="another one: show where their schedules differ")
    ledger.add_argument("--holds", action="store_true", help="show the decisions that changed nothing, too")
    ledger.set_defaults(run=_ledger)

    validate = verbs.add_parser(
        "validate",
        help="check a configuration without training",
        description="Starts the program with job=validate: everything is built and checked, no step is taken.",
    )
    validate.add_argument("program", type=Path, help="a training program such as recipes/lm/train.py, or a run folder")
    validate.add_argument("overrides", nargs="*", help="key=value, as for training")
    validate.set_defaults(run=_validate)
    return parser


def _report(options: argparse.Namespace) -> int:
    from adabatch.report import write_report  # matplotlib is loaded by this verb alone

    print(write_report(options.run, options.output))
    return 0


def _ledger(options: argparse.Namespace) -> int:
    ledger = Ledger.load(options.ledger)
    if options.other:
        return _compare(ledger, Ledger.load(options.other))
    print(f"{ledger.steps:,} steps, {ledger.samples:,} samples")
    for segment in ledger.segments:
        partial = " (shortened to end the run)" if segment.partial else ""
        print(f"  from sample {segment.first_sample:>10,}: {segment.steps:>8,} steps of {segment.global_batch}{partial}")
    for splice in ledger.splices:
        changes = ", ".join(f"{change['key']} {change['old']} -> {change['new']}" for change in splice.changes)
        print(f"  resumed at sample {splice.sample:,}: {changes or 'nothing changed'}")
    for decision in ledger.decisions:
        if decision.changed or options.holds:
            times = f" ({decision.count} times)" if decision.count > 1 else ""
            print(f"  sample {decision.sample:>10,}: {decision.reason}{times}")
    return 0


def _compare(ledger: Ledger, other: Ledger) -> int:
    differences = ledger.diff(other)
    for difference in differences:
        print(
            f"  samples {difference.first_sample:,} to {difference.last_sample - 1:,}: "
            f"{_batch(difference.global_batch)} against {_batch(difference.other_batch)}"
        )
    if not differences:
        print("the schedules are the same")
    return 1 if differences else 0


def _batch(batch: int | None) -> str:
    return "not reached" if batch is None else str(batch)


def _validate(options: argparse.Namespace) -> int:
    program, overrides = options.program, list(options.overrides)
    if program.is_dir():
        launch = json.loads((program / "launches.json").read_text(encoding="utf-8"))[-1]
        overrides = [f"resume={program}", *overrides]
        program = Path(launch["program"])
    if not program.is_file():
        raise ValueError(f"there is no program {program}")
    return subprocess.run([sys.executable, str(program), *overrides, "job=validate"], check=False).returncode
