"""CTC with a small Wav2Vec2 and the HF Trainer: SpecAugment in the model, a frozen feature encoder, a padding collator, accumulation."""

import os

import torch
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(15)
config = Wav2Vec2Config(
    vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16), conv_stride=(5, 4),
    conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.1,
    mask_time_length=2, ctc_loss_reduction="mean", ctc_zero_infinity=True, layerdrop=0.0, feat_extract_norm="layer",
)
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
generator = torch.Generator().manual_seed(0)
rows = [{"input_values": torch.randn(400 + 20 * (i % 5), generator=generator), "labels": torch.randint(1, 12, (4 + i % 3,), generator=generator)} for i in range(64)]


def collate(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_values": pad([row["input_values"] for row in batch], batch_first=True),
        "labels": pad([row["labels"] for row in batch], batch_first=True, padding_value=-100),
    }


arguments = TrainingArguments(
    "asr", num_train_epochs=5, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type="cosine",
    warmup_ratio=0.1, save_strategy="epoch", save_total_limit=2, logging_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
)
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
trainer.train(resume_from_checkpoint=get_last_checkpoint("asr") if os.path.isdir("asr") else None)
