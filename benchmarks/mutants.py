"""Mutation benchmark: a fixed list of small defects, each applied to a copy of the tree and given to the tests that should
notice it. `python -m benchmarks.mutants` (`make mutants`) prints killed / total per package and the survivors.

A mutant names a function or constant by its qualified name, wherever in its package that is, an exact piece of its source,
and a replacement. A piece that is not found exactly once is reported as stale. The tree itself is never changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rollback", "chronicle", "bit_transformer", "experiments")
TIMEOUT_SECONDS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One defect: in `name` of `package`, `old` becomes `new`; `tests` are pytest arguments."""

    package: str
    name: str  # function, Class.method, or top-level constant
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        """One line for the report."""
        return f"{self.package}: {self.name}: `{' '.join(self.old.split())}` -> `{' '.join(self.new.split())}`"


def _of(package: str, *tests: str) -> _Group:
    return _Group(package, tests)


@dataclass(frozen=True, slots=True)
class _Group:
    """Mutants of one package that share their tests."""

    package: str
    tests: tuple[str, ...]

    def __call__(self, name: str, old: str, new: str, *tests: str) -> Mutant:
        return Mutant(package=self.package, name=name, old=old, new=new, tests=tests or self.tests)


_transaction = _of("rollback", "tests/rollback/test_transaction.py", "tests/rollback/test_silent_disk.py",
                   "tests/rollback/test_rollback_large.py")
_lr = _of("rollback", "tests/rollback/test_lr_edit.py", "tests/rollback/test_lr_configured.py",
          "tests/rollback/test_plan.py")
_verify = _of("rollback", "tests/rollback/test_verify.py")
_files = _of("rollback", "tests/rollback/test_torch_file.py", "tests/attacks/test_greedy.py")
_detect = _of("rollback", "tests/detect/test_recorded.py", "tests/detect/test_rules.py", "tests/detect/test_parts.py",
              "tests/detect/test_engine.py")
_propose = _of("rollback", "tests/detect/test_propose.py")
_journal = _of("chronicle", "tests/journal/test_writer.py", "tests/journal/test_events.py")
_lineage = _of("chronicle", "tests/journal/test_lineage.py", "tests/journal/test_lr_ledger.py")
_guard = _of("chronicle", "tests/guard/test_checks.py", "tests/guard/test_log_tripwires.py",
             "tests/guard/test_loaded_state.py")
_launch = _of("chronicle", "tests/launch/test_admission.py", "tests/launch/test_nodes.py")
_data = _of("chronicle", "tests/data/test_plan.py", "tests/data/test_order.py")
_claims = _of("chronicle", "tests/evidence/test_claims.py", "tests/evidence/test_recheck.py")
_model = _of("bit_transformer", "tests/bit_transformer/test_gate.py", "tests/bit_transformer/test_bits.py",
             "tests/bit_transformer/test_schedule.py", "tests/bit_transformer/test_attention.py")
_loop = _of("bit_transformer", "tests/bit_transformer/test_launches.py")
_study = _of("experiments", "tests/experiments/test_statistics.py", "tests/experiments/test_runner.py",
             "tests/experiments/test_report.py", "tests/experiments/test_trainer.py")

MUTANTS: tuple[Mutant, ...] = (
    # transactions
    _transaction("_finish", "_read_back(prepared)", "pass"),
    _transaction("_read_back", "found != expected", "False"),
    _transaction("_patch", "byte not in pair", "False"),
    _transaction("_is_begun", "prepared.patched and patched_at", "False and patched_at"),
    _transaction("_remove_workspace", "path.name == READY", "path.name != READY"),
    _transaction("refuse_stale", "file_fingerprint(path) != file.fingerprint", "False", "tests/rollback/test_plan.py"),
    _transaction("_check_edited", "before.value != after.value", "False", "tests/rollback/test_torch_file.py"),
    # learning rates and plans
    _lr("_RATIO_TOLERANCE", "1e-9", "1e-2", "tests/rollback/test_plan.py"),
    _lr("_stored", '== "manual"', '== "by hand"'),
    _lr("memory_after", "group[name] *= ratio", "pass"),
    _lr("_unscaled", "name is SchedulerClass.DEEPSPEED", "False"),
    # verification
    _verify("_counts", "abs(named - step) <= 1", "abs(named - step) <= 1000"),
    _verify("compare_manifest", "found == expected", "found <= expected"),
    _verify("check_random_states", "digest in seen", "False"),
    _verify("_check", "not any(any(raw) for raw, _ in samples)", "False"),
    _verify("STEPS_BEFORE_ALIVE", "2", "2000"),
    # foreign bytes in files
    _files("_check_name", 'p in ("", ".", "..")', 'p in ("",)'),
    _files("Machine.spend", "self.left < 0", "False"),
    # detector
    _detect("Channel._is_sudden", "2 * shift >= before", "False"),
    _detect("Channel._feed_slow", "cusum >= height", "False"),
    _detect("Channel._feed_slow", "cusum <= height * SUSPICION", "True"),
    _detect("Channel._learn_tail", "min(z - self.tail_start, HIGH_RISE * self.tail_mean)", "z - self.tail_start"),
    _detect("Channel._close", "event.status is Status.RECOVERED", "False"),
    _detect("Fusion._loss_tier", "leader.lasting and self.lr_wrong", "False"),
    _propose("_was_in_trouble", "event.onset_step <= step < event.recovered_step", "False"),
    _propose("_newest_target", "MARGIN * interval, doubt", "MARGIN * interval"),
    _propose("_standing", "known.onset_low_step < back_to", "True"),
    _propose("_exhausted", "len(today) >= PER_DAY", "len(today) > PER_DAY"),
    # journal
    _journal("JournalWriter._write", "os.write(fd, record) != len(record)", "os.write(fd, record) < 0"),
    _journal("JournalWriter._write", "os.fsync(fd)", "pass"),
    _journal("JournalWriter._cut", "self._torn = True", "self._torn = False"),
    _journal("JournalWriter._leave_parent", "self._owner_pid != os.getpid()", "False"),
    _journal("find_open_transaction", "CLOSED_BY[one.kind] & answered.get(one.id, set())", "answered.get(one.id)"),
    _lineage("Lineage.owner", "self.kept[place].first <= step", "self.kept[place].first < step"),
    # the guard
    _guard("LrTripwire.feed", 'self.source != "scheduler"', "False"),
    _guard("LrTripwire.after", 'memory.lr_source if memory is not None and by_steps else "untested"', '"scheduler"'),
    _guard("LrWitness.source", "self.num_right >= NUM_CONFIRM", "self.num_right >= 0"),
    _guard("check_buffers", "if lost:", "if False:"),
    _guard("_digest_checks", "if saved.moments:", "if False:"),
    _guard("warm_up_checks", "a <= b * (1 + COMPUTED)", "a <= b * 10"),
    _guard("_step", "resume_step < first <= resume_step + spacing", "resume_step <= first"),
    _guard("FAR", "8.0", "8000.0"),
    # launches, data, claims
    _launch("ensure_startable", "intent is not None", "False"),
    _launch("ensure_node_in_use", "host_name() in excluded", "False", "tests/hardware/test_hardware.py"),
    _data("Segments.resumed", "generation + int(reshuffle)", "generation"),
    _data("DataPlan.require_same", "present != dict(stored)", "False"),
    _claims("_parameters", 'one.fields.get("counted")', 'one.fields.get("local")'),
    # trainer
    _model("HeldOutGate._find_fault", "number <= config.burn_in", "number < config.burn_in"),
    _model("_ENCODE", "keepdim=True) % 2", "keepdim=True) % 3"),
    _model("attend_in_chunks", "overlap + chunk, chunk).transpose", "overlap + chunk, chunk).flip(-1).transpose"),
    _model("plan_schedule", "(step + 1) / config.warmup_steps", "step / config.warmup_steps"),
    _loop("train", "if not step.finite:", "if False:"),
    _loop("find_resume_point", "found > step", "found > step + 1000"),
    # studies
    _study("_crossed_error", "total -= residual", "pass"),
    _study("Estimate.is_real", "max(self.t_p, self.sign_flip_p) <= alpha", "min(self.t_p, self.sign_flip_p) <= alpha"),
    _study("average", "setdefault(unit_of(pair), []).append(value)", "setdefault((pair,), []).append(value)"),
    _model("HeldOutGate._find_fault", "if not math.isfinite(bpb):", "if False:"),
    _study("read_history", "setdefault(number, result)", "update({number: result})"),
    _study("_compare_until_treated", "equal[channel] < limit", "False"),
)


def find(mutant: Mutant, root: Path) -> tuple[Path, int, int]:
    """Return the file and the span of the piece to replace. Raises LookupError unless it is there exactly once."""
    pattern = re.compile(r"\s+".join(re.escape(word) for word in mutant.old.split()))
    found = []
    for path in sorted((root / mutant.package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not pattern.search(text):
            continue
        for first, last in _spans(text, mutant.name):
            found += [(path, first + match.start(), first + match.end()) for match in pattern.finditer(text[first:last])]
    if len(found) != 1:
        raise LookupError(f"found {len(found)} times")
    return found[0]


def _spans(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Character spans of the definitions of this qualified name."""
    owner, dot, last = name.rpartition(".")
    wanted, starts = owner + dot + last.lstrip("_"), [0]  # a name that becomes private is the same one
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[int, int]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if prefix + node.name.lstrip("_") == wanted:
                    yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and prefix + target.id.lstrip("_") == wanted for target in targets):
                    value = node.value or node
                    yield starts[value.lineno - 1] + value.col_offset, starts[node.end_lineno or node.lineno]

    yield from walk(ast.parse(text).body, "")


def copy_tree(target: Path) -> Path:
    """Copy the tracked files of the working tree to `target`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, listed)):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run_tests(tree: Path, tests: Sequence[str]) -> str:
    """Return `passed`, `failed`, `timeout`, or `error` with pytest's code where no test was judged."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "timeout"
    return {0: "passed", 1: "failed"}.get(done.returncode, f"error {done.returncode}")


def judge(mutant: Mutant, tree: Path) -> str:
    """Apply the mutant in `tree`, run its tests, and restore the file; return `killed`, `survived`, or what went wrong."""
    try:
        path, first, last = find(mutant, tree)
    except LookupError as problem:
        return f"stale ({problem})"
    original = path.read_text(encoding="utf-8")
    path.write_text(original[:first] + mutant.new + original[last:], encoding="utf-8")
    try:
        outcome = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    return {"passed": "survived", "failed": "killed", "timeout": "killed"}.get(outcome, outcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen mutants; return 1 where one survived, is stale, or could not be judged."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants side by side, each in its own tree")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose title contains TEXT")
    parser.add_argument("--list", action="store_true", help="only look for the pieces, run no test")
    parser.add_argument("--baseline", action="store_true", help="first run the tests of the chosen mutants unchanged")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.title]
    if options.list:
        return _list(chosen)
    started, outcomes = time.monotonic(), dict[Mutant, str]()
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in chosen:
        waiting.put(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(Path(folder) / f"tree-{number}") for number in range(max(1, min(options.jobs, len(chosen))))]
        if options.baseline:
            for tests in dict.fromkeys(mutant.tests for mutant in chosen):
                if (outcome := run_tests(trees[0], tests)) != "passed":
                    print(f"error: the tests fail without a mutant ({outcome}): {' '.join(tests)}", file=sys.stderr)
                    return 1

        def work(tree: Path) -> None:
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                outcomes[mutant] = judge(mutant, tree)
                print(f"{outcomes[mutant]:<10} {mutant.title}", flush=True)

        workers = [threading.Thread(target=work, args=(tree,)) for tree in trees]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return _report(chosen, outcomes, time.monotonic() - started)


def _list(chosen: Sequence[Mutant]) -> int:
    stale = 0
    for mutant in chosen:
        try:
            where = str(find(mutant, ROOT)[0].relative_to(ROOT))
        except LookupError as problem:
            where, stale = f"stale ({problem})", stale + 1
        print(f"{where:<45} {mutant.title}")
    return 1 if stale else 0


def _report(chosen: Sequence[Mutant], outcomes: dict[Mutant, str], seconds: float) -> int:
    total = Counter(mutant.package for mutant in chosen)
    killed = Counter(mutant.package for mutant in chosen if outcomes[mutant] == "killed")
    print()
    for package in PACKAGES:
        print(f"{package:<16} {killed[package]:>3} of {total[package]:>3} killed")
    print(f"{'all':<16} {killed.total():>3} of {total.total():>3} killed, {seconds:.0f} s")
    rest = [mutant for mutant in chosen if outcomes[mutant] != "killed"]
    for mutant in rest:
        print(f"{outcomes[mutant]}: {mutant.title}\n  tests: {' '.join(mutant.tests)}")
    return 1 if rest else 0


if __name__ == "__main__":
    sys.exit(main())
