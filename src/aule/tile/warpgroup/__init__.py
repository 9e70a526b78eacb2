"""The warpgroup engine: asynchronous products by four subgroups together."""
