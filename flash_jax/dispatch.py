"""Which implementation serves a problem, decided before tracing, for forward and backward together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from flash_jax.backends import cudnn, hopper, tpu, xla
from flash_jax.backends.base import Backend, Device
from flash_jax.problem import Problem

# In order of preference; a new implementation is one line here.
BACKENDS: tuple[Backend, ...] = (hopper.BACKEND, tpu.BACKEND, cudnn.BACKEND, xla.BACKEND)

NAMES = tuple(backend.name for backend in BACKENDS)


def current_device(*arrays) -> Device:
    """Where a call on these arguments will run: the device of the first concrete array, an ambient mesh's device, or the default.

    Inside `jit` no array is concrete: choose another than the default device with `jax.default_device` or `implementation=`.
    """
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            device = next(iter(x.devices()))
            return Device(device.platform, device.device_kind)
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        device = named_device(abstract.device_kind)
        return device._replace(platform=getattr(abstract, "platform", None) or device.platform)
    device = jax.config.jax_default_device
    if device is None:
        device = jax.devices()[0]
    elif isinstance(device, str):
        device = jax.devices(device)[0]
    return Device(device.platform, device.device_kind)


def named_device(kind: str) -> Device:
    """The hardware of that name, whether or not it is there."""
    if not isinstance(kind, str) or not kind:
        raise TypeError(f"device must be the name of some hardware, such as 'NVIDIA H200', 'TPU v6e' or 'cpu', got {kind!r}.")
    if kind != "cpu" and kind == kind.lower() and not kind.startswith("gfx"):  # AMD's
        raise ValueError(f"device must be spelled as JAX does, such as 'NVIDIA H200', 'TPU v6e' or 'cpu', got {kind!r}.")
    return Device("cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu", kind)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `flash_attention` will do with a problem. `str()` is one line an implementation.

    implementation: the name of the one that runs.
    config: its tiles and other settings of speed.
    why_config: why these.
    device: where it runs.
    why_not: for each other implementation, the first reason why it does not run.
    """

    implementation: str
    config: Any
    why_config: str
    device: Device
    why_not: dict[str, str]

    def __str__(self) -> str:
        tiles = "" if self.config is None else f" with {self.config} ({self.why_config})"
        lines = [f"{self.implementation}: runs on {self.device.kind} ({self.device.platform}){tiles}"]
        return "\n".join(lines + [f"{name}: {reason}" for name, reason in self.why_not.items()])


def preference(implementation) -> tuple[str, ...]:
    """The names that `implementation=` allows, in order."""
    if implementation is None:
        return NAMES
    is_sequence = isinstance(implementation, Sequence) and not isinstance(implementation, str)
    names: tuple[Any, ...] = tuple(implementation) if is_sequence else (implementation,)
    if not names:
        raise ValueError(f"implementation must name at least one of {NAMES}, got an empty sequence.")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"implementation must be None, one of {NAMES} or a sequence of them, got {name!r}.")
    return names


def _why_not(backend: Backend, problem: Problem, device: Device) -> str | None:
    if not isinstance(problem.batch, int) and backend is not xla.BACKEND:
        return f"the batch must be a number, got {problem.batch}."
    return backend.why_not(problem, device)


def choose(problem: Problem, device: Device, implementation=None) -> tuple[Backend, Explanation]:
    """The first allowed backend that serves the problem on the device."""
    by_name = {backend.name: backend for backend in BACKENDS}
    reasons: dict[str, str] = {}
    chosen = None
    for name in preference(implementation):
        reason = _why_not(by_name[name], problem, device)
        if reason is None:
            chosen = by_name[name]
            break
        reasons[name] = reason
    if chosen is None:
        sentences = " ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(
            f"implementation={implementation!r} cannot serve this call. {sentences} implementation='xla' serves every call."
        )
    for name in NAMES:
        if name != chosen.name and name not in reasons:
            reasons[name] = _why_not(by_name[name], problem, device) or f"could run, but {chosen.name} comes first."
    return chosen, Explanation(chosen.name, *chosen.default_config(problem, device), device, reasons)
