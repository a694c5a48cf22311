"""The fusion's state as plain JSON. Open channel events are shared with their channels and keep being shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollback.detect.channel import Channel
from rollback.detect.events import Event
from rollback.detect.excursion import ChannelEvent
from rollback.detect.fusion import Fusion, Group
from rollback.detect.roles import Role


def fusion_to_json(fusion: Fusion) -> dict[str, Any]:
    return {
        "events": [event.to_json() for event in fusion.events],
        "loss_events": list(fusion.loss_events),
        "first_loss": fusion.first_loss,
        "groups": [_group_to_json(group) for group in fusion.groups],
    }


def fusion_from_json(record: Mapping[str, Any], channels: Mapping[str, Channel]) -> Fusion:
    fusion = Fusion()
    fusion.events = [Event.from_json(event) for event in record["events"]]
    fusion.loss_events = list(record["loss_events"])
    fusion.first_loss = record["first_loss"]
    fusion.groups = [_group_from_json(group, channels) for group in record["groups"]]
    return fusion


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "number": group.number,
        "role": group.role.value,
        "cluster": group.cluster,
        "row": group.row,
        "step": group.step,
        "leader": group.members.index(group.leader),
        "members": [member.to_json() for member in group.members],
    }


def _group_from_json(record: Mapping[str, Any], channels: Mapping[str, Channel]) -> Group:
    members = [_shared(ChannelEvent.from_json(member), channels) for member in record["members"]]
    group = Group(Role(record["role"]), members[record["leader"]])
    group.members, group.number, group.cluster = members, record["number"], record["cluster"]
    group.row, group.step = record["row"], record["step"]
    return group


def _shared(event: ChannelEvent, channels: Mapping[str, Channel]) -> ChannelEvent:
    """Return the channel's own object while the event is open: both sides must see its changes."""
    channel = channels.get(event.channel)
    for candidate in channel.events if channel else ():
        if candidate.id == event.id:
            return candidate
    return event
