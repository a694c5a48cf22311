"""Resumes that save a scheduler and do not follow it, under `chronicle run` without a guard.

    python -m benchmarks.authorities.adversarial

No file tells that such a script ignores what it saved. Each case trains 40 steps, is rolled back to step 20 with
`--lr-scale 0.5`, and goes on for 50. What counts: the rollback refused, or the launch is at half its old LRs, or the
first LRs that it logs open an incident (`lr-not-as-promised`). Where the rollback refused, it is made again with
`--accept-unproved`: then the log must tell too. It exits 1 when a launch trained at another LR and nothing said so.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import math, operator, os, sys, time
import torch
import chronicle

KIND, HORIZON, SAVED = sys.argv[1], 100, 20
BASE = float(os.environ.get("PEAK", "1e-3"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
cosine = lambda n: 0.55 + 0.45 * math.cos(math.pi * n / HORIZON)


def build(base=BASE):
    layers = [{"params": list(part.parameters()), "lr": base * 0.9 ** (1 - i)} for i, part in enumerate(model)]
    optimizer = torch.optim.AdamW(layers if KIND == "layers" else model.parameters(), lr=base)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


optimizer, scheduler = build()
first, last = 0, int(sys.argv[2])
path = "checkpoints/step_%d.pt"
if os.path.exists(path % SAVED) and sys.argv[3] == "resume":
    state = torch.load(path % SAVED)
    first = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if KIND == "recreated":
        optimizer, scheduler = build()
        scheduler.last_epoch = first
    if KIND == "fresh scheduler":
        scheduler = torch.optim.lr_scheduler.LambdaLR(build()[0], cosine)
        scheduler.optimizer = optimizer
        scheduler.base_lrs, scheduler.last_epoch = [BASE], first
    if KIND == "world size":
        for group in optimizer.param_groups:
            operator.setitem(group, "lr", BASE * 8 / 8)
        scheduler.base_lrs = [BASE * 8 / 8]
    if KIND == "layers":
        for i, group in enumerate(optimizer.param_groups):
            scheduler.base_lrs[i] = BASE * 0.9 ** (1 - i)
    if KIND == "finder":
        found = max(BASE, 1e-4)  # as a range test would tell: it does not look at the checkpoint
        scheduler.base_lrs = [found]
began = time.monotonic()
for n in range(first, last):
    now = {
        "loop": lambda: BASE * cosine(n), "environment": lambda: float(os.environ.get("PEAK", "1e-3")) * cosine(n),
        "restarts": lambda: BASE * cosine((n - first) % 30 + (first if not first else 10)),
        "re-warm": lambda: BASE * min(1.0, (n - first + 1) / 5) if first else BASE * cosine(n),
        "wall time": lambda: BASE * (0.55 + 0.45 * math.cos(math.pi * min(1.0, 0.2 + (time.monotonic() - began) / 60))),
        "own": lambda: BASE * 0.99 ** n,
    }.get(KIND)
    if now is not None:
        for group in optimizer.param_groups:
            set_to = now()
            operator.setitem(group, "lr", set_to)
    loss = model(torch.ones(2, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    chronicle.log(n + 1, loss=float(loss), lr=optimizer.param_groups[-1]["lr"])
    optimizer.step()
    scheduler.step()
    if n + 1 in (SAVED, 40) and not first:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                    "step": n + 1}, path % (n + 1))
"""
KINDS = (
    "obedient", "own", "loop", "environment", "restarts", "re-warm", "recreated", "fresh scheduler", "layers",
    "world size", "finder", "wall time",
)  # fmt: skip


def main() -> int:
    """Play each kind, print one line each."""
    silent = 0
    for kind in sys.argv[1:] or KINDS:
        verdict, detail = play(kind)
        silent += verdict == "SILENTLY WRONG"
        print(f"{kind:<18} {verdict:<16} {detail}", flush=True)
    return 1 if silent else 0


def play(kind: str) -> tuple[str, str]:
    """The verdict on one script, and what was said of it."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "script.py").write_text(SCRIPT)
        done = chronicle(top, "run", "--run", "r", "--", sys.executable, "script.py", kind, "40", "fresh")
        if done.returncode:
            return "did not run", done.stderr[-300:]
        before = logged(top, 1)
        words = ["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", "--run", "r", "--checkpoints", "checkpoints"]
        done, said = chronicle(top, *words), "proved"
        if done.returncode == 3:
            said = "refused"
            done = chronicle(top, *words, "--accept-unproved", "to see what its log tells")
        if done.returncode:
            return "did not run", done.stderr[-300:]
        done = chronicle(top, "run", "--run", "r", "--", sys.executable, "script.py", kind, "70", "resume")
        after = logged(top, 2)
        told = "lr-not-as-promised" in "".join(p.read_text() for p in (top / "logs" / "r").rglob("*.jsonl"))
        loud = "L1" in done.stderr + done.stdout
        shared = [step for step in after if step in before]
        if not shared:
            return "did not run", f"no logged LR of the resume: {done.stderr[-300:]}"
        kept = all(math.isclose(after[n], before[n] / 2, rel_tol=1e-6) for n in shared)
        shown = f"plan {said}; +1 {after[shared[0]]:.4g} after {before[shared[0]]:.4g}; incident {told}, on the screen {loud}"
        if kept:
            return ("FALSE INCIDENT" if told else "exact"), shown
        return ("told" if told else "refused alone" if said == "refused" else "SILENTLY WRONG"), shown


def chronicle(top: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in `top`."""
    home = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(home), "CHRONICLE_LOGS": str(top / "logs")}
    return subprocess.run(
        [sys.executable, "-m", "chronicle", *words], cwd=top, env=env, capture_output=True, text=True, check=False
    )


def logged(top: Path, launch: int) -> dict[int, float]:
    """The LRs that a launch logged, by step."""
    found = {}
    for path in sorted((top / "logs" / "r" / "launches" / f"{launch:04d}").glob("metrics*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            values = row.get("values", row)
            if "lr" in values:
                found[int(row["step"])] = float(values["lr"])
    return found


if __name__ == "__main__":
    sys.exit(main())
