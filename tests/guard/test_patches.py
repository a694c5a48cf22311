"""What the guard changes of others stands in `patches.py`, and no object of the guard is changed by another one."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chronicle.resume import patches

ROOM = Path(patches.__file__).parent
MAY_BE_CHANGED = ("control",)  # the Trainer hands its callbacks an object that they are to change

WATCHED = """
import json, sys, types
import accelerate, torch, torch.distributed.checkpoint, torch._dynamo, torch.utils.data, torchdata.stateful_dataloader
import lightning.fabric, lightning.pytorch, transformers.trainer
import chronicle

ROOTS = ("torch", "accelerate", "lightning", "transformers", "torchdata", "builtins", "os", "json", "pickle", "random", "numpy")

def seen():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ROOTS or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                found[f"{name}", key] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for own, part in list(vars(value).items()):
                    if isinstance(part, (types.FunctionType, staticmethod, classmethod, property)):
                        found[f"{name}:{value.__qualname__}", own] = id(part)
    return found

# torch itself wraps the `step` of a class with its first optimizer
keep = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=.1)]
before = seen()
"""

TRAIN = """
def train(model, optimizer, save):
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    for rows in loader:
        model(rows).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save()

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
chronicle.attach(sys.argv[1] + "/logs/a", model, optimizer)
train(model, optimizer, lambda: torch.save({"optimizer": optimizer.state_dict()}, sys.argv[1] + "/a.pt"))
accelerator = chronicle.guard(accelerate.Accelerator(cpu=True), run_dir=sys.argv[1] + "/logs/b")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=.1))
train(model, optimizer, lambda: accelerator.save_state(sys.argv[1] + "/b"))
chronicle.guard(lightning.fabric.Fabric(accelerator="cpu"), run_dir=sys.argv[1] + "/logs/c")
from chronicle.resume.adapters.transformers import ChronicleCallback
ChronicleCallback(sys.argv[1] + "/logs/d")
after = seen()
print(json.dumps([list(key) for key, value in after.items() if before.get(key, value) != value]))
"""


def test_nothing_else_is_changed(tmp_path: Path) -> None:
    """Of all functions of the libraries, before and after: those that are others now are rows."""
    code = WATCHED + TRAIN
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changed = {tuple(one) for one in json.loads(done.stdout.splitlines()[-1])}
    rows = {target for one in patches.PATCHES.values() for target in one.targets}
    targets = {f"{place}.{name}" if ":" in place else f"{place}:{name}" for place, name in changed}
    assert targets <= rows
    assert {"torch:save", "lightning.fabric.fabric:Fabric.setup", "transformers.trainer:Trainer.train"} <= targets


def test_rows_are_few_and_are_there_in_this_version() -> None:
    assert len(patches.PATCHES) <= 12
    assert all(one.why and one.until for one in patches.PATCHES.values())


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOM.rglob("*.py")):
        if path.name != "patches.py":
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def own_fields(tree: ast.Module) -> set[str]:
    """Names that the classes of a module declare or set themselves."""
    found = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            if isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


def test_no_object_is_changed_from_outside() -> None:
    """An attribute is set by its own class, or in the module that declares it; callbacks are not wired by assignment."""
    found = []
    for path, tree in sources():
        own = own_fields(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            is_own = node.attr in own or node.attr.startswith("__") or ast.unparse(node.value) in ("self", "cls")
            if not is_own and ast.unparse(node.value) not in MAY_BE_CHANGED:
                found.append(f"{path.relative_to(ROOM)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_only_the_file_of_patches_sets_by_name() -> None:
    places = [
        path.name
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__")
    ]
    assert places == ["verdict.py"]  # `StartingPoint.learn` sets its own fields


@pytest.mark.parametrize("name", ["_getframe", "get_objects", "addaudithook", "_current_frames", "setprofile", "settrace"])
def test_nobody_walks_frames_or_objects(name: str) -> None:
    assert [path.name for path, _ in sources() if name in path.read_text(encoding="utf-8")] == []
