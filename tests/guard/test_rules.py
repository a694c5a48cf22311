"""Every row of the table of rules: a difference is refused once, and allowed once where a person may accept it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from chronicle.resume.allowed import (
    A_HABIT,
    AS_FIRST_PASS,
    GOES_ON,
    HABITS,
    Allowance,
    Facts,
    Kind,
    allow,
    allowance,
)
from chronicle.resume.checks.check import Outcome, failed, noted
from chronicle.resume.contract import NEVER_BY_REASON_ALONE, Contract, Expectation
from chronicle.resume.memory import Memory
from chronicle.resume.rules import RULES, SAME, judge

GUARD = (Path(__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .* \| (refused|noted|not compared) \| (`\w+`|–) \| .* \|$", GUARD, re.MULTILINE)


def expecting(**accepted: str) -> Expectation:
    return Expectation(basis="manifest", memory=Memory(), accepted=accepted)


@pytest.mark.parametrize("row", RULES)
def test_a_difference_is_refused_once_and_allowed_once(row: str) -> None:
    """By its own name alone; what was saved as state has none."""
    rule, key = RULES[row], "weight_decay"
    accepted = rule.accepted.format(key)
    refused = judge(expecting(), "value", 1.0, 2.0, rule=row, key=key)
    assert (refused.outcome, refused.code, refused.accepted) == (Outcome.DIFFERENT, rule.code, accepted)
    assert judge(expecting(another="why"), "value", 1.0, 2.0, rule=row, key=key).outcome is Outcome.DIFFERENT
    assert judge(expecting(), "value", 1.0, 1.0 + SAME / 2, rule=row, key=key).outcome is Outcome.EQUAL
    if accepted:
        allowed = judge(expecting(**{accepted: "why"}), "value", 1.0, 2.0, rule=row, key=key)
        assert (allowed.outcome, allowed.cause) == (Outcome.NOTED, f"1.0 → 2.0, accepted as `{accepted}`")
    by_reason = judge(expecting(**{"*": "why"}), "value", 1.0, 2.0, rule=row, key=key)
    is_wide = bool(accepted) and accepted not in NEVER_BY_REASON_ALONE
    assert by_reason.outcome is (Outcome.NOTED if is_wide else Outcome.DIFFERENT)


def test_the_manual_names_every_way_to_accept_a_difference_and_no_other() -> None:
    """An option of a group and a fact of the topology are accepted by their own names: one of each stands in the manual."""
    names = {rule.accepted for rule in RULES.values()} - {"", "{}"} | {"weight_decay", "world_size"}
    assert names == {name.strip("`") for _, name in ROWS} - {"–"}
    assert len(ROWS) > 40


FACTS = Facts(expected=expecting(), memory=Memory(habits=("frozen parameters", "step")), found=Memory())
DIFFERENCE = failed("frozen parameters", "M3", expected="a", found="b", where="requires_grad")


@pytest.mark.parametrize(
    ("name", "facts", "found"),
    [
        ("frozen parameters", {"is_seen": True, "as_first": {("frozen parameters", "here")}}, (Kind.FIRST_PASS, AS_FIRST_PASS)),
        ("frozen parameters", {}, (Kind.FIRST_PASS, A_HABIT)),
        ("frozen parameters", {"is_seen": True}, None),  # the next step was seen, and was another one
        ("step", {}, None),  # a lost counter would change it as well
        ("schedule further on", {"longer": noted("schedule", "M2", cause="longer")}, (Kind.LONGER, "longer")),
        ("schedule further on", {}, None),
        ("buffers", {"half": "float16"}, (Kind.ROUNDED, "rounded to float16")),
        ("optimizer moments", {"half": "float16"}, None),
        ("weights", {"moved": Allowance(Kind.ROUNDED, "taken back")}, (Kind.ROUNDED, "taken back")),
        ("next batch", {"is_reload": True}, (Kind.CARRIED_ON, "go on from where they were")),
        ("weights", {"is_reload": True}, None),
    ],
)
def test_each_allowance_covers_what_it_is_for(name: str, facts: dict[str, object], found: tuple[Kind, str] | None) -> None:
    made = allowance(replace(DIFFERENCE, name=name, where="here"), replace(FACTS, **facts))  # type: ignore[arg-type]
    assert made is found if made is None or found is None else (made.kind is found[0] and found[1] in made.why)


def test_nothing_is_excused_by_the_first_pass_after_a_rollback() -> None:
    """The rollback promised another state than the one that was saved."""
    promised = replace(FACTS.expected, contract=Contract(rollback="R", checkpoint="/c"))
    facts = replace(FACTS, expected=promised, as_first=frozenset({(DIFFERENCE.name, DIFFERENCE.where)}))
    assert allow([DIFFERENCE], facts) == [DIFFERENCE]
    (excused,) = allow([DIFFERENCE], replace(facts, expected=FACTS.expected))
    assert excused.cause.endswith(AS_FIRST_PASS) and excused.cause.startswith("a → b")


def test_a_habit_never_excuses_a_count_or_a_position() -> None:
    assert not set(HABITS) & {*GOES_ON, "learning rate per group", "optimizer step", "scheduler position"}
