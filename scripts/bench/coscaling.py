"""What each part of co-scaling does when the batch is changed in mid-run, on a task where the noise dominates.

A least-squares problem of 48 directions whose curvatures and noise levels are spread over a decade and more, each run
being 48 numbers; hundreds of runs are stepped side by side, as rows of one tensor, by torch's own AdamW and SGD with
momentum. Gradients have the exact noise of their batch: one standard normal draw for every eighth of a reference batch,
averaged over a step's samples, so that a run whose batch changes sees the very draws of the run whose batch stays.

At a quarter of the run the batch becomes 8 times or an eighth of the reference batch. Reported is the loss over samples
against the unswitched run's, afterwards, as the ratio of mean losses over runs: its average, and its largest deviation
among 24 stretches, with 95 % intervals from the paired runs. The transaction is ``adabatch.scaling`` applied by
``adabatch.optimizers``; each part is then left out in turn (and Adam's beta1 brought in).

A second problem has a few sharp directions, beside which both choices of beta1 are compared at 8 times the batch: Adam
is unstable above a curvature of 2 (1 + beta1) / (1 - beta1) / lr (Cohen et al. 2022, arXiv 2207.14484).

Two more problems, which no target judges, are those that this bench began with: half as long at twice the rate, twice
as far from the optimum, so with more signal in the gradient, and with a shorter memory of the second moment. There the
square root and the gain are less exact. The judged ones were chosen after these, to be dominated by noise.

    python scripts/bench/coscaling.py [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from _common import ROOT, Table, Target, cached, essence, verdict, write_result

from adabatch import optimizers
from adabatch.plan import BatchLimits, Scales, split
from adabatch.scaling import Scaling

REFERENCE = 8  # in units of the finest batch
STRETCHES = 24
Change = Callable[[Scales], Scales]


@dataclass(frozen=True)
class Task:
    """A least-squares problem, in steps of the reference batch; noise is that of a reference batch's gradient."""

    name: str
    optimizer: str
    lr: float
    weight_decay: float
    eps: float = 1e-8
    beta2: float = 0.999
    sharp: float = 0.0
    distance: float = 0.5
    judged: bool = True
    directions: int = 32
    steps: int = 3200
    switch: int = 800

    def spectrum(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Curvatures and noise levels."""
        places = torch.linspace(0, 1, self.directions, dtype=torch.float64)
        curvature = 0.1 * 10**places
        noise = 2.0 * 8 ** ((places * 7.3) % 1)
        if self.sharp:
            curvature[-4:] = self.sharp * noise[-4:]
        return curvature, noise

    def build(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD([parameter], lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)
        return torch.optim.AdamW(
            [parameter], lr=self.lr, betas=(0.9, self.beta2), eps=self.eps, weight_decay=self.weight_decay, foreach=True
        )

    def scaling(self) -> Scaling:
        return Scaling("adascale" if self.optimizer == "sgd" else "sqrt", REFERENCE)


@dataclass(frozen=True)
class Arm:
    """A way to change the scales; the batch changes in any case."""

    name: str
    change: Change


def losses(task: Task, factor: float, change: Change, runs: int, seed: int) -> torch.Tensor:
    """Mean loss of each run in each stretch after the switch: (runs, stretches)."""
    generator = torch.Generator().manual_seed(seed)
    curvature, noise = task.spectrum()
    target = task.distance * torch.randn(runs, task.directions, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros_like(target))
    optimizer = task.build(parameter)
    limits = BatchLimits(1, 64)
    sums, counts = torch.zeros(runs, STRETCHES, dtype=torch.float64), torch.zeros(STRETCHES)
    done, end, switch = 0, REFERENCE * task.steps, REFERENCE * task.switch
    # Of the whole problem at its beginning: what AdaScale would be told, or more, for the noise scale only rises.
    noise_scale = REFERENCE * float(noise.square().sum() / (0.5 * curvature).square().sum())
    while done < end:
        batch = REFERENCE if done < switch else round(REFERENCE * factor)
        scales = task.scaling().scales(batch, noise_scale)
        scales = scales if batch == REFERENCE else change(scales)
        plan = split(step=0, first_sample=done, global_batch=batch, limits=limits, measure=False, scales=scales)
        draws = sum(torch.randn(runs, task.directions, generator=generator, dtype=torch.float64) for _ in range(batch))
        error = parameter.detach() - target
        parameter.grad = curvature * error + noise * math.sqrt(REFERENCE) * draws / batch
        optimizers.apply(plan, optimizer)
        optimizer.step()
        done += batch
        if done > switch and done % (REFERENCE * 8) == 0:
            stretch = min(STRETCHES - 1, (done - switch - 1) * STRETCHES // (end - switch))
            sums[:, stretch] += 0.5 * (curvature * (parameter.detach() - target).square()).sum(1)
            counts[stretch] += 1
    return sums / counts


@dataclass(frozen=True)
class Outcome:
    """Ratios to the unswitched run: the mean over stretches and the stretch that deviates most, with half widths."""

    mean: float
    mean_width: float
    worst: float
    worst_width: float

    @classmethod
    def of(cls, switched: torch.Tensor, straight: torch.Tensor) -> Outcome:
        mean, mean_width = _ratio(switched.mean(1, keepdim=True), straight.mean(1, keepdim=True))
        each, widths = _ratio(switched, straight)
        place = int((each.log().abs()).argmax())
        return cls(mean.item(), mean_width.item(), each[place].item(), widths[place].item())


def _ratio(switched: torch.Tensor, straight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratio of means over runs and the half width of its 95 % interval, by the delta method, for each column."""
    ratio = switched.mean(0) / straight.mean(0)
    spread = (switched - ratio * straight).std(0) / math.sqrt(len(switched))
    return ratio, 1.96 * spread / straight.mean(0)


def without(**scales: float) -> Change:
    return lambda found: replace(found, **scales)


def beta1_moves(found: Scales) -> Scales:
    return replace(found, beta1_exponent=found.kappa)


ADAM_ARMS = (
    Arm("the transaction", lambda found: found),
    Arm("nothing moves", lambda found: Scales(kappa=found.kappa)),
    Arm("without learning rate", without(lr=1.0)),
    Arm("without beta2 (and counter)", without(beta2_exponent=1.0, step_counter=1.0)),
    Arm("without step counter", without(step_counter=1.0)),
    Arm("without second moment", without(second_moment=0.0)),
    Arm("without epsilon", without(eps=1.0)),
    Arm("without weight decay", without(weight_decay=1.0)),
    Arm("with beta1, too", beta1_moves),
)
SGD_ARMS = (
    Arm("the transaction", lambda found: found),
    Arm("nothing moves", lambda found: Scales(kappa=found.kappa)),
    Arm("without learning rate", without(lr=1.0, momentum_buffer=1.0)),
    Arm("without momentum buffer", without(momentum_buffer=1.0)),
    Arm("without weight decay", without(weight_decay=1.0)),
)
BETA1_ARMS = (ADAM_ARMS[0], ADAM_ARMS[-1])

LESS_NOISE = {"distance": 1.0, "steps": 1600, "switch": 400, "judged": False}
TASKS = {
    "AdamW": (Task("AdamW", "adamw", lr=0.005, weight_decay=0.03, eps=2.0), ADAM_ARMS),
    "SGD": (Task("SGD", "sgd", lr=1.5e-4, weight_decay=0.05), SGD_ARMS),
    "AdamW, sharp": (Task("AdamW, sharp", "adamw", lr=0.005, weight_decay=0.03, eps=2.0, sharp=200.0, judged=False), BETA1_ARMS),
    "AdamW, less noise": (
        Task("AdamW, less noise", "adamw", lr=0.01, weight_decay=0.03, eps=2.0, beta2=0.99, **LESS_NOISE),
        ADAM_ARMS[:2],
    ),
    "SGD, less noise": (Task("SGD, less noise", "sgd", lr=3e-4, weight_decay=0.05, **LESS_NOISE), SGD_ARMS[:2]),
}


def measure(task: Task, factor: float, arms: tuple[Arm, ...], runs: int, seed: int) -> dict[str, Outcome]:
    """The outcome of each arm, from the cache where it was measured before."""
    straight: torch.Tensor | None = None

    def one(arm: Arm) -> dict[str, float]:
        nonlocal straight
        if straight is None:
            straight = losses(task, 1.0, lambda found: found, runs, seed)
        return asdict(Outcome.of(losses(task, factor, arm.change, runs, seed), straight))

    found = {}
    for arm in arms:
        key = {"code": _code(), "task": asdict(task), "factor": factor, "arm": arm.name, "runs": runs, "seed": seed}
        found[arm.name] = Outcome(**cached("coscaling", key, lambda arm=arm: one(arm)))
    return found


def target(name: str, outcome: Outcome, *, by_chance: bool) -> Target:
    """Both ratios within 2 % of 1; ``by_chance`` as far as few runs can tell."""
    figure = f"{100 * (outcome.mean - 1):+.1f} % (stretches to {100 * (outcome.worst - 1):+.1f} %)"
    pairs = ((outcome.mean, outcome.mean_width), (outcome.worst, outcome.worst_width))
    holds = all(abs(ratio - 1) - by_chance * width <= 0.02 for ratio, width in pairs)
    return Target(name, figure, "within 2 %", holds)


def _code() -> str:
    files = [Path(__file__), *sorted((ROOT / "adabatch" / "optimizers").glob("*.py")), ROOT / "adabatch" / "scaling.py"]
    return "".join(essence(path.read_text()) for path in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs side by side: wider intervals")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, seed = (8 if options.quick else 160), 0
    table = Table(["task", "batch", "arm", "loss over unswitched", "largest deviation"])
    targets: list[Target] = []
    for name, (task, arms) in TASKS.items():
        for factor in (8.0, 0.125):
            if task.sharp and factor < 1:
                continue
            word = "x8" if factor > 1 else "/8"
            found = measure(task, factor, arms, runs, seed)
            for arm, outcome in found.items():
                mean = f"{outcome.mean:.3f} ± {outcome.mean_width:.3f}"
                table.add(name, word, arm, mean, f"{outcome.worst:.3f} ± {outcome.worst_width:.3f}")
            if task.judged:
                targets.append(target(f"{name} {word}", found["the transaction"], by_chance=options.quick))
    body = f"{runs} runs side by side, seed {seed}.\n\n{table}\n\n{verdict(targets)}"
    if not options.quick:
        write_result("coscaling", "Co-scaling, part by part", body, " ".join(["python", *sys.argv]))
    print(body)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
