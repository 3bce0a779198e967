"""``hf_trainer`` in several processes: ``torchrun --nproc-per-node 2 -m tests.parity.several.refused FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

import lt_offload
from tests.support import models


def main(folder: Path) -> None:
    """Leave what making a Trainer says."""
    args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[])
    said = "nothing"
    try:
        with lt_offload.hf_trainer(memory="1GB"):
            Trainer(model=models.build(), args=args)
    except lt_offload.UnsupportedError as error:
        said = str(error)
    (folder / os.environ["RANK"]).write_text(said)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
