"""Runs killed with SIGKILL at random moments and resumed until they are done, against runs that nothing happened to.

Every run is the same adaptive training of a small GPT: dropout on, samples with randomness of their own, a batch that
changes about ten times, data workers on and off in turn. The launcher and all ranks are killed at once, at moments
drawn over the whole run, and aimed at start-up, decisions, evaluations, checkpoints and the report. Data workers are
left to notice by themselves, while the run is resumed already.

- On the same number of ranks (2, or 1 without a launcher), the resumed run's parameters, optimizer state, random-number
  states, ledger and loss log are bit for bit those of the run without a kill.
- On 1, 2 and 3 ranks in turn, exactly the positions [0, n) of the sample order went through the model, each once.
  Index and seed of every sample that had a gradient are noted by the program itself (``_resume_task.py``) and turned
  into positions by the inverse of the order. What an attempt did past the checkpoint that the next one went on from
  does not count. The other runs are checked in the same way.
- A run killed before its first checkpoint cannot be resumed and says so; it is started anew.

    python scripts/bench/resume.py [--quick] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, Table, Target, cached, essence, verdict, write_result
from _killed_runs import (
    ORDER_SEED,
    PATIENCE,
    PROGRAM,
    SAMPLES,
    SETTINGS,
    Aim,
    Attempt,
    History,
    Pace,
    Spec,
    carry_out,
    command,
    launched,
)

from adabatch.checkpoint import Checkpoints, tensors
from adabatch.data import SampleOrder
from adabatch.data.fetch import sample_seed
from adabatch.runlog import read_metrics

DATA_SIZE = 701  # of the program's training set
# How often a kill is aimed at each phase in the full mode; "anywhere" is drawn over all samples that are left.
AIMS = {"anywhere": 18, "checkpoint": 6, "decision": 5, "evaluation": 5, "start-up": 4, "report": 2}
# Longest delay from the moment that was aimed at to the kill, in seconds: about as long as each phase takes.
DELAYS = {"anywhere": 0.03, "checkpoint": 0.05, "decision": 0.003, "evaluation": 0.015, "start-up": 0.0, "report": 1.5}
PHASES = ("start-up", "steps", "decision", "evaluation", "checkpoint", "report")
TIMED = ("time", "seconds", "samples_per_second", "step_time")  # what no two runs have in common


@dataclass(frozen=True)
class Reference:
    """A run without a kill: what it left, and its pace."""

    facts: dict[str, Any]
    pace: Pace


class References:
    """The uninterrupted runs by number of ranks, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[int, Reference] = {}

    def of(self, ranks: int) -> Reference:
        if ranks not in self._made:
            print(f"uninterrupted run, {ranks} rank(s)", flush=True)
            self._made[ranks] = self._make(ranks)
        return self._made[ranks]

    def _make(self, ranks: int) -> Reference:
        run, attempt = self.folder / f"reference{ranks}", Attempt(self.folder / f"reference-trace{ranks}", ranks)
        with launched(attempt, command(ranks, run, resume=False, workers=0)) as process:
            process.wait(PATIENCE)
        if attempt.status != 0 or not exactly_once(History(run, [attempt])):
            raise RuntimeError(f"the uninterrupted run on {ranks} ranks failed:\n{attempt.output[-4000:]}")
        phases = Counter(line[6:] for line in attempt.notes(0) if line.startswith("phase "))
        return Reference(facts(run), Pace(phases, read_metrics(run).evaluations[0]["time"] - attempt.began))


# -- comparing


@cache
def positions_by_tag() -> dict[str, int]:
    """The inverse of the sample order, over an epoch more than the run has: index and seed -> position."""
    order = SampleOrder(DATA_SIZE, ORDER_SEED)
    positions = range(SAMPLES + DATA_SIZE)
    return {f"{order.index(position)}:{sample_seed(ORDER_SEED, position)}": position for position in positions}


def consumed(attempt: Attempt) -> Counter[int]:
    """How often each position had a gradient in an attempt, over all ranks."""
    lines = [line for rank in range(attempt.ranks) for line in attempt.notes(rank)]
    tags = [tag for line in lines if line.startswith("samples ") for tag in line.split()[1:]]
    return Counter(positions_by_tag()[tag] for tag in tags)


def exactly_once(history: History) -> bool:
    """Whether the attempts, each up to where the next went on from, consumed every position below n once.

    An attempt that came to its end must not have consumed any position beyond, either.
    """
    ends = [*(attempt.start for attempt in history.attempts[1:]), SAMPLES]
    for attempt, end in zip(history.attempts, ends, strict=True):
        counts = consumed(attempt)
        if attempt.killed_in:
            counts = Counter({position: times for position, times in counts.items() if position < end})
        if counts != dict.fromkeys(range(attempt.start, end), 1):
            return False
    return True


def facts(folder: Path) -> dict[str, Any]:
    """What a finished run leaves and does not depend on time, in parts to be compared."""
    metrics, path = read_metrics(folder), Checkpoints(folder / "checkpoints").latest()
    assert path is not None, f"{folder} has no checkpoint"
    controller = json.loads((path / "controller.json").read_text())
    del controller["timed"]
    return {
        "tensors": digests(path),
        "optimizer": (path / "optimizer.json").read_text(),
        "controller": controller,
        "generators": {file.name: file.read_text() for file in path.glob("rng-*.json")},
        "ledger": (folder / "ledger.json").read_text(),
        "log": [
            {key: value for key, value in record.items() if key not in TIMED}
            for record in (*metrics.steps, *metrics.evaluations, *metrics.decisions)
        ],
    }


def digests(path: Path) -> dict[str, str]:
    """A digest of every tensor of a checkpoint, by name."""
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.describe(path).items()
    }
    tensors.read(path, found)
    return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


def examine(spec: Spec, folder: Path, references: References) -> dict[str, Any]:
    """Carry out one run and compare it with the uninterrupted one; JSON data."""
    began = time.monotonic()
    history = carry_out(spec, folder / f"run{spec.number}", references.of(2).pace)
    different: list[str] = []
    if len(set(spec.ranks)) == 1:
        ours, theirs = facts(history.folder), references.of(spec.ranks[0]).facts
        different = [name for name in theirs if ours[name] != theirs[name]]
    ledger = json.loads((history.folder / "ledger.json").read_text())
    row = {
        "kills": history.kills,
        "anew": history.anew,
        "clear": history.clear,
        "starts": [attempt.start for attempt in history.attempts],
        "ranks": [attempt.ranks for attempt in history.attempts],
        "batches": [segment["global_batch"] for segment in ledger["segments"]],
        "different": different,
        "once": exactly_once(history),
        "seconds": time.monotonic() - began,
    }
    shutil.rmtree(folder / f"run{spec.number}")
    return row


# -- the whole benchmark


def all_specs(seed: int, quick: bool) -> list[Spec]:
    """The runs with their kills, all drawn from ``seed``."""
    generator = random.Random(seed)
    rotations = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]
    if quick:
        layouts, phases = [(2,), (1, 2, 3)], ["anywhere", "checkpoint", "decision", "anywhere"]
    else:
        layouts = [(2,)] * 8 + [(1,)] * 4 + [rotations[number % 3] for number in range(8)]
        phases = [phase for phase, times in AIMS.items() for _ in range(times)]
    generator.shuffle(phases)
    per_run = len(phases) // len(layouts)
    aims = [Aim(phase, generator.uniform(0.02, 0.98), generator.uniform(0, DELAYS[phase])) for phase in phases]
    return [
        Spec(
            number,
            ranks,
            workers=(0, 2) if number % 2 else (2, 0),
            aims=tuple(aims[number * per_run : (number + 1) * per_run]),
            spare=Aim("anywhere", generator.uniform(0.2, 0.98), generator.uniform(0, DELAYS["anywhere"])),
        )
        for number, ranks in enumerate(layouts)
    ]


def source_digest() -> str:
    """Of all code that a run goes through, so that results of other code are not taken from the cache."""
    folders = (ROOT / "adabatch", ROOT / "recipes" / "lm")
    files = [*(file for folder in folders for file in sorted(folder.rglob("*.py"))), PROGRAM]
    return sha256("".join(essence(file.read_text()) for file in files).encode()).hexdigest()


def tabulate(specs: list[Spec], rows: list[dict[str, Any]]) -> Table:
    table = Table(["run", "ranks", "killed in", "went on from", "batches", "positions once", "bit-equal"])
    for spec, row in zip(specs, rows, strict=True):
        equal = f"NO: {', '.join(row['different'])}" if row["different"] else "yes"
        equal = "-" if len(set(spec.ranks)) > 1 else equal
        anew = f" (anew: {row['anew']})" if row["anew"] else ""
        batches = f"{min(row['batches'])} to {max(row['batches'])}, {len(row['batches'])} segments"
        ranks, starts = (", ".join(map(str, row[key])) for key in ("ranks", "starts"))
        once = "yes" if row["once"] else "NO"
        table.add(spec.number, ranks, ", ".join(row["kills"]) + anew, starts, batches, once, equal)
    return table


def judge(specs: list[Spec], rows: list[dict[str, Any]], quick: bool) -> list[Target]:
    same = [row for spec, row in zip(specs, rows) if len(set(spec.ranks)) == 1]
    equal, once = sum(not row["different"] for row in same), sum(row["once"] for row in rows)
    kills = Counter(kill for row in rows for kill in row["kills"])
    resumed, clear = sum(len(row["starts"]) > 1 for row in rows), sum(row["clear"] for row in rows)
    targets = [
        Target("bit-equal on the same ranks", f"{equal} of {len(same)}", "all", equal == len(same)),
        Target(f"positions [0, {SAMPLES}) once each", f"{once} of {len(rows)}", "all", once == len(rows)),
        Target("runs killed and resumed", f"{resumed} of {len(rows)}", "all", resumed == len(rows)),
        Target("refused only without a checkpoint", f"{clear} of {len(rows)}", "all", clear == len(rows)),
    ]
    if quick:
        return targets
    hit = sum(kills[phase] > 0 for phase in PHASES)
    return [*targets, Target("phases hit", f"{hit} of {len(PHASES)}", "all", hit == len(PHASES))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs and four kills, about a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the kill moments")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    specs, rows, code = all_specs(options.seed, options.quick), [], source_digest()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references = References(folder)
        for spec in specs:
            (folder / f"run{spec.number}").mkdir()
            key = {"spec": asdict(spec), "settings": SETTINGS, "code": code}
            row = cached("resume", key, lambda spec=spec: examine(spec, folder, references))
            rows.append(row)
            print(f"run {spec.number}: killed in {', '.join(row['kills'])}; {row['seconds']:.0f} s", flush=True)
    kills = Counter(kill for row in rows for kill in row["kills"])
    early = sum(row["anew"] for row in rows)
    targets = judge(specs, rows, options.quick)
    hits = ", ".join(f"{kills[phase]} in {phase}" for phase in PHASES)
    minutes = sum(row["seconds"] for row in rows) / 60
    body = (
        f"Seed {options.seed}. {kills.total()} kills in {len(rows)} runs of {SAMPLES:,} samples ({DATA_SIZE} in the "
        f"data set): {hits}. {early} hit before the first checkpoint; such a run cannot be resumed, says so, and was "
        f"started anew. Total cost: {minutes:.1f} minutes.\n\n{tabulate(specs, rows)}\n\n{verdict(targets)}"
    )
    if not options.quick:
        write_result("resume", "Runs killed and resumed", body, " ".join(["python", *sys.argv]))
    print(body)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
