"""The simt engine: register-blocked products out of shared memory, for any GPU."""
