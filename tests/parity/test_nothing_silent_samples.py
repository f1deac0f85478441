"""Blocks in which samples meet, in values, in gradients, in what is returned beside: equal to plain, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal_or_refused import (
    CLASSES,
    ROOMY,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    check,
    images,
    mean_square,
    sequences,
    unsplit,
    vectors,
)
from harness import make_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

import hightide

CASES = Cases()
add = CASES.add


def eight(seed: int) -> dict[str, Tensor]:
    return vectors(seed, num_samples=8)


# --- samples meet in values ---


@add()
class Centred(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@add(slow=True)
class Standardised(Block):
    def mix(self, h: Tensor) -> Tensor:
        return (h - h.mean(0)) / (h.std(0) + 0.1)


@add(batch=eight)
class DeviationOfGroups(Block):
    """As the discriminator of StyleGAN: in groups of up to four samples."""

    def make(self) -> None:
        self.narrow = nn.Linear(WIDTH + 1, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        groups = h.reshape(min(4, len(h)), -1, WIDTH)
        deviation = (groups.var(0, unbiased=False) + 1e-4).sqrt().mean(1, keepdim=True)
        return self.narrow(torch.cat([h, deviation.repeat(len(groups), 1)], 1))


@add()
class AttentionOverSamples(Block):
    def mix(self, h: Tensor) -> Tensor:
        return torch.softmax(h @ h.T, dim=1) @ h


@add(batch=sequences)
class AttentionOverAllTokens(Block):
    def mix(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(flat, flat, flat).view_as(h)


@add()
class FunctionalBatchNorm(Block):
    def mix(self, h: Tensor) -> Tensor:
        return F.batch_norm(h, None, None, training=True, eps=0.1)


@add(slow=True)
class BatchNormWithoutStatistics(Block):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False, eps=0.1)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h)


@add()
class LargestIsOne(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h / h.abs().max()


@add(slow=True)
class MedianIsOne(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h / (1 + h.abs().median())


@add(slow=True)
class ClippedToQuantile(Block):
    def mix(self, h: Tensor) -> Tensor:
        return torch.minimum(h, torch.quantile(h.detach(), 0.8))


@add()
class RangeOfIntegers(Block):
    """Quantised with a scale of the whole tensor; the gradient goes straight through."""

    def mix(self, h: Tensor) -> Tensor:
        scale = h.detach().abs().max() / 7
        return h + ((h / scale).round() * scale - h).detach()


@add(ways=ROOMY)
class OnlyInLargeBatches(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if h.shape[0] > 4 else h


@add()
class OnlyIfTheMeanIsPositive(Block):
    def mix(self, h: Tensor) -> Tensor:
        return 2 * h if float(h.detach().mean()) > 0 else h


@add()
class Experts(Block):
    """Two experts that take three samples each and drop the rest."""

    def make(self) -> None:
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))

    def mix(self, h: Tensor) -> Tensor:
        weights = torch.softmax(self.router(h), 1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mine = weights.argmax(1) == number
            kept = mine & (mine.cumsum(0) <= max(1, len(h) // 2))
            mixed = mixed + (h @ expert) * (weights[:, number] * kept).unsqueeze(1)
        return mixed


@add()
class ExpertsChoose(Block):
    """Each of two experts takes its best two samples of all."""

    def make(self) -> None:
        self.router = nn.Linear(WIDTH, 2)

    def mix(self, h: Tensor) -> Tensor:
        scores = torch.softmax(self.router(h), 0)
        mixed = h
        for number in range(2):
            best = scores[:, number].topk(min(2, len(h))).indices
            mixed = mixed.index_add(0, best, h[best] * scores[best, number].unsqueeze(1))
        return mixed


def large_later(seed: int) -> dict[str, Tensor]:
    batch = vectors(seed)
    return {"x": batch["x"] * (0.02 if seed == 0 else 3.0), "labels": batch["labels"]}


class LimitedToOne(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return x + h / h.detach().abs().max().clamp(min=1.0)


@add(batch=lambda seed: {"x": 3 * vectors(seed)["x"], "labels": vectors(seed)["labels"]})
def largest_counts_if_large() -> nn.Module:
    return Net(LimitedToOne(), LimitedToOne())


@add(batch=large_later)
def largest_counts_only_later() -> nn.Module:
    """In the example all values are small, and no sample has a say in another's result."""
    return Net(LimitedToOne(), LimitedToOne())


@add()
class Permuted(Block):
    """Mixup of hidden states."""

    def mix(self, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))]


@add()
class PlaceInTheBatch(Block):
    def make(self) -> None:
        self.places = nn.Embedding(16, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + self.places(torch.arange(h.shape[0]))


@add(slow=True)
class PlaceInTheBatchAsTensor(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * torch.linspace(0.5, 1.5, h.shape[0]).unsqueeze(1)


@add()
def hook_inside_subtracts_the_mean() -> nn.Module:
    blocks = [Block(), Block()]
    for block in blocks:
        block.linear.register_forward_hook(lambda _, args, output: output - output.mean(0))
    return Net(*blocks)


@add()
def hook_of_a_block_subtracts_the_mean() -> nn.Module:
    blocks = [Block(), Block()]
    for block in blocks:
        block.register_forward_hook(lambda _, args, output: output - output.mean(0))
    return Net(*blocks)


@add(slow=True)
def hook_before_a_block_subtracts_the_mean() -> nn.Module:
    blocks = [Block(), Block()]
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0), *args[1:]))
    return Net(*blocks)


@add()
class FirstIsReference(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - 0.5 * h[0]


@add(slow=True)
class LastIsReference(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - 0.5 * h[-1:].detach()


@add(slow=True)
class Rolled(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 0.5 * h.roll(1, 0)


@add(slow=True)
class Flipped(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 0.5 * h.flip(0)


@add()
class Summed(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + 0.1 * h.cumsum(0)


@add()
class Ranked(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * (1 + h.detach().argsort(0).argsort(0).float())


@add()
class Whitened(Block):
    def mix(self, h: Tensor) -> Tensor:
        centred = h - h.mean(0)
        covariance = centred.T @ centred / len(h) + torch.eye(WIDTH)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.T, upper=False).T


@add(slow=True)
class NormOverSamples(Block):
    def mix(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.t(), (len(h),), eps=0.1).t()


@add(slow=True)
class TurnsToward(Block):
    """Balanced assignment as in SwAV: rows and columns of the scores are normalised by turns."""

    def mix(self, h: Tensor) -> Tensor:
        scores = torch.exp(h)
        for _ in range(3):
            scores = scores / scores.sum(0)
            scores = scores / scores.sum(1, keepdim=True)
        return scores


@add(batch=images, slow=True)
def normalised_images() -> nn.Module:
    """Convolutions with a norm over the batch, without statistics."""

    class Convolution(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, 5, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.relu((y - y.mean((0, 2, 3), keepdim=True)) / (y.std((0, 2, 3), keepdim=True) + 0.1))

    return Vision(Convolution(3), Convolution(5), Convolution(5))


class Vision(nn.Module):
    def __init__(self, *blocks: nn.Module, channels: int = 5) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.head(self.blocks(x).mean((2, 3)))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


# --- samples meet in gradients only ---


class CentredGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


@add()
class GradientIsCentred(Block):
    def mix(self, h: Tensor) -> Tensor:
        return CentredGradient.apply(h)


@add(slow=True)
class GradientHasNormOne(Block):
    def mix(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: grad / (grad.norm() + 1e-3))
        return h


@add()
class GradientIsClippedTogether(Block):
    """A hook that does nothing for small gradients: the norm of all samples decides."""

    def mix(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (0.05 / grad.norm()).clamp(max=1.0))
        return h


@add()
def hook_behind_a_module_centres_gradients() -> nn.Module:
    blocks = [Block(), Block()]
    for block in blocks:
        block.linear.register_full_backward_hook(
            lambda _, grad_inputs, grad_outputs: tuple(grad - grad.mean(0) for grad in grad_inputs)
        )
    return Net(Block(), *blocks)


# --- what a block returns beside its output ---


@add()
class LossOfTheBatch(Block):
    """Contrastive: each sample against all others."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, F.cross_entropy(h @ x.T, torch.arange(len(h)))


@add()
class MeanAsLoss(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h.square().mean()


@add(slow=True)
class SumAsLoss(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h.square().sum()


@add()
class LargestAsLoss(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h.abs().max()


@add()
class BalanceAsLoss(Block):
    """A product of two means, as of routers."""

    def make(self) -> None:
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        weights = torch.softmax(self.router(x), 1)
        share = F.one_hot(weights.argmax(1), 3).float().mean(0)
        return x + torch.tanh(self.linear(x)) * weights[:, :1], 3 * (share * weights.mean(0)).sum()


@add()
class SpreadAsLoss(Block):
    """The distance to the nearest other sample."""

    def forward(self, x: Tensor) -> Any:
        h = F.normalize(self.linear(x), dim=1)
        distance = torch.cdist(h, h + 1e-3) + 10 * torch.eye(len(h))
        return x + h, -torch.log(distance.min(1).values).mean()


class LossOfRawData(Block):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x), x.var(0).mean()


class LossOfRawDataAndWeight(Block):
    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return h, (h.mean(0) ** 2).sum()


@add()
def first_block_measures_raw_data() -> nn.Module:
    return Net(LossOfRawData(), Block(), first=False)


@add()
def first_block_has_a_loss_of_raw_data() -> nn.Module:
    return Net(LossOfRawDataAndWeight(), Block(), first=False)


@add()
class CountsExperts(Block):
    def make(self) -> None:
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        weights = torch.softmax(self.router(x), 1)
        return x + torch.tanh(self.linear(x)) * weights[:, :1], torch.bincount(weights.argmax(1), minlength=3)


@add()
class DetachedMean(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h.detach().mean()


@add()
class UseOfCodes(Block):
    """Perplexity of a codebook's use, for the log."""

    def make(self) -> None:
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Any:
        nearest = torch.cdist(self.linear(x), self.codes).argmin(1)
        share = F.one_hot(nearest, 5).float().mean(0)
        return x + torch.tanh(self.linear(x)), torch.exp(-(share * torch.log(share + 1e-6)).sum())


@add()
class ReturnsANumber(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, float(h.detach().abs().mean())


@add()
class ReturnsHowMany(Block):
    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x)), len(x)


@add()
class ReturnsNamesOfLargest(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, {"largest": int(h.detach().sum(1).argmax()), "text": f"{len(h)} samples"}


@add()
class ReturnsItsParameter(Block):
    """A tensor without a sample in it, the same for all parts."""

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x)), self.linear.weight.square().mean()


@add()
class ScoresOfPairs(Block):
    """A matrix of samples by samples."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + h, h @ h.T


# --- the number of samples ---


@add()
class DividedByTheirNumber(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h / h.shape[0]


@add(slow=True)
class DividedByTheRootOfTheirNumber(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * len(h) ** -0.5


class ToldTheirNumber(Block):
    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + h - h.sum(0) / num_samples


class ShapedByTheirNumber(Block):
    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        return x + torch.tanh(self.linear(x)).reshape(num_samples, -1)


class Telling(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, x.shape[0])
        prediction = self.head(x)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add()
def told_the_number_of_samples() -> nn.Module:
    return Telling(ToldTheirNumber(), ToldTheirNumber())


@add()
def shaped_by_the_number_of_samples() -> nn.Module:
    return Telling(ShapedByTheirNumber(), ShapedByTheirNumber())


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_samples_that_meet(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.parametrize("seed", range(20))
def test_mixup_is_found_whatever_is_drawn(seed: int) -> None:
    """A permutation may leave the sample where it is that a trial changes: one draw does not do."""
    torch.manual_seed(seed)
    model = Net(Block(), Permuted())
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    plan = hightide.plan(model, make_optimizer(model), vectors(seed), limits=limits, micro_batch=2)
    assert unsplit(plan)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_samples_that_meet_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
