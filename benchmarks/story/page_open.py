"""How large `report.html` of a long run is, and how long a browser needs from opening it to the first plot drawn.

    python benchmarks/story/page_open.py [STEPS] [LAUNCHES]      default 500000 13; needs Chromium and plotly
"""

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chronicle.journal import JournalWriter
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.report.costs import lost_seconds
from chronicle.report.html import plotly_script, render_html
from chronicle.story import read_story
from chronicle.story.series import read_series

CHANNELS = 6  # beside loss and lr
OVERLAP = 0.05  # of a launch is abandoned
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MILLISECONDS = 60_000
EMPTY = """<script>console.log("OPENED " + JSON.stringify({ drawn: 0, parsed: 0 }))</script>"""
WATCH = """<script>
const drawn = new MutationObserver(() => {
  const plot = document.getElementById("plot-lineage");
  if (!plot.querySelector(".scatterlayer .trace")) return;
  drawn.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const [load] = performance.getEntriesByType("navigation");
    console.log("OPENED " + JSON.stringify({ drawn: performance.now(), parsed: load.domInteractive }));
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
    """Milliseconds since navigation began, as the browser itself counts them."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
    command += [f"--user-data-dir={profile}", f"--timeout={WAIT_MILLISECONDS}", "--enable-logging=stderr", "--dump-dom"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = re.search(r"OPENED (\{.*?\})", done.stderr)
    if found is None:
        raise SystemExit(f"no plot was drawn within {WAIT_MILLISECONDS / 1000:g} s")
    figures: dict[str, float] = json.loads(found[1].replace('\\"', '"'))
    return figures | {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main(steps: int, launches: int) -> None:
    """Build, render, open five times, print."""
    with tempfile.TemporaryDirectory() as directory:
        paths, script = RunPaths(Path(directory) / "logs" / "long"), plotly_script()
        make_run(paths, steps, launches)
        begun = time.process_time()
        story = read_story(paths, signs_of_life=False)
        series = read_series(paths, [launch.number for launch in story.launches])
        html = render_html(story, series, script=script, lost_seconds=lost_seconds(story, paths))
        made = time.process_time() - begun
        page = Path(directory) / "report.html"
        page.write_text(html.replace("</body>", f"{WATCH}</body>"), encoding="utf-8")
        mine, library = len(html.encode()) - len(script.encode()), len(script.encode())
        print(f"{steps} steps, {launches} launches, {CHANNELS + 2} channels")
        print(f"page {mine / 1e6:.2f} MB + library {library / 1e6:.2f} MB")
        print(f"made in {made:.1f} s CPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        empty = Path(directory) / "empty.html"
        empty.write_text(EMPTY, encoding="utf-8")
        nothing = open_page(empty, Path(directory) / "profile-empty")["cpu"]
        opened = [open_page(page, Path(directory) / f"profile-{number}") for number in range(5)]
        more = min(one["cpu"] for one in opened) - nothing
        print(f"CPU of the whole browser {more:.2f} s more than for an empty page (least of five)")
        for name, words in (("parsed", "page parsed"), ("drawn", "first plot drawn")):
            figures = sorted(one[name] for one in opened)
            print(f"{words:<18} median {figures[2]:6.0f} ms   least {figures[0]:6.0f}   most {figures[-1]:6.0f}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [500_000, 13][len(numbers) :]))
