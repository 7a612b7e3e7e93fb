"""The typed configuration: every field with its default and one sentence.

Values live in the YAML files of ``hydra_configs``; these classes give them types, so that a typo or a wrong type is
refused when the configuration is composed. Nothing here imports torch or a part of adabatch that does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class TargetEfficiencyConfig:
    """``policy=target_efficiency``: the batch follows the critical batch."""

    name: str = "target_efficiency"
    target_efficiency: float = 0.5  # share of the samples that a tiny batch would need; 0.5 is the critical batch
    calibration: float = 1.0  # critical batch over measured noise scale; 1 is uncalibrated
    repay: float = 2.0  # largest factor by which the account of past efficiency moves the wanted batch


@dataclass
class FixedConfig:
    """``policy=fixed``: one batch for the whole run."""

    name: str = "fixed"
    global_batch: int = MISSING  # samples of each optimizer step


@dataclass
class ObserveConfig:
    """``policy=observe``: measure and report, never move the batch."""

    name: str = "observe"


@dataclass
class StagesConfig:
    """``policy=stages``: a schedule written down beforehand."""

    name: str = "stages"
    stages: str = MISSING  # pairs of threshold:batch, such as "0:16, 1k:32, 4k:64"
    unit: str = "samples"  # what the thresholds count: samples or tokens


@dataclass
class ReplayConfig:
    """``policy=replay``: a recorded or edited ledger, batch by batch."""

    name: str = "replay"
    ledger: str = MISSING  # a ledger file, or the folder of a run


@dataclass
class DampingConfig:
    """How fast a run follows its policy."""

    dwell: Optional[int] = None  # samples between changes; null: 1/(1-beta2) reference batches
    warmup_guard: bool = True  # no growth while the learning rate warms up
    interval_gate: bool = True  # a change needs the support of the estimate's interval
    growth: float = 2.0  # largest factor of one decision
    dead_band: float = 1.2  # changes by less than this factor are not made
    monotone: bool = False  # never shrink


@dataclass
class NoiseConfig:
    """How the gradient noise scale is measured."""

    enabled: bool = True  # measure at all
    tap: str = "auto"  # where group gradients are read: auto, hooks (micro-batches) or ddp (ranks)
    relative_error: float = 0.25  # relative standard error that the memory aims for
    confidence: float = 0.95  # of the interval
    finite_data: bool = True  # correct for sampling a finite data set without replacement
    decide_every: int = 16  # steps between two decisions


@dataclass
class ScalingConfig:
    """What moves with the batch."""

    rule: str = "auto"  # auto (by optimizer), none, linear, sqrt, adascale or gain_power
    reference_batch: Optional[int] = None  # batch at which learning rate, betas and weight decay hold; null: start
    exponent: float = 0.5  # power of the gain for gain_power
    betas: bool = True  # Adam's betas keep their memory in samples
    eps: bool = True  # Adam's epsilon follows the gradient's noise
    weight_decay: bool = True  # constant decay per sample
    clip: bool = True  # the threshold follows the expected gradient norm


@dataclass
class LimitsConfig:
    """Which batches may be used, and how they are split."""

    start_batch: Optional[int] = 16  # global batch of the first step, for policies that do not name it
    micro_batch: int = 8  # most samples of one forward/backward on one rank
    min_batch: int = 1  # lower bound of the global batch
    max_batch: int = 4096  # upper bound of the global batch
    rounding: str = "micro_batch"  # adaptive batches are multiples of world x micro_batch, of world, or none


@dataclass
class OptimizerConfig:
    """Base class of the optimizers' options."""

    name: str = MISSING


@dataclass
class AdamWConfig(OptimizerConfig):
    """``optimizer=adamw``."""

    name: str = "adamw"
    lr: float = 1e-3  # at the reference batch
    beta1: float = 0.9  # at the reference batch
    beta2: float = 0.99  # at the reference batch
    eps: float = 1e-8  # at the reference batch
    weight_decay: float = 0.1  # at the reference batch; parameters of two or more dimensions only


@dataclass
class SgdConfig(OptimizerConfig):
    """``optimizer=sgd``."""

    name: str = "sgd"
    lr: float = 0.01  # at the reference batch
    momentum: float = 0.9  # stays the same at every batch
    nesterov: bool = False
    weight_decay: float = 0.0  # added to the gradient, as torch.optim.SGD does


@dataclass
class ScheduleConfig:
    """The learning-rate schedule, a function of samples or tokens."""

    shape: str = "cosine"  # constant, cosine, linear or wsd
    warmup: str = "0"  # length of the linear warm-up, in the unit of the budget
    final: float = 0.1  # multiplier at the horizon
    decay_share: float = 0.2  # share of the horizon that wsd decays over
    horizon: Optional[str] = None  # where the decay ends; null: the budget


@dataclass
class ParallelismConfig:
    """How the model is spread over the ranks."""

    name: str = "ddp"  # ddp (a single rank runs the plain module)
    backend: Optional[str] = None  # gloo or nccl; null: by device
    timeout_seconds: float = 600.0  # a collective that takes longer ends the run on all ranks


@dataclass
class LoggerConfig:
    """What a run writes while it runs."""

    names: list[str] = field(default_factory=lambda: ["jsonl", "console", "tensorboard"])
    every: int = 10  # steps between two records


@dataclass
class StopConfig:
    """When the run ends: at the first bound reached; null sets no bound."""

    samples: Optional[str] = None  # such as 60k; met exactly
    tokens: Optional[str] = None  # such as 2M
    seconds: Optional[float] = None  # of training, evaluation and saving left out
    loss: Optional[float] = None  # held-out loss at or below


@dataclass
class EvaluationConfig:
    """Held-out evaluation."""

    every: str = "4k"  # samples between two evaluations
    samples: int = 512  # held-out samples, always the same ones


@dataclass
class CheckpointConfig:
    """Saving."""

    every: Optional[str] = "20k"  # samples between two checkpoints; null: only at the end
    keep_last: int = 3  # older ones are deleted


@dataclass
class RunConfig:
    """A whole run; recipes add their ``model`` and ``data``."""

    policy: Any = MISSING
    damping: DampingConfig = field(default_factory=DampingConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = 0  # of the parameters, and of dropout
    order_seed: int = 0  # of the sample order
    precision: str = "fp32"  # fp32, bf16 or fp16
    compile: bool = False  # torch.compile the model
    clip_norm: Optional[float] = 1.0  # gradient-norm threshold at the reference batch; null: no clipping
    max_skipped: int = 5  # windows in a row with a non-finite gradient that end the run
    device: str = "auto"  # auto, cpu or cuda
    workers: int = 0  # data loader processes of each rank
    threads: Optional[int] = 1  # CPU threads of each rank; null: torch's own choice
    name: str = "run"  # begins the name of the run folder
    runs: str = "runs"  # where run folders are made
    run_folder: Optional[str] = None  # this folder instead of a new one under ``runs``
    resume: Optional[str] = None  # a run folder to go on from
    job: str = "train"  # train, or validate: build everything and stop before the first step


GROUPS: dict[str, dict[str, type]] = {
    "policy": {
        "target_efficiency": TargetEfficiencyConfig,
        "fixed": FixedConfig,
        "observe": ObserveConfig,
        "stages": StagesConfig,
        "replay": ReplayConfig,
    },
    "damping": {"damping": DampingConfig},
    "noise": {"noise": NoiseConfig},
    "scaling": {"scaling": ScalingConfig},
    "limits": {"limits": LimitsConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": SgdConfig},
    "lr_schedule": {"lr_schedule": ScheduleConfig},
    "parallelism": {"parallelism": ParallelismConfig},
    "logger": {"logger": LoggerConfig},
}
