import threading
from _thread import interrupt_main
from collections import deque
from operator import call

import pytest
import torch

from lt_offload.errors import OverBudget
from lt_offload.machine.accounting import Account
from tests.support import models

KB = torch.empty(256).nbytes


def test_new_storages_are_charged_once_and_discharged_when_they_die() -> None:
    with Account() as account:
        a = torch.zeros(256)
        b = a.view(16, 16).t()
        a.add_(1)
        assert account.current == KB
        c = a + 1
        assert account.current == 2 * KB
    del a
    assert account.current == 2 * KB  # b still holds it
    del b, c
    assert account.current == 0
    assert account.peak == 2 * KB
    account.reset_peak()
    assert account.peak == 0


def test_ctrl_c_comes_through_while_storages_die() -> None:
    """Python ignores what is raised in a weak reference's callback."""
    with Account() as account:
        held = [torch.zeros(256)]
        with pytest.raises(KeyboardInterrupt):
            deque(map(call, [interrupt_main, held.clear]), maxlen=0)  # nothing between the two that would notice
    assert account.current == 0


def test_views_and_in_place_results_of_what_was_there_are_free() -> None:
    weight = torch.ones(16, 16, requires_grad=True)
    with Account() as account:
        view = weight.t()
        with torch.no_grad():
            weight.mul_(2)
            weight.detach().view(-1)[3:].zero_()
        assert account.current == 0
        kept = view.contiguous()
        assert account.current == kept.nbytes


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_charged_by_their_parts(layout: torch.layout) -> None:
    dense = torch.eye(8)
    with Account() as account:
        sparse = dense.to_sparse(layout=layout)
        parts = [sparse.indices(), sparse.values()] if layout is torch.sparse_coo else [sparse.values()]
        assert account.current >= sum(part.nbytes for part in parts) > 0
        view = torch.sparse_coo_tensor(torch.arange(8).expand(2, 8), torch.ones(8), (8, 8), check_invariants=False)
        before = account.current
        again = torch.sparse_coo_tensor(
            view._indices(), view._values(), (8, 8), check_invariants=False
        )  # in the memory of those
        assert account.current == before
        del sparse, parts, view, again
        assert account.current == 0


def test_limit_refuses_before_the_allocation_is_kept() -> None:
    account = Account(limit=2 * KB)
    with account:
        kept = torch.zeros(256)
        message = r"aten\.exp.* needs 1.02 kB \(1024 bytes\) .* 2.05 kB of 2.05 kB \(2048 bytes\) are in use"
        with pytest.raises(OverBudget, match=message):
            torch.zeros(256).exp()
        assert account.current == kept.nbytes
        exact = torch.zeros(256)
    assert account.peak == account.limit == kept.nbytes + exact.nbytes


def test_storages_may_die_on_other_threads() -> None:
    account = Account()
    with account:
        tensors = [torch.zeros(256) for _ in range(400)]
    halves = [tensors[:200], tensors[200:]]
    del tensors

    def drop(half: list[torch.Tensor]) -> None:
        while half:
            half.pop()

    threads = [threading.Thread(target=drop, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    with account:
        for _ in range(200):
            torch.zeros(256)
    for thread in threads:
        thread.join()
    assert account.current == 0


def test_addresses_are_reused_without_confusion() -> None:
    with Account() as account:
        for size in range(1, 300):
            kept = torch.zeros(size)
            assert account.current == kept.nbytes
            del kept
    assert account.current == 0
    assert account.peak == 299 * 4


def test_peak_without_some_storages() -> None:
    with Account(timeline=True) as account:
        a = torch.zeros(256)
        b = torch.zeros(512)
        serial = account.serial(b)
        assert serial is not None
        del b
        c = torch.zeros(128)
    assert account.peak == 3 * KB
    assert account.peak_without([serial]) == a.nbytes + c.nbytes
    account.reset_peak()
    del c
    assert account.peak_without([]) == 1.5 * KB
    assert account.peak_holding([]) == 1.5 * KB
    assert account.serial(torch.zeros(1)) is None


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_whole_step_returns_to_the_gradients(family: str) -> None:
    model = models.build(family, dropout=0.1)
    with Account() as account:
        model(**models.batch(model)).loss.backward()
    gradients = {p.grad.untyped_storage().data_ptr(): p.grad.nbytes for p in model.parameters() if p.grad is not None}
    assert account.current == sum(gradients.values())
    model.zero_grad()
    assert account.current == 0


def test_what_a_product_of_four_bits_unpacks_counts_while_it_lasts() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    x, unpacked = torch.ones(2, 64), 64 * 128 * 4 + 2 * 4 * 128
    with Account(timeline=True) as account:
        out = layer(x)
        assert account.current == out.nbytes
        assert account.peak == account.peak_without(()) == out.nbytes + unpacked
    account.limit = unpacked
    with account, pytest.raises(OverBudget, match="gemm_4bit"):
        layer(x)
    assert account.current == out.nbytes
