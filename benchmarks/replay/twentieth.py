"""Planted causes on six trainings: organs, masked words, a ranking, rollouts, molecules, the heat of a rod.

The twentieth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people
on call, and four are controls, in which nothing or something harmless happens. The six trainings
(`twentieth_trainings.py`) were seen to resume to the bit, and every fault and change to alter what is trained, in plain
runs without `chronicle run`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import before, variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.planting import fault
from benchmarks.replay.twentieth_trainings import (
    lay_heat,
    lay_masked,
    lay_molecules,
    lay_organs,
    lay_ranking,
    lay_rollouts,
)
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
ORGANS = Training(lay=lay_organs, command=[*PYTHON, "--iterations", "45"], asked=38)
MASKED = Training(lay=lay_masked, command=[*PYTHON, "--config", "pretrain.toml"], asked=47)
RANKING = Training(lay=lay_ranking, command=[*TORCHRUN, "train.py"], asked=37)
ROLLOUTS = Training(lay=lay_rollouts, command=[*TORCHRUN, "train.py"], asked=38)
MOLECULES = Training(lay=lay_molecules, command=PYTHON, asked=37)
HEAT = Training(lay=lay_heat, command=[*PYTHON, "45"], asked=36)


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _data_and_state_of_the_issue()
    yield from _code_of_the_issue()
    yield from _machines_on_call()
    yield from _others_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's gradient beside sparse ones", RANKING, fault("gradient", 34, 61)),
        ("bit of a weight of a convolution", ORGANS, fault("weight", 34, 40)),
        ("bit of a gradient that Lion takes the sign of", MASKED, fault("gradient", 44, 333)),
        ("bit of a recurrent weight of one rank's policy", ROLLOUTS, fault("weight", 34, 1200)),
        ("bit of a sum of squares on one rank", RANKING, fault("squares", 35, 17)),
        ("bit of a message between atoms in Lightning", MOLECULES, fault("message", 34, 105)),
        ("slow poison of a rod's net over 20 steps", HEAT, fault("poison", 21, 90)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _data_and_state_of_the_issue() -> Iterator[Cause]:
    data = (
        ("bit of a customer's context on one rank", RANKING, fault("batch", 35, 12)),
        ("prompts of two steps exchanged", ROLLOUTS, fault("swapped", 34)),
        ("a scan taken twice", ORGANS, fault("twice", 35)),
        ("sensors of two steps exchanged", HEAT, fault("swapped", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="energies computed anew", expected=V.DATA, training=MOLECULES, later=_compute)
    yield Cause(name="masks of an organ drawn by another hand", expected=V.DATA, training=ORGANS, later=_draw)
    state = (
        ("one rank seeded anew before its policy speaks", ROLLOUTS, fault("reseeded", 34)),
        ("generator of negatives seeded anew", RANKING, fault("reseeded", 35)),
        ("LR of the head tripled by a callback", MASKED, fault("head", 44)),
        ("less momentum from a step on", ORGANS, fault("momentum", 33)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)


def _code_of_the_issue() -> Iterator[Cause]:
    middle = edit("train.py", "self.net(2 * points - 1)", "self.net(points)")
    yield Cause(name="a line that no longer centres the points", expected=V.CODE, training=HEAT, later=middle)
    spread = edit("train.py", " / (groups.std(1, keepdim=True) + 1e-4)", "")
    yield Cause(name="a line of the gain within a group", expected=V.CODE, training=ROLLOUTS, later=spread)
    sign = "(mean * beta1 + p.grad * (1 - beta1)).sign()\n"
    careful = f"{sign}                update *= (update * p.grad > 0).to(p.dtype)\n"
    lion = upgrade("vendor/lionopt", "0.4.2", "0.5.0", sign, careful)
    yield Cause(name="another version of the optimizer", expected=V.CODE, training=MASKED, later=lion)
    bumps = upgrade("extern/radialkit", "1.9.1", "2.0.0", "WIDTH = 4.0", "WIDTH = 5.0")
    yield Cause(name="another version of the distances", expected=V.CODE, training=MOLECULES, later=bumps)
    softer = set_variable("RANK_TEMPERATURE", "1.2")
    yield Cause(name="another variable for the temperature", expected=V.CODE, training=RANKING, later=softer)
    more = set_variable("DICE_WEIGHT", "0.8")
    yield Cause(name="another variable for Dice", expected=V.CODE, training=ORGANS, later=more)
    yield Cause(name="sums over neighbours never the same", expected=V.RANDOM, training=MOLECULES,
                fault=fault("order", 0), stays=True)  # fmt: skip


def _machines_on_call() -> Iterator[Cause]:
    hardware = (
        ("one rank that kept its own gradient", RANKING, fault("alone", 35)),
        ("a word's row written over by the next one", MASKED, fault("row", 44, 11)),
        ("a tile of a feature map lost to zeros", ORGANS, fault("tile", 35)),
        ("bit of what L-BFGS remembers", HEAT, fault("curvature", 34, 151)),
        ("likelihoods of one rank from the step before", ROLLOUTS, fault("early", 35)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_on_call() -> Iterator[Cause]:
    yield Cause(name="scans exported again in fewer greys", expected=V.DATA, training=ORGANS, later=_export)
    yield Cause(name="what sells well, counted anew at night", expected=V.DATA, training=RANKING, later=_count)
    yield Cause(name="a config with an override of a sweep", expected=V.CODE, training=ROLLOUTS, later=_override)
    yield Cause(name="a copied file in front of a package", expected=V.CODE, training=MASKED, later=_shadow)
    yield Cause(name="checkpoints with the average put in place", expected=V.STATE, training=MOLECULES, later=_average)
    yield Cause(name="more dropout, set by a callback", expected=V.STATE, training=MASKED, fault=fault("dropout", 43))
    noisy = "    seen[:, 2] += 0.01 * torch.from_numpy(np.random.default_rng().normal(size=SENSORS))\n"
    taken = "    seen = sensors_of(number)\n"
    unseeded = variant(HEAT, "import torch\nfrom torch import nn\n", "import numpy as np\nimport torch\nfrom torch import nn\n",
                       taken, taken + noisy)  # fmt: skip
    yield Cause(name="noise of sensors that nobody seeded", expected=V.RANDOM, training=unseeded)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, rollouts", expected=V.REPRODUCED, training=ROLLOUTS)
    yield Cause(name="the same molecules, packed tighter", expected=V.REPRODUCED, training=MOLECULES, later=_pack)
    yield Cause(name="new scans that no list names", expected=V.REPRODUCED, training=ORGANS, later=_add)
    again = before(RANKING, "        user, item, context =", "again", 'bought = load("bought.npz")')
    yield Cause(
        name="a table that was read again in a step", expected=V.REPRODUCED, training=again, fault=fault("again", 35)
    )


def _compute(directory: Path, environ: dict[str, str]) -> None:
    """Of every third molecule, by a better method."""
    import numpy as np

    path = directory / "molecules/train.npz"
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    arrays["energies"][::3] += np.float32(0.2) * np.sin(np.arange(len(arrays["energies"][::3]))).astype("float32")
    np.savez(path, **arrays)


def _draw(directory: Path, environ: dict[str, str]) -> None:
    """The second organ is a little smaller now: its left edge is gone."""
    import numpy as np
    from PIL import Image

    for path in sorted((directory / "scans/masks").glob("*.png")):
        mask = np.asarray(Image.open(path)).copy()
        mask[(mask == 2) & (np.roll(mask, 1, axis=1) != 2)] = 0
        Image.fromarray(mask).save(path)


def _export(directory: Path, environ: dict[str, str]) -> None:
    """Of 256 greys 32 are left."""
    import numpy as np
    from PIL import Image

    for path in sorted((directory / "scans/images").glob("*.png")):
        image = np.asarray(Image.open(path))
        Image.fromarray(image // 8 * 8 + 4).save(path)


def _count(directory: Path, environ: dict[str, str]) -> None:
    """A job of the night has seen more sales of the last thirty items."""
    import numpy as np

    popular = np.load(directory / "popular.npy")
    popular[60:] += 0.4
    np.save(directory / "popular.npy", popular)


def _override(directory: Path, environ: dict[str, str]) -> None:
    """A sweep tried another weight of the reference and left it there."""
    import json

    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kl": 0.2}) + "\n")


def _shadow(directory: Path, environ: dict[str, str]) -> None:
    """Somebody tries something on a copy of the optimizer, beside the script, where it is found first."""
    text = (directory / "vendor/lionopt/__init__.py").read_text()
    decay = '                p.mul_(1 - group["lr"] * group["weight_decay"])\n'
    assert decay in text and ".sign()\n" in text
    tried = text.replace(decay, "").replace(".sign()\n", ".sign() + group['weight_decay'] * p.sign()\n")
    (directory / "lionopt.py").write_text(tried)


def _average(directory: Path, environ: dict[str, str]) -> None:
    """For a demonstration: in every checkpoint the weights are the averaged ones."""
    import torch

    for path in sorted((directory / "checkpoints").glob("mol-*.ckpt")):
        held = torch.load(path, weights_only=False)
        values = next(state["values"] for name, state in held["callbacks"].items() if "Average" in name)
        held["state_dict"] = dict(zip(held["state_dict"], values, strict=True))
        torch.save(held, path)


def _pack(directory: Path, environ: dict[str, str]) -> None:
    """Other bytes, the same arrays."""
    import numpy as np

    for path in sorted((directory / "molecules").glob("*.npz")):
        with np.load(path) as held:
            arrays = {name: held[name] for name in held.files}
        np.savez_compressed(path, **arrays)


def _add(directory: Path, environ: dict[str, str]) -> None:
    """They came in the meantime and wait for somebody to draw their masks."""
    import shutil

    images = directory / "scans/images"
    for number in range(5):
        shutil.copyfile(images / f"case_{number:03d}.png", images / f"new_{number:03d}.png")
