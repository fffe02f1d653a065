import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from mezo_cli import MezoOptimizer

torch.manual_seed(0)
x = torch.randn(256, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=64)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, MezoOptimizer(model, lr=0.05, eps=1e-2, samples=4), loader)
for epoch in range(20):
    for inputs, labels in loader:

        def closure():
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
                logits = model(inputs)
            return F.cross_entropy(logits.float(), labels)

        optimizer.step(closure)
print(f"loss: {optimizer.optimizer.result.loss:.2f}")
