"""Configuration of a simulated run: the training's own groups, with a truth and a cluster for model and data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import yaml
from omegaconf import MISSING, DictConfig

from adabatch.config.bounds import counted, tag, within
from adabatch.config.compose import ConfigError, compose, register
from adabatch.config.deciding import (
    build_budget,
    build_count,
    build_damping,
    build_policy,
    build_scaling,
    build_schedule,
    first_batch,
)
from adabatch.config.schema import (
    DampingConfig,
    LimitsConfig,
    NoiseConfig,
    ScalingConfig,
    ScheduleConfig,
    StopConfig,
)
from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Fixed, Policy
from adabatch.progress import Budget
from adabatch.simulate import Cluster, CurveTruth, Exponential, LossLaw, PowerLaw, Recorded, Simulation, Truth
from adabatch.simulate.curves import Law


@dataclass
class CurveConfig:
    """Base class of the truths that are known as a curve."""

    name: str = MISSING  # marks the truth
    calibration: float = within("(0, inf)", 1.0)  # critical batch over noise scale; only the noise scale is measured
    dimensions: float = within("[1, inf)", 300.0)  # tr(Sigma)^2 / tr(Sigma^2) of the noise


@dataclass
class ExponentialConfig(CurveConfig):
    """``truth=exponential``: the critical batch grows exponentially with the progress in least steps."""

    name: str = tag("exponential")  # marks the truth
    start: float = within("(0, inf)", 32.0)  # critical batch at first
    growth: float = within("(0, inf)", 100.0)  # its factor at ``over``
    over: Optional[str] = counted(1, None)  # efficient samples; null: half of stop.samples


@dataclass
class PowerLawConfig(CurveConfig):
    """``truth=power_law``: the critical batch is a power of the efficient samples."""

    name: str = tag("power_law")  # marks the truth
    scale: float = within("(0, inf)", 256.0)  # critical batch at ``at``
    at: str = counted(1, "100k")  # efficient samples
    exponent: float = within("[-8, 8]", 0.47)  # scale (x / at) ^ exponent
    least: float = within("(0, inf)", 1.0)  # least critical batch


@dataclass
class LossLawConfig(CurveConfig):
    """``truth=loss_law``: the critical batch is a power of the loss, and the loss one of the efficient samples."""

    name: str = tag("loss_law")  # marks the truth
    scale: float = within("(0, inf)", 256.0)  # critical batch at the loss ``at``
    at: float = within("(0, inf)", 3.0)  # a loss
    exponent: float = within("[-16, 16]", 4.76)  # scale (loss / at) ^ -exponent
    start: float = within("(0, inf)", 5.0)  # loss at first
    floor: float = within("[0, inf)", 0.0)  # loss that is approached
    knee: str = counted(1, "1k")  # efficient samples after which the loss falls as a power
    slope: float = within("(0, 8]", 0.15)  # of the loss above its floor


@dataclass
class RecordedConfig(CurveConfig):
    """``truth=recorded``: the noise scale that a run has recorded."""

    name: str = tag("recorded")  # marks the truth
    run: str = MISSING  # a run folder, or a ledger file


@dataclass
class QuadraticConfig:
    """``truth=quadratic``: a noisy quadratic, trained by SGD."""

    name: str = tag("quadratic")  # marks the truth
    dimensions: int = within("[1, 1000000]", 300)  # parameters
    noise: float = within("(0, inf)", 100.0)  # of one sample: the sum of all noises
    curvature_decay: float = within("[0, 8]", 1.0)  # curvatures i ^ -curvature_decay
    noise_decay: float = within("[0, 8]", 1.0)  # noises in proportion to i ^ -noise_decay
    distance: float = within("(0, inf)", 1.0)  # of every parameter from its optimum at first


@dataclass
class ClusterConfig:
    """What a step takes, in seconds, bytes, and bytes a second."""

    ranks: int = within("[1, 1048576]", 1)  # how many there are, or the fewest of an elastic cluster
    most_ranks: Optional[int] = within("[1, 1048576]", None)  # an elastic cluster grows with the batch up to these
    per_sample: Optional[float] = within("(0, inf)", None)  # forward and backward of one sample; null: no times known
    per_micro_batch: float = within("[0, inf)", 0.0)  # of a micro-batch of any size
    optimizer: float = within("[0, inf)", 0.0)  # all that is done once a step beside the all-reduce
    gradient_bytes: float = within("[0, inf)", 0.0)  # what is reduced over the ranks
    bandwidth: float = within("(0, inf)", 25e9)  # of a rank's link to other nodes
    latency: float = within("[0, inf)", 1e-5)  # of such a link
    node_ranks: int = within("[1, inf)", 8)  # ranks of a node
    node_bandwidth: float = within("(0, inf)", 200e9)  # of a rank's link within its node
    node_latency: float = within("[0, inf)", 3e-6)  # of such a link
    overlap: float = within("[0, 1]", 0.0)  # share of the last micro-batch behind which the all-reduce can hide
    spread: float = within("[0, 4]", 0.0)  # of the logarithm of a rank's computing time; all wait for the slowest


@dataclass
class SimulationConfig:
    """A whole simulated run."""

    policy: Any = MISSING
    damping: DampingConfig = field(default_factory=DampingConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    optimizer: Any = MISSING
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    truth: Any = MISSING
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tokens_per_sample: Optional[int] = within("[1, inf)", None)  # for schedules and budgets in tokens
    seed: int = within("[0, 1e9]", 0)  # of measurements, updates and stragglers
    exact: bool = False  # measure without error


TRUTHS: dict[str, type] = {
    "exponential": ExponentialConfig,
    "power_law": PowerLawConfig,
    "loss_law": LossLawConfig,
    "recorded": RecordedConfig,
    "quadratic": QuadraticConfig,
}
_NAME = "simulate"
_KINDS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration of a simulated run with command-line overrides.

    Raises:
        ConfigError: for an unknown key, option, value or type, with the valid names.
    """
    register(_NAME, {"truth": TRUTHS, "cluster": {"cluster": ClusterConfig}}, SimulationConfig)
    return compose(_NAME, overrides)


def overrides_of(file: Path) -> list[str]:
    """The settings of a YAML file as overrides: nested, or with dotted names; a group's option by its name.

    Raises:
        ConfigError: when the file is no mapping.
    """
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not readable as YAML: {error}") from None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{file} must hold settings such as 'cluster: {{ranks: 64}}', got {settings!r}")
    return list(_flat(settings, ""))


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
            yield f"{prefix}{key}={value if plain else json.dumps(value)}"


class Setting:
    """The parts of a simulated run, built from its configuration, as often as runs are wanted.

    Attributes:
        policy, limits, budget, cluster, scaling, schedule: those of the run.
        by_loss: whether runs are compared by their loss, as a quadratic's have to be; else by the progress made.

    Raises:
        ConfigError: when the parts do not fit one another.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        if bad := [name for name in ("seconds", "loss") if config.stop[name] is not None]:
            raise ConfigError(f"a simulated run stops by stop.samples or stop.tokens alone; leave out stop.{bad[0]}")
        self.cluster = Cluster(**config.cluster)
        self.limits = _limits(config)
        self.budget = build_budget(config)
        self.policy: Policy = build_policy(config, self.budget)
        if "price" in self.policy.needs and (self.cluster.per_sample is None or self.cluster.most_ranks is not None):
            raise ConfigError(
                f"policy={self.policy.name} goes by step times on a fixed number of ranks: set cluster.per_sample "
                f"(seconds of a sample on a rank) and leave out cluster.most_ranks; on elastic ranks there is "
                f"policy=step_price"
            )
        self.schedule = build_schedule(config, self.budget)
        self.reference_batch = config.scaling.reference_batch or first_batch(
            self.policy, self.limits, config.limits.start_batch
        )
        self.scaling = build_scaling(config, _KINDS[config.optimizer.name], self.reference_batch)
        self.by_loss: bool = config.truth.name == "quadratic"
        if self.by_loss and config.optimizer.name != "sgd":
            raise ConfigError(f"truth=quadratic is trained by optimizer=sgd, not by {config.optimizer.name}")

    @property
    def samples(self) -> int:
        """Samples of the run."""
        if self.budget.samples is not None:
            return self.budget.samples
        if self.config.tokens_per_sample is None:
            raise ConfigError("a budget in tokens needs tokens_per_sample; or set stop.samples")
        assert self.budget.tokens is not None
        return math.ceil(self.budget.tokens / self.config.tokens_per_sample)

    def start(self, policy: Fixed | None = None, lr_factor: float = 1.0) -> Simulation:
        """A run at its beginning: of the configured policy, or at a fixed batch, which measures nothing.

        The learning rate, which a quadratic alone depends on, is the configured one times ``lr_factor``.
        """
        config = self.config
        controller = Controller(
            policy or self.policy,
            limits=self.limits,
            start_batch=config.limits.start_batch,
            noise=None if policy or not config.noise.enabled else self._noise(),
            scaling=self.scaling,
            schedule=self.schedule,
            damping=build_damping(config, self.reference_batch),
            budget=Budget(self.samples),
            tokens_per_sample=config.tokens_per_sample,
            decide_every=config.noise.decide_every,
            measure_every=config.noise.measure_every,
        )
        return Simulation(controller, self._truth(lr_factor), self.cluster, config.seed, config.exact)

    def describe(self) -> str:
        """What is simulated or planned, in a few words."""
        config, cluster = self.config, self.cluster
        policy = f"policy {self.policy.name}"
        if self.policy.needs:
            policy += f", truth {config.truth.name}"
        ranks = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks:,} ranks"
        if cluster.most_ranks is not None:
            ranks = f"{cluster.ranks:,} to {cluster.most_ranks:,} ranks"
        micro_batch = f"micro-batches of at most {self.limits.micro_batch}"
        return (
            f"{policy}; {self.samples:,} samples on {ranks}, {micro_batch}; "
            f"scaling {self.scaling.rule} from reference batch {self.reference_batch}"
        )

    def _noise(self) -> NoiseEstimator:
        noise = self.config.noise
        return NoiseEstimator(relative_error=noise.relative_error, confidence=noise.confidence, horizon=self.samples)

    def _truth(self, lr_factor: float) -> Truth:
        truth = self.config.truth
        if truth.name == "quadratic":
            return self._quadratic(lr_factor)
        laws: dict[str, Callable[[], Law]] = {
            "exponential": lambda: Exponential(truth.start, truth.growth, _count(truth, "over") or self.samples / 2),
            "power_law": lambda: PowerLaw(truth.scale, _count(truth, "at") or 1, truth.exponent, truth.least),
            "loss_law": lambda: LossLaw(
                truth.scale, truth.at, truth.exponent, truth.start, truth.floor, _count(truth, "knee") or 1, truth.slope
            ),
            "recorded": lambda: Recorded.load(truth.run, truth.calibration),
        }
        return CurveTruth(laws[truth.name](), truth.calibration, truth.dimensions)

    def _quadratic(self, lr_factor: float) -> Truth:
        from adabatch.simulate.quadratic import Quadratic  # with numpy, which nothing else here needs

        truth, optimizer = self.config.truth, self.config.optimizer
        return Quadratic.power_law(
            dimensions=truth.dimensions,
            noise=truth.noise,
            curvature_decay=truth.curvature_decay,
            noise_decay=truth.noise_decay,
            distance=truth.distance,
            lr=lr_factor * optimizer.lr,
            momentum=optimizer.momentum,
        )


def scheduled(items: Sequence[str]) -> list[str]:
    """What ``adabatch plan`` was given as overrides: a schedule comes first, as stages, a ledger or a run folder.

    Raises:
        ConfigError: when the length of the run is known neither from the overrides nor from a ledger.
    """
    schedule, overrides = ("", list(items)) if not items or "=" in items[0] else (items[0], list(items[1:]))
    if not schedule:
        chosen = [one for one in overrides if one.startswith("policy.ledger=")]
        schedule = chosen[-1].partition("=")[2].strip("\"'") if chosen else ""
    elif Path(schedule).exists():
        overrides += ["policy=replay", f"policy.ledger={json.dumps(schedule)}"]
    else:
        overrides += ["policy=stages", f"policy.stages={json.dumps(schedule)}"]
    if not any(one.startswith(("stop.samples=", "stop.tokens=")) for one in overrides):
        if not schedule or not Path(schedule).exists():
            raise ConfigError("say how long the run is: stop.samples=..., such as stop.samples=1M")
        overrides.append(f"stop.samples={Ledger.load(schedule).samples}")
    elif not any(one.startswith("stop.samples=") for one in overrides):
        overrides.append("stop.samples=null")
    return overrides


def _limits(config: DictConfig) -> BatchLimits:
    limits = config.limits
    rounding = "micro_batch" if limits.rounding == "auto" else limits.rounding
    return BatchLimits(config.cluster.ranks, limits.micro_batch, limits.min_batch, limits.max_batch, rounding)


def _count(truth: DictConfig, name: str) -> int | None:
    return build_count(truth[name], f"truth.{name}")
