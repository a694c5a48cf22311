"""Hardware events of seed 003's own lines, entered at the step they happened, and nodes that stay out of the pool."""

import json
from datetime import UTC, datetime

import pytest

from chronicle.audit.hardware import parse_kernel_log, parse_nvidia_smi
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.admission import LaunchRefused, ensure_node_in_use, ensure_startable, find_excluded
from chronicle.launch.provenance import host_name
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

# seed 003, lines 80 and 159
XID_63 = (
    "Xid errors on instance: ip-26-0-146-100, Error: May 19 07:08:57 ip-26-0-146-100 kernel: [680111.646286] NVRM: "
    "Xid (PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row marked for remapping, reset gpu to activate"
)
XID_64 = (
    "Xid errors on instance: ip-26-0-147-135, Error: May 29 01:37:38 ip-26-0-147-135 kernel: [257087.812628] NVRM: "
    "Xid (PCI:0000:90:1c): 64, ..."
)
SMI = """\
GPU 00000000:10:1C.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    ECC Errors
        Volatile
            SRAM Correctable              : 3
            DRAM Uncorrectable            : 2
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 1
        Pending                           : Yes
        Remapping Failure Occurred        : No
GPU 00000000:90:1C.0
    ECC Errors
        Volatile
            DRAM Uncorrectable            : 0
"""


def test_lines_of_the_seed_are_read_with_host_device_time_and_meaning():
    first, second = parse_kernel_log([XID_63, "no xid here", XID_64], year=2023)
    assert (first.host, first.device, first.xid, first.serious) == ("ip-26-0-146-100", "0000:10:1c", 63, False)
    assert first.time == datetime(2023, 5, 19, 7, 8, 57)
    assert first.text.startswith("ECC page retirement or row remapping recorded (pid=1850, Row Remapper: New row")
    assert (second.host, second.xid, second.serious) == ("ip-26-0-147-135", 64, True)
    assert second.title == (
        "Xid 64 on ip-26-0-147-135: ECC page retirement or row remapping failed to be recorded"
    )


def test_an_xid_that_is_not_in_the_list_is_serious_and_says_so():
    line = "2026-11-20T10:00:00+00:00 n7 kernel: NVRM: Xid (PCI:0000:01:00): 999, something new"
    event = parse_kernel_log([line], year=2020)[0]
    assert event.serious and "unknown Xid" in event.text
    assert event.time == datetime(2026, 11, 20, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "kind", "device", "serious"),
    [
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0)", "ecc", "mc0", True),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "nvme", "nvme0", True),
        ("mlx5_core 0000:17:00.0: device's health compromised - reached miss count", "mlx5", "0000:17:00.0", True),
        ("mlx5_core 0000:17:00.0 ib0: Link down", "mlx5", "0000:17:00.0", True),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "amdgpu", "0000:c1:00.0", True),
        ("Memory cgroup out of memory: Killed process 71 (python) total-vm:1kB", "oom-kill", None, False),
    ],
)
def test_lines_of_other_hardware_are_events_too(line, kind, device, serious):
    (event,) = parse_kernel_log([f"Nov 20 10:00:00 n7 kernel: [12.5] {line}"], year=2026)
    assert (event.kind, event.host, event.device, event.serious) == (kind, "n7", device, serious)


@pytest.mark.parametrize("line", ["EDAC MC0: 1 CE memory read error", "mlx5_core 0000:17:00.0: Link up", "nvme nvme0: 8/0/0"])
def test_lines_of_healthy_hardware_are_no_events(line):
    assert parse_kernel_log([f"Nov 20 10:00:00 n7 kernel: {line}"], year=2026) == []


def test_a_line_of_dmesg_names_no_host_and_gets_the_one_of_this_machine():
    line = "2026-11-20T10:00:00,123456+00:00 NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    event = parse_kernel_log([line], year=2020, host="n3")[0]
    assert (event.host, event.xid, event.time) == ("n3", 79, datetime(2026, 11, 20, 10, tzinfo=UTC))


def test_nvidia_smi_text_gives_uncorrectable_errors_and_remapped_rows():
    events = parse_nvidia_smi(SMI, host="n1")
    assert [(e.kind, e.device, e.serious, e.text) for e in events] == [
        ("ecc", "00000000:10:1c.0", True, "2 uncorrectable errors (DRAM Uncorrectable)"),
        ("remapped-rows", "00000000:10:1c.0", False, "1 rows remapped (Uncorrectable Error)"),
        ("remapped-rows", "00000000:10:1c.0", True, "pending: reset the GPU"),
    ]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunPaths(tmp_path / "logs" / "demo")


def test_event_is_entered_once_at_the_step_that_was_running(demo, tmp_path, capsys):
    start = datetime(2023, 5, 29, 1, 0, 0, tzinfo=UTC).timestamp()
    with MetricsWriter(demo.metrics_path(1)) as log:
        for step in range(16400, 16500):
            log.write(step, {"loss": 2.0}, time=start + 60 * (step - 16400))
    (tmp_path / "kern.log").write_text(f"{XID_63}\n{XID_64}\n")
    assert chronicle(["hardware", "kern.log", "--run", "demo", "--json"]) == 0
    new = json.loads(capsys.readouterr().out)["new"]
    assert [(one["xid"], one["launch"], one["step"]) for one in new] == [(63, None, None), (64, 1, 16437)]
    assert chronicle(["hardware", "kern.log", "--run", "demo"]) == 0
    assert capsys.readouterr().out == "no new hardware event\n"
    assert [entry.step for entry in read_journal(demo).of_kind("hardware")] == [None, 16437]


def test_excluded_node_refuses_a_launch_until_it_is_readmitted(demo, capsys):
    """Seed 003, exp3: "Getting Xid 64 again - the bad node wasn't removed from the pool"."""
    assert chronicle(["hardware", "--exclude", host_name(), "--reason", "Xid 64", "--run", "demo"]) == 0
    assert chronicle(["exclude-node", "n2", "--run", "demo"]) == 0
    capsys.readouterr()
    assert chronicle(["hardware", "--excluded", "--run", "demo"]) == 0
    assert capsys.readouterr().out == f"{host_name()},n2\n"
    with pytest.raises(LaunchRefused, match="Xid 64"):
        ensure_node_in_use(read_journal(demo))
    ensure_startable(demo, read_journal(demo), now=0.0)  # what rollbacks ask: they may be made on any node
    assert chronicle(["hardware", "--readmit", host_name(), "--run", "demo"]) == 0
    ensure_node_in_use(read_journal(demo))
    assert chronicle(["hardware", "--readmit", "n9", "--run", "demo"]) == 2
    assert chronicle(["hardware", "--exclude", "n9", "--readmit", "n9", "--run", "demo"]) == 2
    assert chronicle(["hardware", "--exclude", "../n9", "--run", "demo"]) == 2


def test_a_note_about_hardware_excludes_nobody(demo):
    with JournalWriter(demo) as writer:
        writer.append("hardware", title="Xid 64 on n1", data={"host": "n1", "xid": 64})
    assert find_excluded(read_journal(demo).entries) == {}
