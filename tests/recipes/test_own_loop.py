"""The loop of one's own: short, shown in the README as it is, and alike through both layers on one and two ranks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "recipes" / "own_loop.py"


def decisions(output: str) -> list[tuple[int, float, int, int]]:
    """Sample, loss, and the batches before and after each change."""
    found = re.findall(r"sample +([\d,]+) +loss ([\d.]+) +(?:grow|shrink) (\d+) to (\d+)", output)
    return [(int(sample.replace(",", "")), float(loss), int(old), int(new)) for sample, loss, old, new in found]


def test_it_is_short_and_in_the_readme() -> None:
    text = PROGRAM.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"```python\n{text}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_both_layers_agree_on_one_rank() -> None:
    spec = importlib.util.spec_from_file_location("own_loop", PROGRAM)
    assert spec is not None and spec.loader is not None
    own_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_loop)
    ledgers = [own_loop.main(layer, samples=3_000).ledger for layer in ("accumulate", "tap")]
    assert ledgers[0].samples == ledgers[1].samples == 3_000
    assert ledgers[0].segments == ledgers[1].segments
    assert len(ledgers[0].segments) > 2, "the batch moved"
    for one, other in zip(ledgers[0].decisions, ledgers[1].decisions, strict=True):
        assert one.estimate["noise"] == pytest.approx(other.estimate["noise"], rel=0.02)


def test_both_layers_agree_on_two_ranks() -> None:
    runs = []
    for layer in ("accumulate", "tap"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*command, str(PROGRAM), layer], capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        runs.append(decisions(done.stdout))
    assert [run[2:] for run in runs[0]] == [run[2:] for run in runs[1]]
    assert len(runs[0]) >= 3 and runs[0][-1][3] >= 4 * 16
    assert [run[1] for run in runs[0]] == pytest.approx([run[1] for run in runs[1]], rel=0.05)
