"""rsl_rl's on-policy runner: its own files, an LR that follows the divergence, observations that are normalised by the way."""

import glob

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

import chronicle


class Points(VecEnv):
    num_envs, num_actions, max_episode_length, device, cfg = 8, 2, 12, "cpu", {}

    def __init__(self):
        self.at, self.episode_length_buf = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)

    def get_observations(self):
        return TensorDict({"policy": self.at.clone()}, batch_size=8)

    def step(self, actions):
        self.at[:, :2] += 0.2 * actions.clamp(-1, 1)
        self.at[:, 2:] = 0.9 * self.at[:, 2:] + 0.1 * torch.randn(8, 2)
        self.episode_length_buf += 1
        done = self.episode_length_buf >= 12
        reward = -self.at.square().sum(-1)
        self.at[done] = torch.randn(int(done.sum()), 4)
        self.episode_length_buf[done] = 0
        return self.get_observations(), reward, done.float(), {"time_outs": done.float()}


torch.manual_seed(29)
settings = {
    "num_steps_per_env": 6, "save_interval": 2, "obs_groups": {"actor": ["policy"], "critic": ["policy"]}, "logger": "tensorboard",
    "actor": {
        "class_name": "rsl_rl.models.MLPModel", "hidden_dims": [16], "obs_normalization": True,
        "distribution_cfg": {"class_name": "rsl_rl.modules.GaussianDistribution", "init_std": 1.0},
    },
    "critic": {"class_name": "rsl_rl.models.MLPModel", "hidden_dims": [16], "obs_normalization": True},
    "algorithm": {"class_name": "rsl_rl.algorithms.PPO", "num_learning_epochs": 2, "num_mini_batches": 2, "learning_rate": 3e-3, "schedule": "adaptive"},
}
runner = OnPolicyRunner(Points(), settings, log_dir="policies", device="cpu")
chronicle.attach("strangers", [runner.alg.actor, runner.alg.critic], runner.alg.optimizer)  # the line
found = sorted(glob.glob("policies/model_*.pt"), key=lambda name: int(name.split("_")[-1][:-3]))
if found:
    runner.load(found[-1])
runner.learn(16 - runner.current_learning_iteration)
