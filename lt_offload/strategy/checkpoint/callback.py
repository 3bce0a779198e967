"""The callbacks that people name, for ``lightning.pytorch``; what they do is in files free of Lightning."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from lt_offload.strategy.checkpoint.resume import ResumeCore


class ExactResume(ResumeCore, Callback):
    """Makes every checkpoint one from which training goes on as if it had never stopped, and writes one at Ctrl-C.

    The offmate strategy gives one to its Trainer by itself; recipes list it. With another strategy it keeps the random
    states all the same, but the order of a plain DataLoader only from one epoch to the next.

    Args:
        random_states: keep the states of all generators in checkpoints and set them when training goes on: Python's,
            NumPy's, torch's on the host and on all CUDA devices, those of loaders, samplers, data sets and modules.
            The batches of the epoch that training has seen are fetched again, so that the others come in the order of
            the first run. If false, a resumed run has other dropout masks than an uninterrupted one.
        on_interrupt: at the first Ctrl-C or SIGTERM, end the iteration, write ``interrupted.ckpt`` beside the
            checkpoints of the first ModelCheckpoint, and leave as Lightning does: with ``KeyboardInterrupt`` handled
            (exit code 1; ``lt-finetune``: 130), or with ``SIGTERMException`` (exit code 143). A second one does not
            wait. Does nothing where checkpointing is off (``enable_checkpointing=False``).
    """

    def __init__(self, *, random_states: bool = True, on_interrupt: bool = True) -> None:
        super().__init__(random_states=random_states, on_interrupt=on_interrupt)
