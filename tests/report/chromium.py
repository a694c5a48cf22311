"""A real browser without a window: its DOM after the scripts ran, what it said on the console, a screenshot."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
VIRTUAL_MILLISECONDS = 20_000  # six were too few on a busy machine
NUM_VISITS = 5


@dataclass(frozen=True)
class Visit:
    dom: str
    console: list[str]


def visit(page: Path, profile: Path, *flags: str) -> Visit:
    """Open the page, let twenty virtual seconds pass, return the DOM.

    Plots are drawn when they come into view, which the browser decides when it makes a frame. Its virtual clock does not wait
    for one: of 36 visits on a busy machine 3 ended before the first frame (2026-11-23). Such a visit is made again.
    """
    for _ in range(NUM_VISITS):
        done = _start(page, profile, "--dump-dom", *flags)
        if "data-drawn" in done.stdout or 'class="plot"' not in done.stdout:
            break
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def screenshot(page: Path, profile: Path, picture: Path, *flags: str) -> bytes:
    _start(page, profile, f"--screenshot={picture}", *flags)
    return picture.read_bytes()


def _start(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--window-size=1280,9000", f"--virtual-time-budget={VIRTUAL_MILLISECONDS}"]
    command += ["--enable-logging=stderr", "--v=0", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
