"""What a model is given, and what it does to its own weights: other than in the example, in other forms, written to."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equal_or_refused import (
    CLASSES,
    NUM_SAMPLES,
    NUM_TOKENS,
    ROOMY,
    SPLIT,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    check,
    mean_square,
    one_step,
    sequences,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

CASES = Cases()
add = CASES.add
ONE = (Way(1), Way(None, tight=False))


# --- weights that are written in forward ---


@add("refused")
class Clamped(Block):
    """Clipped as of a Wasserstein critic."""

    def mix(self, h: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(h))


@add("refused")
class Replaced(Block):
    def mix(self, h: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.9
        return torch.tanh(self.linear(h))


@add("refused")
class Decayed(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return super().forward(x)


@add("refused")
class NormalisedInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.div_(self.linear.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


@add("refused", slow=True)
class NormalisedByCopy(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(F.normalize(self.linear.weight, dim=1))
        return super().forward(x)


@add("refused", slow=True)
class ClampedInEveryModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            param.data.clamp_(-0.2, 0.2)
        return super().forward(x)


@add("refused", slow=True)
class InitialisedByTheFirstBatch(Block):
    """As the activation norm of flows."""

    def make(self) -> None:
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.started = False

    def mix(self, h: Tensor) -> Tensor:
        if not self.started:
            self.shift.data.copy_(h.detach().mean(0))
            self.started = True
        return h - self.shift


@add("refused", ways=SPLIT[:1])
class InitialisedByAFlag(Block):
    """The same with the flag in a buffer."""

    def make(self) -> None:
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("started", torch.tensor(0))

    def mix(self, h: Tensor) -> Tensor:
        if self.started == 0:
            with torch.no_grad():
                self.shift.copy_(h.mean(0))
                self.started.fill_(1)
        return h - self.shift


@add("refused")
class FrozenTarget(Block):
    """A frozen parameter that follows the trained one."""

    def make(self) -> None:
        self.target = nn.Parameter(self.linear.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.target.lerp_(self.linear.weight, 0.1)
        h = self.linear(x)
        return x + torch.tanh(h), (h - F.linear(x, self.target)).square().mean()


class CopiesFromAnother(Block):
    def __init__(self, other: Block) -> None:
        super().__init__()
        self.__dict__["other"] = other  # not as a child of this one

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(self.__dict__["other"].linear.weight)
        return super().forward(x)


@add("refused")
def weights_are_copied_between_blocks() -> nn.Module:
    first = Block()
    return Net(first, CopiesFromAnother(first), Block())


class CopiesInTheModel(Net):
    def forward(self, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            self.blocks[1].linear.weight.copy_(self.blocks[0].linear.weight)
        return super().forward(*args, **options)


@add(ways=ROOMY)
def weights_are_copied_by_the_model() -> nn.Module:
    return CopiesInTheModel(Block(), Block())


class ReadsAnother(CopiesFromAnother):
    """Only reads: a tied weight that nobody declared."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.__dict__["other"].linear.weight)


@add()
def weights_of_another_block_are_read() -> nn.Module:
    first = Block()
    return Net(first, ReadsAnother(first), Block())


def token_ids(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
    return {"x": ids, "labels": sequences(seed)["labels"]}


@add("refused", batch=token_ids)
def embedding_with_largest_norm() -> nn.Module:
    """It writes its weight in forward."""
    model = Net(Block(), Block())
    model.first = nn.Embedding(20, WIDTH, max_norm=1.0)
    return model


@add(batch=token_ids, split=True)
def embedding_with_padding() -> nn.Module:
    model = Net(Block(), Block())
    model.first = nn.Embedding(20, WIDTH, padding_idx=3)
    return model


@add(split=True, slow=True)
def pruned_weights() -> nn.Module:
    blocks = [Block(), Block()]
    for block in blocks:
        prune.l1_unstructured(block.linear, "weight", 0.4)
    return Net(*blocks)


@add("refused")
class FreezesItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.requires_grad_(False)
        return super().forward(x)


@add("refused")
class WritesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return super().forward(x)


class WritesACondition(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        condition.mul_(0.5)
        return x + torch.tanh(self.linear(x)) + condition


def conditioned(seed: int) -> dict[str, Tensor]:
    return {**vectors(seed), "condition": vectors(seed + 50)["x"]}


@add("refused", batch=conditioned)
def a_condition_is_written() -> nn.Module:
    return Net(WritesACondition(), WritesACondition())


@add(split=True)
class ScalesItsWeight(Block):
    """Out of place: nothing is written."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return x + F.linear(x, weight / weight.norm(dim=1, keepdim=True), self.linear.bias)


# --- other inputs than in the example ---


@add("refused", batch=sequences, example=lambda: sequences(0, num_samples=1), ways=ONE, slow=True)
def example_of_one_sample() -> nn.Module:
    return Net(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), Block())


@add("refused", batch=sequences, example=lambda: sequences(0, num_samples=1), ways=ONE)
class CentredAfterAnExampleOfOne(Block):
    """In an example of one sample nothing can be seen of others."""

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@add("refused", batch=sequences, example=lambda: sequences(0, num_samples=2), ways=ONE, slow=True)
class CentredAboveThree(Block):
    """In an example of two neither."""

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) > 3 else h


@add(batch=lambda seed: sequences(seed, num_tokens=NUM_TOKENS - seed % 3), evaluate=False, split=True)
def shorter_later() -> nn.Module:
    return Net(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), Block())


@add(batch=lambda seed: sequences(seed, num_tokens=4 + seed), ways=(Way(2, tight=False),), evaluate=False)
class LongSequencesMix(Block):
    """Samples meet only in sequences that are longer than the example's."""

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if h.shape[1] > 4 else h


@add(batch=lambda seed: vectors(seed, num_samples=6 - seed % 4), evaluate=False, split=True)
def smaller_batches_later() -> nn.Module:
    return Net(Block(), Block())


@add(batch=lambda seed: vectors(seed, num_samples=6 - seed % 4), evaluate=False)
class CentredInSmallerBatches(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@add(batch=lambda seed: vectors(seed, num_samples=6 + seed), ways=(Way(2, tight=False),), evaluate=False)
def larger_batches_later() -> nn.Module:
    return Net(Block(), Block())


@add(batch=lambda seed: vectors(seed, num_samples=6 + seed), ways=(Way(2, tight=False),), evaluate=False)
class MixesAboveSix(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) > 6 else h


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.linear(x))
        if mask is None:
            return x + h
        kept = h * mask.unsqueeze(-1)
        return x + h - kept.sum((0, 1)) / mask.sum()


def masked_later(seed: int) -> dict[str, Tensor]:
    return sequences(seed) | ({"mask": torch.ones(NUM_SAMPLES, NUM_TOKENS)} if seed else {})


@add(batch=masked_later, ways=(Way(2, tight=False),))
def samples_meet_under_a_mask_that_comes_later() -> nn.Module:
    return Net(Masked(), Masked())


def positional(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    return one_step(model, optimizer, (batch["x"], batch["labels"]), index)


@add(step=positional, split=True)
def keywords_in_the_example_positions_later() -> nn.Module:
    return Net(Block(), Block())


@add(batch=lambda seed: vectors(seed) if seed == 0 else dict(reversed(vectors(seed).items())), split=True, slow=True)
def another_order_of_keywords() -> nn.Module:
    return Net(Block(), Block())


class InTurns(Net):
    """Two ways through the same blocks."""

    def forward(self, x: Tensor, labels: Tensor, way: str = "down") -> dict[str, Tensor]:
        h = self.first(x)
        for block in self.blocks if way == "down" else reversed(self.blocks):
            h = block(h)
        prediction = self.head(h)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(batch=lambda seed: {**vectors(seed), "way": "up" if seed % 2 else "down"}, ways=(Way(2, tight=False),))
def another_order_of_blocks() -> nn.Module:
    return InTurns(Block(), Block(), Block())


class Tempered(Block):
    def forward(self, x: Tensor, temperature: Any = 1.0) -> Tensor:
        return x + torch.tanh(self.linear(x) * temperature)


@add(batch=lambda seed: {**vectors(seed), "temperature": 1.0 + seed}, split=True)
def a_number_that_changes() -> nn.Module:
    return Net(Tempered(), Tempered())


@add(batch=lambda seed: {**vectors(seed), "temperature": torch.tensor(1.0 + seed)}, split=True)
def a_tensor_without_dimensions() -> nn.Module:
    return Net(Tempered(), Tempered())


@add("refused", batch=lambda seed: {**vectors(seed), "temperature": torch.full((1, 1), 1.0 + seed)})
def a_tensor_of_one_row() -> nn.Module:
    return Net(Tempered(), Tempered())


@add("refused", batch=lambda seed: {**vectors(seed), "temperature": torch.full((WIDTH,), 1.0 + seed)}, slow=True)
def a_tensor_of_features() -> nn.Module:
    return Net(Tempered(), Tempered())


class Flagged(Block):
    def forward(self, x: Tensor, centre: bool) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + (h - h.mean(0) if centre else h)


@add(batch=lambda seed: {**vectors(seed), "centre": seed >= 2}, ways=ROOMY)
def samples_meet_by_a_flag_that_comes_later() -> nn.Module:
    return Net(Flagged(), Flagged())


# --- sizes that agree by accident ---


class TableOfSix(Block):
    """A table with as many rows as there are samples, for six tokens."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + table


@add(batch=lambda seed: {**sequences(seed, num_tokens=6), "table": vectors(seed + 50)["x"]})
def a_table_of_as_many_rows_as_samples() -> nn.Module:
    return Net(TableOfSix(), TableOfSix())


class WeightedClasses(Block):
    """Six classes, six samples: the weights are those of classes."""

    def make(self) -> None:
        self.classify = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, F.cross_entropy(self.classify(h), target, weight=weight)


def weighted(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 6, (NUM_SAMPLES,), generator=generator)
    return {**vectors(seed), "target": target, "weight": torch.rand(6, generator=generator) + 0.1}


@add(batch=weighted)
def weights_of_as_many_classes_as_samples() -> nn.Module:
    return Net(WeightedClasses(), WeightedClasses())


class ScaledFeatures(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * scale


@add(batch=lambda seed: {**vectors(seed, num_samples=WIDTH), "scale": vectors(seed + 50)["x"][0]}, slow=True)
def as_many_features_as_samples() -> nn.Module:
    return Net(ScaledFeatures(), ScaledFeatures())


@add(
    batch=lambda seed: {**vectors(seed, num_samples=WIDTH), "scale": vectors(seed + 50, WIDTH)["x"][:, :1]}, split=True
)
def as_many_features_as_samples_by_sample() -> nn.Module:
    return Net(ScaledFeatures(), ScaledFeatures())


# --- forms of inputs and outputs ---


class Formed(nn.Module):
    """Blocks that take and return one object."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        packet = self.blocks[0].pack(x)
        for block in self.blocks:
            packet = block(packet)
        prediction = self.head(self.blocks[0].unpack(packet))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


class TakesDict(Block):
    def pack(self, x: Tensor) -> Any:
        return {"h": x, "sum": x.sum(1, keepdim=True), "name": "first"}

    def unpack(self, packet: Any) -> Tensor:
        return packet["h"] * packet["sum"]

    def forward(self, packet: Any) -> Any:
        h = torch.tanh(self.linear(packet["h"]))
        return {"h": h, "sum": packet["sum"] + h.sum(1, keepdim=True), "name": packet["name"]}


class TakesList(TakesDict):
    def pack(self, x: Tensor) -> Any:
        return [x, (x.sum(1, keepdim=True), None)]

    def unpack(self, packet: Any) -> Tensor:
        return packet[0] * packet[1][0]

    def forward(self, packet: Any) -> Any:
        h = torch.tanh(self.linear(packet[0]))
        return [h, (packet[1][0] + h.sum(1, keepdim=True), None)]


Pair = namedtuple("Pair", ["h", "total"])


class TakesNamedTuple(TakesDict):
    def pack(self, x: Tensor) -> Any:
        return Pair(x, x.sum(1, keepdim=True))

    def unpack(self, packet: Any) -> Tensor:
        return packet.h * packet.total

    def forward(self, packet: Any) -> Any:
        h = torch.tanh(self.linear(packet.h))
        return Pair(h, packet.total + h.sum(1, keepdim=True))


@dataclass
class Packet:
    h: Tensor
    total: Tensor
    depth: int = 0


class TakesDataclass(TakesDict):
    def pack(self, x: Tensor) -> Any:
        return Packet(x, x.sum(1, keepdim=True))

    def unpack(self, packet: Any) -> Tensor:
        return packet.h * packet.total / packet.depth

    def forward(self, packet: Any) -> Any:
        h = torch.tanh(self.linear(packet.h))
        return Packet(h, packet.total + h.sum(1, keepdim=True), packet.depth + 1)


class OfNoKnownForm:
    def __init__(self, h: Tensor, total: Tensor) -> None:
        self.h, self.total = h, total


class TakesObject(TakesNamedTuple):
    """An object that nothing is known of."""

    def pack(self, x: Tensor) -> Any:
        return OfNoKnownForm(x, x.sum(1, keepdim=True))

    def forward(self, packet: Any) -> Any:
        h = torch.tanh(self.linear(packet.h))
        return OfNoKnownForm(h, packet.total + h.sum(1, keepdim=True))


class WritesObject(TakesObject):
    """The object comes back, changed."""

    def forward(self, packet: Any) -> Any:
        packet.h = torch.tanh(self.linear(packet.h))
        packet.total = packet.total + packet.h.sum(1, keepdim=True)
        return packet


class WritesDict(TakesDict):
    def forward(self, packet: Any) -> Any:
        packet["h"] = torch.tanh(self.linear(packet["h"]))
        packet["sum"] = packet["sum"] + packet["h"].sum(1, keepdim=True)
        return packet


for form, result in {
    TakesDict: "equal",
    TakesList: "equal",
    TakesNamedTuple: "equal",
    TakesDataclass: "equal",
    TakesObject: "refused",
    WritesObject: "refused",
    WritesDict: "equal",
}.items():

    def build(form: type[TakesDict] = form) -> nn.Module:
        return Formed(form(), form())

    build.__name__ = form.__name__
    add(result, ways=SPLIT[1:])(build)


@add(
    batch=lambda seed: {**vectors(seed), "x": torch.randn(WIDTH, 6, generator=torch.Generator().manual_seed(seed)).t()},
    split=True,
    slow=True,
)
def inputs_that_are_not_contiguous() -> nn.Module:
    return Net(Block(), Block())


@add(batch=lambda seed: {**vectors(seed), "x": vectors(seed)["x"][:1].expand(NUM_SAMPLES, -1)}, split=True)
def inputs_that_are_expanded() -> nn.Module:
    return Net(Block(), Block())


@add(batch=lambda seed: {**vectors(seed), "x": vectors(seed)["x"].repeat(1, 2)[:, ::2]}, split=True, slow=True)
def inputs_with_strides() -> nn.Module:
    return Net(Block(), Block())


class Casts(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        return super().forward(x.float(), labels.float())


@add(batch=lambda seed: {name: value.double() for name, value in vectors(seed).items()}, split=True)
def inputs_of_double_precision() -> nn.Module:
    return Casts(Block(), Block())


@add(batch=lambda seed: {name: (4 * value).long() for name, value in vectors(seed).items()}, split=True, slow=True)
def inputs_of_integers() -> nn.Module:
    return Casts(Block(), Block())


class Integers(Block):
    """Counts travel beside the values, through all blocks."""

    def forward(self, x: Tensor, counts: Tensor) -> Any:
        return x + torch.tanh(self.linear(x)) / (counts.unsqueeze(1) + 1), counts + 1, counts > 2


class CountsThrough(Formed):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        counts, large = torch.arange(len(x)) % 3, None
        for block in self.blocks:
            x, counts, large = block(x, counts)
        prediction = self.head(x)
        return {"loss": mean_square(prediction, labels), "counts": counts, "large": large}


@add(split=True)
def integers_and_truths_between_blocks() -> nn.Module:
    return CountsThrough(Integers(), Integers(), Integers())


class NormShared(Block):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h)


@add(split=True, slow=True)
def a_norm_shared_by_blocks() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    return Net(NormShared(norm), NormShared(norm), Block())


@add()
def a_batch_norm_shared_by_blocks() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, eps=0.1)
    return Net(NormShared(norm), NormShared(norm), Block())


@add(split=True)
def a_block_called_twice() -> nn.Module:
    block = Block()
    return Net(block, Block(), block)


class WithGradientOfInputs:
    """Adversarial training: the inputs' gradient is part of the result."""

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
        x = batch["x"].clone().requires_grad_()
        output = model(x=x, labels=batch["labels"])
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        return {**output, "gradient": x.grad}


@add(step=WithGradientOfInputs(), ways=(Way(2, room=1.3), Way(4, tight=False)))  # the example needs no such gradient
def gradients_of_inputs() -> nn.Module:
    return Net(Block(), Block())


class Twice(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * other.detach()


class GivesOneTwice(Formed):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, x)
        prediction = self.head(x)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(split=True)
def one_tensor_given_twice() -> nn.Module:
    return GivesOneTwice(Twice(), Twice())


class ReturnsItsInput(Block):
    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x)), x, None


@add()
def inputs_and_nothing_come_back() -> nn.Module:
    return ReportsMeans(ReturnsItsInput(), ReturnsItsInput())


class ReportsMeans(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        h, sums = self.first(x), 0.0
        for block in self.blocks:
            h, before, nothing = block(h)
            assert nothing is None
            sums = sums + before.square().mean()
        prediction = self.head(h)
        return {"loss": mean_square(prediction, labels) + 0.1 * sums, "prediction": prediction}


class OfSeveralSizes(Formed):
    """A list of tensors with a length each, as images of several sizes."""

    def forward(self, parts: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        rows = []
        for part in parts:
            for block in self.blocks:
                part = block(part)
            rows.append(part.mean(0))
        prediction = self.head(torch.stack(rows))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


def several_sizes(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(3 + number % 3, WIDTH, generator=generator) for number in range(4)]
    return {"parts": parts, "labels": torch.randn(4, CLASSES, generator=generator)}


@add("refused", batch=several_sizes)
def a_list_of_several_sizes() -> nn.Module:
    return OfSeveralSizes(Block(), Block())


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_what_a_model_is_given(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_what_a_model_is_given_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
