"""A plan shown, agreed to and carried out: what `rollback` and `apply` have in common."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem
from chronicle.cli.transaction import Ground
from rollback.transaction.apply import apply_plan
from rollback.plan.plan import Plan
from rollback.plan.text import format_plan

__all__ = ["agree", "carry_out", "uninterrupted"]


def carry_out(plan: Plan, ground: Ground, *, yes: bool) -> CommandResult:
    """Show the plan, ask on a terminal, apply it. Raises `UsageProblem` when nobody can be asked: nothing changed."""
    text = format_plan(plan)
    if not plan.changes_anything:
        done = f"already at step {plan.step}: nothing to change"
        return CommandResult(text=done, data=plan.to_json() | {"changed": False})
    agree("Carry out this plan?", text, yes=yes)
    with uninterrupted():
        receipt = apply_plan(
            plan,
            objects_dir=ground.paths.objects_dir,
            record=ground.record,
            contract_path=ground.paths.contract_path,
        )
    talk = [f"new journal: {ground.paths.journal_dir}"] if ground.is_new else []
    talk += [receipt.left_over] if receipt.left_over else []
    talk.append("take it back with `chronicle undo`")
    lines = [text, "", f"done: step {plan.step} is what the next launch will load ({receipt.id})"]
    data = {"changed": True, "receipt": receipt.id, "plan": plan.to_json() | {"digest": plan.digest}}
    return CommandResult(text="\n".join(lines), data=data, talk=tuple(talk))


def agree(question: str, text: str, *, yes: bool) -> None:
    """Ask a person who has seen `text`; raises `UsageProblem` without a terminal, `typer.Abort` on a no."""
    if yes:
        return
    print(text, file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageProblem("no terminal to ask on, nothing was changed", "say --yes to carry it out")
    typer.confirm(question, abort=True, err=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a transaction is over: it takes milliseconds, and half of it would need `recover`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
