"""The state of optimizers when the batch changes; by ``ratio``, that of a scale to the one that the state belongs to.

Adam:
- step counter t -> t / ratio, so that beta2 ** t, the bias correction, is unchanged where beta2 moves; the first moment
  is multiplied by the change of its own correction 1 - beta1 ** t, so that m_hat is unchanged, too;
- second moment v_hat -> s + (v_hat - s) / ratio: its noise part changes at once. Otherwise the steps would be too long
  for 1/(1 - beta2) steps after the batch fell, and too short after it grew. AMSGrad's maximum, which never forgets,
  likewise. For v_hat = G^2 + noise and m_hat^2 = G^2 + n noise, the signal is s = (m_hat^2 - n v_hat) / (1 - n), between
  0 and v_hat, where n = (1 - beta1) / (1 + beta1) (1 - beta1^2t) / (1 - beta1^t)^2 is the sum of squared weights of m_hat.

SGD: the momentum buffer is divided by the ratio of learning rates, so that the way that past gradients still have to
move, lr x momentum / (1 - momentum) x buffer, is what it was when they came: the running sum holds the noise of the old
batch, and the learning rate of a large batch would blow it up. (Without noise, the first 1/(1 - momentum) steps after
growth then gain speed anew.) Both were compared with leaving things alone in docs/results/coscaling.md.

A gradient's sign does not matter here (``maximize``), and counters and moments stay on their devices: nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def stepped(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of the group's parameters that count their steps, as Adam's do."""
    return [state for parameter in group["params"] if "step" in (state := optimizer.state.get(parameter, {}))]


def carry_buffers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ratios: Mapping[str, float]) -> None:
    """Make SGD's momentum buffers fit the new learning rate."""
    ratio = ratios.get("momentum_buffer", 1.0)
    if ratio != 1:
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                buffer.div_(ratio)


def carry_moments(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ratios: Mapping[str, float], new_beta1: float
) -> None:
    """Make Adam's state fit the new batch and betas; called while the group still holds the old betas."""
    noise, counter = ratios.get("second_moment", 1.0), ratios.get("step_counter", 1.0)
    if noise == counter == 1:
        return
    betas = [float(beta) for beta in group["betas"]]
    for state in stepped(optimizer, group):
        if noise != 1:
            _divide_noise(state, noise, *betas)
        if counter != 1:
            _recount(state, counter, betas[0], new_beta1)


def _recount(state: Mapping[str, Any], ratio: float, beta1: float, new_beta1: float) -> None:
    """Divide the step counter by ``ratio``, and make up for it in the first moment: m_hat stays as it is."""
    correction = 1 - beta1 ** state["step"].double()
    state["step"].div_(ratio)
    factor = (1 - new_beta1 ** state["step"].double()) / correction
    # Before the first step there is no moment to correct.
    state["exp_avg"].mul_(torch.where(correction > 0, factor, 1.0).to(state["exp_avg"].device))


def _divide_noise(state: Mapping[str, Any], ratio: float, beta1: float, beta2: float) -> None:
    """Divide the noise part of the second moment by ``ratio``; all that the first moment does not show to be signal."""
    steps = state["step"].to(state["exp_avg"].device, torch.float64)
    one, two = 1 - beta1**steps, 1 - beta2**steps
    share = (1 - beta1) / (1 + beta1) * (1 - beta1 ** (2 * steps)) / one.square()
    # After one step, or without beta1, the mean is as noisy as the gradients. Before the first one all is 0.
    shown = torch.where((steps > 0) & (share < 1 - 1e-6), 1 / (1 - share), 0.0)
    scale = torch.where(steps > 0, two / one.square(), 0.0)
    share = torch.where(steps > 0, share, 0.0)
    v = _real(state["exp_avg_sq"])
    signal = (shown * (scale * _real(state["exp_avg"]).square() - share * v)).clamp_(min=0).minimum(v)
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        if name in state:
            moment = _real(state[name])
            moment.copy_(signal + (moment - signal) / ratio)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
