"""A rollback in an object store: two phases, and nothing is overwritten.

    intent      journalled before anything is written; it names the new prefix and the pointer
    copy        a new prefix gets every object of the checkpoint: edited ones are uploaded, the others are copied inside the
                store. Each is read back, or has the MD5 of its source, which then still has the planned ETag (generation)
    pointer     one conditional put (`If-Match`, `If-None-Match`, `ifGenerationMatch`): from here on the rollback is made
    receipt     journalled; it holds what `undo` needs, which is one conditional put back

Before the pointer is put, `recover` deletes the new prefix; afterwards it writes contract and receipt. A store exchanges no
checkpoint at once, so later checkpoints stay where they are: only a reader that follows the pointer goes back. That is the
trainer's own (`latest`, Megatron's tracker) where the prefix has one. Else it is `chronicle-latest.json`, and the new prefix is
beside the checkpoints, where no trainer that takes the highest number finds it; `verify --newest` knows it by the journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rollback.checkpoint.layout import Checkpoint, stamp_of
from rollback.disk.content import ObjectStore
from rollback.disk.durable import write_atomic
from rollback.disk.remote import Bucket, Superseded, object_mark, shown
from rollback.errors import PlanRefused, Refused, RollbackError, StoppedPartWay, StoreFailed
from rollback.plan.plan import TRACKER, Plan
from rollback.plan.request import PointerEdit
from rollback.transaction.apply import POINTER_NAMES, edited_copies, facts_of
from rollback.transaction.change import Receipt, Record, Verb

OWN_POINTER = "chronicle-latest.json"
ASIDE = "chronicle-rollback"  # beside the checkpoints: new prefixes where no pointer of the trainer names them
_PAUSES_SECONDS = (0.0, 0.5, 2.0)  # before the pointer is asked what it says, when its put was not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """What a rollback in a store does. All places are URLs; `etag` is None for a pointer that is not there yet."""

    plan: Plan
    root: str
    folder: str  # the new prefix, all of which belongs to this rollback
    target: str  # the checkpoint from which the next launch starts
    pointer: str
    before: bytes | None
    etag: str | None
    after: bytes
    objects: tuple[tuple[str, int, str], ...]  # name below the checkpoint's folder, bytes, ETag
    later: Mapping[str, str]  # checkpoints from which the run went back, and the edited one -> their stamps

    def lines(self) -> tuple[str, ...]:
        """What a person has to know besides the plan."""
        size = sum(size for _, size, _ in self.objects)
        told = [f"{len(self.objects)} objects ({size:,} bytes) are copied to `{self.target}`; nothing is overwritten"]
        told = told if self.objects else []
        stay = [name for name in self.later if name != self.plan.entry]
        if stay:
            told.append(f"later checkpoints stay where they are: {', '.join(stay[:6])}")
        if self.pointer.endswith("/" + OWN_POINTER):
            told.append(
                f"no pointer of the trainer is here: `{OWN_POINTER}` is put; start the next launch from "
                "`chronicle verify --newest --print-path`, because one that lists this prefix takes the highest number"
            )
        return tuple(told)

    def to_json(self) -> dict[str, Any]:
        """The form in the journal, without the objects."""
        return {
            "folder": self.folder,
            "target": self.target,
            "pointer": self.pointer,
            "before": None if self.before is None else self.before.decode(),
            "after": self.after.decode(),
            "later": dict(self.later),
        }


def plan_in_store(plan: Plan, chosen: Checkpoint, listed: Sequence[Checkpoint], bucket: Bucket) -> StorePlan:
    """What `plan`, made from the view of a store, becomes there. Raises `PlanRefused` for what a store cannot do."""
    root = shown(plan.root)
    if plan.config_edits:
        names = ", ".join(dict.fromkeys(f"`{edit.file}`" for edit in plan.config_edits))
        changes = ", ".join(f"`{'.'.join(map(str, e.keys))}` {e.before:.10g} → {e.after:.10g}" for e in plan.config_edits)
        raise PlanRefused(
            f"{names} would have to change together with a pointer in the store, which cannot be one step: {changes}",
            "make this change first, and repeat the command with --accept-unproved in place of --lr-in",
        )
    if plan.copies:
        raise PlanRefused(
            f"`{plan.copies[0]}` is a copy of the newest checkpoint under a name of its own: it would have to be overwritten",
            "start the next launch from the checkpoint's own name, and delete that copy",
        )
    if Path(plan.source).parent != Path(plan.root):
        raise PlanRefused(f"`{shown(plan.source)}` is not in `{root}`: in a store nothing is brought back")
    pointers = [name for name in POINTER_NAMES if (Path(plan.root) / name).is_file()]
    if len(pointers) > 1:
        raise PlanRefused(
            f"`{root}` has {len(pointers)} pointers ({', '.join(pointers)}): a store changes one object at a time",
            "delete the pointer that no launch follows",
        )
    own = not pointers
    id_ = "".join("abcdefghijklmnop"[part] for byte in os.urandom(6) for part in divmod(byte, 16))  # loaders read digits
    saved = PurePosixPath(plan.entry)
    name = f"{saved.stem}-chronicle-{id_}{saved.suffix}" if plan.single_file else f"{plan.entry}-chronicle-{id_}"
    if pointers == [TRACKER] and plan.edits:
        raise PlanRefused(
            f"`{TRACKER}` holds a number, and Megatron makes the name from it: the edited checkpoint would have to be written "
            "over the saved one",
            "go back without changing the LR, and give the next launch the LR by its arguments; or work on a copy on a disk",
        )
    folder = f"{root.rpartition('/')[0]}/{ASIDE}/{id_}" if own else f"{root}/{name}"
    edited = bool(plan.edits)
    target = (f"{folder}/{name}" if own else folder) if edited else shown(plan.source)
    pointer = f"{root}/{pointers[0] if pointers else OWN_POINTER}"
    found = bucket.read(pointer)
    before, etag = found or (None, None)
    if own:
        after = json.dumps({"v": 1, "checkpoint": target, "step": plan.step, "rollback": id_}, indent=1).encode() + b"\n"
    else:
        text, word = (before or b"").decode(), str(plan.step) if pointers == [TRACKER] else PurePosixPath(target).name
        after = (text.replace(text.strip(), word) if text.strip() else word).encode()
    stay = [c for c in listed if c.step is not None and c.step > plan.step] + ([chosen] if edited else [])
    shown_pointer = PointerEdit(path=PurePosixPath(pointer).name, before="none" if before is None else before.decode(),
                                after=target if own else after.decode())  # fmt: skip
    return StorePlan(
        plan=replace(plan, abandon=(), pointers=(shown_pointer,)),
        root=root, folder=folder, target=target, pointer=pointer, before=before, etag=etag, after=after,
        objects=tuple(_objects(chosen)) if edited else (),
        later={c.path.name: stamp_of(c.path) for c in stay},
    )  # fmt: skip


def _objects(chosen: Checkpoint) -> list[tuple[str, int, str]]:
    paths = [chosen.path] if chosen.single_file else sorted(path for path in chosen.path.rglob("*") if path.is_file())
    found = []
    for path in paths:
        size, etag = object_mark(path)
        if not etag:
            raise PlanRefused(f"`{shown(str(path))}` has no ETag or generation: whether it is the planned one cannot be told")
        found.append((path.relative_to(chosen.folder).as_posix(), size, etag))
    return found


def apply_in_store(
    change: StorePlan, bucket: Bucket, *, objects_dir: Path, record: Record, contract_path: Path, contract: Mapping[str, Any]
) -> Receipt:
    """Make the copy, then put the pointer. Raises `Refused` with everything removed again, or `StoppedPartWay`."""
    kept = ObjectStore(objects_dir).add_bytes(contract_path.read_bytes()) if contract_path.is_file() else None
    data = {
        **facts_of(change.plan),
        "root": change.root,
        "entry": change.plan.entry,
        "contract_path": str(contract_path),
        "store": change.to_json() | {"contract": dict(contract), "contract_before": kept},
    }
    intent = record(Verb.ROLLBACK.intent, data)
    try:
        bucket.refuse_unconditional(change.folder)
        data["store"]["files"] = _copy(change, bucket)
    except (OSError, RollbackError, StoreFailed, Superseded, KeyboardInterrupt) as problem:
        _revert(intent, data, bucket, record, problem)
        raise _refusal(problem, change.pointer) from problem
    try:
        _put_pointer(bucket, change.pointer, change.after, change.etag)
    except Superseded as problem:
        _revert(intent, data, bucket, record, problem)
        raise _refusal(problem, change.pointer) from problem
    except StoppedPartWay:
        raise
    except BaseException as problem:  # the put may have arrived: what it names must stay
        raise _not_known(change.pointer, problem) from problem
    return _finish(intent, data, record)


def _copy(change: StorePlan, bucket: Bucket) -> list[dict[str, str]]:
    """Every object of the checkpoint under the new prefix; returns the digests of the edited ones."""
    if not change.objects:
        return []
    plan = change.plan
    folder = PurePosixPath(plan.source).parent if plan.single_file else PurePosixPath(plan.source)
    origin = shown(str(folder))
    edited = {edit.file for edit in plan.edits} | ({"chronicle-manifest.json"} if plan.has_manifest else set())

    def place(name: str) -> str:
        return change.target if plan.single_file else f"{change.target}/{name}"

    with tempfile.TemporaryDirectory(prefix="chronicle-rollback-") as work:
        source, made = Path(work, "source"), Path(work, "edited")
        for name, size, etag in change.objects:
            if name in edited:
                _download(bucket, f"{origin}/{name}", size, etag, source / name)
        files = edited_copies(plan, source, made)
        for file in files:
            bucket.upload(made / file.path, place(file.path))
            _read_back(bucket, place(file.path), (made / file.path).stat().st_size, file.after)
    for name, size, etag in change.objects:
        if name not in edited:
            bucket.copy(f"{origin}/{name}", place(name))
            if not bucket.has_copy(f"{origin}/{name}", place(name), size, etag):
                _refuse_changed(bucket, f"{origin}/{name}", etag)
                raise Refused(f"`{place(name)}` does not hold the bytes of `{origin}/{name}`", "repeat the command")
    now = bucket.below(shown(plan.source))
    if len(now) != len(change.objects) or any(bucket.etag(f"{origin}/{name}") != etag for name, _, etag in change.objects):
        raise PlanRefused(f"`{shown(plan.source)}` was changed after the plan was made", "make a new plan: repeat the command")
    return [{"path": file.path, "before": file.before, "after": file.after} for file in files]


def _download(bucket: Bucket, url: str, size_bytes: int, etag: str, path: Path) -> None:
    _refuse_changed(bucket, url, etag)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for part in bucket.stream(url, size_bytes):
            file.write(part)
    _refuse_changed(bucket, url, etag)


def _refuse_changed(bucket: Bucket, url: str, etag: str) -> None:
    if bucket.etag(url) != etag:
        raise PlanRefused(f"`{url}` was changed after the plan was made", "make a new plan: repeat the command")


def _read_back(bucket: Bucket, url: str, size_bytes: int, sha256: str) -> None:
    digest = hashlib.sha256()
    for part in bucket.stream(url, size_bytes):
        digest.update(part)
    if bucket.size(url) != size_bytes or digest.hexdigest() != sha256:
        raise Refused(f"`{url}` reads back with another digest than what was uploaded", "repeat the command")


def _put_pointer(bucket: Bucket, pointer: str, content: bytes, etag: str | None) -> None:
    """The one put that counts. Without an answer the pointer is asked what it says: a put may arrive and its answer not."""
    problem: Exception | None = None
    for pause in _PAUSES_SECONDS:
        time.sleep(pause)
        try:
            bucket.put(pointer, content, etag=etag)
            return
        except (StoreFailed, Superseded) as answer:
            problem = answer
        try:
            now = bucket.read(pointer)
        except StoreFailed:
            continue
        if now is not None and now[0] == content:
            return
        if isinstance(problem, Superseded):
            raise problem
    raise _not_known(pointer, problem)


def _not_known(pointer: str, problem: BaseException | None) -> StoppedPartWay:
    return StoppedPartWay(
        f"whether `{pointer}` was put is not known: {problem or 'it was interrupted'}",
        remedy="when the store answers again, `chronicle recover` finishes or reverts it",
    )


def _refusal(problem: BaseException, pointer: str) -> BaseException:
    if isinstance(problem, Superseded):
        where = str(problem)
        what = "was changed by another writer" if where == pointer else "is there already, or was changed,"
        return PlanRefused(f"`{where}` {what} after the plan was made; nothing was changed", "repeat the command")
    if isinstance(problem, StoreFailed):
        return Refused(f"{problem.message}; nothing was changed", problem.remedy)
    if isinstance(problem, OSError):
        return RollbackError(f"the copy could not be prepared; nothing was changed: {problem}", "fix the cause, then repeat")
    return problem


def _finish(intent: str, data: Mapping[str, Any], record: Record) -> Receipt:
    """What follows the pointer: the contract of the next launch, and the receipt. It may be repeated."""
    contract = {**data["store"]["contract"], "rollback": intent}
    receipt = {key: value for key, value in data.items() if key != "contract_path"} | {"intent": intent}
    try:
        write_atomic(Path(data["contract_path"]), json.dumps(contract, indent=1) + "\n")
        return Receipt(id=record(Verb.ROLLBACK.receipt, receipt), data=receipt)
    except (OSError, RollbackError) as problem:
        raise StoppedPartWay(
            f"the pointer is put, and contract or receipt could not be written: {problem}",
            remedy="fix the cause, then finish it with `chronicle recover`",
        ) from problem


def _revert(intent: str, data: Mapping[str, Any], bucket: Bucket, record: Record, cause: BaseException | None) -> None:
    """Delete the new prefix, which nobody was told of, and close the intent."""
    folder = data["store"]["folder"]
    try:
        _remove(bucket, folder)
        because = {} if cause is None else {"cause": str(cause)}
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "reverted", **because})
    except (StoreFailed, Superseded, OSError, RollbackError) as problem:
        raise StoppedPartWay(
            f"nothing was changed, but `{folder}` holds part of a copy: {problem}",
            remedy="no loader is told of it; `chronicle recover` removes it",
        ) from cause


def _remove(bucket: Bucket, folder: str) -> None:
    assert "chronicle-" in folder, f"not a prefix of a rollback: {folder}"
    for url in bucket.below(folder):
        bucket.remove(url)


def left_and_made(done: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[dict[str, str], list[str]]:
    """Of the rollbacks in one place, oldest first (step, `store` of the receipt): what they left there (name -> stamp),
    and the URLs from which they let the run go on; not those of steps from which a later one went back.
    """
    left = {str(name): str(stamp) for _, store in done for name, stamp in dict(store.get("later") or {}).items()}
    return left, [str(store["target"]) for step, store in done if step <= done[-1][0]]


def undo_in_store(
    receipt: Receipt, bucket: Bucket, *, objects_dir: Path, record: Record, contract_path: Path
) -> Receipt:
    """Put the pointer back on the condition that it still says what the rollback put; then delete the new prefix."""
    store = receipt.data["store"]
    now = bucket.read(store["pointer"])
    if now is None or now[0] != store["after"].encode():
        said = "is gone" if now is None else f"holds {now[0].decode(errors='replace').strip()[:80]!r}"
        raise Refused(
            f"`{store['pointer']}` {said}: another writer has changed it since the rollback",
            "nothing is to be undone: the next launch does not start from that rollback",
        )
    content = _content_before(store)
    data = {
        "root": receipt.data["root"],
        "entry": receipt.data["entry"],
        "contract_path": str(contract_path),
        "undoes": receipt.id,
        "undoes_intent": receipt.data["intent"],
        "step": receipt.data.get("step"),
        "store": dict(store),
    }
    intent = record(Verb.UNDO.intent, data)
    try:
        _put_pointer(bucket, store["pointer"], content, now[1])
    except (StoreFailed, Superseded) as problem:
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "reverted", "cause": str(problem)})
        raise _refusal(problem, store["pointer"]) from problem
    return _finish_undo(intent, data, bucket, objects_dir, record)


def _content_before(store: Mapping[str, Any]) -> bytes:
    """What the pointer said; where there was none, that there is none."""
    if store["before"] is not None:
        return str(store["before"]).encode()
    return json.dumps({"v": 1, "checkpoint": None, "undone": store["target"]}, indent=1).encode() + b"\n"


def _finish_undo(
    intent: str, data: Mapping[str, Any], bucket: Bucket, objects_dir: Path, record: Record
) -> Receipt:
    store, path = data["store"], Path(data["contract_path"])
    if store["contract_before"] is not None:
        write_atomic(path, ObjectStore(objects_dir).find(store["contract_before"]).read_text())
    else:
        path.unlink(missing_ok=True)
    done = {key: data[key] for key in ("root", "entry", "undoes", "undoes_intent", "step")} | {"intent": intent}
    id_ = record(Verb.UNDO.receipt, {**done, "restored": [store["pointer"]]})
    left = None
    try:
        _remove(bucket, store["folder"])
    except (StoreFailed, Superseded) as problem:
        left = f"`{store['folder']}` could not be removed: {problem}; nothing names it any more, delete it by hand"
    return Receipt(id=id_, data=done, left_over=left)


def recover_in_store(
    intent: str, kind: str, data: Mapping[str, Any], bucket: Bucket, *, objects_dir: Path, record: Record
) -> Receipt | None:
    """Finish what was interrupted after its pointer was put, else revert it; None when it was reverted."""
    store = data["store"]
    now = bucket.read(store["pointer"])
    text = None if now is None else now[0]
    undoing = kind == Verb.UNDO.intent
    if text == (_content_before(store) if undoing else store["after"].encode()):
        receipt = _finish_undo(intent, data, bucket, objects_dir, record) if undoing else _finish(intent, data, record)
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "finished", "receipt": receipt.id})
        return receipt
    if undoing:
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "reverted"})
        return None
    _revert(intent, data, bucket, record, None)
    return None

