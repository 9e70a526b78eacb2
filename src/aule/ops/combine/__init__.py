"""Combines partial results of query rows that were computed for different keys.

The keys of a row may be divided among subgroups, workgroups or CPU tasks. Each makes a partial result: O for its keys
with the row's maximum and sum of weights, or O divided by the sum with a log-sum-exp. They are combined

- `workgroup`: in shared memory, by the workgroup or by a cluster of workgroups;
- `last_workgroup`: in global memory, by the last workgroup to finish;
- `pieces`: the same for blocks of attention that are split to fill the device;
- `second_launch`: in global memory, by a second launch;
- `cpu`: by the last task to finish, or by a second launch;
- `numpy_merge`: with NumPy.

`partials` combines partial results in global memory; `finish` ends a row.
"""
