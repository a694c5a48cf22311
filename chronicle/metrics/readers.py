"""Open any training log: decide its format by its first bytes and hand it to its reader.

Encoding errors, half lines and other text do not stop a reader: they are skipped. A log without any point is an error
that names the known formats. A new format is one function here that recognises it, and one reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.metrics.lines import UTF_16_MARKS, is_gzip, log_lines, read_head, read_lines
from chronicle.metrics.log import Point, parse_line, read_metrics
from chronicle.metrics.mlflow_log import SQLITE_HEAD, is_file_store_run, read_database, read_file_store
from chronicle.metrics.records import find_header, read_csv, read_json_lines, read_trainer_state
from chronicle.metrics.tensorboard_log import is_event_file, read_event_files


class UnknownLog(ChronicleError):
    """No reader found a point in this file."""


def read_log(path: Path) -> Iterator[Point]:
    """Yield the points of a log in file order; raises UnknownLog when there is none, OSError when it cannot be read.

    `path` may be a file, a directory of TensorBoard event files or of an MLflow run, or `mlflow.db#RUN`.
    """
    found = False
    for point in _open(path):
        found = True
        yield point
    if not found and not (path.is_file() and _is_table(read_head(path))):  # a table may have no rows yet
        raise UnknownLog(
            f"no step with a loss, gradient norm or learning rate was found in `{path}`",
            "known: JSONL, CSV, trainer_state.json, printed lines, TensorBoard, MLflow, W&B exports",
        )


def _open(path: Path) -> Iterator[Point]:
    name, _, run = str(path).partition("#")
    if run and not path.exists():
        return read_database(Path(name), run)
    if path.is_dir():
        return read_file_store(path) if is_file_store_run(path) else read_event_files(path)
    head = read_head(path)
    if head.startswith(SQLITE_HEAD):
        return read_database(path, None)
    if is_event_file(path):
        return read_event_files(path)
    if _is_one_document(path, head):
        return read_trainer_state(path)
    if head.lstrip().startswith(b"{") and _is_json_line(head):
        return read_metrics(path) if _is_ours(head) and not is_gzip(path) else read_json_lines(path)
    if _is_table(head):
        return read_csv(path)
    return _read_text(path)


def _is_one_document(path: Path, head: bytes) -> bool:
    """Whether a `.json` file is one object or list over many lines, not one object per line."""
    return path.suffix == ".json" and head.lstrip()[:1] in (b"{", b"[") and not _is_json_line(head)


def _is_json_line(head: bytes) -> bool:
    for line in head.splitlines()[:20]:
        try:
            if isinstance(json.loads(line), dict) and b"log_history" not in line:
                return True
        except (ValueError, RecursionError):
            continue
    return False


def _is_ours(head: bytes) -> bool:
    """Whether the lines are those of our own writer; other JSON lines go to the reader that knows more names."""
    first = head.lstrip().split(b"\n", 1)[0]
    point = parse_line(first)
    return first.startswith(b'{"step":') and point is not None and b'"t":' in first


def _is_table(head: bytes) -> bool:
    encoding = "utf-16" if head.startswith(UTF_16_MARKS) else "utf-8"
    return find_header(head.decode(encoding, errors="replace").splitlines()) is not None


def _read_text(path: Path) -> Iterator[Point]:
    """Yield the points of printed lines; carriage returns end lines too, because progress bars overwrite themselves."""
    yield from read_lines(log_lines(path))
