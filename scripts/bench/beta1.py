"""Should Adam's beta1 keep its memory in samples (beta1 ** kappa) when the batch grows, or stay?

The language model recipe is trained adaptively with beta1 moving and with beta1 staying, everything else alike, seeds
paired. The momentum's beta1 sets the curvature at which Adam becomes unstable, 2 (1 + beta1) / (1 - beta1) / lr (Cohen et
al. 2022, arXiv 2207.14484): at kappa = 6 a beta1 of 0.9 becomes 0.53 and that bound falls sixfold while the learning
rate rises by sqrt(6). The gradient would then oscillate along the sharpest directions, |G|^2 rise with the batch, the
noise scale fall, the batch be taken back, and so on. Reported: changes of the batch, reversals of direction, steps,
held-out loss.

    python scripts/bench/beta1.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise
from pathlib import Path

from _common import Table, Target, verdict, write_result
from main_job import ROOT, Arm, Bench, run_all

from adabatch.ledger import Ledger


def directions(folder: Path) -> list[int]:
    """+1 for each growth and -1 for each shrinking of the batch, in order."""
    changes = [decision for decision in Ledger.load(folder).decisions if decision.changed]
    return [1 if decision.batch > decision.previous else -1 for decision in changes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model and a tenth of the samples")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "beta1")
    options = parser.parse_args()
    samples, model, seeds = (6_000, "gpt_tiny", [0]) if options.quick else (40_000, "gpt_small", [0, 1])
    common = [
        f"model={model}",
        f"stop.samples={samples}",
        "logger=quiet",
        "evaluation.every=1000000",
        "evaluation.samples=2048",
        "checkpoint.every=null",
        "limits.start_batch=16",
    ]
    bench = Bench(options.cache, common)
    arms = [Arm(f"beta1-{word}", (f"scaling.beta1={flag}",), 1e-3) for word, flag in (("stays", "false"), ("moves", "true"))]
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    outcomes = run_all([lambda arm=arm, seed=seed: bench.run(arm, 1e-3, seed) for arm, seed in jobs], arms[0])
    table = Table(["arm", "seed", "changes", "reversals", "steps", "held-out loss"])
    reversals: dict[str, list[int]] = {arm.name: [] for arm in arms}
    for (arm, seed), outcome in zip(jobs, outcomes, strict=True):
        moves = directions(outcome.folder)
        reversals[arm.name].append(sum(one != other for one, other in pairwise(moves)))
        table.add(arm.name, seed, len(moves), reversals[arm.name][-1], outcome.steps, f"{outcome.loss:.4f}")
    stays, moves_ = (statistics.mean(reversals[arm.name]) for arm in arms)
    targets = [Target("reversals with beta1 staying", f"{stays:.1f}", f"< {moves_:.1f} with it moving", stays < moves_)]
    body = f"{samples:,} samples, {model}, seeds {seeds}.\n\n{table}\n\n{verdict(targets)}"
    if not options.quick:
        write_result("beta1", "Adam's beta1 when the batch moves", body, " ".join(["python", *sys.argv]))
    print(body)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
