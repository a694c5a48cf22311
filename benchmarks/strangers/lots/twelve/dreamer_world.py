"""A world model and a policy that dreams in it: three optimizers, sequences out of a memory, normalised returns."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(91)


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Linear(5, 16), nn.GRUCell(16 + 2, 24)
        self.prior, self.posterior = nn.Linear(24, 16), nn.Linear(24 + 16, 16)
        self.decode, self.reward = nn.Linear(32, 5), nn.Linear(32, 1)

    @staticmethod
    def draw(numbers):
        mean, deviation = numbers.chunk(2, -1)
        return torch.distributions.Normal(mean, nn.functional.softplus(deviation) + 0.1)


world, actor, critic = World(), nn.Sequential(nn.Linear(32, 24), nn.ELU(), nn.Linear(24, 2)), nn.Sequential(nn.Linear(32, 24), nn.ELU(), nn.Linear(24, 1))
optimizers = {
    "world": torch.optim.Adam(world.parameters(), lr=1e-3, eps=1e-5),
    "actor": torch.optim.Adam(actor.parameters(), lr=4e-4, eps=1e-5),
    "critic": torch.optim.Adam(critic.parameters(), lr=8e-4, eps=1e-5),
}
models = nn.ModuleDict({"world": world, "actor": actor, "critic": critic})
chronicle.attach("strangers", models, list(optimizers.values()))  # the line
memory, scale, step = [], torch.ones(()), 0
if os.path.exists("dreamer/latest.pt"):
    state = torch.load("dreamer/latest.pt", weights_only=False)
    models.load_state_dict(state["models"])
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    memory, scale, step = state["memory"], state["scale"], state["step"]
    torch.set_rng_state(state["rng"])


def train(name, loss):
    optimizers[name].zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(models[name].parameters(), 100.0)
    optimizers[name].step()


def act():
    at, rows = torch.randn(5), []
    for _ in range(10):
        action = torch.randn(2).tanh()
        rows.append((at, action, -at.square().mean()))
        at = 0.8 * at + 0.2 * torch.randn(5)
        at[:2] += 0.3 * action
    memory.append([torch.stack(column) for column in zip(*rows, strict=True)])


while step < 30:
    act()
    seen, actions, rewards = (torch.stack([memory[int(i)][k] for i in torch.randint(len(memory), (6,))]) for k in range(3))
    h, s, loss, starts = torch.zeros(6, 24), torch.zeros(6, 8), 0.0, []
    for t in range(10):
        h = world.cell(torch.cat([world.embed(seen[:, t]), actions[:, t]], -1), h)
        prior, posterior = world.draw(world.prior(h)), world.draw(world.posterior(torch.cat([h, world.embed(seen[:, t])], -1)))
        s = posterior.rsample()
        both = torch.cat([h, s], -1)
        loss = loss + (world.decode(both) - seen[:, t]).square().mean() + (world.reward(both)[:, 0] - rewards[:, t]).square().mean()
        loss = loss + torch.distributions.kl_divergence(posterior, prior).mean()
        starts.append(both.detach())
    train("world", loss)
    both, dreamt, visited = torch.cat(starts), [], []
    for _ in range(5):
        action = torch.distributions.Normal(actor(both), 0.3).rsample().tanh()
        h = world.cell(torch.cat([both[:, 24:].repeat(1, 2), action], -1), both[:, :24])
        both = torch.cat([h, world.draw(world.prior(h)).rsample()], -1)
        dreamt.append(world.reward(both)[:, 0])
        visited.append(both)
    value, returns = critic(visited[-1])[:, 0], []
    for reward in reversed(dreamt):
        value = reward + 0.95 * value
        returns.insert(0, value)
    scale = 0.99 * scale + 0.01 * (torch.stack(returns).quantile(0.95) - torch.stack(returns).quantile(0.05)).detach()
    train("actor", -(torch.stack(returns) / scale.clamp(min=1)).mean())
    train("critic", (critic(torch.stack(visited).detach())[..., 0] - torch.stack(returns).detach()).square().mean())
    step += 1
    if step % 4 == 0:
        os.makedirs("dreamer", exist_ok=True)
        states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        rest = {"memory": memory, "scale": scale, "step": step, "rng": torch.get_rng_state()}
        torch.save({"models": models.state_dict(), "optimizers": states, **rest}, "dreamer/tmp.pt")
        os.replace("dreamer/tmp.pt", "dreamer/latest.pt")
