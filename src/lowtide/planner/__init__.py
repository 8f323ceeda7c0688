"""Predicts what a run will take, and chooses the settings that fit.

`estimate` runs a trainer's own step on tensors without memory (`tracing`), replays its births and deaths through a
model of the device's allocator (`allocators`), and spreads it over devices by formulas (`sharding`). `search` looks
among `choices` for the fastest that fit, and `plan` says what was found; `budget` does so for `memory_budget`.
`profiling` measures a real run and shows it beside its estimate.
"""
