"""Shards that nobody here wrote: indexed as they are, read in any order, and found where they changed."""

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from chronicle.data import PlanChanged, PlanDataset, Rows, shard_index
from chronicle.data.shard_index import (
    SourceReader,
    index_source,
    list_shards,
    read_source_index,
    verify_index,
    write_source_index,
)
from chronicle.data.shards import ShardProblem
from chronicle.errors import DataError
from tests.data.elastic_data import write_foreign_tars


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two sources of tars: GNU and PAX headers, names above 100 characters, directories, three fields a sample."""
    write_foreign_tars(tmp_path, shards=2, samples=40)
    return tmp_path


def plain(path: Path) -> list[dict[str, bytes]]:
    """The samples of a tar, read in the plainest way."""
    found: list[dict[str, bytes]] = []
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isreg():
                base, _, field = member.name.rpartition("/")[2].partition(".")
                key = f"{member.name.rpartition('/')[0]}/{base}"
                if not found or found[-1]["__key__"] != key:
                    found.append({"__key__": key})
                found[-1][field] = tar.extractfile(member).read()
    return found


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("source", ["web", "code"])
def test_every_sample_of_a_foreign_tar_is_read_as_tarfile_and_webdataset_read_it(place, source):
    index = index_source(source, place / source)
    write_source_index(index, place / "x.index")
    reader = SourceReader(read_source_index(place / "x.index"))
    expected = [sample for path in sorted((place / source).glob("*.tar")) for sample in plain(path)]
    found = [{name: value for name, value in reader.read(number).items() if name != "__source__"} for number in range(80)]
    assert found == expected and index.num_samples == 80
    webdataset = pytest.importorskip("webdataset")  # it leaves its tars to the garbage collector
    paths = [str(path) for path in sorted((place / source).glob("*.tar"))]
    theirs = [sample for sample in webdataset.WebDataset(paths, shardshuffle=False) if sample["__key__"]]
    assert [sample["meta.json"] for sample in theirs] == [sample["meta.json"] for sample in found]


def test_the_index_identifies_content_and_not_place(place):
    first = index_source("web", place / "web")
    (place / "web").rename(place / "moved")
    again = index_source("web", place / "moved")
    assert first.digest == again.digest and first.root != again.root
    assert SourceReader(first, place / "moved").read(3) == SourceReader(again).read(3)


@pytest.mark.parametrize("offset", [5, 600, 700, 1100])
def test_a_flipped_byte_is_found_at_the_first_read_and_by_verify(place, offset):
    index = index_source("web", place / "web")
    path = place / "web/part.001.tar"
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    reader = SourceReader(index)
    with pytest.raises(ShardProblem, match=r"part\.001\.tar` has changed: bytes 0 to \d+ \(sample 0\)"):
        reader.read(40)
    assert reader.read(41) and reader.read(0)
    assert list(verify_index(index)) == [f"shard `{path}` has changed: its sha256 is not the indexed "
                                                      f"{index.shards[1].sha256[:12]}…"]


def test_truncated_missing_and_new_shards_are_named(place):
    index = index_source("web", place / "web")
    one, two = place / "web/part.000.tar", place / "web/part.001.tar"
    os.truncate(one, one.stat().st_size - 4096)
    with pytest.raises(ShardProblem, match=r"part\.000\.tar` is truncated: [\d,]+ bytes, indexed with"):
        SourceReader(index)
    two.rename(place / "web/part.009.tar")
    told = list(verify_index(index))
    assert "is truncated" in told[0] and "cannot be found" in told[1] and "part.009.tar` is not in the index" in told[2]


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda path: os.truncate(path, 3000), "is truncated: it ends at byte"),
    (lambda path: path.write_bytes(b"x" * 4096), "cannot be read as a tar at byte 0"),
    (lambda path: path.write_bytes(b""), "is truncated: it ends at byte 0"),
], ids=["cut", "no tar", "empty"])  # fmt: skip
def test_what_cannot_be_indexed_is_one_sentence(place, spoil, words):
    spoil(place / "web/part.000.tar")
    with pytest.raises(DataError, match=words):
        index_source("web", place / "web")


def test_lines_and_texts_are_samples(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.jsonl").write_bytes(b'\n{"id": 1}\n\n{"id": 2}\r\n{"id": 3}')
    (tmp_path / "b.txt").write_text("whole text\n")
    (tmp_path / "empty.jsonl").write_text("")
    index = index_source("mixed", tmp_path)
    reader = SourceReader(index)
    samples = [reader.read(number) for number in range(index.num_samples)]
    assert [json.loads(sample["json"])["id"] for sample in samples if "json" in sample] == [1, 2, 3]
    assert [sample["txt"] for sample in samples if "txt" in sample] == [b"whole text\n"]
    assert {sample["__key__"] for sample in samples} == {"b", "deep/a/0", "deep/a/1", "deep/a/2"}


def test_of_many_shards_few_are_open_at_a_time(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(str(number))
    monkeypatch.setattr(shard_index, "MOST_OPEN", 3)
    reader = SourceReader(index_source("texts", tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    assert [int(reader.read(number)["txt"]) for number in (*range(40), *range(40))] == [*range(40), *range(40)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_nothing_to_index_and_a_damaged_index_are_one_sentence(tmp_path, place):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no samples"):
        index_source("none", tmp_path / "none")
    with pytest.raises(DataError, match="is no directory"):
        index_source("none", tmp_path / "absent")
    path = tmp_path / "web.index"
    write_source_index(index_source("web", place / "web"), path)
    whole = path.read_bytes()
    for content in (whole[:-20], whole.replace(b'"v":1', b'"v":9', 1), b"", whole.replace(b'"tar",', b'"file",', 1)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read|has version 9"):
            read_source_index(path)
    with pytest.raises(DataError, match="cannot be opened"):
        read_source_index(tmp_path / "absent.index")


# --- Sets in the form of writers that nobody here is


def named_tar(path: Path, *names: str, link: str = "") -> None:
    with tarfile.open(path, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            if name == link:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, names[0], 0
            tar.addfile(member, io.BytesIO(name.encode()))


def test_what_tells_of_shards_is_no_shard(tmp_path):
    """img2dataset writes a table of urls and a JSON of counts beside each tar; who publishes a set adds a README and sums."""
    named_tar(tmp_path / "00000.tar", "000000000.jpg", "000000000.json", "000000000.txt")
    for name in ("00000.parquet", "00000_stats.json", "README.md", "SHA256SUMS.txt"):
        (tmp_path / name).write_text("{}")
    index = index_source("laion", tmp_path)
    assert index.num_samples == 1 and sorted(SourceReader(index).read(0)) == ["__key__", "__source__", "jpg", "json", "txt"]
    assert list_shards(tmp_path)[1] == ["00000.parquet", "00000_stats.json", "README.md", "SHA256SUMS.txt"]
    (tmp_path / "00000.tar").unlink()  # of a directory of texts it is one
    assert list_shards(tmp_path)[0] == ["README.md", "SHA256SUMS.txt"]


def test_rows_that_another_library_reads_are_a_source_beside_shards(tmp_path, place):
    """A table, compressed or not, is read by what reads tables; the plan mixes it with shards and refuses other content."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": [str(number) for number in range(20)]})
    rows = Rows(source="table", rows=table, digest="sha256 of the file")
    data = PlanDataset([rows, index_source("web", place / "web")], seed=1)
    found = [data[number] for number in range(len(data))]
    read = [one for one in found if one["__source__"] == "table"]
    assert len(read) > 10 and all(one["__key__"] == f"table/{one['text']}" for one in read)
    state = data.loader(batch_size=2).state_dict()
    other = PlanDataset([Rows(source="table", rows=table, digest="x"), index_source("web", place / "web")], seed=1)
    with pytest.raises(PlanChanged, match="source `table`"):
        other.loader(batch_size=2).load_state_dict(state)


def test_samples_that_tar_tore_apart_and_links_are_said(tmp_path, capsys):
    named_tar(tmp_path / "a.tar", "1.txt", "2.txt", "1.cls", "3.txt", "3.txt", "4.txt", link="4.txt")
    index = index_source("torn", tmp_path)
    told = capsys.readouterr().err
    assert index.num_samples == 4 and "1 samples lie in several places" in told and "such as `1`" in told
    assert "1 members have one name in one sample" in told and "1 hard links are left out" in told and "such as `4.txt`" in told
    capsys.readouterr()
    named_tar(tmp_path / "a.tar", "d/1.txt", "d/1.cls", "e/1.txt")
    assert index_source("whole", tmp_path).num_samples == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_sparse_file_and_a_second_tar_behind_the_end_are_refused(tmp_path, form):
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    (tmp_path / "s").mkdir()
    subprocess.run(["tar", "-S", f"--format={form}", "-cf", "s/a.tar", "a.bin"], cwd=tmp_path, check=True)
    with pytest.raises(ShardProblem, match=r"holds the sparse file `a.bin`"):
        index_source("s", tmp_path / "s")
    named_tar(tmp_path / "s/a.tar", "1.txt")
    content = (tmp_path / "s/a.tar").read_bytes()
    (tmp_path / "s/a.tar").write_bytes(content + bytes(4096))
    assert index_source("s", tmp_path / "s").num_samples == 1
    (tmp_path / "s/a.tar").write_bytes(content + content)
    with pytest.raises(ShardProblem, match=rf"goes on after its end at byte {1024 + 512}"):
        index_source("s", tmp_path / "s")


def test_a_set_of_another_form_is_named(tmp_path):
    for name in ("index.json", "shard.00000.mds"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"holds no samples, but 2 files such as `index.json`"):
        index_source("mds", tmp_path)
