"""`torch.compile` where it works: tried on one small block first, because no version rule tells it.

Without a C++ compiler on a CPU, or with an unsupported Python, compiling fails late and loudly; here it fails early and the
run goes on without, with one sentence.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bit_transformer.model.transformer import BitTransformer, ModelConfig


def why_not_compile(config: ModelConfig, device: torch.device) -> str | None:
    """Return None where a one-layer model of this shape compiles and runs here, else the reason in one line."""
    if config.reversible:
        return "reversible blocks run their own backward pass"
    small = replace(config, num_layers=1)
    try:
        with torch.random.fork_rng(), torch.enable_grad():  # building draws too: the run's numbers stay its own
            compiled = torch.compile(BitTransformer(small).to(device))
            compiled(torch.zeros(1, config.max_bits, dtype=torch.long, device=device)).logits_BTV.sum().backward()
    except Exception as problem:  # noqa: BLE001 whatever the compiler throws means: not here
        first_line = next(iter(str(problem).strip().splitlines()), "")
        return f"{type(problem).__name__}: {first_line[:200]}"
    return None


def compile_where_possible(model: BitTransformer, device: torch.device) -> str | None:
    """Compile the blocks in place; return the reason where that is not possible."""
    reason = why_not_compile(model.config, device)
    if reason is None:
        for block in model.blocks:
            block.compile()
    return reason
