"""The first batch in words: what its rows teach, and what is wrong with them. Pure.

`batch_reader.py` makes the values of tensors and a tokenizer. What is found here is said before the first step and
never refuses it: the same batch can be meant. -100 is the label that torch's cross entropy leaves out ("All labels in your
dataset are -100. Training losses will be all 0", seed 004).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

IGNORED = -100
NUM_SHOWN = 3  # rows
SHOWN_CHARACTERS = 1200  # of a row
MARKER = re.compile(
    r"<\|[\w./ -]{2,40}?\|>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|<｜[^｜<>]{2,40}｜>"
    r"|</s>|<(?:bos|eos)>|<(?:START|END)_OF_\w+>"
)
WRITTEN_OUT = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")  # Llama 2 has no tokens for its own markers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row of a batch. `attended`: its attention mask, None when the model gets none."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    attended: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What the script's tokenizer says about its tokens."""

    bos: int | None = None
    pad: int | None = None
    unknown: int | None = None
    ends: frozenset[int] = frozenset()  # EOS, and tokens that end a turn
    specials: frozenset[int] = frozenset()
    adds_bos: bool = False
    template: str = ""  # the chat template
    template_fits: bool = True  # it uses EOS or a special token of this tokenizer
    pieces: Mapping[str, int] = field(default_factory=dict)  # marker found in the text -> tokens it is made of
    names: Mapping[int, str] = field(default_factory=dict)  # special id -> how it is written


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetting:
    """What the trainer does with a row. None: unknown."""

    shifts_labels: bool = False  # a causal model that shifts the labels itself
    num_embeddings: int | None = None
    max_length: int | None = None  # rows are cut there
    packed: bool = False  # several texts in a row
    has_prompts: bool = False  # the data tell prompts from answers
    of_decoder: bool = False  # rows are the labels of a decoder, which gets its first token by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """Something wrong, in one line: what, its likely cause, what to do."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class RowView:
    """A row without its padding: `begin` to `end`, and the positions that are trained."""

    row: TokenRow
    begin: int
    end: int
    trained: tuple[int, ...]

    @property
    def content(self) -> tuple[int, ...]:
        """The ids that are no padding."""
        return self.row.ids[self.begin : self.end]

    @property
    def length(self) -> int:
        """How many ids are no padding."""
        return self.end - self.begin

    @property
    def padding(self) -> list[int]:
        """The positions of padding."""
        return [*range(self.begin), *range(self.end, len(self.row.ids))]

    def has_label(self, place: int) -> bool:
        """Whether the loss is taken there."""
        labels = self.row.labels or ()
        return place < len(labels) and labels[place] != IGNORED

    @property
    def masks_beginning(self) -> bool:
        """Whether the row begins with labels that are left out, as a masked prompt does."""
        return bool(self.trained) and self.trained[0] - self.begin >= 2

    @property
    def masks_nothing(self) -> bool:
        """Whether every token but perhaps the first and the last is trained."""
        return self.length > 2 and len(self.trained) >= self.length - 2


def _views(rows: Sequence[TokenRow], words: TokenizerFacts) -> list[RowView]:
    return [_view(row, words) for row in rows if row.ids]


def _view(row: TokenRow, words: TokenizerFacts) -> RowView:
    begin, end = 0, len(row.ids)
    if row.attended is not None and any(row.attended):
        begin = row.attended.index(True)
        end -= row.attended[::-1].index(True)
    end -= _padding_run(row.ids[begin:end], words)
    if row.attended is None and words.pad is not None and words.pad != words.bos and words.pad not in words.ends:
        while begin < end and row.ids[begin] == words.pad:
            begin += 1
    view = RowView(row, begin, end, ())
    return replace(view, trained=tuple(filter(view.has_label, range(begin, end))))


def _padding_run(ids: Sequence[int], words: TokenizerFacts) -> int:
    """Padding at the end of ids that the attention mask does not leave out. One EOS is an end; a run of three is padding."""
    run = 0
    while run < len(ids) and ids[len(ids) - 1 - run] == words.pad:
        run += 1
    if words.pad is None or run == len(ids):
        return 0
    if words.pad in words.ends:
        return run - 1 if run >= 3 else 0
    return run if run >= 2 else 0


# ---- the batch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a batch, and what is known beside them."""

    views: list[RowView]
    words: TokenizerFacts
    setting: RowSetting

    @property
    def learning(self) -> list[RowView]:
        """The rows that teach anything."""
        return [view for view in self.views if view.trained]


Found = Iterator[tuple[str, str]]  # name and text of what is wrong


def find_in_batch(rows: Sequence[TokenRow], words: TokenizerFacts, setting: RowSetting) -> list[BatchFault]:
    """Everything wrong with these rows, the worst first."""
    batch = _Batch(_views(rows, words), words, setting)
    found = dict(pair for find in FINDERS for pair in find(batch))
    if "all-labels-masked" in found:  # what follows from it
        found.pop("eos-missing", None)
    return [BatchFault(name=name, text=text) for name, text in found.items()]


def _is_half(some: Sequence[Any], of: Sequence[Any]) -> bool:
    """Whether it is half of them or more."""
    return bool(some) and 2 * len(some) >= len(of)


def _masked(batch: _Batch) -> Found:
    labelled = [view for view in batch.views if view.row.labels is not None]
    empty = [view for view in labelled if not view.trained]
    if labelled and len(empty) == len(labelled):
        text = f"all labels are masked (-100) in all {len(labelled)} rows: the loss is 0 or NaN and nothing is learned"
        yield "all-labels-masked", f"{text}; look for an answer marker that is not in the text, or a prompt longer than the row"
    elif len(empty) >= 2 and _is_half(empty, labelled):
        text = f"{len(empty)} of {len(labelled)} rows have every label masked (-100): they teach nothing"
        yield "rows-without-labels", text


def _padding(batch: _Batch) -> Found:
    padding = [(view, place) for view in batch.views for place in view.padding]
    trained = sum(view.has_label(place) for view, place in padding)
    labelled = trained + sum(len(view.trained) for view in batch.views)
    if trained:
        text = f"padding is trained on: {trained} of {labelled} labels ({trained / labelled:.0%}) are of padding"
        remedy = "labels look like copies of the inputs, set them to -100 where the attention mask is 0"
        yield "padding-trained", f"{text}; {remedy}"
    attended = sum(view.row.attended is not None and view.row.attended[place] for view, place in padding)
    if attended:
        yield "padding-attended", f"padding is attended to: the attention mask is 1 on {attended} padding tokens"


def _labels(batch: _Batch) -> Found:
    """Labels of a causal model that shifts them itself are its own inputs."""
    rows = [(view.row.ids, view.row.labels or (), i) for view in batch.views for i in view.trained if i + 1 < view.end]
    if not batch.setting.shifts_labels or len(rows) < 8:
        return
    same = sum(labels[place] == ids[place] for ids, labels, place in rows) / len(rows)
    shifted = sum(labels[place] == ids[place + 1] for ids, labels, place in rows) / len(rows)
    if same >= 0.9:
        return
    if shifted > 0.9:
        text = "labels are the inputs shifted by one, and this model shifts them again: it learns to skip a token"
        yield "labels-shifted-twice", f"{text}; pass labels that are not shifted"
    else:
        text = f"only {same:.0%} of the labels are the token at their own place: labels and inputs do not belong together"
        yield "labels-of-other-text", text


def _bos(batch: _Batch) -> Found:
    views, words = batch.views, batch.words
    if words.bos is None or not views:
        return
    doubled = [view for view in views if view.content[:2] == (words.bos, words.bos)]
    name = words.names.get(words.bos, "BOS")
    if _is_half(doubled, views):
        text = f"`{name}` stands twice at the beginning of {len(doubled)} of {len(views)} rows"
        cause = "the chat template and the tokenizer both add it; tokenize with add_special_tokens=False"
        yield "bos-doubled", f"{text}: {cause}"
    if not words.adds_bos or batch.setting.of_decoder or any(words.bos in view.content for view in views):
        return
    if not words.template or "bos_token" in words.template or name in words.template:
        text = f"no row has `{name}`, which this tokenizer puts at the beginning of a text: the model was trained with it"
        yield "bos-missing", text


def _ends(batch: _Batch) -> Found:
    words, learning = batch.words, batch.learning
    if not words.ends or not batch.setting.shifts_labels:
        return
    name = words.names.get(min(words.ends), "EOS")
    last = [view for view in learning if view.content[-1] in words.ends]
    masked = [view for view in last if not any(view.row.ids[i] in words.ends for i in view.trained)]
    if _is_half(masked, learning):
        text = f"`{name}` ends {len(masked)} of {len(learning)} rows but its label is masked: the model never learns to stop"
        pad = "; the padding token is the same, and the collator masks both" if words.pad in words.ends else ""
        yield "eos-not-trained", text + pad
        return
    twice = [view for view in last if view.length > 2 and view.content[-2] == view.content[-1]]
    doubled = [view for view in twice if view.has_label(view.end - 2)]
    if _is_half(doubled, learning):
        text = f"`{name}` stands twice at the end of {len(doubled)} of {len(learning)} rows"
        yield "eos-doubled", f"{text}: the text has it already, and the trainer adds it"
    if not batch.setting.packed and len(learning) >= 2:
        yield from _without_end(batch, name)


def _without_end(batch: _Batch, name: str) -> Found:
    learning, most = batch.learning, batch.setting.max_length
    stops = batch.words.ends | batch.words.specials
    ended = [any(view.row.ids[i] in stops for i in view.trained[-3:]) for view in learning]
    cut = [most is not None and view.length >= most for view in learning]
    if all(cut) and not any(ended):
        yield "every-row-cut", f"all {len(cut)} rows are cut at {most} tokens: no answer reaches its end"
    elif not any(ended) and len({view.length for view in learning}) > 1:
        yield "eos-missing", f"no row ends with `{name}` or another special token: the model never learns to stop"


def _prompts(batch: _Batch) -> Found:
    learning = batch.learning
    prompted = [view for view in learning if view.masks_beginning]
    whole = [view for view in learning if view.masks_nothing]
    ends_masked = [view for view in learning if view.end - 1 - view.trained[-1] >= max(3, view.length // 5)]
    reversed_ = [view for view in ends_masked if view.trained[0] - view.begin <= 1]
    if _is_half(reversed_, learning):
        text = f"{len(reversed_)} of {len(learning)} rows train on their beginning and mask their end"
        yield "mask-upside-down", f"{text}: the prompt is learned and the answer is not"
    elif whole and len(learning) >= 3 and _is_half(prompted, learning):
        text = f"{len(whole)} of {len(learning)} rows train on their prompt, the others mask it"
        yield "prompt-trained-in-some", f"{text}: the answer marker was not found there"
    elif batch.setting.has_prompts and not batch.setting.packed and learning and len(whole) == len(learning):
        yield "prompt-trained", "the data tell prompts from answers, and no label is masked: the prompt is trained on too"


def _markers(batch: _Batch) -> Found:
    """Markers of a chat template that the tokenizer does not know as one token."""
    words = batch.words
    foreign = [
        f"`{marker}` ({count} tokens)"
        for marker, count in words.pieces.items()
        if count > 1 and not (marker in words.template and (marker in WRITTEN_OUT or words.template_fits))
    ]
    if foreign:
        cause = "this tokenizer has no such token; the chat template is of another model"
        yield "foreign-template", f"{', '.join(foreign[:3])} in the text: {cause}"


def _ids(batch: _Batch) -> Found:
    words, most = batch.words, batch.setting.num_embeddings
    highest = max((max(view.row.ids) for view in batch.views), default=0)
    if most is not None and highest >= most:
        cause = "the tokenizer is of another model, or the embeddings were not resized"
        yield "id-without-embedding", f"token {highest} is in the batch, the model has {most} embeddings: {cause}"
    if words.unknown is None or words.unknown in words.ends:
        return
    total = sum(view.length for view in batch.views)
    unknown = sum(view.content.count(words.unknown) for view in batch.views)
    if unknown > 0.2 * total:
        text = f"{unknown / total:.0%} of the tokens are `{words.names.get(words.unknown, 'unknown')}`"
        yield "unknown-tokens", f"{text}: the tokenizer does not know this text"


def _copies(batch: _Batch) -> Found:
    views = batch.views
    copies = len(views) - len({(view.content, view.row.labels) for view in views})
    if len(views) >= 4 and 2 * copies >= len(views) and min(view.length for view in views) >= 4:
        yield "rows-repeated", f"{copies} of {len(views)} rows are copies of another row of the batch"


FINDERS: tuple[Callable[[_Batch], Found], ...] = (
    _masked, _padding, _labels, _bos, _ends, _prompts, _markers, _ids, _copies,
)  # fmt: skip


def find_markers(text: str) -> tuple[str, ...]:
    """The markers of chat templates in a text, each once."""
    return tuple(dict.fromkeys(MARKER.findall(text)))


# ---- in words --------------------------------------------------------------------------------------------------------


def tell_batch(
    rows: Sequence[TokenRow], words: TokenizerFacts, decode: Callable[[Sequence[int]], str] | None
) -> dict[str, Any]:
    """The rows as plain values: lengths, shares, and up to three rows as parts that are masked, trained or padding.

    Without `decode` the parts have no text.
    """
    views = _views(rows, words)
    places, content = sum(len(view.row.ids) for view in views), sum(view.length for view in views)
    trained = sum(len(view.trained) for view in views)
    labelled = any(view.row.labels is not None for view in views)
    return {
        "num_rows": len(views),
        "lengths": [view.length for view in views[:64]],
        "padding_fraction": round(1 - content / places, 4) if places else 0.0,
        "masked_fraction": round(1 - trained / content, 4) if labelled and content else None,
        "num_copies": len(views) - len({view.content for view in views}),
        "rows": [{"tokens": view.length, "parts": list(_parts(view, decode))} for view in views[:NUM_SHOWN]],
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
