"""Routes: how calls are computed on each kind of device."""
