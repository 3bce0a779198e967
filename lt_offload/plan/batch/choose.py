"""Choice of the batch size with the highest throughput, by planning for several.

Every size has a relaxed program, which is solved quickly: a scan of a few sizes says around which one to look. Plans
are made for the sizes that promise most, and promises are corrected by what the plans before them have reached. Of
sizes with practically the same throughput the smallest is taken: a larger batch changes the training and brings
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.planners.offmate.program import lower_bound
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan, offmate_config, with_planned_head
from lt_offload.plan.windows import for_one, for_windows, has_windows, with_sums
from lt_offload.schema.plan import BatchPoint, Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes

ProfileAt = Callable[[int], Profile]
"""Returns the profile at a batch size; raises ``InfeasibleError`` if that cannot even be profiled."""

LARGEST = 1024
"""Larger batches are not considered, unless asked for by name."""
_GROWTH = 8
"""The next size to profile is at most so many times as large as the largest that was."""
_NEAR = 8
"""Sizes are told apart to this part of the best one."""
_WORSE = 2
"""The search among divisors ends after this many sizes in a row that are no better than larger ones."""
_EQUAL = 0.005
"""Relative difference of throughput that a larger batch must bring."""
_DOUBT = 0.02
"""Relative error that an expected throughput may have."""
_MOST_PLANS = 3.5
"""Time that a choice may take, in plans of the mean duration; profiles not counted."""
_LEAST_S = 4.0
"""Seconds that are always allowed: plans of small models take no time."""
_REACH = 3
"""Steps around a use in which relaxed programs may copy: fewer than for a plan, because many are solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChoice:
    """The chosen batch size with the reasons for it."""

    plan: Plan
    """For that size; holds ``curve`` and ``why``, too."""
    profile: Profile
    """At that size."""
    curve: tuple[BatchPoint, ...]
    """All sizes that were considered, ascending."""
    why: str

    @property
    def batch_size(self) -> int:
        """The chosen size."""
        return self.plan.batch_size


def choose_batch(
    profile_at: ProfileAt,
    settings: Settings,
    *,
    most: int = LARGEST,
    effective: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> BatchChoice:
    """Return the batch size with the highest simulated throughput, with its plan.

    Args:
        profile_at: measures or estimates the model at a batch size; asked for a handful of sizes. The batch must be the
            largest that can come at that size. An ``InfeasibleError`` means that the size does not fit.
        settings: of each plan. The choice takes at most four times as long as a plan, profiles not counted, unless
            profiles of different sizes contradict each other.
        most: largest size to consider, e.g. the length of the data set.
        effective: samples per update, which are split into micro-batches of one size; None: ``settings.accumulate``
            micro-batches of whatever size.
        on_progress: is told what is being done.

    Raises:
        InfeasibleError: if no size fits; says what would.
        UnsupportedError: if ``planner`` applies to no size.
        ConfigError: if there is no size to consider.
    """
    say = on_progress or (lambda _message: None)
    if most < 1:
        raise ConfigError(f"there is no batch size to choose from: most={most}")
    if settings.accumulate > 1 or settings.delayed or effective is not None:
        return _choose_micro_batch(profile_at, settings, most, effective, say)
    search = _BatchSearch(profile_at, settings, min(most, LARGEST), say)
    search.run()
    return search.choice()


def _choose_micro_batch(
    profile_at: ProfileAt,
    settings: Settings,
    most: int,
    effective: int | None,
    say: Callable[[str], None],
) -> BatchChoice:
    """Choose the size of the micro-batches of a window, by the throughput of their mean pass."""
    measured: dict[int, Profile] = {}

    def settings_at(size: int) -> Settings:
        return settings if effective is None else replace(settings, accumulate=effective // size)

    def with_sums_at(size: int) -> Profile:
        measured[size] = profile_at(size)
        now = settings_at(size)
        return with_sums(measured[size], now.accumulate) if has_windows(measured[size], now) else measured[size]

    search = _BatchSearch(with_sums_at, for_one(settings), min(most, LARGEST), say)
    search.run() if effective is None else search.split(effective)
    choice = search.choice()
    profile, now = measured[choice.batch_size], settings_at(choice.batch_size)
    if not has_windows(profile, now):
        plan = replace(choice.plan, host_budget_bytes=settings.host_budget(profile.hardware))
        return replace(choice, plan=plan, profile=profile)
    return replace(choice, plan=for_windows(choice.plan, profile, now), profile=profile)


class _BatchSearch:
    """One search for the best size."""

    def __init__(self, profile_at: ProfileAt, settings: Settings, most: int, say: Callable[[str], None]) -> None:
        self.profile_at, self.settings, self.most, self.say = profile_at, settings, most, say
        self.whole: dict[int, Profile] = {}
        """The profiles as they were given."""
        self.profiles: dict[int, Profile] = {}
        """Without options that change the order of summation: a larger batch is no reason for that."""
        self.plans: dict[int, Plan] = {}
        self.relaxed: dict[int, float] = {}
        """Seconds per sample of the relaxed program; infinite where it has no solution."""
        self.unfit: dict[int, InfeasibleError | UnsupportedError] = {}
        """Sizes that do not fit, or that the planner does not apply to, and why."""
        self.started = time.monotonic()
        self.durations: list[float] = []
        """Seconds that plans took."""

    # -- search ------------------------------------------------------------------------------------------------------

    def split(self, whole: int) -> None:
        """Plan for the sizes that divide ``whole``, the largest first, until two in a row are no better."""
        sizes = [size for size in range(1, min(whole, self.most) + 1) if whole % size == 0]
        worse = 0
        while sizes and worse < _WORSE:
            size = sizes.pop()
            self._plan(size)
            # A size that does not fit is no sign that smaller ones are worse.
            if size in self.plans:
                worse = 0 if self._fastest() == size else worse + 1

    def run(self) -> None:
        """Profile and plan the size that promises most, until none promises more than the fastest plan has reached."""
        if not self._profile(1):
            return
        self.say("looking for the best batch size")
        while (size := self._next()) is not None:
            # Promises of a size that was not profiled are an estimate: it is asked for again with what it has shown.
            if size in self.profiles:
                self._plan(size)
            else:
                self._profile(size)

    def _next(self) -> int | None:
        """Return the smallest of the sizes that promise most; None if none is worth a plan."""
        high = max(self.profiles)
        most = min(self._limit - 1, _GROWTH * high)
        if self.unfit:  # halfway: each size that does not fit costs a step on trial
            most = min(most, max(high, (high + self._limit) // 2))
        sizes = self._scan(most)
        if self.plans:
            fastest = self._fastest()
            sizes |= {size for size in (fastest - 1, fastest + 1) if 1 <= size <= most}
        elif most > high and self._relaxed(most) < self._relaxed(high):
            return most  # far from all profiles
        waiting = sorted(size for size in sizes - self.plans.keys() if size < self._limit)
        if not waiting:
            return None
        least = min(map(self._expected, waiting))
        size = next(size for size in waiting if self._expected(size) * (1 - _EQUAL) <= least)
        return size if not self.plans or self._worth(size) else None

    def _scan(self, most: int) -> set[int]:
        """Return sizes up to ``most``: doubled until that gains nothing, then the gaps beside the best one halved."""
        tried = [1]
        while tried[-1] < most and (len(tried) < 2 or self._relaxed(tried[-1]) < self._relaxed(tried[-2])):
            tried.append(min(2 * tried[-1], most))
        while True:
            best = min(tried, key=lambda size: (self._relaxed(size), size))
            at = tried.index(best)
            beside = [*tried[max(at - 1, 0) : at], *tried[at + 1 : at + 2]]
            middles = [(best + other) // 2 for other in beside if abs(best - other) > max(1, best // _NEAR)]
            if not middles:
                return set(tried)
            tried = sorted({*tried, *middles})

    @property
    def _limit(self) -> int:
        """The smallest size that is known not to fit."""
        return min(self.unfit, default=self.most + 1)

    def _fastest(self) -> int:
        return min(self.plans, key=lambda size: (self._seconds(size), size))

    def _chosen(self) -> int:
        """Return the smallest size of practically the highest throughput."""
        least = self._seconds(self._fastest())
        return min(size for size in self.plans if self._seconds(size) * (1 - _EQUAL) <= least)

    def _seconds(self, size: int) -> float:
        return self.plans[size].predicted.iteration_s / size

    def _worth(self, size: int) -> bool:
        """Return whether a plan for ``size`` may be the fastest, and by enough if its batch is larger.

        When time is up, only if it surely is: measurements of different sizes contradict each other on a machine that
        is busy with something else at times, and a choice must not be worse than its own table.
        """
        fastest = self._fastest()
        seconds = self._seconds(fastest)
        if self._late():
            return self._expected(size) * (1 + _DOUBT) < self._seconds(self._chosen())
        if size > fastest and self._relaxed(size) >= seconds * (1 - _EQUAL):
            return False
        return self._expected(size) * (1 - _DOUBT) <= seconds

    def _late(self) -> bool:
        """Return whether one more plan would take too long."""
        one = max(sum(self.durations) / max(len(self.durations), 1), _LEAST_S / _MOST_PLANS)
        return time.monotonic() - self.started + one > _MOST_PLANS * one

    def _expected(self, size: int) -> float:
        """Return the expected seconds per sample: those of the relaxed program, raised as plans near that size were."""
        relaxed = self._relaxed(size)
        ratios = {at: self._seconds(at) / self._relaxed(at) for at in self.plans if self._relaxed(at) < math.inf}
        if not ratios:
            return relaxed
        below = max((at for at in ratios if at <= size), default=min(ratios))
        above = min((at for at in ratios if at >= size), default=max(ratios))
        share = (size - below) / (above - below) if above > below else 0.0
        return relaxed * (ratios[below] + share * (ratios[above] - ratios[below]))

    # -- one size ----------------------------------------------------------------------------------------------------

    def _relaxed(self, size: int) -> float:
        if size not in self.relaxed:
            self.relaxed[size] = math.inf
            profile = self._estimate(size)
            program = offmate_config(profile, self.settings, reach=_REACH)
            # Copies that need a step of their own may find no room where
            # memory is tight; then they are hidden altogether.
            for lag in (1, 0):
                try:
                    self.relaxed[size] = lower_bound(profile, replace(program, lag=lag, lookahead=lag)) / size
                    break
                except (InfeasibleError, ConfigError):
                    continue
        return self.relaxed[size]

    def _estimate(self, size: int) -> Profile:
        """Return the profile at ``size``, from its two neighbours if it was not asked for."""
        if size in self.profiles:
            return self.profiles[size]
        below = [known for known in sorted(self.profiles) if known < size]
        above = [known for known in sorted(self.profiles) if known > size]
        pair = [*below[-1:], *above[:1]] if below and above else (below[-2:] or above[:2])
        one = self.profiles[pair[0]]
        return scaled(one, size, self.profiles[pair[1]] if len(pair) > 1 else None)

    def _profile(self, size: int) -> bool:
        """Ask for the profile at ``size``; returns False if it does not fit."""
        if size in self.profiles:
            return True
        began = time.monotonic()
        try:
            self.say(f"profiling batch_size={size}")
            profile = self.profile_at(size)
        except InfeasibleError as error:
            self.unfit[size] = error
            return False
        finally:
            # Profiles do not count: what a choice may take is counted in plans.
            self.started += time.monotonic() - began
        assert profile.batch_size == size, f"asked for batch_size={size}, got {profile.batch_size}"
        self.whole[size], self.profiles[size] = profile, with_planned_head(profile, self.settings)
        # What it promised was an estimate, and so was what lies beyond all profiles.
        highest = max(self.profiles)
        self.relaxed = {at: seconds for at, seconds in self.relaxed.items() if at < highest and at != size}
        return True

    def _plan(self, size: int, *, exact: bool = True) -> None:
        if not self._profile(size):
            return
        self.say(f"planning for batch_size={size}")
        began = time.monotonic()
        try:
            self.plans[size] = make_plan(self.whole[size], self.settings, exact=exact)
        except (InfeasibleError, UnsupportedError) as error:
            self.unfit[size] = error
        self.durations.append(time.monotonic() - began)

    # -- result ------------------------------------------------------------------------------------------------------

    def choice(self) -> BatchChoice:
        """Return the choice; raises the error of the smallest size if none fits."""
        if not self.plans:
            self._plan(min(self.unfit), exact=False)
        if not self.plans:
            raise self.unfit[min(self.unfit)]
        fastest, chosen = self._fastest(), self._chosen()
        sizes = sorted({*self.plans, *self.unfit, *(s for s, seconds in self.relaxed.items() if seconds < math.inf)})
        curve = tuple(self._point(size, chosen) for size in sizes)
        why = self._why(chosen, fastest)
        plan = self.plans[chosen]
        plan = replace(plan, batch_curve=curve, notes=(*plan.notes, why))
        return BatchChoice(plan=plan, profile=self.whole[chosen], curve=curve, why=why)

    def _point(self, size: int, chosen: int) -> BatchPoint:
        relaxed = self.relaxed.get(size, math.inf)
        plan = self.plans.get(size)
        promise = None if math.isinf(relaxed) else 1 / relaxed
        if plan is None:
            unfit = self.unfit.get(size)
            reason = str(unfit) if unfit else f"not planned: about {1 / self._expected(size):.3g} samples/s expected"
            return BatchPoint(batch_size=size, relaxed_samples_per_s=promise, reason=reason)
        change = self._seconds(chosen) / self._seconds(size) - 1
        return BatchPoint(
            batch_size=size,
            samples_per_s=1 / self._seconds(size),
            iteration_s=plan.predicted.iteration_s,
            device_peak_bytes=plan.predicted.device_peak_bytes,
            relaxed_samples_per_s=promise,
            reason="chosen" if size == chosen else f"{abs(change):.1%} {'more' if change > 0 else 'less'} throughput",
        )

    def _why(self, chosen: int, fastest: int) -> str:
        plan = self.plans[chosen]
        text = [f"batch_size={chosen} gives {1 / self._seconds(chosen):.3g} samples/s"]
        if fastest != chosen:
            more = self._seconds(chosen) / self._seconds(fastest) - 1
            text.append(f"{fastest} gives only {more:.1%} more")
        limit = min(self.unfit, default=None)
        if limit is not None:
            text.append(f"{limit} does not fit in {format_bytes(plan.budget_bytes)}")
        elif chosen == self.most:
            text.append("no larger size was considered")
        return "; ".join(text)
