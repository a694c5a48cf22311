"""Real launchers, every signal: nothing of ours is left, nothing of others is touched."""

import os
import signal

import pytest

from tests.launch.driver import LAUNCHERS, is_alive

SIGNALS = ("TERM", "INT", "HUP", "USR1", "KILL-launcher", "KILL-supervisor")
SAMPLE = {("python", "TERM"), ("accelerate-1", "INT"), ("torchrun", "KILL-supervisor")}
CELLS = [
    pytest.param(name, how, id=f"{name}-{how}", marks=() if (name, how) in SAMPLE else pytest.mark.slow)
    for name in LAUNCHERS
    for how in SIGNALS
]


@pytest.mark.parametrize("name, how", CELLS)
def test_nothing_of_ours_is_left_and_nothing_of_others_is_touched(driver, decoys, name, how):
    """Issue 6: measured without a supervisor, `deepspeed` and one-process `accelerate` leave every worker behind."""
    mode = "ignore" if how in ("HUP", "KILL-supervisor") else "plain"  # a stubborn rank must not survive either
    pids = driver.start_launcher(name, mode, "--grace", "2")
    assert all(is_alive(pid) for pid in pids)
    if how == "KILL-launcher":
        os.kill(driver.launcher_pid(), signal.SIGKILL)
    elif how == "KILL-supervisor":
        driver.process.kill()
    else:
        driver.process.send_signal(getattr(signal, f"SIG{how}"))
    code = driver.wait()
    if how == "KILL-supervisor":
        assert driver.call("sweep", "--yes").returncode == 0
    else:
        expected = "KILL" if how == "KILL-launcher" else how
        assert code == 128 + getattr(signal, f"SIG{expected}")
        assert driver.entries("launch.end")[-1].data["signal"] == f"SIG{expected}"
    assert driver.left() == []
    assert [pid for pid in pids if is_alive(pid)] == []
    assert all(decoy.poll() is None for decoy in decoys)
