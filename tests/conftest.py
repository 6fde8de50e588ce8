"""Options of the test suite, and where it runs: on two CPU devices, or with --device on what the machine has."""

import json
import os
from pathlib import Path

import hypothesis

OPT_IN = {  # marker: what --marker runs
    "slow": "also tests of more cases by interpreted kernels, minutes altogether",
    "aot": "also tests that compile kernels for hardware that is not there",
    "device": "only the tests of this machine's accelerator, on it instead of two CPU devices",
}

# A first example compiles, so its time says nothing; CI sees the same examples in every run.
hypothesis.settings.register_profile(
    "flash_jax", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("flash_jax")


def pytest_addoption(parser):
    group = parser.getgroup("flash_jax")
    for marker, what in OPT_IN.items():
        group.addoption(f"--{marker}", action="store_true", help=f"run {what}")
    group.addoption("--record", type=Path, metavar="FILE.json", help="write down each test's outcome, and what it ran on")


def pytest_configure(config):
    if config.getoption("--device"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes (-n) share the card
        # Kernels are not XLA's to tune; the references are, for most of a test's time.
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")
        return
    # Read when jax is imported, and inherited by the processes that tests start.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    # Threads of XLA, by default one a core: an interpreted kernel holds one for each of its warpgroups while they wait for each other.
    os.environ["NPROC"] = "16"


def pytest_report_header(config):
    import jax  # not before pytest_configure

    where = f"jax {jax.__version__} on {len(jax.devices())} x {jax.devices()[0].device_kind}"
    if config.getoption("--device") and jax.default_backend() == "cpu":
        where += "; no kernel runs here: what is tested is xla"
    return where


def pytest_collection_modifyitems(config, items):
    chosen = {marker for marker in OPT_IN if config.getoption(f"--{marker}")}

    def runs(item):
        marks = OPT_IN.keys() & {mark.name for mark in item.iter_markers()}
        return marks <= chosen and ("device" in marks or "device" not in chosen)

    deselected = [item for item in items if not runs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs(item)]


class _Record:
    """The file that tuning tables name: which test passed, with which configuration of a kernel. Written as each ends."""

    def __init__(self, path: Path, options):
        from flash_jax.bench.timing import provenance

        self.path, self.tests = path, {}
        command = " ".join(["python -m pytest", *(f"--{marker}" for marker in OPT_IN if options(f"--{marker}"))])
        self.where = provenance() | {"command": command}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {"outcome": report.outcome, **dict(report.user_properties)}
            self.path.write_text(json.dumps({"provenance": self.where, "tests": dict(sorted(self.tests.items()))}, indent=1) + "\n")


def pytest_sessionstart(session):
    path = session.config.getoption("--record")
    if path is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Record(path, session.config.getoption))
