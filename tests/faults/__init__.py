"""Faults that lowtide must survive or refuse clearly: `python -m tests.faults`, or `make test-faults`."""
