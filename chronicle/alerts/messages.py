"""What is told of a run: each incident once when it opens and once when it ends, and each launch that failed.

Pure: a story in, alerts out, and the bodies that each kind of receiver takes. The journal is the queue; an alert's `key` is the
id of the first entry of its incident, so that the same alert is the same for whoever receives it twice.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from chronicle.credentials import redact
from chronicle.journal import Entry
from chronicle.journal.events import EndCause, EntryKind
from chronicle.story import Story
from chronicle.story.launch_settings import changed_before
from chronicle.story.matters import Matter, event_of
from chronicle.story.plain import plain, plain_block

TIERS = ("notice", "warn", "propose")
OPENED, ENDED = "opened", "ended"
# ends that alarm nobody
EXPECTED = frozenset(
    (EndCause.FINISHED, EndCause.ENDED, EndCause.STOPPED, EndCause.PREEMPTED, EndCause.TIME_LIMIT, EndCause.PROPOSAL)
)
CHANGES = 3  # settings that an alert names
LONGEST = 2000  # characters of a text; Discord takes no more


class Alert(NamedTuple):
    """One message. `phase`: opened or ended; `moment`: of the entry that says so; `command`: what to type."""

    key: str
    phase: str
    tier: str
    kind: str
    title: str
    text: str
    run: str
    launch: int | None
    step: int | None
    moment: datetime
    command: str

    @property
    def id(self) -> str:
        """The idempotency key: the same message has the same one, however often it is sent."""
        return f"{self.key}-{self.phase}"


def alerts_of(story: Story) -> list[Alert]:
    """Every alert of a run, in the order of its moments; a tier is the highest that the incident reached."""
    by_id = {entry.id: entry for entry in story.entries}
    closes = {ref: entry for entry in story.entries if entry.kind == EntryKind.CLOSE for ref in entry.refs}
    launches = {by_id[matter.first_id].launch for matter in story.matters if matter.first_id in by_id}
    changed = {launch: _changed(story, launch) for launch in launches}
    found = [alert for matter in story.matters for alert in _of_matter(story, matter, by_id, closes, changed)]
    found += _of_launches(story)
    return sorted(found, key=lambda alert: (alert.moment, alert.key, alert.phase != OPENED))


def _of_matter(
    story: Story,
    matter: Matter,
    by_id: Mapping[str, Entry],
    closes: Mapping[str, Entry],
    changed: Mapping[int | None, str],
) -> Iterator[Alert]:
    entries = [by_id[one] for one in matter.ids if one in by_id]
    if not entries:
        return
    tiers = [event_of(entry).tier for entry in entries]
    ranks = [TIERS.index(tier) if tier in TIERS else 1 for tier in tiers]
    reached = entries[ranks.index(max(ranks))]
    event = event_of(reached)
    opened = _opened(
        story, key=matter.first_id, tier=TIERS[max(ranks)], kind=event.kind or "incident", title=reached.title,
        text="\n".join(line for line in (event.text, changed.get(entries[0].launch, "")) if line),
        launch=reached.launch, step=event.onset_step if event.onset_step is not None else reached.step,
        moment=reached.ts, command=_command(story, reached.id),
    )  # fmt: skip
    yield opened
    if not matter.open:
        answer = None if matter.answer is None else by_id.get(matter.answer.entry_id)
        last = answer or next((closes[one] for one in reversed(matter.ids) if one in closes), entries[-1])
        how = f"{matter.standing}: {matter.outcome_text}" if matter.outcome_text else matter.standing
        yield _ended(story, opened, how, last.ts)


def _changed(story: Story, launch: int | None) -> str:
    """The first settings that the launch of an incident has otherwise than the one before it."""
    found = None if launch is None else changed_before(story.entries, launch)
    return "" if found is None else f"changed {found.brief(CHANGES)}"


def _of_launches(story: Story) -> Iterator[Alert]:
    for launch in story.launches:
        failed = bool(launch.ended) and (launch.exit_code not in (0, None) or bool(launch.signal))
        if not failed or launch.imported or launch.cause in EXPECTED:
            continue
        opened = _opened(
            story, key=f"{story.entries[0].id}-launch-{launch.number}", tier="propose", kind="launch-failed",
            title=f"launch {launch.number} {launch.outcome}", text=launch.because, launch=launch.number,
            step=launch.span.last_step, moment=launch.ended, command=_command(story, None),
        )  # fmt: skip
        yield opened
        later = next((one for one in story.launches if one.number > launch.number), None)
        if later is not None:
            yield _ended(story, opened, f"launch {later.number} was started", later.started)


def _opened(story: Story, *, title: str, text: str, moment: str, **about: Any) -> Alert:
    when = datetime.fromisoformat(moment)
    return Alert(phase=OPENED, run=story.run, title=redact(plain(title))[:300], text=_text(text), moment=when, **about)


def _ended(story: Story, opened: Alert, how: str, moment: str) -> Alert:
    when, command = datetime.fromisoformat(moment), _command(story, None)
    return opened._replace(phase=ENDED, text=_text(how), moment=when, command=command)


def _text(text: str) -> str:
    return redact(plain_block(text or ""))[: LONGEST // 2]


def _command(story: Story, entry_id: str | None) -> str:
    """The open proposal's command where it was made after the incident; else the way to look."""
    proposal = story.proposal
    if proposal is not None and entry_id is not None and proposal.entry.id >= entry_id:
        return proposal.command if " --run " in proposal.command else f"{proposal.command} --run {story.run}"
    return f"chronicle status --run {story.run}"


# --- Bodies

SEVERITY = {"notice": "info", "warn": "warning", "propose": "critical"}
SIGNS = {"notice": "·", "warn": "!", "propose": "‼"}


def headline(alert: Alert) -> str:
    """One line for every receiver: `‼ tr-190: instant-spike on loss since step 120`."""
    over = "over: " if alert.phase == ENDED else ""
    return f"{SIGNS[alert.tier]} {alert.run}: {over}{alert.title}"


def alert_text(alert: Alert) -> str:
    """The message as lines of text, the command last."""
    where = [
        "" if alert.launch is None else f"launch {alert.launch}",
        "" if alert.step is None else f"step {alert.step}",
        f"since {alert.moment.isoformat(timespec='seconds')}" if alert.phase == OPENED else "",
    ]
    lines = (headline(alert), alert.text, " ".join(filter(None, where)), alert.command)
    return "\n".join(filter(None, lines))


def body_for(kind: str, alert: Alert, *, routing_key: str = "") -> Mapping[str, Any]:
    """The JSON that a receiver of this kind takes: json, slack, discord, teams or pagerduty."""
    if kind == "pagerduty":
        return _pagerduty(alert, routing_key)
    return {"json": _json, "slack": _slack, "discord": _discord, "teams": _teams}[kind](alert)


def _json(alert: Alert) -> Mapping[str, Any]:
    fields = alert._asdict() | {"moment": alert.moment.isoformat()}
    return {"v": 1, "id": alert.id, **fields, "headline": headline(alert)}


def _slack(alert: Alert) -> Mapping[str, Any]:
    text = re.sub("[&<>]", lambda found: {"&": "&amp;", "<": "&lt;", ">": "&gt;"}[found[0]], alert_text(alert))
    lines = text.split("\n")
    return {"text": "\n".join([f"*{lines[0]}*", *lines[1:-1], f"`{lines[-1]}`"])}


def _discord(alert: Alert) -> Mapping[str, Any]:
    """At most `LONGEST` characters, counted as UTF-16: Discord does not say how it counts. What is cut is the middle."""
    head, *middle, command = alert_text(alert).replace("`", "'").split("\n")
    head, command = _cut(head, LONGEST // 4), _cut(command, LONGEST // 2)
    room = LONGEST - len(f"{head}{command}".encode("utf-16-le")) // 2 - 8
    lines = [f"**{head}**", *_cut("\n".join(middle), room).split("\n"), f"`{command}`"]
    return {"content": "\n".join(lines), "allowed_mentions": {"parse": []}}


def _cut(text: str, units: int) -> str:
    return text.encode("utf-16-le", "replace")[: 2 * max(0, units)].decode("utf-16-le", "ignore")


def _teams(alert: Alert) -> Mapping[str, Any]:
    first, *rest = alert_text(alert).split("\n")
    blocks = [{"type": "TextBlock", "text": first, "weight": "Bolder", "wrap": True}]
    blocks += [{"type": "TextBlock", "text": line, "wrap": True, "fontType": "Monospace"} for line in rest if line.strip()]
    card = {"type": "AdaptiveCard", "version": "1.4", "body": blocks}
    return {
        "type": "message",
        "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}],
    }


def _pagerduty(alert: Alert, routing_key: str) -> Mapping[str, Any]:
    details = {
        "text": alert.text,
        "command": alert.command,
        "launch": alert.launch,
        "step": alert.step,
        "tier": alert.tier,
    }
    payload = {
        "summary": headline(alert)[:1024], "source": alert.run, "severity": SEVERITY[alert.tier],
        "timestamp": alert.moment.isoformat(), "class": alert.kind, "custom_details": details,
    }  # fmt: skip
    action = "trigger" if alert.phase == OPENED else "resolve"
    return {"routing_key": routing_key, "event_action": action, "dedup_key": alert.key, "payload": payload}
