"""`chronicle claim "…"`: a sentence about the run, held against what its ranks recorded."""

from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult, ExitCode
from chronicle.errors import UsageProblem
from chronicle.audit.claims import Judgement, Verdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.anchors import anchor_heads

__all__ = ["claim"]

LONGEST_SENTENCE = 4000


def claim(
    sentence: Annotated[str, typer.Argument(help="What is said about the run.", show_default=False)],
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Check a sentence about the run against evidence and record the answer.

    Example: chronicle claim "trained 1.21B on 4 GPUs on WikiText-103"

    SUPPORTED, CONTRADICTED or UNSUPPORTED line by line; exit code 5 unless all of it is supported.
    """
    if len(sentence) > LONGEST_SENTENCE:
        raise UsageProblem(f"{len(sentence)} characters are no sentence", "claim one thing at a time")
    paths = need_run(settings_from(run, logs)).paths
    journal = read_journal(paths)
    evidence = read_evidence(paths, journal)
    judgements = judge_claim(sentence, evidence)
    if not judgements:
        hint = "name a count, devices, steps, data, precision or loss"
        raise UsageProblem(f"nothing in this sentence can be checked: {sentence}", hint)
    verdict = overall(judgements)
    with JournalWriter(paths) as writer:
        heads = anchor_heads(journal)
        data = {"text": sentence, "verdict": verdict.value, "statements": [one.to_json() for one in judgements]}
        entry = writer.append("claim", title=f"{verdict.value}: {sentence}"[:200], data={**data, "journal_heads": heads})
    text = "\n".join([*map(_line, judgements), f"{verdict.value}  {sentence}"])
    code = ExitCode.DONE if verdict is Verdict.SUPPORTED else ExitCode.FINDINGS
    return CommandResult(text=text, data={"id": entry.id, **data}, exit_code=code)


def overall(judgements: tuple[Judgement, ...]) -> Verdict:
    """The whole sentence is as good as its worst part."""
    verdicts = {one.verdict for one in judgements}
    for verdict in (Verdict.CONTRADICTED, Verdict.UNSUPPORTED):
        if verdict in verdicts:
            return verdict
    return Verdict.SUPPORTED


def _line(one: Judgement) -> str:
    where = f"  [{', '.join(one.evidence[:3])}{', …' if len(one.evidence) > 3 else ''}]" if one.evidence else ""
    return f"{one.verdict.value:<12}  {one.statement.text}: {one.message}{where}"
