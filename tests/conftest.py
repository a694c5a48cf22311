"""What all tests share: the same generated examples in every run, and groups for tests that run on several workers.

HYPOTHESIS_PROFILE=explore asks for new examples. `make test` runs pytest-xdist: the tests of a file run one after the other
on one worker, because they may share a fixture, and so do the files of one group of the table below.
"""

import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

os.environ["TZ"] = "UTC"  # times are shown in the local zone
time.tzset()
os.environ.pop("COLUMNS", None)  # `status` fits that many columns; what is read here is whole lines

GIB = 1 << 30
MEMORY_DISK = Path("/dev/shm")
MEMORY_DISK_ROOM = 10 * GIB


def use_memory_disk() -> None:
    """Put the directories of tests in memory where there is room: thousands of fsync calls keep a disk busy for minutes."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ:
        return
    if not os.access(MEMORY_DISK, os.W_OK | os.X_OK):
        return
    room = min(shutil.disk_usage(MEMORY_DISK).free, available_bytes())
    if room >= MEMORY_DISK_ROOM:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY_DISK)


# Tests that take more than one core, or time limits that another such test would break; a folder or a file of `tests/`.
GROUPS = {
    "ranks": (
        "bit_transformer/test_accelerate_launch.py", "bit_transformer/test_exact_resume.py", "bit_transformer/test_launches.py",
        "bit_transformer/test_refusals.py", "bit_transformer/test_summary.py", "bit_transformer/test_rehearsal.py",
        "bit_transformer/test_watched_runs.py", "bit_transformer/test_world_size.py", "bit_transformer/test_zero.py",
        "e2e/test_autopilot.py", "e2e/test_main_job.py", "e2e/test_run_feeds_mlflow.py", "experiments/test_ci_profile.py",
        "guard/test_both_ways.py", "guard/test_honours.py", "guard/test_ranks.py", "incidents/test_launch_topology.py",
        "rollback/test_formats_sharded.py", "rollback/test_rollback_ddp.py",
    ),
    # processes that are tagged, signalled, swept; ports; SLURM
    "launches": ("launch", "preflight", "experiments/test_launching.py"),
    # limits on seconds or memory, and several GB of it
    "measured": (
        "attacks", "commands/test_start_up.py", "rollback/test_rollback_large.py", "rollback/test_torch_file.py",
        "guard/test_tensors.py",
    ),
    "servers": ("commands/test_mlflow_mirror.py", "commands/test_mlflow_server.py", "report"),
}  # fmt: skip
CORES_PER_RANKS_GROUP = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker for each core that this process may use, as far as memory allows 2 GiB each."""
    return max(1, min(num_cores(), available_bytes() // (2 * GIB)))


def available_bytes() -> int:
    """Memory that new processes may take, as Linux tells it; elsewhere enough."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 1 << 50


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


use_memory_disk()

DATA = Path(os.environ.get("CHRONICLE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
NEEDS_DATA = "importers/test_data_of_others.py"
collect_ignore = [] if DATA.is_dir() else [NEEDS_DATA]


def pytest_report_header() -> list[str]:
    """What cannot be tested here at all."""
    return [f"not collected: tests/{one}, whose data are not beside this checkout" for one in collect_ignore]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by group. Not by marks and `--dist loadgroup`: under pytest 9.2 xdist 3.8 loses the groups without a word."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the order of collection starts the two longest groups first

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return GroupScheduling(config, log)


def group_of(file: str) -> str:
    """The group of a test file, named from the root: that of the table, else a group of its own."""
    place = file.removeprefix("tests/")
    for group, places in GROUPS.items():
        if place in places or place.partition("/")[0] in places:
            return group if group != "ranks" else f"ranks-{zlib.crc32(file.encode()) % num_ranks_groups()}"
    return file


def num_ranks_groups() -> int:
    """How many tests with several ranks may run at the same time on this machine."""
    return max(1, num_cores() // CORES_PER_RANKS_GROUP)
