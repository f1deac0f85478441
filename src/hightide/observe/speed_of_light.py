"""How long the work of a run would take at the speed of light."""

from __future__ import annotations

import torch

from hightide.planner.predict.light import main_dtype, needed_flop, seconds_at
from hightide.runtime.run import Run
from hightide.runtime.step_work import Computed


def light_s_of(run: Run, computed: Computed | None) -> float | None:
    """None: nobody has measured the GPU, or nobody knows what was computed."""
    if computed is None or run.products is None:
        return None
    dtype = computed.autocast_dtype or main_dtype(run.profile)
    rate = run.products.of("tf32" if dtype == "float32" and _multiplies_in_tf32() else dtype)
    return seconds_at(needed_flop(run.profile, computed.num_samples), rate)


def _multiplies_in_tf32() -> bool:
    """Where it was chosen in torch's newer way, the older one cannot be asked."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
