"""Two networks, two optimizers in turn, no scheduler: the loop of the DCGAN example with a resume."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(999)
generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
for_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
chronicle.attach("strangers", [generator, critic], [for_generator, for_critic])  # the line
loss = nn.BCELoss()
real = torch.rand(96, 16) * 2 - 1
loader = torch.utils.data.DataLoader(real, batch_size=8, shuffle=True)
first = 0
if os.path.exists("gan.pt"):
    saved = torch.load("gan.pt", weights_only=False)
    generator.load_state_dict(saved["generator"])
    critic.load_state_dict(saved["critic"])
    for_generator.load_state_dict(saved["for_generator"])
    for_critic.load_state_dict(saved["for_critic"])
    first = saved["epoch"] + 1
for epoch in range(first, 6):
    for number, batch in enumerate(loader):
        critic.zero_grad()
        wrong = generator(torch.randn(len(batch), 8))
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        (loss(critic(batch), ones) + loss(critic(wrong.detach()), zeros)).backward()
        for_critic.step()
        if number % 2:  # the generator every second time
            generator.zero_grad()
            loss(critic(wrong), ones).backward()
            for_generator.step()
    torch.save(
        {
            "epoch": epoch,
            "generator": generator.state_dict(),
            "critic": critic.state_dict(),
            "for_generator": for_generator.state_dict(),
            "for_critic": for_critic.state_dict(),
        },
        "gan.pt",
    )
