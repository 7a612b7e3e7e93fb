"""What the benchmarks share: the machine in words, tables, targets, a cache of finished pieces, and results files."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
CACHE = ROOT / ".cache" / "bench"


@dataclass
class Table:
    """Rows under named columns; ``str`` gives aligned Markdown, which also reads well in a terminal."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"a row needs {len(self.columns)} cells ({', '.join(self.columns)}), got {cells}")
        self.rows.append([str(cell) for cell in cells])

    def __str__(self) -> str:
        widths = [max(3, *(len(row[i]) for row in [self.columns, *self.rows])) for i in range(len(self.columns))]
        lines = [[cell.rjust(width) for cell, width in zip(row, widths)] for row in [self.columns, *self.rows]]
        lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class Target:
    """One figure against what it should be."""

    name: str
    figure: str
    goal: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.name} {self.figure} ({self.goal}{'' if self.holds else ': FALLS SHORT'})"


def verdict(targets: list[Target]) -> str:
    """The last line of a benchmark: every figure against its target."""
    missed = sum(not target.holds for target in targets)
    outcome = f"{missed} of {len(targets)} targets fall short" if missed else f"all {len(targets)} targets hold"
    return f"{outcome}: " + "; ".join(map(str, targets))


def describe_machine() -> str:
    """Processor, cores, memory, operating system and the versions of what was used, in one line."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {sys.modules[name].__version__}" for name in ("numpy", "torch") if name in sys.modules]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB, {platform.system()}; {', '.join(versions)}"


def write_result(name: str, title: str, body: str, command: str) -> Path:
    """Write ``docs/results/<name>.md``: the title, the command and the machine, then ``body`` (with its seeds)."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(f"# {title}\n\n- Command: `{command}`\n- Machine: {describe_machine()}\n\n{body.strip()}\n")
    return path


def cached(name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """``compute()``, or what it returned the last time for the same JSON-able ``key``: a stopped run goes on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = CACHE / name / f"{digest}.json"
    if path.exists():
        return json.loads(path.read_text())
    value = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(value))
    aside.replace(path)
    return value


def essence(source: str) -> str:
    """What Python code does, without its comments, docstrings and layout: for the keys of :func:`cached`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
