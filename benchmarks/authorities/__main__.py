"""Where does the next launch take its LR from? Writer × scheduler × optimizer, each by the writer's own code.

    python -m benchmarks.authorities               every case whose library is installed
    python -m benchmarks.authorities timm torch    only cases whose name holds one of these words
    python -m benchmarks.authorities configs        frameworks with configs, Hydra, overrides and "auto" (`configs.py`)

Every case trains 20 steps, saves, and goes on for 50: the control. The checkpoint is then edited with
`chronicle rollback --lr-scale 0.5` and resumed for 50 steps by the writer's own loader. Three answers are possible:

    exact          the command called the edit proved, and each of the 50 LRs is half the control's
    refused        the command named what decides; that change is made as printed, and with --accept-unproved the 50 LRs are
                   half the control's ("right line"), or the optimizer's step does not follow its LR ("by name")
    SILENTLY WRONG the command called the edit proved, and an LR is not half the control's

"not shown by it": the script saves a scheduler and does not load it, or overrides it at the same LRs. No file tells that;
the guard does before the first step, and without it the first logged LRs.

Libraries that are not installed are named; their cases are not counted. It exits 1 when one case is silently wrong.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.authorities.writers import CASES, LATER_STEPS, SAVED_AT, Case, NotInstalled
from chronicle.cli.main import run
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths

SCALE = 0.5
OPTION = re.compile(r"--?([A-Za-z_.\-]+)[= ]([-+0-9.e]+)(?: → --?[A-Za-z_.\-]+[= ]([-+0-9.e]+))?")
ARROW = re.compile(r"([0-9][-+0-9.e]*) → ([0-9][-+0-9.e]*)")


def main() -> int:
    """Run the cases, print one line each and the counts; 1 when one is silently wrong."""
    words = sys.argv[1:]
    cases = CASES
    if "configs" in words:
        from benchmarks.authorities.configs import CONFIGS

        words.remove("configs")
        cases = CONFIGS
    counts: Counter[str] = Counter()
    absent: set[str] = set()
    for case in cases:
        if words and not any(word in case.name for word in words):
            continue
        try:
            verdict, detail = judge(case)
        except NotInstalled as missing:
            absent.add(str(missing))
            continue
        except Exception as problem:  # noqa: BLE001 - the writer's own code failed: said, and not counted as an answer
            verdict, detail = "did not run", f"{type(problem).__name__}: {problem}"
        counts[verdict] += 1
        print(f"{case.name:<44} {verdict:<15} {detail}"[:190], flush=True)
    print("\n" + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) + f" of {sum(counts.values())} cases")
    for name in sorted(absent):
        print(f"not installed: {name}")
    return 1 if counts["SILENTLY WRONG"] or counts["wrong line"] else 0


def judge(case: Case) -> tuple[str, str]:
    """The verdict on one case, and what was printed or found."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        root = top / "checkpoints"
        root.mkdir()
        config = dict(case.config)
        for name, content in case.files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(content)
        if case.argv:
            config["argv"] = list(case.argv)
            record_launch(top, case.argv)
        control = case.train(root, config)
        assert len(control) == LATER_STEPS, f"{case.name}: {len(control)} steps in the control"
        wanted = [tuple(lr * SCALE for lr in row) for row in control]
        code, text = command(top, root, "--lr-scale", str(SCALE))
        if code == 0:
            used = case.resume(root, config)
            wrong = "SILENTLY WRONG" if case.shown else "not shown by it"
            return ("exact", "") if same(used, wanted) else (wrong, first_difference(used, wanted))
        if case.free:
            said = text.replace("\n", " ").partition("error: ")[2] or text
            return "said", f"exit {code}: {said}"
        if "not proved" not in text:
            return "failed", text.splitlines()[0] if text else f"exit {code}"
        shown = text.replace("\n", " ")
        if case.by_name:
            return ("refused by name", "") if case.by_name in shown else ("wrong line", shown)
        changed = case.apply(config, shown, SCALE)
        if changed is None:
            return "wrong line", shown
        code, text = command(top, root, "--lr-scale", str(SCALE), "--accept-unproved", "the line above was changed")
        if code:
            return "failed", text.splitlines()[0]
        used = case.resume(root, changed)
        if not same(used, wanted):
            return "wrong line", first_difference(used, wanted) + " after " + shown
        return "refused, right line", shown.partition("hint:")[2][:90]


def record_launch(top: Path, argv: Sequence[str]) -> None:
    """As `chronicle run` records a launch that has ended."""
    with JournalWriter(RunPaths(top / "logs" / "r")) as writer:
        writer.append("launch.start", launch=1, data={"argv": list(argv), "cwd": str(top)})
        writer.append("launch.end", launch=1, data={"exit_code": 0})


def command(top: Path, root: Path, *words: str) -> tuple[int, str]:
    """Exit code and stderr of `chronicle rollback` to the saved step."""
    out, err = io.StringIO(), io.StringIO()
    places = ["--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(root)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["rollback", "--to", str(SAVED_AT), *words, "--yes", *places])
    return code, err.getvalue()


def same(used: list[tuple[float, ...]], wanted: list[tuple[float, ...]]) -> bool:
    """Whether all LRs are equal to nine digits."""
    return len(used) == len(wanted) and all(
        len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-18) for x, y in zip(a, b, strict=True))
        for a, b in zip(used, wanted, strict=True)
    )


def first_difference(used: list[tuple[float, ...]], wanted: list[tuple[float, ...]]) -> str:
    """How many steps are wrong, and the first of them."""
    wrong = [i for i, (a, b) in enumerate(zip(used, wanted, strict=False)) if not same([a], [b])]
    if not wrong:
        return f"{len(used)} steps instead of {len(wanted)}"
    at = wrong[0]
    return f"{len(wrong)} of {len(wanted)} steps wrong; +{at + 1}: {used[at][:2]} instead of {wanted[at][:2]}"


if __name__ == "__main__":
    sys.exit(main())
