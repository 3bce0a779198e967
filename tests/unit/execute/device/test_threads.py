"""Lanes with threads, under random programs: orders, errors, cancellation, and the end."""

import random
import threading
import time

import pytest

from lt_offload.execute.device.lanes import Lanes, Task

LANES = ("h2d", "d2h", "host")


class Program:
    """Random tasks, and a log of when each began and ended."""

    def __init__(self, seed, failing=0.0):
        self.random = random.Random(seed)
        self.failing = failing
        self.log, self.tasks, self.broken = [], [], set()
        self.lanes = Lanes(lambda task: task.work(), threads={})

    def work(self, at, pause, fails):
        def run():
            self.log.append(("begin", at))
            if pause:
                time.sleep(pause)
            self.log.append(("end", at))
            if fails:
                raise KeyError(at)

        return run

    def some(self):
        recent = self.tasks[-12:]
        return self.random.sample(recent, min(len(recent), self.random.randrange(4)))

    def submit(self):
        at, fails = len(self.tasks), self.random.random() < self.failing
        pause = self.random.choice((0, 0, 0, 1e-4, 1e-3))
        task = Task(
            self.random.choice(LANES),
            self.work(at, pause, fails),
            after=self.some(),
            behind=self.some(),
            urgency=self.random.randrange(5),
        )
        needs = {self.tasks.index(t) for t in (*task.after, *task.behind)}
        self.tasks.append(task)
        if fails:
            self.broken.add(at)
        if task.lane == "host" or self.random.random() < 0.5 or not self.lanes.run_here(task):
            self.lanes.submit(task)
        return needs

    def run(self, count=150):
        needs = [self.submit() for _ in range(count // 2)]
        for task in self.random.sample(self.tasks, 5):
            self.lanes.finish([task])
            assert task.finished
        needs += [self.submit() for _ in range(count - count // 2)]
        self.lanes.finish(self.lanes.pending())
        assert all(task.finished for task in self.tasks)
        assert self.lanes.pending() == []
        return needs


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_keep_every_order(seed):
    program = Program(seed)
    needs = program.run()
    began = {at: where for where, (what, at) in enumerate(program.log) if what == "begin"}
    ended = {at: where for where, (what, at) in enumerate(program.log) if what == "end"}
    assert len(began) == len(ended) == len(program.tasks)
    assert all(ended[need] < began[at] for at, found in enumerate(needs) for need in found)
    for lane in ("h2d", "d2h"):
        order = [at for what, at in program.log if what == "begin" and program.tasks[at].lane == lane]
        assert order == sorted(order)
    program.lanes.stop()


@pytest.mark.parametrize("seed", range(15))
def test_random_failures_cancel_what_depends_on_them_and_nothing_hangs(seed):
    program = Program(seed, failing=0.05)
    program.run()
    ran = {at for what, at in program.log if what == "begin"}
    for at, task in enumerate(program.tasks):
        assert (task.error is None) == (at in ran and at not in program.broken)
    if program.broken & ran:
        with pytest.raises(KeyError):
            program.lanes.check()
    program.lanes.check()
    later = Task("d2h", lambda: program.log.append("later"))
    program.lanes.submit(later)
    program.lanes.finish([later])
    program.lanes.check([later])
    assert program.log[-1] == "later"
    program.lanes.stop()


def test_what_is_queued_still_runs_when_lanes_stop():
    lanes = Lanes(lambda task: task.work(), threads={})
    gate, log = threading.Event(), []
    first = Task("h2d", gate.wait)
    lanes.submit(first)
    update = Task("host", lambda: log.append("host"), after=[first])
    lanes.submit(update)
    lanes.submit(Task("d2h", lambda: log.append("d2h"), after=[update]))
    threading.Timer(0.02, gate.set).start()
    lanes.stop()
    lanes.stop()
    assert log == ["host", "d2h"]
