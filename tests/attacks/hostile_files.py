"""Hostile state files, each a function of nothing that returns bytes; `python -m tests.attacks.hostile_files DIR` writes them.

Those that would run code create the file named by the environment variable CANARY (default `/tmp/chronicle-canary`)
when they are unpickled: load one with `pickle` to see it happen. Opening them with this project must not.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.attacks.pickle_bytes import (
    PROTO4,
    call,
    elements,
    integer,
    items,
    name,
    optimizer,
    pickled,
    real,
    scheduler,
    text,
)

CANARY = os.environ.get("CANARY", "/tmp/chronicle-canary")
SHELL = f"touch {CANARY}"
CODE = f"open({CANARY!r}, 'w')"
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")

HOSTILE: dict[str, Callable[[], bytes]] = {}


def attack(label: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def register(make: Callable[[], bytes]) -> Callable[[], bytes]:
        assert label not in HOSTILE
        HOSTILE[label] = make
        return make

    return register


def add(label: str, content: bytes | Callable[[], bytes]) -> None:
    attack(label)(content if callable(content) else lambda: content)


def torch_zip(body: bytes, **records: bytes) -> bytes:
    """A zip as torch writes it, with `body` as its data.pkl."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", body)
        archive.writestr("archive/version", "3\n")
        for key, content in records.items():
            archive.writestr(f"archive/{key.replace('__', '/')}", content)
    return buffer.getvalue()


# --- code that wants to run

CALLS: dict[str, bytes] = {
    "os.system": call("os", "system", text(SHELL)),
    "posix.system": call("posix", "system", text(SHELL)),
    "builtins.exec": call("builtins", "exec", text(CODE)),
    "builtins.eval": call("builtins", "eval", text(CODE)),
    "python 2 builtins": call("__builtin__", "eval", text(CODE)),
    "subprocess.Popen": call("subprocess", "Popen", elements(text("touch"), text(CANARY))),
    "builtins.open": call("builtins", "open", text(CANARY), text("w")),
    "runpy": call("runpy", "run_path", text("/dev/stdin")),
    "importlib": call("importlib", "import_module", text("antigravity")),
    "getattr chain": call("builtins", "getattr", call("builtins", "__import__", text("os")), text("system")),
    "pkgutil.resolve_name": call("pkgutil", "resolve_name", text("os:system")),
    "functools.partial": call("functools", "partial", name("os", "system"), text(SHELL)),
    "operator.methodcaller": call("operator", "methodcaller", text("system"), text(SHELL)),
    "torch.load": call("torch.serialization", "load", text("/tmp/other.pt")),
    "numpy.load": call("numpy", "load", text("/tmp/other.npy")),
    "pickle.loads": call("pickle", "loads", b"C\x01."),
    "code.interact": call("code", "InteractiveInterpreter"),
    "sys.exit": call("sys", "exit", integer(0)),
    "webbrowser": call("webbrowser", "open", text("http://localhost/")),
}
for label, body in CALLS.items():
    add(f"reduce {label}", torch_zip(pickled(items(last_epoch=body))))
add("reduce as plain pickle", pickled(CALLS["os.system"]))
add("reduce as dict key", pickled(b"}" + CALLS["os.system"] + b"Ns"))
add("reduce in reduce", pickled(call("builtins", "print", call("os", "system", text(SHELL)))))
add("newobj", pickled(name("subprocess", "Popen") + b"(" + text(SHELL) + b"t\x81"))
add("newobj_ex", pickled(name("subprocess", "Popen") + b"(" + text(SHELL) + b"t}\x92", PROTO4))
add("inst", b"(S'" + SHELL.encode() + b"'\nios\nsystem\n.")
add("obj", pickled(b"(" + name("os", "system") + text(SHELL) + b"o"))
add("stack global", pickled(text("os") + text("system") + b"\x93(" + text(SHELL) + b"tR", PROTO4))
add("stack global with a dotted name", pickled(text("os") + text("path.join") + b"\x93(tR", PROTO4))
add("extension registry", pickled(b"\x82\x01(tR"))
add("setstate on an object", pickled(name("os", "_wrap_close") + b"(tR" + items(a=CALLS["os.system"]) + b"b"))
add("setitem on a global", pickled(name("os", "environ") + text("PATH") + text("/evil") + b"s"))
add("append to a global", pickled(name("sys", "path") + text("/evil") + b"a"))
add("call in a persistent id", torch_zip(pickled(CALLS["os.system"] + b"Q")))
add(
    "storage type that is a call",
    torch_zip(pickled(b"(" + text("storage") + CALLS["os.system"] + text("0") + text("cpu") + integer(1) + b"tQ")),
)
add(
    "tensor with hooks that are a call",
    torch_zip(
        pickled(call("torch._utils", "_rebuild_tensor_v2", b"N", integer(0), b")", b")", b"\x89", CALLS["os.system"]))
    ),
)
add("legacy stream whose system info is a call", LEGACY_MAGIC + pickled(integer(1001)) + pickled(CALLS["os.system"]))
add(
    "legacy stream whose keys are a call",
    LEGACY_MAGIC + pickled(integer(1001)) + pickled(b"}") + pickled(b"}") + pickled(CALLS["os.system"]),
)
add("optimizer lr that is a call", torch_zip(pickled(optimizer(lr=CALLS["os.system"]))))
add(
    "scheduler that is an object of an unknown class",
    torch_zip(pickled(call("evil", "Scheduler") + scheduler() + b"b")),
)


# --- structures that want memory or time


def laughs(opener: bytes, closer: bytes, levels: int = 60) -> bytes:
    """Each level holds the one below ten times: 10**levels leaves in a few hundred bytes."""
    body = b"]"
    for level in range(levels):
        put = b"r" + struct.pack("<I", level)
        body += put + b"0" + opener + (b"j" + struct.pack("<I", level)) * 10 + closer
    return body


add("billion laughs of lists", torch_zip(pickled(laughs(b"](", b"e"))))
add("billion laughs of tuples", torch_zip(pickled(laughs(b"(", b"t"))))
add("billion laughs inside an optimizer", torch_zip(pickled(optimizer(lr=laughs(b"](", b"e", 12)))))
add("billion laughs inside a scheduler", torch_zip(pickled(scheduler(milestones=laughs(b"](", b"e", 12)))))
add("billion laughs as dict key", pickled(b"}" + laughs(b"(", b"t", 7) + b"Ns"))
add("lists a million deep", pickled(b"]" * 1_000_000 + b"a" * 999_999))
add("tuples a million deep", pickled(b")" + b"\x85" * 1_000_000))
add("tuple a million deep as dict key", pickled(b"})" + b"\x85" * 1_000_000 + b"Ns"))
add("dicts two hundred thousand deep", pickled((b"}" + text("k")) * 200_000 + b"N" + b"s" * 200_000))
add("list that contains itself", torch_zip(pickled(b"]q\0h\0a")))
add("dict that contains itself", torch_zip(pickled(b"}q\0" + text("me") + b"h\0s")))
add("tuple that contains itself", torch_zip(pickled(b"]q\0(h\0tq\1h\1a0h\1")))
add("scheduler that is its own child",
    torch_zip(pickled(b"}q\0(" + text("_schedulers") + b"](h\0e" + text("last_epoch") + b"K\1u")))  # fmt: skip
add(
    "optimizer whose state is itself",
    torch_zip(pickled(b"}q\0(" + text("state") + b"h\0" + text("param_groups") + b"]u")),
)
add("object whose state is itself", pickled(name("a", "b") + b"(tRq\0}" + text("me") + b"h\0sb"))
add("ten million marks", lambda: pickled(b"(" * 10_000_000))
add("ten million empty lists", lambda: pickled(b"]" * 10_000_000))
add("ten million dups", lambda: pickled(b"N" + b"2" * 10_000_000))
add("pop to mark over and over", lambda: pickled(b"N" * 400_000 + b"(1" * 400_000))
add("memo index of four billion", pickled(b"Nr\xff\xff\xff\xff"))
add("memo that is not there", pickled(b"h\x07"))
add("integer of two gigabytes", pickled(b"\x8b\xff\xff\xff\x7f"))
add("integer of negative length", pickled(b"\x8b\xff\xff\xff\xff"))
add("integer of 255 bytes", pickled(b"\x8a\xff" + b"\x7f" * 255))
add("integer of a million digits", b"I" + b"9" * 1_000_000 + b"\n.")
add("string of eight exabytes", pickled(b"\x8d" + b"\xff" * 7 + b"\x7f", PROTO4))
add("bytes of eight exabytes", pickled(b"\x8e" + b"\xff" * 7 + b"\x7f", PROTO4))
add("bytearray of eight exabytes", pickled(b"\x96" + b"\xff" * 7 + b"\x7f", b"\x80\x05"))
add("frame of eight exabytes", pickled(b"\x95" + b"\xff" * 7 + b"\x7fN", PROTO4))
add("one long text encoded a hundred thousand times",
    lambda: pickled(text("x" * 1_000_000) + b"q\0" + text("latin1") + b"q\1" + name("_codecs", "encode") + b"q\2"
                    + b"h\2(h\0h\1tR0" * 100_000))  # fmt: skip
add("one large dict copied a hundred thousand times",
    lambda: pickled(b"}(" + b"".join(integer(i) + b"N" for i in range(50_000)) + b"uq\0" + name("collections", "OrderedDict")
                    + b"q\1" + b"h\1(h\0tR0" * 100_000))  # fmt: skip
add("one wide tuple as key a hundred thousand times",
    lambda: pickled(b"(" + b"N" * 50_000 + b"tq\0}q\1" + b"h\1h\0Ns0" * 100_000))  # fmt: skip
add("keys that collide",
    lambda: pickled(b"}(" + b"".join(b"\x8a\x0a" + ((2**61 - 1) * i).to_bytes(10, "little") + b"N" for i in range(1, 30_000))
                    + b"u"))  # fmt: skip
add("tensor of negative shape", torch_zip(pickled(
    call("torch._utils", "_rebuild_tensor_v2", b"N", integer(0), b"(" + integer(-1) + b"t", b"(" + integer(1) + b"t",
         b"\x89", b"N"))))  # fmt: skip
add("tensor of a million dimensions", lambda: torch_zip(pickled(
    name("torch._utils", "_rebuild_tensor_v2") + b"(NK\0(" + b"K\1" * 1_000_000 + b"tq\0h\0\x89NtR")))  # fmt: skip
add("storage that points outside", torch_zip(pickled(items(step=call(
    "torch._utils", "_rebuild_tensor_v2",
    b"(" + text("storage") + name("torch", "FloatStorage") + text("../../../etc/passwd") + text("cpu") + integer(1) + b"tQ",
    integer(2**31 - 1), b")", b")", b"\x89", b"N")))))  # fmt: skip

# --- broken machines

add("empty file", b"")
add("stop alone", b"\x80\x02.")
add("no stop", b"\x80\x02N")
add("stack underflow", pickled(b"R"))
add("mark as a value", pickled(b"((\x85"))
add("values left over", pickled(b"NNN"))
add("unknown opcode", pickled(b"\xff"))
add("protocol nine", b"\x80\x09N.")
add("text that is not UTF-8", pickled(b"X\x02\x00\x00\x00\xff\xfe"))
add("float that is no number", b"Fabc\n.")
add("quoted string without quotes", b"Sabc\n.")
add("lone surrogates", torch_zip(pickled(items(last_epoch=text("\ud800"), _step_count=text("\udfff")))))
add(
    "terminal escapes in keys",
    torch_zip(pickled(scheduler(**{"\x1b]0;owned\x07\x1b[2J": integer(1), "a\nb\r": integer(2)}))),
)
add("terminal escapes in globals", pickled(name("\x1b[31mevil", "\x1b[2J")))
add("out-of-band buffers", pickled(b"\x97\x98", b"\x80\x05"))

# --- numbers that are none

for label, value in {"nan": real(float("nan")), "inf": real(float("inf")), "text": text("1e-3"), "none": b"N", "list": b"]",
                     "huge": b"\x8a\x20" + b"\xff" * 31 + b"\x7f", "negative": real(-1.0), "tuple": b")"}.items():  # fmt: skip
    add(f"lr that is {label}", torch_zip(pickled(optimizer(lr=value, initial_lr=value))))
    add(f"last_epoch that is {label}", torch_zip(pickled(scheduler(last_epoch=value, _last_lr=elements(value)))))
    add(f"step that is {label}", torch_zip(pickled(items(state=items(a=items(step=value)), param_groups=b"]"))))
add("param_groups that is text", torch_zip(pickled(items(state=b"]", param_groups=text("x")))))
add("param_groups of numbers", torch_zip(pickled(items(state=b"K\1", param_groups=elements(b"K\1")))))
add("base_lrs of another length", torch_zip(pickled(scheduler(base_lrs=b"]", _last_lr=elements(b"K\1", b"N")))))
add("numpy scalar of objects",
    pickled(call("numpy._core.multiarray", "scalar", call("numpy", "dtype", text("O")), b"C\x08aaaaaaaa")))  # fmt: skip
add("numpy scalar of too few bytes",
    pickled(call("numpy._core.multiarray", "scalar", call("numpy", "dtype", text("f8")), b"C\x01a")))  # fmt: skip


# --- zips


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def plain_zip() -> bytes:
    return torch_zip(pickled(scheduler()), data__0=b"\0" * 64)


def end_of(data: bytes) -> int:
    return data.rindex(b"PK\5\6")


def entry_of(data: bytes) -> int:
    return data.index(b"PK\1\2")


def zip_with(*records: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")
        for record, content in records:
            archive.writestr(record, content)
    return buffer.getvalue()


add("deflate bomb", lambda: zip_with(("a/data.pkl", pickled(text("x" * 300_000_000))), method=zipfile.ZIP_DEFLATED))


@attack("deflate bomb that lies about its size")
def lying_bomb() -> bytes:
    data = zip_with(("a/data.pkl", pickled(text("x" * 50_000_000))), method=zipfile.ZIP_DEFLATED)
    return patched(data, entry_of(data) + 24, struct.pack("<I", 100))


add("entry outside", zip_with(("../../outside/data.pkl", pickled(b"}"))))
add("entry with an absolute name", zip_with(("/etc/data.pkl", pickled(b"}"))))
add("entry with backslashes", zip_with(("a\\..\\..\\data.pkl", pickled(b"}")), ("a/data.pkl", pickled(b"}"))))
add("two data.pkl of one name", zip_with(("a/data.pkl", pickled(b"}")), ("a/data.pkl", pickled(CALLS["os.system"]))))
add("two data.pkl in two folders", zip_with(("a/data.pkl", pickled(b"}")), ("b/data.pkl", pickled(CALLS["os.system"]))))
add("no data.pkl", zip_with(("a/other.pkl", pickled(b"}"))))
add("bzip2", zip_with(("a/data.pkl", pickled(b"}")), method=zipfile.ZIP_BZIP2))
add("directory offset beyond the file", lambda: patched(plain_zip(), end_of(plain_zip()) + 16, b"\xf0\xff\xff\x7f"))
add("directory of sixty thousand entries", lambda: patched(plain_zip(), end_of(plain_zip()) + 8, b"\xfe\xfe\xfe\xfe"))
add("directory size of four gigabytes", lambda: patched(plain_zip(), end_of(plain_zip()) + 12, b"\xfe\xff\xff\xff"))
add("zip64 without a locator", lambda: patched(plain_zip(), end_of(plain_zip()) + 12, b"\xff" * 8))
add("zip64 locator that points at itself",
    lambda: (lambda d: d[: end_of(d)] + struct.pack("<4sIQI", b"PK\6\7", 0, end_of(d), 1)
             + patched(d[end_of(d) :], 12, b"\xff" * 8))(plain_zip()))  # fmt: skip
add("comment that hides another end", lambda: plain_zip()[:-2] + b"\x16\x00" + b"PK\5\6" + b"\0" * 18)
add("bytes behind the end", lambda: plain_zip() + b"\0" * 100)
add("polyglot: pickle in front of a zip", lambda: pickled(CALLS["os.system"]) + plain_zip())
add("records that overlap", lambda: (lambda d: patched(d, d.rindex(b"PK\1\2") + 42, b"\0\0\0\0"))(plain_zip()))
add("local header with another name", lambda: patched(plain_zip(), 30, b"ARCHIVE"))
add("local header without a signature", lambda: patched(plain_zip(), plain_zip().index(b"PK\3\4", 10), b"XXXX"))
add("name length beyond the record", lambda: patched(plain_zip(), 26, b"\xff\xff"))
add("sizes that differ though stored", lambda: patched(plain_zip(), entry_of(plain_zip()) + 24, b"\x05\0\0\0"))
add("encrypted flag", lambda: patched(plain_zip(), entry_of(plain_zip()) + 8, b"\x01\0"))
add("several volumes", lambda: patched(plain_zip(), end_of(plain_zip()) + 4, b"\x01\0\x01\0"))
add("byteorder record of two megabytes", lambda: torch_zip(pickled(items(step=call(
    "torch._utils", "_rebuild_tensor_v2",
    b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + integer(1) + b"tQ",
    integer(0), b")", b")", b"\x89", b"N"))), byteorder=b"x" * 2_000_000, data__0=b"\0" * 4))  # fmt: skip
for cut in (4, 30, 60, 100):
    add(f"zip cut at byte {cut}", plain_zip()[:cut])


def flipped(seed: int) -> bytes:
    data, chance = bytearray(plain_zip()), random.Random(seed)
    for _ in range(3):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


for seed in range(12):
    add(f"bits flipped, seed {seed}", flipped(seed))

# --- other containers

add("json a million deep", b"[" * 1_000_000)
add("json integer of a million digits", b'{"global_step": ' + b"9" * 1_000_000 + b"}")
add("json of another shape", b'["global_step"]')
add("legacy stream cut off", LEGACY_MAGIC)
add("legacy storage of eight exabytes", LEGACY_MAGIC + pickled(integer(1001)) + pickled(b"}") + pickled(items(step=call(
    "torch._utils", "_rebuild_tensor_v2",
    b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + integer(1) + b"NtQ",
    integer(0), b")", b")", b"\x89", b"N"))) + pickled(elements(text("0"))) + b"\xff" * 7 + b"\x7f")  # fmt: skip


def safetensors(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


SAFETENSORS: dict[str, bytes] = {
    "header of eight exabytes": b"\xff" * 8 + b"{}",
    "header that is a list": safetensors([]),
    "header a million deep": safetensors(b"{" + b'"a":{' * 300_000),
    "offsets that overlap": safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                                         "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}, b"\0" * 6),
    "negative offsets": safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "shape of text": safetensors({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 0]}}),
    "shape that explodes": safetensors({"a": {"dtype": "F32", "shape": [10**300] * 1000, "data_offsets": [0, 0]}}),
    "tensor that is null": safetensors({"a": None}),
}  # fmt: skip
METADATA: dict[str, bytes] = {
    "metadata that runs code": pickled(CALLS["os.system"], PROTO4),
    "metadata of another class": pickled(call("a", "b"), PROTO4),
    "metadata that leads outside": pickled(call("Metadata", "x") + items(
        state_dict_metadata=items(a=b"N"),
        storage_data=b"}" + call("Index", "x") + items(fqn=text("a")) + b"b" + call("Info", "x") + items(
            relative_path=text("../../../etc/passwd"), offset=integer(0), length=integer(9)) + b"bs") + b"b", PROTO4),
    "metadata with huge places": pickled(call("Metadata", "x") + items(
        state_dict_metadata=items(a=b"N"),
        storage_data=b"}" + call("Index", "x") + items(fqn=text("a")) + b"b" + call("Info", "x") + items(
            relative_path=text("__0_0.distcp"), offset=b"\x8a\x08" + b"\xff" * 7 + b"\x7f", length=integer(9)) + b"bs")
        + b"b", PROTO4),
}  # fmt: skip


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for label, make in HOSTILE.items():
        (folder / f"{label.replace('/', ' ')}.pkl").write_bytes(make())
    for label, content in SAFETENSORS.items():
        (folder / f"{label}.safetensors").write_bytes(content)
    print(f"{len(HOSTILE) + len(SAFETENSORS)} hostile files in {folder}; unpickling some of them creates {CANARY}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
