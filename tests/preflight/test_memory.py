"""What a host can still give: the kernel's own figure, or less where a control group has a limit."""

from pathlib import Path

import pytest

from chronicle.preflight import available_memory

GB = 10**9


def _host(root: Path, *, available_kb: int | None, group: str = "/a/b", limits: dict[str, tuple[str, int, int]]) -> int | None:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    if available_kb is not None:
        (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kb} kB\nHugePages_Total: 0\n")
    (proc / "self/cgroup").write_text(f"1:name=systemd:/old\n0::{group}\n")
    for place, (limit, used, cache) in limits.items():
        directory = cgroups / place
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return available_memory(proc=proc, cgroups=cgroups)


@pytest.mark.parametrize(("limits", "expected"), [
    ({}, 16 * GB),
    ({"a/b": ("max", 3 * GB, 0)}, 16 * GB),
    ({"a/b": (str(8 * GB), 3 * GB, GB)}, 6 * GB),  # file cache is given back
    ({"a": (str(4 * GB), 3 * GB, 0), "a/b": (str(8 * GB), 3 * GB, 0)}, GB),  # the parent's limit is the narrower
    ({"": (str(2 * GB), 0, 0)}, 2 * GB),  # a container sees its own group as the root
    ({"other": (str(GB), 0, 0)}, 16 * GB),
])
def test_the_narrowest_of_host_and_groups(tmp_path: Path, limits: dict[str, tuple[str, int, int]], expected: int) -> None:
    """Every group from the process's own up to the root counts."""
    assert _host(tmp_path, available_kb=16 * GB // 1024, limits=limits) == expected


def test_nothing_to_read_is_unknown(tmp_path: Path) -> None:
    """No `/proc`, no figure: never assumed."""
    assert available_memory(proc=tmp_path / "none", cgroups=tmp_path / "none") is None
    assert _host(tmp_path, available_kb=None, limits={}) is None


def test_this_host_has_something_left() -> None:
    """The real files of the machine that runs the tests."""
    found = available_memory()
    assert found is not None and 10**7 < found < 10**14
