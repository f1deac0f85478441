"""A model run in every way that tells something of it: its blocks probed, tried and metered, its own code metered."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hightide.ir.split import BatchDim, Split
from hightide.process.interrupts import in_a_line
from hightide.process.progress import tell
from hightide.profiler.fake.fake import Originals
from hightide.profiler.fake.values import Source, Values
from hightide.profiler.model.block_finder import BlockChoice, FoundBlocks, find_blocks
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.kinds import is_plain_linear, kinds_of
from hightide.profiler.model.samples import Samples, possible_samples
from hightide.profiler.needs.glue import GlueNeeds, measure_glue
from hightide.profiler.needs.needs import CallMeter, CallNeeds, meter_call
from hightide.profiler.needs.token_tiles import TokenParts
from hightide.profiler.probe.compare_runs import compare, pair_records
from hightide.profiler.probe.probe import CPU, examined, give_back, record_runs
from hightide.profiler.probe.probe_record import ProbeRecord
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.profiler.probe.tap_search import Taps
from hightide.profiler.trial.independence import examine
from hightide.profiler.trial.repeated_call import TriedCall

Runs = tuple[ProbeRecord, ProbeRecord]  # with B and with B + 1 samples
MAX_PROBES = 4  # each one more finds parameters to be loose, which may free others of their block


class DoesNotRun(ValueError):
    """The model fails on its example batch, on values too."""


@dataclass(frozen=True)
class Survey:
    """What one way to run a model has told."""

    found: FoundBlocks
    probed: ProbeResult
    runs: Runs
    needs: list[CallNeeds]  # by call
    head: int | None
    glue: GlueNeeds | None
    failure: str  # why a part of it is not known


@dataclass(frozen=True)
class Surveying:
    """To be used with fake parameters."""

    model: nn.Module
    batch: Batch
    originals: Originals
    device: torch.device | None  # where blocks are tried; None: shapes are believed

    def without_values(self, chosen: BlockChoice | None) -> Survey:
        """See [Note: time first]."""
        results = []
        for samples in possible_samples(self.batch):
            found, probed, runs = self._settled(find_blocks(self.model, chosen), samples)
            if self.device is not None:
                tell("trying blocks alone")
                probed = examined(probed, runs, self.originals, self.device)
            results.append((found, probed, runs))
            mixes = any(call.split.inputs and not call.split.splittable for call in probed.calls)
            if not mixes or any(call.split.splittable for call in probed.calls):
                break
        of_use = (result for result in results if any(call.split.splittable for call in result[1].calls))
        return self._metered(*next(of_use, results[0]))

    def again(self, found: FoundBlocks, samples: Samples) -> Survey:
        """For another batch: blocks, and where the samples are, stay as they were found."""
        return self._metered(*self._settled(found, samples))

    def on_values(self, survey: Survey, source: Source) -> Survey:
        """See [Note: a pass on values]. Where a block has no room on a GPU without being split, on the CPU."""
        tell("running the model on values", "a block at a time")
        failure, originals, device = "", self.originals, self.device or CPU
        for place in dict.fromkeys((device, CPU)):
            values = Values(originals, place, source)
            with originals.as_trained():
                found, probed, runs = self._settled(survey.found, survey.probed.samples, values, survey.failure)
            failure = probed.failure
            if not failure:
                probed = replace(probed, failure=survey.failure, on_values=True)
                probed = examined(probed, runs, originals, device)
                with originals.as_trained():
                    on_values = replace(self, device=device)._metered(found, probed, runs, values)
                give_back(probed, place)
                failure = on_values.failure
                if not failure:
                    return on_values
            originals.forget_attributes()
            if "OutOfMemoryError" not in failure:
                break
        for index, reason in sorted(probed.refusals.items()):  # it is given copies, and the model's code misses it
            name = probed.blocks[index].name
            raise DoesNotRun(f"the block {name!r} {reason}. Without that the model does not run ({failure})")
        if (replaced := originals.replaced_module()) is not None:
            raise DoesNotRun(
                f"the model's forward puts another module in the place of {replaced!r}, and cannot be tried as it was "
                f"before ({failure}). If it does so once, call the model on such a batch before it is wrapped, or "
                "configure it as it will be then"
            )
        if not probed.failure or probed.on_values:
            raise DoesNotRun(
                "the model runs on the example batch, but a part of it fails when it is run once more with the same "
                f"arguments ({failure}), as recomputation in backward would do: a block changes what it is given (a "
                "cache of keys and values?), or follows something that has changed. Call the model without a cache, or "
                "let the block return what it adds"
            )
        raise DoesNotRun(
            f"the model runs neither without values ({survey.failure}) nor, a block at a time, on the example batch "
            f"({failure}): what it needs cannot be known. Pass a batch on which it trains; its code between blocks is "
            "run on the CPU for this"
        )

    def _settled(
        self, found: FoundBlocks, samples: Samples, values: Values | None = None, asks: str = ""
    ) -> tuple[FoundBlocks, ProbeResult, Runs]:
        """Parameters seen outside of their blocks become loose, which may change what the blocks are: then probes
        again. `asks`: why it is done on values."""
        taps: Taps = {}

        def once() -> tuple[ProbeResult, Runs]:
            with nullcontext() if values is None else values.between(self.model, found.loose):
                runs = record_runs(self.model, found.blocks, self.batch, taps=taps, samples=samples, values=values)
            return compare(found.blocks, *runs, samples, asks), runs

        for _ in range(MAX_PROBES):
            probed, runs = once()
            more = probed.loose - set(found.loose)
            if not more and not probed.more_taps:
                break
            kept = found.without(self.model, more)
            taps = {
                kept.blocks.index(found.blocks[old]): entry
                for old, entry in probed.all_taps.items()
                if found.blocks[old] in kept.blocks
            }
            found = kept
        else:
            probed, runs = once()
        # Called ones in the order of their first call, then the others.
        order = list(dict.fromkeys([*(call.block for call in probed.calls), *range(len(probed.blocks))]))
        found = FoundBlocks(tuple(found.blocks[old] for old in order), found.loose)
        for record in (*runs[0].records, *runs[1].records):
            record.block = order.index(record.block)
        return found, _reordered(probed, order), runs

    def _metered(self, found: FoundBlocks, probed: ProbeResult, runs: Runs, values: Values | None = None) -> Survey:
        parts = TokenParts(
            self.originals, self.device or CPU, lambda part, call: meter_call(part, call.leaves, call).kept
        )
        meter = CallMeter(values, parts)
        alike = kinds_of(probed.blocks)
        kinds = [
            meter.measure(
                probed.blocks[call.block].module,
                call.split,
                one,
                two,
                probed.num_samples,
                probed.taps.get(call.block, ()),
                alike[call.block],
            )
            for call, (one, two) in zip(probed.calls, pair_records(*runs), strict=True)
        ]
        needs = meter.needs
        head = _find_lazy_head(self.model, probed)
        if head is not None and self.device is not None and not self._is_by_row(probed, runs, head, self.device):
            head = None
        failure = meter.failure or (probed.failure if not probed.on_values else "")
        glue = None
        if not failure and not probed.captured:  # else it is refused
            with nullcontext() if values is None else values.between(self.model, found.loose):
                try:
                    glue = measure_glue(self.model, self.batch, probed, runs, head)
                except Exception as error:
                    failure = in_a_line(error)
        return Survey(found, probed, runs, [needs[kind] for kind in kinds], head, glue, failure)

    def _is_by_row(self, probed: ProbeResult, runs: Runs, head: int, device: torch.device) -> bool:
        """Whether a head that is more than a linear layer may be computed token by token, as the fused loss does."""
        module = probed.blocks[head].module
        if is_plain_linear(module):
            return True
        record = next(record for record in (*runs[1].records, *runs[0].records) if record.block == head)
        if len(record.inputs) != 1 or len(record.leaves) != 1:
            return True  # it is not called as the fused loss would call it
        rows = record.inputs[0].flatten(0, -2)
        by_row = replace(record, leaves=[rows.detach().requires_grad_(record.inputs[0].requires_grad)])
        split = Split(record.signature, (BatchDim(0),), (BatchDim(0),))
        finding = examine(TriedCall(module, by_row, len(rows), split), self.originals, device)
        return not finding.note and not finding.keeps


def _reordered(probed: ProbeResult, order: list[int]) -> ProbeResult:
    return replace(
        probed,
        blocks=tuple(probed.blocks[old] for old in order),
        calls=tuple(replace(call, block=order.index(call.block)) for call in probed.calls),
        uses={new: probed.uses.get(old, ()) for new, old in enumerate(order)},
        taps={new: probed.taps[old] for new, old in enumerate(order) if old in probed.taps},
        refusals={new: probed.refusals[old] for new, old in enumerate(order) if old in probed.refusals},
        returned={new: probed.returned[old] for new, old in enumerate(order) if old in probed.returned},
    )


def _find_lazy_head(model: nn.Module, probed: ProbeResult) -> int | None:
    """The output embedding of a language model, if it is a block that is called once. In a wrapper that holds copies
    of it (PEFT's modules_to_save), the copy that is called."""
    get = getattr(model, "get_output_embeddings", None)
    outer = get() if callable(get) else None
    if not isinstance(outer, nn.Module):
        return None
    inside = set(outer.modules())
    called = [call.block for call in probed.calls if probed.blocks[call.block].module in inside]
    if len(called) != 1:
        return None
    module = probed.blocks[called[0]].module
    if not isinstance(module, nn.Linear):
        return None
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    (call,) = [call for call in probed.calls if call.block == called[0]]
    if not call.input_shapes:  # the probe did not get there
        return None
    return called[0] if getattr(text_config, "vocab_size", None) == module.out_features else None
