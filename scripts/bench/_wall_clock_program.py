"""The language model recipe on ranks whose gradients take longer to add up: every such collective waits first.

DELAY_SECONDS in the environment says how long. Only ``wall_clock.py`` starts this.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "lm"


def delayed(seconds: float, all_reduce: Any) -> Any:
    """``all_reduce`` that waits where gradients travel: of all collectives of a step, theirs alone are asynchronous."""

    def wait_and_reduce(*arguments: Any, async_op: bool = False, **more: Any) -> Any:
        if async_op:
            time.sleep(seconds)
        return all_reduce(*arguments, async_op=async_op, **more)

    return wait_and_reduce


if __name__ == "__main__":
    dist.all_reduce = delayed(float(os.environ["DELAY_SECONDS"]), dist.all_reduce)
    sys.path.insert(0, str(RECIPE))
    runpy.run_path(str(RECIPE / "train.py"), run_name="__main__")
