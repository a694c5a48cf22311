"""`python -m benchmarks.envelope [bugs|healthy|resumed|cost] [--launches N]`: prints the tables of `docs/guard.md`."""

import argparse
import sys
from collections.abc import Iterable

import torch

from benchmarks.envelope.bugs import BUGS, FURTHER, Bug, play
from benchmarks.envelope.cost import measure_save, measure_steps
from benchmarks.envelope.flights import Flight, quiet
from benchmarks.envelope.healthy import HEALTHY, play_healthy
from benchmarks.envelope.resumed import RESUMED, play_resumed


def main() -> int:
    """Run what was asked for, everything by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.envelope")
    parser.add_argument("part", nargs="?", choices=("bugs", "healthy", "resumed", "cost"))
    parser.add_argument("--launches", type=int, default=216, help="healthy launches, at least")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.part in (None, "bugs"):
        show_bugs()
    if asked.part in (None, "healthy"):
        show_healthy(asked.launches)
    if asked.part in (None, "resumed"):
        show_resumed(max(1, asked.launches // (2 * len(RESUMED))))
    if asked.part in (None, "cost"):
        show_cost()
    return 0


def show_bugs() -> None:
    """Each bug: what was told, and at which step."""
    for title, bugs in (("TrainCheck's public bugs", BUGS), ("further bugs", FURTHER)):
        named = 0
        print(f"\n{title}")
        for bug in bugs.values():
            with quiet():
                flight = play(bug)
            words, ok = _verdict(bug, flight)
            named += ok
            print(f"  {bug.name:28} begins {bug.begins:3}  {words}", flush=True)
        print(f"  named: {named} of {len(bugs)}")


def _verdict(bug: Bug, flight: Flight | None) -> tuple[str, bool]:
    if flight is None:
        return f"not seen: {bug.what}", False
    told = [breach for kind, breach in flight.told.items() if kind in bug.kinds]
    other = [kind for kind in flight.told if kind not in bug.kinds]
    if not told:
        return f"not seen: {bug.what}" + (f" (told: {', '.join(other)})" if other else ""), False
    first = told[0]
    when = "before the first step" if first.seen is None else f"told at {first.seen}"
    return f"{first.kind.value} ({first.tier}), {when}" + (f"; also {', '.join(other)}" if other else ""), True


def show_healthy(launches: int) -> None:
    """Healthy launches: every one that was told something, notices included."""
    print("\nhealthy launches")
    wrong, played = 0, 0
    seed = 0
    while played < launches:
        for name in HEALTHY:
            with quiet():
                flight = play_healthy(name, seed)
            played += 1
            if flight.told or flight.error:
                wrong += 1
                print(f"  FALSE ALARM in {name} (seed {seed}): {', '.join(_said(flight))}", flush=True)
        seed += 1
    print(f"  false alarms: {wrong} in {played} launches of {len(HEALTHY)} kinds")


def _said(flight: Flight) -> Iterable[str]:
    yield from (f"{kind} {breach.since}: {breach.words}" for kind, breach in flight.told.items())
    if flight.error:
        yield flight.error


def show_resumed(seeds: int) -> None:
    """The same, killed and resumed: every resume that was refused or told something."""
    print("\nhealthy resumes")
    wrong = 0
    for name in RESUMED:
        for seed in range(seeds):
            with quiet():
                flight, refusal = play_resumed(name, seed)
            if flight.told or flight.error or refusal:
                wrong += 1
                told = "; ".join(f"{kind}: {breach.words}" for kind, breach in flight.told.items())
                print(f"  {name} (seed {seed}): {refusal or told or flight.error}", flush=True)
    print(f"  {len(RESUMED) * seeds} resumes of {len(RESUMED)} kinds: {wrong} told or refused")


def show_cost() -> None:
    """CPU time of a step and of a save."""
    print("\ncost, CPU time of one thread")
    for width, layers, rows in ((32, 1, 1), (64, 2, 4), (128, 4, 8), (256, 6, 8)):
        with quiet():
            plain, ratio = measure_steps(width, layers, rows, steps=max(4, 20 if width < 256 else 4))
        print(f"  step of {plain:7.2f} ms: × {ratio:.4f} with the envelope", flush=True)
    for width, layers in ((128, 4), (512, 8)):
        with quiet():
            found = measure_save(width, layers)
        share = found["envelope"] / found["save"]
        size, save = found["parameters"], found["save"]
        print(
            f"  save of {size:.1f}M parameters: {save:.1f} ms, description {found['description']:.1f} ms"
            f" of which the envelope {found['envelope']:.2f} ms ({share:.2%} of the save)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
