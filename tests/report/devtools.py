"""A browser with hands: Chromium over its own debugging pipe, standard library only; real keys, real mouse, real time."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.report.chromium import BROWSER

PATIENCE_SECONDS = 120.0
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Refused(AssertionError):
    """The browser did not carry out a command, a page that was replaced meanwhile included."""


class Tab:
    """One page. `ask` is a command of the DevTools protocol."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session
        self.console: list[str] = []

    def ask(self, method: str, **parameters: Any) -> Any:
        return self.browser.ask(method, parameters, self.session)

    def value(self, script: str) -> Any:
        """What an expression is, promises awaited."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true; a page that is just being loaded has not answered yet."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")
            except Refused:  # a live page is loaded again just now
                found = None
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true within {PATIENCE_SECONDS:g} s: {script}")

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press and release; Tab, Enter, Escape and the arrows do what they do in a window."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        code = {"windowsVirtualKeyCode": KEY_CODES[name], "code": name} if name in KEY_CODES else {}
        held = {"modifiers": 8} if shift else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", key=name, **text, **code, **held)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=name, **code, **held)

    def mouse(self, kind: str, x: float, y: float, *, down: bool = False) -> None:
        held = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {"button": "left" if down else "none"}
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=int(down), **held)


class Browser:
    """The process and its pipe: messages of JSON, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1280,900", "about:blank"]
        pipes = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # the numbers that Chromium listens on
        self.process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", *command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self.tabs: dict[str, Tab] = {}

    def open(self, url: str) -> Tab:
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self.tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.ask(f"{domain}.enable")
        tab.ask("Page.navigate", url=url)
        return tab

    def ask(self, method: str, parameters: dict[str, Any], session: str | None = None) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Refused(answer)
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._in, 1 << 16)
            assert block, "the browser is gone"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        tab = self.tabs.get(event.get("sessionId", ""))
        if tab is not None and event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            tab.console.append(json.dumps(event["params"])[:500])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self._in)
        os.close(self._out)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, ended with the block."""
    running = Browser(profile)
    try:
        yield running
    finally:
        running.close()
