"""Combines partial results of query rows that were computed for different keys.

The keys of a row may be divided among subgroups, workgroups or CPU tasks. Each makes a partial result: O for its keys
with the row's maximum and sum of weights, or O divided by the sum with a log-sum-exp. They are combined

- `workgroup`: in shared memory, by the workgroup or by a cluster of workgroups;
- `partials`: in global memory, by the last workgroup to finish or by a second launch;
- `second_launch`: the kernel of that second launch;
- `pieces`: blocks of attention that are split to fill the device, by the last workgroup to finish;
- `cpu`: by the last task to finish, or by a second launch;
- `numpy_merge`: with NumPy.
"""
