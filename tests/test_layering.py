"""The house rules of imports: data flows one way, and the deciding half has no torch.

Every module stands on a row and imports only from the rows above its own; what is under ``if TYPE_CHECKING:`` is for
type checkers and does not count. A module that stands on no row fails.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adabatch"
RECIPES = ROOT / "recipes"

ROWS = (
    ("progress",),
    ("plan", "ledger"),
    ("noise", "policies", "scaling", "schedules"),
    ("guards", "verdicts", "slope", "alignment", "throughput", "regression", "requirements", "standing"),
    ("evidence",),
    ("observations",),
    ("controller",),
    ("distributed",),
    ("gradients", "optimizers", "data", "stopwatch"),
    ("checkpoint", "runlog", "report", "simulate", "stepping"),
    ("loop",),
    ("calibrate",),
    ("integrations", "config"),
    ("cli",),
)
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
DECIDING = {name for name, row in ROW.items() if row <= ROW["controller"]}
# These load torch when it is needed, and not when they are imported.
NO_TORCH_AT_IMPORT = DECIDING | {"runlog", "report", "simulate", "cli", "config"}
# Building the parts of a run is what needs torch; reading and checking a configuration does not.
LOADS_TORCH_ANYWAY = {
    f"adabatch.config.{name}" for name in ("build", "launching", "live", "calibrating", "in_run")
}
# A report reads what the run log has written, in the format that is defined there; a simulation reads it, too, and is
# judged by the report's trade-off.
SAME_ROW = {("report", "runlog"), ("simulate", "runlog"), ("simulate", "report")}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: ``module`` as it is written out in full, and where it stands."""

    module: str
    name: str | None
    line: int
    at_import: bool


def imports_of(source: str, package: str) -> list[Import]:
    """The imports of a module in ``package``, those for type checkers left out."""
    return list(_imports(ast.parse(source).body, package, at_import=True))


def _imports(nodes: list[ast.stmt] | list[ast.AST], package: str, at_import: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            yield from (Import(module, alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(node.orelse, package, at_import)
        else:
            inside = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(list(ast.iter_child_nodes(node)), package, inside)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def owner(found: Import) -> str | None:
    """The house's module that ``found`` belongs to: "" for the package itself, ``None`` for anything else."""
    parts = found.module.split(".")
    if parts[0] != "adabatch":
        return None
    if len(parts) > 1:
        return parts[1]
    return found.name if found.name in ROW else ""


def faults(source: str, module: str, package: str) -> list[str]:
    """What a module ``adabatch.<...>`` imports against the rules, each as a sentence."""
    mine = module.split(".")[1] if "." in module else ""
    if mine and mine not in ROW:
        return [f"{module} stands on no row of tests/test_layering.py"]
    found = imports_of(source, package)
    return [f"{module}:{one.line} {why}" for one in found if (why := _fault(one, module, mine))]


def _fault(one: Import, module: str, mine: str) -> str | None:
    root, theirs = one.module.split(".")[0], owner(one)
    if root == "recipes":
        return f"imports {one.module}: nothing imports a recipe"
    if root == "torch" and one.at_import and mine in NO_TORCH_AT_IMPORT and module not in LOADS_TORCH_ANYWAY:
        return "imports torch when it is imported"
    if theirs is None:
        if mine in DECIDING and root not in sys.stdlib_module_names:
            return f"imports {root}, and rows 0 to 3 have only the standard library"
        return None
    if not mine:
        return f"loads {theirs} when it is imported" if one.at_import and theirs not in DECIDING else None
    if theirs == mine or (mine, theirs) in SAME_ROW or (theirs, one.name) == ("", "__version__"):
        return None
    if theirs not in ROW:
        return f"imports {one.module} {one.name or ''}, which stands on no row"
    if ROW[theirs] >= ROW[mine]:
        return f"(row {ROW[mine]}) imports {theirs} (row {ROW[theirs]})"
    return None


def recipe_faults(source: str, path: str, own: set[str]) -> list[str]:
    """What a recipe imports beside libraries, the public modules of adabatch and its ``own`` files."""
    found = []
    for one in imports_of(source, ""):
        parts = one.module.split(".")
        private = len(parts) > 2 or any(part.startswith("_") for part in [*parts, one.name or ""])
        if parts[0] == "adabatch" and (private or owner(one) not in {*ROW, ""}):
            found.append(f"{path}:{one.line} imports {one.module} {one.name or ''}, which is not public")
        if parts[0] == "recipes" or (parts[0] in RECIPE_FILES and parts[0] not in own):
            found.append(f"{path}:{one.line} imports {one.module}, which is another recipe's")
    return found


def products_of_steps_and_batches(source: str) -> list[int]:
    """The lines that multiply something named after steps by something named after a batch."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = _names(node.left), _names(node.right)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            left, right = _names(node.target), _names(node.value)
        else:
            continue
        if any("step" in a and "batch" in b for a, b in ((left, right), (right, left))):
            lines.append(node.lineno)
    return lines


def _names(node: ast.AST) -> str:
    inner = ast.walk(node)
    return " ".join(getattr(one, "id", None) or getattr(one, "attr", None) or "" for one in inner).lower()


MODULES = sorted(PACKAGE.rglob("*.py"))
RECIPE_MODULES = sorted(RECIPES.rglob("*.py"))
RECIPE_FILES = {path.stem for path in RECIPE_MODULES}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- the rules


def test_there_is_something_to_check() -> None:
    assert {"adabatch", "adabatch.plan", "adabatch.controller", "adabatch.data.order"} <= set(map(name_of, MODULES))
    assert RECIPE_MODULES


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_modules_import_from_the_rows_above_their_own(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert faults(path.read_text(encoding="utf-8"), name_of(path), package) == []


@pytest.mark.parametrize("path", RECIPE_MODULES, ids=short)
def test_recipes_import_public_modules_and_their_own_files(path: Path) -> None:
    own = {sibling.stem for sibling in path.parent.glob("*.py")}
    assert recipe_faults(path.read_text(encoding="utf-8"), short(path), own) == []


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem not in ("plan", "ledger")], ids=short)
def test_nothing_else_multiplies_steps_by_a_batch(path: Path) -> None:
    assert products_of_steps_and_batches(path.read_text(encoding="utf-8")) == []


def test_importing_the_deciding_half_does_not_load_torch() -> None:
    modules = ["adabatch", *(f"adabatch.{name}" for name in sorted(DECIDING))]
    program = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# -- the checker itself finds what it is there for


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("adabatch.plan", "from adabatch.controller import Controller", "(row 1) imports controller (row 6)"),
        ("adabatch.plan", "from adabatch import ledger", "(row 1) imports ledger (row 1)"),
        ("adabatch.noise", "import adabatch.policies", "(row 2) imports policies (row 2)"),
        ("adabatch.noise", "def f():\n    from .loop import run", "(row 2) imports loop (row 10)"),
        ("adabatch.data.order", "from ..gradients import taps", "(row 8) imports gradients (row 8)"),
        ("adabatch.data.order", "from adabatch import Controller", "which stands on no row"),
        ("adabatch.scaling", "import numpy as np", "imports numpy"),
        ("adabatch.scaling", "def f():\n    import torch", "imports torch, and rows 0 to 3"),
        ("adabatch.runlog.log", "try:\n    import torch.utils\nexcept ImportError:\n    pass", "when it is imported"),
        ("adabatch.config.schema", "from torch import nn", "when it is imported"),
        ("adabatch.loop", "import recipes.lm.train", "nothing imports a recipe"),
        ("adabatch.helpers", "", "stands on no row"),
        ("adabatch", "from adabatch.gradients import attach", "loads gradients when it is imported"),
        ("adabatch.controller", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy", "imports numpy"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, fault: str) -> None:
    found = faults(source, module, module.rpartition(".")[0])
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("adabatch.controller", "import math\nfrom adabatch import plan as planning\nimport adabatch.noise"),
        ("adabatch.policies", "if TYPE_CHECKING:\n    from adabatch.loop import Trainer\n    import torch"),
        ("adabatch.policies", "if typing.TYPE_CHECKING:\n    from adabatch.noise import Estimate"),
        ("adabatch.data.order", "import torch\nfrom .streams import stream\nfrom adabatch.data import cache"),
        ("adabatch.cli", "from adabatch import __version__"),
        ("adabatch.runlog.log", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        ("adabatch", "from adabatch.plan import Scales\ndef f():\n    from adabatch.loop import Trainer"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert faults(source, module, module.rpartition(".")[0]) == []


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("import data\nimport torch\nfrom adabatch.config import launch\nfrom adabatch import distributed", False),
        ("from adabatch.config.build import Assembly", True),
        ("from adabatch.config import _private", True),
        ("import adabatch._core", True),
        ("from recipes.image import data", True),
        ("import own_loop", True),
    ],
)
def test_a_recipe_that_reaches_too_far_is_found(source: str, faulty: bool) -> None:
    assert bool(recipe_faults(source, "recipes/lm/train.py", {"data", "model", "train"})) == faulty


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = steps * global_batch", True),
        ("x = self.batch * (plan.step + 1)", True),
        ("done_steps *= batch", True),
        ("x = 2 * progress.steps * micro_batch", True),
        ("x = micro_batches * per_micro_batch", False),
        ("x = samples / global_batch * steps_per_second if step else batch", True),
        ("x = steps + global_batch", False),
        ("x = samples_in(steps, global_batch)", False),
    ],
)
def test_a_product_of_steps_and_a_batch_is_found(source: str, found: bool) -> None:
    assert bool(products_of_steps_and_batches(source)) == found
