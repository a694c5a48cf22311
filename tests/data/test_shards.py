"""Built sources: stock WebDataset reads them, an index finds any sample, and every damage is one sentence."""

import functools
import http.server
import itertools
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from bit_transformer.data.loaders import ShardWindows
from chronicle.data.corpora import CorpusMissing, read_text
from chronicle.data.shards import (
    ShardProblem,
    ShardReader,
    build_source,
    read_source_manifest,
    scan_tar,
    split_text,
    text_members,
    verify_source,
)
from chronicle.errors import DataError

TEXT = "".join(f"line {number} of a text that is long enough to be cut\n" for number in range(20_000)).encode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source of about 1 MB in four training shards."""
    directory = tmp_path_factory.mktemp("data")
    build_source(directory, "lines", TEXT, origin="test", shard_size_bytes=300_000)
    return directory / "lines"


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_stock_webdataset_reads_what_was_built(built: Path) -> None:
    """Every stretch comes out of WebDataset as it went in: the format is theirs, not ours."""
    webdataset = pytest.importorskip("webdataset")
    names = [str(built / shard.name) for shard in read_source_manifest(str(built)).of_split("train")]
    samples = [sample["txt"] for sample in webdataset.WebDataset(names, shardshuffle=False)]
    assert samples == split_text(TEXT)["train"]
    assert len(names) == 4


def test_shards_written_by_webdataset_are_indexed(tmp_path: Path) -> None:
    """Existing shards, written by WebDataset itself, are found sample by sample."""
    webdataset = pytest.importorskip("webdataset")
    path = str(tmp_path / "x-000000.tar")
    with webdataset.TarWriter(path) as writer:
        for number in range(5):
            writer.write({"__key__": f"s{number}", "txt": f"text {number}" * (number + 1)})
    reader = ShardReader(path)
    found = [reader.read(first, size).decode() for first, size in text_members(path)]
    assert found == [f"text {n}" * (n + 1) for n in range(5)]


def test_windows_are_the_texts_own_bytes(built: Path) -> None:
    """Window i of the shards is a stretch's i-th window, for any window size, first and last included."""
    for window_bytes in (24, 100, 16_384):
        store = ShardWindows(str(built), window_bytes)
        expected = [part[i:i + window_bytes] for part in split_text(TEXT)["train"]
                    for i in range(0, len(part) // window_bytes * window_bytes, window_bytes)]
        assert store.num_samples == len(expected)
        for number in (0, 1, len(expected) // 2, len(expected) - 1):
            assert store.read(number).tobytes() == expected[number]


def test_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    """Digests name the data: building twice gives equal tars, whatever the clock says."""
    one, other = (build_source(tmp_path / name, "s", TEXT, origin="x") for name in "ab")
    assert one == other


def test_untouched_source_verifies(built: Path) -> None:
    """No sentence, no finding."""
    assert list(verify_source(str(built))) == []


@pytest.mark.parametrize(("damage", "sentence"), [
    ("missing", "cannot be opened"), ("truncated", "has 1000 bytes, the manifest says"),
    ("changed", "has changed: sha256"), ("extra", "is not in the manifest")])
def test_each_damage_is_found(built: Path, tmp_path: Path, damage: str, sentence: str) -> None:
    """A missing, truncated, changed or unlisted shard is one finding that names the file."""
    copy = _copy(built, tmp_path / "copy")
    shard = copy / "train-000001.tar"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(content[:1000])
    elif damage == "changed":
        shard.write_bytes(content[:600] + b"X" + content[601:])
    else:
        (copy / "train-000099.tar").write_bytes(content)
    found = list(verify_source(str(copy)))
    assert len(found) == 1 and sentence in found[0]
    assert ("train-000099.tar" if damage == "extra" else "train-000001.tar") in found[0]


def test_truncated_shard_stops_before_training(built: Path, tmp_path: Path) -> None:
    """A shard cut in the middle of a member, or only of its closing blocks, is refused when the loader opens it."""
    copy = _copy(built, tmp_path / "copy")
    shard = copy / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-9000])
    with pytest.raises(ShardProblem, match=r"train-000000.tar.*(truncated|cannot be read)"):
        ShardWindows(str(copy), 24)


def test_missing_shard_and_missing_source_are_one_sentence(built: Path, tmp_path: Path) -> None:
    """Not a traceback from deep inside a worker."""
    copy = _copy(built, tmp_path / "copy")
    (copy / "train-000002.tar").unlink()
    with pytest.raises(ShardProblem, match=r"train-000002.tar` cannot be opened"):
        ShardWindows(str(copy), 24)
    with pytest.raises(DataError, match="holds no built source"):
        ShardWindows(str(tmp_path / "nowhere"), 24)


def test_no_tar_is_refused_with_its_name(tmp_path: Path) -> None:
    """A file that only calls itself a tar."""
    path = tmp_path / "x.tar"
    path.write_bytes(b"no tar at all" * 200)
    with pytest.raises(ShardProblem, match=r"x.tar` cannot be read as a tar"):
        scan_tar(str(path))


def test_remote_shards_are_read_through_fsspec(built: Path) -> None:
    """The same source behind a URL gives the same windows."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in built.iterdir():
        memory.pipe_file(f"/remote/lines/{path.name}", path.read_bytes())
    local, remote = ShardWindows(str(built), 24), ShardWindows("memory://remote/lines", 24)
    assert remote.num_samples == local.num_samples and remote.digest == local.digest
    assert all(np.array_equal(remote.read(i), local.read(i)) for i in (0, 777, local.num_samples - 1))


def test_a_directory_in_use_is_not_written_over(built: Path) -> None:
    """Building into a source that exists would change data under a run."""
    with pytest.raises(DataError, match="is not empty"):
        build_source(built.parent, "lines", TEXT, origin="again")


def test_too_little_text_is_refused() -> None:
    """Less than twenty stretches leave nothing to hold out."""
    with pytest.raises(DataError, match="1000 bytes of text, expected"):
        split_text(b"x" * 1000)


def test_folder_that_is_empty_or_not_utf8_is_one_sentence(tmp_path: Path) -> None:
    """The sentence names the file and the byte."""
    with pytest.raises(DataError, match="holds no text files"):
        read_text(str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"b.txt` is not UTF-8: byte 0xe9 at offset 3"):
        read_text(str(tmp_path))
    (tmp_path / "b.txt").write_bytes("café".encode())
    assert read_text(str(tmp_path)) == "fine\ncafé".encode()


def test_absent_corpus_names_the_command_that_installs_it(tmp_path: Path) -> None:
    """Never a download: the person is told what to type."""
    for corpus, command in (("gcide", "apt-get install dict-gcide"), ("dict-gcide", "apt-get install dict-gcide"),
                            ("python3-doc", "apt-get install python3-doc")):
        with pytest.raises(CorpusMissing) as raised:
            read_text(corpus, root=tmp_path)
        assert command in (raised.value.remedy or "")


def test_an_installed_package_is_read_once_through_its_links(tmp_path: Path) -> None:
    """Debian links one package's documentation to another's."""
    relative = "usr/share/doc/python3.11/html/_sources/library/os.rst.txt"
    source = tmp_path / "root" / relative
    source.parent.mkdir(parents=True)
    source.write_text("os — operating system\n", encoding="utf-8")
    link = tmp_path / "root/usr/share/doc/python3.11-doc/html"  # as Debian's package has it
    link.parent.mkdir()
    link.symlink_to("../python3.11/html")
    assert read_text("python-doc", root=tmp_path / "root") == source.read_bytes()


def test_text_under_two_names_is_read_once(tmp_path: Path) -> None:
    """Twice, and what is held out would be trained on."""
    (tmp_path / "a.txt").write_text("once")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert read_text(str(tmp_path)) == b"once"


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
def test_remote_shards_are_read_over_http(built: Path) -> None:
    """Windows of shards behind a web server, by range where it answers ranges: the local ones."""
    pytest.importorskip("aiohttp")
    handler = functools.partial(_Quiet, directory=str(built.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        local = ShardWindows(str(built), 24)
        remote = ShardWindows(f"http://127.0.0.1:{server.server_port}/lines", 24)
        assert remote.num_samples == local.num_samples and remote.digest == local.digest
        assert all(np.array_equal(remote.read(i), local.read(i)) for i in (0, 777, local.num_samples - 1))
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Files with byte ranges, as object stores serve them."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer a range with 206, anything else as the standard library does."""
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        path = Path(self.translate_path(self.path))
        if not wanted or not path.is_file():
            super().do_GET()
            return
        first, _, last = wanted.partition("-")
        content = path.read_bytes()
        part = content[int(first):int(last or len(content) - 1) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)


def test_python_brings_two_sources(tmp_path: Path) -> None:
    """Zero download: code and reference of this interpreter, both UTF-8 and long enough to hold something out."""
    for name in ("code", "reference"):
        parts = split_text(read_text(name))
        assert len(parts["held_out"]) >= 1 and len(list(itertools.chain(*parts.values()))) > 300_000 // 16_384
