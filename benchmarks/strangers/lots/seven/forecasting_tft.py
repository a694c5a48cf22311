"""pytorch-forecasting: a temporal fusion transformer with Ranger, reduce on plateau, a validation loader and early stopping."""

import os

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

if __name__ == "__main__":
    pl.seed_everything(42, verbose=False)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"time": np.tile(np.arange(30), 4), "series": np.repeat(list("abcd"), 30)})
    frame["value"] = np.sin(frame["time"] / 3) + 0.1 * rng.normal(size=len(frame))
    training = TimeSeriesDataSet(
        frame[frame.time < 26],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
        static_categoricals=["series"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
    train_dataloader = training.to_dataloader(train=True, batch_size=8, num_workers=0)
    val_dataloader = validation.to_dataloader(train=False, batch_size=8, num_workers=0)
    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=8,
        attention_head_size=1,
        hidden_continuous_size=4,
        dropout=0.1,
        loss=QuantileLoss(),
        optimizer="adam",
        reduce_on_plateau_patience=1,
        log_interval=-1,
    )
    stop = EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10)
    keep = ModelCheckpoint("tft", save_last=True, every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=5, accelerator="cpu", gradient_clip_val=0.1, limit_train_batches=6, callbacks=[stop, keep], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    last = "tft/last.ckpt" if os.path.exists("tft/last.ckpt") else None
    trainer.fit(model, train_dataloader, val_dataloader, ckpt_path=last, weights_only=False)
