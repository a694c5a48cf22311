"""One torch thread for every test here: two on a shared machine are many times slower than one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
