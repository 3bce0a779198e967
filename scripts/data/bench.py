"""From files to packed sequences: how fast beside TRL, on the same data in one run, and whether bins are the same.

Rows are repeated to a size worth measuring. Both tokenise and pack each time anew, in turns; TRL starts from a data set
in memory, this package from the file. Needs TRL (``pip install trl``, or its folder in PYTHONPATH).

python -m scripts.data.bench --text FILE.jsonl --alpaca FILE.json [--rows 20000] [--rounds 3]
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lt_offload.finetune import load
from lt_offload.finetune.data.batches.documents import Documents
from lt_offload.finetune.data.batches.packing import Sequences, bins_of, packed, pieces_of
from lt_offload.finetune.data.module import FineTuneData
from scripts.common import arguments, save

LENGTH = 1024
TRL_BATCH = 1000
"""Rows that TRL packs together."""


def main() -> int:
    """Measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a column text")
    parser.add_argument("--alpaca", type=Path, required=True, help="JSON with instruction, input and output")
    parser.add_argument("--tokenizer", default=load.SMOLLM2)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    from datasets import disable_progress_bars

    disable_progress_bars()
    tokenizer = load.load_tokenizer(options.tokenizer)
    cases: dict[str, Any] = {}
    for kind in ("text", "alpaca"):
        rows = list(islice(cycle(read(getattr(options, kind))), options.rows))
        cases[kind] = measured(kind, rows, tokenizer, options.tokenizer, options.rounds)
        print(kind, json.dumps(cases[kind], indent=1), flush=True)
    what = {"rows": options.rows, "rounds": options.rounds, "max_length": LENGTH, "tokenizer": options.tokenizer}
    figures = {"cases": cases, "trl": version("trl"), "datasets": version("datasets")}
    print(save("bench-data", "bench-data", what, figures, options.results))
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON file, a list or one per line."""
    text = path.read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = (
        json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, text.strip().split("\n")))
    )
    return rows


def measured(kind: str, rows: list[dict[str, Any]], tokenizer: Any, name: str, rounds: int) -> dict[str, Any]:
    """Return seconds of both, in turns, and what came out."""
    theirs = table_for_trl(kind, rows)
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        for number in range(rounds):
            cache = Path(folder) / f"cache{number}"
            took, data = timed(lambda cache=cache: ours(path, name, cache))
            seconds["ours"].append(took)
            took, tokenised = timed(lambda: tokenised_by_trl(theirs, tokenizer))
            packing, by_trl = timed(lambda tokenised=tokenised: packed_by_trl(tokenised))
            seconds["trl"].append(took + packing)
            seconds["trl_packing"].append(packing)
            took, sequences = timed(lambda tokenised=tokenised: packed_by_us(tokenised))
            seconds["our_packing"].append(took)
            seconds["our_reading"].append(timed(lambda sequences=sequences: read_all(sequences))[0])
            seconds["trl_reading"].append(timed(lambda by_trl=by_trl: read_all(by_trl.with_format("torch")))[0])
            training = data._train
            shutil.rmtree(cache)
    same = same_bins(np.asarray([len(ids) for ids in tokenised["input_ids"]]), by_trl["seq_lengths"])
    return {
        **{f"{key}_s": statistics.median(values) for key, values in seconds.items()},
        "ratio": ratio(seconds["ours"], seconds["trl"]),
        "packing_ratio": ratio(seconds["our_packing"], seconds["trl_packing"]),
        "reading_ratio": ratio(seconds["our_reading"], seconds["trl_reading"]),
        "tokens": int(training.lengths.sum()),
        "sequences": len(training),
        "filled": float(training.lengths.mean() / LENGTH),
        "trl_tokens": int(sum(map(sum, by_trl["seq_lengths"]))),
        "trl_sequences": len(by_trl),
        "trl_filled": float(np.mean([sum(row) for row in by_trl["seq_lengths"]]) / LENGTH),
        "batches_with_the_same_bins": same,
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return by how much longer this package takes, in the middle of all rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ours(path: Path, name: str, cache: Path) -> FineTuneData:
    """Tokenise and pack a file."""
    data = FineTuneData(name, path=str(path), max_length=LENGTH, validation_share=0.0, cache_dir=str(cache))
    data.setup("fit")
    return data


def table_for_trl(kind: str, rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows in a form that TRL knows."""
    from datasets import Dataset

    if kind == "text":
        return Dataset.from_list([{"text": row["text"]} for row in rows])
    made = []
    for row in rows:
        question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        prompt = [{"role": "user", "content": question}]
        made.append({"prompt": prompt, "completion": [{"role": "assistant", "content": row["output"]}]})
    return Dataset.from_list(made)


def tokenised_by_trl(table: Any, tokenizer: Any) -> Any:
    """Tokenise as ``SFTTrainer`` does."""
    from datasets import disable_caching
    from trl import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    disable_caching()
    asked = SFTConfig(output_dir="unused", max_length=LENGTH, packing=False, bf16=False, report_to="none", use_cpu=True)
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, _is_vlm=False, assistant_only_loss=False, completion_only_loss=None, chat_template=None
    )
    return SFTTrainer._prepare_dataset(trainer, table, tokenizer, asked, False, None, "bench")


def packed_by_trl(tokenised: Any) -> Any:
    """Pack as ``SFTTrainer`` does."""
    from trl import pack_dataset

    columns = [name for name in ("input_ids", "completion_mask") if name in tokenised.column_names]
    return pack_dataset(tokenised.select_columns(columns), LENGTH, "bfd", {"batch_size": TRL_BATCH})


def packed_by_us(tokenised: Any) -> Sequences:
    """Pack the rows that TRL has tokenised."""
    documents = Documents(tokenised, ids="input_ids", labels="input_ids")
    pieces, _ = pieces_of(documents, np.arange(len(documents)), LENGTH)
    return packed(documents, pieces, LENGTH)


def read_all(sequences: Any) -> None:
    """Have the tensors of every sequence made."""
    for number in range(len(sequences)):
        sequences[number]


def same_bins(lengths: Any, theirs: Sequence[list[int]]) -> list[int]:
    """Return of how many of TRL's batches the bins are the same, and of how many there are."""
    rest, same, batches = list(theirs), 0, 0
    for begin in range(0, len(lengths), TRL_BATCH):
        part = np.minimum(lengths[begin : begin + TRL_BATCH], LENGTH)
        bins = [[int(part[item]) for item in items] for items in bins_of(part.tolist(), LENGTH)]
        of_trl, rest = rest[: len(bins)], rest[len(bins) :]
        same += bins == [list(row) for row in of_trl]
        batches += 1
    return [same, batches]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds ``work`` takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


if __name__ == "__main__":
    raise SystemExit(main())
