"""What can be asked about runs, ledgers and configurations from the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adabatch import __version__
from adabatch.ledger import Ledger

_EXAMPLES = {
    "report": """\
adabatch report runs/lm-20260131-180000                     writes report.html into the run folder
adabatch report runs/lm-20260131-180000 --output lm.html    or elsewhere""",
    "recommend": """\
adabatch recommend runs/lm-20260131-180000                  the batch for data efficiencies 0.5, 0.8 and 0.9
adabatch recommend runs/lm-20260131-180000 --json           the same for machines
adabatch recommend runs/lm-20260131-180000 --calibration 2  where the critical batch is twice the noise scale""",
    "ledger": """\
adabatch ledger runs/lm-20260131-180000                     which batch was used when, and each change's reason
adabatch ledger runs/lm-20260131-180000 edited.json         where two schedules differ; status 1 when they do""",
    "validate": """\
adabatch validate recipes/lm/train.py policy=fixed policy.global_batch=64
adabatch validate runs/lm-20260131-180000 policy.target_efficiency=0.8    whether the run could go on like that
torchrun --nproc-per-node 2 recipes/lm/train.py job=validate              the same on two ranks""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output, such as ``head``, has seen enough; nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        print(f"adabatch {options.verb}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adabatch",
        description=__doc__,
        epilog="examples:\n" + "\n".join(_indented(text) for text in _EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"adabatch {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    report = _verb(verbs, "report", _report, "write the HTML report of a run", "It may be running still.")
    report.add_argument("run_folder", type=Path, help="a run folder")
    report.add_argument("--output", type=Path, help="where to write it; by default report.html in the run folder")

    recommend = _verb(
        verbs,
        "recommend",
        _recommend,
        "say which batch a run recommends",
        "By the noise scale that a run of any policy has measured; it may be running still. Predicts steps, samples "
        "and seconds of other batches for the same progress.",
    )
    recommend.add_argument("run_folder", type=Path, help="a run folder")
    recommend.add_argument(
        "--calibration", type=float, help="critical batch over noise scale; by default as the run was configured"
    )
    recommend.add_argument("--json", action="store_true", help="print JSON data")

    ledger = _verb(
        verbs, "ledger", _ledger, "show a ledger, or compare two", "The exit status is 1 when two schedules differ."
    )
    ledger.add_argument("ledger", type=Path, help="a ledger file or a run folder")
    ledger.add_argument("other", type=Path, nargs="?", help="another one: show where their schedules differ")
    ledger.add_argument("--holds", action="store_true", help="show the decisions that changed nothing, too")

    validate = _verb(
        verbs,
        "validate",
        _validate,
        "check a configuration without training",
        "Starts the program with job=validate: everything is built and checked, no step is taken, nothing is written. "
        "The exit status is 0 for a valid configuration and 2 for one that is refused.",
    )
    validate.add_argument("program", type=Path, help="a training program such as recipes/lm/train.py, or a run folder")
    validate.add_argument("overrides", nargs="*", help="key=value, as for training")
    return parser


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=summary,
        description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {description}", 100),
        epilog=f"examples:\n{_indented(_EXAMPLES[name])}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _report(options: argparse.Namespace) -> int:
    from adabatch.report import write_report  # matplotlib is loaded by this verb alone

    print(write_report(options.run_folder, options.output))
    return 0


def _recommend(options: argparse.Namespace) -> int:
    from adabatch.report import recommend_text
    from adabatch.report.recommend import recommendation
    from adabatch.runlog import read_metrics

    advice = recommendation(read_metrics(options.run_folder), options.calibration)
    if options.json:
        print(json.dumps(recommend_text.to_dict(advice), allow_nan=False, indent=2))
    else:
        print(recommend_text.to_text(advice))
    return 0


def _ledger(options: argparse.Namespace) -> int:
    ledger = Ledger.load(options.ledger)
    if options.other:
        return _compare(ledger, Ledger.load(options.other))
    print(f"{ledger.steps:,} steps, {ledger.samples:,} samples")
    for segment in ledger.segments:
        steps = f"{segment.steps:>8,} steps of {segment.global_batch}"
        partial = " (shortened to end the run)" if segment.partial else ""
        print(f"  from sample {segment.first_sample:>10,}: {steps}{partial}")
    for splice in ledger.splices:
        changes = ", ".join(f"{one.get('key')} {one.get('old')} -> {one.get('new')}" for one in splice.changes)
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
    program, overrides, directory = options.program, list(options.overrides), None
    if program.is_dir():
        from adabatch.config.resume import read_launches  # Hydra is loaded by this verb alone

        launch = read_launches(program)[-1]
        overrides = [f'resume="{program.absolute()}"', *overrides]
        program, directory = Path(launch["program"]), launch.get("directory")
        if not program.is_file():
            raise ValueError(
                f"the run's program {program} is not there any more; say where it is: "
                f"adabatch validate <program> {' '.join(overrides)}"
            )
    if not program.is_file():
        raise ValueError(f"there is no program and no run folder at {program}")
    command = [sys.executable, str(program), *overrides, "job=validate"]
    return subprocess.run(command, cwd=directory, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
