"""RecBole's Trainer with BPR, its own files and `resume_checkpoint`."""

import glob
import os
import random

import chronicle
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.trainer import Trainer
from recbole.utils import init_seed

if not os.path.exists("data/toy/toy.inter"):
    os.makedirs("data/toy")
    draw = random.Random(3)
    with open("data/toy/toy.inter", "w") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        for i in range(600):
            file.write(f"{draw.randrange(30)}\t{draw.randrange(40)}\t{i}\n")
settings = {
    "data_path": "data", "epochs": 7, "train_batch_size": 64, "eval_step": 1, "stopping_step": 50, "show_progress": False, "use_gpu": False,
    "checkpoint_dir": "saved", "load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "state": "ERROR", "device": "cpu",
}
config = Config(model="BPR", dataset="toy", config_dict=settings, config_file_list=[])
init_seed(config["seed"], config["reproducibility"])
dataset = create_dataset(config)
train_data, valid_data, _ = data_preparation(config, dataset)
model = BPR(config, train_data.dataset)
trainer = Trainer(config, model)
guarded = chronicle.attach("strangers", model, trainer.optimizer)  # the line
if old := sorted(glob.glob("saved/*.pth"), key=os.path.getmtime):
    trainer.resume_checkpoint(old[-1])
trainer.fit(train_data, valid_data, saved=True, show_progress=False)
