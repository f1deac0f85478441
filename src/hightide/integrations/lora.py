"""LoRA adapters by PEFT: on a model without values, of which planning needs the shapes; and around parameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from hightide.ir.foreign import kind_of

ALL = "all-linear"


@dataclass(frozen=True)
class Lora:
    rank: int
    targets: tuple[str, ...] = ()  # ends of module names, or ("all-linear",); none: what PEFT knows for the model

    @classmethod
    def parse(cls, text: str) -> Lora:
        """From RANK or RANK:TARGET,TARGET."""
        rank, colon, targets = text.partition(":")
        names = tuple(name.strip() for name in targets.split(",")) if colon else ()
        if not rank.isascii() or not rank.isdigit() or int(rank) < 1 or not all(names):
            raise ValueError(
                f"--lora {text!r} is not RANK or RANK:TARGETS; write 16, 16:q_proj,v_proj or 16:{ALL} (rank from 1)"
            )
        return cls(int(rank), names)


def with_adapters(model: nn.Module, lora: Lora, *, have_values: bool = False) -> nn.Module:
    """The model frozen, with adapters that train, in PEFT's own dtypes (fp32 beside a 16-bit model). They are on the
    meta device, as planning needs them, or `have_values`: those that PEFT draws."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("LoRA needs PEFT: pip install peft") from error
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank,
        target_modules=ALL if lora.targets == (ALL,) else list(lora.targets) or None,
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),  # as GPT-2 has it
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    )
    training = model.training
    try:
        with nullcontext() if have_values else torch.device("meta"):
            adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        linear = dict.fromkeys(name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, nn.Linear))
        names = ", ".join(linear) or "none"
        if lora.targets:
            raise ValueError(
                f"PEFT cannot adapt {', '.join(lora.targets)} of {kind_of(model)}: {error} Its linear modules "
                f"end in {names}; name some of these, or {ALL}"
            ) from error
        raise ValueError(
            f"PEFT does not know which modules of {kind_of(model)} to adapt; name them by the ends of their "
            f"names: --lora {lora.rank}:NAMES, such as {lora.rank}:{','.join(list(linear)[:2]) or ALL}"
        ) from error
    return adapted.train(training)


def adapted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that PEFT adapts themselves and not through a linear module around them, as the experts of a mixture
    (`target_parameters`). Each call parametrises them for a while, and torch's parametrisation sets a tensor to itself:
    its version grows though nothing is written."""
    getters = [getattr(module, "get_param", None) for module in model.modules() if hasattr(module, "parameter_name")]
    return [get() for get in getters if get is not None]
