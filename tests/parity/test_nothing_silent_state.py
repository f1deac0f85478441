"""Blocks with state that a forward changes: it is left as one plain forward would leave it, or refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from equal_or_refused import (
    CLASSES,
    NUM_SAMPLES,
    ROOMY,
    SPLIT,
    WHOLE,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    call,
    check,
    images,
    mean_square,
    one_step,
    sequences,
    vectors,
)
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm

CASES = Cases()
add = CASES.add


# --- statistics ---


@add()
class BatchNorm(Block):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h)


@add(slow=True)
class BatchNormOverAllSteps(Block):
    """Without momentum: the mean of all batches, so their number counts."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1, momentum=None)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h)


@add(batch=lambda seed: sequences(seed))
class InstanceNorm(Block):
    """Each sample by itself, but its statistics are kept."""

    def make(self) -> None:
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True, affine=True, eps=0.1)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 5, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(5, eps=0.1)
        self.conv2 = nn.Conv2d(5, 5, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(5, eps=0.1)
        self.shortcut = nn.Conv2d(channels, 5, 1, stride) if channels != 5 or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5, eps=0.1), nn.ReLU())
        self.stages = nn.Sequential(Residual(5), Residual(5, 2), Residual(5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(batch=images)
def resnet() -> nn.Module:
    return ResNet()


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@add(batch=images, after_wrap=freeze_norms, slow=True)
def resnet_with_norms_in_evaluation() -> nn.Module:
    return ResNet()


@add(batch=images, prepare=lambda model: model.eval(), after_wrap=lambda model: model.train(), ways=ROOMY, slow=True)
def resnet_wrapped_in_evaluation() -> nn.Module:
    return ResNet()


@add(prepare=lambda model: model.eval(), after_wrap=lambda model: model.train(), ways=WHOLE)
def dropout_wrapped_in_evaluation() -> nn.Module:
    return Net(Dropout(), Dropout())


@add(after_wrap=lambda model: model.blocks[1].eval(), slow=True)
def one_block_in_evaluation() -> nn.Module:
    return Net(BatchNorm(), BatchNorm(), BatchNorm())


def evaluated_between(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.eval()
    with torch.no_grad():
        before = call(model, vectors(50 + index, num_samples=4))
    model.train()
    output = one_step(model, optimizer, batch, index)
    model.eval()
    with torch.no_grad():
        after = call(model, vectors(60 + index))
    model.train()
    return {"loss": output["loss"], "before": before, "after": after, "training": output}


@add(step=evaluated_between)
def batch_norm_evaluated_between() -> nn.Module:
    return Net(BatchNorm(), BatchNorm(), BatchNorm())


def looked_at_in_training(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    """A forward in training mode without a gradient: statistics move in plain PyTorch too."""
    with torch.no_grad():
        before = call(model, vectors(50 + index))
    return one_step(model, optimizer, batch, index) | {"before": before}


@add(step=looked_at_in_training, slow=True)
def batch_norm_calibrated_between() -> nn.Module:
    return Net(BatchNorm(), BatchNorm())


def in_evaluation(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    """Fine-tuning with all norms fixed: gradients in evaluation mode."""
    model.eval()
    return one_step(model, optimizer, batch, index)


@add(step=in_evaluation)
def batch_norm_trained_in_evaluation() -> nn.Module:
    return Net(BatchNorm(), BatchNorm())


def last_is_small(seed: int) -> dict[str, Tensor]:
    return vectors(seed, num_samples=1 if seed == 3 else NUM_SAMPLES)


@add(batch=last_is_small)
class ObservationNormaliser(Block):
    """Of reinforcement learning: running mean and variance by counts, then each sample by itself."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(1e-2))

    def mix(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                num = h.shape[0]
                delta, total = h.mean(0) - self.mean, self.count + num
                both = self.var * self.count + h.var(0, unbiased=False) * num + delta**2 * self.count * num / total
                self.mean += delta * num / total
                self.var = both / total
                self.count = total
        return (h - self.mean) / (self.var.sqrt() + 0.1)


@add(batch=last_is_small)
def last_batch_is_one_sample() -> nn.Module:
    return Net(Counted(), Averaged())


@add()
class Averaged(Block):
    """A moving average that is not used in training."""

    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(h.detach().mean(0), 0.1)
        return h if self.training else h - self.average


@add(slow=True)
class AveragedNotSaved(Block):
    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)

    def mix(self, h: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h - self.average


@add()
class LargestSoFar(Block):
    def make(self) -> None:
        self.register_buffer("largest", torch.tensor(0.1))

    def mix(self, h: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, h.detach().abs().max()))
        return h / self.largest


@add()
class SumOfSamples(Block):
    """Adds up over micro-batches by itself; replays must not add."""

    def make(self) -> None:
        self.register_buffer("total", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        self.total += h.detach().sum(0)
        return h


@add(slow=True)
class OldSpectralNorm(Block):
    def make(self) -> None:
        self.linear = spectral_norm(self.linear)


@add()
class SpectralNorm(Block):
    def make(self) -> None:
        self.linear = parametrizations.spectral_norm(self.linear)


@add(split=True)
class WeightNorm(Block):
    def make(self) -> None:
        self.linear = parametrizations.weight_norm(self.linear)


@add(split=True, slow=True)
class OldWeightNorm(Block):
    def make(self) -> None:
        self.linear = nn.utils.weight_norm(self.linear)


@add()
def old_norms_on_layers_themselves() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return Net(spectral_norm(layers[0]), layers[1], prune.identity(layers[2], "weight"))


@add()
class StandardisedWeight(Block):
    """With running statistics of the weight."""

    def make(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * self.linear.weight.detach().std())
        return x + F.linear(x, self.linear.weight / self.scale, self.linear.bias)


@add()
class Codebook(Block):
    """Vector quantisation; codes move toward the samples that chose them."""

    def make(self) -> None:
        self.register_buffer("codes", torch.randn(5, WIDTH) / 3)
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        chosen = F.one_hot(torch.cdist(h.detach(), self.codes).argmin(1), 5).float()
        quantised = chosen @ self.codes
        if self.training:
            self.sizes.mul_(0.8).add_(0.2 * chosen.sum(0))
            self.sums.mul_(0.8).add_(0.2 * chosen.T @ h.detach())
            self.codes.copy_(self.sums / (self.sizes.unsqueeze(1) + 1e-3))
        return x + h + (quantised - h).detach(), F.mse_loss(h, quantised)


@add(slow=True)
class RestartedCodes(Codebook):
    """Codes that nobody chose are replaced by samples drawn at random."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        if self.training:
            unused = self.sizes < 0.9
            self.codes[unused] = torch.tanh(self.linear(x)).detach()[torch.randint(len(x), (int(unused.sum()),))]
        return result


class Observed(FakeQuantize):
    def __init__(self) -> None:
        super().__init__(MovingAverageMinMaxObserver, 0, 255, dtype=torch.quint8, qscheme=torch.per_tensor_affine)


@add()
class FakeQuantised(Block):
    def make(self) -> None:
        self.quantise = Observed()

    def mix(self, h: Tensor) -> Tensor:
        return self.quantise(h)


@add(slow=True)
class OnlyObserved(Block):
    def make(self) -> None:
        self.observer = MovingAverageMinMaxObserver()

    def mix(self, h: Tensor) -> Tensor:
        return self.observer(h)


@add()
class Queue(Block):
    """Of keys of earlier batches, with a pointer, as in momentum contrast."""

    def make(self) -> None:
        self.register_buffer("queue", torch.randn(11, WIDTH) / 3)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        loss = torch.logsumexp(h @ self.queue.clone().T, 1).mean()
        if self.training:
            places = (self.pointer + torch.arange(len(h))) % 11
            self.queue[places] = h.detach()
            self.pointer.copy_((self.pointer + len(h)) % 11)
        return x + h, loss


@add()
class MovingTarget(Block):
    """An encoder that follows this one, inside of forward; its weights are buffers."""

    def make(self) -> None:
        self.register_buffer("target", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.target.lerp_(self.linear.weight.detach(), 0.1)
        h = self.linear(x)
        return x + torch.tanh(h), (h - F.linear(x, self.target)).square().mean()


# --- numbers and objects ---


@add()
class Counted(Block):
    def make(self) -> None:
        self.calls = 0

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


@add()
class CountedInATensor(Block):
    def make(self) -> None:
        self.calls = torch.zeros((), dtype=torch.long)

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


@add(slow=True)
class CountedInABuffer(Block):
    def make(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


@add(ways=ROOMY)
class SamplesCounted(Block):
    def make(self) -> None:
        self.samples = 0

    def mix(self, h: Tensor) -> Tensor:
        self.samples += len(h)
        return h


class Holder:
    def __init__(self) -> None:
        self.calls = 0


@add()
class CountedInAnObject(Block):
    """Where it shows only in the result: the object is not a number."""

    def make(self) -> None:
        self.holder = Holder()

    def mix(self, h: Tensor) -> Tensor:
        self.holder.calls += 1
        return h / self.holder.calls


@add("refused")
class CountedByAnIterator(Block):
    def make(self) -> None:
        self.numbers = itertools.count(1)

    def mix(self, h: Tensor) -> Tensor:
        return h / next(self.numbers)


@add("refused", slow=True)
class CountedByAGenerator(Block):
    def make(self) -> None:
        self.numbers = (1 / number for number in range(1, 1000))

    def mix(self, h: Tensor) -> Tensor:
        return h * next(self.numbers)


class CountedInItsClass(Block):
    calls = 0

    def mix(self, h: Tensor) -> Tensor:
        CountedInItsClass.calls += 1
        return h / CountedInItsClass.calls


@add("refused")
def counted_in_a_class() -> nn.Module:
    CountedInItsClass.calls = 0
    return Net(CountedInItsClass(), CountedInItsClass())


COUNT: list[int] = []


class CountedGlobally(Block):
    def mix(self, h: Tensor) -> Tensor:
        COUNT.append(len(h))
        return h / len(COUNT)


@add("refused")
def counted_in_a_global() -> nn.Module:
    COUNT.clear()
    return Net(CountedGlobally(), CountedGlobally())


@add()
def counted_in_a_closure() -> nn.Module:
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output / calls

    blocks = [Block(), Block()]
    for block in blocks:
        block.linear.register_forward_hook(hook)
    return Net(*blocks)


@add("refused")
def counted_in_the_model() -> nn.Module:
    """Each block holds the model's own counter."""
    shared = Counter()

    class Sharing(Block):
        def mix(self, h: Tensor) -> Tensor:
            shared["calls"] += 1
            return h / shared["calls"]

    return Net(Sharing(), Sharing())


@add()
class Growing(Block):
    def make(self) -> None:
        self.norms: list[float] = []

    def mix(self, h: Tensor) -> Tensor:
        self.norms.append(float(h.detach().norm()))
        return h


@add()
class GrowingTensors(Block):
    def make(self) -> None:
        self.means: deque[Tensor] = deque(maxlen=5)

    def mix(self, h: Tensor) -> Tensor:
        self.means.append(h.detach().mean(0))
        return h - torch.stack(list(self.means)).mean(0)


@add()
class Remembered(Block):
    """Names with numbers, as for a log."""

    def make(self) -> None:
        self.log: dict[str, Any] = {"uses": Counter()}

    def mix(self, h: Tensor) -> Tensor:
        self.log["uses"].update(h.detach().argmax(1).tolist())
        self.log["last"] = float(h.detach().abs().max())
        return h


@add(slow=True)
class SeenSizes(Block):
    def make(self) -> None:
        self.sizes: set[int] = set()

    def mix(self, h: Tensor) -> Tensor:
        self.sizes.add(h.shape[0])
        return h


@add()
class Annealed(Block):
    """A temperature that falls from step to step."""

    def make(self) -> None:
        self.steps = 0

    def mix(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return torch.softmax(h * (1 + 0.3 * self.steps), -1)


@add()
class EverySecondTime(Block):
    def make(self) -> None:
        self.is_second = False

    def mix(self, h: Tensor) -> Tensor:
        self.is_second = not self.is_second
        return h if self.is_second else torch.relu(h)


@add()
class StartedByTheFirstBatch(Block):
    def make(self) -> None:
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.started = False

    def mix(self, h: Tensor) -> Tensor:
        if not self.started:
            self.shift.copy_(h.detach().mean(0))
            self.started = True
        return h - self.shift


@add(split=True)
class KeepsMadeBuffer(Block):
    """A buffer that there is only after the first call."""

    def mix(self, h: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        return h * self.table


def several_lengths(seed: int) -> dict[str, Tensor]:
    return sequences(seed, num_tokens=6 - seed % 3)


@add(batch=several_lengths, split=True)
class CachedByLength(Block):
    def make(self) -> None:
        self.cache: dict[int, Tensor] = {}

    def mix(self, h: Tensor) -> Tensor:
        length = h.shape[1]
        if length not in self.cache:
            self.cache[length] = torch.sin(torch.arange(length).float()).unsqueeze(1)
        return h + self.cache[length]


@add(batch=sequences, ways=SPLIT[1:])
class Stateful(Block):
    """An LSTM that goes on where the batch before ended."""

    def make(self) -> None:
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.state: tuple[Tensor, Tensor] | None = None

    def mix(self, h: Tensor) -> Tensor:
        known = self.state if self.state is not None and self.state[0].shape[1] == len(h) else None
        h, state = self.lstm(h, known)
        self.state = tuple(part.detach() for part in state)  # type: ignore[assignment]
        return h


@add(ways=ROOMY)
class Echo(Block):
    """Of the batch before, sample by sample."""

    def make(self) -> None:
        self.before: Tensor | None = None

    def mix(self, h: Tensor) -> Tensor:
        result = h if self.before is None or len(self.before) != len(h) else h + 0.5 * self.before
        self.before = h.detach().clone()
        return result


class KeepsOutput(Block):
    def mix(self, h: Tensor) -> Tensor:
        self.last_output = h
        return h


class LossOfKept(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        result = super().forward(x, labels)
        kept = [block.last_output for block in self.blocks]
        return {**result, "loss": result["loss"] + 0.1 * sum(part.square().mean() for part in kept)}


@add(split=True)
def loss_of_kept_outputs() -> nn.Module:
    return LossOfKept(KeepsOutput(), KeepsOutput())


class KeepsDetached(Block):
    def mix(self, h: Tensor) -> Tensor:
        self.last_output = h.detach()
        return h


@add(ways=ROOMY)
def report_of_kept_outputs() -> nn.Module:
    return LossOfKept(KeepsDetached(), KeepsDetached())


class KeepsLoss(Block):
    """As mixtures of experts keep the loss of their router, for the training loop to fetch."""

    def mix(self, h: Tensor) -> Tensor:
        self.last_output = h.square().mean()
        return h


@add()
def loss_of_kept_losses() -> nn.Module:
    return LossOfKept(KeepsLoss(), KeepsLoss())


class TakesNotes(Block):
    """Writes what it has seen into an object that the model hands around."""

    def forward(self, x: Tensor, notes: list[float]) -> Tensor:
        h = torch.tanh(self.linear(x))
        notes.append(float(h.detach().square().mean()))
        return x + h / len(notes)


class HandsAround(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        notes: list[float] = []
        for block in self.blocks:
            x = block(x, notes)
        prediction = self.head(x)
        return {"loss": mean_square(prediction, labels), "notes": notes}


@add("refused")
def notes_are_handed_around() -> nn.Module:
    return HandsAround(TakesNotes(), TakesNotes(), TakesNotes())


class KeepsLosses(Block):
    def forward(self, x: Tensor, notes: list[Any]) -> Tensor:
        h = torch.tanh(self.linear(x))
        notes.append(h.square().mean())
        return x + h


class LossOfNotes(HandsAround):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        result = super().forward(x, labels)
        return {"loss": result["loss"] + 0.1 * sum(result["notes"])}


@add("refused")
def losses_are_handed_around() -> nn.Module:
    return LossOfNotes(KeepsLosses(), KeepsLosses())


# --- in backward ---


@add()
class CountedInBackward(Block):
    """A hook on the gradient writes a buffer."""

    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls = 0

    def mix(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(self.note)
        return h

    def note(self, grad: Tensor) -> None:
        self.calls += 1
        self.average.lerp_(grad.mean(0), 0.5)


@add(ways=ROOMY)
class SlopeInForward(Block):
    """A penalty of the gradient, with its own autograd inside."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            slope = torch.autograd.grad(torch.tanh(self.linear(own)).sum(), own, create_graph=True)[0]
        return x + h, slope.square().mean()


# --- random numbers ---


@add(ways=WHOLE)
class Dropout(Block):
    def make(self) -> None:
        self.dropout = nn.Dropout(0.3)

    def mix(self, h: Tensor) -> Tensor:
        return self.dropout(h)


@add(ways=WHOLE)
class DropPath(Block):
    """By sample."""

    def mix(self, h: Tensor) -> Tensor:
        return h * torch.bernoulli(torch.full((len(h), 1), 0.7)) / 0.7 if self.training else h


@add()
class DropPathOfTheBatch(Block):
    """One draw for all samples: micro-batches must not draw each for itself."""

    def mix(self, h: Tensor) -> Tensor:
        return h if not self.training or torch.rand(()) < 0.5 else torch.zeros_like(h)


@add(ways=WHOLE)
class GumbelSoftmax(Block):
    def mix(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(h, hard=True)


@add(ways=WHOLE)
class LeakyAtRandom(Block):
    def mix(self, h: Tensor) -> Tensor:
        return F.rrelu(h, training=self.training)


@add(ways=WHOLE)
class Noisy(Block):
    def make(self) -> None:
        self.strength = nn.Parameter(torch.full((WIDTH,), 0.1))

    def mix(self, h: Tensor) -> Tensor:
        return h + self.strength * torch.randn_like(h)


class NoiseInOrderOfMemory(nn.Module):
    """randn_like fills memory in its order, which a transposed tensor keeps: strides of inputs count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * torch.randn_like(x)
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


@add(batch=sequences, ways=WHOLE)
def noise_in_order_of_memory() -> nn.Module:
    return Net(*(NoiseInOrderOfMemory() for _ in range(3)))


class DropoutInOrderOfMemory(NoiseInOrderOfMemory):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x, 0.3, self.training)
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


@add(batch=sequences, ways=WHOLE)
def dropout_in_order_of_memory() -> nn.Module:
    return Net(*(DropoutInOrderOfMemory() for _ in range(3)))


@add(batch=sequences)
class ReadsStrides(Block):
    """Returns a tensor that lies in memory as its input does not."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return (x + h).transpose(0, 1).contiguous().transpose(0, 1), torch.as_strided(x, (3,), (1,)).sum().detach()


@add()
class SameNoiseForAll(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(WIDTH)


@add()
class LayerDrop(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


@add(slow=True)
class LayerDropByNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and np.random.rand() < 0.5 else super().forward(x)


@add()
class NoiseByNumpy(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.from_numpy(np.random.standard_normal(h.shape).astype(np.float32))


@add()
class OwnPythonGenerator(Block):
    def make(self) -> None:
        self.random = random.Random(5)

    def mix(self, h: Tensor) -> Tensor:
        return h * self.random.uniform(0.5, 1.5)


@add()
class OwnNumpyGenerator(Block):
    def make(self) -> None:
        self.random = np.random.default_rng(5)

    def mix(self, h: Tensor) -> Tensor:
        return h * float(self.random.uniform(0.5, 1.5))


@add(slow=True)
class OwnOldNumpyGenerator(Block):
    def make(self) -> None:
        self.random = np.random.RandomState(5)

    def mix(self, h: Tensor) -> Tensor:
        return h * float(self.random.uniform(0.5, 1.5))


@add(ways=WHOLE)
class OwnTorchGenerator(Block):
    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def mix(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(h.shape, generator=self.generator)


@add()
class OwnTorchGeneratorForAll(Block):
    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def mix(self, h: Tensor) -> Tensor:
        return h * torch.rand((), generator=self.generator)


@add()
class SeedsItself(Block):
    """Sets torch's seed in forward: what follows is not random in plain PyTorch either."""

    def mix(self, h: Tensor) -> Tensor:
        torch.manual_seed(11)
        return h * torch.rand(WIDTH)


@add()
class ScheduledSampling(Block):
    """How often is decided by Python, and grows by its own counter."""

    def make(self) -> None:
        self.steps = 0

    def mix(self, h: Tensor) -> Tensor:
        self.steps += 1
        return torch.relu(h) if random.random() < 0.2 * self.steps else h


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_state_of_blocks(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_state_of_blocks_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
