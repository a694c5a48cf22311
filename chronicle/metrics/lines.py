"""Text logs: open them (gzip, UTF-16), and parse the lines that trainers print.

Read are the lines of Megatron(-DeepSpeed), m4, nanoGPT, nanochat, torchtitan, llm.c, DeepSpeed, Trainer and `key=value`.
One line is one point when it names a step and a loss, gradient norm or learning rate. Prefixes of ranks, time stamps,
ANSI colours and commas in numbers are accepted; validation losses and the summary at the end are left out.

    Megatron     iteration      609/  500000 | … | learning rate: 6.0E-05 | lm loss: 6.16E+00 | grad norm: 1.095 |
    m4           iteration: 4875/500000 1% | per_token_loss: 1.7109 | lr: 3.7E-05 |
    nanoGPT      iter 100: loss 3.1234, time 123.45ms, mfu 12.34%
    nanochat     step 00012/21400 (0.06%) | loss: 8.12 | grad norm: 0.12 | lrm: 1.00 |
    torchtitan   step: 10  loss:  7.12  grad_norm:  1.23  memory: 12.3GiB(13%)  tps: 1,234
    llm.c        step    1/19560 | loss 11.009 (+nanz)| norm 15.37 (+nanz)| lr 8.57e-07 |      s:1 trl:10.96 lr:… norm:…
    DeepSpeed    step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]
    Trainer      {'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.5}
"""

from __future__ import annotations

import ast
import datetime
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from chronicle.metrics.log import Point
from rollback.channels import EVAL_WORDS, HINTS, TELLING, canonical_name, canonical_of, printed_names

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
STEP = re.compile(
    r"(?<![\w/.])(?:global[_ ]?step|iteration|iter|train[_ ]step|step|s)\s*[:=]?\s*(\d[\d,]*)(?![\w.])(?:\s*/\s*\d+)?",
    re.IGNORECASE,
)
FIELD = re.compile(
    rf"(?<![\w/])(?P<name>{printed_names()})(?![\w/-])\s*[:=]?\s*\[?\s*(?P<value>{NUMBER})(?!\w)",
    re.IGNORECASE,
)
TELLING_NAMES = frozenset(canonical_of(role) for role in TELLING)
OTHER_LOSS = re.compile(rf"\b(?:{EVAL_WORDS})\w*[_ /]*loss\b|\bvl:|\btel:", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")


def read_lines(lines: Iterable[str]) -> Iterator[Point]:
    """Yield the points of printed lines; lines of one step with different channels become one point."""
    row, counted = 0, 0
    pending: Point | None = None
    for line in lines:
        found = parse_log_line(line, counted)
        if found is None:
            continue
        counted = max(counted, found.step) + 1
        if pending is not None and pending.step == found.step and not pending.values.keys() & found.values.keys():
            pending = pending._replace(values={**pending.values, **found.values})
            continue
        if pending is not None:
            yield pending._replace(row=row)
            row += 1
        pending = found
    if pending is not None:
        yield pending._replace(row=row)


def parse_log_line(line: str, counted: int = 0) -> Point | None:
    """Parse one printed line; `counted` is the step of a line that names none (Trainer's dictionaries)."""
    if not any(hint in line for hint in HINTS):
        return None
    if "\x1b" in line:
        line = ANSI.sub("", line)
    if "{" in line and "'loss'" in line:
        return _parse_dictionary(line, counted)
    step = STEP.search(line)
    if step is None or OTHER_LOSS.search(line):
        return None
    values: dict[str, float] = {}
    for field in FIELD.finditer(line):
        name = canonical_name(field["name"])
        if name not in values:
            values[name] = float(field["value"].replace(",", ""))
    if not TELLING_NAMES & values.keys():
        return None
    return Point(0, int(step[1].replace(",", "")), _time(line), values)


def _parse_dictionary(line: str, counted: int) -> Point | None:
    start, end = line.find("{"), line.rfind("}")
    try:
        record = ast.literal_eval(line[start : end + 1].replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    values: dict[str, float] = {}
    for name, value in record.items():
        try:
            values[canonical_name(str(name))] = float(value)
        except (TypeError, ValueError):
            continue
    step = values.pop("step", values.pop("global_step", float(counted)))
    return Point(0, int(step), _time(line), values) if "loss" in values else None


def _time(line: str) -> float | None:
    """Return the time stamp of a line in seconds since the epoch, read as UTC; only differences are used."""
    stamp = STAMP.search(line)
    if stamp is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}+00:00")
    except ValueError:
        return None
    return moment.timestamp()


# --- Opening a log as text

SNIFF_BYTES = 1 << 16
GZIP_MARK = b"\x1f\x8b"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed with gzip, by its first bytes."""
    with open(path, "rb") as log:
        return log.read(2) == GZIP_MARK


def read_head(path: Path) -> bytes:
    """Return the first bytes of a log, decompressed; of a truncated gzip what it still holds."""
    if not is_gzip(path):
        with open(path, "rb") as log:
            return log.read(SNIFF_BYTES)
    with open(path, "rb") as packed:
        try:
            return zlib.decompressobj(wbits=31).decompress(packed.read(SNIFF_BYTES), SNIFF_BYTES)
        except zlib.error:
            return b""


def log_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a log as text; a truncated gzip ends where it is cut. Raises OSError when it cannot be read.

    Encodings are UTF-8 and the UTF-16 of a Windows shell; other bytes become replacement characters.
    """
    encoding = "utf-16" if read_head(path).startswith(UTF_16_MARKS) else "utf-8"
    if not is_gzip(path):
        with open(path, encoding=encoding, errors="replace", newline=newline) as log:
            yield from log
        return
    with gzip.open(path, "rt", encoding=encoding, errors="replace", newline=newline) as packed:
        try:
            yield from packed
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
