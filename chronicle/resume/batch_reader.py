"""Reads the first batch of a launch: its tensors, the script's tokenizer and the scheduler, as the values of `first_batch.py`.

An adapter hands over what enters the model (`see`) until the first optimizer step; right before it the batch is told: one
journal entry, and one line and one incident for each finding. Only the main process reads. The tokenizer is the Trainer's
`processing_class`, or the one given to `guard` and `attach`. `batch_text = false` keeps text out of the journal.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from chronicle.journal.events import FirstBatchSeen
from chronicle.resume.batches import is_call
from chronicle.resume.configuration import unwrapped
from chronicle.resume.contract import wants_batch_text
from chronicle.resume.events import BatchEntered
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.first_batch import (
    IGNORED,
    BatchFault,
    RowSetting,
    TokenRow,
    find_in_batch,
    format_batch,
    tell_batch,
)
from chronicle.resume.horizon import LrCurve, bound_numbers, find_in_plan
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.learning_rate import forecast_lrs
from chronicle.resume.training import Training

NUM_ROWS = 32  # of one launch; a claim about a batch needs no more
NUM_STEPPED = 2000  # steps of a scheduler that has no function of the step
NUM_EVALUATED = 200_000  # steps of one that has
CAUSAL = re.compile(r"ForCausalLM|LMHeadModel|ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class TrainerSays:
    """What an adapter knows beside the batch. None: unknown."""

    tokenizer: Any = None
    apart: bool = False  # an encoder and a decoder: labels are a text of their own
    precision: str | None = None  # bf16, fp16 or fp32
    planned: int | None = None  # optimizer steps
    reads_trainer: bool = False  # batches come from the trainer's own step: the model's inputs need not be read


class FirstBatch(Observer):
    """The first batch of one launch."""

    about = "first batch in words"

    def __init__(self, training: Training) -> None:
        self._training, self._journal = training, training.journal
        self.with_text = wants_batch_text(training.environ)
        self.says = TrainerSays(tokenizer=training.options.tokenizer)
        self._rows: list[TokenRow] = []
        self._told = False
        self.told: dict[str, Any] = {}  # the batch in words, once it was told

    def knows(self, **known: Any) -> None:
        """What an adapter knows beside the batch: fields of `TrainerSays`."""
        self.says = replace(self.says, **known)

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """One of the first batches of a launch, unless the trainer's own step shows it."""
        if not event.is_looked_at or self._training.off or self.says.reads_trainer:
            return RESTS
        self.knows(apart=any(has_decoder(model) for model in self._training.observe().models))
        args, inputs = event.batch if is_call(event.batch) else ((event.batch,), {})
        self.see(args, inputs)
        return None

    def see(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        """One micro-batch, before it enters the model."""
        if not self._told and self._journal.rank == 0 and len(self._rows) < NUM_ROWS:
            self._rows += read_rows(args, inputs, apart=self.says.apart)[: NUM_ROWS - len(self._rows)]

    @property
    def masked_fraction(self) -> float | None:
        """The share of the labels that the loss leaves out; None where no labels were seen."""
        return self.told.get("masked_fraction")

    def tell(self, live: LiveState, step: int | None) -> None:
        """Right before the first optimizer step: say what is wrong, and write the batch to the journal."""
        if self._told:
            return
        self._told = True
        if self._journal.rank != 0:
            return
        found = self._read_plan(live, step)
        told: dict[str, Any] = {}
        if self._rows:
            setting = self._setting(live)
            found = [*find_in_batch(self._rows, setting), *found]
            decode = self.decoder() or (_as_numbers if self.with_text else None)
            told = self.told = tell_batch(self._rows, setting, decode)
        self._write(told, found, step)
        self._rows = []

    def decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Makes text of ids with the script's tokenizer; None without one, or where text is kept out of the journal."""
        tokenizer = _plain_tokenizer(self.says.tokenizer)
        return _decoder(tokenizer) if tokenizer is not None and self.with_text else None

    def _setting(self, live: LiveState) -> RowSetting:
        tokenizer = _plain_tokenizer(self.says.tokenizer)
        return RowSetting(
            shifts_labels=_shifts(unwrapped(live.models[0]) if live.models else None),
            pad=getattr(tokenizer, "pad_token_id", None),
            eos=getattr(tokenizer, "eos_token_id", None),
            eos_name=str(getattr(tokenizer, "eos_token", None) or "EOS"),
        )

    def _read_plan(self, live: LiveState, step: int | None) -> list[BatchFault]:
        """On a resume the LRs are compared with the checkpoint's, and the beginning of the plan is over."""
        return find_in_plan(read_plan(live, self.says)) if not step else []

    def _write(self, told: Mapping[str, Any], found: Sequence[BatchFault], step: int | None) -> None:
        if not told and not found:
            return
        lines = format_batch(told) if told else ["no token rows"]
        faults = [f"{one.name}: {one.text}" for one in found]
        event = FirstBatchSeen(
            text="\n".join([*faults, *(lines if told else ())]),
            batch=dict(told),
            findings=tuple({"name": one.name, "text": one.text} for one in found),
        )
        names = "; ".join(one.name for one in found)
        self._journal.write(event, step=step, title=f"first batch: {lines[0]}" + (f"; {names}" if names else ""))
        for one in found:
            self._journal.tell(one.name, one.text, step=step, said=f"first batch: {one.name}: {one.text}")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def read_rows(args: Sequence[Any], inputs: Mapping[str, Any], *, apart: bool = False) -> list[TokenRow]:
    """The token rows of a model's inputs; none when it gets no token ids.

    `apart`: the labels are another text than the inputs, also where both happen to have one length.
    """
    ids = inputs.get("input_ids", next(filter(_is_table, args), None))
    if not _is_table(ids):
        return []
    table = [tuple(row) for row in ids[:NUM_ROWS].tolist()]
    labels = _labels(inputs.get("labels"), ids)
    if labels and (apart or len(labels[0]) != len(table[0])):  # an encoder and a decoder: what is learned is the labels
        return [_label_row(row) for row in labels]
    attended = inputs.get("attention_mask")
    has_mask = _is_table(attended) and attended.shape == ids.shape
    masks = (attended[:NUM_ROWS] != 0).tolist() if attended is not None and has_mask else []
    rows = []
    for index, row in enumerate(table):
        attends = tuple(masks[index]) if masks else None
        rows.append(TokenRow(ids=row, labels=labels[index] if labels else None, attended=attends))
    return rows


def _is_table(thing: Any) -> TypeGuard[Any]:
    """Whether it is a dense tensor of whole numbers with two dimensions."""
    if not hasattr(thing, "untyped_storage") or thing.is_nested or thing.is_quantized or thing.is_meta:
        return False
    if str(thing.layout) != "torch.strided" or thing.ndim != 2 or not thing.numel():
        return False
    return not thing.is_floating_point() and not thing.is_complex()


def _labels(labels: Any, ids: Any) -> list[tuple[int, ...]]:
    if not _is_table(labels) or labels.shape[0] != ids.shape[0]:
        return []
    return [tuple(row) for row in labels[:NUM_ROWS].tolist()]


def _label_row(row: tuple[int, ...]) -> TokenRow:
    """Labels as a row of their own, without the masked padding around them; one that is masked inside is shown as token 0."""
    seen = [index for index, token in enumerate(row) if token != IGNORED]
    labels = row[seen[0] : seen[-1] + 1] if seen else row
    return TokenRow(ids=tuple(max(0, token) for token in labels), labels=labels)


# ---- tokenizer and model ---------------------------------------------------------------------------------------------


def _plain_tokenizer(thing: Any) -> Any:
    """The tokenizer inside a processor; None for what cannot decode."""
    inner = getattr(thing, "tokenizer", thing)
    return inner if hasattr(inner, "decode") and hasattr(inner, "convert_tokens_to_ids") else None


def _as_numbers(ids: Sequence[int]) -> str:
    """Rows without a tokenizer."""
    return " ".join(str(one) for one in ids)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        known = [token for token in ids if token >= 0]
        return str(tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def has_decoder(model: Any) -> bool:
    """Whether a model reads one text with its encoder and learns another with its decoder."""
    return bool(getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False))


def _shifts(model: Any) -> bool:
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return any(CAUSAL.search(base.__name__) for base in type(model).__mro__)


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def read_plan(live: LiveState, says: TrainerSays) -> LrCurve:
    """The LR of every planned step, evaluated or stepped on copies; empty where the scheduler does not tell."""
    numbers: dict[str, float] = {}
    for bound in live.schedulers:
        for one in bound_numbers(bound):
            numbers |= one
    total = numbers.get("num_training_steps")  # as Transformers calls it
    return LrCurve(
        lrs=tuple(_planned_lrs(live, says.planned or 0)),
        planned=says.planned,
        accumulation=int(live.topology.get("accumulation") or 1),
        horizon=None if total is None else int(total),
    )


def _planned_lrs(live: LiveState, planned: int) -> Iterator[float]:
    if not planned or not live.optimizers or len(live.schedulers) > 1:
        return
    for bound in live.schedulers:
        function = next(iter(getattr(bound.scheduler, "lr_lambdas", None) or ()), None)
        base = next(iter(getattr(bound.scheduler, "base_lrs", None) or ()), None)
        if function is not None and base is not None and planned <= NUM_EVALUATED:
            yield from (float(base) * float(function(step * bound.unit)) for step in range(planned))
            return
    if planned <= NUM_STEPPED:
        rows = forecast_lrs(live.optimizers, live.schedulers, planned) or ()
        yield from (row[0] for row in rows if row and row[0] is not None)
