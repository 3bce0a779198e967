"""Faults of what speaks to CUDA: the tests on the fake GPU should notice them."""

from __future__ import annotations

from scripts.mutants.mutant import Mutant

TASKS, DEVICE = "lt_offload/execute/device/cuda_tasks.py", "lt_offload/execute/device/cuda.py"
BASE = "lt_offload/execute/device/base.py"
GENERATORS = "lt_offload/model/state/generators.py"
STAGING, GUARD = "lt_offload/machine/staging.py", "lt_offload/execute/user_code/guard.py"


def _one(name: str, file: str, was: str, becomes: str) -> Mutant:
    return Mutant(name, file, ((was, becomes),))


MUTANTS = (
    _one("a wait between streams is dropped", TASKS, "self.cuda_stream.wait_event(task.completion)", "pass"),
    _one(
        "a copy does not wait for what it reads",
        TASKS,
        "            for event in tasks_of((*task.after, *task.behind)):\n                stream.follow(event)",
        "            for event in tasks_of(task.behind):\n                stream.follow(event)",
    ),
    _one(
        "a copy does not wait for who used its target",
        TASKS,
        "            for event in tasks_of((*task.after, *task.behind)):\n                stream.follow(event)",
        "            for event in tasks_of(task.after):\n                stream.follow(event)",
    ),
    _one(
        "an update on the host does not wait for the clipping factor",
        "lt_offload/execute/updates/clipping.py",
        "task.after.append(self.arrived)",
        "pass",
    ),
    Mutant(
        "a copy's event is recorded before it",
        TASKS,
        (
            (
                "            try:\n                work()\n",
                "            stream.complete(task)\n            try:\n                work()\n",
            ),
            (
                "                task.keeps = work\n                stream.complete(task)\n",
                "                task.keeps = work\n",
            ),
        ),
    ),
    _one(
        "a copy is launched to the wrong stream",
        TASKS,
        "        with self._cuda.use(stream.cuda_stream):\n",
        "        with self._cuda.use(self._cuda.current_stream()):\n",
    ),
    _one("memory that a copy uses is not kept", TASKS, "                task.keeps = work\n", ""),
    _one("memory of copies is let go of at once", TASKS, "while tasks and tasks[0].over():", "while tasks:"),
    _one("an update on the host does not wait for its gradient", TASKS, "event.completion.synchronize()", "pass"),
    _one(
        "a stream is taken for ordered after what comes later",
        TASKS,
        "self._after[stream] = task.position",
        "self._after[stream] = task.position + 1000",
    ),
    _one(
        "an event is taken for over",
        TASKS,
        "return self.completion is None or bool(self.completion.query())",
        "return True",
    ),
    _one(
        "a slot is freed without the computations that use it",
        DEVICE,
        "[*after, *buffer.inherited, self.mark()]",
        "[*after, *buffer.inherited]",
    ),
    _one(
        "a slot is freed without the copies that use it",
        DEVICE,
        "[*after, *buffer.inherited, self.mark()]",
        "[self.mark()]",
    ),
    _one(
        "computations do not wait for copies",
        DEVICE,
        "            compute.follow(task)\n",
        "",
    ),
    _one(
        "computations do not wait for who used their target",
        DEVICE,
        "(*events, *before_writing(writes)) if writes else events",
        "events",
    ),
    _one("a copy overwrites a freed slot early", BASE, "after=after, behind=behind, label=", "after=after, label="),
    _one(
        "a copy goes the other way",
        DEVICE,
        "target.copy_(source, non_blocking=True)",
        "source.copy_(target, non_blocking=True)",
    ),
    _one(
        "a mark is on the wrong stream",
        DEVICE,
        "        self._compute_stream().complete(mark)\n",
        '        self._copy_streams["d2h"].complete(mark)\n',
    ),
    _one(
        "a stream is waited for before anything is launched to it",
        DEVICE,
        "        self._lanes.finish(awaited)\n",
        "",
    ),
    _one(
        "the new arena may still be filled",
        DEVICE,
        "        self._cuda.current_stream().synchronize()\n        return Arena(",
        "        return Arena(",
    ),
    _one(
        "draining does not wait for copies",
        DEVICE,
        "        for stream in self._copy_streams.values():\n            stream.cuda_stream.synchronize()\n",
        "",
    ),
    _one(
        "who waits on the host does not",
        DEVICE,
        "                task.completion.synchronize()\n",
        "                pass\n",
    ),
    _one("random numbers are not drawn again", GENERATORS, "torch.cuda.set_rng_state(state, gpu)", "pass"),
    _one("another stream of the user's is not ordered", DEVICE, "                stream.follow(end)\n", ""),
    _one("the budget is not hard", DEVICE, "self._cuda.cap(left)", "self._cuda.cap(None)"),
    _one(
        "a staging buffer is filled while it is copied",
        STAGING,
        "                self._copy(goal, part)\n                buffer.free.record(stream)\n",
        "                self._copy(goal, part)\n",
    ),
    _one(
        "a staging buffer is emptied before it is filled",
        STAGING,
        "self._copy(buffer.memory[: piece.numel()], piece)\n                buffer.free.record(stream)\n",
        "self._copy(buffer.memory[: piece.numel()], piece)\n",
    ),
    _one("the guard is one for all threads", GUARD, "class Suspended(threading.local):", "class Suspended:"),
)
