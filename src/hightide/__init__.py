"""hightide trains PyTorch models that are bigger than the GPU, on few GPUs, without hand-tuning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hightide.api import plan, record, stats, unwrap, wrap
    from hightide.checkpoint.files.folder import latest
    from hightide.checkpoint.load import Loaded, load
    from hightide.checkpoint.save import save
    from hightide.checkpoint.saving import Saving
    from hightide.checkpoint.state_dicts import optimizer_state_dict
    from hightide.integrations.pretrained import from_pretrained
    from hightide.ir.limits import Limits
    from hightide.ir.plan import Plan
    from hightide.ir.refusal import Refused
    from hightide.observe.stats import Stats
    from hightide.verification.verdict import Verdict
    from hightide.verification.verify_training import verify

__all__ = [
    "Limits",
    "Loaded",
    "Plan",
    "Refused",
    "Saving",
    "Stats",
    "Verdict",
    "from_pretrained",
    "latest",
    "load",
    "optimizer_state_dict",
    "plan",
    "record",
    "save",
    "stats",
    "unwrap",
    "verify",
    "wrap",
]
__version__ = "0.1.0"

_HOMES = {
    "Limits": "hightide.ir.limits",
    "Loaded": "hightide.checkpoint.load",
    "Plan": "hightide.ir.plan",
    "Refused": "hightide.ir.refusal",
    "Saving": "hightide.checkpoint.saving",
    "Stats": "hightide.observe.stats",
    "Verdict": "hightide.verification.verdict",
    "from_pretrained": "hightide.integrations.pretrained",
    "latest": "hightide.checkpoint.files.folder",
    "load": "hightide.checkpoint.load",
    "optimizer_state_dict": "hightide.checkpoint.state_dicts",
    "save": "hightide.checkpoint.save",
    "verify": "hightide.verification.verify_training",
    **dict.fromkeys(("plan", "record", "stats", "unwrap", "wrap"), "hightide.api"),
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: so the command decides when torch is."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hightide' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
