"""How large `report.html` of a long run is, and how long a browser needs from opening it to the first plot drawn.

    python -m benchmarks.story.page_open [STEPS] [LAUNCHES]      default 500000 13; needs Chromium
"""

import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from chronicle.journal import JournalWriter
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.report.html import render_html
from chronicle.story import read_story
from chronicle.story.read import lost_seconds
from chronicle.story.series import read_series
from tests.report.devtools import browser

CHANNELS = 6  # beside loss and lr
OVERLAP = 0.05  # of a launch is abandoned
WATCH = """<script>
const drawn = new MutationObserver(() => {
  const plot = document.getElementById("plot-lineage");
  if (!plot.querySelector("svg.chart path")) return;
  drawn.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const [load] = performance.getEntriesByType("navigation");
    window.opened = { drawn: performance.now(), parsed: load.domInteractive };
  }));
});
drawn.observe(document.getElementById("plot-lineage"), { childList: true, subtree: true });
</script>"""


def make_run(paths: RunPaths, steps: int, launches: int) -> None:
    """Launches that each go back a twentieth of their length; an incident before each rollback."""
    chance, each = random.Random(0), steps // launches
    with JournalWriter(paths) as journal:
        start = 0
        for number in range(1, launches + 1):
            last = start + each
            journal.append("launch.start", launch=number, data={"start_step": start, "argv": ["train"]})
            with MetricsWriter(paths.metrics_path(number)) as log:
                for step in range(start + 1, last + 1):
                    loss = 1.5 + 3 * math.exp(-step / 50_000) + chance.gauss(0, 0.05)
                    extra = {f"loss/{c}": loss + chance.gauss(0, 0.1) for c in range(CHANNELS)}
                    log.write(step, {"loss": loss, "lr": 1e-4, **extra}, time=1_700_000_000.0 + number * each + step)
            for step in range(start + 1000, last, 1000):
                journal.append("checkpoint", launch=number, step=step, data={"path": f"checkpoints/opt_step-{step}"})
            event = {"kind": "divergence", "tier": "propose", "onset_step": last - 100, "onset_low_step": last - 200}
            journal.append("incident", launch=number, step=last - 100, title=f"divergence in launch {number}", data=event)
            journal.append("launch.end", launch=number, step=last, data={"exit_code": 0, "last_step": last})
            start = last - int(OVERLAP * each)
            if number < launches:
                journal.append("rollback.receipt", step=start, title=f"rollback to {start}", data={"lr_ratio": 0.9})


def open_page(page: Path, profile: Path) -> dict[str, float]:
    """Milliseconds since navigation began, as the browser itself counts them, in real time."""
    with browser(profile) as running:
        tab = running.open(page.as_uri())
        tab.until("window.opened !== undefined")
        figures: dict[str, float] = tab.value("window.opened")
    return figures


def main(steps: int, launches: int) -> None:
    """Build, render, open five times, print."""
    with tempfile.TemporaryDirectory() as directory:
        paths = RunPaths(Path(directory) / "logs" / "long")
        make_run(paths, steps, launches)
        begun = time.process_time()
        story = read_story(paths, signs_of_life=False)
        series = read_series(paths, [launch.number for launch in story.launches])
        html = render_html(story, series, lost_seconds=lost_seconds(story, paths))
        made = time.process_time() - begun
        page = Path(directory) / "report.html"
        page.write_text(html.replace("</body>", f"{WATCH}</body>"), encoding="utf-8")
        print(f"{steps} steps, {launches} launches, {CHANNELS + 2} channels")
        print(f"page {len(html.encode()) / 1e6:.2f} MB")
        print(f"made in {made:.1f} s CPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        opened = [open_page(page, Path(directory) / f"profile-{number}") for number in range(5)]
        for name, words in (("parsed", "page parsed"), ("drawn", "first plot drawn")):
            figures = sorted(one[name] for one in opened)
            print(f"{words:<18} median {figures[2]:6.0f} ms   least {figures[0]:6.0f}   most {figures[-1]:6.0f}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [500_000, 13][len(numbers) :]))
