"""What all tests share: the same generated examples in every run, and groups for tests that run on several workers.

HYPOTHESIS_PROFILE=explore asks for new examples. `make test` runs pytest-xdist with `--dist loadgroup`: tests of one group
run one after the other on one worker. A test that names no group gets one here.
"""

import os
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

TESTS = Path(__file__).parent
GIB = 1 << 30
# Tests that take more than one core, or time limits that another such test would break; a folder or a file of `tests/`.
GROUPS = {
    "ranks": (
        "bit_transformer/test_accelerate_launch.py", "bit_transformer/test_exact_resume.py", "bit_transformer/test_launches.py",
        "bit_transformer/test_refusals.py", "bit_transformer/test_summary.py", "bit_transformer/test_trial.py",
        "bit_transformer/test_watched_runs.py", "bit_transformer/test_world_size.py", "bit_transformer/test_zero.py",
        "e2e/test_autopilot.py", "e2e/test_main_job.py", "e2e/test_run_feeds_mlflow.py", "experiments/test_ci_profile.py",
        "guard/test_both_ways.py", "guard/test_honours.py", "guard/test_ranks.py", "incidents/test_launch_topology.py",
        "rollback/test_formats_sharded.py", "rollback/test_rollback_ddp.py",
    ),
    # processes that are tagged, signalled, swept; ports; SLURM
    "launches": ("launch", "preflight", "experiments/test_slurm_array.py", "experiments/test_launching.py"),
    # limits on seconds or memory, and several GB of it
    "measured": (
        "attacks", "commands/test_start_up.py", "rollback/test_rollback_large.py", "rollback/test_torch_file.py",
        "guard/test_tensors.py",
    ),
    "servers": ("commands/test_mlflow_mirror.py", "commands/test_mlflow_server.py", "report"),
}  # fmt: skip
CORES_PER_RANKS_GROUP = 4  # on a larger machine several tests with ranks may run at the same time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker for each core that this process may use, as far as memory allows 2 GiB each."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(num_cores(), memory // (2 * GIB)))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its group: that of the table, else its file where tests share a fixture of the file, else none."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            group = group_of(item.path.relative_to(TESTS)) or (item.path.name if shares_a_fixture(item) else None)
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(group))


def group_of(path: Path) -> str | None:
    """The group that the table names for a file."""
    for group, places in GROUPS.items():
        if path.as_posix() in places or path.parts[0] in places:
            if group != "ranks":
                return group
            return f"ranks-{zlib.crc32(path.name.encode()) % max(1, num_cores() // CORES_PER_RANKS_GROUP)}"
    return None


def shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the test's own folder or file is made once for several tests."""
    found = getattr(item, "_fixtureinfo", None)
    definitions = (one[-1] for one in found.name2fixturedefs.values()) if found else ()
    return any(one.baseid.startswith("tests/") and one.scope != "function" for one in definitions)
