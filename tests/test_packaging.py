"""What is installed: a wheel holds every module and every YAML file, and programs compose from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from programs import ROOT

BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source distribution, built from a copy of the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    unwanted = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "runs", "build", "dist")
    shutil.copytree(ROOT, source, ignore=unwanted, dirs_exist_ok=True)
    command = [sys.executable, "-c", BUILD, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(target.glob("*.whl"))) as wheel:
        wheel.extractall(target / "wheel")
    with tarfile.open(next(target.glob("*.tar.gz"))) as sdist:
        sdist.extractall(target / "sdist", filter="data")
    return target


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(pattern))


def test_the_wheel_holds_the_package_and_its_configurations_alone(built: Path) -> None:
    wheel = built / "wheel"
    assert files(wheel / "adabatch", "*.py") == files(ROOT / "adabatch", "*.py")
    assert files(wheel / "adabatch" / "hydra_configs", "*.yaml") == files(ROOT / "hydra_configs", "*.yaml") != []
    assert (wheel / "adabatch" / "py.typed").exists()
    assert sorted(path.name for path in wheel.iterdir() if path.suffix != ".dist-info") == ["adabatch"]
    assert "adabatch = adabatch.cli:main" in next(wheel.glob("*.dist-info/entry_points.txt")).read_text()


def test_the_source_distribution_holds_the_programs_and_tests_too(built: Path) -> None:
    [sdist] = (built / "sdist").iterdir()
    for folder, pattern in (("adabatch", "*.py"), ("hydra_configs", "*.yaml"), ("recipes", "*.py"), ("tests", "*.py")):
        assert files(sdist / folder, pattern) == files(ROOT / folder, pattern) != []
    assert files(sdist / "scripts", "*.sh") == files(ROOT / "scripts", "*.sh") != []
    assert {"setup.py", "pyproject.toml", "README.md"} <= {path.name for path in sdist.iterdir()}


def test_a_program_composes_from_the_wheel(built: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(built / "wheel")}
    command = [sys.executable, str(ROOT / "recipes" / "image" / "train.py"), "--info", "searchpath"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert str(built / "wheel" / "adabatch" / "hydra_configs") in done.stdout
