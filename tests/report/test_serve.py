"""The live page: read-only, this machine only, and a line to every listener when the run changes."""

import gzip
import http.client
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.report import _page, _state, _status
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter
from chronicle.journal.events import LaunchStart
from chronicle.launch.heartbeat import Heartbeat, write_heartbeat
from chronicle.report.gauges import CONTENT_TYPE, GAUGES, exposition
from chronicle.report.index import ServedIndex
from chronicle.report.server import (
    MOST_BYTES,
    LiveServer,
    Makers,
    RunSite,
    fingerprint,
    mark_of,
)
from tests.builders.story_runs import StoryRun, toy_run
from tests.report.chromium import needs_browser
from tests.report.devtools import browser


@pytest.fixture
def story(tmp_path: Path) -> StoryRun:
    return toy_run(tmp_path)


@pytest.fixture
def server(story: StoryRun) -> Iterator[LiveServer]:
    with serving(story) as found:
        yield found


@contextmanager
def serving(story: StoryRun) -> Iterator[LiveServer]:
    server = LiveServer(story.paths, 0, makers=Makers(_page, _state, _status), poll=0.01)
    with running(server):
        yield server


@contextmanager
def running(server: LiveServer) -> Iterator[LiveServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@contextmanager
def opened(server: LiveServer, path: str, method: str = "GET", **headers: str) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            yield answer


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> Answer:
    with opened(server, path, method, **headers) as answer:
        return Answer(answer.status, dict(answer.headers), answer.read())


def test_the_page_and_the_status_are_those_of_the_lineage(server: LiveServer) -> None:
    page = ask(server, "/").body.decode()
    assert "toy: chronicle" in page and "EventSource" in page
    assert json.loads(ask(server, "/status.json").body)["loss"] == 8.2


def event(stream: http.client.HTTPResponse) -> tuple[str, dict[str, Any]]:
    """The next event of a stream."""
    lines = [line.decode().rstrip("\n") for line in iter(stream.readline, b"\n") if not line.startswith(b":")]
    name, data = lines
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_growing_journal_reaches_every_listener(server: LiveServer, story: StoryRun) -> None:
    with opened(server, "/events") as first, opened(server, "/events") as second:
        marks = {event(stream)[1]["mark"] for stream in (first, second)}
        assert marks == {json.loads(ask(server, "/state.json").body)["data"]["mark"]}
        story.add("note", title="something new")
        told = [event(stream) for stream in (first, second)]
        assert [name for name, _ in told] == ["story", "story"]
    state = json.loads(ask(server, "/state.json").body)
    assert "something new" in state["body"] and state["data"]["mark"] == told[0][1]["mark"] not in marks


def test_points_are_sent_and_not_the_page(server: LiveServer, story: StoryRun) -> None:
    """A half line is sent when it is whole; NaN is null; of many points the last and some others are sent."""
    log = story.paths.metrics_path(2)
    with opened(server, "/events") as stream:
        event(stream)
        with open(log, "ab") as out:
            out.write(b'{"step":9,"t":1800000000.5,"loss":2.123456789,"lr":"NaN"}\n{"step":10,"t":180')
            out.flush()
            name, told = event(stream)
            assert (name, told["launch"], told["points"]) == ("points", 2, [[9, 1800000000.5, {"loss": 2.1235, "lr": None}]])
            out.write(b'0000001.5,"loss":2.0}\n')
            out.flush()
            assert event(stream)[1]["points"] == [[10, 1800000001.5, {"loss": 2.0}]]
            out.write(b"".join(b'{"step":%d,"t":1800000000.5,"loss":%d.123456}\n' % (step, step) for step in range(11, 20_000)))
            out.flush()
            steps: list[int] = []
            while not steps or steps[-1] < 19_999:
                name, told = event(stream)
                assert name == "points" and len(json.dumps(told, separators=(",", ":"))) <= MOST_BYTES
                steps += [step for step, _, _ in told["points"]]
        assert steps == sorted(set(steps)) and steps[0] == 11
        story.metrics(3, {1: {"loss": 5.0}})  # a launch that the page does not know
        assert event(stream)[0] == "story"


def test_the_large_parts_are_sent_once_and_compressed(server: LiveServer) -> None:
    page = ask(server, "/", **{"Accept-Encoding": "gzip"})
    assert page.headers["Content-Encoding"] == "gzip" and page.headers["Cache-Control"] == "no-store"
    assert b"function chart(" in gzip.decompress(page.body) and len(page.body) < 60_000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str, server: LiveServer) -> None:
    assert ask(server, "/", method).status == 501


@pytest.mark.parametrize("path", ["/../journal", "/journal/", "/objects/../x", "/etc/passwd", "/objects/aa/" + "b" * 64])
def test_nothing_else_can_be_read(path: str, server: LiveServer) -> None:
    assert ask(server, path).status == 404


REBOUND = ["evil.example:80", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8765", "", "0.0.0.0:8765"]


@pytest.mark.parametrize("host", REBOUND)
@pytest.mark.parametrize("path", ["/", "/status.json", "/events"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_rebound_name_is_refused(method: str, path: str, host: str, server: LiveServer) -> None:
    answer = ask(server, path, method, Host=host)
    assert answer.status == 403 and b"toy" not in answer.body


def test_it_listens_on_this_machine_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.sample
@needs_browser
def test_two_tabs_show_what_was_added_while_they_looked_and_keep_their_view(story: StoryRun, tmp_path: Path) -> None:
    with serving(story) as server, browser(tmp_path / "profile") as chromium:
        tabs = [chromium.open(server.url), chromium.open(server.url)]
        for tab in tabs:
            tab.until("document.getElementById('live')?.textContent === 'live'")
        tabs[0].ask("Page.bringToFront")  # a tab behind another draws nothing until it is seen
        tabs[0].until("document.querySelector('#plot-lineage[data-drawn] svg path') !== null")
        tabs[0].key("2")
        tabs[0].until("document.querySelector('input[name=axis]:checked').value === 'time'")
        tabs[0].value("document.documentElement.dataset.same = 'yes'; 1")  # gone if the page is loaded again
        key = "new KeyboardEvent('keydown', { key: '+' })"
        tabs[0].value(f"document.querySelector('#plot-lineage svg').dispatchEvent({key})")
        zoomed = tabs[0].value("document.getElementById('plot-lineage').layout.xaxis.range")
        tabs[0].value("document.querySelector('#lineage details').open = true; 1")
        story.add("note", title="<b>something new</b>")
        for tab in tabs:
            tab.until("document.body?.textContent.includes('<b>something new</b>')")
        tabs[0].until("document.querySelector('#plot-lineage[data-drawn] svg path') !== null")
        kept = "[document.documentElement.dataset.same, document.querySelector('input[name=axis]:checked').value, "
        kept += "document.querySelector('#lineage details').open, document.getElementById('plot-lineage').layout.xaxis.range]"
        assert tabs[0].value(kept) == ["yes", "time", True, zoomed]
        assert tabs[1].until("document.querySelector('input[name=axis]:checked')?.value") == "step"
        with open(story.paths.metrics_path(2), "ab") as log:
            log.write(b'{"step":9,"t":1800000000.5,"loss":0.4567,"lr":0.000025}\n')
        for tab in tabs:
            tab.until("document.querySelector('[data-fact=loss] b').textContent === '0.4567'")
        drawn = "document.getElementById('plot-lineage').data.some((t) => t.y.includes(0.4567))"
        tabs[0].until(drawn)
        assert tabs[0].value(kept) == ["yes", "time", True, zoomed]
        refused = "fetch('/', {method: 'POST', body: 'x'}).then((answer) => answer.status)"
        assert tabs[0].value(refused) == 501
        assert [tab.console for tab in tabs] == [[c for c in tabs[0].console if "501" in c], []]


def test_an_attachment_comes_as_a_download(server: LiveServer, story: StoryRun, tmp_path: Path) -> None:
    from chronicle.journal.writer import store_file

    (tmp_path / "x.html").write_text("<script>1</script>")
    digest = store_file(story.paths, tmp_path / "x.html")["sha256"]
    answer = ask(server, f"/objects/{digest[:2]}/{digest}")
    assert answer.status == 200 and answer.headers["Content-Disposition"] == "attachment"
    assert answer.headers["Content-Type"] == "application/octet-stream"


def test_metrics_say_what_status_says_and_nothing_that_is_not_known(server: LiveServer, story: StoryRun) -> None:
    with opened(server, "/metrics") as answer:
        text = answer.read().decode()
        assert answer.status == 200 and answer.getheader("Content-Type") == CONTENT_TYPE
    run, status = story.paths.run, json.loads(_status(story.paths))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples[f'chronicle_step{{run="{run}"}}']) == status["step"] == 8
    assert float(samples[f'chronicle_value{{run="{run}",channel="loss"}}']) == 8.2
    assert float(samples[f'chronicle_open_incidents{{run="{run}"}}']) == len(status["open_incidents"])
    with JournalWriter(story.paths) as writer:
        writer.write(LaunchStart(start_step=8), launch=3)
    with opened(server, "/metrics") as answer:
        assert f'chronicle_alive{{run="{run}"}} 0.0' in answer.read().decode()
    beat = Heartbeat("elsewhere", 3, 1, 1, "boot", 0, time.time())
    assert write_heartbeat(story.paths.heartbeats_dir, beat) is None
    with opened(server, "/metrics") as answer:  # no journal or log has grown
        assert f'chronicle_alive{{run="{run}"}} 1.0' in answer.read().decode()


def test_metrics_of_odd_values_and_names() -> None:
    """A label may hold anything; what was not recorded has no line, where 0 would be a claim."""
    values = {"x\ny": float("nan"), "z": float("inf")}
    text = exposition([{"run": 'a"b\\c', "step": None, "values": values, "open_incidents": []}])
    assert 'chronicle_value{run="a\\"b\\\\c",channel="x\\ny"} NaN' in text and 'channel="z"} +Inf' in text
    assert "chronicle_step" not in text and "chronicle_alive" not in text and "chronicle_lr_factor" not in text


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"chronicle_\w+", query)}
    assert asked and asked <= GAUGES.keys()


def test_behind_a_token_nothing_is_told_without_it(story: StoryRun) -> None:
    makers, token = Makers(_page, _state, _status), "0123456789abcdef"
    for host, given in (("0.0.0.0", None), ("127.0.0.1", "short")):
        with pytest.raises(UsageProblem):
            LiveServer(story.paths, 0, makers=makers, host=host, token=given)
    with running(LiveServer(story.paths, 0, makers=makers, token=token, poll=0.01)) as server:
        paths = ("/", "/status.json", "/metrics", "/events", "/?token=", "/?token=wrong", "/objects/ab/" + "ab" * 32)
        refused = [ask(server, path, cookie=f"chronicle_{server.server_address[1]}=x") for path in paths]
        refused += [ask(server, "/", "HEAD"), ask(server, "/", authorization=f"Bearer x{token}")]
        assert {one.status for one in refused} == {401} and not any(b"toy" in one.body for one in refused)
        asked = ask(server, "/", accept="text/html,*/*")
        assert asked.status == 401 and b'name="token"' in asked.body and b"toy" not in asked.body  # a browser gets a form
        assert ask(server, "/metrics", authorization=f"Bearer {token}").status == 200
        entered = ask(server, f"//elsewhere/?token={token}")
        assert entered.status == 303 and entered.headers["Location"] == "/elsewhere/"
        cookie = entered.headers["Set-Cookie"].partition(";")[0]
        assert token not in cookie and "HttpOnly" in entered.headers["Set-Cookie"]
        assert ask(server, "/", cookie=cookie, host="team.example.org").status == 200
        with opened(server, "/events", cookie=cookie) as stream:
            assert event(stream)[0] == "here"


@pytest.fixture
def many(tmp_path: Path) -> Iterator[LiveServer]:
    """An index of two runs; one of them is the toy run."""
    toy_run(tmp_path)
    other = StoryRun(tmp_path, "other")
    other.start(1, 0)
    index = ServedIndex(tmp_path / "logs", lambda paths: mark_of(fingerprint(paths)))
    makers = Makers(_page, _state, _status)
    server = LiveServer(index.runs, 0, makers=makers, index=index.page, poll=0.01)
    with running(server):
        yield server


def test_of_many_runs_an_index_leads_to_each(many: LiveServer, tmp_path: Path) -> None:
    page = ask(many, "/").body.decode()
    links = re.findall(r'href="(runs/[^"]*)"', page)
    assert sorted(links) == ["runs/other/", "runs/toy/"] and "loss from 9.9 to 8.2" in page
    assert 'http-equiv="refresh"' in page
    assert "toy: chronicle" in ask(many, "/runs/toy/").body.decode()
    assert json.loads(ask(many, "/runs/toy/status.json").body)["loss"] == 8.2
    assert ask(many, "/runs/toy/", "HEAD").status == 200
    late = StoryRun(tmp_path, "late")
    late.start(1, 0)
    assert "runs/late/" in ask(many, "/").body.decode() and ask(many, "/runs/late/").status == 200
    with opened(many, "/runs/late/events") as stream:
        event(stream)
        late.add("note", title="hello")
        assert event(stream)[0] == "story"


@pytest.mark.parametrize(
    "path",
    [
        *("/runs/none/", "/runs/../", "/runs/%2e%2e/", "/runs/toy/../other/", "/runs//", "/runs/toy%2f..%2fother/"),
        *("/status.json", "/events"),
    ],
)
def test_below_an_index_nothing_else_can_be_read(path: str, many: LiveServer) -> None:
    assert ask(many, path).status == 404


def test_a_rebound_name_gets_no_index(many: LiveServer) -> None:
    answer = ask(many, "/", Host="evil.example")
    assert answer.status == 403 and b"toy" not in answer.body


def test_whether_a_launch_lives_is_asked_anew_though_no_file_has_grown(story: StoryRun) -> None:
    """A process can end without a line in any file: `status.json` said "alive" until one grew."""
    answers = iter(('{"alive": true}', '{"alive": false}'))
    site = RunSite(story.paths, Makers(_page, _state, lambda paths: next(answers)))
    assert [site.body("/status.json"), site.body("/status.json")] == [b'{"alive": true}', b'{"alive": false}']
    assert site.body("/") == site.body("/")
