"""Masters in two parts on a GPU: the kernels are in use, and give the bits of torch's operations."""

from __future__ import annotations

import pytest
import torch

from hightide.runtime.chunks import remainder
from unit.runtime.chunks.test_remainder import neighbours_of_every_parameter, parts_of

pytestmark = pytest.mark.gpu


def test_our_kernels_and_torchs_agree() -> None:
    on_host = neighbours_of_every_parameter()
    on_host = on_host[~on_host.isnan()]
    master = on_host.cuda()
    assert remainder._has_kernels(master), "a GPU without them would be slow, and nobody would know"
    param, rest = parts_of(master)
    expected_param, expected_rest = parts_of(on_host)
    assert torch.equal(param.cpu().view(torch.int16), expected_param.view(torch.int16))
    assert torch.equal(rest.cpu(), expected_rest)
    joined = remainder.join(param, rest)
    assert torch.equal(joined.cpu().view(torch.int32), remainder.join(expected_param, expected_rest).view(torch.int32))
