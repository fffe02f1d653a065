"""Settings that several optimizers read, in the order of config.yaml. Others are declared beside their optimizer."""

from mezo_cli.config.schema import Setting
from mezo_cli.perturb.noise import NOISES

LR = Setting("lr", float, 1e-6, "learning rate", low=0.0, high=3e38)  # float32, as the trajectory stores it
EPS = Setting("eps", float, 1e-3, "scale of the perturbation", above=0.0)
WEIGHT_DECAY = Setting("weight_decay", float, 0.0, "weight decay, of every tensor", low=0.0)
SAMPLES = Setting("samples", int, 1, "n of n-SPSA: directions per step", low=1, high=10_000)
SAMPLE_SCHEDULE = Setting(
    "sample_schedule", str, "constant", "linear: from 1 to `samples` over the run", choices=("constant", "linear")
)
NOISE = Setting(
    "noise", str, "gaussian", "distribution of z; torch: for comparison with the reference only", choices=NOISES.names
)
SCHEDULE = Setting("schedule", str, "constant", "learning rate schedule", choices=("constant", "linear"))
MOMENTUM = Setting("momentum", float, 0.9, "decay of the momentum buffer", low=0.0, high=0.9999)
BETA1 = Setting("beta1", float, 0.9, "decay of Adam's first moment", low=0.0, high=0.9999)
BETA2 = Setting("beta2", float, 0.999, "decay of Adam's second moment", low=0.0, high=0.999999)
ADAM_EPS = Setting("adam_eps", float, 1e-8, "added to the root of Adam's second moment", above=0.0)
WINDOW = Setting(
    "window", int | None, None, "steps of the moment that are redrawn; null: all steps, kept in a buffer", low=1
)
MAX_GRAD_NORM = Setting("max_grad_norm", float | None, 1.0, "clip the gradient's norm to this; null: never", above=0.0)
DROPOUT = Setting("dropout", float | None, None, "dropout rate in training; null: the model's own", low=0.0, high=0.9)

SHARED = (
    LR,
    EPS,
    WEIGHT_DECAY,
    SAMPLES,
    SAMPLE_SCHEDULE,
    NOISE,
    SCHEDULE,
    MOMENTUM,
    BETA1,
    BETA2,
    ADAM_EPS,
    WINDOW,
    MAX_GRAD_NORM,
    DROPOUT,
)
