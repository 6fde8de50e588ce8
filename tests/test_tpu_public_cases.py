"""The public cases (see `test_public_cases`) by the TPU kernels, interpreted; what these decline goes to `xla`, as it would on a TPU."""

import pytest
from test_public_cases import OURS, run
from tpu_support import DEVICE, interpreted

from flash_jax import dispatch


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in OURS if "gpu_only" not in case.tags], ids=lambda case: case.name)
def test_public_case(case, monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: DEVICE)
    with interpreted():
        run(case)
