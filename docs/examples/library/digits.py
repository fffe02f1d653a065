from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from mezo_cli import MezoOptimizer, replay

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def error_rate(model, rows):
    return (model(x[rows]).argmax(1) != y[rows]).float().mean().item()


model = make_model()
Path("digits.bin").unlink(missing_ok=True)  # of an earlier run of this script: it would be continued
optimizer = MezoOptimizer(model, lr=0.3, eps=0.1, samples=8, trajectory="digits.bin")
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=600)
print(f"before: {error_rate(model, test):.0%} of the test digits are wrong")
for step in range(600):
    optimizer.step(lambda: error_rate(model, train))
    scheduler.step()
optimizer.close()
print(f"after: {error_rate(model, test):.0%}")

again = make_model()
replay(again, "digits.bin")
assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters()))
