"""Algorithm 1 of MemFerry (2024), as printed and corrected, to compare with the optimum.

Layers have at most one weight; those without are the paper's computations between layers, ``A_{l,l+1}``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload.plan.papers.memferry.model import CopiedWeights, MemFerryLayer, MemFerryWeight


def algorithm_1_as_printed(layers: Sequence[MemFerryLayer]) -> CopiedWeights:
    """Return which weights algorithm 1 of MemFerry (2024) copies, if its lines are followed to the letter.

    Line 3 compares with ``T_FP + max(T_trans, 0)``, as if every copy were waited for in full; the text's criterion
    needs ``T_trans - T_res``. Line 20 begins at ``tag``, which is -1 as long as no copy has been hidden (the first
    layer is meant here), ends with ``l``, whose mode line 13 overwrites, and changes layers that are read directly
    already. Line 24 does not add ``T_FP^H - T_FP`` to ``T_all^b`` after a change. Line 30 adds ``base`` to ``T_all``,
    although ``base`` is the new total, and the rest of the reserve to ``T_res``, although it is the new reserve: the
    believed times grow without bound, and later copies all look hidden.
    """
    total = reserve = 0.0
    tag = -1
    copied = [False] * len(layers)
    for at, layer in enumerate(layers):
        if not layer.weights:
            total, reserve = total + layer.forward_s, reserve + layer.forward_s
            continue
        transfer, on_device, zero_copy = _times(layer)
        if zero_copy <= on_device + max(transfer, 0.0):
            total, reserve = total + zero_copy, reserve + zero_copy
            continue
        copied[at] = True
        if transfer < reserve:
            tag = at if tag == -1 else tag
            total, reserve = total + on_device, reserve + on_device - transfer
            continue
        base, left = total + transfer + on_device - reserve, reserve
        for i in range(max(tag, 0), at + 1):
            if not layers[i].weights:
                continue
            gain = _gain(layers[i])
            after = max(transfer - left - gain, 0.0) + total + layers[i].weights[0].forward_s + on_device
            if after < base:
                copied[i], tag = i == at, i + 1  # line 13 copies layer l in any case
                base, left = after, left + gain
                if left >= transfer:
                    break
        total, reserve = total + base, reserve + max(left - transfer, 0.0) + on_device
    return _decisions(layers, copied)


def algorithm_1_corrected(layers: Sequence[MemFerryLayer]) -> CopiedWeights:
    """Return which weights the algorithm copies without the errors named in :func:`algorithm_1_as_printed`."""
    total = reserve = 0.0
    tag: int | None = None
    copied = [False] * len(layers)
    for at, layer in enumerate(layers):
        if not layer.weights:
            total, reserve = total + layer.forward_s, reserve + layer.forward_s
            continue
        transfer, on_device, zero_copy = _times(layer)
        wait = max(transfer - reserve, 0.0)
        if zero_copy <= on_device + wait:
            total, reserve = total + zero_copy, reserve + zero_copy
            continue
        copied[at] = True
        tag = at if tag is None else tag
        if wait == 0:
            total, reserve = total + on_device, reserve + on_device - transfer
            continue
        base = total + wait + on_device
        for i in range(tag, at):
            if not copied[i] or layers[i].weights[0].forward_s == float("inf"):
                continue
            gain, longer = _gain(layers[i]), layers[i].weights[0].forward_s
            after = max(transfer - reserve - gain, 0.0) + total + longer + on_device
            if after < base:
                copied[i], tag = False, i + 1
                base, total, reserve = after, total + longer, reserve + gain
                if reserve >= transfer:
                    break
        total, reserve = base, max(reserve - transfer, 0.0) + on_device
    return _decisions(layers, copied)


def _times(layer: MemFerryLayer) -> tuple[float, float, float]:
    weight: MemFerryWeight
    (weight,) = layer.weights
    return weight.transfer_s, layer.forward_s, layer.forward_s + weight.forward_s


def _gain(layer: MemFerryLayer) -> float:
    """Return by how much the reserve grows if the layer's weight is read directly instead of copied."""
    return layer.weights[0].transfer_s + layer.weights[0].forward_s


def _decisions(layers: Sequence[MemFerryLayer], copied: Sequence[bool]) -> CopiedWeights:
    return tuple(tuple(one for _ in layer.weights) for layer, one in zip(layers, copied, strict=True))
