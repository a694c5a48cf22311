"""GluonTS: DeepAR on its own Lightning trainer, continued by `ckpt_path`, a stream of windows; no line."""

import glob
import os

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator

pl.seed_everything(79, verbose=False)
days = pd.date_range("2024-01-01", periods=120, freq="D")
series = {f"s{i}": pd.DataFrame({"target": np.sin(np.arange(120) / (3 + i)) + 2}, index=days) for i in range(6)}
saver = pl.callbacks.ModelCheckpoint("deepar", every_n_train_steps=4, save_top_k=-1, filename="{step}")
estimator = DeepAREstimator(
    freq="D", prediction_length=5, context_length=10, hidden_size=12, num_layers=1, batch_size=8, num_batches_per_epoch=10, lr=2e-3,
    trainer_kwargs={
        "max_epochs": 5, "accelerator": "cpu", "callbacks": [saver], "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    },
)
estimator.train(PandasDataset(series), ckpt_path=max(glob.glob("deepar/*.ckpt"), key=os.path.getmtime, default=None))
