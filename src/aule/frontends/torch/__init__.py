"""The front end for PyTorch tensors. Imported only if torch is already loaded.

A call goes through these files in order:

1. `entry`, `kvcache` and `sdpa` take calls. `repeated` launches calls like an earlier one at once.
2. `autograd` takes calls that need gradients, `compile` those that PyTorch traces or transforms, as operators. `passes`
   has the forward and backward passes that both compute.
3. `attention`, `varlen`, `decode` and `row_ops` make a `calls.Call` of the arguments: its problem, views and outputs.
4. `route` chooses the route of the call's first tensor. `devices` has a route per kind of device: it plans the call,
   once per signature, and launches it.

All use `views` (memory of tensors), `checks` (arguments), `modes` (PyTorch's state) and `seeds` (of dropout).
"""
