"""Functions of scores that users write: ``score_mod(score, b, h, q, kv)`` and ``mask_mod(b, h, q, kv)``.

- `program`: a traced function as a small typed program, and the `Graph` that front ends trace into.
- `trace`: a function is called with symbols. `symbols` record what is done to them, `operations` and `arrays` know how.
- `emit`: the program inside a kernel.
- `evaluate`: the program on NumPy arrays.
- `differentiate`: the program of its derivatives.
"""
