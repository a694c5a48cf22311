"""Rehearse public scripts: `python -m benchmarks.rehearse SOURCES PLACE [NAME…]`, with a Python that has their packages.

SOURCES holds the repositories of `scripts.toml` at their versions. PLACE gets what they train on (`stage.py`), two answers
in JSON a script, and `resume_bench.md`. A script that has its answers there is not played again.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rehearse.stage import make_stage

QUIET = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled",
}  # fmt: skip
MOST_SECONDS = 900
SHOWN = 3
ONLY = ("kill", "term")


def main(sources: Path, place: Path, names: list[str]) -> None:
    """Play what has no answer yet, and write the table of all that have one."""
    listed = tomllib.loads(Path(__file__).with_name("scripts.toml").read_text())
    if not (place / "stage").exists():
        make_stage(place / "stage", sources)
    (place / "answers").mkdir(exist_ok=True)
    for script in listed["script"]:
        for only in ONLY:
            answer = place / "answers" / f"{script['name']}.{only}.json"
            if not answer.exists() and (not names or script["name"] in names):
                answer.write_text(json.dumps(play(script, sources, place, only)))
                print(script["name"], only, json.loads(answer.read_text())["verdict"], flush=True)
    rows = [row_of(script, listed["versions"], place / "answers") for script in listed["script"]]
    head = "| script | version | killed and resumed | differs in | cause | TERM |\n|---|---|---|---|---|---|"
    (place / "resume_bench.md").write_text("\n".join([counts(listed, place / "answers"), "", head, *filter(None, rows)]) + "\n")


def counts(listed: Mapping[str, Any], answers: Path) -> str:
    """How many scripts of how many projects have a row, are exact, and save at TERM."""
    told = [one for one in listed["script"] if row_of(one, listed["versions"], answers)]
    verdicts = [json.loads((answers / f"{one['name']}.{only}.json").read_text())["verdict"] for one in told for only in ONLY]
    projects = {one.get("folder") or one["package"] for one in told}
    return (
        f"{len(told)} scripts of {len(projects)} projects; {verdicts.count('resumes exactly')} resume exactly, "
        f"{verdicts.count('could not be told')} answers could not be told, "
        f"{verdicts.count('saves when the signal comes')} save when the signal comes."
    )


def play(script: Mapping[str, Any], sources: Path, place: Path, only: str) -> dict[str, Any]:
    """One rehearsal; its JSON, or why there is none."""
    at, to = script.get("steps", (10, 20))
    stage = place / "stage"
    values = {"{python}": sys.executable, "{sources}": str(sources), "{stage}": str(stage)}
    words, resume = script["words"], script["resume"]
    for name, value in values.items():
        words, resume = words.replace(name, value), resume.replace(name, value)
    options = ["--json", "--run", "bench", "--logs", str(place / "logs" / re.sub(r"\W+", "-", script["name"])), "--only", only]
    options += ["--at", str(at), "--to", str(to), "--resume-args", resume]
    command = [sys.executable, "-m", "chronicle_ml", "rehearse", *options, "--", *shlex.split(words)]
    folder = stage if "{sources}" in script["words"] or "folder" not in script else sources / script["folder"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    if done.stdout.startswith("{"):
        return dict(json.loads(done.stdout))
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return {"verdict": "could not be told", "findings": [], "not_compared": said[-1:]}


def row_of(script: Mapping[str, Any], versions: Mapping[str, str], answers: Path) -> str:
    """The row of a script; "" where it has no answers."""
    paths = [answers / f"{script['name']}.{only}.json" for only in ONLY]
    if not all(path.exists() for path in paths):
        return ""
    killed, told = (json.loads(path.read_text()) for path in paths)
    if killed["verdict"] == "could not be told":
        return ""
    verdict = f"{killed['verdict']} ({killed['leaves']} values in files, {killed['logged_values']} logged)"
    where = versions[script["folder"]] if "folder" in script else f"{script['package']} {version(script['package'])}"
    found = [f"{one['what']}: {one['text']}" for one in killed["findings"]]
    if not found:
        found = killed["not_compared"] if "exactly" not in killed["verdict"] else []
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    term = "not told: it ended before the signal"
    if told["verdict"] != "could not be told":
        term = told["findings"][0]["text"] if told["findings"] else told["notes"][0]
    cells = [script["name"], where, verdict, "<br>".join([*found[:SHOWN], *more]) or "–", script.get("cause", "–"), term]
    return "| " + " | ".join(re.sub(r"\x1b\[\d*m", "", cell).replace("|", "¦").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
