#!/usr/bin/env bash
# The definition of green: format, lint, types, tests, the built wheel, the docs.
#
#   scripts/check.sh                 everything that CI runs
#   scripts/check.sh --aot           and the kernels compiled for NVIDIA GPUs and TPUs that are not there
#   scripts/check.sh --slow          the tests only, and those marked slow as well
#   scripts/check.sh --jax 0.11.2    the tests only, on that version of jax (with --aot or --slow: those as well)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jax= aot= slow=
while [ $# -gt 0 ]; do
  case $1 in
    --jax) jax=${2:?--jax needs a version, for example --jax 0.11.2} && shift 2 ;;
    --aot) aot=yes && shift ;;
    --slow) slow=--slow && shift ;;
    *) echo "scripts/check.sh: unknown option $1; it knows --jax VERSION, --aot and --slow." >&2 && exit 2 ;;
  esac
done
[ -z "$jax" ] || export FLASH_JAX_JAX=$jax

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
times=

step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@" || { printf '\n== %s FAILED after %d s\n' "$name" $((SECONDS - start)) >&2 && exit 1; }
  times+=$(printf '%-8s %5d s' "$name" $((SECONDS - start)))$'\n'
}

# The tests are run by the command that the README gives to its readers.
run_tests() {
  local command='scripts/run pytest'
  grep -qxF "$command" README.md || { echo "README.md does not have the line '$command'." >&2 && return 1; }
  PYTEST_ADDOPTS="--numprocesses=2 $slow ${PYTEST_ADDOPTS:-}" $command
}

# The wheel, in an environment with nothing but what it asks for, away from this folder.
try_wheel() {
  scripts/run python -m pip wheel --quiet --no-deps --build-constraint constraints.txt --wheel-dir "$scratch" . &&
    scripts/run python -m venv "$scratch/venv" &&
    "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$scratch"/flash_jax-*.whl &&
    (cd "$scratch" && JAX_PLATFORMS=cpu venv/bin/python -I - <<'PYTHON')
import importlib.resources

import flash_jax
import jax
import jax.numpy as jnp

assert "site-packages" in flash_jax.__file__, flash_jax.__file__
assert importlib.resources.files("flash_jax").joinpath("py.typed").is_file()
x = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
loss = lambda q, k, v: jnp.sum(flash_jax.flash_attention(q, k, v, is_causal=True) ** 2)
gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
assert all(bool(jnp.isfinite(g).all()) and float(jnp.abs(g).max()) > 0 for g in gradients)
print(flash_jax.__file__, "attends and differentiates on", jax.devices()[0].device_kind)
PYTHON
}

step setup scripts/run true
if [ -z "$jax$slow" ]; then
  step format scripts/run ruff format --check .
  step lint scripts/run ruff check .
  step types scripts/run pyright
fi
step tests run_tests
[ -z "$aot" ] || FLASH_JAX_ACCELERATOR=aot step aot scripts/run pytest -m aot --aot
if [ -z "$jax$slow" ]; then
  step wheel try_wheel
  NO_MKDOCS_2_WARNING=1 step docs scripts/run mkdocs build --strict --site-dir "$scratch/site"
fi
printf '\n== green\n%stotal    %5d s\n' "$times" "$SECONDS"
