"""What the project takes from the inside of other libraries: a module for each library.

Everything that a library does not promise to keep is here: private names, hooks that are overridden, functions that
are replaced. The docstring of each says why it is needed. `tests/compat` has a contract test for each, which fails
with one sentence that says what moved. The rest of the project uses public names alone, which ruff (SLF001) and
`python -m bench.structure` check.
"""
