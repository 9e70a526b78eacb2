"""The row engine: kernels that read rows, reduce along them and write rows."""
