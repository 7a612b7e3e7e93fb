"""Starting a user's own program, for the verbs that need its model and data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from adabatch.config.resume import read_launches


def run_job(job: str, target: Path, overrides: Sequence[str] = (), ranks: int = 1) -> int:
    """Start a training program with ``job=<job>``, by torchrun on several ranks; returns its exit status.

    Args:
        job: what the program is to do, one of the configuration's ``job``; the verb of the same name asks for it.
        target: the program, or a run folder: that stands for the program of its last launch, in the directory where
            that was started, with ``resume`` set to the folder.
        overrides: key=value, as for training.
        ranks: processes, all on this machine.

    Raises:
        ValueError: when there is no program: nothing at ``target``, a folder that is no run's, or a run whose program
            has moved.
    """
    arguments, program, directory = list(overrides), target, None
    if target.is_dir():
        launch = read_launches(target)[-1]
        arguments = [f'resume="{target.absolute()}"', *arguments]
        program, directory = Path(launch["program"]), launch.get("directory")
        if not program.is_file():
            raise ValueError(
                f"the run's program {program} is not there any more; say where it is: "
                f"adabatch {job} <program> {' '.join(arguments)}"
            )
    if not program.is_file():
        raise ValueError(f"there is no program and no run folder at {program}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(program), *arguments, f"job={job}"]
    return subprocess.run(command, cwd=directory, check=False).returncode
