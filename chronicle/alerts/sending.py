"""Send one message to one destination, once, with a limit of time. What came of it is a value: sent, refused, or not now.

Over HTTP no sender can know that a message arrived exactly once: an answer may be lost after the receiver took the message.
Then it is sent again *with the same key* (`Idempotency-Key`, PagerDuty's `dedup_key`, an e-mail's `Message-ID`), so that a
receiver that looks at the key has it once. Nothing is ever reported as sent that no receiver said it had taken.
"""

import json
import smtplib
import socket
import ssl
from collections.abc import Mapping
from email.message import EmailMessage
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from chronicle.alerts.destinations import PAGERDUTY, Destination
from chronicle.alerts.messages import Alert, alert_text, body_for, headline
from chronicle.credentials import secret_of
from chronicle.errors import ChronicleError

SECONDS = 10.0
PERMANENT = (400, 413, 415, 422)  # this message will never be taken; anything else may be mended by a person


class Answer(NamedTuple):
    """`state`: sent, refused (never again), or failed (later). `why` names no secret; `after`: seconds it asks us to wait."""

    state: str
    why: str = ""
    after: float = 0.0


class _NoRedirect(HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body, and be answered with 200."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def send(destination: Destination, alert: Alert) -> Answer:
    """Send one alert; does not raise, whatever the network, the receiver or the settings do."""
    try:
        if destination.kind == "email":
            return _mail(destination, alert)
        return _post(destination, alert)
    except ChronicleError as problem:  # a secret that is not there
        return Answer("failed", problem.message)
    except Exception as problem:  # noqa: BLE001 an address or a library that does what nobody thought of
        return Answer("failed", type(problem).__name__)


def _post(destination: Destination, alert: Alert) -> Answer:
    fields = destination.fields
    url = secret_of(fields.get("url", PAGERDUTY))
    if not url.startswith(("http://", "https://")):
        return Answer("failed", "its address is no http:// or https:// address")
    key = secret_of(fields["key"]) if "key" in fields else ""
    message = body_for(destination.kind, alert, routing_key=key)
    headers = {"Content-Type": "application/json", "Idempotency-Key": alert.id, "User-Agent": "chronicle"}
    if "token" in fields:
        headers["Authorization"] = f"Bearer {secret_of(fields['token'])}"
    return post(url, json.dumps(message).encode(), headers)


def post(url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
    """One POST; does not raise for a network or a receiver that fails, and follows no redirect."""
    request = Request(url, data=body, headers=dict(headers), method="POST")
    try:
        with build_opener(_NoRedirect).open(request, timeout=SECONDS) as response:
            response.read(1 << 16)
            return Answer("sent")
    except HTTPError as problem:
        with problem:
            after = problem.headers.get("Retry-After", "")
            state = "refused" if problem.code in PERMANENT else "failed"
            return Answer(state, f"it answered {problem.code}", float(after) if after.isdigit() else 0.0)
    except (URLError, HTTPException, OSError, ssl.SSLError) as problem:
        return Answer("failed", _reason(problem))


def _reason(problem: Exception) -> str:
    """Why a connection failed, without the address: `Connection refused`, `timed out`."""
    inner = problem.reason if isinstance(problem, URLError) else problem
    if isinstance(inner, socket.gaierror):
        return "its name is not known"
    if isinstance(inner, TimeoutError):
        return "timed out"
    return (inner.strerror if isinstance(inner, OSError) and inner.strerror else type(inner).__name__) or "no answer"


def _mail(destination: Destination, alert: Alert) -> Answer:
    fields = destination.fields
    message = EmailMessage()
    message["Subject"] = headline(alert)
    message["From"], message["To"] = fields["from"], fields["to"]
    message["Message-ID"] = f"<{alert.id}@chronicle.invalid>"
    if alert.phase == "ended":
        message["References"] = f"<{alert.key}-opened@chronicle.invalid>"
    message.set_content(alert_text(alert))
    tls, port = fields.get("tls", "starttls"), int(fields.get("port", "0"))
    connect = smtplib.SMTP_SSL if tls == "ssl" else smtplib.SMTP
    try:
        with connect(fields["host"], port, timeout=SECONDS) as server:
            if tls == "starttls":
                server.starttls(context=ssl.create_default_context())
            if "user" in fields:
                server.login(fields["user"], secret_of(fields.get("password", "")))
            server.send_message(message)
            return Answer("sent")
    except smtplib.SMTPRecipientsRefused:
        return Answer("refused", "no recipient was accepted")
    except (smtplib.SMTPException, OSError) as problem:
        return Answer("failed", _reason(problem))
