"""The live page: read-only, this machine only, and a line to every listener when the run changes."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from chronicle.cli.report import _page, _status
from chronicle.report.html import plotly_script
from chronicle.report.server import LiveServer
from tests.builders.story_runs import StoryRun, toy_run
from tests.report.chromium import needs_browser
from tests.report.devtools import browser


@pytest.fixture
def story(tmp_path: Path) -> StoryRun:
    return toy_run(tmp_path)


@pytest.fixture
def server(story: StoryRun) -> Iterator[LiveServer]:
    with serving(story, "/* plotly */") as running:
        yield running


@contextmanager
def serving(story: StoryRun, script: str) -> Iterator[LiveServer]:
    server = LiveServer(
        story.paths, 0, page=lambda: _page(story.paths, script), status=lambda: _status(story.paths), poll=0.01
    )
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


def test_a_growing_journal_reaches_every_listener(server: LiveServer, story: StoryRun) -> None:
    with opened(server, "/events") as first, opened(server, "/events") as second:
        for stream in (first, second):
            assert stream.readline() == b": here\n"
        story.add("note", title="something new")
        for stream in (first, second):
            assert [stream.readline() for _ in range(2)][1] == b"event: change\n"
    assert "something new" in ask(server, "/").body.decode()


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
    pytest.importorskip("plotly")
    script = plotly_script()
    with serving(story, script) as server, browser(tmp_path / "profile") as running:
        tabs = [running.open(server.url), running.open(server.url)]
        for tab in tabs:
            tab.until("document.getElementById('live')?.textContent === 'live'")
        tabs[0].ask("Page.bringToFront")  # a tab behind another draws nothing until it is seen
        tabs[0].until("document.querySelector('#plot-lineage[data-drawn] .trace') !== null")
        tabs[0].key("2")
        tabs[0].until("document.querySelector('input[name=axis]:checked').value === 'time'")
        story.add("note", title="<b>something new</b>")
        for tab in tabs:
            tab.until("document.body?.textContent.includes('<b>something new</b>')")
        tabs[0].until("document.querySelector('input[name=axis]:checked')?.value === 'time'")
        assert tabs[1].until("document.querySelector('input[name=axis]:checked')?.value") == "step"
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
