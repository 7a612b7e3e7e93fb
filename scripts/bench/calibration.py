"""c = critical batch / noise scale, by geometry, at early, middle and late checkpoints of both recipes.

recipes/lm (AdamW, byte-level GPT of 0.47 million parameters) and recipes/image (SGD with momentum, 4,000 digits) are
trained once each as they are configured, with checkpoints every 4,000 samples. ``adabatch calibrate`` is then run on
three of them: near 4,000, 16,000 and 32,000 of 40,000 samples, the last before the language model's rate decays.

At each, branches of equal samples at four batches, learning rate tuned for each (a grid widened until the optimum is
inside), constant and then annealed to 0, are compared on the same held-out samples by the samples that the smallest
batch needs for the same loss. The noise scales are measured at the checkpoint's weights without a step. Intervals are
of 95 %, over pairs of branches that read the same samples, and, for c, of both errors. How: adabatch/calibrate.

    python scripts/bench/calibration.py            full: six checkpoints, one process per core
    python scripts/bench/calibration.py --quick    small model, one checkpoint, about a minute: shows that it runs

Every training run and every checkpoint is cached under .cache, so the bench can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import CACHE, ROOT, Table, Target, cached, verdict, write_result

from adabatch.calibrate.records import interval
from adabatch.checkpoint import Checkpoints, Manifest

GEOMETRIES = ("euclidean", "adam", "adam_sqrt", "sign")
WITHIN = 2.0


@dataclass(frozen=True)
class Job:
    """One recipe: how it is trained, where it is calibrated and by what branches."""

    recipe: str
    optimizer: str
    training: tuple[str, ...]
    samples: tuple[int, ...]
    settings: tuple[str, ...]
    names: tuple[str, ...] = ("early", "middle", "late")

    @property
    def folder(self) -> Path:
        return CACHE / "calibration" / "runs" / f"{self.recipe}-{hash_of(self.training):x}"


TRAINING = ("checkpoint.every=4k", "checkpoint.keep_last=100", "evaluation.samples=512", "logger=quiet")
FULL = (
    Job(
        "lm",
        "AdamW",
        TRAINING,
        (4_000, 16_000, 32_000),
        ("batches=[8,32,128,512]", "samples=6144", "pairs=4", "held_out=1024", "noise_samples=32768"),
    ),
    Job(
        "image",
        "SGD, momentum 0.9",
        TRAINING,
        (4_000, 16_000, 32_000),
        ("batches=[4,16,64,256]", "samples=4096", "pairs=6", "held_out=1000", "noise_samples=16384"),
    ),
)
QUICK = (
    Job(
        "lm",
        "AdamW",
        ("model=gpt_tiny", "stop.samples=4k", "lr_schedule=constant", "logger=quiet", "evaluation.samples=64"),
        (4_000,),
        ("batches=[8,32,64]", "samples=512", "pairs=2", "halvings=3", "held_out=128", "noise_samples=2048"),
        ("end",),
    ),
)


def hash_of(values: Sequence[str]) -> int:
    """The same in every process."""
    return zlib.crc32(json.dumps(list(values)).encode())


def started(command: Sequence[str]) -> str:
    """What a command prints; its errors go to the terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def trained(job: Job) -> Path:
    """The run folder of ``job``, trained if it is not there."""
    if not (job.folder / "done").exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        program = ROOT / "recipes" / job.recipe / "train.py"
        started([sys.executable, str(program), *job.training, f"run_folder={job.folder}"])
        (job.folder / "done").touch()
    return job.folder


def steps(job: Job) -> list[int]:
    """The steps of the checkpoints nearest to where ``job`` is calibrated."""
    saved = Checkpoints(job.folder / "checkpoints").at_steps()
    at = {step: Manifest.read(path).samples for step, path in saved.items()}
    return [min(at, key=lambda step: abs(at[step] - samples)) for samples in job.samples]


def calibrated(job: Job, step: int) -> dict[str, Any]:
    """The record of one checkpoint, without the run's whole configuration."""

    def compute() -> dict[str, Any]:
        settings = [f"calibrate.{setting}" for setting in job.settings]
        verb = [sys.executable, "-m", "adabatch.cli", "calibrate", str(job.folder), *settings]
        began = time.perf_counter()
        [record] = json.loads(started([*verb, "--step", str(step), "--json"]))
        del record["config"]
        return {**record, "wall": time.perf_counter() - began}

    return cached("calibration", [job.recipe, job.training, job.settings, step], compute)


def run_all(jobs: Sequence[Job], processes: int) -> dict[Job, list[dict[str, Any]]]:
    """Train and calibrate, one process per core; the slow recipe first."""
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(trained, jobs))
        pending: list[tuple[Job, Callable[[], dict[str, Any]]]] = []
        for job in jobs:
            for step in steps(job):
                pending.append((job, pool.submit(calibrated, job, step).result))
        found: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
        for job, result in pending:
            found[job].append(result())
    return found


def batches_table(found: Mapping[Job, Sequence[Mapping[str, Any]]]) -> str:
    """Data efficiency by batch, at each checkpoint."""
    parts = []
    for job, records in found.items():
        table = Table(["checkpoint", "batch", "best rate", "held-out loss", "data efficiency", "fitted"])
        for name, record in zip(job.names, records):
            longest = record["lengths"][max(record["lengths"], key=int)]
            rows = {str(record["batches"][0]): longest, **record["branches"]}
            for batch, one in rows.items():
                efficiency = record["efficiencies"].get(batch)
                table.add(
                    name,
                    batch,
                    f"{record['rates'][batch]:.2e}{'' if one['interior'] else ' (end of grid)'}",
                    f"{math.fsum(one['losses']) / len(one['losses']):.4f}",
                    "1" if one is longest else interval(efficiency) if efficiency else "unknown",
                    f"{efficiency['fitted']:.3f}" if efficiency and efficiency["fitted"] is not None else "",
                )
        parts.append(f"### {job.recipe}, {job.optimizer}\n\n{table}")
    return "\n\n".join(parts)


def ratios_table(found: Mapping[Job, Sequence[Mapping[str, Any]]]) -> Table:
    """Critical batch, noise scales and c, at each checkpoint."""
    columns = ["recipe", "checkpoint", "samples", "critical batch", "geometry", "noise scale", "c", "rate exponent"]
    table = Table(columns)
    for job, records in found.items():
        for name, record in zip(job.names, records):
            for geometry in GEOMETRIES:
                if geometry in record["ratios"]:
                    table.add(
                        job.recipe,
                        name,
                        f"{record['sample']:,}",
                        interval(record["critical"]),
                        geometry,
                        interval(record["noise"][geometry], "scale"),
                        interval(record["ratios"][geometry]),
                        interval(record["exponent"]),
                    )
    return table


def summary_table(found: Mapping[Job, Sequence[Mapping[str, Any]]]) -> Table:
    """What one constant would do in each geometry: the mean of log c, and how far a checkpoint is from it."""
    table = Table(["recipe", "geometry", "checkpoints resolved", "constant (mean of log c)", "largest factor from it"])
    for job, records in found.items():
        for geometry in GEOMETRIES:
            ratios = [record["ratios"][geometry] for record in records if geometry in record["ratios"]]
            values = [one["value"] for one in ratios if resolved(one)]
            if not ratios:
                continue
            mean = math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan
            spread = max(max(one / mean, mean / one) for one in values) if values else math.nan
            table.add(job.recipe, geometry, f"{len(values)} of {len(ratios)}", f"{mean:.3g}", f"{spread:.2f}")
    return table


def resolved(bound: Mapping[str, Any]) -> bool:
    return bool(bound["value"] and bound["low"] and bound["high"])


def factor(bound: Mapping[str, Any]) -> float:
    """To which the value is known."""
    return max(bound["high"] / bound["value"], bound["value"] / bound["low"])


def reasons(found: Mapping[Job, Sequence[Mapping[str, Any]]]) -> str:
    """What was not resolved, and why."""
    lines = [
        f"- {job.recipe}, {name}: {record['critical']['reason']}"
        for job, records in found.items()
        for name, record in zip(job.names, records)
        if record["critical"]["reason"]
    ]
    return "\n".join(lines) or "Every critical batch is resolved."


def judge(found: Mapping[Job, Sequence[Mapping[str, Any]]]) -> list[Target]:
    """Whether the critical batch is known to a factor of 2 at every checkpoint, by recipe."""
    targets = []
    for job, records in found.items():
        bounds = [record["critical"] for record in records]
        known = [one for one in bounds if resolved(one) and factor(one) <= WITHIN]
        targets.append(
            Target(
                f"{job.recipe}: critical batches known to a factor of {WITHIN:g}",
                f"{len(known)} of {len(bounds)}",
                f"= {len(bounds)}",
                len(known) == len(bounds),
            )
        )
    return targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    jobs = QUICK if options.quick else FULL
    found = run_all(jobs, options.processes)
    records = [record for job in jobs for record in found[job]]
    settings = "\n".join(f"- {job.recipe}: {', '.join(job.settings)}" for job in jobs)
    targets = judge(found)
    samples = sum(one["cost"]["samples"] for one in records)
    body = "\n\n".join(
        [
            f"Training: {', '.join(jobs[0].training)}, otherwise as configured; seed 0, order_seed 0; pairs of "
            f"branches differ in the samples that they read. Cost: {samples:,} samples in branches, "
            f"{sum(one['wall'] for one in records) / 60:.0f} minutes of one process each, added up.",
            settings,
            f"## c by geometry and checkpoint\n\n{ratios_table(found)}",
            f"## One constant for all checkpoints\n\n{summary_table(found)}",
            f"## Not resolved\n\n{reasons(found)}",
            f"## Data efficiency by batch\n\n{batches_table(found)}",
            verdict(targets),
        ]
    )
    if not options.quick:
        command = shlex.join(["python", "scripts/bench/calibration.py", *sys.argv[1:]])
        write_result("calibration", "Critical batch over noise scale, measured", body, command)
    print(body)
    return 0 if options.quick or all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
