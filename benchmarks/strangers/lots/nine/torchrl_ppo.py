"""PPO with TorchRL's loss module and tensordicts, on a small environment made here."""

import os

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import chronicle

torch.manual_seed(5)
policy = TensorDictModule(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), in_keys=["observation"], out_keys=["logits"])
actor = ProbabilisticActor(policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True)
value = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
loss_module = ClipPPOLoss(actor, value, clip_epsilon=0.2, entropy_coeff=0.01)
advantage = GAE(gamma=0.95, lmbda=0.9, value_network=value)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
chronicle.attach("strangers", loss_module, optimizer, scheduler)  # the line


def collect(steps=16):
    rows, state = [], torch.randn(4)
    for _ in range(steps):
        with torch.no_grad():
            row = actor(TensorDict({"observation": state}, []))
        following = 0.9 * state + 0.1 * torch.randn(4) + 0.1 * (row["action"] * 2 - 1)
        ended = torch.zeros(1, dtype=torch.bool)
        after = TensorDict({"observation": following, "reward": -following.abs().sum()[None], "done": ended, "terminated": ended}, [])
        rows.append(row.set("next", after))
        state = following
    return torch.stack(rows)


first = 0
if os.path.exists("ppo.pt"):
    state = torch.load("ppo.pt")
    loss_module.load_state_dict(state["loss"]), optimizer.load_state_dict(state["optim"]), scheduler.load_state_dict(state["sched"])
    first = state["iteration"]
for iteration in range(first, 12):
    data = collect()
    for _ in range(2):
        with torch.no_grad():
            advantage(data)
        for chosen in torch.randperm(16).split(8):
            losses = loss_module(data[chosen])
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    torch.save({"loss": loss_module.state_dict(), "optim": optimizer.state_dict(), "sched": scheduler.state_dict(), "iteration": iteration + 1}, "ppo.pt")
