"""What the forward kernel is fed: its configuration, padded operands, the schedule as a table, and the mask on what schedules leave."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import schedule, softmax
from flash_jax.backends.base import Device
from flash_jax.backends.hopper import blocks, forward, functions, packing, work
from flash_jax.backends.hopper.forward_tile import UNSEEN, Bounds, Config, Inputs, Masked, Tile
from flash_jax.backends.hopper.host import BOUNDS, ROW_TILE, notes, pad, static_bounds, tile_kinds, unseen_tiles
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS
from flash_jax.logits import base_2
from flash_jax.problem import Operands, Problem
from flash_jax.softmax import LOG2E
from flash_jax.tuning.table import Key, lookup
from flash_jax.visibility import row_bounds

Array = jax.Array

MULTIPROCESSORS = 132  # of H100 SXM and H200: blocks of the persistent grid; on a card with fewer, some run after others
_HEAD_DIMS = (64, 128, 192, 256)
# From 0.12 on, JAX compiles through a linker that ignores setmaxnreg: there only tiles that fit 168 registers (128 with three
# compute warpgroups) do not spill.
_LINKER_IGNORES_REGISTERS = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


def head_dims(problem: Problem) -> tuple[int, int]:
    """head_dim and v_head_dim as the kernel has them."""
    fit = lambda n: next(d for d in _HEAD_DIMS if n <= d)
    v_head_dim = fit(problem.v_head_dim)
    head_dim = max(fit(problem.head_dim), v_head_dim)
    return head_dim, 256 if head_dim == 256 else v_head_dim


def default_config(problem: Problem, device: Device) -> tuple[Config, str]:
    """What `tuning.search` found on this kind of card (`tuning/tables` names the results), else tiles that live in the registers; and why.

    Short queries have tiles of their own, and so have mask functions, which want registers.
    """
    head_dim, v_head_dim = head_dims(problem)
    if packing.num_rows(problem) <= WARPGROUP_ROWS:  # what counts is how many bytes are in flight
        block_kv, stages = {64: (128, 4), 128: (64, 5), 192: (64, 3), 256: (32, 4)}[head_dim]
        return Config(1, block_kv, stages, take_turns=False, v_swizzle=min(128, 2 * block_kv)), "for a group of at most 64 rows"
    functions = bool(problem.mask.functions)
    found = None if functions else lookup(device.kind, Key("hopper forward", head_dim, v_head_dim))
    choices = [] if found is None else [(Config(**found[0]), f"measured on {device.kind}: {found[1]}")]
    if functions:
        why = "what fits the registers that a mask function leaves"
    elif found is not None:
        why = f"those measured on {device.kind} do not suit this mask: {found[1]}"
    elif _LINKER_IGNORES_REGISTERS:
        why = f"no spills where JAX {jax.__version__} ignores setmaxnreg"
    else:
        why = f"not measured on {device.kind} for these head dims; python -m flash_jax.tuning.search does it"
    choices += [(config, why) for config in _untuned(head_dim, v_head_dim, functions)]
    return next(choice for choice in choices if _suits(choice[0], problem))


def _untuned(head_dim: int, v_head_dim: int, wants_registers: bool) -> list[Config]:
    """In order of preference."""
    few_registers = wants_registers or _LINKER_IGNORES_REGISTERS
    if head_dim == 64:
        return [Config(3, 64 if few_registers else 128), Config(2, 128, stages=3)]
    if head_dim == 128:
        return [Config(2, 64, stages=4) if few_registers else Config(2, 128)]
    if head_dim == 192:
        return [Config(2, 64) if few_registers or v_head_dim > 128 else Config(2, 96, v_swizzle=64)]
    return [Config(2, 32 if few_registers else 64, separate_out=False, take_turns=False, v_swizzle=64 if few_registers else 128)]


def _suits(config: Config, problem: Problem) -> bool:
    """Whether the tiles fit the mask.

    Labels spill with three compute warpgroups. Block maps want whole words of keys, and 192 rows only if blocks are as high: lower ones
    would share a tile.
    """
    sizes = problem.mask.block_sizes
    if problem.mask.has_labels and config.warpgroups == 3:
        return False
    return not sizes or (
        config.block_kv % blocks.WORD == 0 and (config.warpgroups < 3 or all(rows % config.block_q == 0 for rows, _ in sizes))
    )


def _cut_blocks(problem: Problem, config: Config) -> list[int]:
    """Numbers of the block maps whose blocks are not whole tiles."""
    cut = lambda sizes: sizes[0] % config.block_q != 0 or sizes[1] % config.block_kv != 0
    return [n for n, sizes in enumerate(problem.mask.block_sizes) if cut(sizes)]


def declines(problem: Problem) -> str | None:
    """The first reason why the forward cannot serve a problem, or None."""
    if problem.dtype.name not in ("bfloat16", "float16"):
        return f"query, key and value must be bfloat16 or float16, got {problem.dtype.name}."
    if max(problem.head_dim, problem.v_head_dim) > _HEAD_DIMS[-1]:
        return f"head_dim and v_head_dim must be at most {_HEAD_DIMS[-1]}, got {problem.head_dim} and {problem.v_head_dim}."
    if problem.block_sizes is not None:
        return f"block_sizes: the tiles are fixed by head_dim, got {problem.block_sizes}."
    for function in problem.mask.functions:
        reason = functions.why_not(function)
        if reason is not None:
            return reason
    return None


def out_and_lse(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `backends.base.Backend.forward`."""
    asked = problem
    if packing.packs(asked):
        problem, operands = packing.pack(asked, operands)
    problem, operands = functions.hoist(problem, operands)
    num_q_tiles = schedule.num_tiles(problem.q_len, config.block_q)
    num_kv_tiles = schedule.num_tiles(problem.kv_len, config.block_kv)
    divides = num_q_tiles == 1 and forward.can_divide_keys(config, *head_dims(problem), problem.mask.has_labels)
    parts = work.splits(problem.batch * problem.num_heads, num_kv_tiles, MULTIPROCESSORS) if divides else 1
    out, lse = forward.out_and_lse(problem, config, *_inputs(problem, config, operands, parts), parts)
    out, lse = out[:, : problem.q_len, :, : problem.v_head_dim], lse[:, :, : problem.q_len].transpose(0, 2, 1)
    if parts > 1:
        out, lse = _merge(*(x.reshape(parts, problem.batch, *x.shape[1:]) for x in (out, lse)))
        out = out.astype(problem.dtype)
    return packing.unpack(asked, out, lse) if packing.packs(asked) else (out, lse)


def _merge(out: Array, lse: Array) -> tuple[Array, Array]:
    """The results over all keys from those of each part, `[parts, ...]`.

    In natural units, whose differences alone are brought to base 2: of a product and a difference XLA may make one operation, which gives
    NaN at an lse of 1e10.
    """
    m = lse.max(0)
    weight = softmax.probs(lse, softmax.pivot(m), lambda row: row, LOG2E)
    return softmax.finish(base_2(m), weight.sum(0), (weight[..., None] * out).sum(0))


def _inputs(problem: Problem, config: Config, operands: Operands, parts: int) -> tuple[Inputs, Masked]:
    mask, (head_dim, v_head_dim) = operands.mask, head_dims(problem)
    block_q, block_kv = config.block_q, config.block_kv
    q_pad = schedule.num_tiles(problem.q_len, block_q) * block_q
    kv_pad = schedule.num_tiles(problem.kv_len, block_kv) * block_kv
    wide = lambda x, dim: pad(x, {1: -(-x.shape[1] // ROW_TILE) * ROW_TILE, 3: dim})
    elements = lambda x: pad(x, {axis: size for axis, size in ((2, q_pad), (3, kv_pad)) if x.shape[axis] != 1})

    unseen = unseen_tiles(problem, operands, block_kv)
    table, counts, masked, lists = _schedule(problem, config, operands, parts, clears=unseen is not None)
    inputs = Inputs(
        query=wide(operands.query, head_dim),
        key=wide(operands.key, head_dim),
        value=wide(operands.value, v_head_dim),
        table=table,
        counts=counts,
        scale=operands.scale,
        lists=lists,
        notes=None if unseen is None else _notes(problem, config, operands, unseen),
        bias=None if operands.bias is None else elements(operands.bias),
        row_keys=None if operands.dropout_row_keys is None else pad(operands.dropout_row_keys, {2: q_pad}),
    )
    if masked.first is None:
        return inputs, masked
    static = static_bounds(problem)
    kv_lo, kv_hi = static or row_bounds(problem.mask, mask, problem.q_len)  # a constant where it can be: no kernel that fills it
    has_lo = static is None or bool((static[0] > 0).any())
    has_hi = kv_pad != problem.kv_len or static is None or bool((static[1] < problem.kv_len).any())
    has_hi = has_hi or (masked.clears and q_pad != problem.q_len)  # rows past the end must see nothing: their weights would count
    return inputs._replace(
        kv_lo=pad(kv_lo, {1: q_pad}) if has_lo else None,
        kv_hi=pad(kv_hi, {1: q_pad}) if has_hi else None,
        q_labels=None if mask.q_labels is None else pad(mask.q_labels, {1: q_pad}),
        kv_labels=None if mask.kv_labels is None else pad(mask.kv_labels, {1: kv_pad}),
        dense=tuple(elements(x.astype(jnp.int8)) for x in mask.dense),
        functions=tuple(
            functions.as_words(function, arrays, {"query": q_pad, "key": kv_pad})
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        batch_ids=mask.batch_ids,
        blocks={n: blocks.as_bits(mask.blocks[n], problem.mask.block_sizes[n][1], kv_pad) for n in _cut_blocks(problem, config)},
    ), masked


def _schedule(problem: Problem, config: Config, operands: Operands, parts: int, clears: bool) -> tuple[Array, Array, Masked, Array | None]:
    """The table, the number of tiles of each multiprocessor, what is masked, and lists where the visible key tiles are no range."""
    steps, cost, masked, lists = _steps(problem, config, operands, parts, clears)
    steps = _each(lambda x: x[:, None] if x.ndim == 2 else x, steps)
    if parts > 1:
        steps, cost = _split(steps, parts, 1 if lists is not None else -1), None
    table, counts = _deal(problem, steps, steps.steps if cost is None else cost, parts)
    return table, counts, masked, lists


def _steps(
    problem: Problem, config: Config, operands: Operands, parts: int, clears: bool
) -> tuple[Tile, Array | None, Masked, Array | None]:
    """What each tile of rows visits, what that costs if not the number of steps, what is masked, and lists."""
    block_q, block_kv, static = config.block_q, config.block_kv, static_bounds(problem)
    if problem.mask.is_interval and static is not None:
        ranges = schedule.interval_ranges(*static, block_q, block_kv)
        masks_tail = problem.kv_len % block_kv != 0
        if masks_tail or not problem.mask.hides_nothing:
            masked = _masked_steps(ranges, parts, clears)
        else:
            masked = Masked(None, None, None, False, clears)
        return _steps_of_ranges(ranges), None, masked, None
    if problem.mask.is_interval:
        ranges = schedule.interval_ranges(*row_bounds(problem.mask, operands.mask, problem.q_len), block_q, block_kv)
        return _steps_of_ranges(ranges), None, Masked(Bounds(), Bounds(), Bounds(), parts > 1, clears), None
    kinds = tile_kinds(problem, operands, block_q, block_kv)
    if problem.mask.has_patterns:
        found = schedule.tile_lists(kinds)
        zero = jnp.zeros_like(found.end)
        steps = Tile(jnp.maximum(found.end, 1), zero, zero, found.full_end, (found.end > 0).astype(jnp.int32))
        return steps, None, Masked(Bounds(), None, Bounds(), True, clears), found.index
    # Labels are mostly sorted: the hull of the visible tiles hardly holds others, and needs no list.
    ranges, cost = schedule.ranges_of_kinds(kinds)
    return _steps_of_ranges(ranges), cost, Masked(Bounds(), Bounds(), Bounds(), parts > 1, clears), None


def _deal(problem: Problem, steps: Tile, cost: np.ndarray | Array, parts: int) -> tuple[Array, Array]:
    """The table, and the number of tiles of each multiprocessor."""
    if isinstance(steps.steps, np.ndarray):
        bytes_per_head = problem.kv_len * sum(head_dims(problem)) * 2 // problem.group
        tiles = work.deal(steps.steps[0, 0], problem.batch, problem.num_heads, bytes_per_head, MULTIPROCESSORS)
        b, head, tile = np.moveaxis(tiles, 2, 0)
        counts = (b >= 0).sum(1, dtype=np.int32)
    else:
        b, head, tile, counts = work.deal_by_data(cost, problem.batch, problem.num_heads, MULTIPROCESSORS)
    steps = _each(lambda x: x[b if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0, tile], steps)
    # Not before: the pieces of a split list count from 0.
    after_first = {name: getattr(steps, name).clip(1) for name in ("full_begin", "full_end")}
    entry = steps._replace(**after_first, b=b, head=head, q_tile=tile // parts, out=tile % parts * problem.batch + b)
    table = np.stack(entry) if isinstance(tile, np.ndarray) else jnp.stack([jnp.asarray(x, jnp.int32) for x in entry])
    return jnp.asarray(table, jnp.int32), jnp.asarray(counts)


def _masked_steps(ranges: schedule.Ranges, parts: int, clears: bool) -> Masked:
    """Of ranges known before tracing: a key tile from `full_begin` on starts where every row does, or later, and needs no lower bound."""
    begin, full_begin, full_end, end = ranges
    before, after = end - full_end, full_begin - begin
    sides = (
        Bounds(lo=bool((after == end - begin).any()), hi=True),
        Bounds(lo=False),
        Bounds(hi=bool((after > 0)[full_begin == full_end].any())),
    )
    if clears or parts > 1:  # rows past the end must see nothing; a part begins anywhere
        sides = (Bounds(),) * 3
    occurs = True, bool((before > 1).any()), bool((after > 0).any())
    return Masked(*(side if some else None for side, some in zip(sides, occurs, strict=True)), parts > 1, clears)


def _notes(problem: Problem, config: Config, operands: Operands, unseen: np.ndarray | Array) -> Array:
    """`Inputs.notes`; unseen: `host.unseen_tiles`. Where V is cleared, bounds are what keeps rows past the end from seeing a key."""
    unseen = jnp.asarray(unseen, jnp.int8)[:, None]
    if not problem.mask.has_labels:
        return unseen * UNSEEN
    return unseen * (UNSEEN | BOUNDS) | notes(problem, operands, config.block_q, config.block_kv)


def _each(function: Callable, tiles: Tile) -> Tile:
    """Of what tiles visit, arrays `[1 | batch, 1 | num_heads, tiles]`, each."""
    return Tile(*(None if x is None else function(x) for x in tiles))


def _steps_of_ranges(ranges: schedule.Ranges) -> Tile:
    """Key tiles from last to first; at least one step."""
    xp = schedule.numpy_or_jax(ranges.end)
    begin, full_begin, full_end, end = ranges
    end = xp.maximum(end, 1)
    begin = xp.minimum(begin, end - 1)
    return Tile(end - begin, end - 1, end - full_end, end - full_begin, (ranges.end > 0).astype(np.int32))


def _split(steps: Tile, parts: int, direction: int) -> Tile:
    """The steps of each tile in `parts` pieces, one after the other, each a tile of its own; one without any takes a step that is hidden.

    direction: 1 where `first` counts up from step to step, -1 where it counts down.
    """
    xp = schedule.numpy_or_jax(steps.steps)
    every = steps.steps[..., None]
    length = -(-every // parts)
    start = np.arange(parts, dtype=np.int32) * length
    left = every - start
    start = xp.minimum(start, every - 1)
    here = xp.clip(left, 1, length)
    within = lambda bound: xp.clip(bound[..., None] - start, 0, here)
    pieces = Tile(
        here,
        steps.first[..., None] + direction * start,
        within(steps.full_begin),
        within(steps.full_end),
        steps.visible[..., None] * (left > 0).astype(np.int32),
    )
    return _each(lambda x: x.reshape(*x.shape[:-2], -1), pieces)
