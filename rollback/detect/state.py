"""The state of channels and fusion as plain JSON; floats keep every bit through repr.

Open channel events are shared by a channel and the fusion, and keep being shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rollback.detect.channel import Channel
from rollback.detect.channel_state import SCALARS
from rollback.detect.config import ChannelConfig
from rollback.detect.events import Event
from rollback.detect.excursion import ChannelEvent, Excursion
from rollback.detect.fusion import Fusion, Group
from rollback.detect.noise import GridSense
from rollback.channels import Role


def channel_to_json(channel: Channel) -> dict[str, Any]:
    """Everything the fold needs to go on as if it had never stopped."""
    record: dict[str, Any] = {name: getattr(channel, name) for name in SCALARS}
    record["name"] = channel.name
    record["before"] = None if channel.before is None else list(channel.before)
    record["warm"] = [list(item) for item in channel.warm]
    record["history"] = [list(item) for item in channel.history]
    record["residuals"] = list(channel.residuals)
    record["order"], record["lagged"] = list(channel.order), list(channel.lagged)
    record["buffer"] = [list(item) for item in channel.buffer]
    record["grid"] = channel.grid.to_json()
    record["events"] = [event.to_json() for event in channel.events]
    record["respikes"] = [event.id for event in channel.respikes]
    record["excursion"] = channel.excursion and channel.excursion.to_json()
    return record


def channel_from_json(config: ChannelConfig, record: Mapping[str, Any]) -> Channel:
    """Rebuild a channel; `config` is that of its role."""
    channel = Channel(record["name"], config)
    for name in SCALARS:
        setattr(channel, name, record[name])
    channel.before = None if record["before"] is None else (record["before"][0], record["before"][1])
    channel.warm = [(row, step, value) for row, step, value in record["warm"]]
    channel.order = deque(record["order"])
    channel.sorted = sorted(channel.order)
    channel.lagged.extend(record["lagged"])
    channel.buffer.extend((row, step, z, value) for row, step, z, value in record["buffer"])
    channel.history.extend((step, level, middle, slow) for step, level, middle, slow in record["history"])
    channel.residuals.extend(record["residuals"])
    channel.grid = GridSense(*record["grid"])
    channel.events = [ChannelEvent.from_json(event) for event in record["events"]]
    by_id = {event.id: event for event in channel.events}
    channel.respikes = [by_id[number] for number in record["respikes"]]
    if record["excursion"] is not None:
        event = by_id[record["excursion"]["event"]]
        channel.excursion = Excursion.from_json(config, event, record["excursion"])
    return channel


def fusion_to_json(fusion: Fusion) -> dict[str, Any]:
    return {
        "events": [event.to_json() for event in fusion.events],
        "loss_events": list(fusion.loss_events),
        "first_loss": fusion.first_loss,
        "lr_wrong": fusion.lr_wrong,
        "groups": [_group_to_json(group) for group in fusion.groups],
    }


def fusion_from_json(record: Mapping[str, Any], channels: Mapping[str, Channel]) -> Fusion:
    fusion = Fusion()
    fusion.events = [Event.from_json(event) for event in record["events"]]
    fusion.loss_events = list(record["loss_events"])
    fusion.first_loss, fusion.lr_wrong = record["first_loss"], record["lr_wrong"]
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
