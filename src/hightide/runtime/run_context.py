"""The context of a run: what those who make it know of the model, its library and the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hightide.ir.machine import MatmulRates
from hightide.runtime.chunks.origin import FirstValues
from hightide.runtime.known_batches import Admission, KnownBatches

if TYPE_CHECKING:
    from hightide.runtime.run import Run

AroundCall = Callable[[tuple[Any, ...], Mapping[str, Any]], AbstractContextManager[None]]


def _as_it_is(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _takes_all(arguments: Mapping[str, Any]) -> None:
    """No argument is refused."""


@dataclass(frozen=True)
class RunContext:
    """The defaults are those of a block alone. A run keeps what it needs, and not this: the files of first values would
    stay with it."""

    first_values: FirstValues = field(default_factory=FirstValues)
    check_call: Callable[[Mapping[str, Any]], None] = _takes_all  # raises where training by blocks would be wrong
    around_call: AroundCall | None = None  # of the model; None: nothing is
    batches: KnownBatches | None = None  # see [Note: larger batches]; None: any batch is let in
    admission: Callable[[Run], Admission] | None = None  # who is asked about others
    unwritten: Collection[str] = ()  # parameters whose versions grow without a write
    products: MatmulRates | None = None  # how fast the GPU multiplies; None: nobody has measured it
    save_pretrained: Callable[..., object] | None = None  # of several ranks: takes the run, a module and a folder
    written_here: Callable[[nn.Module], AbstractContextManager[None]] = _as_it_is  # whichever rank its library is on
