"""`chronicle alerts`: where alerts go, what waits, a message to try them, and sending what is left."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from chronicle.cli.options import IN_RUN, CommandResult, ExitCode, InRun
from chronicle.errors import UsageProblem
from chronicle.story.plain import align_columns

if TYPE_CHECKING:
    from chronicle.alerts.destinations import Destination
    from chronicle.paths import RunPaths


def alerts(test: bool = False, send: bool = False, at: InRun = IN_RUN) -> CommandResult:
    """Show where alerts go; send a test, or send what waits.

    Destinations are `[alerts.NAME]` of chronicle.toml. `chronicle run` sends by itself.

    Example: chronicle alerts --test

    Options:
      --test: Send a test message to each; exit 1 if one failed.
      --send: Send what waits now; exit 1 if something still waits.
    """
    from chronicle.alerts.process import destinations_of

    settings = at.settings()
    destinations = destinations_of(settings)
    if not destinations:
        raise UsageProblem(
            "no destination is configured: nothing is sent to anybody",
            'write one into chronicle.toml: [alerts.team] with kind = "slack" and url = "env:SLACK_WEBHOOK"',
        )
    if test:
        return _test(settings.run, destinations)
    return _state(settings.paths, destinations, send=send)


def _test(run: str, destinations: "tuple[Destination, ...]") -> CommandResult:
    from chronicle.alerts.messages import Alert
    from chronicle.alerts.sending import send as send_one

    moment = datetime.now(UTC)
    key = f"test-{moment:%Y%m%dT%H%M%S%f}"
    title, text = "test: alerts of this run arrive here", "nothing has happened"
    alert = Alert(key, "opened", "warn", "test", title, text, run, None, None, moment, f"chronicle status --run {run}")
    lines, records, failed = [], [], False
    for one in destinations:
        answer = send_one(one, alert)
        failed |= answer.state != "sent"
        lines.append(f"{one.name} ({one.kind}): {answer.state}{f', {answer.why}' if answer.why else ''}")
        records.append({"name": one.name, "kind": one.kind, "state": answer.state, "why": answer.why})
    return CommandResult(
        lines=lines,
        data={"run": run, "tests": records},
        exit_code=ExitCode.ERROR if failed else ExitCode.DONE,
    )


def _state(paths: "RunPaths", destinations: "tuple[Destination, ...]", *, send: bool) -> CommandResult:
    from chronicle.alerts.process import Courier, alone, open_outboxes

    said: list[str] = []
    courier = Courier(paths, open_outboxes(paths, destinations), said.append)
    if send:
        with alone(paths) as may:
            if not may:
                return CommandResult(
                    lines="a process of a launch sends at this moment", data={"run": paths.run, "busy": True}
                )
            while courier.go(settle=0.0):
                pass
    else:
        courier.look()
    records: list[dict[str, Any]] = []
    for box in courier.outboxes:
        one = box.destination
        hours = "" if one.quiet is None else f"{one.quiet[0]:%H:%M}-{one.quiet[1]:%H:%M}"
        counts = {"sent": len(box.sent), "waits": len(box.due(courier.alerts)), "refused": len(box.refused)}
        records.append({"name": one.name, "kind": one.kind, "tier": one.tier, "quiet": hours, **counts, "why": box.why})
    heads = ("kind", "tier", "quiet", "sent", "waits", "refused")
    rows = [("destination", *heads), *((one["name"], *(str(one[head]) for head in heads)) for one in records)]
    lines = [*align_columns(rows), *said]
    left = courier.left()
    code = ExitCode.ERROR if send and left else ExitCode.DONE
    return CommandResult(lines=lines, data={"run": paths.run, "destinations": records}, exit_code=code)
