"""hightide trains PyTorch models that are bigger than the GPU, on few GPUs, without hand-tuning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hightide.api import on_all_ranks, plan, record, stats, unwrap, wrap, wrap_frozen
    from hightide.checkpoint.choosing import latest
    from hightide.checkpoint.load import Loaded, load
    from hightide.checkpoint.prepare import prepare_saves
    from hightide.checkpoint.save import save
    from hightide.checkpoint.saving import Saving
    from hightide.checkpoint.state_dicts import optimizer_state_dict
    from hightide.data.buckets import PadToBucket, bucket_lengths
    from hightide.integrations.pretrained import from_pretrained
    from hightide.ir.limits import Limits
    from hightide.ir.plan import Plan
    from hightide.ir.refusal import Refused
    from hightide.observe.stats import Stats
    from hightide.trainer.mixin import Trainer, TrainerMixin
    from hightide.verification.verdict import Verdict
    from hightide.verification.verify_training import verify

__all__ = [
    "Limits",
    "Loaded",
    "PadToBucket",
    "Plan",
    "Refused",
    "Saving",
    "Stats",
    "Trainer",
    "TrainerMixin",
    "Verdict",
    "bucket_lengths",
    "from_pretrained",
    "latest",
    "load",
    "on_all_ranks",
    "optimizer_state_dict",
    "plan",
    "prepare_saves",
    "record",
    "save",
    "stats",
    "unwrap",
    "verify",
    "wrap",
    "wrap_frozen",
]
__version__ = "0.1.0"

_HOMES = {
    "Limits": "hightide.ir.limits",
    "Loaded": "hightide.checkpoint.load",
    "PadToBucket": "hightide.data.buckets",
    "Plan": "hightide.ir.plan",
    "Refused": "hightide.ir.refusal",
    "Saving": "hightide.checkpoint.saving",
    "Stats": "hightide.observe.stats",
    "Trainer": "hightide.trainer.mixin",
    "TrainerMixin": "hightide.trainer.mixin",
    "Verdict": "hightide.verification.verdict",
    "bucket_lengths": "hightide.data.buckets",
    "from_pretrained": "hightide.integrations.pretrained",
    "latest": "hightide.checkpoint.choosing",
    "load": "hightide.checkpoint.load",
    "optimizer_state_dict": "hightide.checkpoint.state_dicts",
    "prepare_saves": "hightide.checkpoint.prepare",
    "save": "hightide.checkpoint.save",
    "verify": "hightide.verification.verify_training",
    **dict.fromkeys(("on_all_ranks", "plan", "record", "stats", "unwrap", "wrap", "wrap_frozen"), "hightide.api"),
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: so the command decides when torch is."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hightide' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
