"""What an example hardly shows: faint, gated or late couplings, alike samples, changes after wrapping, other loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal_or_refused import (
    NUM_SAMPLES,
    NUM_TOKENS,
    ROOMY,
    WHOLE,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    call,
    check,
    mean_square,
    one_step,
    sequences,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CASES = Cases()
add = CASES.add


class Centred(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Normed(Block):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h)


# --- weights that hide it at first ---


@add()
class GateOfZero(Block):
    """Samples meet behind a gate that is closed at first and opens in training."""

    def make(self) -> None:
        self.gate = nn.Parameter(torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return h + self.gate * (h - h.mean(0))


@add(slow=True)
class LastWeightOfZero(Block):
    def make(self) -> None:
        self.last = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def mix(self, h: Tensor) -> Tensor:
        return self.last(h - h.mean(0))


@add()
class AdapterOfZero(Block):
    """As LoRA: the second of two small matrices is zero."""

    def make(self) -> None:
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / 3)
        self.up = nn.Parameter(torch.zeros(2, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return h + (h / h.abs().max()) @ self.down @ self.up


class SwitchedByWeight(Block):
    """Above a threshold that a weight crosses in training."""

    def make(self) -> None:
        self.gate = nn.Parameter(torch.tensor(0.001))

    def mix(self, h: Tensor) -> Tensor:
        return h * (1 + self.gate) if float(self.gate.detach()) > 0 else h - h.mean(0)


@add(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5), slow=True)
def samples_meet_when_a_weight_has_changed_its_sign() -> nn.Module:
    return Net(SwitchedByWeight(), SwitchedByWeight())


@add()
class Faint(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 1e-3 * h.mean(0)


@add(slow=True)
class Fainter(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 1e-4 * h.sum(0)


@add(slow=True)
class BesideAHugeFeature(Block):
    """Next to values of a million, a mean that is subtracted is no more than rounding, as norms go."""

    def mix(self, h: Tensor) -> Tensor:
        huge = torch.zeros(WIDTH).index_fill(0, torch.tensor([0]), 1e6)
        return ((h - h.mean(0)) + huge) / torch.ones(WIDTH).index_fill(0, torch.tensor([0]), 1e6)


class ReturnsHuge(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return torch.cat([x + h - h.mean(0), torch.full_like(x[:, :1], 1e7)], 1)[:, : WIDTH + 1]


class Narrows(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)[:, :WIDTH]
        prediction = self.head(h)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add()
def a_huge_feature_is_returned() -> nn.Module:
    return Narrows(ReturnsHuge(), ReturnsHuge())


@add()
class BesideInfinity(Block):
    """Masked scores come back too."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        scores = h.detach().masked_fill(h.detach() > 0, float("-inf"))
        return x + h - h.mean(0), scores


@add()
class Majority(Block):
    """The vote of all samples: a small change of one changes nothing."""

    def mix(self, h: Tensor) -> Tensor:
        return h + 0.3 * torch.sign(torch.sign(h.detach()).sum(0) + 0.5)


@add()
class UnderDropout(Block):
    """Among noise: run unsplit, its noise is that of plain PyTorch."""

    def make(self) -> None:
        self.dropout = nn.Dropout(0.3)

    def mix(self, h: Tensor) -> Tensor:
        h = self.dropout(h)
        return h - h.mean(0)


# --- examples that hide it ---


def alike(seed: int) -> dict[str, Tensor]:
    batch = vectors(seed)
    return batch if seed else {name: value[:1].expand(NUM_SAMPLES, -1).clone() for name, value in batch.items()}


@add(batch=alike)
def samples_meet_and_are_alike_in_the_example() -> nn.Module:
    return Net(Centred(), Centred())


def zeros_at_first(seed: int) -> dict[str, Tensor]:
    return vectors(seed) if seed else {name: torch.zeros_like(value) for name, value in vectors(0).items()}


@add(batch=zeros_at_first)
def samples_meet_and_are_zero_in_the_example() -> nn.Module:
    return Net(Centred(), Centred())


class Scaled(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h / (1 + h.abs().max())


@add(batch=zeros_at_first, slow=True)
def all_zeros_scaled_by_the_largest() -> nn.Module:
    return Net(Scaled(), Scaled())


@add(batch=zeros_at_first, split=True)
def clean_with_an_example_of_zeros() -> nn.Module:
    return Net(Block(), Block())


class DividesByMask(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x)) * mask.unsqueeze(-1)
        return x + h / mask.mean()


def mask_of_ones_at_first(seed: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, NUM_TOKENS + 1, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(NUM_TOKENS) < lengths.unsqueeze(1)).float()
    return {**sequences(seed), "mask": mask if seed else torch.ones_like(mask)}


@add(batch=mask_of_ones_at_first)
def a_mask_that_is_all_ones_in_the_example() -> nn.Module:
    return Net(DividesByMask(), DividesByMask())


class CutToLongest(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = int(mask.sum(1).max())
        h = torch.tanh(self.linear(x[:, :length]))
        return x + F.pad(h + h.mean(1, keepdim=True), (0, 0, 0, x.shape[1] - length))


@add(batch=mask_of_ones_at_first, slow=True)
def sequences_that_are_all_long_in_the_example() -> nn.Module:
    return Net(CutToLongest(), CutToLongest())


class Frequent(Block):
    """How often an id is in the batch: samples meet in integers."""

    def make(self) -> None:
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=9)
        return x + torch.tanh(self.linear(x)) + self.table(ids) / counts[ids].unsqueeze(-1)


def with_ids(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 9, (NUM_SAMPLES, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))
    return {**sequences(seed), "ids": ids}


@add(batch=with_ids)
def frequencies_of_ids() -> nn.Module:
    return Net(Frequent(), Frequent())


class MeanOfContext(Block):
    """Only what has no gradient meets."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * context.mean(0)


@add(batch=lambda seed: {**vectors(seed), "context": vectors(seed + 50)["x"]})
def samples_meet_in_a_context() -> nn.Module:
    return Net(MeanOfContext(), MeanOfContext())


class AnyIsLarge(Block):
    def mix(self, h: Tensor) -> Tensor:
        return 0.5 * h if bool((h.detach() > 0.98).any()) else h


@add(batch=lambda seed: {**vectors(seed), "x": vectors(seed)["x"] * (3.0 if seed else 0.1)})
def one_large_value_changes_all() -> nn.Module:
    return Net(AnyIsLarge(), AnyIsLarge())


class HeadWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(h).flatten(0, -2), labels.flatten())


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = HeadWithLoss()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(x, labels)}


def without_some_labels(seed: int) -> dict[str, Tensor]:
    labels = sequences(seed)["labels"].argmax(-1)
    if seed:
        labels[:4] = -100  # a part of the batch without any label
        labels[4, :2] = -100
    return {"x": sequences(seed)["x"], "labels": labels}


@add(batch=without_some_labels)
def samples_without_labels() -> nn.Module:
    return LossInside()


# --- rows that belong together ---


@add(ways=(Way(1), Way(4, tight=False)))
class PairsOfRows(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h.view(-1, 2, WIDTH).flip(1).reshape(-1, WIDTH)


@add(ways=(Way(1), Way(3, tight=False)))
class EvenAndOdd(Block):
    def mix(self, h: Tensor) -> Tensor:
        return torch.stack([h[0::2] + h[1::2], h[0::2] - h[1::2]], 1).flatten(0, 1) if len(h) % 2 == 0 else h


@add(batch=sequences, ways=(Way(1), Way(2)))
class Squeezed(Block):
    """With one sample a dimension less: another one is averaged then."""

    def mix(self, h: Tensor) -> Tensor:
        weights = torch.softmax(h.mean(-1).squeeze(), 0 if len(h) == 1 else 1)
        return h * weights.reshape(len(h), -1, 1)


@add(split=True)
class SortedAndBack(Block):
    """In another order for a moment; no sample sees another."""

    def mix(self, h: Tensor) -> Tensor:
        order = h.detach().sum(1).argsort()
        return torch.relu(h[order])[order.argsort()]


class ReturnsColumns(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, (h.t() * torch.arange(WIDTH).unsqueeze(1)).square()


@add(ways=ROOMY)
def samples_are_the_columns_of_an_output() -> nn.Module:
    return Net(ReturnsColumns(), ReturnsColumns())


class ReturnsGram(Block):
    """Features by features, as many as there are samples."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h.T @ h * torch.arange(WIDTH)


@add(batch=lambda seed: vectors(seed, num_samples=WIDTH))
def a_matrix_of_features_with_as_many_rows_as_samples() -> nn.Module:
    return Net(ReturnsGram(), ReturnsGram())


class ReturnsTable(Block):
    def make(self) -> None:
        self.table = nn.Parameter(torch.randn(NUM_SAMPLES, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x)), self.table * 2


@add(ways=ROOMY)
def a_table_with_as_many_rows_as_samples_is_returned() -> nn.Module:
    return Net(ReturnsTable(), ReturnsTable())


class Keeps(Block):
    def mix(self, h: Tensor) -> Tensor:
        self.kept = h.detach()
        return h


class ReadsKept(Block):
    """As a decoder that finds its encoder's output in an attribute."""

    def __init__(self, other: Keeps) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def mix(self, h: Tensor) -> Tensor:
        return h - self.__dict__["other"].kept.mean(0)


class ReadsKeptRows(ReadsKept):
    def mix(self, h: Tensor) -> Tensor:
        return h * self.__dict__["other"].kept[: len(h)]


@add(ways=ROOMY)
def a_block_reads_the_mean_of_what_another_has_kept() -> nn.Module:
    kept = Keeps()
    return Net(kept, ReadsKept(kept))


@add(ways=ROOMY, slow=True)
def a_block_reads_rows_that_another_has_kept() -> nn.Module:
    kept = Keeps()
    return Net(kept, ReadsKeptRows(kept))


# --- after wrapping ---


@add(prepare=lambda model: model.eval(), after_wrap=lambda model: model.train(), ways=ROOMY)
def samples_meet_in_training_and_it_is_wrapped_in_evaluation() -> nn.Module:
    class InTraining(Block):
        def mix(self, h: Tensor) -> Tensor:
            return h - h.mean(0) if self.training else h

    return Net(InTraining(), InTraining())


@add()
class AfterSomeSteps(Block):
    def make(self) -> None:
        self.steps = 0

    def mix(self, h: Tensor) -> Tensor:
        self.steps += self.training
        return h - h.mean(0) if self.steps > 1 else h


def minus_mean(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0)


@add(after_wrap=lambda model: model.blocks[1].register_forward_hook(minus_mean), slow=True, ways=ROOMY)
def hook_of_a_block_after_wrapping() -> nn.Module:
    return Net(Block(), Block())


@add(after_wrap=lambda model: model.blocks[1].linear.register_forward_hook(minus_mean), ways=ROOMY)
def hook_inside_a_block_after_wrapping() -> nn.Module:
    return Net(Block(), Block())


def switch(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.centre = True


class Switched(Block):
    def make(self) -> None:
        self.centre = False

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.centre else h


@add(after_wrap=switch, ways=ROOMY)
def an_attribute_is_switched_after_wrapping() -> nn.Module:
    return Net(Switched(), Switched())


class Centring(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Active(Block):
    def make(self) -> None:
        self.active: nn.Module = nn.Tanh()

    def mix(self, h: Tensor) -> Tensor:
        return self.active(h)


def exchange(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.active = Centring()


@add(after_wrap=exchange, ways=ROOMY)
def a_module_is_exchanged_after_wrapping() -> nn.Module:
    return Net(Active(), Active())


# --- unusual loops ---


def two_forwards(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    """As of a critic: real and invented, then one backward."""
    real, invented = call(model, batch), call(model, vectors(70 + index))
    loss = real["loss"] - 0.3 * invented["prediction"].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "real": real, "invented": invented}


@add(step=two_forwards, ways=(Way(2, tight=False),))
def two_forwards_before_one_backward() -> nn.Module:
    return Net(Block(), Block())


@add(step=two_forwards, ways=(Way(2, tight=False),), slow=True)
def two_forwards_with_statistics() -> nn.Module:
    return Net(Normed(), Normed())


def thrown_away(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    before = call(model, vectors(70 + index))["prediction"].detach().clone()
    return {**one_step(model, optimizer, batch, index), "before": before}


@add(step=thrown_away, ways=(Way(2, tight=False),))
def a_forward_that_is_thrown_away() -> nn.Module:
    return Net(Normed(), Normed())


def accumulated(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    for part in (vectors(70 + index), vectors(80 + index, num_samples=4)):
        (call(model, part)["loss"] / 3).backward()
    return one_step(model, optimizer, batch, index)


@add(step=accumulated, ways=(Way(2, room=1.3),))
def gradients_of_several_batches() -> nn.Module:
    return Net(Normed(), Normed())


def half_of_the_outputs(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    output = call(model, batch)
    loss = output["prediction"][: 2 + index].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss}


@add(step=half_of_the_outputs)
def loss_of_some_samples() -> nn.Module:
    return Net(Centred(), Block())


def penalised(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    """The slope at the inputs is part of the loss: a backward through a backward."""
    x = batch["x"].clone().requires_grad_()
    output = model(x=x, labels=batch["labels"])
    slope = torch.autograd.grad(output["prediction"].sum(), x, create_graph=True)[0]
    loss = output["loss"] + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss}


@add("refused", step=penalised, ways=(Way(2, room=1.5), Way(NUM_SAMPLES, tight=False)))
def penalty_of_the_slope() -> nn.Module:
    return Net(Block(), Block())


def backward_twice(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    output = call(model, batch)
    output["loss"].backward(retain_graph=True)
    output["prediction"].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


@add("refused", step=backward_twice, ways=(Way(2, room=1.5), Way(NUM_SAMPLES, tight=False)))
def two_backwards_of_one_forward() -> nn.Module:
    return Net(Block(), Block())


def frozen_first(model: nn.Module) -> None:
    for param in model.blocks[0].parameters():  # type: ignore[union-attr,index]
        param.requires_grad_(False)
    for param in model.first.parameters():  # type: ignore[union-attr]
        param.requires_grad_(False)


@add(prepare=frozen_first)
def frozen_blocks_still_keep_statistics() -> nn.Module:
    return Net(Normed(), Normed())


class Counting(Net):
    """The model's own state, and a norm without weights of its own between blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.steps = 0

    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        self.steps += self.training
        h = self.norm(self.first(x))
        for block in self.blocks:
            h = block(h) / self.steps
        prediction = self.head(h)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
def state_of_the_model_itself() -> nn.Module:
    return Counting(Block(), Block())


class Checkpointed(Block):
    """Recomputes by itself."""

    def mix(self, h: Tensor) -> Tensor:
        return checkpoint(lambda values: torch.relu(values) * 2, h, use_reentrant=False)


@add(split=True, slow=True)
def blocks_that_recompute_by_themselves() -> nn.Module:
    return Net(Checkpointed(), Checkpointed())


class CheckpointedDropout(Block):
    def mix(self, h: Tensor) -> Tensor:
        return checkpoint(lambda values: F.dropout(values, 0.3, self.training), h, use_reentrant=False)


@add(ways=WHOLE)
def blocks_that_recompute_dropout_by_themselves() -> nn.Module:
    return Net(CheckpointedDropout(), CheckpointedDropout())


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_what_an_example_hides(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_what_an_example_hides_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
