"""Shards behind a URL: read by ranges, and every failure of a store is one sentence without credentials."""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from chronicle.data import PlanDataset
from chronicle.data.shard_index import SourceIndex, SourceReader, index_source, verify_index
from chronicle.data.shards import ShardProblem
from chronicle.errors import DataError


def tar_of(number: int) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for index in range(30):
            for field, content in (("txt", os.urandom(50 + index)), ("id", f"{number}-{index}".encode())):
                member = tarfile.TarInfo(f"dir.x/{'long' * 30}{number}-{index}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return held.getvalue()


LINES = b"".join(json.dumps({"id": number, "text": "word " * (number % 11)}).encode() + b"\n" for number in range(100))


class Ranges(SimpleHTTPRequestHandler):
    """Python's file server with ranges; it writes down how many bytes it gave."""

    given: ClassVar[list[int]] = []
    answers: ClassVar[list[str]] = []  # for the next reads by range: "unavailable", "whole"; then the right one

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        answer = self.answers.pop(0) if self.answers and "Range" in self.headers else ""
        if answer == "unavailable":
            self.send_error(503)
            return
        if answer == "whole":
            del self.headers["Range"]
        if not path.is_file() or "Range" not in self.headers:
            super().do_GET()
            return
        first, _, last = self.headers["Range"].partition("=")[2].partition("-")
        content = path.read_bytes()
        part = content[int(first): int(last or len(content)) + 1]
        self.given.append(len(part))
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of `tmp_path`/served, on this machine."""
    (tmp_path / "served").mkdir()
    Ranges.given.clear()
    Ranges.answers.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path / "served")))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_remote_shards_are_read_by_ranges(tmp_path, served, monkeypatch):
    pytest.importorskip("aiohttp")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "served/web"
    place.mkdir()
    (place / "a.tar").write_bytes(tar_of(1) + bytes(3_000_000))
    (place / "b.jsonl").write_bytes(LINES)
    index = index_source("web", f"{served}/web")
    assert index.digest == index_source("web", place).digest and index.root == f"{served}/web"
    here = SourceReader(index, place)
    Ranges.given.clear()
    data = PlanDataset([index], seed=3, decode=lambda sample: sample["__key__"])
    assert [data[number] for number in range(60)] == [here.read(int(id))["__key__"] for _, id in data.ids(0, 60)]
    assert sum(Ranges.given) < 4000 * 60
    (place / "a.tar").write_bytes(tar_of(2) + bytes(3_000_000))
    assert [line.partition("` ")[2][:11] for line in verify_index(index)] == ["has changed"]
    (place / "b.jsonl").unlink()
    with pytest.raises(ShardProblem, match="cannot be found"):
        SourceReader(index)


@pytest.fixture
def remote(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> tuple[SourceIndex, str]:
    """The index of one remote tar, and its URL."""
    pytest.importorskip("aiohttp")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "served/web").mkdir()
    (tmp_path / "served/web/a.tar").write_bytes(tar_of(1))
    return index_source("web", f"{served}/web"), f"{served}/web"


def test_a_store_that_does_not_answer_and_an_object_that_is_gone_are_one_sentence(remote, tmp_path):
    reader = SourceReader(remote[0])
    Ranges.answers[:] = ["unavailable"]
    with pytest.raises(ShardProblem, match=r"a.tar` cannot be read: 503"):
        reader.read(3)
    (tmp_path / "served/web/a.tar").unlink()
    with pytest.raises(ShardProblem, match=r"cannot be read: .*a.tar"):
        reader.read(3)


def test_a_server_without_ranges_and_a_server_that_is_away_are_said_in_one_sentence(remote):
    Ranges.answers[:] = ["whole"]
    with pytest.raises(ShardProblem, match="it does not know ranges"):
        SourceReader(remote[0]).read(3)
    with pytest.raises(ShardProblem, match="cannot be listed: "):
        index_source("web", "http://127.0.0.1:9/web")


@pytest.mark.parametrize("secret", ["http://me:hunter22@{}", "http://{}/x?X-Amz-Signature=hunter22", "http://hunter22@{}"])
def test_credentials_in_a_url_reach_neither_an_index_nor_a_message(remote, secret):
    index, url = remote
    place = secret.format(url.partition("://")[2])
    with pytest.raises(DataError, match="names a user, a key or a query") as refused:
        index_source("web", place)
    assert "hunter22" not in str(refused.value)
    if "hunter22@" in secret and "me:" in secret:  # to read by it is allowed: nothing of it is kept
        reader = SourceReader(index, place)
        Ranges.answers[:] = ["whole"]
        with pytest.raises(ShardProblem) as problem:
            reader.read(3)
        assert "hunter22" not in f"{problem.value} {problem.value.__cause__}" and "me:***@" in str(problem.value)
