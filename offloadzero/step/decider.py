"""The decision whether landed gradients are applied: finite or not, clipping, loss scaling."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from offloadzero.config import LossScaleConfig
from offloadzero.core.fail_points import through
from offloadzero.errors import NonFiniteError, OffloadError
from offloadzero.memory.tickets import Failures
from offloadzero.ranks.group import Group, TakenStep
from offloadzero.ranks.mesh import is_divided_by_tensor_parallelism
from offloadzero.step.job import Account, StepJobs, Trial, TrialCount, UpdateJob, names_text
from offloadzero.step.step_decision import (
    LossScale,
    TrialPolicy,
    decide_step,
    plain_scale,
)

log = logging.getLogger("offloadzero")

NUM_SKIPS_TOLD, TELL_SKIPS_EVERY = 10, 100


def tells_skip(num_skips: int) -> bool:
    """Whether the log tells of the skip of that number, from 1: a run that only skips does not flood the log."""
    return num_skips <= NUM_SKIPS_TOLD or num_skips % TELL_SKIPS_EVERY == 0


_SKIPPED = "step %d is skipped: the gradient of %s holds NaN or Inf%s%s"
_STOPPED = "step %d is not applied, and stops the training: the gradient of %s holds NaN or Inf%s%s"


class Decider:
    """Decides over jobs whose gradients are home, one by one or over all of a step at once."""

    def __init__(
        self,
        units: Sequence[str],
        *,
        group: Group,
        failures: Failures,
        max_norm: float,
        skip_nonfinite: bool,
        loss_scale: LossScaleConfig | None,
    ) -> None:
        """Make the decider. `units` are the names of the units that train; `max_norm` 0 means no clipping."""
        self._units = tuple(units)
        self.stopped = Account(0)  # the account that has stopped the training, if `Failures.stop` says so
        self._group = group
        self._failures = failures
        self._max_norm = max_norm
        self._skip_nonfinite = skip_nonfinite
        self._is_scaled = loss_scale is not None
        self.scale = LossScale.initial(loss_scale)
        self._trials = TrialPolicy()
        self.trial_count = TrialCount()
        self.num_skipped = 0  # in all steps so far
        self._num_skips = 0  # in this process

    def restore(self, num_skipped: int, scale: Mapping[str, float]) -> None:
        """Take over the loss scale and the counter of a checkpoint."""
        self.num_skipped = num_skipped
        self.scale = replace(
            self.scale,
            scale=scale["scale"],
            good_steps=int(scale["good_steps"]),
            hysteresis_left=int(scale["hysteresis_left"]),
        )

    def count_skip(self) -> None:
        """Count a closed step that was not applied."""
        self.num_skipped += 1

    # --- a step that goes no further ---

    def stop(self, account: Account, error: OffloadError) -> None:
        """Stop the step here, and let no other begin."""
        account.refuse(error)
        self.stopped = account
        self._failures.stop_training(error)

    def refuse(self, account: Account, names: Sequence[str]) -> None:
        """Stop the step here: the gradients of the units of those names are not finite."""
        error = NonFiniteError(
            f"step {account.step}: the gradient of {names_text(names)} holds NaN or Inf; {self.applied_text(account)}. "
            + ("" if account.applied else "zero_grad() lets training go on without this step. ")
            + '("offloadzero": {"update": {"on_nonfinite": "skip"}} skips such steps.)'
        )
        self.stop(account, error)

    def applied_text(self, account: Account) -> str:
        """Return a text about the units that a step has updated which was not applied as a whole."""
        applied = list(account.applied)
        others = [name for name in self._units if name not in applied]
        if not applied:
            return "nothing of it was applied"
        return (
            f"the weights are updated in backward, and of step {account.step} the updates of {len(applied)} units were "
            f"applied ({names_text(applied)}) and those of {len(others)} were not ({names_text(others)}). Training "
            "cannot go on from there. The states can be saved as they are; load_checkpoint() of an earlier checkpoint "
            "makes them whole"
        )

    # --- decisions ---

    def trial_scale(self) -> float | None:
        """The factor with which the next step's updates are tried in its backward; None: they are not.

        [Note: versions] in update/pipeline.py.
        """
        return plain_scale(self.scale.scale) if self._trials.tries else None

    def decide_one(self, job: UpdateJob | Trial) -> bool:
        """Decide over a job of backward whose gradient is home; return whether it has begun, else it is cancelled.

        A trial may begin as long as the gradients that have landed let one expect that its step is not clipped.
        """
        if isinstance(job, Trial):
            landed = job.account.landed_sq_norms
            landed.append(math.fsum(job.gradient.sq_norms_by_slot()))
            so_far = decide_step(landed, loss_scale=self.scale.scale, max_norm=self._max_norm)
            if not so_far.is_plain(self.scale.scale):
                job.give_up()
            return not job.is_given_up
        account = job.account
        if account.refused is None:
            account.refuse(self._failures.stop)  # of the step before
        if account.refused is None and not job.gradient.is_finite:
            self.refuse(account, [job.record.name])
        if account.refused is not None:
            job.cancel()
            return False
        account.note_applied(job.record.name)
        job.begin(grad_scale=1.0)
        return True

    def decide(self, step: StepJobs) -> list[UpdateJob]:
        """Wait until all gradients of a step are home, and decide; return the jobs to apply, in their order."""
        try:
            jobs = through("decider.decide", self._decide)(step)
            step.decided.fulfil()
            return jobs
        except BaseException as error:
            self._failures.record(error)  # before any waiting thread can see it
            for job in step.jobs:
                job.ticket.fail(error)
            step.decided.fail(error)
            raise

    def _decide(self, step: StepJobs) -> list[UpdateJob]:
        for job in step.jobs:
            job.gradient.landed.wait()
        step.reads.wait()
        sq_norms = self._sq_norms(step)
        if not sq_norms:
            return []  # no rank has a gradient: it is no step in which the loss scale has proved good
        scale = self.scale
        decision = decide_step(sq_norms, loss_scale=scale.scale, max_norm=self._max_norm)
        step.decide(decision)
        self.scale = scale.after_step(finite=decision.apply)
        if decision.apply:
            for job in step.jobs:
                job.begin(grad_scale=decision.grad_scale)
            self._note_trials(step, is_plain=decision.is_plain(scale.scale))
            return step.in_order()
        self._note_trials(step, is_plain=False)
        names = self._non_finite(step)
        if not self._skip_nonfinite:
            self.refuse(step.account, names)  # before any waiting thread can see it
        self.count_skip()
        self._tell_skip(step, names, scale.scale)
        for job in step.jobs:
            job.cancel()
        return []

    def _note_trials(self, step: StepJobs, *, is_plain: bool) -> None:
        self._trials = self._trials.after_step(
            is_plain=is_plain,
            num_begun=self.trial_count.take(),
            num_adopted=sum(job.adopted is not None for job in step.jobs),
        )

    def _sq_norms(self, step: StepJobs) -> Sequence[float]:
        """The squared norms on which the decision rests; none where there is nothing to decide."""
        is_divided = any(job.record.shard.world_size > 1 for job in step.jobs)
        account = step.account
        return self._group.agree_on_step(
            TakenStep(account.step, account.hypers, step.writes, self._own_total(step), is_divided)
        )

    def _own_total(self, step: StepJobs) -> float | None:
        """The sum of the squared norms for which this rank speaks: [Note: the axes of a mesh].

        NaN where some gradient is not finite, None where there is none.
        """
        if not step.jobs:
            return None
        own = step.sq_norms()
        if not all(map(math.isfinite, own)):
            return math.nan
        if self._group.tensor_rank:
            own = [
                job.gradient.sq_norm_of(slot)
                for job in step.jobs
                for slot in job.gradient.present_slots
                if is_divided_by_tensor_parallelism(slot.param)
            ]
        return math.fsum(own)

    def _non_finite(self, step: StepJobs) -> Sequence[str]:
        """The units whose gradients are not finite, on some rank."""
        found = [not job.gradient.is_finite for job in step.jobs]
        flags = torch.tensor(found, dtype=torch.uint8, device="cpu")
        if step.jobs:
            self._group.decisions.all_reduce(flags, f"step {step.account.step}", largest=True)
        names = [job.record.name for job, flag in zip(step.jobs, flags.tolist(), strict=True) if flag]
        return names or ["a unit of another part of the model"]

    def _tell_skip(self, step: StepJobs, names: Sequence[str], scale: float) -> None:
        self._num_skips += 1
        if not tells_skip(self._num_skips):
            return
        log.warning(
            _SKIPPED if self._skip_nonfinite else _STOPPED,
            step.account.step,
            names_text(names),
            f". The loss scale was {scale:.10g} and is {self.scale.scale:.10g}" if self._is_scaled else "",
            f". It is the skip of number {self._num_skips}: from here on each {TELL_SKIPS_EVERY}th is told"
            if self._num_skips >= NUM_SKIPS_TOLD
            else "",
        )
