"""Short queries: the query heads that share a key head become rows of one problem with fewer heads, so that they fill a tile together.

Row `i * group + g` of the packed problem is row `i` of head `g` of the group: intervals of successive rows stay in order.
"""

import dataclasses

import jax
import jax.numpy as jnp

from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS
from flash_jax.problem import Operands, Problem
from flash_jax.visibility import RowRule

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Grouped:
    """The `RowRule` of packed rows."""

    rule: RowRule
    group: int

    def __call__(self, rows: Array) -> tuple[Array, Array]:
        return self.rule(rows // self.group)

    @property
    def is_trivial(self) -> bool:
        return self.rule.is_trivial


def packs(problem: Problem) -> bool:
    """Whether heads are packed: where one head fills no more than a warpgroup, and the mask is not counted in rows by itself."""
    return problem.group > 1 and problem.q_len <= WARPGROUP_ROWS and not (problem.mask.block_sizes or problem.mask.functions)


def num_rows(problem: Problem) -> int:
    """Rows of a head, packed or not."""
    return problem.q_len * (problem.group if packs(problem) else 1)


def pack(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The same attention with `q_len * group` rows and `num_kv_heads` heads."""
    group, q_len, heads = problem.group, problem.q_len, problem.num_kv_heads

    def elements(x: Array | None) -> Array | None:
        """`[1 | batch, 1 | num_heads, 1 | q_len, ...]`."""
        if x is None or x.shape[1] == x.shape[2] == 1:
            return x
        if x.shape[1] == 1:
            return jnp.repeat(x, group, axis=2)
        x = jnp.broadcast_to(x, (*x.shape[:2], q_len, *x.shape[3:]))
        return x.reshape(x.shape[0], heads, group, *x.shape[2:]).swapaxes(2, 3).reshape(x.shape[0], heads, q_len * group, *x.shape[3:])

    def row_keys(x: Array | None) -> Array | None:
        """A row's key is its own, also where there is one row: `elements` would take that for one shared by all rows."""
        return jnp.repeat(x, group, axis=2) if x is not None and x.shape[1] == 1 else elements(x)

    rows = lambda x: None if x is None else jnp.repeat(x, group, axis=1)
    mask, bias = operands.mask, elements(operands.bias)
    packed = operands._replace(
        query=elements(operands.query.swapaxes(1, 2)).swapaxes(1, 2),
        bias=bias,
        dropout_row_keys=row_keys(operands.dropout_row_keys),
        mask=mask._replace(
            kv_lo=rows(mask.kv_lo), kv_hi=rows(mask.kv_hi), q_labels=rows(mask.q_labels), dense=tuple(elements(x) for x in mask.dense)
        ),
    )
    rule = problem.mask.rule
    spec = problem.mask._replace(rule=None if rule is None else _Grouped(rule, group))
    return dataclasses.replace(
        problem, q_len=q_len * group, num_heads=heads, mask=spec, bias_shape=None if bias is None else bias.shape
    ), packed


def unpack(problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
    """Results `[batch, q_len * group, num_kv_heads, ...]` of the packed problem as those of `problem`."""
    by_head = lambda x: x.reshape(problem.batch, problem.q_len, problem.group, problem.num_kv_heads, *x.shape[3:]).swapaxes(2, 3)
    return by_head(out).reshape(problem.out_shape), by_head(lse).reshape(problem.lse_shape)
