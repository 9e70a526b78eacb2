"""Common parts of the row operations, in the order in which a call uses them.

* `problem`: RowProblem, the base of their problems; `checks`: checks of a call's arrays.
* `views`: arrays as kernels take them; `classes`: lengths that share a kernel.
* `hints` and `layout`: how rows are spread over the threads of a device.
* `kernel`: RowConfig and RowKernel, from which kernels over rows are built on `aule.tile.rows`.
* `column_sum`: the second launch of a gradient, which adds up the workgroups' partial sums of columns.
"""
