"""`hightide.Trainer`, or `class MyTrainer(hightide.TrainerMixin, Trainer)`: a Trainer of transformers whose model is
bigger than the GPU.

[Note: a Trainer around a wrapped model] The Trainer goes its own way; what it would do to a model that fits the GPU is
replaced where it does it:

- It moves no model to the GPU, and Accelerate wraps none in DDP or torch.compile: the model is wrapped when the
  optimizer exists, and Accelerate adds autocast alone.
- A step's batches are collected and given to the model in the calls of the plan, with the last of them: callbacks,
  counters and logs see the user's batches. See [Note: whose cut].
- Checkpoints: see checkpoint_mixin.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn

from hightide import api, asked
from hightide.checkpoint.prepare import prepare_saves
from hightide.data.buckets import INPUT_IDS, PadToBucket, bucket_lengths
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan, Update
from hightide.optim.optimizer import WrappedOptimizer
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.switches.caches import is_pretrained
from hightide.shard.told import in_company
from hightide.trainer import arguments, recut
from hightide.trainer.checkpoint_mixin import CheckpointMixin, without_accelerate
from hightide.trainer.earlier_plan import Earlier, asked_of, earlier_plan
from hightide.trainer.first_batches import first_batches, first_call, replayed
from hightide.trainer.only_evaluated import thaw, wrap_frozen


class TrainerMixin(CheckpointMixin):
    """Options beside those of the Trainer: `limits` (Limits, a dict of its arguments, or how much of the GPU as
    "24GiB"), `plan`, `micro_batch`, `update`, `gradients`, `compile`, `device` and `blocks` as of hightide.wrap;
    `lengths`, to which batches of training are padded: a list, or the longest of four."""

    model: Any
    optimizer: Any
    args: Any
    accelerator: Any
    state: Any
    train_dataset: Any
    data_collator: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Behind the Trainer nothing of it would be called: the model would train plain, without a word."""
        super().__init_subclass__(**kwargs)
        before = next((one for one in cls.__mro__[1:] if issubclass(one, TrainerMixin | transformers.Trainer)), None)
        if before is not None and not issubclass(before, TrainerMixin):
            bases = ", ".join(
                ["hightide.TrainerMixin", *(one.__name__ for one in cls.__bases__ if one is not TrainerMixin)]
            )
            raise TypeError(f"TrainerMixin must come before {before.__name__}: class {cls.__name__}({bases})")

    def __init__(
        self,
        *args: Any,
        limits: Limits | Mapping[str, Any] | str | None = None,
        plan: Plan | None = None,
        micro_batch: int | None = None,
        update: str = "deferred",
        gradients: str = "float32",
        compile: bool = False,
        device: str | torch.device | None = None,
        blocks: BlockChoice | None = None,
        lengths: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._wrap_options: dict[str, Any] = {
            "limits": arguments.as_limits(limits),
            "plan": plan,
            "micro_batch": micro_batch,
            "update": update,
            "gradients": gradients,
            "compile": compile,
            "blocks": blocks,
        }
        self._device = device
        self._lengths = bucket_lengths(lengths) if isinstance(lengths, int) else lengths
        self._calls: int | None = None  # of a step, where the plan decides; None: the user's cut stays
        self._collected: list[Any] = []  # batches of the present step
        self._num_batches = 0  # that it will have
        self._num_items: Any = None  # labels in all of them
        self._frozen: list[nn.Parameter] | None = None  # by us, to be evaluated only
        self._is_wrapped_here = False  # and not by the user
        super().__init__(*args, **kwargs)

    # -- what the Trainer sets up ---------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        update = self._wrap_options["plan"].update if self._wrap_options["plan"] else self._wrap_options["update"]
        arguments.check_arguments(self.args, update)
        arguments.check_ranks(self.args, in_company())
        self._wrap_options["compile"] |= bool(self.args.torch_compile)
        arguments.settle_arguments(self.args)
        if self._device is not None and asked.chosen_device(self._device).type != self.args.device.type:
            raise ValueError(
                f"device={str(self._device)!r}, but the Trainer puts batches on {self.args.device}; leave device out, "
                f"and set TrainingArguments(use_cpu={self.args.device.type != 'cpu'})"
            )
        super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Blocks are compiled, not the model."""
        return {**super()._build_accelerator_args(**kwargs), "dynamo_plugin": TorchDynamoPlugin(backend="no")}

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            arguments.check_optimizer_name(self.args)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The plan says what is where."""

    def get_train_dataloader(self) -> Any:
        self.train_dataset = replayed(self.train_dataset, self.args.dataloader_num_workers)
        if self._lengths is None:
            return super().get_train_dataloader()
        if recut.follows_length(self.model):
            raise ValueError(
                "lengths= pads batches, and this model's rotary embeddings follow the length of a call with its "
                "padding (dynamic or longrope): results would change; leave lengths out"
            )
        collator, values = self.data_collator, {**recut.PADDED, INPUT_IDS: self._pad_id()}
        # On the right, whatever side the tokenizer pads: the positions of tokens and of labels stay as they are.
        self.data_collator = PadToBucket(collator, self._lengths, pad_values=values)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """One of evaluation is looked into too, where nothing trains."""
        if self._run is None and self.train_dataset is None:
            dataset = replayed(dataset, self.args.dataloader_num_workers)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _pad_id(self) -> int:
        """What models look for that take the last token of a sample for a class; to others it is all the same."""
        for of in (getattr(self, "processing_class", None), getattr(self.model, "config", None)):
            pad = getattr(of, "pad_token_id", None)
            if isinstance(pad, int):
                return pad
        if is_pretrained(self._base_model()) and not recut.is_sum_over_samples(self._base_model()):
            raise ValueError(
                "lengths= pads batches, and neither the tokenizer nor model.config has a pad_token_id; set one, or "
                "leave lengths out"
            )
        return 0

    def _base_model(self) -> Any:
        """Without adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    # -- wrapping -------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        self._thaw()
        if self._run is None:
            self._wrap(self._plain_optimizer(model))
        elif self.optimizer is None:
            raise ValueError(
                "the model is wrapped already; pass its optimizer too, optimizers=(optimizer, None), or call "
                "hightide.unwrap(model) first"
            )
        return self.optimizer

    def _thaw(self) -> None:
        """There is something to train on since."""
        if self._frozen is not None:
            api.unwrap(self.model)
            frozen, self._frozen = self._frozen, None
            thaw(frozen)

    def _plain_optimizer(self, model: Any) -> Any:
        """Without a kernel of its own, for which parameters would have to be somewhere."""
        name = self.args.optim
        if name == "adamw_torch_fused":
            self.args.optim = type(name)("adamw_torch") if not isinstance(name, str) else "adamw_torch"
        try:
            return super().create_optimizer(model)
        finally:
            self.args.optim = name

    def _wrap(self, optimizer: Any) -> None:
        options, plan = dict(self._wrap_options), self._wrap_options["plan"]
        batches = [dict(batch) for batch in first_batches(self, self.args.gradient_accumulation_steps)]
        self.model.train()
        is_free = self._cut_is_free(batches)
        example = recut.joined(batches) if is_free else max(batches, key=_numel)
        if plan is not None and is_free:
            example = {name: value[: plan.num_samples] for name, value in example.items()}
        if plan is None:
            options["accumulate"] = "auto" if is_free else self.args.gradient_accumulation_steps
        length = self._longest(example) if recut.num_samples(example) is not None else 0
        self._asked = asked_of(self.args, self._wrap_options, length, is_free) if plan is None else None
        earlier = self._earlier_plan()
        if length:
            example = recut.lengthened(example, max(length, earlier.length if earlier else 0))
        example = first_call(self, example)
        options["device"] = "cpu" if self.args.device.type == "cpu" else self.args.device  # Accelerate numbers CPUs
        options["timeout_s"] = self.args.ddp_timeout
        if earlier is None:
            _, self.optimizer = api.wrap(self.model, optimizer, example, **options)
        else:
            del options["plan"]
            _, self.optimizer = api.wrap_again(self.model, optimizer, example, earlier.plan, **options)
        run = self._run
        assert run is not None
        run.executor.promises.stay_silent()  # an epoch may end with fewer batches
        self._calls = run.plan.accumulate if is_free else None
        self._is_wrapped_here = True
        if self.args.save_strategy != "no":
            prepare_saves(self.model, self.args.output_dir)

    def _earlier_plan(self) -> Earlier | None:
        """See [Note: a plan goes on]."""
        path, self._resumes_from = self._resumes_from, None
        if path is None or self._asked is None:
            return None
        found = [earlier_plan(path, self._asked) if self.args.process_index == 0 else None]
        if self.args.world_size > 1:
            torch.distributed.broadcast_object_list(found)
        return found[0]

    def _longest(self, example: Mapping[str, Any]) -> int:
        """Tokens that the plan must hold: of the longest bucket, else of the longest example of any rank."""
        if self._lengths is not None:
            return max(self._lengths)
        length = example[INPUT_IDS].shape[1] if INPUT_IDS in example else 0
        lengths = [length] * self.args.world_size
        if self.args.world_size > 1:
            torch.distributed.all_gather_object(lengths, length)
        return max(lengths)

    def _cut_is_free(self, batches: Sequence[Any]) -> bool:
        """See [Note: whose cut]."""
        base = self._base_model()
        is_plain = (
            super().training_step.__func__ is transformers.Trainer.training_step
            and type(self).compute_loss is transformers.Trainer.compute_loss
            and self.compute_loss_func is None
            and self.args.neftune_noise_alpha is None  # its noise follows from the length of a call
        )
        return (
            is_plain
            and self.model_accepts_loss_kwargs
            and is_pretrained(base)
            and recut.is_sum_over_samples(base)
            and all("labels" in batch and recut.num_samples(batch) is not None for batch in batches)
            and recut.can_join(batches)
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training:
            self._wrap_by_now()
        run = self._run
        if run is None:
            return super()._wrap_model(model, training, dataloader)
        run.gradients.takes_norms = True
        return self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)

    def _wrap_by_now(self) -> None:
        """A subclass may make its optimizer without asking `create_optimizer` here, another one at each `train`: its
        model would train plain, or not at all."""
        self._thaw()
        is_new = not isinstance(without_accelerate(self.optimizer), WrappedOptimizer)
        if is_new and self._is_wrapped_here and self._run is not None:
            api.unwrap(self.model)
        if self._run is None:
            self._wrap(self.optimizer)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """A model need not fit the GPU: by now it is wrapped, to train, or where there is nothing to train on, to be
        evaluated only."""
        if self._run is None and self.train_dataset is not None:
            self.create_optimizer()
            self._wrap_by_now()
        elif self._run is None:
            self._frozen = wrap_frozen(self, dataloader, self._wrap_options)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    # -- a step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._collected, self._num_batches = [], len(batches)
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._calls is None or num_items_in_batch is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._collected.append(inputs)
        self._num_items = num_items_in_batch
        if len(self._collected) < self._num_batches:
            return torch.zeros((), device=self.args.device)
        return self._call_collected(model)

    def _call_collected(self, model: nn.Module) -> Tensor:
        batches, self._collected = self._collected, []
        one = super().training_step
        losses = [one(model, call, self._num_items) for call in self._cut(batches)]
        return torch.stack(losses).sum()

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kw: Any
    ) -> None:
        """A callback that ends an epoch in the middle of a step leaves the gradients of its batches to the next one."""
        if self._collected:
            tr_loss += self._call_collected(model)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kw)

    def _cut(self, batches: Sequence[Any]) -> list[dict[str, Any]]:
        """A step's batches, into the calls of the plan."""
        run = self._run
        assert run is not None
        most = run.plan.num_samples
        if not recut.can_join(batches):
            return recut.cut_apart(batches, most)
        if self.args.world_size > 1:  # as many on all ranks, whatever a last batch has
            return recut.cut(batches, -(-len(batches) * self.args.per_device_train_batch_size // most))
        return recut.cut(batches, -(-sum(recut.num_samples(batch) or 0 for batch in batches) // most))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        run = self._run
        if run is not None and run.plan.update is Update.IN_BACKWARD:
            return run.gradients.total_norm()
        return super()._get_grad_norm(model, grad_norm=grad_norm)


def _numel(batch: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, Tensor))


class Trainer(TrainerMixin, transformers.Trainer):
    __doc__ = TrainerMixin.__doc__
