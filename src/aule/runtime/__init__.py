"""Driver interfaces: one module per backend, each with the interface of `aule.runtime.base`."""
