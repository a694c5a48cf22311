"""Where alerts go: `[alerts.NAME]` of chronicle.toml, checked when it is read. Secrets are named there, never written there.

    [alerts]
    tier = "warn"                 # notice, warn or propose; each destination may have its own
    quiet = "22:00-07:00"         # local time: only what is proposed is told; the rest follows in the morning

    [alerts.oncall]
    kind = "pagerduty"            # json, slack, discord, teams, pagerduty, email
    key = "env:PAGERDUTY_KEY"     # or "file:~/.config/pagerduty-key"

A webhook's address is a secret: whoever has it can write there. It stands in the environment or in a file (`env:NAME`,
`file:PATH`), is read when something is sent, and goes into no journal, log or message.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time
from typing import Any
from urllib.parse import urlsplit

from chronicle.alerts.messages import TIERS, Alert
from chronicle.credentials import SECRET_PLACE, redact
from chronicle.errors import SettingsError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")
PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
KINDS: Mapping[str, tuple[str, ...]] = {  # kind -> the fields that it needs
    "json": ("url",), "slack": ("url",), "discord": ("url",), "teams": ("url",), "pagerduty": ("key",),
    "email": ("host", "to", "from"),
}  # fmt: skip
SHARED = ("kind", "tier", "quiet")
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "json": ("token",), "pagerduty": ("url",), "email": ("port", "user", "password", "tls"),
}  # fmt: skip
TLS = ("starttls", "ssl", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One receiver. `fields` hold what its kind needs; secrets among them are names (`env:X`), not values."""

    name: str
    kind: str
    tier: str = "warn"
    quiet: tuple[time, time] | None = None
    fields: Mapping[str, str]

    def wants(self, alert: Alert) -> bool:
        """Whether an alert's tier is high enough."""
        return TIERS.index(alert.tier) >= TIERS.index(self.tier)

    def is_quiet(self, alert: Alert, now: datetime) -> bool:
        """Whether an alert waits for the end of the quiet hours. `now` is local. What is proposed never waits."""
        if self.quiet is None or alert.tier == "propose":
            return False
        begin, end = self.quiet
        at = now.time()
        return begin <= at < end if begin <= end else at >= begin or at < end


def read_destinations(table: Mapping[str, Any], origin: str) -> tuple[Destination, ...]:
    """The destinations of `[alerts]`; raises `SettingsError` naming the field, what was expected, and the way out."""
    shared = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    for key in shared:
        if key not in ("tier", "quiet"):
            way_out = "a destination is a table of its own: [alerts.NAME]"
            raise SettingsError(f"unknown setting `alerts.{key}` in `{origin}`: expected tier or quiet", way_out)
    return tuple(
        _destination(name, {**shared, **given}, origin) for name, given in table.items() if isinstance(given, Mapping)
    )


def _destination(name: str, given: Mapping[str, Any], origin: str) -> Destination:
    where = f"`[alerts.{name}]` in `{origin}`"
    if not NAME.fullmatch(name):
        raise SettingsError(f"{where}: expected a name of letters, digits, `_` and `-`")
    kind = str(given.get("kind"))
    if kind not in KINDS:
        raise SettingsError(f"{where}: `kind` is `{kind}`: expected one of {', '.join(KINDS)}")
    tier = given.get("tier", "warn")
    if tier not in TIERS:
        raise SettingsError(f"{where}: `tier` is {tier!r}: expected one of {', '.join(TIERS)}")
    fields = {key: str(value) for key, value in given.items() if key not in SHARED}
    known = (*KINDS[kind], *OPTIONAL.get(kind, ()))
    for key in fields:
        if key not in known:
            raise SettingsError(f"{where}: unknown setting `{key}`: of kind {kind} are {', '.join((*SHARED, *known))}")
    for key in KINDS[kind]:
        if not fields.get(key):
            raise SettingsError(f"{where}: `{key}` is missing: a destination of kind {kind} needs it")
    _check_secrets(where, kind, fields)
    if fields.get("tls", TLS[0]) not in TLS:
        raise SettingsError(f"{where}: `tls` is {fields['tls']!r}: expected one of {', '.join(TLS)}")
    if not fields.get("port", "25").isdigit():
        raise SettingsError(f"{where}: `port` is {fields['port']!r}: expected a number")
    return Destination(name=name, kind=kind, tier=tier, quiet=_hours(where, given.get("quiet")), fields=fields)


def _check_secrets(where: str, kind: str, fields: Mapping[str, str]) -> None:
    """A secret in the settings file would go wherever the file goes: into a repository, into an attachment."""
    secret = ["key", "token", "password"]
    if kind in ("slack", "discord", "teams"):
        secret.append("url")
    for key in secret:
        if key in fields and SECRET_PLACE.fullmatch(fields[key]) is None:
            way_out = f'write the name of it: {key} = "env:NAME" or "file:PATH"'
            raise SettingsError(f"{where}: `{key}` is a secret and does not belong into the file", way_out)
    url = fields.get("url", "")
    if url and SECRET_PLACE.fullmatch(url) is None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"{where}: `url` is no address: expected http://… or https://…")
        if redact(url) != url:
            way_out = 'write the name of it: url = "env:NAME" or "file:PATH"'
            raise SettingsError(f"{where}: `url` holds a password or token", way_out)


def _hours(where: str, given: Any) -> tuple[time, time] | None:
    if given is None or given == "":
        return None
    try:
        begin, end = str(given).split("-")
        return datetime.strptime(begin.strip(), "%H:%M").time(), datetime.strptime(end.strip(), "%H:%M").time()
    except ValueError:
        raise SettingsError(f'{where}: `quiet` is {given!r}: expected hours like "22:00-07:00"') from None
