"""A few of the models that ``python -m scripts.breadth`` trains, of each family some."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.breadth.models import FAMILIES, compare

KINDS = {
    "causal": ("deepseek_v4", "jamba", "gemma4_text", "olmo_hybrid", "llama4"),
    "masked": ("bert", "esm", "deberta-v2", "tapas"),
    # Here with tables of positions in each layer; layers of two kinds in turn.
    "seq2seq": ("t5", "umt5", "pegasus_x", "bart"),
    "images": ("vit", "deit", "swin"),
}
LONGER = {
    "seq2seq": ("prophetnet",),  # with embeddings used beside their call
    # Here with skips from the first half to the second, and with embeddings in dictionaries.
    "diffusion": ("hunyuan-dit", "z-image"),
    "sentences": ("bert", "bert by SentenceTransformerTrainer"),
}


def _rows(kinds: dict[str, tuple[str, ...]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(family, kind, marks=marks) for family in kinds for kind in kinds[family]]


@pytest.mark.parametrize(("family", "kind"), _rows(KINDS) + _rows(LONGER, pytest.mark.slow))
def test_models_train_as_they_are(family: str, kind: str) -> None:
    ended = {run.budget: run for run in compare(family, kind)}
    expected = {"smallest": "equal", "recomputing": "equal"}
    assert {budget: run.outcome for budget, run in ended.items()} == expected | (
        {"from configuration": "planned"} if family == "causal" else {}
    ), ended


def test_families_are_those_of_transformers() -> None:
    assert all(len(family.kinds()) > 20 for family in FAMILIES.values() if family.library == "transformers")
