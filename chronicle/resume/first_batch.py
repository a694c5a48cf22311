"""The first batch in words: what its rows teach, and what is wrong with them. Pure.

`batch_reader.py` makes the values of tensors and a tokenizer. What is found here is said before the first step and
never refuses it: the same batch can be meant. -100 is the label that torch's cross entropy leaves out ("All labels in your
dataset are -100. Training losses will be all 0", seed 004).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IGNORED = -100
NUM_SHOWN = 3  # rows
SHOWN_CHARACTERS = 1200  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row of a batch. `attended`: its attention mask, None when the model gets none."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    attended: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetting:
    """What is known of the model and of the script's tokenizer. None: unknown."""

    shifts_labels: bool = False  # a causal model that shifts the labels itself
    pad: int | None = None
    eos: int | None = None
    eos_name: str = "EOS"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """Something wrong, in one line: what, its likely cause, what to do."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class RowView:
    """A row without its padding: `begin` to `end`."""

    row: TokenRow
    begin: int
    end: int

    @property
    def content(self) -> tuple[int, ...]:
        """The ids that are no padding."""
        return self.row.ids[self.begin : self.end]

    @property
    def trained(self) -> list[int]:
        """The positions that are trained and no padding."""
        return [place for place in range(self.begin, self.end) if self.has_label(place)]

    @property
    def num_padding_trained(self) -> int:
        """On how many positions of padding the loss is taken."""
        padding = [*range(self.begin), *range(self.end, len(self.row.ids))]
        return sum(self.has_label(place) for place in padding)

    def has_label(self, place: int) -> bool:
        """Whether the loss is taken there."""
        labels = self.row.labels or ()
        return place < len(labels) and labels[place] != IGNORED


def _views(rows: Sequence[TokenRow], setting: RowSetting) -> list[RowView]:
    return [_view(row, setting) for row in rows if row.ids]


def _view(row: TokenRow, setting: RowSetting) -> RowView:
    begin, end = 0, len(row.ids)
    if row.attended is not None and any(row.attended):
        begin = row.attended.index(True)
        end -= row.attended[::-1].index(True)
    return RowView(row, begin, end - _padding_run(row.ids[begin:end], setting))


def _padding_run(ids: Sequence[int], setting: RowSetting) -> int:
    """Padding at the end of ids that the attention mask does not leave out. One EOS is an end; a run of three is padding."""
    run = 0
    while run < len(ids) and ids[len(ids) - 1 - run] == setting.pad:
        run += 1
    if run == len(ids):
        return 0
    if setting.pad == setting.eos:
        return run - 1 if run >= 3 else 0
    return run if run >= 2 else 0


# ---- the batch -------------------------------------------------------------------------------------------------------


Found = Iterator[BatchFault]


def find_in_batch(rows: Sequence[TokenRow], setting: RowSetting) -> list[BatchFault]:
    """Everything wrong with these rows, the worst first."""
    views = _views(rows, setting)
    return [fault for find in (_masked, _padding, _shifted, _end, _copies) for fault in find(views, setting)]


def _masked(views: Sequence[RowView], setting: RowSetting) -> Found:
    labelled = [view for view in views if view.row.labels is not None]
    empty = [view for view in labelled if not view.trained]
    if labelled and len(empty) == len(labelled):
        text = f"all labels are masked (-100) in all {len(labelled)} rows: the loss is 0 or NaN and nothing is learned"
        remedy = "look for an answer marker that is not in the text, or a prompt longer than the row"
        yield BatchFault(name="all-labels-masked", text=f"{text}; {remedy}")
    elif len(empty) >= 2 and 2 * len(empty) >= len(labelled):
        text = f"{len(empty)} of {len(labelled)} rows have every label masked (-100): they teach nothing"
        yield BatchFault(name="rows-without-labels", text=text)


def _padding(views: Sequence[RowView], setting: RowSetting) -> Found:
    trained = sum(view.num_padding_trained for view in views)
    if trained:
        labelled = trained + sum(len(view.trained) for view in views)
        text = f"padding is trained on: {trained} of {labelled} labels ({trained / labelled:.0%}) are of padding"
        remedy = "labels look like copies of the inputs, set them to -100 where the attention mask is 0"
        yield BatchFault(name="padding-trained", text=f"{text}; {remedy}")


def _shifted(views: Sequence[RowView], setting: RowSetting) -> Found:
    """Labels of a causal model that shifts them itself are its own inputs."""
    rows = [(view.row.ids, view.row.labels or (), i) for view in views for i in view.trained if i + 1 < view.end]
    if not setting.shifts_labels or len(rows) < 8:
        return
    same = sum(labels[place] == ids[place] for ids, labels, place in rows)
    shifted = sum(labels[place] == ids[place + 1] for ids, labels, place in rows)
    if shifted > 0.9 * len(rows) > same:
        text = "labels are the inputs shifted by one, and this model shifts them again: it learns to skip a token"
        yield BatchFault(name="labels-shifted-twice", text=f"{text}; pass labels that are not shifted")


def _end(views: Sequence[RowView], setting: RowSetting) -> Found:
    learning = [view for view in views if view.trained]
    last = [view for view in learning if view.content[-1] == setting.eos]
    masked = [view for view in last if not view.has_label(view.end - 1)]
    if setting.shifts_labels and masked and 2 * len(masked) >= len(learning):
        text = f"`{setting.eos_name}` ends {len(masked)} of {len(learning)} rows but its label is masked"
        pad = "; the padding token is the same, and the collator masks both" if setting.pad == setting.eos else ""
        yield BatchFault(name="eos-not-trained", text=f"{text}: the model never learns to stop{pad}")


def _copies(views: Sequence[RowView], setting: RowSetting) -> Found:
    copies = len(views) - len({(view.content, view.row.labels) for view in views})
    if len(views) >= 4 and 2 * copies >= len(views) and min(len(view.content) for view in views) >= 4:
        yield BatchFault(name="rows-repeated", text=f"{copies} of {len(views)} rows are copies of another row of the batch")


# ---- in words --------------------------------------------------------------------------------------------------------


def tell_batch(
    rows: Sequence[TokenRow], setting: RowSetting, decode: Callable[[Sequence[int]], str] | None
) -> dict[str, Any]:
    """The rows as plain values: lengths, shares, and up to three rows as parts that are masked, trained or padding.

    Without `decode` the parts have no text.
    """
    views = _views(rows, setting)
    places, content = sum(len(view.row.ids) for view in views), sum(len(view.content) for view in views)
    trained = sum(len(view.trained) for view in views)
    labelled = any(view.row.labels is not None for view in views)
    return {
        "num_rows": len(views),
        "lengths": [len(view.content) for view in views[:64]],
        "padding_fraction": round(1 - content / places, 4) if places else 0.0,
        "masked_fraction": round(1 - trained / content, 4) if labelled and content else None,
        "num_copies": len(views) - len({view.content for view in views}),
        "rows": [{"tokens": len(view.content), "parts": list(_parts(view, decode))} for view in views[:NUM_SHOWN]],
    }


def _parts(view: RowView, decode: Callable[[Sequence[int]], str] | None) -> Iterator[dict[str, Any]]:
    """Runs of tokens of one kind, in order; long texts lose their middle."""
    labelled = view.row.labels is not None
    runs: list[tuple[str, list[int]]] = []
    for index, token in enumerate(view.row.ids):
        if not view.begin <= index < view.end:
            kind = "padding"
        elif labelled:
            kind = "trained" if view.has_label(index) else "masked"
        else:
            kind = "text"
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(token)
        else:
            runs.append((kind, [token]))
    for kind, ids in runs[:24]:
        part: dict[str, Any] = {"kind": kind, "tokens": len(ids)}
        if decode is not None and kind != "padding":
            part["text"] = _shortened(decode(ids))
        yield part


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    head = SHOWN_CHARACTERS * 2 // 3
    return f"{text[:head]} … {text[-(SHOWN_CHARACTERS - head):]}"


def format_batch(told: Mapping[str, Any]) -> list[str]:
    """The told batch as lines for a person."""
    lengths = told.get("lengths") or [0]
    masked = told.get("masked_fraction")
    shortest, longest = min(lengths), max(lengths)
    tokens = f"{longest} tokens each" if shortest == longest else f"{shortest} to {longest} tokens"
    lines = [
        f"{told.get('num_rows')} rows of {tokens}, padding {told.get('padding_fraction', 0):.0%}"
        + ("" if masked is None else f", {masked:.0%} of the labels masked")
        + (f", {told['num_copies']} copies" if told.get("num_copies") else "")
    ]
    for number, row in enumerate(told.get("rows") or (), 1):
        lines.append(f"row {number}, {row.get('tokens')} tokens")
        for part in row.get("parts") or ():
            text = part.get("text")
            lines.append(f"  {part.get('kind'):>7} {part.get('tokens'):>5}" + ("" if text is None else f"  {text!r}"))
    return lines
