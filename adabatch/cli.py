"""What can be asked about runs, ledgers and configurations from the command line."""

from __future__ import annotations

import argparse
import json
import os
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
    "plan": """\
adabatch plan "0:16, 10k:64, 40k:256" stop.samples=100k cluster.ranks=4   every stage's split, learning rate and steps
adabatch plan runs/lm-20260131-180000 cluster.ranks=8 --times runs/lm-20260131-180000    a ledger on other ranks
adabatch plan policy=fixed policy.global_batch=64 stop.samples=1M cluster.per_sample=2e-3""",
    "simulate": """\
adabatch simulate policy.target_efficiency=0.8 truth=power_law                 a policy against fixed batches
adabatch simulate truth=recorded truth.run=runs/lm-20260131-180000 --plot run.png
adabatch simulate policy=step_price policy.price=500 cluster.ranks=64 cluster.per_sample=2e-3 cluster.optimizer=0.02
adabatch simulate --config cluster.yaml truth=quadratic optimizer=sgd optimizer.lr=0.05 --json""",
    "validate": """\
adabatch validate recipes/lm/train.py policy=fixed policy.global_batch=64
adabatch validate runs/lm-20260131-180000 policy.target_efficiency=0.8    whether the run could go on like that
torchrun --nproc-per-node 2 recipes/lm/train.py job=validate              the same on two ranks""",
    "control": """\
adabatch control runs/lm-20260131-180000 policy.target_efficiency=0.8 limits.max_batch=512
adabatch control runs/lm-20260131-180000 policy=fixed policy.global_batch=64 --wait   and what the run says""",
    "curvature": """\
adabatch curvature runs/lm-20260131-180000                     the Hessian-weighted noise scale at the latest checkpoint
adabatch curvature runs/lm-20260131-180000 --step 640 --json   at another one, for machines
adabatch curvature runs/lm-20260131-180000 curvature.samples=8k curvature.per_group=8""",
    "calibrate": """\
adabatch calibrate runs/lm-20260131-180000                              critical batch and c at the latest checkpoint
adabatch calibrate runs/lm-20260131-180000 --steps early,middle,late --nproc 2
adabatch calibrate runs/lm-20260131-180000 calibrate.batches=[8,32,128] calibrate.samples=4096 calibrate.pairs=3""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status, 2 for bad input."""
    options = _parsed(arguments)
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
        "--calibration",
        type=float,
        help="critical batch over noise scale; by default as in calibrations.json, and else as the run was configured",
    )
    recommend.add_argument("--json", action="store_true", help="print JSON data")

    ledger = _verb(
        verbs, "ledger", _ledger, "show a ledger, or compare two", "The exit status is 1 when two schedules differ."
    )
    ledger.add_argument("ledger", type=Path, help="a ledger file or a run folder")
    ledger.add_argument("other", type=Path, nargs="?", help="another one: show where their schedules differ")
    ledger.add_argument("--holds", action="store_true", help="show the decisions that changed nothing, too")

    plan = _verb(
        verbs,
        "plan",
        _plan,
        "say what a schedule of batches means",
        "Prints every stretch of equal steps on the given ranks (cluster.ranks, limits.micro_batch): its split, "
        "learning rate and companions, steps, samples, and its duration where times are known. Trains nothing and "
        "needs no torch.",
    )
    plan.add_argument(
        "overrides", nargs="+", metavar="schedule|key=value", help="stages, a ledger or a run folder; then settings"
    )
    plan.add_argument("--times", type=Path, metavar="RUN", help="a run folder to take step times from")
    plan.add_argument("--json", action="store_true", help="print JSON data")

    simulate = _verb(
        verbs,
        "simulate",
        _simulate,
        "try a policy out without training",
        "The real controller decides on a known truth (truth=exponential, power_law, loss_law, recorded or quadratic) "
        "and a modelled cluster, with policy, damping, noise, scaling, limits, optimizer, lr_schedule and stop as in "
        "training. Fixed batches on the same samples stand beside it. Needs no torch.",
    )
    simulate.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    simulate.add_argument("--config", type=Path, help="a YAML file of settings, which the command line wins over")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .png, .svg, .pdf or .html")
    simulate.add_argument("--json", action="store_true", help="print JSON data")

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

    control = _verb(
        verbs,
        "control",
        _control,
        "change the policy or the bounds of a running job",
        "Checks the settings as a resume would and writes them into control.yaml in the run folder, which the run "
        "looks at when a decision is due. With --wait the exit status is 1 when the run refuses them or is silent.",
    )
    control.add_argument("run_folder", type=Path, help="the folder of a run that goes on")
    control.add_argument("overrides", nargs="*", help="key=value, as for training")
    waiting = "wait for the run's answer, 60 s by default"
    control.add_argument("--wait", type=float, nargs="?", const=60.0, metavar="SECONDS", help=waiting)

    curvature = _verb(
        verbs,
        "curvature",
        _curvature,
        "measure the Hessian-weighted noise scale of a checkpoint",
        "tr(H Sigma) / (G'HG) by Hessian-vector products, and the simple noise scale of the same gradients beside it. "
        "Starts the run's program with job=curvature in one process, takes the samples that came next, and writes "
        "nothing into the run folder.",
    )
    curvature.add_argument("program", type=Path, metavar="run_folder", help="a run folder")
    curvature.add_argument("overrides", nargs="*", help="key=value: the settings of curvature")
    curvature.add_argument("--step", type=int, help="step of the checkpoint; by default the latest")
    curvature.add_argument("--json", action="store_true", help="print JSON data")

    calibrate = _verb(
        verbs,
        "calibrate",
        _calibrate,
        "measure the critical batch of a run's checkpoints",
        "Branches short annealed continuations off a checkpoint at several batches, each at its best learning rate, "
        "and compares them by the samples that the smallest batch needs for the same held-out loss. Prints the "
        "critical batch, the noise scales at the same weights and their ratio c, and adds them to calibrations.json "
        "in the run folder, in which nothing else changes.",
    )
    calibrate.add_argument("program", type=Path, metavar="run_folder", help="a run folder")
    calibrate.add_argument("overrides", nargs="*", help="key=value: the settings of calibrate")
    which = calibrate.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="step of the checkpoint; by default the latest")
    which.add_argument("--steps", help="several steps, or early, middle and late, with commas between them")
    calibrate.add_argument("--json", action="store_true", help="print JSON data")
    calibrate.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks, which torchrun starts (1)")
    return parser


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one verb; overrides may stand before and after them, which argparse does not know how to read."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if more and (not hasattr(options, "overrides") or any(one.startswith("-") for one in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        options.overrides += more
    return options


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
        changes = ", ".join(
            f"{one.get('key')} {one.get('old')} -> {one.get('new')}{f' ({why})' if (why := one.get('reason')) else ''}"
            for one in splice.changes
        )
        live = any(one.get("outcome") == "applied live" for one in splice.changes)
        how = "changed while it ran" if live else "resumed"
        print(f"  {how} at sample {splice.sample:,}: {changes or 'nothing changed'}")
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


def _plan(options: argparse.Namespace) -> int:
    from adabatch.config.simulation import Setting, composed, scheduled
    from adabatch.simulate import text
    from adabatch.simulate.outline import outline

    setting = Setting(composed(scheduled(options.overrides)))
    costs = None
    if options.times:
        from adabatch.report.costs import step_costs
        from adabatch.runlog import read_metrics

        costs = step_costs(read_metrics(options.times), setting.limits)
    stretches = outline(
        setting.policy,
        setting.limits,
        samples=setting.samples,
        scaling=setting.scaling,
        schedule=setting.schedule,
        tokens_per_sample=setting.config.tokens_per_sample,
        cluster=setting.cluster,
        seconds=costs.of_step if costs else None,
    )
    if options.json:
        print(json.dumps(text.outline_dict(stretches), allow_nan=False, indent=2))
    else:
        print(text.outline_text(stretches, setting.describe()))
    if costs and all(stretch.seconds is None for stretch in stretches):
        why = f": {costs.why_not}" if costs.why_not else ""
        print(f"{options.times} tells no step times of these batches on {costs.world} ranks{why}", file=sys.stderr)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from adabatch.config.simulation import Setting, composed, overrides_of
    from adabatch.simulate import compare, text
    from adabatch.simulate.drawing import draw, require_drawable  # matplotlib is loaded when something is drawn

    if options.plot:
        require_drawable(options.plot)
    configured = overrides_of(options.config) if options.config else []
    setting = Setting(composed([*configured, *options.overrides]))
    found = compare(setting.start, by_loss=setting.by_loss)
    if options.json:
        print(json.dumps(text.to_dict(found), allow_nan=False, indent=2))
    else:
        print(text.to_text(found, setting.describe()))
    if options.plot:
        print(draw(found, options.plot, setting.describe()), file=sys.stderr)
    return 0


def _validate(options: argparse.Namespace) -> int:
    from adabatch.config.programs import run_job  # Hydra is loaded by the verbs that start a program alone

    return run_job("validate", options.program, options.overrides)


def _control(options: argparse.Namespace) -> int:
    from adabatch.config import control  # Hydra is loaded by the verbs about configurations alone

    if not options.overrides:
        raise ValueError(f"say what to change: key=value, with one of {control.VALID}")
    asked = control.ask(options.run_folder, options.overrides)
    print("\n".join(asked.lines))
    if options.wait is None:
        return 0
    answer = control.await_answer(options.run_folder, asked.digest, options.wait)
    print(control.describe(answer, options.run_folder))
    return 0 if answer.get("outcome") == "taken" else 1


def _curvature(options: argparse.Namespace) -> int:
    from adabatch.config.programs import run_job

    asked = {"step": options.step, "json": options.json or None}
    settings = [f"curvature.{name}={str(value).lower()}" for name, value in asked.items() if value is not None]
    return run_job("curvature", options.program, [*options.overrides, *settings])


def _calibrate(options: argparse.Namespace) -> int:
    from adabatch.config.programs import run_job

    steps = options.step if options.steps is None else options.steps
    settings = [] if steps is None else [f"calibrate.steps=[{steps}]"]
    settings += ["calibrate.json=true"] if options.json else []
    return run_job("calibrate", options.program, [*options.overrides, *settings], ranks=options.nproc)


if __name__ == "__main__":
    sys.exit(main())
