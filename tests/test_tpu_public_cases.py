"""The public cases (see `test_public_cases`) by the TPU kernels, interpreted; what these decline goes to `xla`, as it would on a TPU."""

import pytest
from test_public_cases import CASES, NOT_OURS, REFERENCE
from tpu_support import DEVICE, interpreted

from flash_jax import dispatch

RUN = [case for case in CASES if case.name not in NOT_OURS and "gpu_only" not in case.tags]


@pytest.mark.slow
@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_public_case(case, monkeypatch):
    assert REFERENCE is not None
    from public_cases_adapter import attention  # imports a module of that folder

    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: DEVICE)
    with interpreted():
        REFERENCE.run_case(case, attention)
