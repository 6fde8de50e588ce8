"""Which tiles a kernel uses on which card: tables of what a search found, and the search.

    python -m flash_jax.tuning.search

tunes the card at hand and keeps the result in the user's own table, which goes before the tables of the package.
"""
