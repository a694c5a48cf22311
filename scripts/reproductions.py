"""Write docs/reproductions.md, one row a public report, from the cases in tests/reproductions.

`--check` writes nothing and exits 5 when the page is out of date. The counts are held by `tests/reproductions/test_all.py`:
a case that waits for something must fail there, any other must pass.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.reproductions.test_all import NAMES, load  # noqa: E402 after the path

PAGE = ROOT / "docs" / "reproductions.md"
HEAD = """# Public reports, reproduced

What users of other projects reported, played on a CPU with the real library: once without chronicle, where it must happen, and
once with it. Each row is a file of `tests/reproductions/`; `python scripts/reproductions.py` writes this page, and
`pytest tests/reproductions` holds it. A row that is *not answered* has a test that is expected to fail, strictly.
"""

TAIL = """
Cases of W&B and trackio are skipped where those are not installed; they are no requirement of the tests.
"""


def main() -> int:
    """Write the page, or compare it with what would be written."""
    new = page()
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new:
        print("error: `docs/reproductions.md` is out of date\nhint: python scripts/reproductions.py", file=sys.stderr)
        return 5
    return 0


def page() -> str:
    """The whole page."""
    cases = sorted(((name, load(name)) for name in NAMES), key=lambda pair: pair[1].row)
    answered = [case for _, case in cases if not case.waits_for]
    rows = [
        f"| [{name}](../tests/reproductions/{name}.py) | {case.source} | {case.pain} | {case.without} | "
        f"{f'*not answered*: {case.waits_for}' if case.waits_for else case.answer} |"
        for name, case in cases
    ]
    count = f"\n**{len(answered)} of {len(cases)}** are refused, stopped, named, proposed or done by a command.\n\n"
    table = "| file | reported in | what happened to them | without chronicle | with chronicle |\n|---|---|---|---|---|\n"
    return HEAD + count + table + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    sys.exit(main())
