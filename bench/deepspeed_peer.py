"""DeepSpeed as a peer of the benchmarks: ZeRO-3 with parameters and states on the host, or with states on a disk;
ZeRO-2 with states on the host.

It is no dependency: whoever compares brings it along on PYTHONPATH, with what its asynchronous I/O is built from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

BUFFERS = 8  # of parameters' states on the way to and from a disk
AIO = {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 1, "overlap_events": True}


class DeepSpeed:
    """A model in DeepSpeed. `disk`: a folder; what DeepSpeed writes there is deleted with this object, and at exit."""

    def __init__(
        self,
        micro_batch: int,
        calls: int,
        lr: float,
        clip: float | None = None,
        disk: str | None = None,
        stage: int = 3,
    ) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        self._micro_batch, self._lr = micro_batch, lr
        states: dict[str, Any] = {"device": "cpu"}
        if disk is not None:
            folder = tempfile.mkdtemp(prefix="deepspeed-", dir=disk)
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            states = {"device": "nvme", "nvme_path": folder, "buffer_count": BUFFERS}
        self.config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": calls,
            "gradient_clipping": clip or 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {**states, "pin_memory": True},
                **({"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}),
            },
            "aio": AIO,
        }

    def partitioned(self, is_large: bool = True) -> AbstractContextManager[Any]:
        """In it a model is made that the host could not hold twice."""
        import deepspeed

        return deepspeed.zero.Init(config_dict_or_path=self.config) if is_large else nullcontext()

    def step_of(self, model: Any) -> Callable[[Tensor], Tensor]:
        """One step of training, blocks recomputed; returns the loss of the last micro-batch."""
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        assert isinstance(model, nn.Module)
        model.gradient_checkpointing_enable()
        model.train()
        adam = DeepSpeedCPUAdam(model.parameters(), lr=self._lr)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=self.config)

        def step(tokens: Tensor) -> Tensor:
            for part in tokens.to(engine.device).split(self._micro_batch):
                loss = engine(input_ids=part, labels=part, use_cache=False).loss
                engine.backward(loss)
                engine.step()
            return loss.detach()

        return step
