"""Alerts: each incident once and its end once, to everybody who wants it, whatever the network does in between."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from chronicle.alerts.destinations import Destination, read_destinations
from chronicle.alerts.messages import Alert, alerts_of, body_for
from chronicle.alerts.outbox import Outbox
from chronicle.alerts.process import Courier, open_outboxes
from chronicle.alerts.sending import Answer, send
from chronicle.credentials import secret_of
from chronicle.errors import ChronicleError, SettingsError
from chronicle.journal import JournalWriter
from chronicle.journal.events import Close, Incident, LaunchEnd, LaunchStart, Proposed
from chronicle.paths import RunPaths
from chronicle.story import read_story
from tests.alerts.receiver import Receiver
from tests.commands.cli import Cli

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.stop()


class Ticking:
    """A clock that goes on by a second at every look."""

    def __init__(self) -> None:
        self.moment = BEGIN

    def __call__(self) -> datetime:
        self.moment += timedelta(seconds=1)
        return self.moment


def destination(url: str = "", kind: str = "json", **more: str) -> Destination:
    (found,) = read_destinations({"d": {"kind": kind, **({"url": url} if url else {}), **more}}, "here")
    return found


def incident(writer: JournalWriter, number: int, tier: str = "warn", **more: object) -> str:
    event = Incident.view(
        {"id": number, "kind": "instant-spike", "tier": tier, "status": "open", "onset_step": number, **more}
    )
    return writer.write(event, launch=1, step=number, title=f"spike {number}").id


def over(writer: JournalWriter, first: str, number: int) -> None:
    event = Incident.view(
        {"id": number, "kind": "instant-spike", "tier": "warn", "status": "recovered", "change": "closed"}
    )
    writer.write(event, launch=1, step=number, title=f"spike {number}, recovered", refs=(first,))


def alert(number: int = 1, phase: str = "opened", tier: str = "warn") -> Alert:
    moment = BEGIN + timedelta(minutes=number)
    return Alert(
        f"K{number}",
        phase,
        tier,
        "nan",
        "a <b> @everyone & `c`",
        "text",
        "tr",
        1,
        7,
        moment,
        "chronicle status --run tr",
    )


# --- what is told


def test_an_incident_is_told_once_and_its_end_once_with_the_command_to_type(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "tr")
    with JournalWriter(paths, clock=Ticking()) as writer:
        writer.write(LaunchStart(), launch=1)
        first = incident(writer, 10, "notice")
        writer.write(Incident.view({"id": 10, "kind": "x", "tier": "propose", "status": "open", "change": "changed"}), launch=1,
                     title="worse", refs=(first,))  # fmt: skip
        writer.write(Proposed(command="chronicle rollback --to 5"), launch=1, title="proposed")
        other = incident(writer, 11)
        over(writer, other, 11)
        told = writer.write(Incident(kind="alert", tier="warn", status="open"), launch=1, title="disk full").id
        writer.write(Close(outcome="worked", text="mended"), refs=(told,))
    found = alerts_of(read_story(paths))
    assert [(a.phase, a.tier, a.title.split()[0]) for a in found] == [
        ("opened", "propose", "worse"), ("opened", "warn", "spike"), ("ended", "warn", "spike"),
        ("opened", "warn", "disk"), ("ended", "warn", "disk"),
    ]  # fmt: skip
    assert found[0].command == "chronicle rollback --to 5 --run tr" and found[0].key == first
    assert found[1].key == found[2].key == other and found[1].id != found[2].id
    assert found[-1].text == "worked: mended"


def test_a_launch_that_failed_is_told_and_over_when_the_next_one_starts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "tr")
    with JournalWriter(paths, clock=Ticking()) as writer:
        for number, code, cause in (
            (1, 0, "finished"),
            (2, 1, "crash"),
            (3, 143, "preempted"),
            (4, 9, "out of memory"),
        ):
            writer.write(LaunchStart(), launch=number)
            writer.write(LaunchEnd(exit_code=code, cause=cause, because="seen"), launch=number)
    found = alerts_of(read_story(paths))
    assert [(a.phase, a.launch, a.text) for a in found] == [
        ("opened", 2, "seen"), ("ended", 2, "launch 3 was started"), ("opened", 4, "seen"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "slack", "discord", "teams", "pagerduty"])
def test_bodies_hold_headline_and_command_and_no_mention_of_theirs(kind: str) -> None:
    body = body_for(kind, alert(), routing_key="R")
    text = json.dumps(body, ensure_ascii=False)
    assert "tr: a" in text and "chronicle status --run tr" in text
    if kind == "slack":
        assert "<b>" not in text and "&lt;b&gt;" in text
    if kind == "discord":
        assert body["allowed_mentions"] == {"parse": []} and len(body["content"]) <= 2000
    if kind == "pagerduty":
        assert (body["event_action"], body["dedup_key"]) == ("trigger", "K1")
        assert body_for(kind, alert(phase="ended"))["event_action"] == "resolve"


# names and values of what the services publish: PagerDuty's OpenAPI of Events v2, Adaptive Cards 1.4, Slack's texts
EVENT = {"routing_key", "event_action", "dedup_key", "payload"}
PAYLOAD = {"summary", "source", "severity", "timestamp", "component", "group", "class", "custom_details"}
BLOCK = {"type": {"TextBlock"}, "wrap": {True}, "weight": {"Bolder"}, "fontType": {"Monospace"}}
HOSTILE = ("<!channel> & <@U1>", "`a` ```b```", "@everyone", "tab\tnew\n\n  \n- list", "😀" * 1000, "x" * 2000, "")


@pytest.mark.parametrize("words", HOSTILE)
@pytest.mark.parametrize("phase", ["opened", "ended"])
def test_bodies_are_what_the_services_publish_whatever_the_words_are(words: str, phase: str) -> None:
    told = alert(phase=phase)._replace(title=words[:300], text=words[:1000])
    event = body_for("pagerduty", told, routing_key="R" * 32)
    assert event.keys() == EVENT and event["payload"].keys() <= PAYLOAD and len(event["dedup_key"]) <= 255
    assert event["event_action"] in ("trigger", "acknowledge", "resolve") and len(event["payload"]["summary"]) <= 1024
    assert event["payload"]["severity"] in ("critical", "error", "warning", "info")
    assert datetime.fromisoformat(event["payload"]["timestamp"]).tzinfo is not None and event["payload"]["source"]
    (card,) = body_for("teams", told)["attachments"]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive" and card["content"]["version"] == "1.4"
    for block in card["content"]["body"]:
        assert block["text"].strip() and all(block[name] in BLOCK[name] for name in block.keys() - {"text"})
    slack, discord = body_for("slack", told), body_for("discord", told)
    assert slack.keys() == {"text"} and len(slack["text"]) <= 40_000 and "<" not in slack["text"] and ">" not in slack["text"]
    assert discord.keys() == {"content", "allowed_mentions"} and 0 < len(discord["content"].encode("utf-16-le")) // 2 <= 2000
    assert discord["content"].endswith("`") and f"`{told.command[:20]}" in discord["content"]


# --- sending


def test_an_answer_says_sent_only_where_the_receiver_took_it(receiver: Receiver) -> None:
    """A redirected POST arrives as a GET without its body and is answered 200: that is not "sent"."""
    to = destination(receiver.url)
    assert send(to, alert()) == Answer("sent")
    assert receiver.taken[0][0] == "K1-opened"
    for mode, state in ((400, "refused"), (404, "failed"), (500, "failed"), ("redirect", "failed"), ("gone", "failed")):
        receiver.mode = mode
        assert send(to, alert()).state == state, mode
    assert len(receiver.taken) == 1
    port = receiver.server_address[1]
    receiver.stop()
    answer = send(destination(f"http://127.0.0.1:{port}/secret-path"), alert())
    assert answer.state == "failed" and "secret-path" not in answer.why


def test_a_secret_is_read_when_it_is_needed_and_told_to_nobody(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = destination(kind="slack", url="env:HOOK")
    monkeypatch.delenv("HOOK", raising=False)
    assert send(to, alert()) == Answer("failed", "the variable HOOK is not set")
    monkeypatch.setenv("HOOK", receiver.url)
    assert send(to, alert()).state == "sent"
    (tmp_path / "token").write_text("t0ken\n")
    assert secret_of(f"file:{tmp_path / 'token'}") == "t0ken"
    assert send(destination(receiver.url, token=f"file:{tmp_path / 'token'}"), alert()).state == "sent"
    assert receiver.headers[-1]["Authorization"] == "Bearer t0ken"
    with pytest.raises(ChronicleError, match="cannot read"):
        secret_of("file:/nowhere/at/all")


class _Smtp(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        body = b""
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                while (line := self.rfile.readline()) != b".\r\n":
                    body += line
                self.server.mails.append(body.decode())  # type: ignore[attr-defined]
            elif word == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            self.wfile.write(b"250 ok\r\n")


def test_a_mail_has_the_key_as_its_message_id(tmp_path: Path) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Smtp) as server:
        server.mails = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        to = destination(kind="email", host="127.0.0.1", port=str(server.server_address[1]), to="a@example.org", tls="none",
                         **{"from": "b@example.org"})  # fmt: skip
        assert send(to, alert(phase="ended")) == Answer("sent")
        server.shutdown()
        (mail,) = server.mails  # type: ignore[attr-defined]
    assert "Message-ID: <K1-ended@chronicle.invalid>" in mail and "References: <K1-opened@chronicle.invalid>" in mail
    assert "chronicle status --run tr" in mail


# --- the outbox


def test_each_message_is_sent_once_over_failures_restarts_and_kills(tmp_path: Path) -> None:
    """Answers come and go, the outbox is opened again in between: nothing is lost, nothing that was taken goes out again."""
    taken: list[str] = []
    states = iter(["failed", "sent", "refused", "failed", "failed", *["sent"] * 20])
    clock = {"now": BEGIN}

    def one(to: Destination, message: Alert) -> Answer:
        answer = Answer(next(states), "why")
        taken.extend([message.id] * (answer.state == "sent"))
        return answer

    alerts = [alert(number, phase) for number in range(1, 6) for phase in ("opened", "ended")]
    to = destination("http://127.0.0.1:1/")
    for minute in range(10, 40, 2):
        Outbox(tmp_path / "d.jsonl", to, now=lambda: clock["now"], send_one=one)
        clock["now"] = BEGIN + timedelta(minutes=minute)
        box = Outbox(tmp_path / "d.jsonl", to, now=lambda: clock["now"], send_one=one)
        box.deliver(alerts)
    assert taken == [a.id for a in alerts if a.id != "K1-ended"]
    assert box.refused == {"K1-ended": "why"} and not box.due(alerts)


def test_a_try_without_an_answer_is_sent_again_under_the_same_key(tmp_path: Path, receiver: Receiver) -> None:
    """What at-least-once means: the receiver took it and the answer was lost. It sees the key twice, and one message."""
    box = Outbox(tmp_path / "d.jsonl", destination(receiver.url), now=lambda: BEGIN + timedelta(hours=1))
    box.since = BEGIN
    receiver.mode = "lost"
    assert box.deliver([alert()]) == 0 and box.why
    receiver.mode = "up"
    again = Outbox(tmp_path / "d.jsonl", destination(receiver.url), now=lambda: BEGIN + timedelta(hours=2))
    again.since = BEGIN
    assert again.deliver([alert()]) == 1
    assert [key for key, _ in receiver.taken] == ["K1-opened", "K1-opened"]


def test_nothing_of_the_past_no_lower_tier_and_no_end_of_what_was_never_told(tmp_path: Path) -> None:
    sent: list[str] = []

    def one(to: Destination, message: Alert) -> Answer:
        sent.append(message.id)
        return Answer("sent")

    box = Outbox(
        tmp_path / "d.jsonl", destination("http://x.invalid/"), now=lambda: BEGIN + timedelta(hours=1), send_one=one
    )
    box.since = BEGIN + timedelta(minutes=2)
    alerts = [
        alert(1),
        alert(3, "ended")._replace(key="K1"),
        alert(3, tier="notice"),
        alert(4, tier="propose"),
        alert(5, "ended"),
    ]
    assert box.deliver(alerts) == 1 and sent == ["K4-opened"]
    assert not box.due(alerts)  # or the process would wait for ends that it never tells


def test_the_end_of_what_a_receiver_refused_is_not_sent(tmp_path: Path) -> None:
    """It never heard of the beginning."""
    tried: list[str] = []

    def one(to: Destination, message: Alert) -> Answer:
        tried.append(message.id)
        return Answer("refused", "too long")

    box = Outbox(tmp_path / "d.jsonl", destination("http://x.invalid/"), now=lambda: BEGIN + timedelta(hours=1), send_one=one)
    box.since = BEGIN
    assert box.deliver([alert(1), alert(2, "ended")._replace(key="K1")]) == 0
    assert tried == ["K1-opened"]


def test_quiet_hours_hold_back_what_is_not_urgent(tmp_path: Path) -> None:
    to = destination("http://x.invalid/", quiet="22:00-07:00")
    night, day = datetime(2026, 1, 1, 23), datetime(2026, 1, 2, 12)
    assert (
        to.is_quiet(alert(), night)
        and to.is_quiet(alert(), night.replace(hour=6, minute=59))
        and not to.is_quiet(alert(), day)
    )
    assert not to.is_quiet(alert(tier="propose"), night)
    sent: list[str] = []
    clock = {"now": night.astimezone()}
    box = Outbox(
        tmp_path / "d.jsonl", to, now=lambda: clock["now"], send_one=lambda t, m: (sent.append(m.id), Answer("sent"))[1]
    )
    box.since = BEGIN - timedelta(days=1)
    alerts = [alert(1)._replace(moment=clock["now"] - timedelta(hours=1))]
    assert box.deliver(alerts) == 0 and not sent
    clock["now"] = day.astimezone()
    assert box.deliver(alerts) == 1 and sent == ["K1-opened"]


# --- settings


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"d": {"kind": "fax"}}, "expected one of json, slack"),
        ({"d": {"kind": "slack", "url": "https://hooks.example.org/T0/B0/xyz"}}, "`url` is a secret"),
        ({"d": {"kind": "pagerduty", "key": "abc"}}, "`key` is a secret"),
        ({"d": {"kind": "json", "url": "https://a:b@example.org"}}, "holds a password"),
        ({"d": {"kind": "json"}}, "`url` is missing"),
        ({"d": {"kind": "json", "url": "file:///etc"}, "x": {"kind": "json", "url": "ftp://a"}}, "is no address"),
        ({"d": {"kind": "json", "url": "http://x/", "tier": "loud"}}, "expected one of notice, warn, propose"),
        ({"d": {"kind": "json", "url": "http://x/", "quiet": "25:00-07:00"}}, "expected hours like"),
        ({"d": {"kind": "json", "url": "http://x/", "to": "x"}}, "unknown setting `to`"),
        ({"colour": "red"}, "unknown setting `alerts.colour`"),
        ({"a b": {"kind": "json"}}, "expected a name"),
    ],
)
def test_a_wrong_table_is_one_sentence_and_shows_no_secret(table: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as problem:
        read_destinations(table, "chronicle.toml")
    text = f"{problem.value.message} {problem.value.remedy}"
    assert said in text and "xyz" not in text and "a:b" not in text


def test_the_command_shows_tries_and_sends(
    tmp_path: Path, receiver: Receiver, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no destination is configured" in chronicle("alerts", cwd=tmp_path).err
    monkeypatch.setenv("HOOK", receiver.url)
    (tmp_path / "chronicle.toml").write_text('run = "tr"\n[alerts.team]\nkind = "slack"\nurl = "env:HOOK"\n')
    tested = chronicle("alerts", "--test")
    assert tested.code == 0 and tested.out.strip() == "team (slack): sent" and "test:" in receiver.taken[0][1]["text"]
    assert chronicle("alerts", "--json").json["destinations"][0]["waits"] == 0
    with JournalWriter(RunPaths(tmp_path / "logs" / "tr")) as writer:
        incident(writer, 1)
        incident(writer, 2, "notice")
    receiver.mode = "gone"
    failed = chronicle("alerts", "--send")
    assert failed.code == 1 and "it is tried again" in failed.out
    receiver.mode = "up"
    assert chronicle("alerts", "--send", "--json").json["destinations"][0] == {
        "name": "team", "kind": "slack", "tier": "warn", "quiet": "", "sent": 1, "waits": 0, "refused": 0, "why": "",
    }  # fmt: skip
    assert chronicle("alerts", "--send").code == 0 and len(receiver.taken) == 2
    everything = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.jsonl"))
    assert receiver.url not in everything


# --- beside a launch

TRAINER = (
    "import chronicle, time\n"
    "for step in range(60):\n    chronicle.log(step, loss=2.0)\n"
    "chronicle.alert('the disk is slow', step=3)\ntime.sleep(1)\nraise SystemExit(3)\n"
)


def test_a_launch_tells_its_alerts_and_its_failure(tmp_path: Path, receiver: Receiver) -> None:
    (tmp_path / "chronicle.toml").write_text(f'run = "tr"\n[alerts.d]\nkind = "json"\nurl = "{receiver.url}"\n')
    (tmp_path / "train.py").write_text(TRAINER)
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-m", "chronicle.cli.main", "run", "--", sys.executable, "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    wait = threading.Event()
    for _ in range(600):
        if len(receiver.taken) >= 2:
            break
        wait.wait(0.1)
    assert [(body["kind"], body["phase"]) for _, body in receiver.taken] == [
        ("alert", "opened"),
        ("launch-failed", "opened"),
    ]
    assert (
        receiver.taken[0][1]["title"] == "the disk is slow"
        and receiver.taken[1][1]["command"] == "chronicle status --run tr"
    )


def test_an_incident_of_the_millisecond_in_which_the_outbox_begins_is_told(tmp_path: Path) -> None:
    """The journal's moments have milliseconds: .123 is not before an outbox that begins at .123456."""
    begin = alert(1).moment
    box = Outbox(tmp_path / "d.jsonl", destination("http://127.0.0.1:9/"), now=lambda: begin.replace(microsecond=456))
    assert [one.key for one in box.due([alert(0), alert(1), alert(2)])] == ["K1", "K2"]


def test_a_receiver_that_hangs_keeps_no_other_waiting(tmp_path: Path, receiver: Receiver) -> None:
    paths = RunPaths(tmp_path / "tr")
    with JournalWriter(paths) as writer:
        writer.write(LaunchStart(), launch=1)
    boxes = open_outboxes(paths, read_destinations({"a": {"kind": "json", "url": "http://127.0.0.1:9/"},
                                                    "b": {"kind": "json", "url": receiver.url}}, "here"))  # fmt: skip
    with JournalWriter(paths) as writer:
        incident(writer, 1)
    said: list[str] = []
    courier = Courier(paths, boxes, said.append)
    assert courier.go(settle=0.0) == 1 and courier.left() == 1
    assert courier.go(settle=0.0) == 0 and len(said) == 1 and said[0].startswith("alerts to `a`: ")
