"""Every setting has bounds, and a value outside them is refused by name before anything starts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import programs
import pytest
import ranks
import torch
from omegaconf import DictConfig, OmegaConf
from programs import SMALL, nodes, tiny_task

from adabatch.config import ConfigError, Task, launch
from adabatch.config.bounds import rules

ILLEGAL = [
    ("policy.target_efficiency=1.5", "policy.target_efficiency"),
    ("policy.target_efficiency=0", "policy.target_efficiency"),
    ("policy.calibration=0", "policy.calibration"),
    ("policy.repay=0.5", "policy.repay"),
    ("policy.allocation=root", "policy.allocation must be one of proportional, sqrt, got 'root'"),
    ("policy.allocation=sqrt policy.cap=0.5", "raise the cap to 2"),
    ("noise.align_every=0", "noise.align_every"),
    ("curvature.step=-1", "curvature.step"),
    ("curvature.samples=0", "curvature.samples"),
    ("curvature.per_group=0", "curvature.per_group"),
    ("curvature.per_hessian=0", "curvature.per_hessian"),
    ("curvature.confidence=1", "curvature.confidence"),
    ("calibrate.steps=[soon]", "calibrate.steps must be a list of steps of checkpoints, or early, middle, late"),
    ("calibrate.multiples=[1,0]", "calibrate.multiples must be a list of numbers, each in (0, inf), got [1.0, 0.0]"),
    ("calibrate.batches=[0]", "calibrate.batches must be a list of numbers, each in [1, inf), got [0]"),
    ("calibrate.samples=8", "calibrate.samples"),
    ("calibrate.pairs=1", "calibrate.pairs"),
    ("calibrate.halvings=0", "calibrate.halvings"),
    ("calibrate.cooldown=0", "calibrate.cooldown"),
    ("calibrate.widest=0.5", "calibrate.widest"),
    ("calibrate.held_out=0", "calibrate.held_out"),
    ("calibrate.noise_samples=8", "calibrate.noise_samples"),
    ("calibrate.geometries=[layers]", "calibrate.geometries"),
    ("calibrate.times=-1", "calibrate.times"),
    ("calibrate.share=0", "calibrate.share"),
    ("calibrate.confidence=1", "calibrate.confidence"),
    ("policy.name=fixed", "policy.name"),
    ("policy=fixed policy.global_batch=0", "policy.global_batch"),
    ("policy=fixed policy.global_batch=12", "a batch of policy fixed=12 cannot be made"),
    ("policy=stages policy.stages=16", "policy=stages: policy.stages: '16' is no pair"),
    ("policy=stages policy.stages=5:16", "policy.stages must begin at 0"),
    ("policy=stages policy.stages=0:x", "policy=stages: cannot read 'x'"),
    ("policy=stages policy.stages=0:16 policy.unit=steps", "policy.unit"),
    ("policy=norm_test policy.tolerance=1", "policy.tolerance must be in (0, 1), got 1"),
    ("policy=inner_product_test policy.tolerance=0", "policy.tolerance must be in (0, 1), got 0"),
    ("policy=cosine_test policy.similarity=1", "policy.similarity must be in (0, 1), got 1"),
    ("policy=cabs", "scaling.rule=auto moves the learning rate with the batch; set scaling=none"),
    ("policy=loss_law policy.reference_batch=64 policy.reference_loss=0", "policy.reference_loss"),
    ("policy=loss_law policy.reference_batch=64 policy.reference_loss=3 policy.exponent=0", "policy.exponent"),
    (
        "policy=ramp policy.first_batch=16 policy.final_batch=60 policy.increment=16 policy.length=10k",
        "policy.final_batch=60 must be policy.first_batch=16 and some whole increments of 16: 48 or 64 would be",
    ),
    (
        "policy=ramp policy.first_batch=8 policy.final_batch=20 policy.increment=4 policy.length=10k",
        "a batch of policy ramp=12 cannot be made",
    ),
    (
        "policy=ramp policy.first_batch=16 policy.final_batch=64 policy.increment=16 policy.length=0",
        "policy.length must be a whole number of at least 1",
    ),
    ("policy=seesaw policy.first_batch=32 policy.cap=1", "policy.cap"),
    ("policy=seesaw policy.first_batch=32 policy.factor=20", "policy.factor above 1 and at most the cap"),
    (
        "policy=late_switch policy.first_batch=32 policy.final_batch=96 policy.unit=tokens",
        "policy.at=75% is a share of a horizon, and none is known: set stop.tokens, or give it as a count",
    ),
    ("policy=late_switch policy.first_batch=32 policy.final_batch=96 policy.at=x", "policy.at"),
    ("policy=late_switch policy.first_batch=32 policy.final_batch=96 policy.at=0", "for one batch throughout there is"),
    ("policy=replay policy.ledger=nowhere.json", "policy=replay: there is no ledger at nowhere.json"),
    ("damping.dwell=-1", "damping.dwell"),
    ("damping.growth=1.2", "damping.growth"),
    ("damping.dead_band=0.9", "damping.dead_band"),
    ("damping.dead_band=3", "damping.dead_band between 1 and damping.growth"),
    ("noise.tap=hook", "noise.tap must be one of auto, hooks, ddp, fsdp, got 'hook'"),
    ("noise.tap=ddp", "ddp"),
    (
        "noise.geometry=manhattan",
        "noise.geometry must be one of auto, euclidean, adam, adam_sqrt, norm_layers, sign, muon, got",
    ),
    ("noise.geometry=adam optimizer=sgd", "adam"),
    ("noise.views=[layer]", "noise.views"),
    ("noise.relative_error=0", "noise.relative_error"),
    ("noise.confidence=1", "noise.confidence"),
    ("noise.decide_every=0", "noise.decide_every"),
    ("noise.measure_every=0", "noise.measure_every"),
    ("noise=off", "policy target_efficiency follows the noise scale"),
    ("scaling.rule=linnear", "scaling.rule must be one of auto, none, linear, sqrt, adascale, gain_power, surge, got"),
    ("scaling.reference_batch=0", "scaling.reference_batch"),
    ("scaling.exponent=0", "scaling.exponent"),
    ("limits.start_batch=0", "limits.start_batch"),
    ("limits.start_batch=null", "limits.start_batch"),
    ("limits.start_batch=12", "limits.start_batch=12 cannot be made"),
    ("limits.start_batch=8192", "limits.start_batch=8192 is outside"),
    ("limits.micro_batch=-1", "limits.micro_batch"),
    ("limits.min_batch=0", "limits.min_batch"),
    ("limits.max_batch=0", "limits.max_batch"),
    ("limits.min_batch=64 limits.max_batch=32", "limits.min_batch=64 is above limits.max_batch=32"),
    ("limits.rounding=up", "limits.rounding"),
    ("optimizer.lr=0", "optimizer.lr"),
    ("optimizer.lr=-1", "optimizer.lr"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("optimizer.beta1=1", "optimizer.beta1"),
    ("optimizer.beta2=1.1", "optimizer.beta2"),
    ("optimizer.eps=0", "optimizer.eps"),
    ("optimizer.weight_decay=-0.1", "optimizer.weight_decay"),
    ("optimizer.name=sgd", "optimizer.name"),
    ("optimizer=sgd optimizer.momentum=1", "optimizer.momentum"),
    ("optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true", "optimizer.nesterov"),
    ("optimizer=muon", "no matrix between two hidden layers"),
    ("optimizer=muon optimizer.adjust=none", "optimizer.adjust must be one of match_rms_adamw, original, got 'none'"),
    ("optimizer=muon optimizer.ns_steps=0", "optimizer.ns_steps"),
    ("optimizer=muon optimizer.momentum=1", "optimizer.momentum"),
    ("optimizer=muon optimizer.adamw.lr=0", "optimizer.adamw.lr"),
    ("optimizer=muon optimizer.adamw.beta1=1", "optimizer.adamw.beta1"),
    ("optimizer=muon optimizer.adamw.beta2=1", "optimizer.adamw.beta2"),
    ("optimizer=muon optimizer.adamw.eps=0", "optimizer.adamw.eps"),
    ("optimizer=muon optimizer.adamw.weight_decay=-1", "optimizer.adamw.weight_decay"),
    ("optimizer=muon optimizer.adamw.name=sgd", "optimizer.adamw.name"),
    ("lr_schedule.shape=cosinus", "lr_schedule.shape"),
    ("lr_schedule.warmup=-5", "lr_schedule.warmup"),
    ("lr_schedule.warmup=100%", "lr_schedule.warmup"),
    ("lr_schedule.warmup=x%", "lr_schedule.warmup"),
    ("lr_schedule.warmup=256", "lr_schedule.warmup=256"),
    ("lr_schedule.final=1.5", "lr_schedule.final"),
    ("lr_schedule.decay_share=0", "lr_schedule.decay_share"),
    ("lr_schedule.horizon=0", "lr_schedule.horizon"),
    ("stop.samples=null stop.seconds=9", "lr_schedule.shape=wsd decays towards a horizon, and none is known"),
    ("parallelism.name=fsdp", "parallelism.name"),
    ("parallelism=fsdp parallelism.replicas=0", "parallelism.replicas"),
    ("parallelism=fsdp parallelism.sync=all", "parallelism.sync must be one of each, last, got 'all'"),
    ("parallelism.backend=mpi", "parallelism.backend"),
    ("parallelism.backend=nccl device=cpu", "backend nccl serves GPUs only"),
    ("parallelism.timeout_seconds=0", "parallelism.timeout_seconds"),
    ("logger.every=0", "logger.every"),
    ("logger.names=[jsonl,wandb]", "logger.names"),
    ("stop.samples=0", "stop.samples"),
    ("stop.samples=1.5", "stop.samples"),
    ("stop.samples=many", "stop.samples"),
    ("stop.tokens=-1", "stop.tokens"),
    ("stop.seconds=0", "stop.seconds"),
    ("stop.loss=nan", "stop.loss"),
    ("stop.samples=null", "the run would never end: set stop.samples, stop.tokens, stop.seconds or stop.loss"),
    ("evaluation.every=0", "evaluation.every"),
    ("evaluation.samples=0", "evaluation.samples"),
    ("checkpoint.every=0", "checkpoint.every"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last"),
    ("seed=-1", "seed"),
    ("order_seed=-1", "order_seed"),
    ("precision=fp64", "precision must be one of fp32, bf16, fp16, got 'fp64'"),
    ("clip_norm=0", "clip_norm"),
    ("max_skipped=0", "max_skipped"),
    ("device=tpu", "device must be auto, cpu, cuda or cuda:<index>, got 'tpu'"),
    (f"device=cuda:{torch.cuda.device_count()}", f"device=cuda:{torch.cuda.device_count()}"),
    ("workers=-1", "workers"),
    ("threads=0", "threads"),
    ("name=a/b", "name"),
    ("job=trian", "job"),
    ("resume=nowhere", "nowhere is no run folder: it has no launches.json"),
    ("model.dropout=1", "model.dropout"),
    ("data.held_out=0", "data.held_out"),
]


@pytest.mark.parametrize(("overrides", "words"), ILLEGAL, ids=[overrides for overrides, _ in ILLEGAL])
def test_an_illegal_value_is_refused_by_name_before_training(overrides: str, words: str, tmp_path: Path) -> None:
    arguments = [f"runs={tmp_path}", *SMALL, *overrides.split()]
    with pytest.raises(ConfigError) as caught:
        programs.start(*arguments)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "no run folder was made"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device=cuda .* use device=cpu"):
        programs.start(f"runs={tmp_path}", *SMALL, "device=cuda")


def test_every_setting_is_among_those_tried() -> None:
    tried = {override.partition("=")[0] for overrides, _ in ILLEGAL for override in overrides.split()}
    fixed, stages = ("policy=fixed", "policy.global_batch=8"), ("policy=stages", "policy.stages=0:8")
    bounded = {
        f"{prefix}.{name}".lstrip(".")
        for overrides in ((), fixed, stages, ("optimizer=sgd",), ("optimizer=muon",), ("parallelism=fsdp",))
        for prefix, node in nodes(programs.composed("lm", *overrides))
        for name in rules(OmegaConf.get_type(node))
        if not prefix.startswith(("model", "data"))
    }
    assert bounded - tried == set()


def test_a_task_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    def make_task(config: DictConfig) -> Task:
        raise ValueError("data.path='x' is no file")

    arguments = [f"run_folder={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="data.path='x' is no file"):
        launch(programs.composed("lm", *arguments), arguments, name="lm", make_task=make_task)


def test_an_error_in_training_is_none_of_the_configuration(tmp_path: Path) -> None:
    def make_task(config: DictConfig) -> Task:
        def broken(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
            raise ValueError("a mistake in the loss")

        return dataclasses.replace(tiny_task(config), loss=broken)

    for look in ("true", "false"):  # in the look at one micro-batch beforehand, and in the first step
        arguments = [f"run_folder={tmp_path / look}", f"noise.require_mean={look}", *SMALL]
        with pytest.raises(ValueError, match="a mistake in the loss") as caught:
            launch(programs.composed("lm", *arguments), arguments, name="lm", make_task=make_task)
        assert not isinstance(caught.value, ConfigError)


def test_a_loss_that_is_no_mean_is_refused_before_training(tmp_path: Path) -> None:
    def make_task(config: DictConfig) -> Task:
        task = tiny_task(config)

        def total(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
            loss, _ = task.loss(model, batch)
            return loss * batch[0].shape[0] ** 2, None

        return dataclasses.replace(task, loss=total)

    arguments = [f"run_folder={tmp_path / 'run'}", *SMALL]
    with pytest.raises(ConfigError, match="not the mean of its halves' gradients"):
        launch(programs.composed("lm", *arguments), arguments, name="lm", make_task=make_task)
    assert not (tmp_path / "run").exists()


def refused_on_one_rank() -> tuple[str, int]:
    def make_task(config: DictConfig) -> Task:
        if os.environ["RANK"] == "1":
            raise ValueError("data.path='x' is no file on this machine")
        return tiny_task(config)

    arguments = ["run_folder=/nowhere/run", *SMALL]
    try:
        launch(programs.composed("lm", *arguments), arguments, name="lm", make_task=make_task)
    except ConfigError as error:
        return str(error), error.rank
    return "", -1


def test_what_one_rank_refuses_ends_all_and_is_said_by_that_one() -> None:
    first, second = ranks.run(refused_on_one_rank, 2)
    assert first == ("rank 1 has refused it", 1)
    assert second == ("data.path='x' is no file on this machine", 1)
