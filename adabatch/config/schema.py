"""The typed configuration: every field with its default and one sentence.

Values live in the YAML files of ``hydra_configs``; these classes give them types and bounds, so that a typo, a wrong
type or an illegal value is refused when the configuration is composed. Nothing here imports torch or a part of
adabatch that does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from adabatch.config.bounds import (
    counted,
    counted_or_share,
    each_matching,
    each_within,
    matching,
    one_of,
    some_of,
    tag,
    within,
)
from adabatch.config.schema_policies import (
    CabsConfig,
    CosineTestConfig,
    FixedConfig,
    InnerProductTestConfig,
    LateSwitchConfig,
    LossLawConfig,
    NormTestConfig,
    ObserveConfig,
    RampConfig,
    ReplayConfig,
    SeesawConfig,
    StagesConfig,
    StepPriceConfig,
    TargetEfficiencyConfig,
    WallClockConfig,
)
from adabatch.plan import ROUNDINGS
from adabatch.runlog import LOGGERS
from adabatch.scaling import RULES
from adabatch.schedules import SHAPES


# The gradient's lengths by name, and the steps whose alignments are measured instead; a test compares them with those
# that ``gradients`` knows.
ALIGNED = ("sign", "muon")
GEOMETRIES = ("auto", "euclidean", "adam", "adam_sqrt", "norm_layers", *ALIGNED)
CALIBRATED = ("euclidean", "adam", "adam_sqrt", *ALIGNED)
VIEWS = ("euclidean", "adam", "adam_sqrt", "norm_layers", "layers", "groups", *ALIGNED)


@dataclass
class DampingConfig:
    """How fast a run follows its policy."""

    dwell: Optional[int] = within("[0, inf)", None)  # samples between changes; null: 1/(1-beta2) reference batches
    warmup_guard: bool = True  # no growth while the learning rate warms up
    interval_gate: bool = True  # a change needs the support of the estimate's interval
    growth: float = within("[1.5, inf)", 2.0)  # largest factor of one decision
    dead_band: float = within("[1, inf)", 1.2)  # changes by less than this factor are not made
    monotone: bool = False  # never shrink
    rollback: bool = False  # undo a change after which the training loss regresses beyond its interval


@dataclass
class NoiseConfig:
    """How the gradient noise scale is measured."""

    enabled: bool = True  # measure at all
    tap: str = one_of("auto", "hooks", "ddp", "fsdp")  # whose gradients are compared; auto: by parallelism and ranks
    geometry: str = one_of(*GEOMETRIES)  # the gradient's length that decisions go by; auto: by optimizer
    views: list[str] = some_of(VIEWS, [])  # lengths in which the noise scale is measured beside that, for the record
    relative_error: float = within("(0, 1)", 0.25)  # relative standard error that the memory aims for
    confidence: float = within("(0, 1)", 0.95)  # of the interval
    finite_data: bool = True  # correct for sampling a finite data set without replacement
    require_mean: bool = True  # refuse a loss that is no mean over independent samples, by a look at one micro-batch
    measure_every: int = within("[1, inf)", 1)  # steps between two measured ones
    align_every: int = within("[1, inf)", 8)  # sign and muon: steps between two whose alignments are measured
    decide_every: int = within("[1, inf)", 16)  # steps between two decisions


@dataclass
class ScalingConfig:
    """What moves with the batch."""

    rule: str = one_of("auto", *RULES)  # how the learning rate moves; auto: by optimizer
    reference_batch: Optional[int] = within("[1, inf)", None)  # where learning rate, beta2 and decay hold; null: start
    exponent: float = within("(0, 1]", 0.5)  # power of the gain for gain_power
    beta1: bool = False  # Adam's momentum keeps its memory in samples; by default it stays
    beta2: bool = True  # Adam's second moment keeps its memory in samples
    eps: bool = True  # Adam's epsilon follows the gradient's noise
    weight_decay: bool = True  # constant decay per sample
    clip: bool = True  # the threshold follows the expected gradient norm


@dataclass
class LimitsConfig:
    """Which batches may be used, and how they are split."""

    start_batch: Optional[int] = within("[1, inf)", 16)  # global batch of the first step, unless the policy names it
    micro_batch: int = within("[1, inf)", 8)  # most samples of one forward/backward on one rank
    min_batch: int = within("[1, inf)", 1)  # lower bound of the global batch
    max_batch: int = within("[1, inf)", 4096)  # upper bound of the global batch
    rounding: str = one_of("auto", *ROUNDINGS)  # multiples of world x micro_batch, of world, or of 1; auto: by model


@dataclass
class OptimizerConfig:
    """Base class of the optimizers' options."""

    name: str = MISSING  # marks the optimizer


@dataclass
class AdamWConfig(OptimizerConfig):
    """``optimizer=adamw``."""

    name: str = tag("adamw")  # marks the optimizer
    lr: float = within("(0, inf)", 1e-3)  # at the reference batch
    beta1: float = within("[0, 1)", 0.9)  # at the reference batch
    beta2: float = within("[0, 1)", 0.99)  # at the reference batch
    eps: float = within("(0, inf)", 1e-8)  # at the reference batch
    weight_decay: float = within("[0, inf)", 0.1)  # at the reference batch; parameters of two or more dimensions only


@dataclass
class SgdConfig(OptimizerConfig):
    """``optimizer=sgd``."""

    name: str = tag("sgd")  # marks the optimizer
    lr: float = within("(0, inf)", 0.01)  # at the reference batch
    momentum: float = within("[0, 1)", 0.9)  # stays the same at every batch
    nesterov: bool = False  # look ahead along the momentum
    weight_decay: float = within("[0, inf)", 0.0)  # added to the gradient, as torch.optim.SGD does


@dataclass
class MuonConfig(OptimizerConfig):
    """``optimizer=muon``: Muon for the matrices inside the network, AdamW for all else."""

    name: str = tag("muon")  # marks the optimizer
    lr: float = within("(0, inf)", 1e-3)  # of Muon, at the reference batch
    momentum: float = within("[0, 1)", 0.95)  # of Muon, the same at every batch
    nesterov: bool = True  # look ahead along the momentum
    weight_decay: float = within("[0, inf)", 0.1)  # of Muon, at the reference batch
    adjust: str = one_of("match_rms_adamw", "original")  # steps as long as AdamW's at the same rate, or by shape alone
    ns_steps: int = within("[1, 99]", 5)  # Newton-Schulz iterations that orthogonalise a step
    adamw: AdamWConfig = field(default_factory=AdamWConfig)


@dataclass
class ScheduleConfig:
    """The learning-rate schedule, a function of samples or tokens."""

    shape: str = one_of("cosine", *SHAPES)  # how the rate goes from the end of warm-up to the horizon
    warmup: str = counted_or_share("0")  # length of the linear warm-up: samples (tokens where the budget is), or 3%
    final: float = within("[0, 1]", 0.1)  # multiplier at the horizon
    decay_share: float = within("(0, 1]", 0.2)  # share of the horizon that wsd decays over
    horizon: Optional[str] = counted(1, None)  # where the decay ends; null: the budget


@dataclass
class ParallelismConfig:
    """``parallelism=ddp``: every rank holds the model; a single rank runs the plain module."""

    name: str = tag("ddp")  # marks the parallelism
    backend: Optional[str] = one_of(None, "gloo", "nccl")  # null: by device
    timeout_seconds: float = within("(0, 1e9)", 600.0)  # a collective that takes longer ends the run on all ranks


@dataclass
class FsdpConfig(ParallelismConfig):
    """``parallelism=fsdp``: FSDP2 shards the model over the ranks; a single rank runs the plain module."""

    name: str = tag("fsdp")  # marks the parallelism
    replicas: int = within("[1, inf)", 1)  # copies of the sharded model (HSDP); a divisor of the ranks
    sync: str = one_of("each", "last")  # micro-batches after which gradients travel: each needs the least memory


@dataclass
class LoggerConfig:
    """What a run writes while it runs."""

    names: list[str] = some_of(tuple(LOGGERS), ["jsonl", "console", "tensorboard"])  # where records go
    every: int = within("[1, inf)", 10)  # steps between two records


@dataclass
class StopConfig:
    """When the run ends: at the first bound reached; null sets no bound."""

    samples: Optional[str] = counted(1, None)  # such as 60k; met exactly
    tokens: Optional[str] = counted(1, None)  # such as 2M
    seconds: Optional[float] = within("(0, inf)", None)  # of training, evaluation and saving left out
    loss: Optional[float] = within("(-inf, inf)", None)  # held-out loss at or below


@dataclass
class EvaluationConfig:
    """Held-out evaluation."""

    every: str = counted(1, "4k")  # samples between two evaluations
    samples: int = within("[1, inf)", 512)  # held-out samples, always the same ones


@dataclass
class CheckpointConfig:
    """Saving."""

    every: Optional[str] = counted(1, "20k")  # samples between two checkpoints; null: only at the end
    keep_last: int = within("[1, inf)", 3)  # older ones are deleted


@dataclass
class CurvatureConfig:
    """The Hessian-weighted noise scale of a checkpoint, for ``job=curvature``; a run itself is not touched by it."""

    step: Optional[int] = within("[0, inf)", None)  # of the checkpoint; null: the latest
    samples: str = counted(1, "2k")  # samples to take from where the checkpoint stands, each at most once
    per_group: int = within("[1, inf)", 4)  # micro-batches of each of a set's two gradients
    per_hessian: int = within("[1, inf)", 1)  # micro-batches of a set's Hessian; each costs about 8 backward passes
    confidence: float = within("(0, 1)", 0.95)  # of the interval
    custom_functions: bool = False  # trust that the model's own autograd functions have second derivatives
    json: bool = False  # print JSON data


@dataclass
class CalibrateConfig:
    """The measured critical batch: of checkpoints, for ``job=calibrate``; inside a run, where ``times`` is above 0."""

    steps: list[str] = each_matching(  # of the checkpoints: numbers, early, middle, late (of those that are there)
        r"\d+|early|middle|late", "steps of checkpoints, or early, middle, late", ["late"]
    )
    multiples: list[float] = each_within("(0, inf)", [0.25, 1.0, 4.0, 16.0])  # of the present batch, to compare
    batches: list[int] = each_within("[1, inf)", [])  # global batches to compare in their place
    samples: int = within("[64, inf)", 8192)  # of each branch
    pairs: int = within("[2, 64]", 4)  # sets of branches over the same samples; intervals are over these
    halvings: int = within("[1, 12]", 5)  # how often the samples of the smallest batch are halved
    cooldown: float = within("(0, 1]", 0.3)  # last share of a branch over which its learning rate falls to 0
    widest: float = within("[1, 16]", 4.0)  # octaves by which a learning rate may differ from where its search begins
    held_out: int = within("[1, inf)", 1024)  # held-out samples at the end of each branch, always the same ones
    noise_samples: int = within("[64, inf)", 8192)  # over which the noise scales are measured
    geometries: list[str] = some_of(CALIBRATED, list(CALIBRATED))  # in which they are, where the optimizer has them
    confidence: float = within("(0, 1)", 0.95)  # of all intervals
    json: bool = False  # print JSON data
    times: int = within("[0, inf)", 0)  # calibrations inside the run, in the middle of so many equal parts of it
    share: float = within("(0, 1]", 0.05)  # of the run's samples, that their branches may read, about


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
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    seed: int = within("[0, 1e18]", 0)  # of the parameters, and of dropout
    order_seed: int = within("[0, 1e18]", 0)  # of the sample order
    precision: str = one_of("fp32", "bf16", "fp16")  # of forward and backward; parameters stay in fp32
    compile: bool = False  # torch.compile the model
    clip_norm: Optional[float] = within("(0, inf)", 1.0)  # gradient norm allowed at the reference batch; null: any
    max_skipped: int = within("[1, inf)", 5)  # windows in a row with a non-finite gradient that end the run
    device: str = matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:<index>", "auto")  # of each rank
    workers: int = within("[0, 1024]", 0)  # data loader processes of each rank
    threads: Optional[int] = within("[1, 4096]", 1)  # CPU threads of each rank; null: torch's own choice
    name: str = matching(r"[\w.-]+", "letters, digits, '_', '.' and '-'", "run")  # begins the name of the run folder
    runs: str = "runs"  # where run folders are made
    run_folder: Optional[str] = None  # this folder instead of a new one under ``runs``
    resume: Optional[str] = None  # a run folder to go on from
    job: str = one_of("train", "validate", "curvature", "calibrate")  # validate: build all; others: at a checkpoint


GROUPS: dict[str, dict[str, type]] = {
    "policy": {
        "target_efficiency": TargetEfficiencyConfig,
        "wall_clock": WallClockConfig,
        "step_price": StepPriceConfig,
        "norm_test": NormTestConfig,
        "inner_product_test": InnerProductTestConfig,
        "cosine_test": CosineTestConfig,
        "cabs": CabsConfig,
        "loss_law": LossLawConfig,
        "ramp": RampConfig,
        "seesaw": SeesawConfig,
        "late_switch": LateSwitchConfig,
        "fixed": FixedConfig,
        "observe": ObserveConfig,
        "stages": StagesConfig,
        "replay": ReplayConfig,
    },
    "damping": {"damping": DampingConfig},
    "noise": {"noise": NoiseConfig},
    "scaling": {"scaling": ScalingConfig},
    "limits": {"limits": LimitsConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": SgdConfig, "muon": MuonConfig},
    "lr_schedule": {"lr_schedule": ScheduleConfig},
    "parallelism": {"ddp": ParallelismConfig, "fsdp": FsdpConfig},
    "logger": {"logger": LoggerConfig},
    "calibrate": {"calibrate": CalibrateConfig},
}
