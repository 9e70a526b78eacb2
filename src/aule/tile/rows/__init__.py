"""The row engine: kernels that read rows, reduce along them and write rows.

* `shape`: RowShape and PassShape, how rows and columns are spread over threads.
* `engine`: Rows, the rows of a workgroup, on `reductions` over the threads of a row (`cluster_exchange` in clusters).
* `passes`: Passes, loops over the columns of a row; `parts`: what a kernel sees there; `pairs`: columns to be rotated.
* `prefetch`: interface of prefetching the next rows; `prefetch_registers`, `prefetch_shared`: where they wait.
* `column_sums`: sums of columns over rows, for gradients of weights.
"""
