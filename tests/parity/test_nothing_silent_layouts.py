"""Where samples lie: time first, rows of several samples, graphs, doubled batches: equal to plain, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal_or_refused import (
    CLASSES,
    NUM_SAMPLES,
    NUM_TOKENS,
    ROOMY,
    SPLIT,
    WHOLE,
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
    square,
    time_major,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CASES = Cases()
add = CASES.add


class Stack(nn.Module):
    """Blocks with a head; `forward` is the case's own."""

    def __init__(self, *blocks: nn.Module, outputs: int = CLASSES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, outputs)

    def finish(self, h: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.head(h)
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


def encoder_layer(batch_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)


class Recurrent(Block):
    def make(self) -> None:
        self.recurrent = nn.LSTM(WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.recurrent(h)[0]


class Gated(Block):
    def make(self) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.narrow(self.recurrent(h)[0])


# --- time first ---


@add(batch=time_major)
def encoder_with_time_first() -> nn.Module:
    return Net(encoder_layer(), encoder_layer())


@add(batch=square, slow=True)
def encoder_with_time_first_square() -> nn.Module:
    return Net(encoder_layer(), encoder_layer())


@add(batch=square, split=True)
def encoder_with_samples_first_square() -> nn.Module:
    return Net(encoder_layer(batch_first=True), encoder_layer(batch_first=True))


@add(batch=time_major, ways=SPLIT[1:])
def lstm_with_time_first() -> nn.Module:
    return Net(Recurrent(), Recurrent())


@add(batch=sequences, split=True, ways=SPLIT[1:])
def gru_with_samples_first() -> nn.Module:
    return Net(Gated(), Gated())


class TurnedInside(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        return super().forward(x.transpose(0, 1), labels.transpose(0, 1))


@add(batch=sequences, slow=True)
def encoder_with_time_first_inside() -> nn.Module:
    return TurnedInside(encoder_layer(), encoder_layer())


@add(batch=sequences, ways=SPLIT[1:], slow=True)
def lstm_with_time_first_inside() -> nn.Module:
    return TurnedInside(Recurrent(), Recurrent())


def pooled_time_major(seed: int) -> dict[str, Tensor]:
    return {"x": time_major(seed)["x"], "labels": vectors(seed)["labels"]}


class Pooled(Stack):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.finish(x.mean(0), labels)


@add(batch=pooled_time_major, ways=ROOMY)
def encoder_with_time_first_labels_by_sample() -> nn.Module:
    return Pooled(encoder_layer(), encoder_layer())


@add(batch=pooled_time_major, ways=SPLIT[1:])
def lstm_with_time_first_labels_by_sample() -> nn.Module:
    return Pooled(Recurrent(), Recurrent())


class ModulesOfTorch(Stack):
    """Recurrent layers of torch are themselves the blocks, and return their states."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x, _ = block(x)
        return self.finish(x, labels)


@add(batch=time_major, ways=SPLIT[1:], slow=True)
def recurrent_modules_with_time_first() -> nn.Module:
    return ModulesOfTorch(nn.LSTM(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH), nn.RNN(WIDTH, WIDTH))


@add(batch=sequences, split=True, ways=SPLIT[1:], slow=True)
def recurrent_modules_with_samples_first() -> nn.Module:
    return ModulesOfTorch(*(kind(WIDTH, WIDTH, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)))


def pairs_time_major(seed: int) -> dict[str, Tensor]:
    return {"source": time_major(seed, num_tokens=7)["x"], **time_major(seed + 50)}


class Translator(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, source: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.head(self.transformer(source, x))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(batch=pairs_time_major)
def transformer_of_torch() -> nn.Module:
    return Translator(batch_first=False)


@add(batch=lambda seed: {"source": sequences(seed, num_tokens=7)["x"], **sequences(seed + 50)}, split=True, slow=True)
def transformer_of_torch_with_samples_first() -> nn.Module:
    return Translator(batch_first=True)


class StepByStep(Stack):
    """Cells, called for each moment; the states are the samples'."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = [x.new_zeros(x.shape[0], WIDTH) for _ in self.blocks]
        for moment in x.unbind(1):
            for number, block in enumerate(self.blocks):
                moment = h[number] = block(moment, h[number])
        return self.finish(moment, labels)


@add(batch=lambda seed: {"x": sequences(seed)["x"], "labels": vectors(seed)["labels"]}, split=True, slow=True)
def cells_step_by_step() -> nn.Module:
    return StepByStep(nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH))


@add(batch=time_major)
class ShiftedInTime(Block):
    """Each token sees the one before: time first, so a shift over rows."""

    def mix(self, h: Tensor) -> Tensor:
        return h + torch.cat([torch.zeros_like(h[:1]), h[:-1]])


@add(batch=time_major)
class DiscountedBackward(Block):
    """Returns of reinforcement learning: from the last moment to the first."""

    def mix(self, h: Tensor) -> Tensor:
        sums = [h[-1]]
        for moment in h[:-1].flip(0):
            sums.append(moment + 0.9 * sums[-1])
        return torch.stack(sums[::-1])


# --- rows of several samples ---


def rows_time_major(seed: int) -> dict[str, Tensor]:
    batch = time_major(seed)
    condition = vectors(seed + 50)["x"]
    return {"x": batch["x"].flatten(0, 1), "labels": batch["labels"].flatten(0, 1), "condition": condition}


def rows_sample_major(seed: int) -> dict[str, Tensor]:
    batch = sequences(seed)
    condition = vectors(seed + 50)["x"]
    return {"x": batch["x"].flatten(0, 1), "labels": batch["labels"].flatten(0, 1), "condition": condition}


class ConditionedRows(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x)).view(-1, *condition.shape)
        return x + (h * condition).flatten(0, 1)


class ConditionedGroups(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x)).view(len(condition), -1, WIDTH)
        return x + (h * condition.unsqueeze(1)).flatten(0, 1)


@add("refused", batch=rows_time_major)
def rows_with_time_first_beside_a_condition() -> nn.Module:
    return Net(ConditionedRows(), ConditionedRows())


@add("refused", batch=rows_sample_major)
def rows_with_samples_first_beside_a_condition() -> nn.Module:
    return Net(ConditionedGroups(), ConditionedGroups())


class Crops(Stack):
    """Several views of a sample are rows of their own, and come together at the end."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = x.flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        return self.finish(h.view(x.shape).mean(1), labels)


@add(batch=lambda seed: {"x": sequences(seed)["x"], "labels": vectors(seed)["labels"]}, split=True)
def views_as_rows() -> nn.Module:
    return Crops(Block(), Block())


class Siamese(Stack):
    def forward(self, x: Tensor, other: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = torch.cat([x, other])
        for block in self.blocks:
            h = block(h)
        first, second = h.chunk(2)
        return self.finish(first - second, labels)


@add(batch=lambda seed: {**vectors(seed), "other": vectors(seed + 50)["x"]}, split=True)
def siamese() -> nn.Module:
    return Siamese(Block(), Block())


class Guided(Block):
    """Half of the rows is without a condition, and both halves are joined in the block."""

    def mix(self, h: Tensor) -> Tensor:
        without, conditioned = h.chunk(2)
        guided = without + 1.5 * (conditioned - without)
        return torch.cat([guided, conditioned])


@add(batch=lambda seed: {**vectors(seed), "other": vectors(seed + 50)["x"]})
def guidance_inside_of_blocks() -> nn.Module:
    return Siamese(Guided(), Guided())


class Triplets(Block):
    """Anchor, positive and negative lie beside each other."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        anchor, positive, negative = h.view(-1, 3, WIDTH).unbind(1)
        return x + h, F.triplet_margin_loss(anchor, positive, negative)


@add()
def triplets() -> nn.Module:
    return Net(Triplets(), Triplets())


class Doubles(Block):
    """Twice as many rows come out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).repeat_interleave(2, 0)


class Halves(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).view(-1, 2, WIDTH).mean(1)


@add()
def rows_are_doubled_and_halved() -> nn.Module:
    return Net(Doubles(), Block(), Halves())


class Transposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).t()


@add()
def samples_become_columns() -> nn.Module:
    return Net(Block(), Transposes(), Transposes(), Block())


class AveragesSamples(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).mean(0, keepdim=True)


@add("refused", batch=lambda seed: {"x": vectors(seed)["x"], "labels": vectors(seed)["labels"].mean(0, keepdim=True)})
def samples_become_one() -> nn.Module:
    return Net(Block(), AveragesSamples(), Block())


# --- graphs ---


def graphs(seed: int, num_nodes: int = 12) -> dict[str, Tensor]:
    """Three graphs, of nodes that know theirs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_nodes, WIDTH, generator=generator),
        "edges": torch.randint(0, num_nodes, (2, 20), generator=generator),
        "graph": torch.sort(torch.randint(0, 3, (num_nodes,), generator=generator)).values,
        "labels": torch.randn(3, CLASSES, generator=generator),
    }


class Messages(Block):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


class Graphs(Stack):
    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, edges)
        return self.finish(x.new_zeros(len(labels), WIDTH).index_add(0, graph, x), labels)


@add("refused", batch=graphs)
def messages_in_graphs() -> nn.Module:
    return Graphs(Messages(), Messages())


class NormOfGraphs(Block):
    """Each node less the mean of its graph."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        sums = h.new_zeros(3, WIDTH).index_add(0, graph, h)
        counts = h.new_zeros(3).index_add(0, graph, torch.ones_like(h[:, 0])).clamp(min=1)
        return x + h - (sums / counts.unsqueeze(1))[graph]


class NormedGraphs(Stack):
    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, graph)
        return self.finish(x.new_zeros(len(labels), WIDTH).index_add(0, graph, x), labels)


@add("refused", batch=graphs)
def norms_of_graphs() -> nn.Module:
    return NormedGraphs(NormOfGraphs(), NormOfGraphs())


class DenseGraph(Block):
    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return x + adjacency @ torch.tanh(self.linear(x))


@add(batch=lambda seed: {**vectors(seed), "adjacency": torch.rand(6, 6, generator=torch.Generator().manual_seed(seed))})
def one_graph_with_a_matrix() -> nn.Module:
    return Net(DenseGraph(), DenseGraph())


@add(batch=lambda seed: {**sequences(seed), "adjacency": torch.ones(6, 5, 5).tril() / 5}, split=True)
def a_matrix_for_each_graph() -> nn.Module:
    return Net(DenseGraph(), DenseGraph())


# --- masks and lengths ---


def padded(seed: int) -> dict[str, Tensor]:
    batch = sequences(seed)
    lengths = torch.randint(2, NUM_TOKENS + 1, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(seed))
    return {**batch, "lengths": lengths}


class Packed(Block):
    def make(self) -> None:
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(torch.tanh(self.linear(x)), lengths, batch_first=True, enforce_sorted=False)
        return x + pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=x.shape[1])[0]


@add(batch=padded, ways=SPLIT[1:])
def packed_sequences() -> nn.Module:
    return Net(Packed(), Packed())


class CutToLongest(Block):
    """As long as the longest of the batch."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        length = int(lengths.max())
        h = torch.tanh(self.linear(x[:, :length]))
        return x + F.pad(h + h.mean(1, keepdim=True), (0, 0, 0, x.shape[1] - length))


@add(batch=padded)
def cut_to_the_longest() -> nn.Module:
    return Net(CutToLongest(), CutToLongest())


class LossOfValid(Block):
    """Divided by the number of valid tokens of all samples."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        valid = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).float().unsqueeze(2)
        return x + h, (h.square() * valid).sum() / valid.sum()


@add(batch=padded)
def loss_of_valid_tokens() -> nn.Module:
    return Net(LossOfValid(), LossOfValid())


class MaskedByHeads(nn.Module):
    """torch's attention takes a mask of (samples * heads, tokens, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


def masked_by_heads(seed: int) -> dict[str, Tensor]:
    mask = torch.rand(2 * NUM_SAMPLES, NUM_TOKENS, NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    return {**sequences(seed), "mask": mask}


@add(batch=masked_by_heads, ways=ROOMY)
def masks_by_sample_and_head() -> nn.Module:
    return Net(MaskedByHeads(), MaskedByHeads())


class HeadWithLoss(nn.Module):
    """Returns the mean over what is labelled, in each micro-batch another number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(h).flatten(0, -2), labels.flatten(), ignore_index=-100)


class LossInside(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = HeadWithLoss()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(x, labels)}


def partly_labelled(seed: int) -> dict[str, Tensor]:
    batch = padded(seed)
    classes = batch["labels"].argmax(-1).masked_fill(torch.arange(NUM_TOKENS) >= batch["lengths"].unsqueeze(1), -100)
    return {"x": batch["x"], "labels": classes}


@add(batch=partly_labelled)
def loss_in_the_head() -> nn.Module:
    return LossInside(Block(), encoder_layer(batch_first=True))


class ContrastiveHead(HeadWithLoss):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        h = F.normalize(self.linear(h), dim=1)
        alike = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        return F.binary_cross_entropy_with_logits(5 * h @ h.T, alike)


@add(batch=lambda seed: {"x": vectors(seed)["x"], "labels": vectors(seed)["labels"].argmax(1) % 2})
def contrastive_loss_in_the_head() -> nn.Module:
    model = LossInside(Block(), Block())
    model.head = ContrastiveHead()
    return model


class Towers(nn.Module):
    """Each user against the items of all: a matrix of samples by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Sequential(Block(), Block())
        self.items = nn.Sequential(Block(), Block())
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, item: Tensor) -> dict[str, Tensor]:
        scores = self.temperature * F.normalize(self.users(x), dim=1) @ F.normalize(self.items(item), dim=1).T
        targets = torch.arange(len(x))
        return {"loss": F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets), "scores": scores}


@add(batch=lambda seed: {"x": vectors(seed)["x"], "item": vectors(seed + 50)["x"]}, split=True)
def two_towers() -> nn.Module:
    return Towers()


# --- vision and diffusion ---


class Modulated(nn.Module):
    """Of StyleGAN: one grouped convolution for all samples, each with its own weight."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, channels, 3, 3) / 5)
        self.style = nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * (1 + self.style(x.mean((2, 3))[:, :3]))[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-2)
        rows = x.reshape(1, -1, *x.shape[2:])
        y = F.conv2d(rows, weight.flatten(0, 1), padding=1, groups=x.shape[0])
        return F.leaky_relu(y.view(x.shape[0], 5, *y.shape[2:]), 0.2)


class Vision(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.head(self.blocks(x).mean((2, 3)))
        return {"loss": mean_square(prediction, labels), "prediction": prediction}


@add(batch=images, split=True)
def modulated_convolutions() -> nn.Module:
    return Vision(Modulated(3), Modulated(5))


class Detector(Stack):
    """Learned queries look at the image, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.queries = nn.Parameter(torch.randn(7, WIDTH))
        layers = (nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(layers)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = self.patches(x).flatten(2).transpose(1, 2)
        h = self.queries.expand(x.shape[0], -1, -1)
        for layer in self.decoder:
            h = layer(h, memory)
        return self.finish(h.mean(1), labels)


@add(batch=images, split=True, slow=True)
def detector_with_queries() -> nn.Module:
    return Detector()


class Timed(nn.Module):
    """A block of a denoiser: convolution, norm of groups, and the moment."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.conv = nn.Conv2d(channels, out, 3, stride, 1)
        self.time = nn.Linear(1, out)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return torch.relu(self.conv(self.norm(x)) + self.time(time.reshape(-1, 1))[:, :, None, None])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Timed(3, 4), Timed(4, 6, stride=2), Timed(6, 6, stride=2)])
        self.up = nn.ModuleList([Timed(12, 6), Timed(10, 4), Timed(7, 3)])

    def denoise(self, x: Tensor, time: Tensor) -> Tensor:
        kept = [x]
        for block in self.down:
            kept.append(block(kept[-1], time))
        h = kept.pop()
        for block in self.up:
            skip = kept.pop()
            h = block(torch.cat([F.interpolate(h, size=skip.shape[2:]), skip], 1), time)
        return h

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> dict[str, Tensor]:
        scale = time.reshape(-1, 1, 1, 1)
        return {"loss": mean_square(self.denoise(x * (1 - scale) + noise * scale, time), noise)}


def noisy_images(seed: int, scalar: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 50)
    x = images(seed)["x"]
    time = torch.rand(() if scalar else (NUM_SAMPLES,), generator=generator)
    return {"x": x, "time": time, "noise": torch.randn(x.shape, generator=generator)}


@add(batch=noisy_images, split=True, slow=True)
def denoiser() -> nn.Module:
    return UNet()


@add(batch=lambda seed: noisy_images(seed, scalar=True), split=True, slow=True)
def denoiser_with_one_time_for_all() -> nn.Module:
    return UNet()


class GuidedUNet(UNet):
    """The batch doubled: half with, half without a condition."""

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> dict[str, Tensor]:
        doubled = torch.cat([x, torch.zeros_like(x)])
        conditioned, without = self.denoise(doubled, torch.cat([time, time])).chunk(2)
        return {"loss": mean_square(without + 2 * (conditioned - without), noise)}


@add(batch=noisy_images, split=True)
def denoiser_with_doubled_batch() -> nn.Module:
    return GuidedUNet()


class DroppedCondition(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if self.training:
            condition = condition * (torch.rand(len(x), 1) > 0.3)
        return x + torch.tanh(self.linear(x)) * condition


@add(batch=lambda seed: {**vectors(seed), "condition": vectors(seed + 50)["x"]}, ways=WHOLE)
def dropped_conditions() -> nn.Module:
    return Net(DroppedCondition(), DroppedCondition())


class Latents(nn.Module):
    """Latents of the model read the samples, each its own."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = F.scaled_dot_product_attention(self.latents.expand(len(x), -1, -1), self.key(x), x)
        return x + read.mean(1, keepdim=True)


@add(batch=sequences, split=True)
def latents_that_read() -> nn.Module:
    return Net(Latents(), Latents())


class Scan(Block):
    """A linear recurrence over tokens, as of state-space models."""

    def mix(self, h: Tensor) -> Tensor:
        states, state = [], torch.zeros_like(h[:, 0])
        for token in h.unbind(1):
            state = 0.7 * state + token
            states.append(state)
        return torch.stack(states, 1)


@add(batch=sequences, split=True)
def scan_over_tokens() -> nn.Module:
    return Net(Scan(), Scan())


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_where_samples_lie(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_where_samples_lie_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
