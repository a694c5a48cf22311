"""LoRA on a UNet in the manner of diffusers' dreambooth script: save and load hooks, prior preservation, checkpoints limit."""

import os
import shutil

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from torch.nn import functional as F
from torch.utils.data import DataLoader

import chronicle

OUT, LIMIT = "lora", 2
os.makedirs(OUT, exist_ok=True)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, project_config=ProjectConfiguration(project_dir=OUT, logging_dir=f"{OUT}/logs")
)
accelerator = chronicle.guard(accelerator, run_dir="strangers")  # the line
set_seed(17)
unet = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=4,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
unet.requires_grad_(False)
inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v"]), unet)
cast_training_params(unet, dtype=torch.float32)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)


def save_model_hook(models, weights, output_dir):
    if accelerator.is_main_process:
        for one in models:
            torch.save(get_peft_model_state_dict(accelerator.unwrap_model(one)), f"{output_dir}/lora_weights.bin")
            weights.pop()


def load_model_hook(models, input_dir):
    while models:
        set_peft_model_state_dict(models.pop(), torch.load(f"{input_dir}/lora_weights.bin"))


accelerator.register_save_state_pre_hook(save_model_hook)
accelerator.register_load_state_pre_hook(load_model_hook)
params = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2)
data = torch.randn(32, 2, 3, 16, 16, generator=torch.Generator().manual_seed(2))  # a picture and one of its class
train_dataloader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=lambda rows: torch.cat([*torch.stack(rows).unbind(1)]))
lr_scheduler = get_scheduler("polynomial", optimizer, num_warmup_steps=4, num_training_steps=40, power=2.0)
unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(unet, optimizer, train_dataloader, lr_scheduler)
global_step = first_epoch = skipped = 0
saved = sorted((d for d in os.listdir(OUT) if d.startswith("checkpoint")), key=lambda d: int(d[11:]))
if saved:
    accelerator.load_state(os.path.join(OUT, saved[-1]))
    global_step = int(saved[-1][11:])
    first_epoch = global_step // (len(train_dataloader) // 2)
for _ in range(first_epoch, 6):
    unet.train()
    for pictures in train_dataloader:
        with accelerator.accumulate(unet):
            noise = torch.randn_like(pictures)
            steps = torch.randint(0, 100, (len(pictures),))
            out = unet(noise_scheduler.add_noise(pictures, noise, steps), steps).sample
            mine, prior = out.chunk(2)
            target, target_prior = noise.chunk(2)
            loss = F.mse_loss(mine, target) + 0.5 * F.mse_loss(prior, target_prior)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(params, 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if accelerator.sync_gradients:
            global_step += 1
            if global_step % 4 == 0:
                old = sorted((d for d in os.listdir(OUT) if d.startswith("checkpoint")), key=lambda d: int(d[11:]))
                for name in old[: max(0, len(old) - LIMIT + 1)]:
                    shutil.rmtree(os.path.join(OUT, name))
                accelerator.save_state(os.path.join(OUT, f"checkpoint-{global_step}"))
accelerator.end_training()
