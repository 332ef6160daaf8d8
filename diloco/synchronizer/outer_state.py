"""The outer optimizer that the settings ask for, with the state that a generation keeps of it."""

from __future__ import annotations

import logging

from torch import Tensor

from diloco.delayed_nesterov import Delay, DelayedNesterov
from diloco.outer import OuterOptimizer
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.generation import Generation, Outcome

logger = logging.getLogger(__name__)


def open_outer(
    settings: SynchronizerSettings, generation: Generation, parameters: Tensor, momentum: Tensor
) -> OuterOptimizer:
    """Take over exact parameters and momentum, and what a delayed momentum has yet to take if the settings delay it.

    In a run that has delayed nothing so far the delay begins here. One that is shorter than before, or is no more,
    leaves out of the momentum what was added up for it: the parameters have taken those steps all the same.
    """
    lr, mu = settings.outer_lr, settings.outer_momentum
    wanted = delay_of(settings)
    if wanted is None:
        return OuterOptimizer(parameters, momentum, lr=lr, mu=mu)
    kept = generation.outcome.delay
    if kept is None or kept.position >= wanted.num_steps:
        return DelayedNesterov(parameters, momentum, lr=lr, mu=mu, delay=wanted)
    delay = Delay(num_steps=wanted.num_steps, activation=wanted.activation, position=kept.position)
    buffer = generation.buffer()
    # The file goes when newer generations come.
    buffer = None if buffer is None else buffer.clone()
    return DelayedNesterov(parameters, momentum, lr=lr, mu=mu, delay=delay, buffer=buffer)


def delay_of(settings: SynchronizerSettings) -> Delay | None:
    """The delay that the settings ask for, at its beginning; None where momentum is taken at every step."""
    if settings.outer_optimizer == "nesterov":
        return None
    return Delay(num_steps=settings.outer_delay, activation=settings.momentum_activation)


def warn_of_changes(outcome: Outcome, settings: SynchronizerSettings) -> None:
    """Say which settings are not those that the run went by so far."""
    delay, wanted = outcome.delay, delay_of(settings)
    told = {
        "outer_lr": (outcome.outer_lr, settings.outer_lr),
        "outer_momentum": (outcome.outer_momentum, settings.outer_momentum),
    }
    if outcome.last:  # before its first step a run has gone by none
        told["outer_delay"] = (delay.num_steps if delay else 1, wanted.num_steps if wanted else 1)
    for name, (before, now) in told.items():
        if before != now:
            logger.warning("setting changed within a run, new value from now on %s=%r before=%r", name, now, before)
