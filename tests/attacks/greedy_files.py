"""Files that want memory: what a reader would build from them takes a hundred times their size, or a gigabyte of zeros.

`GREEDY` maps a label to (name in a checkpoint, content). Written next to healthy state, each must cost `inspect` and
`verify` less than MEMORY_MB. `GENEROUS` are as large and honest: they must be read.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator

from tests.attacks.companions import GROUPS, STEP
from tests.attacks.hostile_files import laughs, safetensors, torch_zip
from tests.attacks.pickle_bytes import items, pickled, real, text

MEMORY_MB = 100  # a checkpoint that holds nothing greedy takes 25
NUM = 990_000

Made = Callable[[], tuple[str, bytes]]
GREEDY: dict[str, Made] = {}
GENEROUS: dict[str, Made] = {}


def _json(body: bytes) -> Made:
    """A history of `body` over and over, 40 MB of it."""
    count = 40 * 2**20 // len(body)
    return lambda: ("trainer_state.json", b'{"global_step": 10, "log_history": [' + body * count + b"0]}")


def _pickle(make: Callable[[], bytes]) -> Made:
    return lambda: ("optimizer.pt", torch_zip(pickled(make())))


def _elements(body: bytes, count: int = NUM) -> Made:
    return _pickle(lambda: b"](" + body * count + b"e")


def _many_keys() -> tuple[str, bytes]:
    return "trainer_state.json", b'{"global_step": 10' + b"".join(b',"%x":1' % i for i in range(3_000_000)) + b"}"


def _groups_that_share() -> bytes:
    """A thousand groups, each with the same hundred thousand values: a copy for each would be a gigabyte."""
    lr = text("lr") + real(1e-3) + b"s"
    group = b"}" + lr + text("x")
    groups = group + laughs(b"](", b"e", 5) + b"r\xff\0\0\0s" + (group + b"j\xff\0\0\0s") * 1000
    return b"}(" + text("state") + items() + text("param_groups") + b"](" + groups + b"eu"


def _records(count: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"param_groups": []}, 2))
        for number in range(count):
            archive.writestr(f"archive/data/{number}", b"")
    return buffer.getvalue()


def _header(body: bytes) -> tuple[str, bytes]:
    return "model.safetensors", struct.pack("<Q", len(body)) + body


def _tensors(count: int) -> Iterator[bytes]:
    return (b'"%x":{"dtype":"F32","shape":[],"data_offsets":[0,0]}' % number for number in range(count))


GREEDY |= {
    "json of empty lists": _json(b"[],"),
    "json of empty objects": _json(b"{},"),
    "json of ones": _json(b"1,"),
    "json of texts": _json(b'"a",'),
    "json of many keys": _many_keys,
    "json of one text": lambda: ("trainer_state.json", b'{"global_step": 10, "x":"' + b"a" * 50_000_000 + "😀\"}".encode()),
    "manifest of small files": lambda: (
        "chronicle-manifest.json",
        b'{"v":1,"files":[' + b'{"path":"","size":0},' * 1_900_000 + b'{"path":"a","size":1}]}',
    ),
    "manifest with much memory": lambda: (
        "chronicle-manifest.json",
        b'{"v":1,"files":[],"memory":{"groups":[' + b"{}," * 10_000_000 + b"{}]}}",
    ),
    "header of small tensors": lambda: _header(b"{" + b",".join(_tensors(1_000_000)) + b"}"),
    "header whose metadata is lists": lambda: _header(b'{"__metadata__":[' + b"[]," * 20_000_000 + b"0]}"),
    "a million floats": _elements(real(1.5)),
    "a million integers": _elements(b"K\1"),
    "a million lists": _elements(b"]"),
    "a million dicts": _elements(b"}"),
    "a million sets": _elements(b"\x8f"),
    "a million bytes": _elements(b"C\2ab"),
    "a million objects": _pickle(lambda: b"ca\nb\nq\0](" + b"h\0)R" * NUM + b"e"),
    "a million names": _pickle(lambda: b"](" + b"".join(b"ca%x\nb\n" % number for number in range(NUM)) + b"e"),
    "a million memo entries": _pickle(lambda: b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(NUM))),
    "a million texts": _pickle(lambda: b"](" + b"".join(text(f"{i:x}") for i in range(NUM)) + b"e"),
    "one wide text": _pickle(lambda: text("a" * 20_000_000 + "😀")),
    "one long text": _pickle(lambda: text("a" * 90_000_000)),
    "groups that share their values": _pickle(_groups_that_share),
    "four hundred thousand records": lambda: ("optimizer.pt", _records(390_000)),
}  # fmt: skip


def _history(records: int) -> bytes:
    log = [
        {"epoch": i / 1000, "grad_norm": 0.1 + i, "learning_rate": 1e-3, "loss": 2.0 + i, "step": i}
        for i in range(records)
    ]
    return json.dumps({"epoch": 1.5, "global_step": STEP, "log_history": log, "max_steps": 100}, indent=2).encode()


def _parameters(count: int) -> bytes:
    return torch_zip(
        pickle.dumps({"state": {0: {"step": 10.0}}, "param_groups": [GROUPS[0] | {"params": list(range(count))}]}, 2)
    )


def _manifest(count: int) -> bytes:
    files = [
        {"path": f"zero/layer.{i}/fp32.pt", "size": i, "sha256": "ab" * 32, "crc32": "00000000"} for i in range(count)
    ]
    return json.dumps({"v": 1, "step": STEP, "digests": "complete", "files": files}, indent=1).encode()


GENEROUS |= {
    "half a million records of a log": lambda: ("trainer_state.json", _history(500_000)),
    "a hundred thousand parameters in a group": lambda: ("optimizer.pt", _parameters(100_000)),
    "a manifest of forty thousand files": lambda: ("chronicle-manifest.json", _manifest(40_000)),
    "a header of fifty thousand tensors": lambda: (
        "model.safetensors",
        safetensors({f"layer.{i}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(50_000)},
                    b"\0" * 200_000),
    ),
}  # fmt: skip
