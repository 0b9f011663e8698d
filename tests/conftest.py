"""Fixtures: the device, and a fresh seed for every run. GPU tests skip without a GPU.

FLASHBPT_TEST_SEED=N repeats a run; the seed stands in the header and, for a failed test, in its
captured output. `--gpu-report FILE` records what ran on a GPU: its name, versions, counts, and the
git tree hash of the csrc that was tested.
"""

import importlib
import json
import os
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.git_tree import git_tree

# Where torch's deterministic algorithms are asked for, its own matrix products need this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
SEED = int(os.environ.get("FLASHBPT_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
DEVICES = ["cpu"] + (
    [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
)


def pytest_addoption(parser):
    parser.addoption("--gpu-report", metavar="FILE", help="write what ran on the GPU to FILE")


def pytest_configure(config):
    worker = getattr(config, "workerinput", None)  # of pytest-xdist; its reports come together
    if worker:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // worker["workercount"]))
    if (path := config.getoption("--gpu-report")) and not worker:
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-report needs a GPU, and torch sees none")
        config.pluginmanager.register(GpuReport(path), "gpu-report")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


class GpuReport:
    """Counts the outcomes of all tests and of those marked gpu; writes them with the versions."""

    def __init__(self, path):
        self.path = Path(path)
        self.counts = {"all": Counter(), "gpu": Counter()}

    def pytest_runtest_logreport(self, report):
        # One outcome a test: its call, or the set-up or tear-down that kept the call from deciding.
        if report.when == "call" or (report.when == "setup" and not report.passed) or report.failed:
            outcome = report.outcome if report.when == "call" or report.skipped else "error"
            self.counts["all"][outcome] += 1
            if "gpu" in report.keywords:
                self.counts["gpu"][outcome] += 1

    def pytest_sessionfinish(self):
        gpu = torch.cuda.get_device_properties(0)
        facts = {
            "gpu": gpu.name,
            "capability": f"sm_{gpu.major}{gpu.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "csrc": git_tree(Path(__file__).parents[1] / "csrc"),
            "tests": {name: dict(sorted(n.items())) for name, n in self.counts.items()},
        }
        self.path.write_text(json.dumps(facts, indent=2) + "\n")


def pytest_report_header(config):
    return f"FLASHBPT_TEST_SEED={SEED} torch {torch.__version__}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds torch from the run's seed and the test's name, so that a single test repeats alone."""
    print(f"repeat with FLASHBPT_TEST_SEED={SEED}")
    value = (SEED + zlib.crc32(request.node.nodeid.encode())) & 0x7FFFFFFF
    torch.manual_seed(value)
    return value


def cuda_or_skip():
    import flashbpt

    if flashbpt._C.build_info()["cuda"] is None:
        pytest.skip("this build has no CUDA part")
    return "cuda"


@pytest.fixture(params=DEVICES)
def device(request):
    """ "cpu", and "cuda" where there is a GPU."""
    return cuda_or_skip() if request.param == "cuda" else request.param


@pytest.fixture
def cuda():
    """The device of tests that are marked gpu."""
    return cuda_or_skip()


@pytest.fixture
def big(cuda):
    """big(gigabytes) skips where less is free. One such test at a time, of all workers of xdist;
    what it held goes back when it ends.
    """
    import fcntl

    def need(gigabytes):
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gigabytes:
            pytest.skip(f"needs {gigabytes} GiB of free GPU memory, there are {free:.0f}")

    with open(Path(tempfile.gettempdir()) / "flashbpt-big-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield need
        torch.cuda.empty_cache()


@pytest.fixture
def small_rows(cuda):
    """Kernels are chosen as where a block has 99 KB of shared memory (sm_86, sm_89, sm_120)."""
    import flashbpt

    flashbpt._C.limit_shared_memory(101376)
    yield
    flashbpt._C.limit_shared_memory(0)


@pytest.fixture
def one_thread():
    """No barriers to wait at on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench():
    """The modules of benchmarks/, by name, as run.py imports them."""
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    former = list(sys.path)
    sys.path.insert(0, str(benchmarks))
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = former
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(benchmarks)):
                del sys.modules[name]


@pytest.fixture(params=["sm80", "auto"])
def sm80_and_faster(request):
    """Calls of the test go to sm80, then to what serves them by default."""
    import flashbpt

    with flashbpt.use_backend(request.param):
        yield


@pytest.fixture
def hopper(cuda):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def forced(hopper):
    """What sm90 does not serve is refused."""
    import flashbpt

    with flashbpt.use_backend("sm90"):
        yield
