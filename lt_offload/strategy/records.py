"""Files that a run leaves in its folder: profile, plan and the record of an iteration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_offload.model.parts import extent
from lt_offload.report.perfetto import save_perfetto
from lt_offload.strategy.replan import steps_left
from lt_offload.strategy.several.processes import Processes

if TYPE_CHECKING:
    from lt_offload.execute.engine import Engine
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile
    from lt_offload.schema.trace import Trace


class Records(Processes):
    """The part of the strategy that writes records: those of the first process, and the traces of the others."""

    report_dir: str | Path | None
    profile: Profile | None
    plan: Plan | None
    trace: Trace | None
    engine: Engine | None

    def on_train_end(self) -> None:
        """Keep the record of the last iteration."""
        self.ends_training()
        if self.plan is None or self.engine is None or self.engine.stats.iterations == 0:
            return
        if self.trace is None:
            self.trace = self.engine.trace()
        folder = self._folder(self._module.trainer)
        if folder is None:
            return
        if not self.is_global_zero:
            self.trace.save(folder / f"trace.{self.global_rank}.json")
            return
        self.trace.save(folder / "trace.json")
        save_perfetto(self.trace, folder / "trace.perfetto.json")

    def _keep_trace(self, batch: Any) -> None:
        """Keep the record of the iteration before the last one, if the last ``batch`` is smaller than the plan's."""
        engine, plan = self.engine, self.plan
        if engine is None or plan is None or extent(batch)[0] >= plan.batch_size or not engine.stats.iterations:
            return
        if self.trace is None and steps_left(self._module.trainer) <= 1:
            self.trace = engine.trace()

    def _save_plan(self, folder: Path | None) -> None:
        if folder is not None and self.profile is not None and self.plan is not None and self.is_global_zero:
            self.profile.save(folder / "profile.json")
            self.plan.save(folder / "plan.json")

    def _folder(self, trainer: Any) -> Path | None:
        """Return the run folder, None if the run keeps nothing."""
        if self.report_dir is not None:
            return Path(self.broadcast(str(self.report_dir)))
        # The logger's folder is the first process's, too: all processes ask for it.
        kept = trainer.loggers and not trainer.fast_dev_run and trainer.log_dir
        return Path(trainer.log_dir) if kept else None
