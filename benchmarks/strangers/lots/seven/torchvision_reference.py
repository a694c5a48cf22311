"""Classification as in torchvision's references: no decay for norms, linear warm-up then cosine by epochs, EMA, epoch files."""

import os

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import chronicle


class Pictures(Dataset):
    def __init__(self):
        self.x = torch.randint(0, 255, (40, 3, 36, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.transform = v2.Compose(
            [v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.RandomErasing(p=0.2)]
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.transform(self.x[i]), i % 5


class Average(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, new, num: decay * avg + (1 - decay) * new, use_buffers=True)


def split_params(model):
    norms, others = [], []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        (norms if isinstance(module, nn.BatchNorm2d) else others).extend(own)
    return [{"params": others, "weight_decay": 2e-5}, {"params": norms, "weight_decay": 0.0}]


model = torchvision.models.resnet18(num_classes=5)
model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 5)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(split_params(model), lr=0.05, momentum=0.9, nesterov=True)
main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=2)
lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, main], milestones=[2])
model_ema = Average(model, 0.98)
chronicle.attach("strangers", model, optimizer, lr_scheduler)  # the line
start_epoch = 0
if os.path.exists("checkpoint.pth"):
    checkpoint = torch.load("checkpoint.pth", map_location="cpu", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    model_ema.load_state_dict(checkpoint["model_ema"])
    start_epoch = checkpoint["epoch"] + 1
loader = DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=0)
for epoch in range(start_epoch, 7):
    model.train()
    for i, (image, target) in enumerate(loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            model_ema.update_parameters(model)
            if epoch < 2:
                model_ema.n_averaged.fill_(0)
    lr_scheduler.step()
    model.eval(), model_ema.eval()
    with torch.inference_mode():
        for image, target in loader:
            criterion(model(image), target), model_ema(image)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict()}
    state |= {"epoch": epoch, "model_ema": model_ema.state_dict()}
    torch.save(state, f"model_{epoch}.pth")
    torch.save(state, "checkpoint.pth")
