"""CPU of `chronicle note` and `chronicle status` against a typer hello world of the same interpreter; smallest of several runs.

    python benchmarks/story/start_up.py [RUNS]
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HELLO = "import typer\napp = typer.Typer()\n@app.command()\ndef hello(): print('hello')\n@app.command()\ndef bye(): pass\napp()"
MAIN = "from chronicle.cli.main import main; main()"


def cpu_seconds(words: list[str], directory: str, runs: int) -> float:
    """User and system time of the cheapest of `runs` starts."""
    best = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, cwd=directory, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def main() -> None:
    """Print one line each."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory() as directory:
        hello = cpu_seconds([sys.executable, "-c", HELLO, "hello"], directory, runs)
        print(f"typer hello world   {hello * 1000:6.0f} ms CPU")
        for words in (["note", "x", "--run", "r"], ["status", "--run", "r"], ["log", "--graph", "--run", "r"]):
            own = cpu_seconds([sys.executable, "-c", MAIN, *words], directory, runs)
            print(f"chronicle {words[0]:<9} {own * 1000:6.0f} ms CPU   ratio {own / hello:.2f}")


if __name__ == "__main__":
    main()
