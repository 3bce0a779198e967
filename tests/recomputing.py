"""``pytest tests/parity --recompute``: every plan runs every block again that may run twice.

Plans that are left to themselves keep activations where there is room and send them to the host where there is none, so
that what a second run of a block does wrong may be seen by no test. Under the option the planners are offered nothing
else, at whatever budget, and hand-made plans recompute what they would record. How many block runs were repeated is
counted in each test; those that ran blocks but repeated none are named at the end, and a run without any fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

_COUNTS = "block runs, and how many were repeated"


@dataclass(eq=False)
class Recomputing:
    """The plugin of the option."""

    runs: int = 0
    """Of blocks, in the present test."""
    again: int = 0
    """How many of them were repeated for the backward."""

    def __post_init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        """By test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark, row = item.get_closest_marker("own_plan"), getattr(item, "callspec", None)
            if mark is not None and (row is None or mark.kwargs.items() <= row.params.items()):
                item.add_marker(pytest.mark.skip(reason=f"--recompute: {mark.args[0]}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            _force(patch)
            self._count(patch)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.runs = self.again = 0
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append((_COUNTS, (self.runs, self.again)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Also of tests that another process has run."""
        if report.when == "teardown":
            self.counts[report.nodeid] = dict(report.user_properties).get(_COUNTS, (0, 0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Processes of xdist know their part only.
        if not hasattr(session.config, "workerinput") and self.counts and not any(n for _, n in self.counts.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        ran = {name: again for name, (runs, again) in self.counts.items() if runs}
        repeated, tests = sum(ran.values()), sum(again > 0 for again in ran.values())
        terminalreporter.section("--recompute")
        terminalreporter.line(
            f"{repeated} runs of blocks were repeated in {tests} tests; {len(self.counts) - len(ran)} ran no block here"
        )
        for name, again in ran.items():
            if not again:
                terminalreporter.line(f"repeated none: {name}")

    def _count(self, patch: pytest.MonkeyPatch) -> None:
        from lt_offload.execute.blocks.run import BlockRun

        first, second = BlockRun._call, BlockRun.as_first

        def call(run: BlockRun, *args: Any) -> Any:
            self.runs += 1
            return first(run, *args)

        @contextmanager
        def as_first(run: BlockRun, *args: Any, **kwargs: Any) -> Iterator[None]:
            self.again += 1
            with second(run, *args, **kwargs):
                yield

        patch.setattr(BlockRun, "_call", call)
        patch.setattr(BlockRun, "as_first", as_first)


def _force(patch: pytest.MonkeyPatch) -> None:
    from lt_offload.plan.planners import request
    from tests.support import plans

    allowed, streamed = request.allowed_options, plans.streamed

    def repeating(block: Any, switches: Any, **kwargs: Any) -> Any:
        found = allowed(block, switches, **kwargs)
        left = tuple(option for option in found if option.name in ("recompute", "discard"))
        return left if any(option.name == "recompute" for option in left) else found

    def recomputed(option: Any) -> Any:
        return "recompute" if option in ("keep", "offload") else option

    def repeating_plan(*args: Any, options: Any, last_option: Any = None, **kwargs: Any) -> Any:
        options = [recomputed(option) for option in options]
        return streamed(*args, options=options, last_option=recomputed(last_option), **kwargs)

    for name in ("solve", "infeasible", "planners.offmate.model"):
        patch.setattr(import_module(f"lt_offload.plan.{name}"), "allowed_options", repeating)
    patch.setattr(plans, "streamed", repeating_plan)
