"""Branches and noise scales under DistributedDataParallel, over real gloo processes."""

from __future__ import annotations

import sys
from pathlib import Path

import ranks
import torch

from adabatch import distributed
from adabatch.calibrate import Branch, Snapshot, calibrate, noise_scales
from adabatch.calibrate.branches import run

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
import test_calibrate as single  # noqa: E402
import test_loop as loops  # noqa: E402

GEOMETRIES = ("euclidean", "adam_sqrt", "sign")


def _measured() -> dict[str, object]:
    """Losses of two branches and the noise scales, and whether all is as before."""
    world = distributed.World(distributed.rank(), distributed.size(), 0, 1, torch.device("cpu"))
    bench = single.make(dropout=0.0, world=world)
    before = single.state(bench)
    snapshot = Snapshot(bench.plain_model, bench.optimizer)
    losses = [run(bench, Branch(batch, 96, single.START), snapshot) for batch in (8, 32)]
    scales = {name: one.scale for name, one in noise_scales(bench, GEOMETRIES, samples=512).items()}
    unchanged = single.same(before, single.state(bench))
    # Training goes on with the run's own tap.
    losses.append(run(bench, Branch(8, 32, single.START), snapshot))
    bench.tap.detach()
    return {"losses": losses, "scales": scales, "unchanged": unchanged}


def test_two_ranks_find_what_one_does_and_agree() -> None:
    [one] = ranks.run(_measured, 1)
    first, second = ranks.run(_measured, 2)
    assert first["losses"] == second["losses"] and first["scales"] == second["scales"]
    assert first["unchanged"] and second["unchanged"]
    torch.testing.assert_close(first["losses"], one["losses"], rtol=1e-5, atol=1e-6)
    for name in ("euclidean", "adam_sqrt"):
        # The same windows in the same groups of 4, cut differently over the ranks.
        assert 0.5 < first["scales"][name] / one["scales"][name] < 2.0


def _trained(folder: Path) -> list[dict[str, object]]:
    """A run straight through, and one that is calibrated after its second step and its tenth."""
    found = []
    for name in ("straight", "calibrated"):
        asked: list[int] = []

        def probe(trainer: loops.Trainer, interrupted: object) -> bool:
            asked.append(trainer.controller.progress.steps)
            if asked[-1] in (2, 10):
                calibrate(single._bench_of(trainer), single.SMALLEST, present=trainer.controller.batch)
            return False

        trainer = loops.make(folder / name)
        trainer.calibrate = probe if name == "calibrated" else None
        with trainer.stream, trainer.tap, trainer.log:
            trainer.train()
        controller = trainer.controller
        found.append(
            {
                "asked": asked,
                "ledger": controller.ledger.to_dict(),
                "measured": controller.state_dict()["measured"],
                "weights": loops.parameters(trainer).tolist(),
            }
        )
    return found


def test_a_run_on_two_ranks_goes_on_bit_by_bit_after_it(tmp_path: Path) -> None:
    for straight, calibrated in ranks.run(_trained, 2, tmp_path):
        assert calibrated.pop("asked")[:2] == [1, 2] and not straight.pop("asked")
        assert straight == calibrated
        assert any(one["batch"] != one["previous"] for one in straight["ledger"]["decisions"])
