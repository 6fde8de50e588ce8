"""Benchmarks that compare: checked before they are timed, interleaved, with their spread.

    python -m flash_jax.bench quick
    python -m flash_jax.bench compare old.json new.json

`rows` says what is run, `sides` by which implementations, `accuracy` which results have a speed at all, `timing` how time is taken,
`measure` puts these together, `turns` divides them over processes, `progress` says how long the rest takes, `report` writes and
compares results.
"""
