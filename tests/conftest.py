"""Which device the tests of tests/gpu run on, and how much of large grids. All others than those see no GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests import fake_cuda, sampling
from tests.recomputing import Recomputing

gc.disable()  # until all is imported: looking for garbage meanwhile takes longer than many an import

DEVICES = ("cuda", "fake", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lt_offload")
    group.addoption(
        "--device",
        choices=DEVICES,
        help="run all of tests/gpu: on a GPU, on a fake one, or on the emulated device; without it a few of its tests "
        "run on the emulated device",
    )
    group.addoption(
        "--order",
        default="lazy",
        metavar="ORDER",
        help="when the fake GPU works: lazy (as late as possible), random or random:SEED, eager (at once)",
    )
    _enable_fake(parser)
    group.addoption("--figures", metavar="FILE", help="JSON file for what tests/gpu measures")
    group.addoption("--full", action="store_true", help="all rows of the grids of which a run takes a sample otherwise")
    group.addoption("--every-row", action="store_true", help="all rows of all tests but those grids")
    group.addoption("--few", action="store_true", help="of tests/gpu on the fake GPU: a part of each file")
    group.addoption("--recompute", action="store_true", help="of tests/parity: every plan recomputes all that it can")
    group.addoption("--rows", type=int, metavar="N", default=0, help="no more tests than a sample of so many")
    group.addoption("--sample-seed", type=int, metavar="N", default=sampling.SEED, help="draws the samples")


def _enable_fake(parser: pytest.Parser) -> None:
    """Do it before the next conftest is read, which imports torch; processes that start later have it already."""
    asked = parser.parse_known_args(sys.argv[1:])
    if asked.device != "fake":
        return
    order, _, seed = asked.order.partition(":")
    try:
        fake_cuda.enable(order, seed=int(seed or 0))
    except fake_cuda.BuildError as error:
        pytest.exit(f"--device fake: {error}", returncode=1)


def pytest_report_header(config: pytest.Config) -> str:
    return "grids: all rows" if sampling.FULL else f"grids: a sample by --sample-seed {sampling.SEED}; --full takes all"


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sampling.FULL, sampling.SEED = config.getoption("full"), config.getoption("sample_seed")
    sampling.EVERY_ROW = config.getoption("every_row")
    if config.getoption("recompute"):
        config.pluginmanager.register(Recomputing())
    device = config.getoption("device")
    if device not in ("cuda", "fake"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matrix products are not deterministic
    import torch

    if not torch.cuda.is_available():
        pytest.exit(f"--device cuda: torch {torch.__version__} finds no GPU here", returncode=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that take long some of their rows, without --full."""
    kept = items
    if not config.getoption("every_row"):
        kept = sampling.ordinary(items)
    if count := config.getoption("rows"):
        kept = sampling.some(kept, count)
    left_out = set(items).difference(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def settled_heap() -> None:
    """Leave what imports and earlier modules have made out of every look at the heap, for garbage or for who holds it.

    A process that has run a thousand tests has millions of objects; looking at them takes up to a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def private_cache_of_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave nothing in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data-cache")
        patch.setattr("lt_offload.finetune.data.examples.user_cache", lambda name: folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))  # which takes it when it is imported
        yield


@pytest.fixture(autouse=True)
def no_rank() -> Iterator[None]:
    """Take back what Lightning's launcher leaves in the environment: commands started later would take it for theirs.

    Lightning starts no process where it finds that others do.
    """
    yield
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LT_OFFLOAD_RUN"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let profiles be of one machine, which is measured once and whose lanes share nothing, and each block run once."""
    from lt_offload.schema.profile import Contention
    from tests.support.machine import this_machine

    monkeypatch.setattr("lt_offload.profiling.machine.measure_contention", lambda *args, **kwargs: Contention())
    monkeypatch.setattr("lt_offload.profiling.machine.measure_hardware", lambda *args, **kwargs: this_machine())
    monkeypatch.setattr("lt_offload.profiling.meters._MOST", 1)


@pytest.fixture(autouse=True)
def all_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel update small tensors, too, for which calling torch's takes less time."""
    monkeypatch.setattr("lt_offload.optim.torch_adam._LEAST", 0)


@pytest.fixture(autouse=True)
def no_modes() -> Iterator[None]:
    """See to it that no mode of torch is left behind: all that the process runs later would be other code, compiled."""
    yield
    if "torch" in sys.modules:
        from lt_offload.compat.torch import all_dispatch_modes, all_function_modes

        assert (all_function_modes(), all_dispatch_modes()) == ([], [])
