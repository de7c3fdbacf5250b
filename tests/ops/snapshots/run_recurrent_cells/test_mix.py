"""Mixtures of a state and a proposal, of one dtype or several."""

import pytest
import torch

from pyg_direct.ops.snapshots.run_recurrent_cells import mix


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_the_widest_dtype_is_that_of_products_and_sums(real_device, state, other):
    proposed, given, share = torch.rand(3, 4, 2, device=real_device).unbind(0)
    proposed, given, share = proposed.to(other), given.to(state), share.to(other)

    got = mix(proposed, given, share)

    assert got.dtype == torch.promote_types(state, other)
    torch.testing.assert_close(got.float(), (share * given + (1 - share) * proposed).float(), rtol=2e-2, atol=2e-2)
