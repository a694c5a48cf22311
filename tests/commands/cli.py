"""`chronicle` as a user starts it, in this process: arguments in, code and both streams out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Cli:
    """Call it with the words of one command line."""

    capture: pytest.CaptureFixture[str]
    chdir: Callable[[Path], None]

    def __call__(self, *words: str, cwd: Path | None = None) -> Outcome:
        if cwd is not None:
            self.chdir(cwd)
        self.capture.readouterr()
        code = run(list(words))
        captured = self.capture.readouterr()
        return Outcome(int(code), captured.out, captured.err)
