"""A forked child that uses a wrapped model is told at once that it cannot; one that only ends does no harm."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from forked import run_script

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(110), pytest.mark.skipif(sys.platform != "linux", reason="forks threads of Linux")]

SCRIPT = """
    import gc, os, sys
    import torch, hightide, interrupts
    from hightide.runtime.surgery import run_of
    from hightide.planner.solution import Solution

    gc.freeze()  # children do not look through what was imported
    torch.set_num_threads(1)
    subject = interrupts.Subject("deferred")
    subject.check()
    model, optimizer, x = subject.model, subject.optimizer, subject.x
    run = run_of(model)

    def told(use):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                use()
                message = "nothing"
            except BaseException as error:
                message = f"{type(error).__name__}: {error}"
            os.write(write, message.encode())
            os._exit(0)
        os.close(write)
        status = os.waitpid(child, 0)[1]
        with os.fdopen(read) as pipe:
            return f"status {status} {pipe.read()}"

    loss = model(x)
    unused = {"backward": loss.backward}
    saved, states = model.state_dict(), optimizer.state_dict()
    uses = {
        "forward": lambda: model(x),
        "evaluation": lambda: torch.no_grad()(model)(x),
        "block": lambda: model.blocks[0](x),
        "backward": loss.backward,
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "gradient": lambda: model.blocks[0].wide.weight.grad.sum(),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(saved),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(states),
        "optimizer.state": lambda: optimizer.state[model.blocks[0].wide.weight]["exp_avg"],
        "unwrap": lambda: hightide.unwrap(model),
        "stats": lambda: hightide.stats(model),
        "record": lambda: hightide.record(model),
        "verify": lambda: hightide.verify(model, optimizer, x),
        "move_to": lambda: run.move_to(Solution.of(run.profile, run.plan)),
        "wrap": lambda: hightide.wrap(model, optimizer, x),
    }
    # Built for CUDA, torch refuses every backward in a fork of a process that has run one, profiles included.
    refused = "fork-based multiprocessing" if torch.backends.cuda.is_built() else "is a fork"
    backward = told(uses.pop("backward"))
    assert refused in backward, backward
    loss.backward()
    for name, use in uses.items():
        message = told(use)
        assert message.startswith("status 0 RuntimeError: ") and "is a fork" in message, (name, message)

    def forget():
        global subject, model, optimizer, run, uses, loss
        del subject, model, optimizer, run, uses, loss
        gc.collect()

    assert told(forget) == "status 0 nothing", told(forget)
    def its_own():
        interrupts.Subject("deferred").check()

    own = told(its_own)
    assert refused in own if torch.backends.cuda.is_built() else own == "status 0 nothing", own
    optimizer.zero_grad()
    subject.check()
    print("parent is well")
"""

WORKERS = """
    import gc
    import torch, hightide, interrupts

    gc.freeze()  # workers do not look through what was imported

    class Holding(torch.utils.data.Dataset):
        def __init__(self, model, uses):
            self.model, self.uses = model, uses

        def __len__(self):
            return 4

        def __getitem__(self, at):
            x = torch.ones(1, interrupts.WIDTH)
            return self.model(x) if self.uses else x[0]

    if __name__ == "__main__":
        torch.set_num_threads(1)
        subject = interrupts.Subject("deferred")
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(
                Holding(subject.model, False), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            for batch in loader:
                assert batch.shape == (4, interrupts.WIDTH)
                subject.check()
        loader = torch.utils.data.DataLoader(
            Holding(subject.model, True), num_workers=1, multiprocessing_context="fork"
        )
        try:
            next(iter(loader))
        except RuntimeError as error:
            assert "is a fork" in str(error), error
        subject.check()
        print("parent is well")
"""


@pytest.mark.parametrize("script", [SCRIPT, WORKERS], ids=["fork", "workers"])
def test_a_fork_is_told(script: str) -> None:
    """In a process of its own: this one has threads."""
    bench = f"import sys\nsys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = run_script(bench + textwrap.dedent(script), [], timeout_s=100)
    assert (done.status, done.stdout) == (0, "parent is well\n"), done.stderr[-3000:]
