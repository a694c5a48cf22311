"""Compressed shards, tables and remote shards: each form gives the samples that were put in, and says where it is cut."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from chronicle.data import PlanDataset, shard_forms, shards
from chronicle.data.shard_index import (
    SourceIndex,
    SourceReader,
    index_source,
    list_shards,
    read_source_index,
    verify_index,
    write_source_index,
)
from chronicle.data.shards import ShardProblem
from chronicle.errors import DataError

zstandard = pytest.importorskip("zstandard")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROWS = [{"id": number, "text": f"text {number} " * (1 + number % 7), "raw": bytes([number % 256] * 9),
         "nested": {"when": datetime(2026, 1, 1 + number % 28), "many": [Decimal(number), None], "raw": b"\0"}}
        for number in range(2500)]  # fmt: skip


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


def frames(content: bytes) -> bytes:
    """Several zstd frames, as parallel compressors write them; the first without its size, as a pipe writes it."""
    packed = zstandard.ZstdCompressor()
    stream = packed.compressobj()
    first = stream.compress(content[:700]) + stream.flush()
    return first + packed.compress(content[700:2000]) + packed.compress(content[2000:])


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".zst": frames, ".xz": lzma.compress, ".bz2": bz2.compress}


def samples(reader: SourceReader) -> list[dict]:
    return [reader.read(number) for number in range(reader.index.num_samples)]


@pytest.mark.parametrize("packing", PACK)
def test_a_compressed_shard_gives_the_samples_of_the_plain_one(tmp_path, packing):
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed/deep").mkdir(parents=True)
    for name, content in (("a.tar", tar_of(1)), ("b.jsonl", LINES), ("c.txt", b"a text")):
        (tmp_path / "plain" / name).write_bytes(content)
        (tmp_path / "packed" / f"{name}{packing}").write_bytes(PACK[packing](content))
    index = index_source("s", tmp_path / "packed")
    write_source_index(index, tmp_path / "s.index")
    with pytest.raises(DataError, match=f"3 shards that cannot be entered at a sample .{packing[1:]}."):
        SourceReader(index)
    found = samples(SourceReader(read_source_index(tmp_path / "s.index"), cache=tmp_path / "cache"))
    assert found == samples(SourceReader(index_source("s", tmp_path / "plain"))) and len(found) == 131
    assert len([path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]) == 3
    assert list(verify_index(index)) == []


def test_names_of_shards():
    names = {"a.tar": "tar", "a.b.tar.gz": "tar.gz", "a.tgz": "tar.gz", "x.jsonl.zst": "lines.zst", "c4.0.json.gz": "lines.gz",
             "a.ndjson": "lines", "a.parquet": "rows.parquet", "a.arrow": "rows.arrow", "info.json": "", "a.csv": "",
             "a.parquet.gz": "", "a.gz": ""}  # fmt: skip
    assert {name: shard_forms.shard_form(name) for name in names} == names


def write_arrow(path: Path, *, stream: bool, packed: str | None = None) -> None:
    table = pa.Table.from_pylist(ROWS)
    options = pa.ipc.IpcWriteOptions(compression=packed)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=700)


TABLES: dict[str, Callable[[Path], None]] = {
    "parquet": lambda place: parquet.write_table(pa.Table.from_pylist(ROWS), place / "a.parquet", row_group_size=900),
    "arrow file": lambda place: write_arrow(place / "a.arrow", stream=False),
    "arrow stream": lambda place: write_arrow(place / "a.arrow", stream=True),
    "arrow lz4": lambda place: write_arrow(place / "a.arrow", stream=True, packed="lz4"),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_row_of_a_table_is_a_sample(tmp_path, form):
    (tmp_path / "s").mkdir()
    TABLES[form](tmp_path / "s")
    index = index_source("s", tmp_path / "s")
    write_source_index(index, tmp_path / "s.index")
    mapped = form in ("arrow file", "arrow stream")
    assert mapped is (index.shards[0].kind == shard_forms.ARROW)
    reader = SourceReader(read_source_index(tmp_path / "s.index"), cache=None if mapped else tmp_path / "cache")
    for number in (2499, 0, 700, 699, 1024, 1023, 1):
        assert reader.read(number) == {**ROWS[number], "__key__": f"a/{number}", "__source__": "s"}
    assert [sample["id"] for sample in samples(reader)] == [row["id"] for row in ROWS]


def test_a_saved_hugging_face_dataset_is_read_without_the_caches_of_map(tmp_path):
    datasets = pytest.importorskip("datasets")
    place = tmp_path / "s"
    datasets.Dataset.from_list([{"id": number} for number in range(50)]).save_to_disk(place, num_shards=2)
    loaded = datasets.load_from_disk(place)
    loaded.map(lambda row: {"id": row["id"] + 1000}, cache_file_name=str(place / "cache-1.arrow"))
    shards, others = list_shards(place)
    assert len(shards) == 2 and "cache-1.arrow" in others
    assert [sample["id"] for sample in samples(SourceReader(index_source("s", place)))] == [*range(50)]


def test_changed_values_of_a_table_are_found_at_the_first_read(tmp_path):
    """A byte inside the values of a mapped file; its structure stays whole."""
    (tmp_path / "s").mkdir()
    write_arrow(tmp_path / "s/a.arrow", stream=True)
    index = index_source("s", tmp_path / "s")
    content = (tmp_path / "s/a.arrow").read_bytes()
    (tmp_path / "s/a.arrow").write_bytes(content.replace(b"text 1234 ", b"text 1235 ", 1))
    reader = SourceReader(index)
    assert reader.read(1235) and reader.read(1233)
    with pytest.raises(ShardProblem, match=r"a\.arrow` has changed: row 1234 is not what was indexed"):
        reader.read(1234)
    assert "has changed" in next(iter(verify_index(index)))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_packed_shard_that_was_cut_or_changed_is_one_sentence(tmp_path, name):
    place = tmp_path / "s"
    place.mkdir()
    path = place / name
    if name.endswith(".parquet"):
        TABLES["parquet"](place)
    else:
        path.write_bytes(PACK[path.suffix](LINES * 30))
    whole = path.read_bytes()
    index = index_source("s", place)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardProblem, match=r"is cut or damaged|cannot be read"):
        index_source("s", place)
    with pytest.raises(ShardProblem, match="is truncated"):
        SourceReader(index, cache=tmp_path / "cache")
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 255
    path.write_bytes(bytes(spoilt))
    reader = SourceReader(index, cache=tmp_path / "cache")
    with pytest.raises(ShardProblem, match=r"has changed: its sha256|cannot be unpacked|cannot be read"):
        reader.read(0)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    path.write_bytes(whole)
    assert reader.read(0)


def test_another_whole_shard_of_the_same_size_is_found_before_a_sample_is_read(tmp_path):
    (tmp_path / "s").mkdir()
    path = tmp_path / "s/a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES, 0))
    index = index_source("s", tmp_path / "s")
    path.write_bytes(gzip.compress(LINES.replace(b'"id": 98', b'"id": 89'), 0))
    with pytest.raises(ShardProblem, match="has changed: its sha256"):
        SourceReader(index, cache=tmp_path / "cache").read(0)


def test_a_changed_file_in_the_cache_is_told_from_a_changed_shard(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/a.jsonl.gz").write_bytes(gzip.compress(LINES))
    index = index_source("s", tmp_path / "s")
    SourceReader(index, cache=tmp_path / "cache").read(0)
    held = tmp_path / "cache" / index.shards[0].sha256
    held.write_bytes(held.read_bytes().replace(b'"id": 0', b'"id": 9'))
    with pytest.raises(ShardProblem, match=r"which it was unpacked into, are not what was indexed.*") as told:
        SourceReader(index, cache=tmp_path / "cache").read(0)
    assert "or remove the unpacked one" in str(told.value) + told.value.remedy


def test_a_cache_without_room_is_refused_with_both_figures(tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/a.jsonl.gz").write_bytes(gzip.compress(LINES))
    index = index_source("s", tmp_path / "s")
    monkeypatch.setattr(shard_forms.shutil, "disk_usage", lambda place: shard_forms.shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(DataError, match=rf"has room for 10 bytes, source `s` needs {len(LINES):,} more"):
        SourceReader(index, cache=tmp_path / "cache")


READ = """
import sys
from chronicle.data.shard_index import SourceReader, read_source_index
reader = SourceReader(read_source_index(sys.argv[1]), cache=sys.argv[2])
print(reader.read(99)["json"].decode())
"""


def test_processes_that_unpack_at_a_time_and_one_that_was_killed_leave_one_whole_shard(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/a.jsonl.gz").write_bytes(gzip.compress(LINES * 2000))
    index = index_source("s", tmp_path / "s")
    write_source_index(index, tmp_path / "s.index")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"{index.shards[0].sha256}.begun").write_bytes(b"half of it")  # of a process that was killed
    words = [sys.executable, "-c", READ, str(tmp_path / "s.index"), str(cache)]
    readers = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(3)]
    assert [json.loads(reader.communicate()[0])["id"] for reader in readers] == [99] * 3
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


# --- Remote


class Ranges(SimpleHTTPRequestHandler):
    """Python's file server with ranges; it writes down how many bytes it gave."""

    given: ClassVar[list[int]] = []
    answers: ClassVar[list[str]] = []  # for the next reads by range: "cut", "unavailable", "whole"; then the right one

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
        self.wfile.write(part[:len(part) // 2] if answer == "cut" else part)

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


def test_remote_shards_are_read_by_ranges_and_packed_ones_once(tmp_path, served, monkeypatch):
    pytest.importorskip("aiohttp")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "served/web"
    place.mkdir()
    (place / "a.tar").write_bytes(tar_of(1) + bytes(3_000_000))
    (place / "b.jsonl.zst").write_bytes(frames(LINES))
    write_arrow(place / "c.arrow", stream=True)
    index = index_source("web", f"{served}/web")
    assert index.digest == index_source("web", place).digest and index.root == f"{served}/web"
    here = SourceReader(index, place, cache=tmp_path / "one")
    Ranges.given.clear()
    data = PlanDataset([index], seed=3, cache=tmp_path / "two", decode=lambda sample: sample["__key__"])
    assert [data[number] for number in range(60)] == [here.read(int(id))["__key__"] for _, id in data.ids(0, 60)]
    wanted = [int(id) for _, id in data.ids(0, 60) if id < 30]
    packed = sum(path.stat().st_size for path in place.iterdir() if path.suffix != ".tar")
    assert sum(Ranges.given) < 4000 * len(wanted) + 3 * packed
    (place / "a.tar").write_bytes(tar_of(2) + bytes(3_000_000))
    assert [line.partition("` ")[2][:11] for line in verify_index(index)] == ["has changed"]
    (place / "b.jsonl.zst").unlink()
    with pytest.raises(ShardProblem, match="cannot be found"):
        SourceReader(index, cache=tmp_path / "two")


@pytest.fixture
def remote(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> tuple[SourceIndex, str]:
    """The index of one remote tar, and its URL; pauses between two reads are short."""
    pytest.importorskip("aiohttp")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shards, "FIRST_PAUSE_S", 0.001)
    (tmp_path / "served/web").mkdir()
    (tmp_path / "served/web/a.tar").write_bytes(tar_of(1))
    return index_source("web", f"{served}/web"), f"{served}/web"


def test_a_store_that_does_not_answer_for_a_while_is_asked_again_and_both_are_told(remote, capsys):
    reader = SourceReader(remote[0])
    whole = reader.read(3)
    capsys.readouterr()
    Ranges.answers[:] = ["unavailable", "cut", "unavailable"]
    assert reader.read(3) == whole
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "503" in told[0] and "tried again for 300 s" in told[0] and "read again after" in told[1]


def test_an_outage_that_does_not_end_and_an_object_that_is_gone_stop_with_one_sentence(remote, tmp_path, monkeypatch, capsys):
    reader = SourceReader(remote[0])
    monkeypatch.setattr(shards, "PATIENCE_S", 0.2)
    Ranges.answers[:] = ["unavailable"] * 10_000
    with pytest.raises(ShardProblem, match=r"a.tar` cannot be read \(0 s long\): 503"):
        reader.read(3)
    Ranges.answers.clear()
    capsys.readouterr()
    (tmp_path / "served/web/a.tar").unlink()
    with pytest.raises(ShardProblem, match=r"cannot be read: .*a.tar"):
        reader.read(3)
    assert capsys.readouterr().err == ""  # nothing to wait for


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
