"""hightide trains PyTorch models that are bigger than the GPU, on few GPUs, without hand-tuning."""

from hightide.api import plan, record, stats, unwrap, wrap
from hightide.integrations.pretrained import from_pretrained
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan
from hightide.measured import Stats

__all__ = ["Limits", "Plan", "Stats", "from_pretrained", "plan", "record", "stats", "unwrap", "wrap"]
__version__ = "0.1.0"
