"""The first batch in words: what its rows teach, and what is wrong with them. Pure.

`batch_reader.py` makes the values of tensors and a tokenizer. What is found here is said before the first step and
never refuses it: the same batch can be meant. -100 is the label that torch's cross entropy leaves out ("All labels in your
dataset are -100. Training losses will be all 0", seed 004).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    if row.attended is not None and any(row.attended):
        seen = [index for index, used in enumerate(row.attended) if used]
        begin, end = seen[0], seen[-1] + 1
    else:
        begin, end = 0, len(row.ids)
    labels = row.labels or ()
    run = _padding_run(row.ids[begin:end], words)
    end -= run
    if row.attended is None and words.pad is not None and words.pad != words.bos:
        while begin < end and row.ids[begin] == words.pad and words.pad not in words.ends:
            begin += 1
    return RowView(row, begin, end, tuple(i for i in range(begin, end) if i < len(labels) and labels[i] != IGNORED))


def _padding_run(ids: Sequence[int], words: TokenizerFacts) -> int:
    """Padding at the end of ids that the attention mask does not leave out. One EOS is an end; a run of three is padding."""
    run = 0
    while run < len(ids) and ids[len(ids) - 1 - run] == words.pad:
        run += 1
    if words.pad is None or run == len(ids):
        return 0
    return (run - 1 if run >= 3 else 0) if words.pad in words.ends else (run if run >= 2 else 0)


# ---- the batch -------------------------------------------------------------------------------------------------------


def find_in_batch(rows: Sequence[TokenRow], words: TokenizerFacts, setting: RowSetting) -> list[BatchFault]:
    """Everything wrong with these rows, the worst first."""
    views = _views(rows, words)
    found = [finding for find in FINDERS for finding in find(views, words, setting)]
    names = {finding.name for finding in found}
    if "all-labels-masked" in names:  # what follows from it
        names -= {"eos-missing"}
    return [finding for finding in found if finding.name in names]


def _masked(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    labelled = [view for view in views if view.row.labels is not None]
    empty = [view for view in labelled if not view.trained]
    if labelled and len(empty) == len(labelled):
        yield BatchFault(
            name="all-labels-masked",
            text=f"all labels are masked (-100) in all {len(labelled)} rows: the loss is 0 or NaN and nothing is learned; "
            "look for an answer marker that is not in the text, or a prompt longer than the row",
        )
    elif len(empty) >= 2 and 2 * len(empty) >= len(labelled):
        yield BatchFault(
            name="rows-without-labels",
            text=f"{len(empty)} of {len(labelled)} rows have every label masked (-100): they teach nothing",
        )


def _padding(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    outside = [(view, i) for view in views for i in range(len(view.row.ids)) if not view.begin <= i < view.end]
    trained = [(v, i) for v, i in outside if v.row.labels and i < len(v.row.labels) and v.row.labels[i] != IGNORED]
    labelled = sum(label != IGNORED for view in views for label in view.row.labels or ())
    if trained and labelled:
        yield BatchFault(
            name="padding-trained",
            text=f"padding is trained on: {len(trained)} of {labelled} labels ({len(trained) / labelled:.0%}) are of padding; "
            "labels look like copies of the inputs, set them to -100 where the attention mask is 0",
        )
    attended = [1 for v, i in outside if v.row.attended is not None and v.row.attended[i]]
    if attended:
        yield BatchFault(
            name="padding-attended",
            text=f"padding is attended to: the attention mask is 1 on {len(attended)} padding tokens",
        )


def _labels(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    """Labels of a causal model that shifts them itself are its own inputs."""
    if not setting.shifts_labels:
        return
    pairs = [(view, i) for view in views for i in view.trained if i + 1 < view.end]
    if len(pairs) < 8:
        return
    same = sum(v.row.labels[i] == v.row.ids[i] for v, i in pairs) / len(pairs)  # type: ignore[index]
    next_ = sum(v.row.labels[i] == v.row.ids[i + 1] for v, i in pairs) / len(pairs)  # type: ignore[index]
    if next_ > 0.9 and same < 0.9:
        text = "labels are the inputs shifted by one, and this model shifts them again: it learns to skip a token"
        yield BatchFault(name="labels-shifted-twice", text=f"{text}; pass labels that are not shifted")
    elif same < 0.9:
        text = f"only {same:.0%} of the labels are the token at their own place: labels and inputs do not belong together"
        yield BatchFault(name="labels-of-other-text", text=text)


def _bos(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    if words.bos is None or not views:
        return
    doubled = [view for view in views if view.content[:2] == (words.bos, words.bos)]
    name = words.names.get(words.bos, "BOS")
    if doubled and 2 * len(doubled) >= len(views):
        yield BatchFault(
            name="bos-doubled",
            text=f"`{name}` stands twice at the beginning of {len(doubled)} of {len(views)} rows: the chat template and the "
            "tokenizer both add it; tokenize with add_special_tokens=False",
        )
    by_template = bool(words.template) and "bos_token" not in words.template and name not in words.template
    if words.adds_bos and not by_template and not setting.of_decoder and not any(words.bos in view.content for view in views):
        yield BatchFault(
            name="bos-missing",
            text=f"no row has `{name}`, which this tokenizer puts at the beginning of a text: the model was trained with it",
        )


def _ends(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    if not words.ends or not setting.shifts_labels:
        return
    name = words.names.get(min(words.ends), "EOS")
    learning = [view for view in views if view.trained]
    last = [view for view in learning if view.row.ids[view.end - 1] in words.ends]
    masked = [view for view in last if not any(view.row.ids[i] in words.ends for i in view.trained)]
    if masked and 2 * len(masked) >= len(learning):
        pad = "; the padding token is the same, and the collator masks both" if words.pad in words.ends else ""
        yield BatchFault(
            name="eos-not-trained",
            text=f"`{name}` ends {len(masked)} of {len(learning)} rows but its label is masked: the model never learns to "
            f"stop{pad}",
        )
        return
    doubled = [v for v in last if v.length > 2 and v.row.ids[v.end - 2] == v.row.ids[v.end - 1] and v.end - 2 in v.trained]
    if doubled and 2 * len(doubled) >= len(learning):
        text = f"`{name}` stands twice at the end of {len(doubled)} of {len(learning)} rows"
        yield BatchFault(name="eos-doubled", text=f"{text}: the text has it already, and the trainer adds it")
    yield from _without_end(learning, words, setting, name)


def _without_end(learning: Sequence[RowView], words: TokenizerFacts, setting: RowSetting, name: str) -> Iterator[BatchFault]:
    if setting.packed or len(learning) < 2:
        return
    stops = words.ends | words.specials
    ended = [v for v in learning if any(v.row.ids[i] in stops for i in v.trained[-3:])]
    cut = [v for v in learning if setting.max_length is not None and v.length >= setting.max_length and v not in ended]
    if len(cut) == len(learning):
        yield BatchFault(
            name="every-row-cut",
            text=f"all {len(cut)} rows are cut at {setting.max_length} tokens: no answer reaches its end",
        )
    elif not ended and len({view.length for view in learning}) > 1:
        yield BatchFault(
            name="eos-missing",
            text=f"no row ends with `{name}` or another special token: the model never learns to stop",
        )


def _prompts(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    learning = [view for view in views if view.trained]
    prompted = [view for view in learning if view.masks_beginning]
    whole = [view for view in learning if view.masks_nothing]
    reversed_ = [v for v in learning if v.trained[0] - v.begin <= 1 and v.end - 1 - v.trained[-1] >= max(3, v.length // 5)]
    if reversed_ and 2 * len(reversed_) >= len(learning):
        text = f"{len(reversed_)} of {len(learning)} rows train on their beginning and mask their end"
        yield BatchFault(name="mask-upside-down", text=f"{text}: the prompt is learned and the answer is not")
    elif whole and len(learning) >= 3 and 2 * len(prompted) >= len(learning):
        text = f"{len(whole)} of {len(learning)} rows train on their prompt, the others mask it"
        yield BatchFault(name="prompt-trained-in-some", text=f"{text}: the answer marker was not found there")
    elif setting.has_prompts and not setting.packed and learning and len(whole) == len(learning):
        text = "the data tell prompts from answers, and no label is masked: the prompt is trained on too"
        yield BatchFault(name="prompt-trained", text=text)


def _markers(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    """Markers of a chat template that the tokenizer does not know as one token."""
    foreign = [
        marker
        for marker, count in words.pieces.items()
        if count > 1 and not (marker in words.template and (marker in WRITTEN_OUT or words.template_fits))
    ]
    if foreign:
        listed = ", ".join(f"`{marker}` ({words.pieces[marker]} tokens)" for marker in foreign[:3])
        yield BatchFault(
            name="foreign-template",
            text=f"{listed} in the text: this tokenizer has no such token; the chat template is of another model",
        )


def _ids(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    highest = max((max(view.row.ids) for view in views), default=0)
    if setting.num_embeddings is not None and highest >= setting.num_embeddings:
        yield BatchFault(
            name="id-without-embedding",
            text=f"token {highest} is in the batch, the model has {setting.num_embeddings} embeddings: the tokenizer is of "
            "another model, or the embeddings were not resized",
        )
    total = sum(view.length for view in views)
    unknown = sum(view.content.count(words.unknown) for view in views) if words.unknown is not None else 0
    if total and unknown / total > 0.2 and words.unknown not in words.ends:
        text = f"{unknown / total:.0%} of the tokens are `{words.names.get(words.unknown or 0, 'unknown')}`"
        yield BatchFault(name="unknown-tokens", text=f"{text}: the tokenizer does not know this text")


def _copies(views: Sequence[RowView], words: TokenizerFacts, setting: RowSetting) -> Iterator[BatchFault]:
    copies = len(views) - len({(view.content, view.row.labels) for view in views})
    if len(views) >= 4 and 2 * copies >= len(views) and min(view.length for view in views) >= 4:
        yield BatchFault(name="rows-repeated", text=f"{copies} of {len(views)} rows are copies of another row of the batch")


FINDERS: tuple[Callable[[Sequence[RowView], TokenizerFacts, RowSetting], Iterator[BatchFault]], ...] = (
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
    trained, labelled = set(view.trained), view.row.labels is not None
    runs: list[tuple[str, list[int]]] = []
    for index, token in enumerate(view.row.ids):
        if not view.begin <= index < view.end:
            kind = "padding"
        else:
            kind = ("trained" if index in trained else "masked") if labelled else "text"
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
