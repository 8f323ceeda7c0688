"""Small changes of the source that the fast tests must notice: `python -m bench.mutants`, or `make mutants`."""
