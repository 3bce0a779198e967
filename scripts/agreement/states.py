"""Whether moments of fewer bits train as full ones do: ours, and the 8-bit AdamW of bitsandbytes and torchao.

    pip install bitsandbytes; pip install --no-deps torchao
    python -m scripts.agreement.states [--steps 300]

A small Llama with float32 weights learns the documentation, byte by byte: all begin with the same weights and see the
same
batches. What is not installed is left out. The result is results/states.json: means of the loss over fifths of
the training, and how far each loss is from that of ``torch.optim.AdamW``, as the mean of the distances.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_offload
from scripts.common import arguments, save, versions

Make = Callable[[list[nn.Parameter]], Optimizer]
_SIZE, _LENGTH, _FIFTHS = 4, 64, 5
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def optimizers() -> Iterator[tuple[str, Make]]:
    """Yield names, and what makes each optimizer; the first is what the others are compared with."""
    yield "torch AdamW", lambda found: torch.optim.AdamW(found, fused=True, **_OPTIONS)
    yield "lt_offload, bfloat16", lambda found: lt_offload.AdamW(found, state_dtype="bfloat16", **_OPTIONS)
    yield "lt_offload, 8 bits", lambda found: lt_offload.AdamW(found, state_dtype="8bit", **_OPTIONS)
    if importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim import AdamW8bit

        yield "bitsandbytes AdamW8bit", lambda found: AdamW8bit(found, **_OPTIONS)
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit as OfTorchao

        yield "torchao AdamW8bit", lambda found: OfTorchao(found, **_OPTIONS)


def batches(steps: int) -> list[Tensor]:
    """Return batches of the documentation's bytes."""
    files = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - _LENGTH, (steps, _SIZE), generator=generator)
    return [torch.stack([text[start : start + _LENGTH] for start in row]) for row in starts.tolist()]


def losses(make: Make, found: list[Tensor]) -> list[float]:
    """Return the loss of every step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=_LENGTH, **sizes)).train()
    optimizer = make(list(model.parameters()))
    seen = []
    for ids in found:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


def main() -> None:
    """Train with each, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    found = batches(options.steps)
    rows: list[dict[str, Any]] = []
    reference: list[float] = []
    part = max(1, options.steps // _FIFTHS)
    for name, make in optimizers():
        seen = losses(make, found)
        reference = reference or seen
        means = [statistics.mean(seen[start : start + part]) for start in range(0, part * _FIFTHS, part)]
        distance = statistics.mean(abs(a - b) for a, b in zip(seen, reference, strict=True))
        rows.append({"name": name, "losses": means, "distance": distance})
        print(f"{name:24s} {' '.join(f'{mean:.4f}' for mean in means)}   {distance:.4f} from the first", flush=True)
    known = [name for name in ("bitsandbytes", "torchao") if importlib.util.find_spec(name) is not None]
    figures = {"rows": rows, "versions": versions(*known)}
    print(save("states", "states", {"steps": options.steps, "batch": [_SIZE, _LENGTH]}, figures, options.results))


if __name__ == "__main__":
    main()
