"""Mechanisms that make steps faster, each of which a search can be told to do without: to see what it is worth."""

from __future__ import annotations

from enum import StrEnum


class Mechanism(StrEnum):
    PERSISTENT = "persistent blocks"  # parameters, or states too, that stay on the GPU
    SPARE_SLOTS = "spare slots"  # more than one block needs: the next fetch runs beside compute
    SLOT_REUSE = "slot reuse"  # what slots still hold when backward begins is not fetched again
    LEVELS = "levels"  # between recomputing and keeping: activations held in part
    SWAP = "swap"  # of these, those that wait on the host
    LOSS_IN_FORWARD = "loss in forward"  # the head's gradients are made with the loss: logits neither wait nor repeat
    LOOKUP = "lookup on the host"  # of embeddings: rows cross the link, and no tables
    STATES_LATER = "states later"  # than parameters are written by the host's updates: forward waits for less
    UPDATE_OVERLAP = "update overlap"  # the host's updates run beside the next forward


Mechanisms = frozenset[Mechanism]
NONE: Mechanisms = frozenset()
