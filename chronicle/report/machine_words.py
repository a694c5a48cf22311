"""What the detector and a proposal said, as sentences instead of fields: the same words in Markdown and on the page. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from chronicle.journal import Entry
from chronicle.story.matters import event_of
from chronicle.story.plain import format_number

__all__ = ["TOLD_KINDS", "machine_words"]

TOLD_KINDS = ("incident", "proposal")  # their fields are told here; `chronicle show ID` has them all


def machine_words(entry: Entry) -> Iterator[tuple[str, str]]:
    """(name of the paragraph, sentence); nothing for what people wrote."""
    if entry.kind == "incident":
        yield from _incident(event_of(entry))
    elif entry.kind == "proposal":
        yield from _proposal(entry.data)


def _incident(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not isinstance(event.get("onset_step"), int):
        return  # a person's: it has words of its own
    channels = event.get("channels")
    where = f" on {', '.join(map(str, channels))}" if isinstance(channels, list | tuple) and channels else ""
    onset, low = event["onset_step"], event.get("onset_low_step")
    parts = [f"{event.get('kind') or 'incident'}{where}, onset at step {onset}"]
    if isinstance(low, int) and low != onset:
        parts[0] += f" (at the earliest {low})"
    if isinstance(event.get("alarm_step"), int):
        parts.append(f"alarm at {event['alarm_step']}")
    excess, sigmas, peak = (_number(event.get(name)) for name in ("excess", "sigmas", "peak_step"))
    if excess is not None:
        size = f" ({format_number(sigmas)} σ)" if sigmas is not None else ""
        at = f" at {peak:.0f}" if peak is not None else ""
        parts.append(f"peak {'+' if excess >= 0 else ''}{format_number(excess)}{size}{at}")
    if isinstance(event.get("recovered_step"), int):
        parts.append(f"back at {event['recovered_step']}")
    yield "Measured", ", ".join(parts)


def _proposal(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if data.get("command"):
        steps = _number(data.get("cost_steps"))
        cost = "" if steps is None else f" gives up {steps:.0f} steps"
        command = str(data["command"]).replace("`", "'")
        yield "Proposed", f"`{command}`{cost}"
    reasons = data.get("reasons")
    if isinstance(reasons, list | tuple) and reasons:
        yield "Because", "; ".join(map(str, reasons))
    others = [x for x in data.get("alternatives") or () if isinstance(x, Mapping)]
    if others:
        words = (f"to {x.get('step')} of launch {x.get('launch')} ({x.get('cost_steps')} steps)" for x in others)
        yield "Or else", "; ".join(words)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
