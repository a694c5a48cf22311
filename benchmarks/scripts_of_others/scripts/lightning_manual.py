"""Lightning with manual optimization: two optimizers, toggling, accumulation and clipping by hand, schedulers stepped by hand."""

import glob
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAEGAN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.critic = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        opt_vae, opt_critic = self.optimizers()
        (x,) = batch
        self.toggle_optimizer(opt_vae)
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        out = self.decoder(z)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
        loss = (out - x).square().mean() + 0.1 * kl - 0.05 * self.critic(out).mean()
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(opt_vae, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt_vae.step()
            opt_vae.zero_grad()
        self.untoggle_optimizer(opt_vae)
        self.toggle_optimizer(opt_critic)
        wanted = nn.functional.softplus(-self.critic(x)).mean() + nn.functional.softplus(self.critic(out.detach())).mean()
        opt_critic.zero_grad()
        self.manual_backward(wanted)
        opt_critic.step()
        self.untoggle_optimizer(opt_critic)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self):
        vae = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-3)
        critic = torch.optim.Adam(self.critic.parameters(), lr=4e-4, betas=(0.0, 0.99))
        return [vae, critic], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (vae, critic)]


if __name__ == "__main__":
    pl.seed_everything(7, verbose=False)
    keep = ModelCheckpoint("vaegan", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    trainer = pl.Trainer(max_epochs=8, accelerator="cpu", logger=False, callbacks=[keep], enable_progress_bar=False)
    saved = sorted(glob.glob("vaegan/*.ckpt"), key=os.path.getmtime)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    trainer.fit(VAEGAN(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path=saved[-1] if saved else None)
