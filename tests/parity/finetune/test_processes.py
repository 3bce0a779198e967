"""Training in two processes under torch.distributed: the batches and numbers of one process that accumulates two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.finetune.processes import CASES, STEPS, fit, module, result
from tests.parity.several.training import HANG
from tests.support import tiny

Run = dict[str, Any]
LENGTHS = [63, 63, 9, 63, 5, 17, 30, 8, 44, 12, 63, 20, 21, 63, 9, 33, 40, 7, 11, 63, 26, 63, 50, 14, 31, 6]
"""Of rows, so that the last batch that is held out is one process's alone, and the tokens of batches are unlike."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes have left what they saw."""
    folder = tmp_path_factory.mktemp("processes")
    tiny.model(folder / "model")
    rows = (json.dumps({"text": (f"{number} abcdefg " * 8)[:length]}) for number, length in enumerate(LENGTHS))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    # One process stops after four batches, in two updates; two others go on.
    save = "padded-of-one.ckpt"
    fit(folder, "auto", data=CASES["padded"]["data"], max_steps=2, accumulate_grad_batches=2, save=save)
    (folder / f"2-{save}").hardlink_to(folder / f"1-{save}")
    command = [sys.executable, "-m", "tests.parity.finetune.processes", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "cache of ddp").is_dir()
    return folder


def both(folder: Path, case: str) -> tuple[Run, Run]:
    first, second = (torch.load(result(folder, case, rank), weights_only=True) for rank in (0, 1))
    assert equal(first["weights"], second["weights"])
    assert equal(first["losses"], second["losses"]), "they log the loss of all"
    return first, second


def alone(folder: Path, case: str) -> Run:
    """The run of one process that accumulates what two have at once."""
    settings = CASES[case]
    return fit(folder, "auto", **settings | {"accumulate_grad_batches": 2 * settings.get("accumulate_grad_batches", 1)})


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return len(left) == len(right) > 0 and all(equal(a, b) for a, b in zip(left, right, strict=True))


def taking_turns(first: Run, second: Run) -> list[dict[str, Tensor]]:
    """Return the batches of both in the order of one process, which takes none where one of two has no row left."""
    pairs = zip(first["batches"], second["batches"], strict=True)
    return [batch for pair in pairs for batch in pair if (batch["labels"] != -100).any()]


@pytest.mark.long
@pytest.mark.parametrize("case", ["padded", "batches", "streamed"])
def test_two_processes_train_like_one_that_accumulates(folder: Path, case: str) -> None:
    first, second = both(folder, case)
    expected = alone(folder, case)
    assert equal(taking_turns(first, second), expected["batches"])
    if case == "padded":
        assert (second["batches"][5]["labels"] == -100).all(), "21 rows are five pairs of batches and one row"
    assert first["steps"] == expected["steps"] == CASES[case].get("max_steps", STEPS)
    assert equal(first["weights"], expected["weights"])
    assert equal(first["losses"], expected["losses"])


@pytest.mark.long
def test_accumulating_in_both_gives_each_update_the_batches_of_one_process(folder: Path) -> None:
    """Each process adds up its own gradients first, which is another order of additions than that of one process."""
    first, second = both(folder, "accumulated")
    batches = alone(folder, "accumulated")["batches"]
    assert equal(taking_turns(first, second), batches)
    assert len(batches) == 16
    model = module(folder).build()
    groups: list[list[Any]] = [[p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.0} for group in groups], lr=1e-2, betas=(0.9, 0.999), fused=True
    )
    for begin in range(0, len(batches), 4):
        update = batches[begin : begin + 4]
        tokens = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in update) / 2)
        sums = [gradients(model, update[rank::2], tokens) for rank in (0, 1)]
        for parameter, one, other in zip(model.parameters(), *sums, strict=True):
            parameter.grad = one / 2 + other / 2
        optimizer.step()
    assert equal(first["weights"], model.state_dict())


def gradients(model: Any, batches: Sequence[dict[str, Tensor]], tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("case", ["padded", "streamed"])
def test_both_go_on_where_they_stopped(folder: Path, case: str) -> None:
    whole, stopped, resumed = (both(folder, f"{case}{part}") for part in ("", ", stopped", ", resumed"))
    for rank in (0, 1):
        assert equal(stopped[rank]["batches"] + resumed[rank]["batches"], whole[rank]["batches"])
        assert 0 < len(stopped[rank]["batches"]) < len(whole[rank]["batches"])
    assert equal(whole[0]["weights"], resumed[0]["weights"])


@pytest.mark.long
def test_every_held_out_row_counts_once(folder: Path) -> None:
    first, second = both(folder, "padded")
    assert [len(run["held_out"]) for run in (first, second)] == [2 * len(first["val_losses"])] * 2
    expected: list[Tensor] = []
    for begin in range(0, len(first["held_out"]), 2):
        lost, count = torch.tensor(0.0), 0
        for pair in zip(first["held_out"][begin : begin + 2], second["held_out"][begin : begin + 2], strict=True):
            one, other = (loss * tokens if tokens else torch.tensor(0.0) for loss, tokens in pair)
            tokens = sum(tokens for _, tokens in pair)
            lost, count = lost + (one.double() + other.double()) / tokens * tokens, count + tokens
        expected.append(lost / count)
    assert [tokens for _, tokens in second["held_out"]][1::2] == [0] * len(expected), "there are three batches"
    assert len(expected) > 0
    assert equal(first["val_losses"], expected)
    assert equal(second["val_losses"], expected)


@pytest.mark.long
def test_one_process_goes_on_where_two_stopped(folder: Path) -> None:
    """In the middle of an epoch, with what neither has seen; both of them would have had the same updates."""
    first, second = both(folder, "padded")
    [stopped, _] = both(folder, "padded, stopped")
    (folder / "1-padded.ckpt").hardlink_to(folder / "2-padded.ckpt")
    settings = CASES["padded, resumed"] | {"accumulate_grad_batches": 2}
    with pytest.warns(UserWarning, match=r"with the 13 of 21 sequences that were not trained on yet, none twice\. .*"):
        resumed = fit(folder, "auto", **settings)
    assert equal(resumed["batches"], taking_turns(first, second)[2 * len(stopped["batches"]) :])
    assert equal(resumed["weights"], first["weights"])
    assert resumed["steps"] == first["steps"]


@pytest.mark.long
def test_two_processes_go_on_where_one_stopped(folder: Path) -> None:
    first, second = both(folder, "padded, of one")
    whole = alone(folder, "padded")
    assert equal(taking_turns(first, second), whole["batches"][4:])
    assert equal(first["weights"], whole["weights"])
    assert first["steps"] == whole["steps"]


@pytest.mark.long
def test_a_stream_goes_on_with_another_number_of_processes(folder: Path) -> None:
    both(folder, "streamed, stopped")
    whole = alone(folder, "streamed")
    (folder / "1-streamed.ckpt").hardlink_to(folder / "2-streamed.ckpt")
    with pytest.warns(UserWarning, match="of 2 processes, this run has 1: random numbers begin anew$"):
        resumed = fit(folder, "auto", **CASES["streamed, resumed"])
    assert equal(resumed["batches"], whole["batches"][2:5])
