"""Random weights for a module, so that an engine can be measured on a model whose checkpoint is not
available.

Norms are one, biases zero, integers count the columns, every matrix is normal with variance 1 / inputs: a
layer's output then has about the size of its input, whatever the widths, and the residual stream after n
layers grows only like √n.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.weights.audit import parameters
from mtpserve.weights.finish import Finisher
from mtpserve.weights.shards import clear, shards_of

SEED = 0


def fill(
    module: nn.Module, device: torch.device, whole: nn.Module | None = None, ranks: Ranks = ALONE
) -> None:
    """The same numbers for the same module on the same kind of device; for one of several `ranks` its part of
    those of `whole`, the same model on no device. At the end `finish_loading()` is called, as after a
    load."""
    whole = module if whole is None else whole
    shards, targets = shards_of(whole, module, ranks), parameters(module.to(device))
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        clear(targets, shards)
        for name, parameter in parameters(whole).items():
            target, shard = targets[name].detach(), shards[name]
            # a whole parameter of experts is large
            for expert in range(len(parameter)) if parameter.dim() == 3 else [None]:
                values = torch.empty(
                    parameter.shape if expert is None else parameter.shape[1:],
                    dtype=target.dtype,
                    device=device,
                )
                randomise(name, values, generator)
                for move in shard.moves(expert):
                    move.of(target).copy_(values[move.taken])
    Finisher(module).rest()


def randomise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if not tensor.is_floating_point():
        tensor.copy_(torch.arange(tensor.shape[-1]).expand_as(tensor))
    elif tensor.dim() == 1:
        tensor.fill_(1.0 if "norm" in name and not name.endswith("bias") else 0.0)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
