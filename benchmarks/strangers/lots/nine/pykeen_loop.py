"""A knowledge graph in PyKEEN: its own training loop writes and reads the checkpoint."""

import numpy as np
import torch
from pykeen.models import RotatE
from pykeen.training import SLCWATrainingLoop
from pykeen.triples import TriplesFactory

import chronicle

rng = np.random.default_rng(0)
rows = [(f"e{a}", f"r{b}", f"e{c}") for a, b, c in zip(rng.integers(0, 20, 120), rng.integers(0, 3, 120), rng.integers(0, 20, 120))]
triples = TriplesFactory.from_labeled_triples(np.array(sorted(set(rows)), dtype=str))
model = RotatE(triples_factory=triples, embedding_dim=8, random_seed=7)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
chronicle.attach("strangers", model, optimizer)  # the line
loop = SLCWATrainingLoop(model=model, triples_factory=triples, optimizer=optimizer)
loop.train(
    triples_factory=triples,
    num_epochs=10,
    batch_size=32,
    use_tqdm=False,
    checkpoint_directory=".",
    checkpoint_name="kge.pt",
    checkpoint_frequency=0,
)
