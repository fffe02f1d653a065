"""A frozen base in eight or four bits: a layer's matrix is dequantised as the layer runs, a few rows at a time.

int8: w = scale q, q an integer from -127 to 127, one float32 scale per row. The product is exact in float32, so the
dequantised weights have the same bits on every machine. nf4: the four-bit code of bitsandbytes (Dettmers et al. 2023,
arXiv 2305.14314), whose functions are called, with one float32 scale per 64 weights.

Quantised are the `nn.Linear` of the numbered layers. Embeddings, norms, biases and heads stay float32.
"""

import logging
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.process.memory import release_file_pages, trim_malloc

PACKAGE = "bitsandbytes"
BLOCK = 64  # weights per scale of nf4
# It warns, when it is imported, that a product for bfloat16 is not installed, which is not called here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Elements that are dequantised at once: on a CPU they stay in its cache. Rows come in multiples of 64, so that no block
# of nf4 lies in two parts.
ELEMENTS = {"cpu": 1 << 20}
ELEMENTS_ELSEWHERE = 1 << 25


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight, [out, in] of any float dtype, is stored in eight or four bits.

    Attributes:
        how: int8 or nf4.
        bits: int8: the integers [out, in]; nf4: two codes per byte [ceil(out in / 2), 1]. A buffer.
        scale: float32, [out, 1] for int8, [ceil(out in / 64)] for nf4. A buffer.
        rows: multiplies each row's product by a trained factor (peft=scales); None for none.
    """

    bits: Tensor
    scale: Tensor

    def __init__(self, how: str, linear: nn.Linear, bits: Tensor, scale: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would draw a weight
        self.how, self.out_features, self.in_features = how, linear.out_features, linear.in_features
        self.register_buffer("bits", bits, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_parameter("bias", linear.bias)
        self.rows: RowFactors | None = None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A tensor of the weight's shape, dtype and device, which peft asks for, all NaN and without memory."""
        return self.scale.new_full((), torch.nan).expand(self.out_features, self.in_features)

    def dequantized(self) -> Tensor:
        """Return the weight without the factors, float32."""
        return torch.cat([part.clone() for _, part in self._parts(torch.float32)])

    def forward(self, input: Tensor) -> Tensor:
        """Return input weight^T + bias, in the dtype of the input."""
        out = cast(Tensor, _Product.apply(input, self))
        if self.rows is not None:
            out = self.rows(out)
        return out if self.bias is None else out.add_(self.bias)

    def product(self, input: Tensor) -> Tensor:
        """Return input weight^T: [..., in] -> [..., out]."""
        flat = input.reshape(-1, self.in_features)
        out = input.new_empty(*input.shape[:-1], self.out_features)
        for rows, part in self._parts(input.dtype):
            torch.mm(flat, part.t(), out=out.view(-1, self.out_features)[:, rows])
        return out

    def _parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield the dequantised weight by rows; each part is valid until the next one."""
        elements = ELEMENTS.get(self.bits.device.type, ELEMENTS_ELSEWHERE)
        step = min(max(BLOCK, elements // self.in_features // BLOCK * BLOCK), self.out_features)
        size, device = step * self.in_features if self.how == "int8" else 0, self.bits.device
        if device not in _BUFFERS or len(_BUFFERS[device]) < size:
            _BUFFERS[device] = torch.empty(size, device=device)
        for first in range(0, self.out_features, step):
            rows = slice(first, min(first + step, self.out_features))
            if self.how == "int8":
                part = _BUFFERS[device][: (rows.stop - first) * self.in_features].view(-1, self.in_features)
                part.copy_(self.bits[rows]).mul_(self.scale[rows])
            else:
                part = _dequantize_blocks(self.bits, self.scale, rows, self.in_features)
            yield rows, part.to(dtype)


class RowFactors(nn.Module):
    """A trained factor per row, [out]. A module of its own: a forward with both signs makes one product for both."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(factor)

    def forward(self, input: Tensor) -> Tensor:
        """Return input factor: [..., out]."""
        return input * self.factor


class _Product(torch.autograd.Function):
    """input weight^T, for which a graph keeps no dequantised weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        flat = grad.reshape(-1, layer.out_features)
        out = grad.new_zeros(len(flat), layer.in_features)
        for rows, part in layer._parts(grad.dtype):
            out.addmm_(flat[:, rows], part)
        return out.view(*grad.shape[:-1], layer.in_features), None


# Memory of float32, one for all layers, which run one after another. malloc would take new memory for each layer, as
# activations lie between.
_BUFFERS: dict[torch.device, Tensor] = {}


def library_of(how: str) -> str:
    """Return the library that quantises and dequantises, with its version; "" for int8."""
    return "" if how == "int8" else f"{PACKAGE} {metadata.version(PACKAGE)}"


def quantize(how: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits and the scales of a matrix; see `QuantizedLinear`.

    int8: scale = max |w| / 127 of a row, q = w / scale rounded to the nearest, ties to even.
    """
    if how != "int8":
        return _quantize_blocks(weight)
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / 127
    scale[scale == 0] = 1.0
    return (wide / scale).round_().to(torch.int8), scale


def _quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of nf4, part by part: the library compares each weight with all 16 values at once."""
    from bitsandbytes import functional

    flat, size = weight.reshape(-1), 1 << 18
    codes, scale = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8), torch.empty(-(-len(flat) // BLOCK))
    for first in range(0, len(flat), size):
        part, state = functional.quantize_4bit(flat[first : first + size].float(), blocksize=BLOCK, quant_type="nf4")
        codes[first // 2 : first // 2 + len(part)] = part
        scale[first // BLOCK : first // BLOCK + len(state.absmax)] = state.absmax
    return codes, scale


def _dequantize_blocks(codes: Tensor, scale: Tensor, rows: slice, columns: int) -> Tensor:
    from bitsandbytes import functional

    first, last = rows.start * columns, rows.stop * columns
    state = functional.QuantState(
        scale[first // BLOCK : -(-last // BLOCK)],
        torch.Size([rows.stop - rows.start, columns]),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=torch.float32,
    )
    return cast(Tensor, functional.dequantize_4bit(codes[first // 2 : -(-last // 2)], state))


# --- whole models ---


def quantize_layers(model: Any, how: str, name: str) -> None:
    """Quantise a loaded model in place, matrix by matrix; all other weights are converted to float32.

    A matrix that lies in a mapped file is read when it is quantised, and its pages are given back before the next one.

    `model` is a transformers model on the CPU, its weights in the dtype of the file; `name` is for error lines.
    """
    for path, module in matrices_of(model, how, name).items():
        model.set_submodule(path, QuantizedLinear(how, module, *quantize(how, module.weight.data)))
        release_file_pages(module.weight.data)
        trim_malloc()
    widen(model)


def matrices_of(model: Any, how: str, name: str) -> dict[str, nn.Linear]:
    """Return path -> matrix of those that are quantised: all of the numbered layers."""
    matrices = {}
    for path, module in model.named_modules():
        matrices_of_module = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if not matrices_of_module or not re.search(r"\.\d+\.", path):
            continue
        if type(module) is not nn.Linear:
            raise UserError(
                f"{name}: model.quantize={how} quantises layers of nn.Linear, and {path} is a {type(module).__name__}; "
                "use model.quantize=none, or a model like RoBERTa, BERT, OPT, GPT-NeoX or Llama"
            )
        matrices[path] = module
    if not matrices:
        raise UserError(f"{name}: model.quantize={how} finds no layers of nn.Linear; use model.quantize=none")
    return matrices


def widen(model: nn.Module) -> None:
    """Convert what is not quantised to float32."""
    for p in model.parameters():
        if p.dtype != torch.float32:
            stored, p.data = p.data, p.data.float()
            release_file_pages(stored)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return path -> layer, of all quantised layers of a model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def row_factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> factors of each quantised layer that has some."""
    layers = quantized_layers(model).items()
    return {f"{path}.rows.factor": layer.rows.factor for path, layer in layers if layer.rows is not None}


def describe(model: nn.Module) -> str:
    """Return how a base is quantised: int8, "nf4 (bitsandbytes 0.50.2)", or none."""
    layer = next(iter(quantized_layers(model).values()), None)
    return "none" if layer is None else f"{layer.how} ({library_of(layer.how)})".removesuffix(" ()")


def count_parameters(model: nn.Module) -> int:
    """Return the number of scalars in a model, without the frozen originals of modules that `peft` has copied."""
    quantised = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
    return quantised + sum(p.numel() for name, p in model.named_parameters() if ".original_module." not in name)
