"""DCGAN with an averaged generator, two Adams, samples drawn at every save, files named by epoch."""

import copy
import glob

import torch
from torch import nn

import chronicle

NZ, EPOCHS = 8, 10
torch.manual_seed(999)


def weights_init(m):
    if isinstance(m, nn.ConvTranspose2d | nn.Conv2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(NZ, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
).apply(weights_init)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
    nn.Conv2d(16, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(64, 1),
).apply(weights_init)  # fmt: skip
ema = copy.deepcopy(netG).eval().requires_grad_(False)
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
chronicle.attach("strangers", [netG, netD], [optG, optD], averages={"ema": ema})  # the line
pictures = torch.tanh(torch.randn(48, 1, 8, 8))
loader = torch.utils.data.DataLoader(pictures, batch_size=12, shuffle=True, num_workers=0)
fixed_noise = torch.randn(4, NZ, 1, 1)
start = 0
found = sorted(glob.glob("net_epoch_*.pth"))
if found:
    ck = torch.load(found[-1], weights_only=True)
    for part, name in ((netG, "G"), (netD, "D"), (ema, "ema"), (optG, "optG"), (optD, "optD")):
        part.load_state_dict(ck[name])
    start = ck["epoch"] + 1
bce = nn.BCEWithLogitsLoss()
for epoch in range(start, EPOCHS):
    for real in loader:
        netD.zero_grad()
        noise = torch.randn(len(real), NZ, 1, 1)
        fake = netG(noise)
        lossD = bce(netD(real), torch.full((len(real), 1), 0.9)) + bce(netD(fake.detach()), torch.zeros(len(real), 1))
        lossD.backward()
        optD.step()
        netG.zero_grad()
        lossG = bce(netD(fake), torch.ones(len(real), 1))
        lossG.backward()
        optG.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), netG.parameters(), strict=True):
                a.lerp_(b, 0.05)
            for a, b in zip(ema.buffers(), netG.buffers(), strict=True):
                a.copy_(b)
    with torch.no_grad():
        torch.save(ema(fixed_noise), f"samples_{epoch:03d}.pt")
    parts = {"G": netG, "D": netD, "ema": ema, "optG": optG, "optD": optD}
    saved = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, **saved}, f"net_epoch_{epoch:03d}.pth")
