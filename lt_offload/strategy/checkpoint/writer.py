"""A thread that writes checkpoints while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue

Job = Callable[[], None]


class Writer:
    """A queue of jobs that run one after the other on a thread of its own; :meth:`check` raises their first error.

    The thread ends with the process, in the middle of a job if need be: files are complete or absent all the same.
    """

    def __init__(self) -> None:
        self._jobs: Queue[Job | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="lt_offload checkpoints", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Do ``job`` when all before it are over."""
        self._jobs.put(job)

    def if_all_went_well(self, job: Job) -> None:
        """Do ``job`` when all before it are over; leave it out if one of them has failed."""
        self.submit(lambda: job() if self._error is None else None)

    def wait(self) -> None:
        """Block until nothing is left to do."""
        self._jobs.join()

    def check(self) -> None:
        """Raise the first error of a job, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for all jobs, and end the thread."""
        self.wait()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # it belongs to whoever asks next
                # The first one: those behind it mostly follow from it.
                self._error = self._error or error
            del job  # or an idle thread would keep a checkpoint
            self._jobs.task_done()
