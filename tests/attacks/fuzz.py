"""Mutated pickles, zips and streams fed to the readers; `python -m tests.attacks.fuzz 200000 [SEED]` runs a budget.

An input may be read or refused with one of this package's errors; anything else is a defect and ends the run with the
seed and number that reproduce it. Mutations know the opcodes, so most inputs get far into the machine.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.state import Budget, find_states, numbers_in, optimizer_state, scheduler_state
from rollback.checks.files import checksum_findings, examine_file
from rollback.checks.inspection import json_form
from rollback.errors import RollbackError
from rollback.files.pickle_reader import OPCODES, Limits, read_pickle
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import place_of, walk_leaves
from tests.attacks.hostile_files import HOSTILE, torch_zip

SMALL = Limits(num_bytes=2**22)
OPCODES = [code for code, method in enumerate(OPCODES) if method is not None]
SIZES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1]


def corpus() -> list[bytes]:
    """Valid state dicts in every protocol, and the small hostile pickles."""
    state = {
        "last_epoch": 5, "_step_count": 6, "base_lrs": [1e-3, 5e-4], "_last_lr": (1e-3, None), "name": "é", "flag": True,
        "state": {0: {"step": 7.0, "exp": b"\x00\x01"}, "a.b": {}}, "param_groups": [{"lr": 1e-3, "params": [0, 1]}],
        "nested": [[{"x": {1, 2}}]], "big": 2**70, "neg": -1,
    }  # fmt: skip
    valid = [pickle.dumps(state, protocol) for protocol in range(6)]
    hostile = [make() for make in HOSTILE.values()]
    return valid + [content for content in hostile if len(content) < 20_000]


def _check(path: Path, name: str) -> None:
    """F3 for one file, its checksums included."""
    _, targets = examine_file(path, name, full=True)
    checksum_findings(targets)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A few edits: flipped bits, opcodes, sizes, pieces cut, doubled or moved."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = chance.choice(OPCODES)
        elif kind == 2:
            changed[at:at] = bytes([chance.choice(OPCODES)])
        elif kind == 3:
            size = chance.choice(SIZES)
            changed[at : at + 4] = struct.pack("<Q", size)[: chance.choice((1, 2, 4, 8))]
        elif kind == 4:
            del changed[at : at + chance.randrange(1, 20)]
        elif kind == 5:
            end = at + chance.randrange(1, 60)
            changed[at:at] = changed[at:end]
        else:
            changed = changed[:at]
    return bytes(changed)


def opcodes_only(chance: random.Random) -> bytes:
    """A row of opcodes with arguments that are right more often than not."""
    body = bytearray(b"\x80" + bytes([chance.choice((2, 4, 5))]))
    for _ in range(chance.randrange(1, 60)):
        body += chance.choice(PIECES)
    return bytes(body) + b"."


PIECES = [
    b"N", b"\x88", b"K\x01", b"M\x01\x02", b"J\x01\x02\x03\x04", b"\x8a\x02\x01\x02", b"G\x3f\xf0\0\0\0\0\0\0", b"]", b"}",
    b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"a", b"e", b"s", b"u", b"\x8f", b"\x90", b"\x91", b"q\x00",
    b"h\x00", b"q\x01", b"h\x01", b"\x94", b"0", b"1", b"2", b"R", b"\x81", b"\x92", b"b", b"o", b"Q", b"\x93",
    b"X\x01\0\0\0a", b"X\x04\0\0\0step", b"X\x07\0\0\0storage", b"C\x01a", b"\x8c\x01b", b"\x96\x01\0\0\0\0\0\0\0x",
    b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n",
    b"cnumpy._core.multiarray\nscalar\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n",
    b"cnumpy._core.multiarray\n_reconstruct\n", b"ctorch\nSize\n", b"\x95\x05\0\0\0\0\0\0\0", b"\x97", b"\x98", b"I1\n",
]  # fmt: skip


def use_pickle(data: bytes) -> None:
    """Read it and look at it in all the ways the commands do."""
    content = read_pickle(data, limits=SMALL)
    for _ in walk_leaves(content.value):
        pass
    json_form(content.value)
    numbers_in(content.value, Budget("f"))
    for prefix, value, kind in find_states(content.value):
        (optimizer_state if kind == "optimizer" else scheduler_state)("f", prefix, value, owner="x")


def json_corpus() -> list[tuple[str, bytes]]:
    """(file name, content) of JSON that is read: counters, a manifest, the header of a safetensors file."""
    counters = {
        "epoch": 1.5,
        "global_step": 5,
        "log_history": [{"loss": 1e-3, "é": '\\ "},{'}, {"step": [1, None]}],
        "x": True,
    }
    files = [{"path": "a/é.pt", "size": 12, "sha256": "ab" * 32, "crc32": "0000000f"}, {"path": "b", "size": 0}]
    manifest = {"v": 1, "step": 5, "digests": "complete", "files": files, "memory": {"groups": [{"lr": 1e-3}]}}
    tensors = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps(tensors).encode()
    return [
        ("trainer_state.json", json.dumps(counters, indent=2).encode()),
        ("trainer_state.json", json.dumps(counters, ensure_ascii=False).encode()),
        ("chronicle-manifest.json", json.dumps(manifest, indent=1).encode()),
        ("model.safetensors", struct.pack("<Q", len(header)) + header + bytes(8)),
    ]


def use_json(folder: Path, name: str) -> Callable[[bytes], None]:
    """Read it as what its name says; numbers must lie where they are said to, and every reader must agree with `json`."""
    path = folder / name

    def use(data: bytes) -> None:
        path.write_bytes(data)
        _check(path, name)
        if name == "chronicle-manifest.json":
            read_manifest(folder)
        elif name == "trainer_state.json":
            tree = read_state_file(path).tree
            assert isinstance(tree, dict | list)
            for value in tree.values() if isinstance(tree, dict) else tree:
                place = place_of(value)
                assert (
                    place is None
                    or float(data[place.offset : place.offset + place.width]) == float(value)
                    or value != value
                )
            parsed = json.loads(data)
            assert repr(tree) == repr(parsed), "another reading than that of json"

    return use


def use_file(path: Path) -> Callable[[bytes], None]:
    def use(data: bytes) -> None:
        path.write_bytes(data)
        _check(path, "f")
        for leaf in read_state_file(path, limits=SMALL).leaves():
            assert leaf.keys is not None

    return use


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    """Feed `count` inputs to the readers; returns how often each outcome came, raises on the first defect."""
    seeds, outcomes = corpus(), Counter[str]()
    zips = [content for content in seeds if content.startswith(b"PK")] + [torch_zip(s) for s in seeds[:6]]
    as_file, texts = use_file(folder / "fuzzed.pt"), json_corpus()
    for number in range(count):
        chance = random.Random(f"{seed}-{number}")
        kind = chance.randrange(10)
        name, text = chance.choice(texts)
        data, use = (
            (opcodes_only(chance), use_pickle)
            if kind < 2
            else (mutate(text, chance), use_json(folder, name))
            if kind < 3
            else (mutate(chance.choice(seeds), chance), use_pickle)
            if kind < 8
            else (mutate(chance.choice(zips), chance), as_file)
        )
        try:
            use(data)
            outcomes["read"] += 1
        except RollbackError as problem:
            outcomes[type(problem).__name__] += 1
        except Exception as problem:
            (folder / "defect.bin").write_bytes(data)
            raise AssertionError(f"input {number} of seed {seed}: {problem!r}") from problem
    return outcomes


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        outcomes = fuzz(count, seed, Path(folder))
    seconds = time.process_time() - started
    print(f"{count} inputs, seed {seed}, {seconds:.0f} CPU s, {os.cpu_count()} cores: {dict(outcomes)}")


if __name__ == "__main__":
    main()
