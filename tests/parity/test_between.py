"""Between the lines of a training loop: evaluation, generation, other models, other threads, torch.autograd."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Loop, assert_close_weights, assert_streamed, compare, make_optimizer, streamed, wrap
from torch import Tensor, nn

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}
BUILD = partial(LLAMA.build, num_samples=7)
PROMPT = models.token_batch(seed=5, num_samples=2)["input_ids"][:, :4]


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(models.loss_of(model, models.token_batch(seed=77, num_samples=3)))
    model.train()
    return loss


def generate(model: nn.Module) -> Tensor:
    model.eval()
    mask = torch.ones_like(PROMPT)
    tokens: Tensor = model.generate(PROMPT, attention_mask=mask, max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    model.train()
    return tokens


def finish(loop: Loop, loss: Tensor) -> Tensor:
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(("name", "update"), each_value(("llama_tied", "gpt2"), ("deferred", "in_backward")))
def test_evaluation_and_generation_between_steps(name: str, update: str) -> None:
    """Right after step(), while updates are still running: both must see the new weights."""
    subject = SUBJECTS[name]
    seen: dict[bool, list[Any]] = {False: [], True: []}

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = finish(loop, models.loss_of(loop.model, batch))
        seen[loop.wrapped].append((evaluate(loop.model), generate(loop.model).tolist()))
        return loss

    build = partial(subject.build, num_samples=7)
    compare(build, lambda: subject.batches(4), wrap=WRAP | {"room": 1.5, "update": update}, step=step)
    for (expected_loss, expected_tokens), (loss, tokens) in zip(seen[False], seen[True], strict=True):
        assert abs(loss - expected_loss) <= 1e-6 * expected_loss
        assert tokens == expected_tokens


@pytest.mark.parametrize("what", [evaluate, generate])
def test_evaluation_between_forward_and_backward(what: Any) -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        what(loop.model)
        return finish(loop, loss)

    compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 2.0}, step=step)


def test_evaluation_between_two_backwards() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        (models.loss_of(loop.model, batch) / 2).backward()
        evaluate(loop.model)
        return finish(loop, models.loss_of(loop.model, batch) / 2)

    compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 1.5}, step=step)


def test_evaluation_before_the_first_step_and_without_training() -> None:
    plain, example = BUILD()
    model, _ = BUILD()
    model, _ = wrap(model, make_optimizer(model), example, **WRAP, room=1.5)
    assert abs(evaluate(model) - evaluate(plain)) <= 1e-6 * evaluate(plain)
    assert generate(model).tolist() == generate(plain).tolist()


def test_inference_mode() -> None:
    plain, example = BUILD()
    model, _ = BUILD()
    model, _ = wrap(model, make_optimizer(model), example, **WRAP, room=1.5)
    batch = models.token_batch(seed=77, num_samples=3)
    with torch.inference_mode():
        expected, loss = plain(**batch).loss, model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    models.loss_of(model, example).backward()


def test_a_part_of_the_model_called_alone() -> None:
    plain, example = BUILD()
    model, _ = BUILD()
    model, _ = wrap(model, make_optimizer(model), example, **WRAP, room=1.5)
    ids = example["input_ids"][:3]
    with torch.no_grad():
        expected, hidden = plain.model(ids)[0], model.model(ids)[0]  # type: ignore[operator]
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)


def test_two_wrapped_models_in_one_process() -> None:
    """Interleaved, as a generator and its critic: each has its own accelerator, lanes and pass."""
    names = ["llama_tied", "gpt2"]
    loops = []
    for name in names:
        subject = SUBJECTS[name]
        plain, _ = subject.build(num_samples=7)
        model, example = subject.build(num_samples=7)
        model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
        loops.append((plain, make_optimizer(plain), model, optimizer))
    for batch in LLAMA.batches(3):
        pairs = [(models.loss_of(plain, batch), models.loss_of(model, batch)) for plain, _, model, _ in loops]
        for expected, loss in pairs:
            assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item()
        sum(loss for _, loss in pairs).backward()  # type: ignore[union-attr]  # one backward through both
        sum(expected for expected, _ in pairs).backward()  # type: ignore[union-attr]
        for _, plain_optimizer, _, optimizer in loops:
            for one in (plain_optimizer, optimizer):
                one.step()
                one.zero_grad()
    for plain, _, model, _ in loops:
        assert_close_weights(plain.state_dict(), model.state_dict())


def test_two_wrapped_models_against_each_other() -> None:
    """A generator whose loss goes through its critic, and a critic that sees the generator's output detached. The
    critic's gradients from the generator's loss are dropped by its zero_grad, or by `backward(inputs=...)`."""

    class Stack(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(models.HIDDEN, models.HIDDEN) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    def run(is_wrapped: bool) -> list[dict[str, Tensor]]:
        nets, optimizers = [], []
        for seed in (0, 1):
            net: nn.Module = Stack(seed)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
            if is_wrapped:
                example, limits = models.vector_batch(num_samples=7)["x"], hightide.Limits(gpu="1MiB", host="1MiB")
                plan = hightide.plan(net, optimizer, example, limits=limits, micro_batch=3)
                plan = streamed(plan, Activation.RECOMPUTE)
                net, optimizer = hightide.wrap(net, optimizer, example, plan=plan)
            nets.append(net)
            optimizers.append(optimizer)
        generator, critic = nets
        for step in range(6):
            noise, real = (models.vector_batch(seed=100 * kind + step, num_samples=7)["x"] for kind in (1, 2))
            optimizers[1].zero_grad()
            made = generator(noise)
            (critic(made.detach()).square().mean() - critic(real).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = (critic(made) - 1).square().mean()
            if step % 2:
                loss.backward()
            else:
                before = [param.grad for param in critic.parameters()]
                (gradient,) = torch.autograd.grad(loss, made)
                made.backward(gradient)
                after = [param.grad for param in critic.parameters()]
                assert all(one is other for one, other in zip(before, after, strict=True))
            optimizers[0].step()
        return [net.state_dict() for net in nets]

    for plain, wrapped in zip(run(False), run(True), strict=True):
        assert_close_weights(plain, wrapped)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_backward_from_another_thread(update: str) -> None:
    """As on CUDA, where autograd runs backward on a thread of its own."""

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        errors: list[BaseException] = []

        def backward() -> None:
            try:
                loss.backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    _, wrapped = compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"update": update}, step=step)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def embedded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    embeds = torch.randn(*batch["input_ids"].shape, models.HIDDEN, generator=generator).requires_grad_()
    return {"inputs_embeds": embeds, "labels": batch["labels"]}


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_gradients_of_inputs_leave_parameters_alone(update: str) -> None:
    """torch.autograd.grad and backward(inputs=...) ask for other things; the next step is not disturbed."""
    found: dict[bool, list[Tensor]] = {False: [], True: []}

    def step(loop: Loop, batch: Any) -> Tensor:
        asked = embedded(batch)
        (grad,) = torch.autograd.grad(loop.model(**asked).loss, asked["inputs_embeds"])
        found[loop.wrapped].append(grad.clone())  # a copy in host memory; the gradient itself is on the GPU
        asked = embedded(batch)
        loop.model(**asked).loss.backward(inputs=[asked["inputs_embeds"]])
        assert asked["inputs_embeds"].grad is not None
        found[loop.wrapped].append(asked["inputs_embeds"].grad.clone())
        del asked, grad
        assert all(param.grad is None for param in loop.model.parameters())
        return finish(loop, models.loss_of(loop.model, batch))

    compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 1.6, "update": update}, step=step)
    for expected, grad in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


def test_gradients_of_inputs_between_two_backwards() -> None:
    """What the parameters have summed so far survives a call of torch.autograd.grad."""

    def step(loop: Loop, batch: Any) -> Tensor:
        (models.loss_of(loop.model, batch) / 2).backward()
        asked = embedded(batch)
        torch.autograd.grad(loop.model(**asked).loss, asked["inputs_embeds"])
        return finish(loop, models.loss_of(loop.model, batch) / 2)

    compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 1.6}, step=step)


def test_training_on_embeddings() -> None:
    """The user's own embeddings: a block that is never reached gets no gradient and is skipped, as in plain PyTorch."""

    def step(loop: Loop, batch: Any) -> Tensor:
        return finish(loop, loop.model(**embedded(batch)).loss)

    plain, wrapped = compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 1.6}, step=step)
    assert len(wrapped.optimizer.state_dict()["state"]) == len(plain.optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", ["llama", "gpt2", "plain", "hand_written"])
def test_a_second_backward_raises(name: str) -> None:
    model, example = SUBJECTS[name].build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP, room=1.5)
    loss = models.loss_of(model, example)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()


@pytest.mark.parametrize("name", ["llama", "hand_written"])
def test_a_double_backward_raises(name: str) -> None:
    """A gradient penalty: silently zero would be the worst answer."""
    subject = SUBJECTS[name]
    model, example = subject.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP, room=2.0)
    if name == "llama":
        example = embedded(example)
        asked = example["inputs_embeds"]
    else:
        asked = example["x"].requires_grad_()
    (grad,) = torch.autograd.grad(models.loss_of(model, example), asked, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def test_two_losses_of_two_forwards_and_one_backward() -> None:
    """Contrastive training: two calls of the model before one backward. Right, or refused."""

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch) + models.loss_of(loop.model, models.token_batch(seed=3, num_samples=7))
        return finish(loop, loss)

    model, batch = BUILD()
    limits = hightide.Limits(
        gpu="448KiB", host="64MiB"
    )  # a plan that fills them would leave no room for a second graph
    plan = hightide.plan(model, make_optimizer(model), batch, limits=limits, **WRAP)
    compare(BUILD, lambda: LLAMA.batches(3), wrap={"plan": streamed(plan, Activation.RECOMPUTE)}, step=step)


def test_an_exception_in_the_loop_leaves_the_model_usable() -> None:
    """A bad batch inside a step; the loop goes on with the next one."""

    def step(loop: Loop, batch: Any) -> Tensor:
        bad = {name: value.clone() for name, value in batch.items()}
        bad["input_ids"][0, 0] = 10**6
        with pytest.raises(IndexError):
            models.loss_of(loop.model, bad)
        return finish(loop, models.loss_of(loop.model, batch))

    compare(BUILD, lambda: LLAMA.batches(3), wrap=WRAP | {"room": 1.3}, step=step)
