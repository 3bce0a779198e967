"""Choice of the update that trains most samples per second: how many samples it has, and how they are split.

An update has one batch or several (``accumulate``), each of which goes through a block as a whole or in parts: a
:class:`Split` of its samples. Every split has a relaxed program, which is solved quickly. A scan of a few numbers of
samples says around which one to look; for each of them, parts and batches become more while that gains. Plans are made
for the splits that promise most, and promises are corrected by what the plans before them have reached. Of updates with
practically the same throughput the smallest is taken: a larger one changes the training and brings nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.plan.batch.profiles import in_parts, scaled
from lt_offload.plan.batch.splits import Choices, Split
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan, relaxed_s
from lt_offload.schema.plan import BatchPoint, Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes, format_rate

ProfileAt = Callable[[int, int], Profile]
"""Returns the profile of a batch of so many samples in so many parts.

Raises ``InfeasibleError`` if that cannot even be profiled, ``UnsupportedError`` if the model cannot be cut.
"""

_GROWTH = 8
"""Parts of so many times the samples of the largest batch that was profiled are considered, at most ..."""
_FAR = 2
"""... and from so many times on, a batch of them is profiled before a plan is made."""
_NEAR = 8
"""Sizes are told apart to this part of the best one."""
_EQUAL = 0.02
"""Relative difference of throughput that a larger update, more parts or more batches must bring."""
_DOUBT = 0.02
"""Relative error that an expected throughput may have."""
_MOST_PLANS = 3.5
"""Time that a choice may take, in plans of the mean duration; profiles not counted."""
_LEAST_S = 4.0
"""Seconds that are always allowed: plans of small models take no time."""


def choose_batch(
    profile_at: ProfileAt,
    settings: Settings,
    choices: Choices | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    on_plan: Callable[[Profile, Plan], None] | None = None,
) -> tuple[Profile, Plan]:
    """Return a batch of the update with the highest simulated throughput, and its plan.

    The plan has all splits that were considered, ascending by their samples, and its last note says why this one.

    Args:
        profile_at: measures or estimates the model with a batch in parts; asked for a handful. The batch must be the
            largest that can come at that size. An ``InfeasibleError`` means that the size does not fit.
        settings: of each plan. The choice takes at most four times as long as a plan, profiles not counted, unless
            profiles of different sizes contradict each other.
        choices: what may be chosen; None: one batch per update, taken whole, of any size.
        on_progress: is told what is being done.
        on_plan: gets each plan that is the best one so far, for a choice that is stopped.

    Raises:
        InfeasibleError: if nothing fits; says what would.
        UnsupportedError: if ``planner`` applies to no size, or nothing fits without parts and the model has none.
        ConfigError: if there is nothing to choose from.
    """
    choices = choices or Choices(accumulate=settings.accumulate)
    choices.check()
    search = _BatchSearch(profile_at, settings, choices, on_progress or (lambda _message: None))
    search.keep = on_plan or search.keep
    search.run()
    return search.choice()


def choose_parts(
    measure: Callable[[int], Profile], settings: Settings, *, on_plan: Callable[[Profile, Plan], None] | None = None
) -> tuple[Profile, Plan]:
    """Choose the number of parts of a batch, a power of two up to its samples, with which an iteration is fastest.

    Args:
        measure: returns the profile of the batch in so many parts; asked for 1 and for what promises most.
        settings: of plans.
        on_plan: as for :func:`choose_batch`.

    Raises:
        InfeasibleError: if no plan fits, in however many parts.
        UnsupportedError: if the model cannot be trained exactly in one part, or only there and no plan fits.
    """
    whole = measure(1)
    size, accumulate = whole.batch_size, settings.accumulate
    choices = Choices(most=size * accumulate, batch_size=size, parts="auto", accumulate=accumulate)

    def profile_at(_size: int, parts: int) -> Profile:
        return whole if parts == 1 else measure(parts)

    return choose_batch(profile_at, settings, choices, on_plan=on_plan)


class _BatchSearch:
    """One search for the best split."""

    def __init__(self, profile_at: ProfileAt, settings: Settings, choices: Choices, say: Callable[[str], None]) -> None:
        self.profile_at, self.settings, self.choices, self.say = profile_at, settings, choices, say
        self.keep: Callable[[Profile, Plan], object] = lambda _profile, _plan: None
        """A callback that gets the best plan so far."""
        self.exact = choices.parts == 1
        """Plans must sum as plain PyTorch does: who allows parts allows another order."""
        self.profiles: dict[tuple[int, int], Profile] = {}
        """By samples and parts of a batch."""
        self.plans: dict[Split, Plan] = {}
        self.relaxed: dict[Split, float] = {}
        """Seconds per sample of the relaxed program; infinite where it has no solution."""
        self.unfit: dict[Split, InfeasibleError | UnsupportedError] = {}
        """Splits that do not fit, or that the planner does not apply to, and why."""
        self.started = time.monotonic()
        self.durations: list[float] = []
        """Seconds that plans took."""

    # -- search ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Profile and plan what promises most, until nothing promises more than the fastest plan has reached."""
        if self._profile(self.choices.batch_size or 1, 1) is None:
            return
        # One size alone does not show what is the same for all.
        while self.choices.sizes_differ and len(self.profiles) == 1 and (size := self._ceiling) > 1:
            self._profile(size, 1)
        self.say("looking for the best batch size")
        while (split := self._next()) is not None:
            # What is far from all profiles promises an estimate: it is asked for again with what a batch has shown.
            if not self.plans and split.rows >= _FAR * self._high and (split.rows, 1) not in self.profiles:
                self._profile(split.rows, 1)
            else:
                self._plan(split)

    def _next(self) -> Split | None:
        """Return the smallest of the splits that promise most; None if none is worth a plan."""
        self._scan()
        left = (split for split in sorted(self.relaxed) if split not in self.plans and self._may_fit(split))
        waiting = [
            split for split in left if self._relaxed(split) < math.inf and (not self.plans or self._worth(split))
        ]
        least = min(map(self._expected, waiting), default=math.inf)
        return next((split for split in waiting if self._expected(split) * (1 - _EQUAL) <= least), None)

    def _scan(self) -> None:
        """Solve for numbers of samples: doubled until that gains nothing, then the gaps beside the best one halved."""
        unit = self.choices.unit
        most = max(1, self.choices.most // unit) if self.choices.sizes_differ else 1

        def seconds(count: int) -> float:
            return self._least(count * unit)

        tried = [1]
        while tried[-1] < most and (len(tried) < 2 or seconds(tried[-1]) < seconds(tried[-2]) * (1 - _EQUAL / 4)):
            tried.append(min(2 * tried[-1], most))
        while True:
            least = min(map(seconds, tried))
            best = next(count for count in tried if seconds(count) * (1 - _EQUAL) <= least)
            at = tried.index(best)
            beside = [*tried[max(at - 1, 0) : at], *tried[at + 1 : at + 2]]
            middles = [(best + other) // 2 for other in beside if abs(best - other) > max(1, best // _NEAR)]
            if not middles:
                return
            tried = sorted({*tried, *middles})

    def _least(self, samples: int) -> float:
        least = math.inf
        for _, counts in groupby(self.choices.splits(samples), key=lambda split: split.accumulate):
            here = math.inf
            for split in counts:
                seconds = self._relaxed(split) if self._may_fit(split) else math.inf
                more, here = seconds < here * (1 - _EQUAL), min(here, seconds)
                if not more and here < math.inf:
                    break
            more, least = here < least * (1 - _EQUAL), min(here, least)
            if not more and least < math.inf:
                break
        return least

    def _may_fit(self, split: Split) -> bool:
        """Return whether ``split`` is neither known not to fit nor too far from all that is known."""
        cut = split.parts == 1 or self.choices.parts != 1
        return (
            split.rows <= self._ceiling
            and cut
            and not any(
                other.batch_size <= split.batch_size
                and other.parts >= split.parts
                and other.accumulate <= split.accumulate
                for other in self.unfit
            )
        )

    @property
    def _ceiling(self) -> int:
        """The largest part of a batch that is considered for now."""
        high, known = self._high, (split.batch_size for split in self.unfit if split.parts == split.accumulate == 1)
        limit, most = min(known, default=None), min(_GROWTH * high, self.choices.most)
        # Halfway: each size that does not fit costs a step on trial.
        return max(high, most if limit is None else min(most, (high + limit) // 2))

    @property
    def _high(self) -> int:
        return max(size for size, parts in self.profiles if parts == 1)

    def _fastest(self) -> Split:
        return min(self.plans, key=lambda split: (self._seconds(split), split))

    def _chosen(self) -> Split:
        """Return the smallest update of practically the highest throughput."""
        least = self._seconds(self._fastest())
        return min(split for split in self.plans if self._seconds(split) * (1 - _EQUAL) <= least)

    def _seconds(self, split: Split) -> float:
        return self.plans[split].predicted.iteration_s / split.samples

    def _worth(self, split: Split) -> bool:
        """Return whether a plan for ``split`` may be the fastest, and by enough if it is no smaller update.

        When time is up, only if it surely is: measurements of different sizes contradict each other on a machine that
        is busy with something else at times, and a choice must not be worse than its own table.
        """
        fastest, expected = self._fastest(), self._expected(split)
        seconds = self._seconds(fastest)
        if self._late():
            return expected * (1 + _DOUBT) < self._seconds(self._chosen())
        if split.samples >= fastest.samples:
            return expected < seconds * (1 - _EQUAL / 2)
        # Where a plan is far from its program, another one may be near.
        return expected * (1 - max(_DOUBT, seconds / self._relaxed(fastest) / 2 - 0.5)) <= seconds

    def _late(self) -> bool:
        one = max(sum(self.durations) / max(len(self.durations), 1), _LEAST_S / _MOST_PLANS)
        return time.monotonic() - self.started + one > _MOST_PLANS * one

    def _expected(self, split: Split) -> float:
        """Return the expected seconds per sample: those of the relaxed program, raised as plans near it were."""
        relaxed = self._relaxed(split)
        # Plans of windows are farther from their programs than others.
        alike = [at for at in self.plans if (at.accumulate > 1) is (split.accumulate > 1)] or self.plans
        ratios = {at.samples: self._seconds(at) / self._relaxed(at) for at in alike if self._relaxed(at) < math.inf}
        if not ratios:
            return relaxed
        below = max((at for at in ratios if at <= split.samples), default=min(ratios))
        above = min((at for at in ratios if at >= split.samples), default=max(ratios))
        share = (split.samples - below) / (above - below) if above > below else 0.0
        return relaxed * (ratios[below] + share * (ratios[above] - ratios[below]))

    # -- one split ---------------------------------------------------------------------------------------------------

    def _relaxed(self, split: Split) -> float:
        if split not in self.relaxed:
            settings = replace(self.settings, accumulate=split.accumulate)
            self.relaxed[split] = relaxed_s(self._estimate(split), settings, exact=self.exact) / split.samples
        return self.relaxed[split]

    def _estimate(self, split: Split) -> Profile:
        """Return the profile of a batch of ``split``; if it was not asked for, from a batch as large as a part."""
        if (split.batch_size, split.parts) in self.profiles:
            return self.profiles[split.batch_size, split.parts]
        sizes = sorted(size for size, parts in self.profiles if parts == 1)
        below, above = ([size for size in sizes if (size <= split.rows) is low] for low in (True, False))
        pair = [*below[-1:], *above[:1]] if below and above else (below[-2:] or above[:2])
        one, *other = (self.profiles[size, 1] for size in pair)
        part = scaled(one, split.rows, *other)
        return in_parts(scaled(part, split.batch_size), split.parts)

    def _profile(self, size: int, parts: int) -> Profile | None:
        if (size, parts) in self.profiles:
            return self.profiles[size, parts]
        began = time.monotonic()
        try:
            self.say(f"profiling {Split(size, 1, parts).settings}")
            profile = self.profile_at(size, parts)
        except InfeasibleError as error:
            self.unfit[Split(size, 1, parts)] = error
            return None
        except UnsupportedError as error:
            if self.choices.parts != "auto":
                raise
            self.unfit[Split(size, 1, parts)] = error
            self.choices = replace(self.choices, parts=1)
            return None
        finally:
            # Profiles do not count: what a choice may take is counted in plans.
            self.started += time.monotonic() - began
        assert profile.batch_size == size, f"asked for batch_size={size}, got {profile.batch_size}"
        high = self._high if self.profiles else 0
        self.profiles[size, parts] = profile
        # What was promised by an estimate for this size, or by what lies beyond all profiles, is estimated anew.
        self.relaxed = {
            at: seconds
            for at, seconds in self.relaxed.items()
            if (at.batch_size, at.parts) != (size, parts) and (parts > 1 or (at.rows != size and at.rows <= high))
        }
        return profile

    def _plan(self, split: Split, *, exact: bool = True) -> None:
        profile = self._profile(split.batch_size, split.parts)
        if profile is None:
            return
        self.say(f"planning for {split.settings}")
        began = time.monotonic()
        try:
            settings = replace(self.settings, accumulate=split.accumulate)
            self.plans[split] = plan = make_plan(profile, settings, exact=exact and self.exact)
            if split == self._chosen():
                self.keep(profile, plan)
        except (InfeasibleError, UnsupportedError) as error:
            self.unfit[split] = error
        self.durations.append(time.monotonic() - began)

    # -- result ------------------------------------------------------------------------------------------------------

    def choice(self) -> tuple[Profile, Plan]:
        """Return what was chosen; raises the error of the smallest update if none fits."""
        if not self.plans:
            # Relaxed programs and plans count memory in their own ways, and the plan has the last word.
            first, *_, last = (*self.choices.splits(self.choices.unit),) * 2
            for split in (last, first):
                if not self.plans and ((split.batch_size, split.parts) in self.profiles or split not in self.unfit):
                    self._plan(split, exact=False)
        if not self.plans:
            raise self.unfit[min(self.unfit)]
        fastest, chosen = self._fastest(), self._chosen()
        curve = tuple(self._point(split, chosen) for split in self._shown())
        plan = self.plans[chosen]
        plan = replace(plan, batch_curve=curve, notes=(*plan.notes, self._why(chosen, fastest)))
        return self.profiles[chosen.batch_size, chosen.parts], plan

    def _shown(self) -> list[Split]:
        """Return what was planned or does not fit, and of other numbers of samples the split that promises most."""
        known, solved = {*self.plans, *self.unfit}, sorted(self.relaxed)
        for samples, splits in groupby(solved, key=lambda split: split.samples):
            best = min(splits, key=lambda split: (self._expected(split), split))
            if self.relaxed[best] < math.inf and all(split.samples != samples for split in known):
                known.add(best)
        return sorted(known)

    def _rate(self, seconds: float) -> str:
        tokens = next(iter(self.profiles.values())).sequence_length
        return f"{format_rate(tokens / seconds)} {'tokens' if tokens > 1 else 'samples'}/s"

    def _point(self, split: Split, chosen: Split) -> BatchPoint:
        relaxed = self.relaxed.get(split, math.inf)
        point = BatchPoint(
            batch_size=split.batch_size,
            parts=split.parts,
            accumulate=split.accumulate,
            relaxed_samples_per_s=None if math.isinf(relaxed) else 1 / relaxed,
        )
        if split not in self.plans:
            unfit = self.unfit.get(split)
            reason = str(unfit) if unfit else f"not planned: about {self._rate(self._expected(split))} expected"
            return replace(point, reason=reason)
        plan, change = self.plans[split].predicted, self._seconds(chosen) / self._seconds(split) - 1
        return replace(
            point,
            samples_per_s=1 / self._seconds(split),
            iteration_s=plan.iteration_s,
            device_peak_bytes=plan.device_peak_bytes,
            reason="chosen" if split == chosen else f"{abs(change):.1%} {'more' if change > 0 else 'less'} throughput",
        )

    def _why(self, chosen: Split, fastest: Split) -> str:
        plan, seconds = self.plans[chosen], self._seconds(chosen)
        text = [f"{chosen.settings} gives {self._rate(seconds)}"]
        if fastest != chosen:
            text.append(f"{fastest.settings} gives only {seconds / self._seconds(fastest) - 1:.1%} more")
        larger = [self._expected(split) for split in self.relaxed if split.samples > chosen.samples]
        if (least := min(larger, default=math.inf)) < math.inf:
            text.append(f"larger updates promise {max(0.0, seconds / least - 1):.1%} more at most")
        elif self.choices.sizes_differ and chosen.samples == self.choices.most:
            text.append("no larger update was considered")
        if self.unfit:
            first = min(self.unfit)
            refused = isinstance(self.unfit[first], UnsupportedError)
            why = "cannot be planned" if refused else f"does not fit in {format_bytes(plan.budget_bytes)}"
            text.append(f"{first.settings} {why}")
        return "; ".join(text)
