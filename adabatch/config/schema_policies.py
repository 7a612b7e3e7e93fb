"""The typed configuration of the policies, which ``schema`` puts together with everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from omegaconf import MISSING

from adabatch.config.bounds import counted, counted_or_share, one_of, tag, within
from adabatch.policies.efficiency import ALLOCATIONS


@dataclass
class TargetEfficiencyConfig:
    """``policy=target_efficiency``: the batch follows the critical batch."""

    name: str = tag("target_efficiency")  # marks the policy
    target_efficiency: float = within("(0, 1)", 0.5)  # share of the samples that a tiny batch needs; 0.5: B_crit
    calibration: float = within("(0, inf)", 1.0)  # critical batch over measured noise scale; 1 is uncalibrated
    repay: float = within("[1, inf)", 2.0)  # largest factor by which past efficiency moves the wanted batch
    allocation: str = one_of(*ALLOCATIONS)  # hold the efficiency at every step, or spend it where it saves most steps
    cap: float = within("(0, inf)", 2.0)  # sqrt: largest batch over the critical one
    forecast: Optional[str] = None  # sqrt: ledger or run folder whose noise scale to expect; null: by its own growth


@dataclass
class WallClockConfig:
    """``policy=wall_clock``: the fastest batch on these ranks, by the run's own step times."""

    name: str = tag("wall_clock")  # marks the policy
    calibration: float = within("(0, inf)", 1.0)  # critical batch over measured noise scale; 1 is uncalibrated


@dataclass
class StepPriceConfig:
    """``policy=step_price``: the best batch where a step is worth so many samples."""

    name: str = tag("step_price")  # marks the policy
    price: float = within("(0, inf)", MISSING)  # samples that one step less may cost
    calibration: float = within("(0, inf)", 1.0)  # critical batch over measured noise scale; 1 is uncalibrated


@dataclass
class FixedConfig:
    """``policy=fixed``: one batch for the whole run."""

    name: str = tag("fixed")  # marks the policy
    global_batch: int = within("[1, inf)", MISSING)  # samples of each optimizer step


@dataclass
class ObserveConfig:
    """``policy=observe``: measure and report, never move the batch."""

    name: str = tag("observe")  # marks the policy


@dataclass
class StagesConfig:
    """``policy=stages``: a schedule written down beforehand."""

    name: str = tag("stages")  # marks the policy
    stages: str = MISSING  # pairs of threshold:batch, such as 0:16 1k:32 4k:64
    unit: str = one_of("samples", "tokens")  # what the thresholds count


@dataclass
class NormTestConfig:
    """``policy=norm_test``: the batch at which noise is at most a share of the gradient."""

    name: str = tag("norm_test")  # marks the policy
    tolerance: float = within("(0, 1)", MISSING)  # noise over gradient, eta; its square is the data efficiency


@dataclass
class InnerProductTestConfig:
    """``policy=inner_product_test``: the batch at which noise along the gradient is surely at most a share of it."""

    name: str = tag("inner_product_test")  # marks the policy
    tolerance: float = within("(0, 1)", MISSING)  # noise along the gradient over the gradient, theta


@dataclass
class CosineTestConfig:
    """``policy=cosine_test``: the batch whose two halves have gradients of a given cosine."""

    name: str = tag("cosine_test")  # marks the policy
    similarity: float = within("(0, 1)", MISSING)  # cosine c aimed for; the data efficiency is (1-c)/(1+c)


@dataclass
class CabsConfig:
    """``policy=cabs``: the batch that goes with the learning rate, by noise over loss; needs scaling=none."""

    name: str = tag("cabs")  # marks the policy


@dataclass
class LossLawConfig:
    """``policy=loss_law``: a critical batch that is a power of the training loss."""

    name: str = tag("loss_law")  # marks the policy
    reference_batch: int = within("[1, inf)", MISSING)  # samples wanted at the reference loss
    reference_loss: float = within("(0, inf)", MISSING)  # in the unit of the training loss
    exponent: float = within("(0, inf)", 4.76)  # (reference_loss / loss) ^ exponent


@dataclass
class RampConfig:
    """``policy=ramp``: from one batch to another in equal increments, as Megatron-LM's batch ramp."""

    name: str = tag("ramp")  # marks the policy
    first_batch: int = within("[1, inf)", MISSING)  # samples of the first step
    final_batch: int = within("[1, inf)", MISSING)  # samples of a step from the end of the ramp on
    increment: int = within("[1, inf)", MISSING)  # samples by which the batch grows each time
    length: str = counted(1, MISSING)  # of the whole ramp, such as 50M
    unit: str = one_of("samples", "tokens")  # what the length counts


@dataclass
class SeesawConfig:
    """``policy=seesaw``: the batch rises where the learning-rate schedule falls; for scaling=sqrt."""

    name: str = tag("seesaw")  # marks the policy
    first_batch: int = within("[1, inf)", MISSING)  # samples of a step at the peak of the learning rate
    cap: float = within("(1, inf)", 16.0)  # largest batch over the first one; the critical batch is the place for it
    factor: Optional[float] = within("(1, inf)", None)  # the batch moves by powers of it; null: as the ranks can


@dataclass
class LateSwitchConfig:
    """``policy=late_switch``: one batch for most of the run, another for the rest."""

    name: str = tag("late_switch")  # marks the policy
    first_batch: int = within("[1, inf)", MISSING)  # samples of a step up to the switch
    final_batch: int = within("[1, inf)", MISSING)  # samples of a step from there on
    at: str = counted_or_share("75%")  # where that is: a count, or a share of stop.samples (stop.tokens)
    unit: str = one_of("samples", "tokens")  # what is counted


@dataclass
class ReplayConfig:
    """``policy=replay``: a recorded or edited ledger, batch by batch."""

    name: str = tag("replay")  # marks the policy
    ledger: str = MISSING  # a ledger file, or the folder of a run
