"""Cases collected from public bug reports, where their folder stands beside the project."""

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "cases"


def _load():
    if not FOLDER.is_dir():
        return None, ()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("reference"), importlib.import_module("public_cases").CASES
    finally:
        sys.path.remove(str(FOLDER))
        sys.dont_write_bytecode = before


REFERENCE, CASES = _load()
NOT_OURS = {"softcap_and_bias_bias_then_cap": "the soft cap bounds the scaled scores, before the bias"}


OURS = [case for case in CASES if case.name not in NOT_OURS]


def run(case):
    assert REFERENCE is not None
    from public_cases_adapter import attention  # imports a module of that folder

    REFERENCE.run_case(case, attention)


@pytest.mark.parametrize("case", [case for case in OURS if "gpu_only" not in case.tags], ids=lambda case: case.name)
def test_public_case(case):
    run(case)


def _needs(case):
    if case.name == "gspmd_batch_sharded_replicated_bias_dbias":
        return pytest.mark.skipif(len(jax.devices()) < 2, reason="this machine has one device")
    return ()


@pytest.mark.device
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=_needs(case)) for case in OURS])
def test_public_case_on_this_machine(case):
    """As it was published; values in float32 also in bfloat16, which all kernels take, with the folder's tolerance for it."""
    run(case)
    if case.check == "value" and case.dtype == "float32":
        run(dataclasses.replace(case, dtype="bfloat16", tol=None))
